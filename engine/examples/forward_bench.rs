//! How fast is the forward pass by itself? Prefill of 512 and 2,048 tokens, decode of 1 and 16
//! sequences, each the best and the median of several rounds, without server or sampling; then
//! what a pass costs that runs some decodes beside a chunk of somebody's prompt, which is what the
//! scheduler's step budget is made of.
//!
//!     cargo run --release -p homing-engine --example forward_bench -- [MODEL] [THREADS] [PART]
//!
//! PART is `rates` or `mixed`; both without it.
//!
//! Left out on purpose: comparison with other engines, which needs interleaved rounds on an idle
//! machine and lives in load-tests.

use std::error::Error;
use std::path::PathBuf;
use std::time::Instant;

use engine::model::{BlockId, Model, ModelFile, ModelOptions, OpsKind, SeqInput};

/// Blocks of 16 tokens that one sequence of the bench may take.
const BLOCKS_PER_SEQUENCE: usize = 160;
/// Blocks of the one long sequence whose prompt comes in chunks: 4,096 tokens and a chunk.
const LONG_BLOCKS: usize = 4_096 / 16 + 32;
const SEQUENCES_MAX: usize = 16;
const ROUNDS: usize = 7;
const DECODE_STEPS: usize = 24;
const PASSES: usize = 15;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().map_or_else(
        || "models/SmolLM2-135M-Instruct.Q4_1.gguf".into(),
        PathBuf::from,
    );
    let threads = match arguments.next() {
        Some(threads) => threads.parse()?,
        None => std::thread::available_parallelism()?.get(),
    };
    let part = arguments.next().unwrap_or_default();
    let start = Instant::now();
    let kv_blocks = BLOCKS_PER_SEQUENCE * SEQUENCES_MAX + LONG_BLOCKS;
    let options = ModelOptions {
        ops: OpsKind::Cpu,
        threads,
        kv_blocks,
    };
    let mut model = Model::load(&ModelFile::open(&path)?, &options, &mut |_| ())?;
    let (seconds, bytes) = (start.elapsed().as_secs_f64(), model.weight_bytes());
    println!(
        "loaded in {seconds:.2} s, {:.1} MB of weights, {threads} threads",
        bytes as f64 / 1e6
    );
    if part != "mixed" {
        rates(&mut model)?;
    }
    if part != "rates" {
        mixed(&mut model)?;
    }
    Ok(())
}

fn rates(model: &mut Model) -> Result<(), Box<dyn Error>> {
    for tokens in [512, 2048] {
        let rates = rounds(|| prefill(model, tokens))?;
        println!("prefill of {tokens}: {rates} tokens/s");
    }
    for (sequences, context) in [(1, 128), (1, 2048), (4, 128), (16, 128)] {
        for sequence in 0..sequences {
            fill(model, &blocks(sequence), context)?;
        }
        let rates = rounds(|| decode(model, sequences, context))?;
        println!("decode of {sequences} at {context}: {rates} tokens/s");
    }
    Ok(())
}

/// Milliseconds of a pass of some decodes at 512 tokens of context beside a chunk of one long
/// prompt at some depth.
fn mixed(model: &mut Model) -> Result<(), Box<dyn Error>> {
    for sequence in 0..SEQUENCES_MAX {
        fill(model, &blocks(sequence), 512)?;
    }
    fill(model, &long_blocks(), LONG_BLOCKS * 16)?;
    println!("milliseconds of a pass, best / median of {PASSES}");
    println!("decodes  chunk     at 0          at 2,048      at 4,096");
    for decodes in [0, 1, 8, 16] {
        for chunk in [0, 4, 8, 9, 10, 11, 12, 16, 24, 32, 64, 128, 512] {
            if decodes + chunk == 0 {
                continue;
            }
            let mut line = format!("{decodes:7} {chunk:6}");
            for context in [0, 2_048, 4_096] {
                let [best, median] = pass_time(model, decodes, (chunk, context))?;
                line += &format!("  {best:6.2} / {median:6.2}");
            }
            println!("{line}");
        }
    }
    Ok(())
}

