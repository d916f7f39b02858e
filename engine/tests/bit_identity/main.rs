//! Does a sequence's answer depend on anything but the sequence?
//!
//! Logits must be the same to the last bit whatever else is in the batch, however the prompt was
//! cut, and whether its prefix was computed or found in the pool; here also over thread counts and
//! over kernel variants. A small random model with every storage format goes through all variants,
//! the default model through those that are fast enough.

mod blocks;
mod broken;
mod memory;
#[path = "../mooncake_twin/mod.rs"]
mod mooncake_twin;
mod packed;
mod ranks;
mod refusals;
mod seams;
mod shared;
mod tiers;
mod tiny;

use std::io::Write;
use std::path::{Path, PathBuf};

use engine::model::{
    BLOCK_TOKENS, BlockId, Model, ModelFile, ModelOptions, OpsKind, SeqInput, Variant,
};
use tiny::{Noise, Tiny};

/// Blocks of one sequence in these tests.
const BLOCKS: usize = 40;
const SEQUENCES: usize = 5;

/// A sequence under way.
struct Run {
    tokens: Vec<u32>,
    done: usize,
    blocks: Vec<BlockId>,
    logits: Vec<Vec<u32>>,
}

fn file_of(bytes: &[u8]) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.write_all(bytes).expect("room for a small model");
    file
}

/// The serving ops with every format that their pool can have.
const POOLS: [OpsKind; 3] = [OpsKind::Cpu, OpsKind::CpuBf16, OpsKind::CpuInt8];

fn load(path: &Path, variant: Variant, threads: usize) -> Model {
    load_storing(OpsKind::Cpu, path, variant, threads)
}

fn load_storing(ops: OpsKind, path: &Path, variant: Variant, threads: usize) -> Model {
    let file = ModelFile::open(path).expect("the model opens");
    let options = ModelOptions {
        ops,
        threads,
        kv_blocks: BLOCKS * SEQUENCES,
    };
    Model::load_on(variant, &file, &options, &mut |_| ()).expect("the model loads")
}

/// The blocks of a slot, in an order that is not that of memory.
fn blocks(slot: usize) -> Vec<BlockId> {
    (0..BLOCKS)
        .rev()
        .map(|block| BlockId((block * SEQUENCES + slot) as u32))
        .collect()
}

fn runs(prompts: &[Vec<u32>]) -> Vec<Run> {
    let run = |(slot, tokens): (usize, &Vec<u32>)| Run {
        tokens: tokens.clone(),
        done: 0,
        blocks: blocks(slot),
        logits: Vec::new(),
    };
    prompts.iter().enumerate().map(run).collect()
}

/// Runs the next `counts[i]` tokens of every sequence (0: not in the batch) in one pass.
fn step(model: &mut Model, runs: &mut [Run], counts: &[usize]) {
    let vocab = model.shape().vocab;
    let mut logits = Vec::new();
    let taking = || {
        counts
            .iter()
            .copied()
            .enumerate()
            .filter(|(_, count)| *count > 0)
    };
    let batch: Vec<SeqInput<'_>> = taking()
        .map(|(index, count)| SeqInput {
            tokens: &runs[index].tokens[runs[index].done..][..count],
            start: runs[index].done,
            blocks: &runs[index].blocks,
            logits_last: count,
        })
        .collect();
    model.forward(&batch, &mut logits).expect("a correct batch");
    let mut rows = logits.chunks_exact(vocab);
    for (index, count) in taking() {
        let bits = |row: &[f32]| row.iter().map(|logit| logit.to_bits()).collect();
        runs[index]
            .logits
            .extend(rows.by_ref().take(count).map(bits));
        runs[index].done += count;
    }
    assert!(rows.next().is_none());
}

/// Every prompt by itself, in one pass.
fn alone(model: &mut Model, prompts: &[Vec<u32>]) -> Vec<Vec<Vec<u32>>> {
    let mut runs = runs(prompts);
    for index in 0..runs.len() {
        let mut counts = vec![0; runs.len()];
        counts[index] = runs[index].tokens.len();
        step(model, &mut runs, &counts);
    }
    runs.into_iter().map(|run| run.logits).collect()
}

