//! How would routing policies fare on this trace?
//!
//! Plays a trace, or the named scenarios, over modelled nodes on a virtual clock (the crate
//! `simulate` does that; docs/simulate.md says how) and compares policies. Here: the command line,
//! files, outside policies' processes, and one thread for each processor.

pub mod outside;

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use clap::ValueEnum;
use simulate::compare::{self, Case};
use simulate::engine::tiers::TierParams;
use simulate::figures::Summary;
use simulate::load::has_requests;
use simulate::policy::Spec;
use simulate::report::{Report, page, table};
use simulate::scenario::{Load, Scenario, Slice};
use simulate::scenarios::{Named, Setup};
use simulate::trace::{Mode, Trace};

use crate::error::LoadError;

/// Flags of `homing-load simulate`.
#[derive(Clone, Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("what").required(true).args(["trace", "scenario"]))]
pub struct Args {
    /// A trace: .trie, Mooncake's JSONL or a gateway's decision log; also packed as .zst
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// A named scenario in place of a trace and its load, or `all`
    #[arg(long, value_name = "NAME", requires = "traces")]
    pub scenario: Option<String>,
    /// Where the named scenarios' traces are
    #[arg(long, value_name = "DIR")]
    pub traces: Option<PathBuf>,
    /// Nodes
    #[arg(long, default_value_t = 8)]
    pub nodes: usize,
    /// Blocks of 512 tokens in each node's pool
    #[arg(long, value_name = "BLOCKS512", default_value_t = 3000)]
    pub capacity: usize,
    /// Closed loop: so many users, each with one session at a time
    #[arg(long, conflicts_with_all = ["copies", "speed"])]
    pub users: Option<usize>,
    /// Open loop: copies of the trace side by side
    #[arg(long)]
    pub copies: Option<usize>,
    /// Open loop: times as fast
    #[arg(long)]
    pub speed: Option<f64>,
    /// The end, in seconds; by default 3600 for users, else the trace's length
    #[arg(long, value_name = "S")]
    pub horizon: Option<f64>,
    /// Requests before this do not count, in seconds; by default 1200 for users, else a quarter of
    /// the run and at most 600
    #[arg(long, value_name = "S")]
    pub warm: Option<f64>,
    /// The first seed
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// So many seeds from the first one on; figures are means
    #[arg(long, default_value_t = 1)]
    pub seeds: u64,
    /// Which part of the trace: policies are tuned on dev and reported on held
    #[arg(long, value_enum, default_value_t = Part::Dev)]
    pub slice: Part,
    /// Policies, each `name` (over its own parameters, the best reported) or
    /// `name:key=value:key=value`; `all` for all; `ext:COMMAND`, which is last in its list, for a
    /// process that speaks the ext: protocol on stdin and stdout. May be given several times
    #[arg(long, value_name = "NAME,…|ext:COMMAND", default_value = "homing")]
    pub policy: Vec<String>,
    /// Regions; nodes are dealt out evenly
    #[arg(long, default_value_t = 1)]
    pub regions: usize,
    /// Round trips between regions, in milliseconds
    #[arg(
        long,
        value_name = "MS,MS,…",
        value_delimiter = ',',
        default_value = "60,110,150"
    )]
    pub rtt: Vec<f64>,
    /// How users spread over the regions
    #[arg(long, value_name = "W,W,…", value_delimiter = ',')]
    pub weights: Vec<f64>,
    /// Share of sessions that roam between regions
    #[arg(long, default_value_t = 0.0)]
    pub roam: f64,
    /// Memory of each node below its pool, in blocks of 512 tokens
    #[arg(long, value_name = "BLOCKS512", default_value_t = 0)]
    pub host_capacity: usize,
    /// How fast a node reads from it, GB a second
    #[arg(long, value_name = "GB", default_value_t = 25.0)]
    pub host_gb_per_s: f64,
    /// A store that all nodes share, in blocks of 512 tokens
    #[arg(long, value_name = "BLOCKS512", default_value_t = 0)]
    pub store_capacity: usize,
    /// How fast each node reads from it, GB a second
    #[arg(long, value_name = "GB", default_value_t = 10.0)]
    pub store_gb_per_s: f64,
    /// So many nodes compute prompts for the others; 0: all do everything
    #[arg(long, value_name = "NODES", default_value_t = 0)]
    pub prefill_nodes: usize,
    /// How fast KV travels from one node to another, GB a second
    #[arg(long, value_name = "GB", default_value_t = 10.0)]
    pub handover_gb_per_s: f64,
    /// Prompt tokens that one step computes at most; more than any prompt has: prompts are not cut
    #[arg(long, value_name = "TOKENS", default_value_t = 2048)]
    pub chunk: u32,
    /// A request is good whose first token comes by then, in milliseconds, …
    #[arg(long, value_name = "MS", default_value_t = 5000.0)]
    pub ttft_bound: f64,
    /// … and whose later tokens take no longer each, on average
    #[arg(long, value_name = "MS", default_value_t = 50.0)]
    pub tpot_bound: f64,
    /// Runs at the same time; by default one for each processor
    #[arg(long)]
    pub jobs: Option<usize>,
    /// Write the reports here as JSON (`-` for stdout, in place of the tables)
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write a page with plots here
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

