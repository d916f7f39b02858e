//! What our engine shows without an opponent: how it fares when another process keeps a core busy,
//! what memory it takes beyond weights and KV pool, and whether two nodes of one thread do as much
//! as one node of two.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use futures_util::future::join_all;
use serde::Serialize;

use super::Args;
use super::prompts::Prompts;
use super::quiet::{OTHERS_MOST, Quiet};
use super::rows::{Row, complete};
use super::sides::{Running, Side};
use crate::error::LoadError;
use crate::http::Target;
use crate::measure::{median, ratio};
use crate::process::memory;

/// The pool of the node whose memory is measured: small enough that its prompts touch all of it.
const POOL_BYTES: u64 = 128 << 20;
/// Prompts that do so, of 2,048 tokens each: for a pool of 16 KiB a token, twice over.
const POOL_PROMPTS: usize = 8;
/// Requests of a round of the two arrangements of nodes.
const REQUESTS: usize = 32;
/// Their prompts and answers.
const REQUEST_TOKENS: (usize, u32) = (256, 48);

/// The figures.
#[derive(Debug, Serialize)]
pub struct Alone {
    /// Decode with a core kept busy by decode without, medians of rounds.
    pub busy_core: f64,
    /// The most memory ever resident beyond the file's size and the pool, in MiB.
    pub memory_mib: f64,
    /// Throughput of two nodes of one thread by that of one node of two.
    pub two_nodes: f64,
    /// The most that others took of a core in a round of these figures.
    pub others: f64,
}

impl Alone {
    pub(super) fn lines(&self) -> String {
        format!(
            "decode with one core busy {:.2} of idle; memory beyond weights and pool {:.0} MiB; \
             two nodes of half the threads {:.2} of one; others took at most {:.3} of a core{}\n",
            self.busy_core,
            self.memory_mib,
            self.two_nodes,
            self.others,
            if self.others > OTHERS_MOST {
                ": CONTENDED"
            } else {
                ""
            },
        )
    }
}

/// Measures all of them.
pub(super) async fn measure(args: &Args, prompts: &mut Prompts) -> Result<Alone, LoadError> {
    let mut others: f64 = 0.0;
    let busy_core = busy_core(args, prompts, &mut others).await?;
    let two_nodes = two_nodes(args, prompts, &mut others).await?;
    Ok(Alone {
        busy_core,
        memory_mib: beyond(args, prompts).await?,
        two_nodes,
        others,
    })
}

/// A thread that never rests, on the first core.
struct Burner {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Burner {
    fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut first = rustix::thread::CpuSet::new();
            first.set(0);
            // Where it may not be pinned it burns all the same.
            let _ = rustix::thread::sched_setaffinity(None, &first);
            while !seen.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        Self {
            stop,
            thread: Some(thread),
        }
    }
}

impl Drop for Burner {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A thread that only spins cannot have panicked.
            let _ = thread.join();
        }
    }
}

async fn busy_core(args: &Args, prompts: &mut Prompts, others: &mut f64) -> Result<f64, LoadError> {
    let mut running = [Some(Running::new(Side::ours(args)))];
    let row = Row::Decode128;
    let (mut idle, mut busy) = (Vec::new(), Vec::new());
    for round in 0..=args.rounds {
        let quiet = Quiet::begin(&mut running);
        let [Some(ours)] = &mut running else { break };
        let without = row.measure(ours, prompts).await?;
        let burner = Burner::start();
        let with = row.measure(ours, prompts).await?;
        drop(burner);
        // The first round touches pages for the first time.
        if round > 0 {
            *others = others.max(quiet.others(&running));
            idle.push(without);
            busy.push(with);
        }
    }
    Ok(ratio(median(&busy), median(&idle)))
}

async fn beyond(args: &Args, prompts: &mut Prompts) -> Result<f64, LoadError> {
    let mut args = args.clone();
    let pool = POOL_BYTES.to_string();
    args.ours_flags.extend(["--kv-memory".to_owned(), pool]);
    let mut running = Running::new(Side::ours(&args));
    for _ in 0..POOL_PROMPTS {
        Row::Prefill2048.measure(&mut running, prompts).await?;
    }
    Row::Decode16.measure(&mut running, prompts).await?;
    let peak = running.pid().map(memory).unwrap_or_default().peak;
    let file = std::fs::metadata(&args.model).map_err(LoadError::file(&args.model))?;
    let beyond = peak as f64 - (file.len() + POOL_BYTES) as f64;
    Ok(beyond / f64::from(1 << 20))
}

async fn two_nodes(args: &Args, prompts: &mut Prompts, others: &mut f64) -> Result<f64, LoadError> {
    let half = || {
        Some(Running::new(Side::ours_with(
            args,
            args.threads.div_ceil(2),
        )))
    };
    let mut running = [Some(Running::new(Side::ours(args))), half(), half()];
    let mut targets = Vec::new();
    for running in running.iter_mut().flatten() {
        targets.push(running.target(prompts).await?);
    }
    let (mut one, mut two) = (Vec::new(), Vec::new());
    for round in 0..=args.rounds {
        let quiet = Quiet::begin(&mut running);
        let alone = burst(&targets[..1], prompts).await?;
        let both = burst(&targets[1..], prompts).await?;
        if round > 0 {
            *others = others.max(quiet.others(&running));
            one.push(alone);
            two.push(both);
        }
    }
    Ok(ratio(median(&one), median(&two)))
}

/// Seconds until all of many requests, dealt out to the nodes in turn, are answered.
async fn burst(nodes: &[Target], prompts: &mut Prompts) -> Result<f64, LoadError> {
    let (tokens, answer) = REQUEST_TOKENS;
    let texts: Vec<String> = (0..REQUESTS).map(|_| prompts.next(tokens)).collect();
    let started = Instant::now();
    let model = prompts.model_id();
    let asked = texts.iter().enumerate().map(|(at, text)| {
        let node = &nodes[at % nodes.len()];
        complete(node, model, text, answer)
    });
    for outcome in join_all(asked).await {
        if let Some(failure) = outcome.failure {
            return Err(LoadError::program("a node", failure.message));
        }
    }
    Ok(started.elapsed().as_secs_f64())
}
