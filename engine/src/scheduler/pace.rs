//! How much prefill fits beside decodes without making them wait?
//!
//! A step with prefill may take `SLOWDOWN` times as long as one without. What that means in tokens
//! is learnt from the steps' own times: milliseconds of a step with decodes alone, by how many
//! there are, and milliseconds that prefill adds to such a step: so much for a token, and so much
//! for each token before it in its prompt, over which it attends. Both are running figures, so they
//! follow the machine, the model and the decodes' growing contexts; a step without prefill every
//! `PLAIN_EVERY` keeps the first one fresh. That one is the median of the last few: a mean over
//! steps a second apart would lag behind contexts that grow, and hold prefill back.
//!
//! One linear model over all steps was refused: a step's time bends where reading weights stops
//! being the bound and computing begins, and steps of prefill alone lie past that bend. For the
//! same reason the price of prefill has a quick factor on top of its slow fit: where a step lies
//! beside the bend is learnt within a few steps.
//!
//! A step may take longer in proportion where many prompts wait beside few answers
//! ([`Queue::weight`](super::queue::Queue::weight)).
//!
//! No clock here: the caller measures. Without decodes nothing is held back, nor where the operator
//! asks for the classic way ([`Beside::Unpaced`]): then a step takes as long as its tokens do.

use cache_index::block::BLOCK_TOKENS;
use clap::ValueEnum;

/// How much longer a step may take for the prefill in it. The goal is a factor of 2 at the 90th
/// percentile as a client sees it; the rest is left for noise.
const SLOWDOWN: f64 = 1.94;
/// The context, in thousands of tokens, over which attention costs a token as much as everything
/// else: measured on the default model, 0.30 ms a token and 0.26 ms more for each 1,000 tokens
/// before it. It fills in until both have been seen apart.
const CONTEXT_K: f64 = 1.15;
/// What the filling in weighs beside what was seen.
const PRIOR: f64 = 0.02;
/// Every so many steps with prefill, one runs decodes alone.
const PLAIN_EVERY: u32 = 48;
/// What one new measurement weighs in a running mean.
const WEIGHT: f64 = 0.15;
/// A measurement changes an estimate by at most this factor: a step during which the machine did
/// something else must not stop prefill.
const STRAY: f64 = 1.5;
/// The first prompt of a step gets at least so many tokens: prefill never stands still. A tile of
/// the kernels; far into a long prompt, beside a single decode, even that takes longer than allowed.
const CHUNK_MIN: usize = 4;

/// What old measurements of a price still weigh after a new one: it remembers a long prompt.
const KEPT: f64 = 0.99;

/// How much of a prompt is computed in a step in which others decode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Beside {
    /// So much that the step takes at most about twice as long as without, or longer where more prompts
    /// than answers of the same salt wait.
    #[default]
    Paced,
    /// All that --step-tokens leaves, however long the others wait for their next token: the classic
    /// way. With --step-tokens above every prompt, prompts are not cut into chunks at all.
    Unpaced,
}

/// What a step computes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepWork {
    /// Tokens of decodes.
    pub decode_tokens: usize,
    /// Tokens of prompts.
    pub prefill_tokens: usize,
    /// Thousands of tokens that those attend over, all together.
    pub attended_k: f64,
}

impl StepWork {
    /// Adds a chunk of a prompt that has `computed` tokens behind it.
    pub fn add_prefill(&mut self, tokens: usize, computed: usize) {
        self.prefill_tokens += tokens;
        self.attended_k += attended_k(tokens, computed);
    }
}

fn attended_k(tokens: usize, computed: usize) -> f64 {
    tokens as f64 * (computed as f64 + tokens as f64 / 2.0) / 1e3
}

/// What prefill costs, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Price {
    token: f64,
    attended_k: f64,
}

impl Price {
    fn of(self, tokens: f64, attended_k: f64) -> f64 {
        self.token * tokens + self.attended_k * attended_k
    }
}

/// What one step may prefill.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Budget {
    tokens: usize,
    /// None while nobody decodes.
    time: Option<(f64, Price)>,
    spent: bool,
}

impl Budget {
    /// Tokens that a prompt with `computed` tokens behind it may get now.
    pub fn tokens(&self, computed: usize) -> usize {
        let Some((ms, price)) = self.time else {
            return self.tokens;
        };
        // To the nearest: always down would give away a token of ten.
        let fits = (ms / price.of(1.0, computed as f64 / 1e3)).max(0.0).round() as usize;
        let least = if self.spent { 0 } else { CHUNK_MIN };
        fits.max(least).min(self.tokens)
    }

