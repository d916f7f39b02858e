//! Catches a filter that keeps too much or too little, a penalty that is not vLLM's, an order that
//! depends on a partial sort, a draw that is not a function of seed and position, and NaN taken
//! for a number.
use super::*;

/// Everything that a pick depends on beside the row, in the obvious form.
struct Case {
    how: Sampling,
    prompt: Vec<u32>,
    output: Vec<u32>,
    allowed: Option<Vec<bool>>,
    banned: Vec<u32>,
}

impl Case {
    fn plain(how: Sampling) -> Self {
        Self {
            how,
            prompt: Vec::new(),
            output: Vec::new(),
            allowed: None,
            banned: Vec::new(),
        }
    }

    fn pick(&self, sampler: &mut Sampler, row: &[f32], top: usize) -> Result<Picked, NotANumber> {
        let mut counts = Counts::new(&self.how, &self.prompt);
        self.output.iter().for_each(|token| counts.push(*token));
        let mask = self.allowed.as_ref().map(|allowed| {
            let word = |bits: &[bool]| (0..).zip(bits).map(|(at, bit)| u32::from(*bit) << at).sum();
            allowed.chunks(32).map(word).collect::<Vec<u32>>()
        });
        let at = At {
            position: self.position(),
            counts: &counts,
            mask: mask.as_deref(),
            banned: &self.banned,
            logprobs: Some(top),
        };
        sampler.pick(row, &self.how, &at)
    }

    fn position(&self) -> u64 {
        (self.prompt.len() + self.output.len()) as u64
    }

    /// The row after mask, bans, bias and penalties, token by token.
    fn slow_row(&self, row: &[f32]) -> Vec<f32> {
        let changed = |(id, logit): (u32, &f32)| {
            let allowed = self
                .allowed
                .as_ref()
                .is_none_or(|allowed| allowed.get(id as usize).copied().unwrap_or(false));
            if !allowed || self.banned.contains(&id) {
                return f32::NEG_INFINITY;
            }
            let bias = self.how.logit_bias.iter().filter(|(token, _)| *token == id);
            let mut logit = logit + bias.map(|(_, bias)| bias).sum::<f32>();
            let times = self.output.iter().filter(|token| **token == id).count();
            if times > 0 || self.prompt.contains(&id) {
                let repetition = self.how.repetition_penalty;
                logit = if logit > 0.0 {
                    logit / repetition
                } else {
                    logit * repetition
                };
            }
            logit -= self.how.frequency_penalty * times as f32;
            logit
                - if times > 0 {
                    self.how.presence_penalty
                } else {
                    0.0
                }
        };
        (0..).zip(row).map(changed).collect()
    }

