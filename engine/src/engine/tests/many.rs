//! Many requests in little room. Catches a livelock, a lost block, an answer that depends on who
//! else was there, and what a broken pass leaves behind.

use super::stepper::Stepper;
use super::*;
use crate::engine::{Pooling, Work};

#[test]
fn sixty_four_conversations_in_a_pool_for_sixteen() {
    // Each has up to 3 turns and 280 tokens: 18 blocks.
    let mut stepper = Stepper::of(16 * 18);
    let mut random = Random(1);
    let system = random.tokens(50);
    let mut conversations: Vec<_> = (0..64)
        .map(|_| [&system[..], &random.tokens(30)[..]].concat())
        .collect();
    for _turn in 0..3 {
        let mut told: Vec<_> = conversations
            .iter()
            .map(|prompt| stepper.submit(job(prompt, 40, None)))
            .collect();
        for (told, conversation) in told.iter_mut().zip(&mut conversations) {
            stepper.finish(told);
            let alone = answer(conversation, 40);
            assert_eq!(told.tokens(), alone);
            conversation.extend(alone);
            conversation.extend(random.tokens(20));
        }
    }
    stepper.end();
}

#[test]
fn adversarial_loads_on_a_tiny_pool_always_end() {
    for seed in 0..60 {
        let mut random = Random(seed);
        let blocks = 8 + random.below(16) as u32;
        // From none at all to more than is ever asked for.
        let host_blocks = [0, 1, 7, 30, 500][seed as usize % 5];
        let folder = tempfile::tempdir().expect("a folder");
        let mut stepper = Stepper::new(Parts {
            host_blocks,
            disk: (seed % 2 == 0).then(|| tiers::disk(folder.path(), 50)),
            ..parts(blocks, Arc::default())
        });
        let room = blocks as usize * 16;
        let shared = random.tokens(room);
        let mut live = Vec::new();
        for _ in 0..60 {
            let length = 1 + random.below(room - 1);
            let same = random.below(length);
            let prompt = [&shared[..same], &random.tokens(length - same)[..]].concat();
            let output = 1 + random.below(room - length);
            let mut job = job(
                &prompt,
                output,
                [None, Some("a"), Some("b")][random.below(3)],
            );
            job.priority = random.below(5) as i32;
            match random.below(8) {
                0 => job.work = Work::Embed(Pooling::Mean),
                1 => {
                    let hold = std::time::Duration::from_millis(random.below(3) as u64);
                    job.work = Work::PrefillOnly { hold };
                }
                _ => {}
            }
            let generates = job.work == Work::Generate;
            live.push((stepper.submit(job), generates, prompt, output));
            for _ in 0..random.below(6) {
                stepper.step();
            }
            if random.below(5) == 0 {
                drop(live.swap_remove(random.below(live.len())));
            }
        }
        for (mut told, generates, prompt, output) in live {
            stepper.finish(&mut told);
            if generates {
                assert_eq!(told.tokens(), answer(&prompt, output), "seed {seed}");
            }
        }
        let far = std::time::Instant::now() + 2 * crate::engine::HOLD_MAX;
        stepper.engine.expire_pins(far);
        stepper.end();
    }
}

#[test]
fn what_a_broken_model_computed_is_not_kept() {
    let mut stepper = Stepper::of(100);
    let mut random = Random(4);
    let fine = random.tokens(70);
    let mut told = stepper.submit(job(&fine, 1, None));
    stepper.finish(&mut told);
    let findable = stepper.findable();
    assert_eq!(findable.len(), 4);
    // The broken token is in the first of three chunks, whose logits nobody asked for.
    let mut broken = [&fine[..32], &[NOT_A_NUMBER][..], &random.tokens(120)[..]].concat();
    let mut told = stepper.submit(job(&broken, 5, None));
    let mut beside = stepper.submit(job(&random.tokens(20), 5, None));
    stepper.finish(&mut told);
    assert_eq!(told.failed().kind, Kind::Internal);
    stepper.finish(&mut beside);
    assert_eq!(beside.done().0, Ending::Length, "only the broken one fails");
    let found = stepper.findable();
    assert!(
        findable.iter().all(|hash| found.contains(hash)),
        "what was fine stays"
    );
    assert_eq!(found.len(), 4 + 1, "nothing broken can be found");
    broken.truncate(20);
    stepper.end();
}

#[test]
fn hostile_sizes_are_bounded() {
    let mut stepper = Stepper::of(10);
    let mut told = stepper.submit(job(&[1; 20], 1_000_000_000, None));
    stepper.finish(&mut told);
    let (ending, usage, _) = told.done();
    assert_eq!((ending, usage.output_tokens), (Ending::Length, 140));
    let refused = stepper.handle.submit(job(&[1; 160], 1, None));
    let refused = refused.expect_err("no pool state could hold it");
    assert_eq!(
        (refused.kind, refused.code),
        (Kind::Invalid, "context_length_exceeded")
    );
    assert!(
        stepper.handle.submit(job(&[], 1, None)).is_err(),
        "an empty prompt"
    );
    stepper.end();
}
