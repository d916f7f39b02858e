//! Which token comes next?
//!
//! Order of the filters, as vLLM has it: the grammar's mask and the tokens that may not come yet,
//! logit bias, penalties; then temperature, min-p, top-k, and top-p over what these left. The
//! random number of a position is a hash of seed and position, not a stream: a sequence draws the
//! same tokens whatever else is in the batch, and also after it was preempted and resumed. Ties go
//! to the lower token id, so that nothing depends on the order of a partial sort.

mod adjust;
mod logprobs;

pub use adjust::Counts;
pub use logprobs::TokenLogprobs;

/// How one request samples.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 takes the most likely token.
    pub temperature: f32,
    /// Only the k most likely tokens; none for all.
    pub top_k: Option<usize>,
    /// Only the most likely tokens that together reach this probability; 1 for all.
    pub top_p: f32,
    /// Only tokens at least this times as likely as the most likely one; 0 for all.
    pub min_p: f32,
    /// Two requests with equal seed and prompt draw equal tokens.
    pub seed: u64,
    /// Taken off the logit of every token that the answer has already.
    pub presence_penalty: f32,
    /// Taken off the logit of a token for each time that the answer has it already.
    pub frequency_penalty: f32,
    /// Divides positive logits of tokens that prompt or answer have already, and multiplies
    /// negative ones; 1 for none.
    pub repetition_penalty: f32,
    /// Added to these tokens' logits; every id is below the vocabulary's size.
    pub logit_bias: Vec<(u32, f32)>,
}

impl Sampling {
    /// The most likely token, always.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_k: None,
        top_p: 1.0,
        min_p: 0.0,
        seed: 0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        repetition_penalty: 1.0,
        logit_bias: Vec::new(),
    };

    /// Whether tokens that came before count.
    pub fn has_penalties(&self) -> bool {
        self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
            || self.repetition_penalty != 1.0
    }
}

/// Where in which answer a token is to be picked.
#[derive(Clone, Copy, Debug)]
pub struct At<'a> {
    /// Tokens before this one, prompt and answer together.
    pub position: u64,
    /// Which of them occur how often.
    pub counts: &'a Counts,
    /// The tokens that a grammar allows, bit `id % 32` of word `id / 32`; ids past its end are not
    /// allowed. None where no grammar speaks.
    pub mask: Option<&'a [u32]>,
    /// Tokens that may not come yet.
    pub banned: &'a [u32],
    /// How many of the most likely tokens to report beside the picked one; none for no report.
    pub logprobs: Option<usize>,
}

impl<'a> At<'a> {
    /// A place where nothing but the logits matters.
    pub fn plain(position: u64, counts: &'a Counts) -> Self {
        Self {
            position,
            counts,
            mask: None,
            banned: &[],
            logprobs: None,
        }
    }

    fn is_plain(&self, how: &Sampling) -> bool {
        self.mask.is_none()
            && self.banned.is_empty()
            && how.logit_bias.is_empty()
            && !how.has_penalties()
    }
}

/// A token, and how likely the model thought it.
#[derive(Clone, Debug, PartialEq)]
pub struct Picked {
    /// The token.
    pub token: u32,
    /// Its logarithms of probability, where asked for: of the model's own distribution, before
    /// anything that a request changes about it.
    pub logprobs: Option<TokenLogprobs>,
}

/// Temperatures below this are taken as 0: dividing by less overflows f32 for ordinary logits.
const TEMPERATURE_MIN: f32 = 1e-5;

/// The model gave a NaN, or left no token that may come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the model gave logits that are not numbers, or none for any token that may come")]
pub struct NotANumber;

/// Draws tokens; keeps its buffers between calls.
#[derive(Debug, Default)]
pub struct Sampler {
    candidates: Vec<Candidate>,
    /// A row changed by bias, penalties and mask.
    adjusted: Vec<f32>,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    logit: f32,
    id: u32,
    weight: f64,
}

impl Sampler {
    /// The next token of a sequence, from its row of logits.
    pub fn pick(&mut self, row: &[f32], how: &Sampling, at: &At<'_>) -> Result<Picked, NotANumber> {
        let most_likely = best(row)?;
        let token = if at.is_plain(how) {
            self.draw_from(row, most_likely, how, at.position)
        } else {
            let mut adjusted = std::mem::take(&mut self.adjusted);
            adjust::adjust(row, how, at, &mut adjusted);
            let token = best(&adjusted)
                .map(|most_likely| self.draw_from(&adjusted, most_likely, how, at.position));
            self.adjusted = adjusted;
            token?
        };
        let logprobs = at
            .logprobs
            .map(|top| TokenLogprobs::of(row, most_likely.1, token, top));
        Ok(Picked { token, logprobs })
    }

    /// What a token that was not sampled (a grammar forced it) would be reported as.
    pub fn report(row: &[f32], token: u32, top: usize) -> Result<TokenLogprobs, NotANumber> {
        let (_, max) = best(row)?;
        Ok(TokenLogprobs::of(row, max, token, top))
    }

