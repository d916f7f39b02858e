//! How well does the gateway place the turns of agents, beside its peer?
//!
//! The real gateway and SMG, each in front of the same four simulated nodes ([`crate::node`]) over
//! real HTTP, with the same sessions ([`crate::agent`]): one, six or forty system prompts among
//! them, caches that hold all of it and caches half that size. Every run has nodes and a front of
//! its own, all of them fresh; the fronts take turns within each cell, and who begins rotates.
//!
//! Hits and the tokens that each node computed are the nodes' own counts. The cache that all nodes
//! would share and that never forgets is counted beside them, over the same requests. Times are in
//! model time: real time by the nodes' speed, the front's own cost included (and as much too large
//! as the nodes are fast, for all fronts alike). Beside our rows stands what the simulator says of
//! the same cell before it is run.
//!
//! With `--prefill-nodes` some of our gateway's nodes compute prompts for the others (`apart`), and it is
//! asked how many turns are good: a first token in time, and later ones quickly enough. SMG has no part in
//! such cells.

mod apart;
mod figures;
mod fronts;
mod predict;

use std::path::PathBuf;

use serde::Serialize;

use crate::agent;
use crate::error::LoadError;

use self::apart::{Apart, Bounds};
use self::figures::{Row, Sample};
use self::fronts::{Fleet, Kind, Standing};
use self::predict::Predictor;

/// Flags of `homing-load routing-bench`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Our gateway's binary
    #[arg(long)]
    pub homing: PathBuf,
    /// SMG's command; without it there is no peer
    #[arg(long)]
    pub smg: Option<PathBuf>,
    /// Further flags of SMG, as one string; each string is a front of its own
    #[arg(long, default_values = [
        "", "--cache-threshold 0.5 --balance-abs-threshold 4 --balance-rel-threshold 1.1",
    ])]
    pub smg_flags: Vec<String>,
    /// GGUF whose tokenizer and template nodes and gateway use
    #[arg(long)]
    pub gguf: PathBuf,
    /// Lines for the gateway's `[policy]`, separated by commas: b=4
    #[arg(long, value_delimiter = ',')]
    pub policy: Vec<String>,
    /// Nodes
    #[arg(long, default_value_t = 4)]
    pub nodes: u16,
    /// Blocks of 16 tokens in each node's pool, one number a cell
    #[arg(long, value_delimiter = ',', default_values_t = [20_000, 10_000])]
    pub capacity: Vec<usize>,
    /// Different system prompts among the sessions, one number a cell
    #[arg(long, value_delimiter = ',', default_values_t = [1, 6, 40])]
    pub system_prompts: Vec<usize>,
    /// Sessions of agents
    #[arg(long, default_value_t = 128)]
    pub sessions: usize,
    /// Turns of each
    #[arg(long, default_value_t = 12)]
    pub turns: usize,
    /// Tokens of a system prompt, about
    #[arg(long, default_value_t = 1500)]
    pub system_tokens: usize,
    /// Tokens of each new message, about
    #[arg(long, default_value_t = 450)]
    pub message_tokens: usize,
    /// Tokens of each answer
    #[arg(long, default_value_t = 48)]
    pub answer_tokens: u32,
    /// Mean pause between an answer and the next turn, in seconds of model time
    #[arg(long, default_value_t = 4.0)]
    pub think_s: f64,
    /// Sessions that begin in a second of model time
    #[arg(long, default_value_t = 4.0)]
    pub rate: f64,
    /// Tokens that an idle node computes in a second of model time
    #[arg(long, default_value_t = 6000.0)]
    pub prefill_rate: f64,
    /// Model time by real time
    #[arg(long, default_value_t = 4.0)]
    pub speed: f64,
    /// Who computes prompts and who answers
    #[command(flatten)]
    pub apart: Apart,
    /// When a turn is good
    #[command(flatten)]
    pub bounds: Bounds,
    /// Interleaved rounds, each with other sessions
    #[arg(long, default_value_t = 1)]
    pub rounds: usize,
    /// The first round's sessions are drawn from it
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Write the figures here as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// The bench's result.
#[derive(Debug, Serialize)]
pub struct Comparison {
    /// Interleaved rounds.
    pub rounds: usize,
    /// Requests of one run.
    pub requests: usize,
    /// Every front in every cell, means over the rounds.
    pub rows: Vec<Row>,
    /// Goals that were missed, in words.
    pub missed: Vec<String>,
}

