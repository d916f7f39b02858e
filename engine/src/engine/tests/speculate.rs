//! Several tokens a step. Catches a draft that is kept though sampling disagrees, a block published
//! before its tokens were certain, and blocks lost at a rollback: a twin that never speculates must
//! come to the same tokens and the same pool.

use super::stepper::{Stepper, Told};
use super::*;
use crate::sample::Sampling;

/// Guesses up to `most` tokens, each right with a chance of 4 in 5.
fn drafter(seed: u64, most: usize) -> crate::engine::Drafter {
    let mut random = Random(seed);
    Box::new(move |tokens| {
        let mut tokens = tokens.to_vec();
        let known = tokens.len();
        for _ in 0..random.below(most + 1) {
            let right = next_token(tokens.iter().copied());
            let wrong = (right + 1) % ORDINARY as u32;
            tokens.push(if random.below(5) == 0 { wrong } else { right });
        }
        tokens.split_off(known)
    })
}

fn engine(kv_blocks: u32, drafts: Option<(u64, usize)>) -> Stepper {
    Stepper::new(Parts {
        drafter: drafts.map(|(seed, most)| drafter(seed, most)),
        ..parts(kv_blocks, Arc::default())
    })
}

fn jobs(seed: u64) -> Vec<Job> {
    let mut random = Random(seed);
    let shared = random.tokens(64);
    let job = |_| {
        let mut prompt = shared[..random.below(64)].to_vec();
        let count = 1 + random.below(60);
        prompt.extend(random.tokens(count));
        let output = 1 + random.below(80);
        let mut job = job(&prompt, output, None);
        job.stop_tokens = vec![random.below(4 * ORDINARY) as u32];
        job.token_ids = true;
        if random.below(2) == 0 {
            job.sampling = Sampling {
                temperature: 0.7,
                seed: 3,
                // Tokens that break the model on purpose.
                logit_bias: (ORDINARY as u32..VOCAB as u32)
                    .map(|id| (id, -100.0))
                    .collect(),
                ..Sampling::GREEDY
            };
        }
        job
    };
    (0..12).map(job).collect()
}

fn run(mut stepper: Stepper, seed: u64) -> (Vec<Told>, Vec<String>, usize) {
    let mut told: Vec<_> = jobs(seed)
        .into_iter()
        .map(|job| stepper.submit(job))
        .collect();
    told.iter_mut().for_each(|told| stepper.finish(told));
    let (findable, steps) = (stepper.findable(), stepper.steps);
    stepper.end();
    (told, findable, steps)
}

#[test]
fn drafts_change_neither_tokens_nor_pool() {
    let (mut fewer, mut all) = (0, 0);
    for seed in 0..30 {
        let most = 1 + seed as usize % 15;
        let (plain, plain_pool, plain_steps) = run(engine(400, None), seed);
        let (fast, fast_pool, fast_steps) = run(engine(400, Some((seed, most))), seed);
        for (plain, fast) in plain.iter().zip(&fast) {
            assert_eq!(plain.text, fast.text, "seed {seed}");
            assert_eq!(plain.produced, fast.produced, "seed {seed}");
            assert_eq!(plain.done().1.output_tokens, fast.done().1.output_tokens);
            assert_eq!(plain.done().0, fast.done().0);
        }
        assert_eq!(plain_pool, fast_pool, "what can be found, seed {seed}");
        fewer += fast_steps;
        all += plain_steps;
    }
    // Half of the answers are drawn at a temperature at which guesses are rarely right.
    assert!(
        fewer * 10 < all * 9,
        "right drafts save steps: {fewer} of {all}"
    );
}

#[test]
fn drafts_in_a_pool_that_runs_dry() {
    for seed in 0..30 {
        let (plain, ..) = run(engine(400, None), seed);
        // The longest has 63 + 60 + 80 tokens.
        let (fast, ..) = run(engine(13 + seed as u32 % 7, Some((seed, 15))), seed);
        for (plain, fast) in plain.iter().zip(&fast) {
            assert_eq!(plain.text, fast.text, "seed {seed}");
        }
    }
}
