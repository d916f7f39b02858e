//! Does it pay on a real machine to compute prompts and answers on nodes of their own?
//!
//! Answers stream while agents' turns with long, growing prompts arrive (`plan`), the same before every
//! arrangement of two nodes with one thread each behind the gateway: one that computes prompts and
//! one that answers; two mixed ones that compute each prompt in one piece while answers wait; two
//! mixed ones that compute prompts in chunks, in several settings, of which the best counts. Rounds
//! interleave them in alternating order, each started anew. Rates and bounds come from what one node
//! does by itself (`calibrate`), so that a run means the same on a slower machine.
//!
//! Gateway and load generator share the two cores with the nodes: their part is told.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

use self::calibrate::{Uncontended, calibrate};
use self::figures::{Bounds, Figures};
use self::plan::{Growth, Shape, plan};
use self::play::{Window, play};
use self::stack::Stack;
use crate::engine_bench::prompts::Prompts;
use crate::error::LoadError;
use crate::measure::ratio;

mod arrangement;
mod calibrate;
mod figures;
mod plan;
mod play;
mod stack;

pub use arrangement::Arrangement;

/// Flags of `homing-load disaggregation-bench`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The gateway's binary
    #[arg(long)]
    pub homing: PathBuf,
    /// The engine's binary
    #[arg(long)]
    pub engine: PathBuf,
    /// The GGUF file that they serve
    #[arg(long)]
    pub model: PathBuf,
    /// What is compared: apart, whole (mixed, prompts in one piece), paced:N and unpaced:N (mixed,
    /// prompts in chunks, at most N tokens a step)
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "apart,whole,paced:256,unpaced:128,unpaced:512"
    )]
    pub arrangements: Vec<Arrangement>,
    /// Interleaved rounds
    #[arg(long, default_value_t = 3)]
    pub rounds: usize,
    /// Answers that stream at any time
    #[arg(long, default_value_t = 7)]
    pub streams: usize,
    /// Tokens of their prompts
    #[arg(long, default_value_t = 32)]
    pub stream_prompt_tokens: usize,
    /// Tokens of these answers
    #[arg(long, default_value_t = 256)]
    pub stream_tokens: u32,
    /// Prompts of each of their readers, who begins again after the last: with 1 they are cached, and
    /// only answers are computed
    #[arg(long, default_value_t = 24)]
    pub stream_prompts: usize,
    /// Agents at work at a time
    #[arg(long, default_value_t = 5)]
    pub agents: usize,
    /// Tokens of a session's first prompt
    #[arg(long, default_value_t = 1000)]
    pub first_tokens: usize,
    /// Tokens that each later turn adds
    #[arg(long, default_value_t = 400)]
    pub more_tokens: usize,
    /// Turns of a session
    #[arg(long, default_value_t = 4)]
    pub turns: usize,
    /// Share of the time in which one node that computes prompts would be busy with these turns
    #[arg(long, default_value_t = 0.6)]
    pub load: f64,
    /// Bound of the first token, as a multiple of that of the slowest turn of a session alone
    #[arg(long, default_value_t = 3.0)]
    pub ttft_bound: f64,
    /// Bound of the time per token, as a multiple of that of all streams alone on one node
    #[arg(long, default_value_t = 2.0)]
    pub tpot_bound: f64,
    /// The gateway's `disaggregation.stall`: what streams lose by a prompt beside them, against first tokens
    #[arg(long, default_value_t = 1.0)]
    pub stall: f64,
    /// Measured seconds of each arrangement in each round
    #[arg(long, default_value_t = 45.0)]
    pub seconds: f64,
    /// Seconds of the same load before them; half as many follow
    #[arg(long, default_value_t = 8.0)]
    pub warm_s: f64,
    /// Seed of the first round; each round has its own
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Write the figures here as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// The bench's result.
#[derive(Debug, Serialize)]
pub struct Disaggregation {
    /// What one node does by itself.
    pub uncontended: Uncontended,
    /// What a good request keeps.
    pub bounds: Bounds,
    /// Answers that stream at any time.
    pub streams: usize,
    /// Agents' turns in a second.
    pub turns_per_s: f64,
    /// Each arrangement.
    pub rows: Vec<Row>,
}

/// One arrangement.
#[derive(Debug, Serialize)]
pub struct Row {
    /// Which.
    pub arrangement: Arrangement,
    /// Each round.
    pub rounds: Vec<Figures>,
    /// Their medians.
    pub median: Figures,
}

