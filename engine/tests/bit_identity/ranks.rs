//! Does a model spread over ranks of one process answer as the whole does?
//!
//! Sums over what is spread are taken in another order, and which blocks of a row have outliers is asked
//! of each rank's own columns, so the last bits differ from the whole's;
//! between two runs of the same group, and however the batch is cut, none may.

use std::sync::Arc;

use cache_index::block::Namespace;
use engine::engine::{Job, Output, Parts};
use engine::kv::table::Scope;
use engine::metrics::Metrics;
use engine::model::{
    ForwardError, Model, ModelFile, ModelOptions, OpsKind, Pass, PassOutput, SeqInput,
};
use engine::parallel::RankGroup;
use engine::scheduler::pace::Beside;

use super::tiny::{self, Noise, Tiny};
use super::{blocks, file_of, prompts};

/// The largest difference of a logit from the whole's, in standard deviations of its row. In f32
/// only the order of sums differs; in the serving ops a last bit can move an int8 quant.
const REFERENCE_MAX: f64 = 1e-4;
const CPU_MAX: f64 = 5e-2;

fn options(ops: OpsKind) -> ModelOptions {
    ModelOptions {
        ops,
        threads: 2,
        kv_blocks: super::BLOCKS * super::SEQUENCES,
    }
}

/// All logits of two prompts side by side, in chunks of these sizes.
fn logits(group: &mut RankGroup, prompts: &[Vec<u32>], chunk: usize) -> Vec<Vec<f32>> {
    let mut rows = vec![Vec::new(); prompts.len()];
    let mut output = PassOutput::default();
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    for start in (0..longest).step_by(chunk) {
        let taking: Vec<usize> = (0..prompts.len())
            .filter(|slot| prompts[*slot].len() > start)
            .collect();
        let tables: Vec<_> = taking.iter().map(|slot| blocks(*slot)).collect();
        let batch: Vec<SeqInput<'_>> = taking
            .iter()
            .zip(&tables)
            .map(|(slot, blocks)| {
                let tokens = &prompts[*slot][start..];
                let tokens = &tokens[..tokens.len().min(chunk)];
                SeqInput {
                    tokens,
                    start,
                    blocks,
                    logits_last: tokens.len(),
                }
            })
            .collect();
        let pass = Pass {
            batch: &batch,
            capture: &[1],
        };
        group.run(&pass, &mut output).expect("a correct pass");
        let mut found = output.logits.chunks_exact(tiny::VOCAB);
        for (slot, seq) in taking.iter().zip(&batch) {
            rows[*slot].extend(found.by_ref().take(seq.tokens.len()).flatten());
        }
    }
    rows
}

/// The largest difference in standard deviations of the row it is in.
fn largest_delta(found: &[Vec<f32>], expected: &[Vec<f32>]) -> f64 {
    let rows = |logits: &[Vec<f32>]| -> Vec<Vec<f64>> {
        let rows = logits.iter().flat_map(|all| all.chunks_exact(tiny::VOCAB));
        rows.map(|row| row.iter().map(|x| f64::from(*x)).collect())
            .collect()
    };
    let mut worst = 0.0f64;
    for (found, expected) in rows(found).iter().zip(&rows(expected)) {
        let mean = expected.iter().sum::<f64>() / expected.len() as f64;
        let square = expected.iter().map(|x| (x - mean).powi(2)).sum::<f64>();
        let deviation = (square / expected.len() as f64).sqrt();
        for (found, expected) in found.iter().zip(expected) {
            let delta = (found - expected).abs() / deviation;
            assert!(delta.is_finite(), "{found} for {expected}");
            worst = worst.max(delta);
        }
    }
    worst
}

/// Would catch a shard of the wrong rows or columns, a sum that misses a rank, logits gathered in
/// the wrong place, and ranks that race.
#[test]
fn two_ranks_answer_as_one() {
    let file = file_of(&Tiny::new(7).to_bytes());
    let file = ModelFile::open(file.path()).expect("the model opens");
    let mut noise = Noise(41);
    let prompts = prompts(&mut noise, tiny::VOCAB, &[70, 33]);
    for (ops, most) in [(OpsKind::Reference, REFERENCE_MAX), (OpsKind::Cpu, CPU_MAX)] {
        let whole = Model::load(&file, &options(ops), &mut |_| ()).expect("the model loads");
        let mut alone = RankGroup::alone(whole);
        let expected = logits(&mut alone, &prompts, 100);
        let mut one = RankGroup::in_process(1, &file, &options(ops)).expect("one rank");
        assert!(
            logits(&mut one, &prompts, 16) == expected,
            "{ops:?}: one rank"
        );
        let mut two = RankGroup::in_process(2, &file, &options(ops)).expect("two ranks");
        let found = logits(&mut two, &prompts, 100);
        let delta = largest_delta(&found, &expected);
        println!("{ops:?}: largest delta {delta:.1e} standard deviations");
        assert!(delta <= most, "{ops:?}: {delta:e} standard deviations");
        assert!(logits(&mut two, &prompts, 100) == found, "{ops:?}: again");
        assert!(logits(&mut two, &prompts, 7) == found, "{ops:?}: in chunks");
    }
}

