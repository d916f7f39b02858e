//! What does the gateway add to a request, beside a plain proxy?
//!
//! One scripted node ([`crate::echo_node`]); in front of it nothing, nginx as a plain proxy, and our
//! gateway with everything it does for a turn (key, session, tokens, hashes, route, ledger). Rounds
//! interleave the three in each cell of body size and concurrency. Added latency is p50 through the
//! proxy less p50 direct, of the same round; CPU is what the proxy's processes used, by `/proc`.
//! Load generator, node and proxy share the machine, so ratios are what counts.

pub(crate) mod fronts;

use std::path::PathBuf;

use serde::Serialize;

use crate::error::LoadError;
use crate::http_bench::{self, Figures};
use crate::measure::{median, ratio};
use crate::process::{Program, memory};

use self::fronts::{Front, model_id, start_homing, start_nginx, start_node, url, wait_ready};

/// Flags of `homing-load gateway-bench`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Our gateway's binary
    #[arg(long)]
    pub homing: PathBuf,
    /// nginx's binary; without it only ours is measured
    #[arg(long)]
    pub nginx: Option<PathBuf>,
    /// GGUF whose tokenizer the gateway uses; without it routes are approximate
    #[arg(long)]
    pub gguf: Option<PathBuf>,
    /// Body sizes
    #[arg(long, value_delimiter = ',', default_values_t = [4096, 65_536])]
    pub body_bytes: Vec<usize>,
    /// Connections
    #[arg(long, value_delimiter = ',', default_values_t = [1, 32])]
    pub concurrency: Vec<usize>,
    /// Requests of one cell in one round
    #[arg(long, default_value_t = 5000)]
    pub requests: usize,
    /// Interleaved rounds
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// Write the figures here as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// One proxy in one cell: medians over the rounds, but for CPU, which is the mean over all of them,
/// since the kernel reports it in steps of 10 ms.
#[derive(Clone, Debug, Serialize)]
pub struct Cell {
    /// nginx or homing.
    pub proxy: &'static str,
    /// Size of the request's body.
    pub body_bytes: usize,
    /// Connections.
    pub concurrency: usize,
    /// Latency added at the median, in microseconds.
    pub added_p50_us: f64,
    /// CPU of the proxy per request, in microseconds.
    pub cpu_us_per_request: f64,
    /// Throughput of the closed loop.
    pub requests_per_s: f64,
}

/// Ours by nginx's in one cell.
#[derive(Clone, Debug, Serialize)]
pub struct CellRatio {
    /// Size of the request's body.
    pub body_bytes: usize,
    /// Connections.
    pub concurrency: usize,
    /// CPU per request.
    pub cpu: f64,
    /// Added latency at the median.
    pub added_p50: f64,
    /// Throughput.
    pub requests_per_s: f64,
}

/// The bench's result.
#[derive(Debug, Serialize)]
pub struct Comparison {
    /// Interleaved rounds.
    pub rounds: usize,
    /// Requests of a cell in a round.
    pub requests: usize,
    /// Whether the gateway tokenised the prompts.
    pub exact: bool,
    /// Every proxy in every cell.
    pub cells: Vec<Cell>,
    /// Ours by nginx's.
    pub ratios: Vec<CellRatio>,
    /// Our resident memory at the end, in MiB.
    pub homing_resident_mib: f64,
}

/// One measured cell of one round.
struct Sample {
    front: usize,
    body_bytes: usize,
    concurrency: usize,
    figures: Figures,
    cpu_us: f64,
}

/// Runs all rounds.
pub async fn run(args: &Args) -> Result<Comparison, LoadError> {
    let folder = tempfile::tempdir().map_err(LoadError::system("making a temporary folder"))?;
    let model = model_id(args);
    let (_node, address) = start_node(&model, folder.path())?;
    let mut fronts = vec![Front {
        name: "direct",
        url: url(address),
        key: None,
        program: None,
    }];
    if let Some(nginx) = &args.nginx {
        fronts.push(start_nginx(nginx, address, folder.path())?);
    }
    fronts.push(start_homing(args, &model, address, folder.path())?);
    for front in &fronts {
        wait_ready(front, &model).await?;
    }
    let samples = measure(args, &model, &fronts).await?;
    let cells = cells(args, &fronts, &samples);
    let ratios = ratios(&cells);
    let homing = fronts
        .last()
        .and_then(|f| f.program.as_ref())
        .map(Program::pid)
        .unwrap_or(0);
    Ok(Comparison {
        rounds: args.rounds,
        requests: args.requests,
        exact: args.gguf.is_some(),
        cells,
        ratios,
        homing_resident_mib: memory(homing).resident as f64 / f64::from(1 << 20),
    })
}