    /// The obvious twin: change everything, sort everything, cut, draw.
    fn slow(&self, row: &[f32]) -> u32 {
        let row = self.slow_row(row);
        let how = &self.how;
        let by_likelihood =
            |a: &(u32, f32, f64), b: &(u32, f32, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let scale = 1.0 / how.temperature.max(TEMPERATURE_MIN);
        let weight = |logit: f32| f64::from(((logit - max) * scale).exp());
        let mut all: Vec<_> = (0_u32..)
            .zip(&row)
            .map(|(id, logit)| (id, *logit, weight(*logit)))
            .collect();
        if how.temperature < TEMPERATURE_MIN {
            all.sort_by(by_likelihood);
            return all[0].0;
        }
        all.retain(|c| c.1 > f32::NEG_INFINITY && c.2 >= f64::from(how.min_p));
        let ranked = how.top_k.is_some_and(|k| k < all.len()) || how.top_p < 1.0;
        if ranked {
            all.sort_by(by_likelihood);
        }
        all.truncate(how.top_k.unwrap_or(all.len()));
        if how.top_p < 1.0 {
            let total: f64 = all.iter().map(|c| c.2).sum();
            let mut sum = 0.0;
            let keep = all.iter().take_while(|c| {
                let before = sum;
                sum += c.2;
                before < f64::from(how.top_p) * total
            });
            all.truncate(keep.count());
        }
        let mut left = uniform(how.seed, self.position()) * all.iter().map(|c| c.2).sum::<f64>();
        let drawn = all.iter().find(|c| {
            left -= c.2;
            left < 0.0
        });
        drawn.or(all.last()).expect("there is a token").0
    }
}

fn logits(seed: u64, count: usize) -> Vec<f32> {
    (0..count as u64)
        .map(|i| (uniform(seed, i) * 40.0).floor() as f32 / 4.0 - 5.0)
        .collect()
}

#[test]
fn equals_the_slow_twin() {
    let mut sampler = Sampler::default();
    for seed in 0..100 {
        let row = logits(seed, 1 + seed as usize * 7);
        for temperature in [0.0, 0.3, 2.0] {
            for top_k in [None, Some(2), Some(5), Some(200)] {
                for (top_p, min_p) in [(1.0, 0.0), (0.9, 0.0), (1e-9, 0.0), (1.0, 0.2), (0.5, 1.0)]
                {
                    let how = Sampling {
                        temperature,
                        top_k,
                        top_p,
                        min_p,
                        seed,
                        ..Sampling::GREEDY
                    };
                    let case = Case::plain(how);
                    let fast = case.pick(&mut sampler, &row, 0).expect("finite");
                    assert_eq!(
                        fast.token,
                        case.slow(&row),
                        "{:?} of {}",
                        case.how,
                        row.len()
                    );
                }
            }
        }
    }
}

/// A random case over a vocabulary, each part of it present or absent at random.
fn random_case(seed: u64, vocab: usize) -> Case {
    let mut drawn = 0;
    let mut next = |below: usize| {
        drawn += 1;
        (uniform(seed, drawn) * below as f64) as usize
    };
    let pick = |choices: &[f32], at: usize| choices[at % choices.len()];
    let mut tokens = |most: usize| -> Vec<u32> {
        let count = next(most + 1);
        (0..count).map(|_| next(vocab) as u32).collect()
    };
    let (prompt, output, mut banned, biased) = (tokens(40), tokens(40), tokens(3), tokens(5));
    let mut allowed = (next(2) == 1).then(|| (0..vocab).map(|_| next(4) == 0).collect::<Vec<_>>());
    // Something must be left.
    let free = next(vocab);
    banned.retain(|token| *token as usize != free);
    if let Some(allowed) = &mut allowed {
        allowed[free] = true;
        allowed.truncate(free + 1 + next(vocab - free));
    }
    let how = Sampling {
        temperature: pick(&[0.0, 0.5, 1.0, 2.0], next(4)),
        top_k: [None, Some(1), Some(7)][next(3)],
        top_p: pick(&[1.0, 0.8], next(2)),
        min_p: pick(&[0.0, 0.05], next(2)),
        seed,
        presence_penalty: pick(&[0.0, 1.5, -2.0], next(3)),
        frequency_penalty: pick(&[0.0, 0.5, -0.25], next(3)),
        repetition_penalty: pick(&[1.0, 1.5, 0.5], next(3)),
        logit_bias: biased
            .iter()
            .map(|id| (*id, next(200) as f32 - 100.0))
            .collect(),
    };
    Case {
        how,
        prompt,
        output,
        allowed,
        banned,
    }
}

#[test]
fn equals_the_slow_twin_with_everything_a_request_can_say() {
    let mut sampler = Sampler::default();
    for seed in 0..4000 {
        let vocab = 1 + (seed as usize * 13) % 300;
        let row = logits(seed, vocab);
        let case = random_case(seed, vocab);
        let fast = case.pick(&mut sampler, &row, 3).expect("a token is left");
        assert_eq!(fast.token, case.slow(&row), "seed {seed}: {:?}", case.how);
        let logprobs = fast.logprobs.expect("asked for");
        check_logprobs(&logprobs, &row, fast.token, 3);
    }
}

fn check_logprobs(found: &TokenLogprobs, row: &[f32], token: u32, top: usize) {
    let sum: f64 = row.iter().map(|logit| f64::from(*logit).exp()).sum();
    let slow = |id: u32| f64::from(row[id as usize]) - sum.ln();
    let near = |found: f32, id: u32| (f64::from(found) - slow(id)).abs() < 1e-4;
    assert!(near(found.chosen, token), "{found:?}");
    let mut ids: Vec<u32> = (0..row.len() as u32).collect();
    ids.sort_by(|a, b| row[*b as usize].total_cmp(&row[*a as usize]).then(a.cmp(b)));
    ids.truncate(top);
    assert_eq!(found.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), ids);
    assert!(found.top.iter().all(|(id, logprob)| near(*logprob, *id)));
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
    for how in [Sampling::GREEDY, tiny, one] {
        let picked = Case::plain(how).pick(&mut sampler, &[1.0, 7.0, 7.0, 2.0], 0);
        assert_eq!(picked.map(|picked| picked.token), Ok(1));
    }
}