/// Would catch ranks without work, and a group that hangs after one of its ranks refused.
#[test]
fn what_cannot_span_ranks_is_refused() {
    let file = file_of(&Tiny::new(7).to_bytes());
    let file = ModelFile::open(file.path()).expect("the model opens");
    let refusal = |ranks| {
        RankGroup::in_process(ranks, &file, &options(OpsKind::Cpu))
            .expect_err("it cannot be cut so")
            .to_string()
    };
    assert_eq!(refusal(3), "a model of 2 key heads cannot span 3 ranks");
    assert!(refusal(0).contains("ranks must be at least 1"));
    let mut two = RankGroup::in_process(2, &file, &options(OpsKind::Cpu)).expect("two ranks");
    let table = blocks(0);
    let mut run = |tokens: &[u32]| {
        let batch = [SeqInput {
            tokens,
            start: 0,
            blocks: &table,
            logits_last: 1,
        }];
        let pass = Pass {
            batch: &batch,
            capture: &[],
        };
        two.run(&pass, &mut PassOutput::default())
    };
    assert!(matches!(run(&[1_000]), Err(ForwardError::Token { .. })));
    assert_eq!(run(&[1]), Ok(()));
}

/// Greedy answers of the whole engine (scheduler, pool, prefix reuse, sampling) over a group.
fn answers(ranks: RankGroup, prompts: &[Vec<u32>]) -> Vec<String> {
    let kv_blocks = super::BLOCKS * super::SEQUENCES;
    let parts = Parts {
        vocab: ranks.first().shape().vocab,
        layers: ranks.first().shape().layers,
        device: Box::new(ranks),
        token_bytes: Box::new(|id, _| format!("{id} ").into_bytes()),
        drafter: None,
        kv_blocks: kv_blocks as u32,
        host_blocks: 0,
        disk: None,
        shared: None,
        orders: None,
        step_tokens: 24,
        beside_decode: Beside::Paced,
        queue_max: prompts.len(),
        metrics: Arc::new(Metrics::new("tiny", kv_blocks)),
        events: None,
    };
    let (handle, thread) = engine::engine::start(parts).expect("a thread");
    let scope = Scope {
        namespace: Namespace::new("tiny", None, None),
        salt: None,
    };
    let submit = |prompt: &Vec<u32>| {
        let job = Job::generate(prompt.clone(), Vec::new(), scope.clone(), 20);
        handle.submit(job).expect("the queue has room")
    };
    let tickets: Vec<_> = prompts.iter().map(submit).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    let runtime = runtime.expect("a runtime");
    let answers = tickets.into_iter().map(|mut ticket| {
        let mut answer = String::new();
        loop {
            match runtime.block_on(ticket.next()).expect("the engine lives") {
                Output::Text { text, .. } => answer += &text,
                Output::Done { text, .. } => break answer + &text,
                Output::Failed(error) => break error.message,
                Output::Joined { .. } | Output::Embedding(..) => {}
            }
        }
    });
    let answers = answers.collect();
    handle.stop();
    thread.join().expect("the engine ends");
    answers
}

/// Would catch a step loop that knows of one rank only. Greedy answers are equal as long as no two
/// logits are closer than the ranks' last bits, which these seeds see to.
#[test]
fn the_step_loop_runs_over_a_group() {
    let file = file_of(&Tiny::new(7).to_bytes());
    let file = ModelFile::open(file.path()).expect("the model opens");
    let mut noise = Noise(42);
    let prompts = prompts(&mut noise, tiny::VOCAB, &[50, 3, 40, 90]);
    let whole = Model::load(&file, &options(OpsKind::Reference), &mut |_| ());
    let expected = answers(RankGroup::alone(whole.expect("the model loads")), &prompts);
    assert!(
        expected
            .iter()
            .all(|answer| answer.split_whitespace().count() == 20)
    );
    let two = RankGroup::in_process(2, &file, &options(OpsKind::Reference)).expect("two ranks");
    assert_eq!(answers(two, &prompts), expected);
}