impl Comparison {
    /// The result for a person.
    pub fn table(&self) -> String {
        figures::table(&self.rows, &self.missed)
    }
}

/// One cell of the comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Cell {
    /// Blocks of each node.
    pub capacity: usize,
    /// System prompts.
    pub system_prompts: usize,
    /// Nodes that compute prompts for the others; 0: all do everything.
    pub prefill_nodes: u16,
}

impl Cell {
    /// All of them, in the order in which they are run.
    fn all(args: &Args) -> Vec<Self> {
        let mut cells = Vec::new();
        for &capacity in &args.capacity {
            for &system_prompts in &args.system_prompts {
                for &prefill_nodes in &args.apart.prefill_nodes {
                    cells.push(Self {
                        capacity,
                        system_prompts,
                        prefill_nodes,
                    });
                }
            }
        }
        cells
    }
}

/// Runs all of it.
pub async fn run(args: &Args) -> Result<Comparison, LoadError> {
    let mut kinds = vec![Kind::Homing];
    if args.smg.is_some() {
        kinds.extend(args.smg_flags.iter().cloned().map(Kind::Smg));
    }
    args.apart.check(args.nodes)?;
    args.bounds.check()?;
    let predictor = Predictor::load(&args.gguf)?;
    let (mut samples, mut predicted) = (Vec::new(), Vec::new());
    for round in 0..args.rounds.max(1) {
        for cell in Cell::all(args) {
            let load = load(args, cell, round);
            if let Some(sample) = predictor.predict(args, cell, &load)? {
                eprintln!("round {}, {cell:?}: simulated", round + 1);
                eprintln!("  {}", sample.line());
                predicted.push((cell, sample));
            }
            for step in 0..kinds.len() {
                let kind = &kinds[(step + round) % kinds.len()];
                if cell.prefill_nodes > 0 && !matches!(kind, Kind::Homing) {
                    continue;
                }
                eprintln!("round {}, {cell:?}: {}", round + 1, kind.name());
                let sample = once(args, cell, kind, &load).await?;
                eprintln!("  {}", sample.line());
                samples.push((cell, kind.name(), sample));
            }
        }
    }
    let rows = figures::rows(&samples, &predicted);
    Ok(Comparison {
        rounds: args.rounds.max(1),
        requests: args.sessions * args.turns,
        missed: figures::missed(&rows, args.capacity.iter().copied().max().unwrap_or(0)),
        rows,
    })
}

/// What the agents do in one round; whom they ask is filled in later.
fn load(args: &Args, cell: Cell, round: usize) -> agent::Args {
    agent::Args {
        url: String::new(),
        key: None,
        model: String::new(),
        sessions: args.sessions,
        turns: args.turns,
        rate: args.rate * args.speed,
        seed: args.seed + round as u64,
        system_prompts: cell.system_prompts,
        system_tokens: args.system_tokens,
        message_tokens: args.message_tokens,
        think_ms: (args.think_s * 1000.0 / args.speed) as u64,
        subagents: 0,
        max_tokens: args.answer_tokens,
        stream: true,
        debug: false,
        timeout_s: 120,
        json: None,
        records: None,
    }
}

/// One run: fresh nodes, a fresh front, all sessions.
async fn once(
    args: &Args,
    cell: Cell,
    kind: &Kind,
    load: &agent::Args,
) -> Result<Sample, LoadError> {
    let folder = tempfile::tempdir().map_err(LoadError::system("making a temporary folder"))?;
    let fleet = Fleet::start(args, cell, folder.path())?;
    let front = Standing::start(args, kind, &fleet, folder.path())?;
    front.wait_ready(&fleet).await?;
    let before = fleet.counts().await?;
    let load = agent::Args {
        url: front.url.clone(),
        key: front.key.clone(),
        model: fleet.model.clone(),
        ..load.clone()
    };
    let ran = agent::run(&load).await?;
    let after = fleet.counts().await?;
    Ok(Sample::of(&ran, (&before, &after), args, cell))
}