    /// Takes a chunk off.
    pub fn spend(&mut self, tokens: usize, computed: usize) {
        self.tokens = self.tokens.saturating_sub(tokens);
        if let Some((ms, price)) = &mut self.time {
            *ms -= price.of(tokens as f64, attended_k(tokens, computed));
        }
        self.spent = true;
    }

    /// Whether nobody can get anything any more.
    pub fn is_spent(&self) -> bool {
        self.tokens == 0 || (self.spent && self.tokens(0) < CHUNK_MIN)
    }
}

/// What is known about the steps' times.
#[derive(Clone, Debug)]
pub struct Pace {
    step_tokens: usize,
    beside: Beside,
    /// Milliseconds of steps of decodes alone, by the power of two of their tokens.
    plain_ms: [Recent; 16],
    since_plain: u32,
    seen: Seen,
    /// What prefill costs now, by what the fit says.
    factor: Option<f64>,
}

impl Pace {
    /// Nothing is known; at most `step_tokens` tokens a step.
    pub fn new(step_tokens: usize, beside: Beside) -> Self {
        Self {
            step_tokens,
            beside,
            plain_ms: [Recent::default(); 16],
            since_plain: 0,
            seen: Seen::default(),
            factor: None,
        }
    }

    /// What the next step may prefill beside so many tokens of decodes, at
    /// [`Queue::weight`](super::queue::Queue::weight).
    pub fn budget(&self, decode_tokens: usize, weight: f64) -> Budget {
        if decode_tokens == 0 {
            return Budget {
                tokens: self.step_tokens.max(BLOCK_TOKENS),
                time: None,
                spent: false,
            };
        }
        let tokens = self
            .step_tokens
            .saturating_sub(decode_tokens)
            .max(BLOCK_TOKENS);
        if self.beside == Beside::Unpaced {
            return Budget {
                tokens,
                time: None,
                spent: false,
            };
        }
        let plain_ms = self.plain_ms[bucket(decode_tokens)].median();
        let (tokens, time) = match (plain_ms, self.price()) {
            // Measure what the decodes take alone, first and now and then.
            (None, _) => (0, None),
            _ if self.since_plain >= PLAIN_EVERY => (0, None),
            // Then begin with little.
            (Some(_), None) => (tokens.min(BLOCK_TOKENS), None),
            (Some(plain_ms), Some(price)) => {
                let ms = weight * (SLOWDOWN - 1.0) * plain_ms;
                (tokens, Some((ms, price)))
            }
        };
        Budget {
            tokens,
            time,
            spent: false,
        }
    }

    /// Learns from a step.
    pub fn observe(&mut self, step: &StepWork, ms: f64) {
        if step.decode_tokens == 0 || !ms.is_finite() || ms <= 0.0 {
            return;
        }
        let plain_ms = &mut self.plain_ms[bucket(step.decode_tokens)];
        if step.prefill_tokens == 0 {
            plain_ms.add(ms);
            self.since_plain = 0;
            return;
        }
        self.since_plain += 1;
        let Some(plain_ms) = plain_ms.median() else {
            return;
        };
        // Prefill is never free, even where noise or time left while weights are read says so.
        let mut added_ms = (ms - plain_ms).max(0.05 * plain_ms);
        let (tokens, attended_k) = (step.prefill_tokens as f64, step.attended_k);
        if let Some(price) = self.price() {
            let expected_ms = price.of(tokens, attended_k);
            added_ms = added_ms.clamp(expected_ms / STRAY, expected_ms * STRAY);
        }
        self.seen.add(tokens, attended_k, added_ms);
        let fitted_ms = self.seen.fit().of(tokens, attended_k);
        self.factor = Some(mean(self.factor, added_ms / fitted_ms));
    }

    fn price(&self) -> Option<Price> {
        let (factor, fit) = (self.factor?, self.seen.fit());
        Some(Price {
            token: fit.token * factor,
            attended_k: fit.attended_k * factor,
        })
    }
}

/// The last few measurements of one thing.
#[derive(Clone, Copy, Debug, Default)]
struct Recent {
    values: [f64; 5],
    seen: usize,
}

impl Recent {
    fn add(&mut self, value: f64) {
        self.values[self.seen % self.values.len()] = value;
        self.seen += 1;
    }

    fn median(&self) -> Option<f64> {
        let mut values = self.values;
        let values = &mut values[..self.seen.min(self.values.len())];
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied()
    }
}

/// Sums over what prefill cost, older ones fading: a least-squares fit of two prices.
#[derive(Clone, Debug, Default)]
struct Seen {
    ms: f64,
    tokens: f64,
    attended: f64,
    tokens_tokens: f64,
    tokens_attended: f64,
    attended_attended: f64,
    tokens_ms: f64,
    attended_ms: f64,
}

