//! What are the tiers below the pool worth when the working set is four times the pool?
//!
//! Conversations that grow take turns, one request at a time, so that each has been pushed out of
//! the pool by the time of its next turn. The same turns go to three engines in turn: one whose pool
//! keeps everything, one with the small pool alone, one with the small pool and host memory for all
//! the rest, and one with as much host memory as pool and a disk for the rest.
//! Printed: cached tokens against the pool that keeps everything, and the mean time to the first
//! token against the pool alone, over all turns (each conversation's first, cold everywhere, among
//! them).
//!
//!     cargo run --release -p homing-engine --example tiers_bench -- [MODEL] [THREADS]
//!
//! Left out on purpose: HTTP, and requests that run at once: what is compared is what a turn costs.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cache_index::block::{BLOCK_TOKENS, Namespace, hash_chain};
use engine::engine::{Handle, Job, Output, Parts};
use engine::kv::store::Tier;
use engine::kv::store::disk::{Disk, Identity};
use engine::kv::table::Scope;
use engine::metrics::Metrics;
use engine::model::{Model, ModelFile, ModelOptions, OpsKind};
use engine::parallel::RankGroup;
use engine::scheduler::pace::Beside;

const CONVERSATIONS: usize = 8;
const TURNS: usize = 10;
/// A system prompt that all share, and what each conversation opens with.
const SHARED_TOKENS: usize = 96;
const OPENING_TOKENS: usize = 400;
/// What each turn adds besides its answer.
const TURN_TOKENS: usize = 48;
const ANSWER_TOKENS: usize = 8;

struct Node {
    name: &'static str,
    handle: Handle,
    thread: JoinHandle<()>,
    metrics: Arc<Metrics>,
    runtime: tokio::runtime::Runtime,
    cached: usize,
    first_token: Duration,
}

/// An answer, as far as it is looked at.
struct Told {
    tokens: Vec<u32>,
    cached: usize,
    first_token: Duration,
}

impl Node {
    fn start(
        name: &'static str,
        (path, threads): (&Path, usize),
        kv_blocks: usize,
        host_blocks: usize,
        dir: Option<&Path>,
    ) -> Result<Node, Box<dyn Error>> {
        let options = ModelOptions {
            ops: OpsKind::Cpu,
            threads,
            kv_blocks,
        };
        let model = Model::load(&ModelFile::open(path)?, &options, &mut |_| ())?;
        let layout = model.block_layout();
        let identity = Identity::new(&layout, [0; 32]);
        let open = |dir| Disk::open(dir, 4 << 30, identity, layout.body_bytes());
        let disk = dir.map(open).transpose()?;
        let metrics = Arc::new(Metrics::new("bench", kv_blocks));
        let parts = Parts {
            vocab: model.shape().vocab,
            layers: model.shape().layers,
            device: Box::new(RankGroup::alone(model)),
            token_bytes: Box::new(|_, _| Vec::new()),
            drafter: None,
            kv_blocks: u32::try_from(kv_blocks)?,
            host_blocks,
            disk,
            shared: None,
            orders: None,
            step_tokens: 256,
            beside_decode: Beside::Paced,
            queue_max: 16,
            metrics: Arc::clone(&metrics),
            events: None,
        };
        let (handle, thread) = engine::engine::start(parts)?;
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        Ok(Node {
            name,
            handle,
            thread,
            metrics,
            runtime,
            cached: 0,
            first_token: Duration::ZERO,
        })
    }