/// Agents' answers are this long, least and most.
const TURN_TOKENS: [u32; 2] = [32, 64];

/// Runs all rounds.
pub async fn run(args: &Args) -> Result<Disaggregation, LoadError> {
    check(args)?;
    let mut prompts = Prompts::new(&args.model, args.seed)?;
    let folder = tempfile::tempdir().map_err(LoadError::system("making a temporary folder"))?;
    let growth = Growth {
        first_tokens: args.first_tokens,
        more_tokens: args.more_tokens,
        turns: args.turns,
    };
    let uncontended = calibrate(args, growth, &mut prompts, folder.path()).await?;
    let bounds = Bounds {
        ttft_ms: args.ttft_bound * uncontended.longest_ttft_ms(),
        tpot_ms: args.tpot_bound * uncontended.tpot_ms,
    };
    let shape = Shape {
        streams: args.streams,
        stream_prompt_tokens: args.stream_prompt_tokens,
        stream_tokens: args.stream_tokens,
        stream_prompts: args.stream_prompts,
        turns_per_s: args.load / uncontended.turn_s(),
        agents: args.agents,
        growth,
        turn_tokens: TURN_TOKENS,
        seconds: args.warm_s * 1.5 + args.seconds,
        seed: args.seed,
    };
    let mut bench = Bench {
        args,
        shape,
        bounds,
        uncontended,
        rounds: vec![Vec::new(); args.arrangements.len()],
    };
    eprintln!("{}", bench.given());
    for round in 0..args.rounds {
        bench.round(round, folder.path()).await?;
    }
    Ok(bench.result())
}

fn check(args: &Args) -> Result<(), LoadError> {
    let positive = |flag, value: f64| match value.is_finite() && value > 0.0 {
        true => Ok(()),
        false => Err(LoadError::Flag {
            flag,
            reason: "above 0".into(),
        }),
    };
    positive("--load", args.load)?;
    positive("--seconds", args.seconds)?;
    positive("--warm-s", args.warm_s)?;
    positive("--ttft-bound", args.ttft_bound)?;
    positive("--tpot-bound", args.tpot_bound)?;
    for (flag, count) in [
        ("--streams", args.streams),
        ("--stream-prompts", args.stream_prompts),
        ("--agents", args.agents),
        ("--turns", args.turns),
        ("--first-tokens", args.first_tokens),
        ("--more-tokens", args.more_tokens),
    ] {
        positive(flag, count as f64)?;
    }
    positive("--stream-tokens", f64::from(args.stream_tokens))
}

/// A bench that runs.
struct Bench<'a> {
    args: &'a Args,
    shape: Shape,
    bounds: Bounds,
    uncontended: Uncontended,
    /// By arrangement.
    rounds: Vec<Vec<Figures>>,
}

impl Bench<'_> {
    fn given(&self) -> String {
        given(
            &self.uncontended,
            self.bounds,
            (self.shape.streams, self.shape.turns_per_s),
        )
    }

    async fn round(&mut self, round: usize, folder: &Path) -> Result<(), LoadError> {
        let args = self.args;
        let seed = args.seed + round as u64;
        // The same texts for each arrangement, which is started anew and remembers none of them.
        let mut prompts = Prompts::new(&args.model, seed)?;
        let model = prompts.model_id().to_owned();
        let plan = plan(&Shape { seed, ..self.shape }, &mut prompts);
        let from = Duration::from_secs_f64(args.warm_s);
        let window = Window {
            from,
            to: from + Duration::from_secs_f64(args.seconds),
        };
        let until = Duration::from_secs_f64(self.shape.seconds);
        let mut order: Vec<usize> = (0..args.arrangements.len()).collect();
        // Which goes first alternates with the seed: a slow drift of the machine then favours none.
        if seed.is_multiple_of(2) {
            order.reverse();
        }
        for at in order {
            let arrangement = &args.arrangements[at];
            let folder = folder.join(format!("{}-{arrangement}", round + 1));
            std::fs::create_dir(&folder).map_err(LoadError::file(&folder))?;
            let stack = start(args, arrangement, &model, &folder).await?;
            let played = play(&stack, &model, &plan, window, until).await?;
            let transfers = stack.transfers().await?;
            let tpot_ms = self.uncontended.tpot_ms;
            let figures = Figures::of(&played, window, self.bounds, tpot_ms, transfers);
            eprintln!("round {} {arrangement}: {}", round + 1, line(&figures));
            arrangement.check(&figures)?;
            self.rounds[at].push(figures);
        }
        Ok(())
    }

    fn result(self) -> Disaggregation {
        let rows = self.args.arrangements.iter().zip(self.rounds);
        let row = |(arrangement, rounds): (&Arrangement, Vec<Figures>)| Row {
            arrangement: arrangement.clone(),
            median: Figures::median(&rounds),
            rounds,
        };
        Disaggregation {
            uncontended: self.uncontended,
            bounds: self.bounds,
            streams: self.shape.streams,
            turns_per_s: self.shape.turns_per_s,
            rows: rows.map(row).collect(),
        }
    }
}