impl Seen {
    fn add(&mut self, tokens: f64, attended: f64, ms: f64) {
        let sum = |sum: &mut f64, new: f64| *sum = KEPT * *sum + new;
        sum(&mut self.ms, ms);
        sum(&mut self.tokens, tokens);
        sum(&mut self.attended, attended);
        sum(&mut self.tokens_tokens, tokens * tokens);
        sum(&mut self.tokens_attended, tokens * attended);
        sum(&mut self.attended_attended, attended * attended);
        sum(&mut self.tokens_ms, tokens * ms);
        sum(&mut self.attended_ms, attended * ms);
    }

    /// The prices that explain what was seen best, drawn a little to those of [`CONTEXT_K`]: a
    /// prompt's middle alone does not tell them apart.
    fn fit(&self) -> Price {
        let overall = self.ms / (self.tokens + self.attended / CONTEXT_K);
        let prior = Price {
            token: overall,
            attended_k: overall / CONTEXT_K,
        };
        let tt = self.tokens_tokens * (1.0 + PRIOR);
        let aa = self.attended_attended * (1.0 + PRIOR);
        let ta = self.tokens_attended;
        let t = self.tokens_ms + PRIOR * self.tokens_tokens * prior.token;
        let a = self.attended_ms + PRIOR * self.attended_attended * prior.attended_k;
        let determinant = tt * aa - ta * ta;
        if determinant <= 0.0 {
            return prior;
        }
        Price {
            token: ((t * aa - a * ta) / determinant).max(0.1 * prior.token),
            attended_k: ((a * tt - t * ta) / determinant).max(0.1 * prior.attended_k),
        }
    }
}

fn mean(before: Option<f64>, now: f64) -> f64 {
    let Some(before) = before else { return now };
    let now = now.clamp(before / STRAY, before * STRAY);
    before + WEIGHT * (now - before)
}

fn bucket(decode_tokens: usize) -> usize {
    (decode_tokens.max(1).ilog2() as usize).min(15)
}

#[cfg(test)]
mod tests {
    //! Catches decodes that wait too long, and prefill that is held back more than it must be.
    use super::*;

    struct Random(u64);

