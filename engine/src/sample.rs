//! Which token comes next?
//!
//! Order of the filters, as vLLM has it: temperature, top-k, then top-p over what top-k left. The
//! random number of a position is a hash of seed and position, not a stream: a sequence draws the
//! same tokens whatever else is in the batch, and also after it was preempted and resumed. Ties go
//! to the lower token id, so that nothing depends on the order of a partial sort.

/// How one request samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 takes the most likely token.
    pub temperature: f32,
    /// Only the k most likely tokens; none for all.
    pub top_k: Option<usize>,
    /// Only the most likely tokens that together reach this probability; 1 for all.
    pub top_p: f32,
    /// Two requests with equal seed and prompt draw equal tokens.
    pub seed: u64,
}

impl Sampling {
    /// The most likely token, always.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_k: None,
        top_p: 1.0,
        seed: 0,
    };
}

/// Temperatures below this are taken as 0: dividing by less overflows f32 for ordinary logits.
const TEMPERATURE_MIN: f32 = 1e-5;

/// The model gave a NaN, or no finite logit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the model gave logits that are not numbers")]
pub struct NotANumber;

/// Draws tokens; keeps its buffers between calls.
#[derive(Debug, Default)]
pub struct Sampler {
    candidates: Vec<Candidate>,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    logit: f32,
    id: u32,
    weight: f64,
}

impl Sampler {
    /// The token at `position` of a sequence, from its row of logits.
    pub fn sample(
        &mut self,
        logits: &[f32],
        sampling: &Sampling,
        position: u64,
    ) -> Result<u32, NotANumber> {
        let best = best(logits)?;
        if sampling.temperature < TEMPERATURE_MIN || sampling.top_k == Some(1) {
            return Ok(best.0);
        }
        self.weigh(logits, best.1, sampling.temperature);
        let keep = sampling.top_k.map_or(logits.len(), |k| k.min(logits.len()));
        if keep < logits.len() {
            self.sort_leading(keep);
            self.candidates.truncate(keep);
        }
        if sampling.top_p < 1.0 {
            self.keep_top_p(f64::from(sampling.top_p));
        }
        Ok(self.draw(uniform(sampling.seed, position)))
    }

    fn weigh(&mut self, logits: &[f32], max: f32, temperature: f32) {
        let scale = 1.0 / temperature;
        let weighed = (0_u32..).zip(logits).map(|(id, logit)| {
            // f32 `exp` is enough: its error is far below the sampling noise of any request.
            Candidate {
                logit: *logit,
                id,
                weight: f64::from(((logit - max) * scale).exp()),
            }
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
    let mut best = (0, f32::NEG_INFINITY);
    for (id, logit) in (0_u32..).zip(logits) {
        if logit.is_nan() {
            return Err(NotANumber);
        }
        if *logit > best.1 {
            best = (id, *logit);
        }
    }
    if best.1.is_finite() {
        Ok(best)
    } else {
        Err(NotANumber)
    }
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
mod tests {
    //! Catches a filter that keeps too much or too little, an order that depends on a partial
    //! sort, a draw that is not a function of seed and position, and NaN taken for a number.
    use super::*;

    /// The obvious twin: sort everything, cut, draw.
    fn slow(logits: &[f32], sampling: &Sampling, position: u64) -> u32 {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let scale = 1.0 / sampling.temperature;
        let weight = |logit: f32| f64::from(((logit - max) * scale).exp());
        let mut all: Vec<_> = (0_u32..)
            .zip(logits)
            .map(|(id, logit)| (id, *logit, weight(*logit)))
            .collect();
        let ranked = sampling.top_k.is_some() || sampling.top_p < 1.0;
        if ranked {
            all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        }
        all.truncate(sampling.top_k.unwrap_or(all.len()));
        if sampling.top_p < 1.0 {
            let total: f64 = all.iter().map(|c| c.2).sum();
            let mut sum = 0.0;
            let keep = all.iter().take_while(|c| {
                let before = sum;
                sum += c.2;
                before < f64::from(sampling.top_p) * total
            });
            all.truncate(keep.count());
        }
        let mut left = uniform(sampling.seed, position) * all.iter().map(|c| c.2).sum::<f64>();
        let drawn = all.iter().find(|c| {
            left -= c.2;
            left < 0.0
        });
        drawn.or(all.last()).expect("there is a token").0
    }

    fn logits(seed: u64, count: usize) -> Vec<f32> {
        (0..count as u64)
            .map(|i| (uniform(seed, i) * 40.0).floor() as f32 / 4.0)
            .collect()
    }

    #[test]
    fn equals_the_slow_twin() {
        let mut sampler = Sampler::default();
        for seed in 0..200 {
            let row = logits(seed, 1 + seed as usize * 7);
            for temperature in [0.3, 1.0, 2.0] {
                for top_k in [None, Some(2), Some(5), Some(200)] {
                    for top_p in [1.0, 0.9, 0.3, 1e-9] {
                        let top_k = top_k.filter(|k| *k < row.len());
                        let sampling = Sampling {
                            temperature,
                            top_k,
                            top_p,
                            seed,
                        };
                        let fast = sampler.sample(&row, &sampling, 3).expect("finite");
                        assert_eq!(
                            fast,
                            slow(&row, &sampling, 3),
                            "{sampling:?} of {}",
                            row.len()
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn greedy_takes_the_first_of_equals() {
        let mut sampler = Sampler::default();
        let tiny = Sampling {
            temperature: 1e-9,
            ..Sampling::GREEDY
        };
        let one = Sampling {
            temperature: 5.0,
            top_k: Some(1),
            ..Sampling::GREEDY
        };
        for sampling in [Sampling::GREEDY, tiny, one] {
            assert_eq!(sampler.sample(&[1.0, 7.0, 7.0, 2.0], &sampling, 0), Ok(1));
        }
    }

    #[test]
    fn draws_follow_the_weights_and_only_seed_and_position() {
        let mut sampler = Sampler::default();
        let row = [0.0, 1.0_f32.ln() + 2.0_f32.ln(), f32::NEG_INFINITY];
        let draws = |seed| Sampling {
            temperature: 1.0,
            top_k: None,
            top_p: 1.0,
            seed,
        };
        let mut counts = [0; 3];
        for position in 0..30_000 {
            let token = sampler.sample(&row, &draws(5), position).expect("finite");
            assert_eq!(
                Ok(token),
                Sampler::default().sample(&row, &draws(5), position)
            );
            counts[token as usize] += 1;
        }
        assert!((9_600..10_400).contains(&counts[0]), "a third: {counts:?}");
        assert_eq!(counts[2], 0, "a masked token is never drawn");
        let differs = (0..64).any(|position| {
            sampler.sample(&row, &draws(5), position) != sampler.sample(&row, &draws(6), position)
        });
        assert!(differs, "the seed matters");
    }

    #[test]
    fn what_is_not_a_number_is_refused() {
        let mut sampler = Sampler::default();
        for row in [
            &[1.0, f32::NAN][..],
            &[f32::NEG_INFINITY, f32::NEG_INFINITY],
            &[f32::INFINITY, 0.0],
            &[],
        ] {
            assert_eq!(
                sampler.sample(row, &Sampling::GREEDY, 0),
                Err(NotANumber),
                "{row:?}"
            );
        }
    }
}