/// Which part of a trace.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug)]
pub enum Part {
    /// Four fifths of the sessions, or the first two thirds of the time
    Dev,
    /// The rest
    Held,
    /// Everything
    All,
}

impl From<Part> for Slice {
    fn from(part: Part) -> Self {
        match part {
            Part::Dev => Self::Dev,
            Part::Held => Self::Held,
            Part::All => Self::All,
        }
    }
}

/// Plays what was asked for; `progress` hears each finished report.
pub fn run(args: &Args, mut progress: impl FnMut(&Report)) -> Result<Vec<Report>, LoadError> {
    let specs = specs(&args.policy)?;
    check(args)?;
    let mut reports = Vec::new();
    for (name, trace, mut scenario) in scenarios(args)? {
        scenario.fleet.host = TierParams::of(args.host_capacity, args.host_gb_per_s);
        scenario.fleet.store = TierParams::of(args.store_capacity, args.store_gb_per_s);
        set_roles(&mut scenario, args)?;
        if !has_requests(&trace, &scenario) {
            return Err(flag("--slice", "holds no request of this trace"));
        }
        let seeds: Vec<u64> = (args.seed..args.seed.saturating_add(args.seeds)).collect();
        let cases = compare::cases(&specs, &seeds);
        let results = play(&cases, &trace, &scenario, args.jobs)?;
        let report = Report::new(&name, &trace, &scenario, compare::rows(&results));
        progress(&report);
        reports.push(report);
    }
    Ok(reports)
}

/// Tables, JSON and page, wherever they were asked for. Tables are printed as they come.
pub fn show(args: &Args) -> Result<(), LoadError> {
    let is_json_alone = args.json.as_deref() == Some(Path::new("-"));
    let reports = run(args, |report| {
        if !is_json_alone {
            println!("{}", table(report));
        }
    })?;
    if let Some(file) = &args.json {
        let text = serde_json::to_string(&reports)
            .map_err(|e| LoadError::program("a report", e.to_string()))?;
        if is_json_alone {
            println!("{text}");
        } else {
            std::fs::write(file, text + "\n").map_err(LoadError::file(file))?;
        }
    }
    if let Some(file) = &args.html {
        std::fs::write(file, page(&reports)).map_err(LoadError::file(file))?;
    }
    Ok(())
}

/// Reads a trace, unpacking it where its name ends in `.zst`.
pub fn read_trace(path: &Path) -> Result<Trace, LoadError> {
    let file = File::open(path).map_err(LoadError::file(path))?;
    let is_packed = path.extension().is_some_and(|ending| ending == "zst");
    let input: Box<dyn Read> = if is_packed {
        Box::new(zstd::stream::read::Decoder::new(file).map_err(LoadError::file(path))?)
    } else {
        Box::new(file)
    };
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let name = name.split('.').next().unwrap_or_default();
    Trace::read(name, BufReader::new(input))
        .map_err(|error| LoadError::program(path.display().to_string(), error.to_string()))
}