    fn ask(&self, prompt: &[u32]) -> Result<Told, Box<dyn Error>> {
        let namespace = Namespace::new("bench", None, None);
        let chain = hash_chain(&namespace, prompt);
        let scope = Scope {
            namespace,
            salt: None,
        };
        let mut job = Job::generate(prompt.to_vec(), chain, scope, ANSWER_TOKENS);
        job.token_ids = true;
        let started = Instant::now();
        let mut ticket = self.handle.submit(job)?;
        let mut first_token = None;
        let mut all = Vec::new();
        loop {
            let output = self.runtime.block_on(ticket.next());
            match output.ok_or("the engine has ended")? {
                Output::Text { tokens, .. } => all.extend(tokens),
                Output::Done { tokens, usage, .. } => {
                    all.extend(tokens);
                    return Ok(Told {
                        tokens: all.iter().map(|token| token.id).collect(),
                        cached: usage.cached_tokens,
                        first_token: first_token.unwrap_or_else(|| started.elapsed()),
                    });
                }
                Output::Failed(error) => return Err(error.into()),
                Output::Joined { .. } | Output::Embedding(..) => continue,
            }
            first_token.get_or_insert_with(|| started.elapsed());
        }
    }

    fn end(self) -> Result<(), &'static str> {
        self.handle.stop();
        self.thread.join().map_err(|_| "the engine panicked")
    }
}

/// A stream of tokens that needs no crate: what they say does not matter.
struct Noise(u64);

impl Noise {
    fn tokens(&mut self, count: usize) -> Vec<u32> {
        let mut next = || {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963);
            1_000 + (self.0 >> 33) as u32 % 40_000
        };
        (0..count).map(|_| next()).collect()
    }
}

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
    let each = OPENING_TOKENS + TURNS * (TURN_TOKENS + ANSWER_TOKENS);
    let working_set = (SHARED_TOKENS + CONVERSATIONS * each) / BLOCK_TOKENS;
    let pool = working_set / 4;
    let machine = (path.as_path(), threads);
    let folder = tempfile::tempdir_in(std::env::current_dir()?)?;
    let dir = Some(folder.path());
    let mut nodes = [
        Node::start("a pool for everything", machine, 2 * working_set, 0, None)?,
        Node::start("the pool alone", machine, pool, 0, None)?,
        Node::start("the pool and host memory", machine, pool, working_set, None)?,
        Node::start("the pool, host and disk", machine, pool, pool, dir)?,
    ];
    println!(
        "{CONVERSATIONS} conversations of {TURNS} turns, working set {working_set} blocks, pool \
         {pool}, {threads} threads"
    );
    let mut noise = Noise(7);
    let shared = noise.tokens(SHARED_TOKENS);
    let mut conversations: Vec<_> = (0..CONVERSATIONS)
        .map(|_| [&shared[..], &noise.tokens(OPENING_TOKENS)[..]].concat())
        .collect();
    for turn in 0..TURNS {
        for conversation in &mut conversations {
            let mut said = Vec::new();
            for offset in 0..nodes.len() {
                let count = nodes.len();
                let node = &mut nodes[(turn + offset) % count];
                let told = node.ask(conversation)?;
                node.cached += told.cached;
                node.first_token += told.first_token;
                said.push(told.tokens);
            }
            if said.iter().any(|tokens| *tokens != said[0]) {
                return Err("answers differ".into());
            }
            conversation.extend(&said[0]);
            conversation.extend(noise.tokens(TURN_TOKENS));
        }
    }
    report(&nodes);
    nodes.into_iter().try_for_each(Node::end)?;
    Ok(())
}

fn report(nodes: &[Node; 4]) {
    let turns = (CONVERSATIONS * TURNS) as f64;
    let [all, alone, ..] = nodes;
    for node in nodes {
        let tiers = &node.metrics.tiers;
        println!(
            "{:<25} cached {:>6} tokens ({:.3}), first token {:>7.1} ms ({:.3}); tokens copied from \
             host memory {:>6}, read from disk {:>6}; late {}, dropped {}",
            node.name,
            node.cached,
            node.cached as f64 / all.cached as f64,
            node.first_token.as_secs_f64() * 1e3 / turns,
            node.first_token.as_secs_f64() / alone.first_token.as_secs_f64(),
            tiers.hit_tokens(Tier::Host).get(),
            tiers.hit_tokens(Tier::Disk).get(),
            tiers.late.get(),
            tiers.dropped.get(),
        );
    }
    println!("cached tokens against a pool for everything, first token against the pool alone");
}