    fn draw_from(
        &mut self,
        row: &[f32],
        most_likely: (u32, f32),
        how: &Sampling,
        position: u64,
    ) -> u32 {
        if how.temperature < TEMPERATURE_MIN || how.top_k == Some(1) {
            return most_likely.0;
        }
        self.weigh(row, most_likely.1, how);
        if let Some(keep) = how.top_k.filter(|k| *k < self.candidates.len()) {
            self.sort_leading(keep);
            self.candidates.truncate(keep);
        }
        if how.top_p < 1.0 {
            self.keep_top_p(f64::from(how.top_p));
        }
        self.draw(uniform(how.seed, position))
    }

    /// Makes every token that can come a candidate. The most likely one has weight 1, so that
    /// min-p is a bound on weights.
    fn weigh(&mut self, row: &[f32], max: f32, how: &Sampling) {
        let scale = 1.0 / how.temperature;
        let least = f64::from(how.min_p);
        let weighed = (0_u32..).zip(row).filter_map(|(id, logit)| {
            if *logit == f32::NEG_INFINITY {
                return None;
            }
            // f32 `exp` is enough: its error is far below the sampling noise of any request.
            let weight = f64::from(((logit - max) * scale).exp());
            (weight >= least).then_some(Candidate {
                logit: *logit,
                id,
                weight,
            })
        });
        self.candidates.clear();
        self.candidates.extend(weighed);
    }

    /// Brings the `count` most likely candidates to the front, in order.
    fn sort_leading(&mut self, count: usize) {
        if count < self.candidates.len() {
            self.candidates.select_nth_unstable_by(count, order);
        }
        self.candidates[..count].sort_unstable_by(order);
    }

    /// Keeps the shortest prefix, by likelihood, that reaches `top_p` of the remaining weight.
    /// Sorting the whole vocabulary takes milliseconds, so a growing part of it is tried.
    fn keep_top_p(&mut self, top_p: f64) {
        let total: f64 = self
            .candidates
            .iter()
            .map(|candidate| candidate.weight)
            .sum();
        let wanted = top_p * total;
        let mut sorted = self.candidates.len().min(64);
        loop {
            self.sort_leading(sorted);
            let mut sum = 0.0;
            let reached = self.candidates[..sorted].iter().position(|candidate| {
                sum += candidate.weight;
                sum >= wanted
            });
            if let Some(last) = reached {
                return self.candidates.truncate(last + 1);
            }
            if sorted == self.candidates.len() {
                return;
            }
            sorted = (sorted * 8).min(self.candidates.len());
        }
    }

    fn draw(&self, uniform: f64) -> u32 {
        let total: f64 = self
            .candidates
            .iter()
            .map(|candidate| candidate.weight)
            .sum();
        let mut left = uniform * total;
        for candidate in &self.candidates {
            left -= candidate.weight;
            if left < 0.0 {
                return candidate.id;
            }
        }
        // Rounding can leave a crumb; the last candidate with weight takes it.
        let weighted = self
            .candidates
            .iter()
            .rev()
            .find(|candidate| candidate.weight > 0.0);
        weighted.expect("the most likely token has weight 1").id
    }
}

/// More likely first, then the lower id.
fn order(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
}

fn best(logits: &[f32]) -> Result<(u32, f32), NotANumber> {
    /// Wide enough for any vector register: the loops below have no branch, so that they can be
    /// vectorised. A row is searched once, and once more beside a grammar.
    const LANES: usize = 32;
    let (chunks, rest) = logits.as_chunks::<LANES>();
    let mut tops = [f32::NEG_INFINITY; LANES];
    let mut nans = [0_u32; LANES];
    for chunk in chunks {
        for lane in 0..LANES {
            let logit = chunk[lane];
            tops[lane] = if logit > tops[lane] {
                logit
            } else {
                tops[lane]
            };
            nans[lane] |= u32::from(logit.is_nan());
        }
    }
    let max = tops
        .iter()
        .chain(rest)
        .copied()
        .fold(f32::NEG_INFINITY, f32::max);
    let numbers = nans.iter().all(|nan| *nan == 0) && !rest.iter().any(|logit| logit.is_nan());
    if !numbers || !max.is_finite() {
        return Err(NotANumber);
    }
    let holds = |chunk: &[f32; LANES]| chunk.iter().fold(false, |any, logit| any | (*logit == max));
    let before = chunks.iter().position(holds).unwrap_or(chunks.len()) * LANES;
    let within = logits[before..].iter().position(|logit| *logit == max);
    let id = before + within.ok_or(NotANumber)?;
    Ok((u32::try_from(id).map_err(|_| NotANumber)?, max))
}

/// A number in [0, 1) from seed and position: SplitMix64's finaliser over both.
fn uniform(seed: u64, position: u64) -> f64 {
    let mut x = seed ^ position.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for multiplier in [0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb] {
        x = (x ^ (x >> 30)).wrapping_mul(multiplier);
        x ^= x >> 27;
    }
    (x >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests;
