//! What does the gateway add to a request, beside its peers?
//!
//! One scripted node ([`crate::echo_node`]); in front of it nothing, nginx as a plain proxy (the
//! floor), SMG, and our gateway with everything it does for a turn (key, session, translation,
//! tokens, hashes, route, ledger). Rounds interleave the four in each row of dialect, body size and
//! concurrency. The turns are those of agents with tools, whose earlier turns every front has seen
//! (`agent_turns`). nginx and SMG pass Messages and Responses on to the node, which speaks them;
//! ours asks it in Chat Completions and translates.
//!
//! Added latency is p50 through the proxy less p50 direct, of the same round; CPU is what the
//! proxy's processes used, by `/proc`. Load generator, node and proxy share the machine, so ratios
//! are what counts.

mod agent_turns;
mod figures;
pub(crate) mod fronts;
mod lanes;

use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

use crate::error::LoadError;
use crate::measure::Summary;
use crate::process::{Program, memory, read_text};

use self::agent_turns::{Bodies, Delivery, Dialect};
use self::figures::{Cell, CellRatio, Row, Sample};
use self::fronts::wait_ready;
use self::fronts::{Front, model_id, start_homing, start_nginx, start_node, start_smg, url};
use self::lanes::Load;

/// Words of an answer: chunks of a stream, so that the request itself weighs little in a chunk's
/// CPU, and a usual length of an agent's turn.
const WORDS: usize = 128;
/// Body of a request for a stream, bytes.
const STREAM_BODY_BYTES: usize = 4096;
/// Requests before the measured ones, as a share of them.
const WARMUP_SHARE: usize = 10;
/// Steps that no two loads share: more than any load has, over all of its agents.
const STEPS_PER_LOAD: u64 = 1_000_000_000;

/// Flags of `homing-load gateway-bench`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Our gateway's binary
    #[arg(long)]
    pub homing: PathBuf,
    /// nginx's binary; without it there is no floor
    #[arg(long)]
    pub nginx: Option<PathBuf>,
    /// SMG's command; without it there is no peer
    #[arg(long)]
    pub smg: Option<PathBuf>,
    /// GGUF whose tokenizer the gateway uses; without it routes are approximate
    #[arg(long)]
    pub gguf: Option<PathBuf>,
    /// What the clients speak
    #[arg(long, value_delimiter = ',', default_values = ["chat", "messages", "responses"])]
    pub dialects: Vec<Dialect>,
    /// Body sizes
    #[arg(long, value_delimiter = ',', default_values_t = [4096, 65_536])]
    pub body_bytes: Vec<usize>,
    /// Connections
    #[arg(long, value_delimiter = ',', default_values_t = [1, 32])]
    pub concurrency: Vec<usize>,
    /// Requests of one row in one round
    #[arg(long, default_value_t = 4000)]
    pub requests: usize,
    /// Clients that stream
    #[arg(long, default_value_t = 8)]
    pub stream_clients: usize,
    /// Streams of one row in one round; 0 leaves streams out
    #[arg(long, default_value_t = 48)]
    pub streams: usize,
    /// Milliseconds between the chunks of a stream
    #[arg(long, default_value_t = 5)]
    pub word_ms: u64,
    /// Interleaved rounds
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// Write the figures here as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// The bench's result.
#[derive(Debug, Serialize)]
pub struct Comparison {
    /// Interleaved rounds.
    pub rounds: usize,
    /// Requests of a row in a round.
    pub requests: usize,
    /// Whether the gateway tokenised the prompts.
    pub exact: bool,
    /// Load average over one minute before the first round: what else the machine did.
    pub load_before: f64,
    /// Every proxy in every row.
    pub cells: Vec<Cell>,
    /// Ours by each peer's.
    pub ratios: Vec<CellRatio>,
    /// Our resident memory at the end, in MiB.
    pub homing_resident_mib: f64,
}

