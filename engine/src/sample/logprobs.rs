//! How likely did the model think this token, and what else?

/// Logarithms of probability of one place in an answer, in the model's own distribution.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Of the token that was picked.
    pub chosen: f32,
    /// The most likely tokens, the likeliest first; ties by the lower id.
    pub top: Vec<(u32, f32)>,
}

impl TokenLogprobs {
    /// Of `token` and of the `top` likeliest; `max` is the largest of the row.
    pub(super) fn of(row: &[f32], max: f32, token: u32, top: usize) -> Self {
        let sum: f64 = row.iter().map(|logit| f64::from((logit - max).exp())).sum();
        let norm = f64::from(max) + sum.ln();
        let logprob = |logit: f32| (f64::from(logit) - norm) as f32;
        let top = likeliest(row, top);
        Self {
            chosen: row
                .get(token as usize)
                .map_or(f32::NEG_INFINITY, |logit| logprob(*logit)),
            top: top
                .into_iter()
                .map(|id| (id, logprob(row[id as usize])))
                .collect(),
        }
    }
}

/// The ids of the `count` largest logits, in order. `count` is small, so one pass with a short
/// sorted list beats sorting the vocabulary.
fn likeliest(row: &[f32], count: usize) -> Vec<u32> {
    let mut best: Vec<u32> = Vec::with_capacity(count + 1);
    for (id, logit) in (0_u32..).zip(row) {
        let full = best.len() == count;
        if full && best.last().is_none_or(|last| *logit <= row[*last as usize]) {
            continue;
        }
        let place = best.partition_point(|other| row[*other as usize] >= *logit);
        best.insert(place, id);
        best.truncate(count);
    }
    best
}