/// All prompts together, in chunks of random sizes, some sequences pausing now and then.
fn together(model: &mut Model, prompts: &[Vec<u32>], noise: &mut Noise) -> Vec<Vec<Vec<u32>>> {
    let mut runs = runs(prompts);
    while runs.iter().any(|run| run.done < run.tokens.len()) {
        let counts: Vec<usize> = runs
            .iter()
            .map(|run| {
                let left = run.tokens.len() - run.done;
                let most = [0, 1, 1, 3, 16, 40, 200, left][noise.below(8)];
                left.min(most)
            })
            .collect();
        if counts.iter().any(|count| *count > 0) {
            step(model, &mut runs, &counts);
        }
    }
    runs.into_iter().map(|run| run.logits).collect()
}

/// The first prompt's blocks are the prefix of a second sequence, its partial tail block copied;
/// that sequence then runs the rest. Returns its logits after the split.
fn after_prefix(model: &mut Model, prompt: &[u32], split: usize) -> Vec<Vec<u32>> {
    let mut runs = runs(&[prompt.to_vec(), prompt.to_vec()]);
    step(model, &mut runs, &[split, 0]);
    let full = split / BLOCK_TOKENS;
    let shared = runs[0].blocks[..full].to_vec();
    runs[1].blocks[..full].copy_from_slice(&shared);
    model.copy_block(runs[0].blocks[full], runs[1].blocks[full]);
    runs[1].done = split;
    step(model, &mut runs, &[0, prompt.len() - split]);
    runs.swap_remove(1).logits
}

fn check(model: &mut Model, prompts: &[Vec<u32>], expected: &[Vec<Vec<u32>>], noise: &mut Noise) {
    assert!(alone(model, prompts) == expected, "alone");
    assert!(
        together(model, prompts, noise) == expected,
        "together, in chunks"
    );
    for (prompt, expected) in prompts
        .iter()
        .zip(expected)
        .filter(|(prompt, _)| prompt.len() > 1)
    {
        let split = 1 + noise.below(prompt.len() - 1);
        let found = after_prefix(model, prompt, split);
        assert!(
            found == expected[split..],
            "after a cached prefix of {split} tokens"
        );
    }
}

fn prompts(noise: &mut Noise, vocab: usize, lens: &[usize]) -> Vec<Vec<u32>> {
    lens.iter()
        .map(|len| (0..*len).map(|_| noise.below(vocab) as u32).collect())
        .collect()
}

/// Would catch a sum that is cut differently for more rows, another tile or another thread; a
/// variant that rounds differently; stale values read from the pool.
#[test]
fn no_bit_depends_on_company_chunks_threads_or_variant() {
    let file = file_of(&Tiny::new(7).to_bytes());
    let mut noise = Noise(11);
    let prompts = prompts(&mut noise, tiny::VOCAB, &[1, 17, 100, 270, 600]);
    let mut seen = Vec::new();
    for ops in POOLS {
        let mut portable = load_storing(ops, file.path(), Variant::Portable, 1);
        let expected = alone(&mut portable, &prompts);
        let finite = |bits: &u32| f32::from_bits(*bits).is_finite();
        assert!(expected.iter().flatten().flatten().all(finite));
        let available = Variant::ALL.into_iter().filter(|v| v.is_available());
        for (variant, threads) in available.flat_map(|v| [1, 2, 3].map(|threads| (v, threads))) {
            println!("{ops:?}, {}, {threads} threads", variant.as_str());
            let mut model = load_storing(ops, file.path(), variant, threads);
            check(&mut model, &prompts, &expected, &mut noise);
        }
        assert!(!seen.contains(&expected), "{ops:?} stores as another does");
        seen.push(expected);
    }
}

/// The same on the default model, where sizes are real.
#[test]
fn no_bit_depends_on_company_or_chunks_in_the_default_model() {
    let default = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../models/SmolLM2-135M-Instruct.Q4_1.gguf"
    );
    let path = std::env::var_os("HOMING_MODEL").map_or_else(|| default.into(), PathBuf::from);
    assert!(
        path.exists(),
        "{} is missing: run `make setup`",
        path.display()
    );
    let mut noise = Noise(12);
    let prompts = prompts(&mut noise, 49_152, &[5, 33, 290]);
    let fast = [Variant::Avx512, Variant::Avx2]
        .into_iter()
        .filter(|v| v.is_available());
    for ops in POOLS {
        let mut expected = None;
        for (variant, threads) in fast.clone().flat_map(|v| [(v, 1), (v, 2)]) {
            println!("{ops:?}, {}, {threads} threads", variant.as_str());
            let mut model = load_storing(ops, &path, variant, threads);
            let expected = expected.get_or_insert_with(|| alone(&mut model, &prompts));
            check(&mut model, &prompts, expected, &mut noise);
        }
    }
}