/// Starts an arrangement; once more where another program has taken a port that was free.
async fn start(
    args: &Args,
    arrangement: &Arrangement,
    model: &str,
    folder: &Path,
) -> Result<Stack, LoadError> {
    match Stack::start(args, arrangement, model, folder).await {
        Err(error) => {
            eprintln!("starting {arrangement} once more: {error}");
            Stack::start(args, arrangement, model, folder).await
        }
        started => started,
    }
}

fn given(uncontended: &Uncontended, bounds: Bounds, (streams, turns): (usize, f64)) -> String {
    let ttft: Vec<String> = uncontended
        .ttft_ms
        .iter()
        .map(|ms| format!("{ms:.0}"))
        .collect();
    format!(
        "uncontended: {:.1} ms a token with all streams on a node; a session's first tokens after {} ms \
         ({:.0} new tokens/s)\n{streams} streams, {turns:.2} turns a second; good: first token \
         within {:.0} ms, later ones within {:.1} ms each",
        uncontended.tpot_ms,
        ttft.join(", "),
        uncontended.prefill_tokens_per_s,
        bounds.ttft_ms,
        bounds.tpot_ms,
    )
}

fn line(figures: &Figures) -> String {
    let get = |name| figures.get(name);
    format!(
        "{} requests ({} turns, {} shared), {} failed, TTFT p90 {:.0} ms (turns {:.0}), time per token \
         p90 {:.1} ms, goodput {:.2} /s",
        get("requests"),
        get("turns"),
        get("shared turns"),
        get("failed"),
        get("ttft p90"),
        get("ttft turns p90"),
        get("tpot p90"),
        get("goodput"),
    )
}

impl Disaggregation {
    fn of(&self, which: impl Fn(&Arrangement) -> bool) -> Option<&Row> {
        let rows = self.rows.iter().filter(|row| which(&row.arrangement));
        rows.max_by(|a, b| {
            let goodput = |row: &Row| row.median.get("goodput");
            goodput(a).total_cmp(&goodput(b))
        })
    }

    /// The result for a person.
    pub fn table(&self) -> String {
        let rates = (self.streams, self.turns_per_s);
        let mut out = given(&self.uncontended, self.bounds, rates);
        let rounds = self.rows.first().map_or(0, |row| row.rounds.len());
        let _ = write!(out, "\nmedians of {rounds} rounds, times in ms\n{:20}", "");
        for row in &self.rows {
            let _ = write!(out, " {:>12}", row.arrangement.to_string());
        }
        out += "\n";
        let names = self.rows.first().map(|row| row.median.0.keys());
        for name in names.into_iter().flatten() {
            let _ = write!(out, "{name:20}");
            for row in &self.rows {
                let _ = write!(out, " {:12.2}", row.median.get(name));
            }
            out += "\n";
        }
        out + &self.ratios()
    }

    /// The two figures that were asked for.
    fn ratios(&self) -> String {
        let mut out = String::new();
        let Some(apart) = self.of(|one| *one == Arrangement::Apart) else {
            return out;
        };
        if let Some(whole) = self.of(|one| *one == Arrangement::Whole) {
            let than = |name| ratio(whole.median.get(name), apart.median.get(name));
            let _ = writeln!(
                out,
                "p90 time per token, whole by apart: {:.2} (goal: at least 3)",
                than("tpot p90")
            );
        }
        if let Some(best) = self.of(Arrangement::is_chunked) {
            let than = ratio(apart.median.get("goodput"), best.median.get("goodput"));
            let _ = writeln!(
                out,
                "goodput, apart by {}: {than:.2} (goal: at least 1.2)",
                best.arrangement
            );
        }
        out
    }
}
