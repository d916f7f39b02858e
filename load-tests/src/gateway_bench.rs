//! What does the gateway add to a request, beside a plain proxy?
//!
//! One scripted node ([`crate::echo_node`]); in front of it nothing, nginx as a plain proxy, and our
//! gateway with everything it does for a turn (key, session, tokens, hashes, route, ledger). Rounds
//! interleave the three in each cell of body size and concurrency. Added latency is p50 through the
//! proxy less p50 direct, of the same round; CPU is what the proxy's processes used, by `/proc`.
//! Load generator, node and proxy share the machine, so ratios are what counts.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde::Serialize;

use crate::error::LoadError;
use crate::http_bench::{self, Figures};
use crate::measure::{median, ratio};
use crate::process::{Program, cpu_seconds, family, memory};

/// A program that does not answer by then will not.
const START_TIMEOUT: Duration = Duration::from_secs(60);

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
    #[arg(long, default_value_t = 3000)]
    pub requests: usize,
    /// Interleaved rounds
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// Write the figures here as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// One proxy in one cell, medians over the rounds.
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

/// What stands at one address.
struct Front {
    name: &'static str,
    url: String,
    key: Option<String>,
    program: Option<Program>,
}

impl Front {
    fn cpu_seconds(&self) -> f64 {
        let pid = self.program.as_ref().map(Program::pid);
        pid.map(family)
            .unwrap_or_default()
            .into_iter()
            .map(cpu_seconds)
            .sum()
    }
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
                    cpu_us_per_request: median(&of(at, |s| s.cpu_us)),
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

fn url(address: SocketAddr) -> String {
    format!("http://{address}/v1")
}

fn model_id(args: &Args) -> String {
    let stem = args
        .gguf
        .as_deref()
        .and_then(Path::file_stem)
        .and_then(|s| s.to_str());
    stem.unwrap_or("echo").to_owned()
}

fn free_address() -> Result<SocketAddr, LoadError> {
    TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .map_err(LoadError::system("asking for a port"))
}

fn start_node(model: &str, folder: &Path) -> Result<(Program, SocketAddr), LoadError> {
    let own = std::env::current_exe().map_err(LoadError::system("finding this program"))?;
    let mut command = Command::new(own);
    command.args(["echo-node", "--model", model]);
    let node = Program::start("echo-node", &mut command, &folder.join("echo-node.log"))?;
    let line = node.line(START_TIMEOUT)?;
    let address = line
        .strip_prefix("http://")
        .and_then(|a| a.parse().ok())
        .ok_or_else(|| node.trouble(&format!("printed {line:?} in place of its address")))?;
    Ok((node, address))
}

/// One worker, keep-alive to the node, bodies in memory: what a tuned plain proxy would run.
fn start_nginx(nginx: &Path, node: SocketAddr, folder: &Path) -> Result<Front, LoadError> {
    let address = free_address()?;
    let prefix = folder.join("nginx");
    for name in ["logs", "body", "proxy"] {
        let sub = prefix.join(name);
        std::fs::create_dir_all(&sub).map_err(LoadError::file(&sub))?;
    }
    let root = prefix.display();
    let config = format!(
        "daemon off; worker_processes 1; pid {root}/pid; error_log {root}/logs/error.log;\n\
         events {{ worker_connections 1024; }}\n\
         http {{ access_log off; tcp_nodelay on; keepalive_requests 1000000;\n\
         client_body_temp_path {root}/body; proxy_temp_path {root}/proxy;\n\
         fastcgi_temp_path {root}/proxy; uwsgi_temp_path {root}/proxy; scgi_temp_path {root}/proxy;\n\
         client_body_buffer_size 1m; client_max_body_size 64m;\n\
         upstream node {{ server {node}; keepalive 64; keepalive_requests 1000000; }}\n\
         server {{ listen {address} backlog=1024; location / {{ proxy_pass http://node;\n\
         proxy_http_version 1.1; proxy_set_header Connection \"\"; proxy_buffering off; }} }} }}\n"
    );
    let path = prefix.join("nginx.conf");
    std::fs::write(&path, config).map_err(LoadError::file(&path))?;
    let mut command = Command::new(nginx);
    command
        .arg("-p")
        .arg(&prefix)
        .arg("-c")
        .arg(&path)
        .arg("-e")
        .arg(prefix.join("logs/early"));
    let program = Program::start("nginx", &mut command, &folder.join("nginx.log"))?;
    Ok(Front {
        name: "nginx",
        url: url(address),
        key: None,
        program: Some(program),
    })
}

fn start_homing(
    args: &Args,
    model: &str,
    node: SocketAddr,
    folder: &Path,
) -> Result<Front, LoadError> {
    let address = free_address()?;
    let data = folder.join("data");
    let gguf = match &args.gguf {
        Some(path) => {
            let path = path.canonicalize().map_err(LoadError::file(path))?;
            format!("gguf = {:?}\n", path.display().to_string())
        }
        None => String::new(),
    };
    let config = format!(
        "listen = \"{address}\"\ndata = {:?}\n\n[[models]]\nid = {model:?}\n{gguf}\n\
         [[nodes]]\nid = \"echo\"\nurl = \"http://{node}\"\n",
        data.display().to_string()
    );
    let path = folder.join("homing.toml");
    std::fs::write(&path, config).map_err(LoadError::file(&path))?;
    let key = make_key(&args.homing, &data)?;
    let mut command = Command::new(&args.homing);
    command.arg("gateway").arg("--config").arg(&path);
    let program = Program::start("homing", &mut command, &folder.join("homing.log"))?;
    Ok(Front {
        name: "homing",
        url: url(address),
        key: Some(key),
        program: Some(program),
    })
}

/// A tenant of its own with one key; the key is the only line on stdout that begins with `sk-`.
fn make_key(homing: &Path, data: &Path) -> Result<String, LoadError> {
    let call = |arguments: &[&str]| -> Result<String, LoadError> {
        let output = Command::new(homing)
            .args(arguments)
            .arg("--data")
            .arg(data)
            .output()
            .map_err(|e| LoadError::program("homing", e.to_string()))?;
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            return Err(LoadError::program(
                "homing",
                format!("{arguments:?}: {stderr}"),
            ));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    call(&["tenant", "create", "bench"])?;
    let printed = call(&["key", "create", "--tenant", "bench"])?;
    printed
        .split_whitespace()
        .find(|word| word.starts_with("sk-"))
        .map(str::to_owned)
        .ok_or_else(|| LoadError::program("homing", format!("no key in {printed:?}")))
}

/// Sends single requests until one succeeds.
async fn wait_ready(front: &Front, model: &str) -> Result<(), LoadError> {
    let deadline = std::time::Instant::now() + START_TIMEOUT;
    let probe = http_bench::Args {
        url: front.url.clone(),
        key: front.key.clone(),
        model: model.to_owned(),
        body_bytes: 1024,
        concurrency: 1,
        requests: 1,
        warmup: 0,
        stream: false,
    };
    loop {
        let figures = http_bench::run(&probe).await?;
        match figures.first_failure {
            None => return Ok(()),
            Some(failure) if std::time::Instant::now() > deadline => {
                let what = format!("not ready after {START_TIMEOUT:?}: {failure}");
                return Err(match &front.program {
                    Some(program) => program.trouble(&what),
                    None => LoadError::program(front.name, what),
                });
            }
            Some(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}
