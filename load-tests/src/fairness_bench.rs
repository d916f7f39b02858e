//! Do running answers stall when long prompts arrive, and do the prompts still get on?
//!
//! One engine process. First the prompts alone, back to back: their rate. Then several answers
//! stream, in windows that take turns: alone, beside a prompt, alone, beside the next, and so on,
//! alone at the end. The answers' contexts grow all the while and slow them down, so each window
//! beside a prompt is compared with the mean of the one before and the one after it, and a round's
//! figures are the means over its prompts. Every prompt is new to the engine's cache.

mod streams;

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Value, json};
use tokio::task::LocalSet;

use self::streams::Streams;
use crate::chat::{self, Turn};
use crate::engine_bench::prompts::Prompts;
use crate::error::LoadError;
use crate::http::{Connection, Target};
use crate::measure::{Summary, median, ratio};
use crate::process::Program;

/// A program that is not up by then will not come up.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// One prompt takes seconds; past this nothing is measured but a broken node.
const PROMPT_TIMEOUT: Duration = Duration::from_secs(300);

/// Flags of `homing-load fairness-bench`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The engine's binary
    #[arg(long)]
    pub engine: PathBuf,
    /// The GGUF file that it serves
    #[arg(long)]
    pub model: PathBuf,
    /// Its threads
    #[arg(long, default_value_t = 2)]
    pub threads: usize,
    /// Rounds, each with a new process
    #[arg(long, default_value_t = 3)]
    pub rounds: usize,
    /// Answers that stream
    #[arg(long, default_value_t = 8)]
    pub decodes: usize,
    /// Tokens of their prompts
    #[arg(long, default_value_t = 256)]
    pub decode_prompt_tokens: usize,
    /// Prompts that arrive, alone and beside the answers
    #[arg(long, default_value_t = 3)]
    pub prompts: usize,
    /// Tokens of each
    #[arg(long, default_value_t = 4096)]
    pub prompt_tokens: usize,
    /// Seconds of answers alone before and after each prompt
    #[arg(long, default_value_t = 5.0)]
    pub alone_s: f64,
    /// Seed of the prompts
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Write the figures here as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// The figures of one round, or their medians.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Figures {
    /// Milliseconds between two tokens of an answer, 90th percentile, without prompts.
    pub gap_p90_alone_ms: f64,
    /// The same beside prompts.
    pub gap_p90_beside_ms: f64,
    /// Their ratio; the goal is at most 2.
    pub gap_p90_ratio: f64,
    /// The same ratio of the 99th percentiles.
    pub gap_p99_ratio: f64,
    /// Prompt tokens a second without answers.
    pub prefill_alone_tokens_per_s: f64,
    /// The same beside answers.
    pub prefill_beside_tokens_per_s: f64,
    /// Their ratio; the goal is at least 0.4.
    pub prefill_ratio: f64,
}

/// The bench's result.
#[derive(Debug, Serialize)]
pub struct Fairness {
    /// The engine's threads.
    pub threads: usize,
    /// Answers that stream.
    pub decodes: usize,
    /// Tokens of each prompt.
    pub prompt_tokens: usize,
    /// Each round.
    pub rounds: Vec<Figures>,
    /// Their medians.
    pub median: Figures,
}

/// Runs all rounds.
pub async fn run(args: &Args) -> Result<Fairness, LoadError> {
    let mut prompts = Prompts::new(&args.model, args.seed)?;
    let folder = tempfile::tempdir().map_err(LoadError::system("making a temporary folder"))?;
    let mut rounds = Vec::new();
    for number in 1..=args.rounds {
        let engine = Engine::start(args, &folder.path().join("engine"))?;
        let figures = round(args, &engine, &mut prompts).await?;
        eprintln!("round {number}: {}", figures.line());
        rounds.push(figures);
    }
    Ok(Fairness {
        threads: args.threads,
        decodes: args.decodes,
        prompt_tokens: args.prompt_tokens,
        median: Figures::median(&rounds),
        rounds,
    })
}