/// Who computes prompts, in which chunks, and what is good.
fn set_roles(scenario: &mut Scenario, args: &Args) -> Result<(), LoadError> {
    let nodes = scenario.fleet.nodes;
    if args.prefill_nodes >= nodes {
        let reason = format!("fewer than the {nodes} nodes: somebody has to answer");
        return Err(flag("--prefill-nodes", reason));
    }
    scenario.fleet.prefill_nodes = args.prefill_nodes;
    scenario.fleet.handover_gb_per_s = args.handover_gb_per_s;
    scenario.fleet.params.chunk_tokens = f64::from(args.chunk);
    scenario.ttft_bound_ms = args.ttft_bound;
    scenario.tpot_bound_ms = args.tpot_bound;
    Ok(())
}

/// A tier of this size; none of size 0.
fn flag(flag: &'static str, reason: impl Into<String>) -> LoadError {
    LoadError::Flag {
        flag,
        reason: reason.into(),
    }
}

fn specs(policies: &[String]) -> Result<Vec<Spec>, LoadError> {
    let mut specs = Vec::new();
    for text in policies {
        let some = Spec::parse_list(text).map_err(|e| flag("--policy", e.to_string()))?;
        for spec in some {
            if !specs.contains(&spec) {
                specs.push(spec);
            }
        }
    }
    Ok(specs)
}

fn check(args: &Args) -> Result<(), LoadError> {
    /// More would not fit the numbers that nodes have.
    const NODES_MAX: usize = 100_000;
    let is_positive = |value: Option<f64>| value.is_none_or(|v| v.is_finite() && v > 0.0);
    let is_known = |value: f64| value.is_finite() && value >= 0.0;
    if !(1..=NODES_MAX).contains(&args.nodes) {
        return Err(flag("--nodes", format!("from 1 to {NODES_MAX}")));
    }
    if !(3..=u32::MAX as usize).contains(&args.capacity) {
        return Err(flag(
            "--capacity",
            "at least 3 blocks: a prompt's and its answer's",
        ));
    }
    if args.users == Some(0) {
        return Err(flag("--users", "at least 1"));
    }
    if args.copies == Some(0) {
        return Err(flag("--copies", "at least 1"));
    }
    if !is_positive(args.speed) {
        return Err(flag("--speed", "above 0"));
    }
    if !is_positive(args.horizon) {
        return Err(flag("--horizon", "above 0 seconds"));
    }
    if args.warm.is_some_and(|warm| !is_known(warm)) {
        return Err(flag("--warm", "0 seconds or more"));
    }
    if args.seeds == 0 {
        return Err(flag("--seeds", "at least 1"));
    }
    if !(1..=args.nodes).contains(&args.regions) {
        return Err(flag("--regions", "at least 1, and no more than nodes"));
    }
    if !args.rtt.iter().all(|ms| is_known(*ms)) {
        return Err(flag("--rtt", "0 milliseconds or more each"));
    }
    let weights = &args.weights;
    if !weights.is_empty()
        && (weights.len() != args.regions || !weights.iter().all(|w| is_known(*w)))
    {
        return Err(flag(
            "--weights",
            "one number for each region, none below 0",
        ));
    }
    if args.chunk == 0 {
        return Err(flag("--chunk", "at least 1 token"));
    }
    let speeds = [
        ("--handover-gb-per-s", args.handover_gb_per_s),
        ("--ttft-bound", args.ttft_bound),
        ("--tpot-bound", args.tpot_bound),
        ("--host-gb-per-s", args.host_gb_per_s),
        ("--store-gb-per-s", args.store_gb_per_s),
    ];
    if let Some((name, _)) = speeds.iter().find(|(_, gb)| !is_positive(Some(*gb))) {
        return Err(flag(name, "above 0"));
    }
    if args.host_capacity.max(args.store_capacity) > u32::MAX as usize {
        return Err(flag("--host-capacity, --store-capacity", "fewer blocks"));
    }
    if !(0.0..=1.0).contains(&args.roam) {
        return Err(flag("--roam", "from 0 to 1"));
    }
    Ok(())
}

