//! What do a request's bias, its penalties and its grammar make of a row of logits?
//!
//! Penalties as vLLM defines them: repetition looks at prompt and answer, presence and frequency
//! at the answer alone. How often tokens occurred is counted as they come ([`Counts`]), so a step
//! costs time in proportion to the distinct tokens of a request and not to its length.

use std::collections::HashMap;

use super::{At, Sampling};

/// How often the tokens of one request occur; empty for a request without penalties.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    counting: bool,
    /// Times in the answer; 0 for tokens of the prompt alone.
    seen: HashMap<u32, u32>,
}

impl Counts {
    /// The counts of a request that begins.
    pub fn new(how: &Sampling, prompt: &[u32]) -> Self {
        let counting = how.has_penalties();
        let mut seen = HashMap::new();
        if how.repetition_penalty != 1.0 {
            seen.extend(prompt.iter().map(|token| (*token, 0)));
        }
        Self { counting, seen }
    }

    /// Counts a token of the answer.
    pub fn push(&mut self, token: u32) {
        if self.counting {
            *self.seen.entry(token).or_insert(0) += 1;
        }
    }
}

/// Writes the changed row to `out`; tokens that may not come become −∞.
pub(super) fn adjust(row: &[f32], how: &Sampling, at: &At<'_>, out: &mut Vec<f32>) {
    out.clear();
    match at.mask {
        None => out.extend_from_slice(row),
        Some(mask) => masked(row, mask, out),
    }
    for token in at.banned {
        if let Some(logit) = out.get_mut(*token as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
    for (token, bias) in &how.logit_bias {
        if let Some(logit) = out.get_mut(*token as usize) {
            *logit += bias;
        }
    }
    if how.has_penalties() {
        for (token, count) in &at.counts.seen {
            if let Some(logit) = out.get_mut(*token as usize) {
                *logit = penalised(*logit, how, *count);
            }
        }
    }
}

fn masked(row: &[f32], mask: &[u32], out: &mut Vec<f32>) {
    out.resize(row.len(), f32::NEG_INFINITY);
    let words = mask.iter().zip(row.chunks(32).zip(out.chunks_mut(32)));
    for (word, (row, out)) in words {
        // Where a grammar allows one text it allows nearly none of the tokens, and where it allows
        // any it allows nearly all: few words have many bits of both kinds.
        let (allowed, mut left) = if word.count_ones() > 16 {
            out.copy_from_slice(row);
            (false, !*word)
        } else {
            (true, *word)
        };
        while left != 0 {
            let at = left.trailing_zeros() as usize;
            left &= left - 1;
            if let (Some(logit), Some(out)) = (row.get(at), out.get_mut(at)) {
                *out = if allowed { *logit } else { f32::NEG_INFINITY };
            }
        }
    }
}

fn penalised(logit: f32, how: &Sampling, count: u32) -> f32 {
    let repeated = if logit > 0.0 {
        logit / how.repetition_penalty
    } else {
        logit * how.repetition_penalty
    };
    let presence = if count > 0 { how.presence_penalty } else { 0.0 };
    repeated - how.frequency_penalty * count as f32 - presence
}