impl Fairness {
    /// The result for a person.
    pub fn table(&self) -> String {
        let Figures {
            gap_p90_alone_ms,
            gap_p90_beside_ms,
            gap_p90_ratio,
            gap_p99_ratio,
            prefill_alone_tokens_per_s,
            prefill_beside_tokens_per_s,
            prefill_ratio,
        } = self.median;
        format!(
            "{} answers and prompts of {} tokens, {} threads, medians of {} rounds\n\
             {:28} {:>9} {:>9} {:>7}\n\
             {:28} {gap_p90_alone_ms:9.1} {gap_p90_beside_ms:9.1} {gap_p90_ratio:7.2}\n\
             {:28} {:>9} {:>9} {gap_p99_ratio:7.2}\n\
             {:28} {prefill_alone_tokens_per_s:9.0} {prefill_beside_tokens_per_s:9.0} \
             {prefill_ratio:7.2}\n",
            self.decodes,
            self.prompt_tokens,
            self.threads,
            self.rounds.len(),
            "",
            "alone",
            "together",
            "ratio",
            "between two tokens, p90 (ms)",
            "between two tokens, p99",
            "",
            "",
            "prefill (tokens/s)",
        )
    }
}

impl Figures {
    const PARTS: [fn(&Self) -> f64; 7] = [
        |f| f.gap_p90_alone_ms,
        |f| f.gap_p90_beside_ms,
        |f| f.gap_p90_ratio,
        |f| f.gap_p99_ratio,
        |f| f.prefill_alone_tokens_per_s,
        |f| f.prefill_beside_tokens_per_s,
        |f| f.prefill_ratio,
    ];

    fn median(rounds: &[Self]) -> Self {
        let parts = Self::PARTS.map(|part| median(&rounds.iter().map(part).collect::<Vec<_>>()));
        Self {
            gap_p90_alone_ms: parts[0],
            gap_p90_beside_ms: parts[1],
            gap_p90_ratio: parts[2],
            gap_p99_ratio: parts[3],
            prefill_alone_tokens_per_s: parts[4],
            prefill_beside_tokens_per_s: parts[5],
            prefill_ratio: parts[6],
        }
    }

    fn line(&self) -> String {
        format!(
            "p90 between tokens {:.1} ms alone, {:.1} ms beside prompts ({:.2}; p99 {:.2}), \
             prefill {:.0} tok/s alone, {:.0} beside answers ({:.2})",
            self.gap_p90_alone_ms,
            self.gap_p90_beside_ms,
            self.gap_p90_ratio,
            self.gap_p99_ratio,
            self.prefill_alone_tokens_per_s,
            self.prefill_beside_tokens_per_s,
            self.prefill_ratio,
        )
    }
}

/// The process under test.
struct Engine {
    program: Program,
    target: Target,
}

impl Engine {
    fn start(args: &Args, log: &std::path::Path) -> Result<Self, LoadError> {
        let mut command = Command::new(&args.engine);
        command.args(["serve", "--listen", "127.0.0.1:0", "--kv-memory", "1GiB"]);
        command.args(["--threads", &args.threads.to_string()]);
        command.arg("--model").arg(&args.model);
        let program = Program::start("the engine", &mut command, log)?;
        let line = program.line(START_TIMEOUT)?;
        let ready: Value = serde_json::from_str(&line)
            .map_err(|e| program.trouble(&format!("said {line:?} ({e})")))?;
        let Some(address) = ready["listening"].as_str() else {
            return Err(program.trouble(&format!("does not say where it listens: {line}")));
        };
        let target = Target::parse(address)?;
        Ok(Self { program, target })
    }