/// Best and median time of such a pass.
fn pass_time(
    model: &mut Model,
    decodes: usize,
    (chunk, context): (usize, usize),
) -> Result<[f64; 2], Box<dyn Error>> {
    let (one, prompt) = (tokens(1), tokens(chunk));
    let tables: Vec<Vec<BlockId>> = (0..decodes).map(blocks).collect();
    let long = long_blocks();
    let mut batch: Vec<SeqInput<'_>> = tables
        .iter()
        .map(|blocks| SeqInput {
            tokens: &one,
            start: 512,
            blocks,
            logits_last: 1,
        })
        .collect();
    if chunk > 0 {
        batch.push(SeqInput {
            tokens: &prompt,
            start: context,
            blocks: &long,
            logits_last: 0,
        });
    }
    let mut logits = Vec::new();
    let mut times = Vec::new();
    for _ in 0..PASSES {
        let start = Instant::now();
        model.forward(&batch, &mut logits)?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    times.sort_by(f64::total_cmp);
    Ok([times[0], times[PASSES / 2]])
}

fn rounds(
    mut round: impl FnMut() -> Result<f64, Box<dyn Error>>,
) -> Result<String, Box<dyn Error>> {
    let mut rates = (0..ROUNDS)
        .map(|_| round())
        .collect::<Result<Vec<f64>, _>>()?;
    rates.sort_by(f64::total_cmp);
    Ok(format!(
        "median {:.0}, best {:.0}",
        rates[ROUNDS / 2],
        rates[ROUNDS - 1]
    ))
}

fn blocks(sequence: usize) -> Vec<BlockId> {
    let first = sequence * BLOCKS_PER_SEQUENCE;
    (first..first + BLOCKS_PER_SEQUENCE)
        .map(|block| BlockId(block as u32))
        .collect()
}

fn long_blocks() -> Vec<BlockId> {
    let first = BLOCKS_PER_SEQUENCE * SEQUENCES_MAX;
    (first..first + LONG_BLOCKS)
        .map(|block| BlockId(block as u32))
        .collect()
}

/// Token ids without meaning; the time does not depend on them.
fn tokens(count: usize) -> Vec<u32> {
    (0..count as u32)
        .map(|index| 1_000 + index * 37 % 40_000)
        .collect()
}

fn prefill(model: &mut Model, count: usize) -> Result<f64, Box<dyn Error>> {
    let (tokens, blocks, mut logits) = (tokens(count), blocks(0), Vec::new());
    let start = Instant::now();
    for (index, chunk) in tokens.chunks(512).enumerate() {
        let input = SeqInput {
            tokens: chunk,
            start: index * 512,
            blocks: &blocks,
            logits_last: 1,
        };
        model.forward(&[input], &mut logits)?;
    }
    Ok(count as f64 / start.elapsed().as_secs_f64())
}

fn fill(model: &mut Model, blocks: &[BlockId], count: usize) -> Result<(), Box<dyn Error>> {
    for (index, chunk) in tokens(count).chunks(512).enumerate() {
        let input = SeqInput {
            tokens: chunk,
            start: index * 512,
            blocks,
            logits_last: 0,
        };
        model.forward(&[input], &mut Vec::new())?;
    }
    Ok(())
}

fn decode(model: &mut Model, sequences: usize, context: usize) -> Result<f64, Box<dyn Error>> {
    let tables: Vec<Vec<BlockId>> = (0..sequences).map(blocks).collect();
    let token = tokens(1);
    let mut logits = Vec::new();
    let start = Instant::now();
    for step in 0..DECODE_STEPS {
        let batch: Vec<SeqInput<'_>> = tables
            .iter()
            .map(|blocks| SeqInput {
                tokens: &token,
                start: context + step,
                blocks,
                logits_last: 1,
            })
            .collect();
        model.forward(&batch, &mut logits)?;
    }
    Ok((sequences * DECODE_STEPS) as f64 / start.elapsed().as_secs_f64())
}