/// Runs all rounds.
pub async fn run(args: &Args) -> Result<Comparison, LoadError> {
    let folder = tempfile::tempdir().map_err(LoadError::system("making a temporary folder"))?;
    let load_before = load_average()?;
    let model = model_id(args);
    let (_node, address) = start_node(args, &model, folder.path())?;
    let mut fronts = vec![Front {
        name: "direct",
        url: url(address),
        key: None,
        program: None,
    }];
    if let Some(nginx) = &args.nginx {
        fronts.push(start_nginx(nginx, address, folder.path())?);
    }
    if let Some(smg) = &args.smg {
        fronts.push(start_smg(smg, address, folder.path())?);
    }
    fronts.push(start_homing(args, &model, address, folder.path())?);
    for front in &fronts {
        wait_ready(args, front, &model).await?;
    }
    let rows = rows(args);
    let samples = measure(args, &model, &fronts, &rows).await?;
    let cells = figures::cells(&fronts, &rows, &samples);
    let ratios = figures::ratios(&cells);
    let homing = fronts.last().and_then(|f| f.program.as_ref());
    Ok(Comparison {
        rounds: args.rounds,
        requests: args.requests,
        exact: args.gguf.is_some(),
        load_before,
        cells,
        ratios,
        homing_resident_mib: memory(homing.map_or(0, Program::pid)).resident as f64
            / f64::from(1 << 20),
    })
}

impl Comparison {
    /// The result for a person.
    pub fn table(&self) -> String {
        figures::table(&self.cells, &self.ratios)
            + &format!(
                "\nhoming resident {:.0} MiB; load average before {:.1}\n",
                self.homing_resident_mib, self.load_before
            )
    }
}

fn load_average() -> Result<f64, LoadError> {
    let text = read_text("/proc/loadavg".as_ref())?;
    let first = text.split_whitespace().next();
    Ok(first.and_then(|n| n.parse().ok()).unwrap_or_default())
}

fn rows(args: &Args) -> Vec<Row> {
    let mut rows = Vec::new();
    for &dialect in &args.dialects {
        for &body_bytes in &args.body_bytes {
            rows.extend(args.concurrency.iter().map(|&concurrency| Row {
                dialect,
                body_bytes,
                concurrency,
                streams: false,
            }));
        }
        if args.streams > 0 {
            rows.push(Row {
                dialect,
                body_bytes: STREAM_BODY_BYTES,
                concurrency: args.stream_clients,
                streams: true,
            });
        }
    }
    rows
}

async fn measure(
    args: &Args,
    model: &str,
    fronts: &[Front],
    rows: &[Row],
) -> Result<Vec<Sample>, LoadError> {
    let mut samples = Vec::new();
    let mut loads = 0;
    for number in 0..args.rounds {
        eprintln!("round {} of {}", number + 1, args.rounds);
        for &row in rows {
            let delivery = row.delivery();
            let bodies = Bodies::new(row.dialect, model, row.body_bytes, delivery);
            for step in 0..fronts.len() {
                // Who goes first rotates from round to round.
                let front = (step + number) % fronts.len();
                loads += 2;
                let load = Load {
                    front: &fronts[front],
                    dialect: row.dialect,
                    bodies: &bodies,
                    delivery,
                    agents: row.concurrency,
                    requests: if row.streams {
                        args.streams
                    } else {
                        args.requests
                    },
                    words: WORDS,
                    new: loads * STEPS_PER_LOAD,
                };
                let (latency_us, cpu_us, requests_per_s) = sample(load).await?;
                samples.push(Sample {
                    front,
                    row,
                    latency_us,
                    cpu_us,
                    requests_per_s,
                });
            }
        }
    }
    Ok(samples)
}

impl Row {
    fn delivery(self) -> Delivery {
        if self.streams {
            Delivery::Stream
        } else {
            Delivery::Whole
        }
    }
}

/// Latency, CPU, throughput of one load.
async fn sample(load: Load<'_>) -> Result<(f64, f64, f64), LoadError> {
    // The warm-up is a load of its own, so that its CPU is not counted. Each agent sends its
    // opening there.
    let warm = Load {
        requests: (load.requests / WARMUP_SHARE).max(load.agents),
        new: load.new - STEPS_PER_LOAD,
        ..load
    };
    lanes::send(warm).await?;
    let before = load.front.cpu_seconds();
    let sent = lanes::send(load).await?;
    let used = load.front.cpu_seconds() - before;
    let count = sent.latencies.len() as f64;
    let (times, units) = match load.delivery {
        Delivery::Whole => (&sent.latencies, count),
        Delivery::Stream => (&sent.firsts, count * load.words as f64),
    };
    let us = |d: &Duration| d.as_secs_f64() * 1e6;
    Ok((
        Summary::of(times.iter().map(us)).p50,
        used * 1e6 / units,
        count / sent.took.as_secs_f64(),
    ))
}