impl Comparison {
    /// The result for a person.
    pub fn table(&self) -> String {
        let mut out = format!(
            "{:<8} {:>7} {:>4} {:>14} {:>12} {:>8}\n",
            "proxy", "body", "c", "added p50, µs", "CPU, µs/req", "req/s"
        );
        for c in &self.cells {
            out += &format!(
                "{:<8} {:>7} {:>4} {:>14.0} {:>12.1} {:>8.0}\n",
                c.proxy,
                c.body_bytes,
                c.concurrency,
                c.added_p50_us,
                c.cpu_us_per_request,
                c.requests_per_s
            );
        }
        for r in &self.ratios {
            out += &format!(
                "ratio    {:>7} {:>4} {:>13.1}x {:>11.1}x {:>7.2}x\n",
                r.body_bytes, r.concurrency, r.added_p50, r.cpu, r.requests_per_s
            );
        }
        out + &format!("homing resident {:.0} MiB\n", self.homing_resident_mib)
    }
}

async fn measure(args: &Args, model: &str, fronts: &[Front]) -> Result<Vec<Sample>, LoadError> {
    let mut samples = Vec::new();
    for number in 0..args.rounds {
        eprintln!("round {} of {}", number + 1, args.rounds);
        for &body_bytes in &args.body_bytes {
            for &concurrency in &args.concurrency {
                for step in 0..fronts.len() {
                    // Who goes first rotates from round to round.
                    let at = (step + number) % fronts.len();
                    let bench = bench_args(args, model, &fronts[at], body_bytes, concurrency);
                    // The warm-up is a run of its own, so that its CPU is not counted.
                    let warm = http_bench::Args {
                        requests: bench.requests / 10,
                        ..bench.clone()
                    };
                    http_bench::run(&warm).await?;
                    let before = fronts[at].cpu_seconds();
                    let figures = http_bench::run(&bench).await?;
                    let used = fronts[at].cpu_seconds() - before;
                    if let Some(failure) = &figures.first_failure {
                        return Err(LoadError::program(
                            fronts[at].name,
                            format!("{} requests failed: {failure}", figures.failed),
                        ));
                    }
                    let cpu_us = used * 1e6 / args.requests as f64;
                    samples.push(Sample {
                        front: at,
                        body_bytes,
                        concurrency,
                        figures,
                        cpu_us,
                    });
                }
            }
        }
    }
    Ok(samples)
}

fn bench_args(
    args: &Args,
    model: &str,
    front: &Front,
    body_bytes: usize,
    concurrency: usize,
) -> http_bench::Args {
    http_bench::Args {
        url: front.url.clone(),
        key: front.key.clone(),
        model: model.to_owned(),
        body_bytes,
        concurrency,
        requests: args.requests,
        warmup: 0,
        stream: false,
    }
}

fn mean(values: &[f64]) -> f64 {
    ratio(values.iter().sum(), values.len() as f64)
}

/// Medians over the rounds, each round's direct latency taken off its own.
fn cells(args: &Args, fronts: &[Front], samples: &[Sample]) -> Vec<Cell> {
    let mut cells = Vec::new();
    for &body_bytes in &args.body_bytes {
        for &concurrency in &args.concurrency {
            let of = |front: usize, value: fn(&Sample) -> f64| -> Vec<f64> {
                samples
                    .iter()
                    .filter(|s| s.front == front)
                    .filter(|s| (s.body_bytes, s.concurrency) == (body_bytes, concurrency))
                    .map(value)
                    .collect()
            };
            let p50 = |s: &Sample| s.figures.latency_us.p50;
            let direct = of(0, p50);
            for (at, front) in fronts.iter().enumerate().skip(1) {
                let added: Vec<f64> = of(at, p50)
                    .iter()
                    .zip(&direct)
                    .map(|(p, d)| p - d)
                    .collect();
                cells.push(Cell {
                    proxy: front.name,
                    body_bytes,
                    concurrency,
                    added_p50_us: median(&added),
                    cpu_us_per_request: mean(&of(at, |s| s.cpu_us)),
                    requests_per_s: median(&of(at, |s| s.figures.requests_per_s)),
                });
            }
        }
    }
    cells
}

fn ratios(cells: &[Cell]) -> Vec<CellRatio> {
    let nginx = cells.iter().filter(|c| c.proxy == "nginx");
    nginx
        .filter_map(|theirs| {
            let cell = (theirs.body_bytes, theirs.concurrency);
            let ours = cells
                .iter()
                .find(|c| c.proxy == "homing" && (c.body_bytes, c.concurrency) == cell)?;
            Some(CellRatio {
                body_bytes: ours.body_bytes,
                concurrency: ours.concurrency,
                cpu: ratio(ours.cpu_us_per_request, theirs.cpu_us_per_request),
                added_p50: ratio(ours.added_p50_us, theirs.added_p50_us),
                requests_per_s: ratio(ours.requests_per_s, theirs.requests_per_s),
            })
        })
        .collect()
}