    /// Sends a new prompt and adds it to `done`.
    async fn prefill(
        &self,
        args: &Args,
        prompt: &str,
        model: &str,
        done: &mut Prefilled,
    ) -> Result<(), LoadError> {
        let started = Instant::now();
        let turn = Turn {
            endpoint: "completions",
            body: json!({"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}),
            headers: Vec::new(),
            timeout: PROMPT_TIMEOUT,
        };
        let mut connection = Connection::new(&self.target);
        let outcome = chat::send(&mut connection, &self.target, None, &turn).await;
        if let Some(failure) = outcome.failure {
            return Err(self.program.trouble(&failure.message));
        }
        let usage = outcome.usage.unwrap_or_default();
        if usage.cached_tokens > 0 || usage.prompt_tokens.abs_diff(args.prompt_tokens as u64) > 1 {
            return Err(self
                .program
                .trouble(&format!("not a cold prompt: {usage:?}")));
        }
        done.tokens += usage.prompt_tokens;
        done.seconds += started.elapsed().as_secs_f64();
        Ok(())
    }
}

/// Prompts that were answered.
#[derive(Clone, Copy, Debug, Default)]
struct Prefilled {
    tokens: u64,
    seconds: f64,
}

impl Prefilled {
    fn tokens_per_s(self) -> f64 {
        self.tokens as f64 / self.seconds
    }
}

async fn round(args: &Args, engine: &Engine, prompts: &mut Prompts) -> Result<Figures, LoadError> {
    let model = prompts.model_id().to_owned();
    let mut long = || -> Vec<String> {
        (0..args.prompts)
            .map(|_| prompts.next(args.prompt_tokens))
            .collect()
    };
    let (warm, alone, beside) = (long(), long(), long());
    let short: Vec<_> = (0..args.decodes)
        .map(|_| prompts.next(args.decode_prompt_tokens))
        .collect();
    // One unmeasured: pages of the weights and of the pool are touched for the first time.
    for prompt in warm.iter().take(1) {
        let mut unmeasured = Prefilled::default();
        engine
            .prefill(args, prompt, &model, &mut unmeasured)
            .await?;
    }
    let mut prefill_alone = Prefilled::default();
    for prompt in &alone {
        engine
            .prefill(args, prompt, &model, &mut prefill_alone)
            .await?;
    }
    let trouble = |what: String| engine.program.trouble(&what);
    let tasks = LocalSet::new();
    let streams = Streams::begin(&tasks, &engine.target, &model, &short)
        .await
        .map_err(trouble)?;
    let alone_for = Duration::from_secs_f64(args.alone_s);
    let windows = async {
        let mut borders = vec![Instant::now()];
        let mut prefilled = Prefilled::default();
        for prompt in &beside {
            tokio::time::sleep(alone_for).await;
            let came = Instant::now();
            engine.prefill(args, prompt, &model, &mut prefilled).await?;
            borders.extend([came, Instant::now()]);
        }
        tokio::time::sleep(alone_for).await;
        borders.push(Instant::now());
        Ok::<_, LoadError>((borders, prefilled))
    };
    let (borders, prefill_beside) = tasks.run_until(windows).await?;
    if let Some(what) = streams.trouble() {
        return Err(trouble(what));
    }
    let windows: Vec<_> = borders
        .windows(2)
        .map(|w| Summary::of(streams.gaps_ms(w[0], w[1])))
        .collect();
    let beside = Beside::mean(&windows);
    let prefill_alone = prefill_alone.tokens_per_s();
    let prefill_beside = prefill_beside.tokens_per_s();
    Ok(Figures {
        gap_p90_alone_ms: beside.p90_alone_ms,
        gap_p90_beside_ms: beside.p90_ms,
        gap_p90_ratio: beside.p90_ratio,
        gap_p99_ratio: beside.p99_ratio,
        prefill_alone_tokens_per_s: prefill_alone,
        prefill_beside_tokens_per_s: prefill_beside,
        prefill_ratio: ratio(prefill_beside, prefill_alone),
    })
}

/// How one window beside a prompt, or the mean of them, compares with its neighbours.
#[derive(Clone, Copy, Debug, Default)]
struct Beside {
    p90_alone_ms: f64,
    p90_ms: f64,
    p90_ratio: f64,
    p99_ratio: f64,
}

impl Beside {
    /// The mean over windows that take turns: alone, beside a prompt, alone and so on.
    fn mean(windows: &[Summary]) -> Self {
        let mut sum = Self::default();
        let triples = windows.windows(3).step_by(2);
        let count = triples.len() as f64;
        for triple in triples {
            let [before, during, after] = [&triple[0], &triple[1], &triple[2]];
            let p90_alone = f64::midpoint(before.p90, after.p90);
            sum.p90_alone_ms += p90_alone / count;
            sum.p90_ms += during.p90 / count;
            sum.p90_ratio += ratio(during.p90, p90_alone) / count;
            sum.p99_ratio += ratio(during.p99, f64::midpoint(before.p99, after.p99)) / count;
        }
        sum
    }
}