#[test]
fn draws_follow_the_weights_and_only_seed_and_position() {
    let mut sampler = Sampler::default();
    let row = [0.0, 1.0_f32.ln() + 2.0_f32.ln(), f32::NEG_INFINITY];
    let counts = Counts::default();
    let draws = |seed| Sampling {
        temperature: 1.0,
        seed,
        ..Sampling::GREEDY
    };
    let pick = |sampler: &mut Sampler, seed, position| {
        let picked = sampler.pick(&row, &draws(seed), &At::plain(position, &counts));
        picked.expect("finite").token
    };
    let mut drawn = [0; 3];
    for position in 0..30_000 {
        let token = pick(&mut sampler, 5, position);
        assert_eq!(token, pick(&mut Sampler::default(), 5, position));
        drawn[token as usize] += 1;
    }
    assert!((9_600..10_400).contains(&drawn[0]), "a third: {drawn:?}");
    assert_eq!(drawn[2], 0, "an impossible token is never drawn");
    let differs =
        (0..64).any(|position| pick(&mut sampler, 5, position) != pick(&mut sampler, 6, position));
    assert!(differs, "the seed matters");
}

#[test]
fn extremes_of_seed_and_temperature_draw_a_token() {
    let mut sampler = Sampler::default();
    let row = logits(3, 500);
    let huge = [f32::MAX, f32::MIN, 0.0, -f32::MAX];
    for seed in [0, 1, u64::MAX, u64::MAX / 2, i64::MIN.cast_unsigned()] {
        for temperature in [0.0, f32::MIN_POSITIVE, TEMPERATURE_MIN, 1.0, 2.0, f32::MAX] {
            for top_p in [f32::MIN_POSITIVE, 0.5, 1.0] {
                let how = Sampling {
                    temperature,
                    top_p,
                    seed,
                    ..Sampling::GREEDY
                };
                for row in [&row[..], &huge] {
                    let case = Case::plain(how.clone());
                    let picked = case.pick(&mut sampler, row, 1).expect("finite");
                    assert!((picked.token as usize) < row.len());
                }
            }
        }
    }
}

#[test]
fn what_is_not_a_number_is_refused() {
    let mut sampler = Sampler::default();
    let greedy = || Case::plain(Sampling::GREEDY);
    let mut none_left = greedy();
    none_left.allowed = Some(vec![false, false]);
    let mut nan_behind_the_mask = greedy();
    nan_behind_the_mask.allowed = Some(vec![true, false]);
    let rows: [(Case, &[f32]); 6] = [
        (greedy(), &[1.0, f32::NAN]),
        (greedy(), &[f32::NEG_INFINITY, f32::NEG_INFINITY]),
        (greedy(), &[f32::INFINITY, 0.0]),
        (greedy(), &[]),
        (none_left, &[1.0, 2.0]),
        (nan_behind_the_mask, &[1.0, f32::NAN]),
    ];
    for (case, row) in rows {
        assert_eq!(case.pick(&mut sampler, row, 1), Err(NotANumber), "{row:?}");
    }
}