    impl Random {
        fn uniform(&mut self) -> f64 {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963);
            (self.0 >> 33) as f64 / (1_u64 << 31) as f64
        }
    }

    /// A machine: reading weights bounds a step from below, computing adds up.
    struct Machine {
        read_ms: f64,
        token_ms: f64,
        attend_ms: f64,
        noise: Random,
    }

    impl Machine {
        fn step_ms(&mut self, decodes: usize, chunk: usize, computed: usize) -> f64 {
            let compute = self.token_ms * (decodes + chunk) as f64
                + self.attend_ms * chunk as f64 * (computed as f64 + chunk as f64 / 2.0);
            let stray = if self.noise.uniform() < 0.02 {
                5.0
            } else {
                0.0
            };
            (self.read_ms.max(compute) + 0.2 * compute) * (1.0 + 0.1 * self.noise.uniform() + stray)
        }
    }

    fn step(decode_tokens: usize, chunk: usize, computed: usize) -> StepWork {
        let mut step = StepWork {
            decode_tokens,
            ..StepWork::default()
        };
        step.add_prefill(chunk, computed);
        step
    }

    /// Runs 4k prompts back to back beside decodes; returns the 90th percentile of the steps'
    /// times and the prefill speed, both as ratios to what they are alone.
    fn ratios(step_ms: &mut dyn FnMut(usize, usize, usize) -> f64, decodes: usize) -> (f64, f64) {
        let mut pace = Pace::new(256, Beside::Paced);
        let mut alone: Vec<_> = (0..400)
            .map(|_| {
                let ms = step_ms(decodes, 0, 0);
                pace.observe(&step(decodes, 0, 0), ms);
                ms
            })
            .collect();
        let prefill_alone_ms: f64 = (0..16).map(|i| step_ms(0, 256, 256 * i)).sum();
        let mut computed = 0;
        let mut prefilled = 0;
        let mut both: Vec<_> = (0..4000)
            .map(|_| {
                let chunk = pace
                    .budget(decodes, 1.0)
                    .tokens(computed)
                    .min(4096 - computed);
                let ms = step_ms(decodes, chunk, computed);
                pace.observe(&step(decodes, chunk, computed), ms);
                prefilled += chunk;
                computed = (computed + chunk) % 4096;
                ms
            })
            .collect();
        let speed = prefilled as f64 / both.iter().sum::<f64>();
        let p90 = |times: &mut Vec<f64>| {
            times.sort_by(f64::total_cmp);
            times[times.len() * 9 / 10]
        };
        (
            p90(&mut both) / p90(&mut alone),
            speed / (4096.0 / prefill_alone_ms),
        )
    }

    #[test]
    fn decodes_stay_within_twice_and_prefill_goes_on() {
        for seed in 0..8 {
            for decodes in [1, 8, 30] {
                for token_ms in [0.1, 0.5, 2.0] {
                    let mut machine = Machine {
                        read_ms: 5.0,
                        token_ms,
                        attend_ms: token_ms / [1000.0, 4000.0][seed % 2],
                        noise: Random(seed as u64),
                    };
                    let (slower, speed) = ratios(&mut |d, n, c| machine.step_ms(d, n, c), decodes);
                    let least =
                        machine.step_ms(decodes, CHUNK_MIN, 4096) / machine.step_ms(decodes, 0, 0);
                    assert!(
                        slower <= least.max(2.0),
                        "{decodes} {token_ms}: {slower} times as long"
                    );
                    assert!(slower >= 1.3, "{decodes} {token_ms}: held back, {slower}");
                    assert!(speed >= 0.2, "{decodes} {token_ms}: {speed} of the speed");
                }
            }
        }
    }

    /// The default model on the machine of docs/MEASUREMENTS.md, as its passes were measured.
    #[test]
    fn the_goal_is_met_by_measured_passes() {
        let mut noise = Random(3);
        let mut step_ms = |decodes: usize, chunk: usize, computed: usize| {
            let attended = attended_k(chunk, computed);
            let ms = if decodes == 0 {
                0.345 * chunk as f64 + 0.28 * attended
            } else {
                let mixed = if chunk > 0 { 1.5 } else { 0.0 };
                10.7 + mixed + 0.30 * chunk as f64 + 0.26 * attended
            };
            ms * (1.0 + 0.1 * noise.uniform())
        };
        let (slower, speed) = ratios(&mut step_ms, 8);
        assert!(slower <= 1.98, "{slower} times as long");
        assert!(speed >= 0.4, "{speed} of the speed");
    }

    #[test]
    fn nobody_decodes_nothing_is_held_back() {
        let pace = Pace::new(256, Beside::Paced);
        assert_eq!(pace.budget(0, 1.0).tokens(9999), 256);
        let mut budget = pace.budget(0, 1.0);
        budget.spend(200, 0);
        assert_eq!((budget.tokens(0), budget.is_spent()), (56, false));
    }

    #[test]
    fn without_a_pace_only_the_tokens_of_a_step_bound_it() {
        let mut pace = Pace::new(4096, Beside::Unpaced);
        assert_eq!(pace.budget(8, 1.0).tokens(0), 4088);
        pace.observe(&step(8, 0, 0), 10.0);
        for _ in 0..100 {
            pace.observe(&step(8, 3000, 0), 2000.0);
        }
        let mut budget = pace.budget(8, 1.0);
        assert_eq!(budget.tokens(2000), 4088, "nothing is learnt");
        budget.spend(3000, 0);
        assert_eq!((budget.tokens(0), budget.is_spent()), (1088, false));
    }

    #[test]
    fn a_stray_step_does_not_stop_prefill() {
        let mut pace = Pace::new(256, Beside::Paced);
        assert_eq!(
            pace.budget(8, 1.0).tokens(0),
            0,
            "decodes are measured alone first"
        );
        pace.observe(&step(8, 0, 0), 10.0);
        for _ in 0..10 {
            pace.observe(&step(8, 16, 0), 18.0);
        }
        let before = pace.budget(8, 1.0).tokens(0);
        assert!((16..=19).contains(&before), "{before}");
        pace.observe(&step(8, 16, 0), 10_000.0);
        assert!(pace.budget(8, 1.0).tokens(0) >= before * 9 / 10);
        let mut budget = pace.budget(8, 1.0);
        budget.spend(before, 0);
        assert!(budget.is_spent());
        assert_eq!(budget.tokens(0), 0);
    }

    #[test]
    fn a_weight_lengthens_the_step_by_as_much() {
        let mut pace = Pace::new(4096, Beside::Paced);
        pace.observe(&step(8, 0, 0), 10.0);
        for _ in 0..40 {
            pace.observe(&step(8, 16, 0), 18.0);
        }
        let (one, three) = (pace.budget(8, 1.0), pace.budget(8, 3.0));
        assert!(three.tokens(0).abs_diff(3 * one.tokens(0)) <= 3);
    }
}