/// What to play: the trace given, or the scenarios named.
fn scenarios(args: &Args) -> Result<Vec<(String, Trace, Scenario)>, LoadError> {
    let slice = Slice::from(args.slice);
    if let Some(path) = &args.trace {
        let trace = read_trace(path)?;
        let scenario = setup(args, &trace)?.scenario(&trace, slice, args.seed);
        if scenario.warm_ms >= scenario.horizon_ms {
            return Err(flag("--warm", "before the end of the run"));
        }
        return Ok(vec![(trace.name.clone(), trace, scenario)]);
    }
    let wanted = args.scenario.as_deref().unwrap_or_default();
    let all = Named::all();
    let names: Vec<&str> = all.iter().map(|named| named.name).collect();
    let chosen: Vec<&Named> = all
        .iter()
        .filter(|named| wanted == "all" || wanted.split(',').any(|name| name == named.name))
        .collect();
    let is_known = |name: &str| name == "all" || names.contains(&name);
    if let Some(unknown) = wanted.split(',').find(|name| !is_known(name)) {
        let reason = format!("{unknown:?} is none of all, {}", names.join(", "));
        return Err(flag("--scenario", reason));
    }
    let directory = args.traces.as_deref().unwrap_or(Path::new("."));
    let mut scenarios = Vec::new();
    for named in chosen {
        let trace = read_trace(&find(directory, named.trace))?;
        let scenario = named.scenario(&trace, slice, args.seed);
        scenarios.push((named.name.to_owned(), trace, scenario));
    }
    Ok(scenarios)
}

/// A trace by its name: unpacked if there is one, else packed.
fn find(directory: &Path, trace: &str) -> PathBuf {
    let unpacked = directory.join(format!("{trace}.trie"));
    if unpacked.exists() {
        unpacked
    } else {
        directory.join(format!("{trace}.trie.zst"))
    }
}

fn setup(args: &Args, trace: &Trace) -> Result<Setup, LoadError> {
    let load = match (args.users, trace.mode) {
        (Some(users), _) => Load::Users(users),
        (None, Mode::Closed) => {
            let reason = "needed: sessions of this trace have no times of arrival";
            return Err(flag("--users", reason));
        }
        (None, Mode::Open) => Load::Copies {
            copies: args.copies.unwrap_or(1),
            speed: args.speed.unwrap_or(1.0),
        },
    };
    Ok(Setup {
        horizon_s: args.horizon,
        warm_s: args.warm,
        regions: args.regions,
        round_trips_ms: args.rtt.clone(),
        region_weights: args.weights.clone(),
        roam: args.roam,
        ..Setup::new(args.nodes, args.capacity, load)
    })
}

/// Plays all cases, in their order where there is one thread.
fn play(
    cases: &[Case],
    trace: &Trace,
    scenario: &Scenario,
    jobs: Option<usize>,
) -> Result<Vec<(Case, Summary)>, LoadError> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let jobs = jobs.unwrap_or(processors).clamp(1, cases.len().max(1));
    let next = AtomicUsize::new(0);
    let results: Vec<Option<Result<Summary, LoadError>>> = cases.iter().map(|_| None).collect();
    let results = Mutex::new(results);
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                while let Some((i, case)) = {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    cases.get(i).map(|case| (i, case))
                } {
                    let result = play_one(case, trace, scenario);
                    if let Ok(mut results) = results.lock() {
                        results[i] = Some(result);
                    }
                }
            });
        }
    });
    let results = results
        .into_inner()
        .map_err(|_| LoadError::program("a simulation", "a run panicked"))?;
    let pair = |(case, result): (&Case, Option<Result<Summary, LoadError>>)| match result {
        Some(summary) => Ok((case.clone(), summary?)),
        None => Err(LoadError::program("a simulation", "a run did not end")),
    };
    cases.iter().zip(results).map(pair).collect()
}

fn play_one(case: &Case, trace: &Trace, scenario: &Scenario) -> Result<Summary, LoadError> {
    match case.spec.command() {
        Some(command) => outside::play(command, case, (trace, scenario), outside::PATIENCE),
        None => case
            .play(trace, scenario)
            .map_err(|error| flag("--policy", error.to_string())),
    }
}
