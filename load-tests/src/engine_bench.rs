//! How fast is our engine beside the server of llama.cpp, on the same file and threads?
//!
//! Rounds interleave the two programs, each started anew, so that a change of the machine's speed
//! hits both. A round measures, through the same HTTP client: cold start (process start to first
//! token, file already in the page cache), prefill (unique prompts of exactly 512 tokens, nothing
//! cached, one token out), decode (tokens after the first of one stream), memory. The peer runs
//! without its warm-up pass and with its prompt cache off, which is to its favour in cold start and
//! the same for both in prefill. The figures are medians over rounds; ratios are what counts.

pub(crate) mod prompts;

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::json;

use self::prompts::Prompts;
use crate::chat::{self, Outcome, Turn};
use crate::error::LoadError;
use crate::http::{Connection, Target};
use crate::measure::{median, ratio};
use crate::process::{Memory, Program, memory};

/// Tokens of a prefill prompt.
const PREFILL_TOKENS: usize = 512;
/// Tokens of a decode's prompt: long enough to be a prompt, short enough not to matter.
const DECODE_PROMPT_TOKENS: usize = 32;
/// A program that is not up by then will not come up.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// Between two tries to reach a starting program: far below any cold start.
const START_POLL: Duration = Duration::from_millis(2);

/// Flags of `homing-load engine-bench`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Our engine's binary
    #[arg(long)]
    pub ours: PathBuf,
    /// The binary of llama.cpp's server; without it only ours is measured
    #[arg(long)]
    pub theirs: Option<PathBuf>,
    /// The GGUF file that both serve
    #[arg(long)]
    pub model: PathBuf,
    /// Threads of each
    #[arg(long, default_value_t = 2)]
    pub threads: usize,
    /// Interleaved rounds
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// Prefill prompts per round
    #[arg(long, default_value_t = 6)]
    pub prompts: usize,
    /// Tokens of a decode
    #[arg(long, default_value_t = 128)]
    pub decode_tokens: u32,
    /// Decodes per round
    #[arg(long, default_value_t = 3)]
    pub decodes: usize,
    /// Seed of the prompts
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Write the figures here as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// One program's figures of one round, or their medians.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Figures {
    /// Prompt tokens a second.
    pub prefill_tokens_per_s: f64,
    /// Tokens a second after the first.
    pub decode_tokens_per_s: f64,
    /// From process start to first token.
    pub cold_start_ms: f64,
    /// Resident memory at the end of the round, in MiB.
    pub resident_mib: f64,
    /// The part of it that is not the mapped file.
    pub anonymous_mib: f64,
}

/// The bench's result.
#[derive(Debug, Serialize)]
pub struct Comparison {
    /// Threads of each program.
    pub threads: usize,
    /// Interleaved rounds.
    pub rounds: usize,
    /// Ours.
    pub ours: Figures,
    /// llama.cpp's server.
    pub theirs: Option<Figures>,
    /// Ours by theirs, figure by figure; above 1 is better for the two speeds, worse for the rest.
    pub ratio: Option<Figures>,
}

#[derive(Clone, Copy, PartialEq)]
enum Side {
    Ours,
    Theirs,
}

/// Runs all rounds.
pub async fn run(args: &Args) -> Result<Comparison, LoadError> {
    let mut prompts = Prompts::new(&args.model, args.seed)?;
    let folder = tempfile::tempdir().map_err(LoadError::system("making a temporary folder"))?;
    let mut ours = Vec::new();
    let mut theirs = Vec::new();
    for number in 0..args.rounds {
        // Which goes first alternates: a slow drift of the machine then favours neither.
        let order = [[Side::Ours, Side::Theirs], [Side::Theirs, Side::Ours]][number % 2];
        for side in order {
            let Some(command) = command(args, side) else {
                continue;
            };
            let figures = round(args, side, command, &mut prompts, folder.path()).await?;
            eprintln!("round {} {}: {}", number + 1, side.name(), figures.line());
            if side == Side::Ours {
                &mut ours
            } else {
                &mut theirs
            }
            .push(figures);
        }
    }
    let ours = Figures::median(&ours);
    let theirs = (!theirs.is_empty()).then(|| Figures::median(&theirs));
    let ratio = theirs.as_ref().map(|theirs| ours.divided_by(theirs));
    Ok(Comparison {
        threads: args.threads,
        rounds: args.rounds,
        ours,
        theirs,
        ratio,
    })
}

impl Comparison {
    /// The result for a person.
    pub fn table(&self) -> String {
        let mut out = format!("ours        {}\n", self.ours.line());
        if let (Some(theirs), Some(ratio)) = (&self.theirs, &self.ratio) {
            out += &format!("llama.cpp   {}\n", theirs.line());
            out += &format!(
                "ratio       prefill {:.2}, decode {:.2}, cold start {:.2}, resident {:.2}, \
                 anonymous {:.2}\n",
                ratio.prefill_tokens_per_s,
                ratio.decode_tokens_per_s,
                ratio.cold_start_ms,
                ratio.resident_mib,
                ratio.anonymous_mib,
            );
        }
        out
    }
}

impl Figures {
    const PARTS: [fn(&Self) -> f64; 5] = [
        |f| f.prefill_tokens_per_s,
        |f| f.decode_tokens_per_s,
        |f| f.cold_start_ms,
        |f| f.resident_mib,
        |f| f.anonymous_mib,
    ];

    fn from_parts([prefill, decode, cold, resident, anonymous]: [f64; 5]) -> Self {
        Self {
            prefill_tokens_per_s: prefill,
            decode_tokens_per_s: decode,
            cold_start_ms: cold,
            resident_mib: resident,
            anonymous_mib: anonymous,
        }
    }

    fn median(rounds: &[Self]) -> Self {
        Self::from_parts(
            Self::PARTS.map(|part| median(&rounds.iter().map(part).collect::<Vec<_>>())),
        )
    }

    fn divided_by(&self, other: &Self) -> Self {
        Self::from_parts(Self::PARTS.map(|part| ratio(part(self), part(other))))
    }

    fn line(&self) -> String {
        format!(
            "prefill {:.0} tok/s, decode {:.1} tok/s, cold start {:.0} ms, resident {:.0} MiB \
             ({:.0} anonymous)",
            self.prefill_tokens_per_s,
            self.decode_tokens_per_s,
            self.cold_start_ms,
            self.resident_mib,
            self.anonymous_mib,
        )
    }
}

impl Side {
    fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Theirs => "llama.cpp",
        }
    }
}

/// The command without its address; `None` when there is no peer.
fn command(args: &Args, side: Side) -> Option<Command> {
    let threads = args.threads.to_string();
    match side {
        Side::Ours => {
            let mut command = Command::new(&args.ours);
            command.args(["serve", "--threads", &threads]);
            command.arg("--model").arg(&args.model);
            Some(command)
        }
        Side::Theirs => {
            let mut command = Command::new(args.theirs.as_ref()?);
            command.args(["--threads", &threads, "--threads-batch", &threads]);
            command.args(["--ctx-size", "8192", "--parallel", "1", "--no-warmup"]);
            command.arg("--model").arg(&args.model);
            Some(command)
        }
    }
}

async fn round(
    args: &Args,
    side: Side,
    mut command: Command,
    prompts: &mut Prompts,
    folder: &Path,
) -> Result<Figures, LoadError> {
    let port = free_port()?;
    match side {
        Side::Ours => command.args(["--listen", &format!("127.0.0.1:{port}")]),
        Side::Theirs => command.args(["--host", "127.0.0.1", "--port", &port.to_string()]),
    };
    let target = Target::parse(&format!("http://127.0.0.1:{port}"))?;
    let started = Instant::now();
    let program = Program::start(side.name(), &mut command, &folder.join(side.name()))?;
    let cold_start = first_token(&program, &target, started, prompts).await?;
    let mut bench = Bench {
        target: &target,
        program: &program,
        prompts,
    };
    // One of each unmeasured: pages of the weights and of the pool are touched for the first time.
    bench.prefill().await?;
    bench.decode(args.decode_tokens).await?;
    let mut prefill = Vec::new();
    for _ in 0..args.prompts {
        prefill.push(bench.prefill().await?);
    }
    let mut decode = Vec::new();
    for _ in 0..args.decodes {
        decode.push(bench.decode(args.decode_tokens).await?);
    }
    let Memory {
        resident,
        anonymous,
        ..
    } = memory(program.pid());
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    Ok(Figures {
        prefill_tokens_per_s: median(&prefill),
        decode_tokens_per_s: median(&decode),
        cold_start_ms: cold_start.as_secs_f64() * 1e3,
        resident_mib: mib(resident),
        anonymous_mib: mib(anonymous),
    })
}

/// A port that was free a moment ago; the peer cannot be asked to pick one and say which.
fn free_port() -> Result<u16, LoadError> {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(LoadError::system("listening"))?;
    Ok(listener
        .local_addr()
        .map_err(LoadError::system("asking for the port"))?
        .port())
}

/// Asks for one token until the program is up and gives one.
async fn first_token(
    program: &Program,
    target: &Target,
    started: Instant,
    prompts: &mut Prompts,
) -> Result<Duration, LoadError> {
    let prompt = prompts.next(DECODE_PROMPT_TOKENS);
    let mut last = String::new();
    while started.elapsed() < START_TIMEOUT {
        let outcome = complete(target, prompts.model_id(), &prompt, 1).await;
        match (&outcome.failure, outcome.first_token) {
            (None, Some(at)) => return Ok(at - started),
            (Some(failure), _) => last = failure.message.clone(),
            (None, None) => last = "an answer without text".into(),
        }
        tokio::time::sleep(START_POLL).await;
    }
    Err(program.trouble(&format!("gave no token in {START_TIMEOUT:?} ({last})")))
}

async fn complete(target: &Target, model: &str, prompt: &str, max_tokens: u32) -> Outcome {
    let turn = Turn {
        endpoint: "completions",
        // cache_prompt and ignore_eos are llama.cpp's; ours needs neither (the prompts are unique).
        body: json!({
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": true,
            "stream_options": {"include_usage": true},
            "cache_prompt": false,
            "ignore_eos": true,
        }),
        headers: Vec::new(),
        timeout: START_TIMEOUT,
    };
    chat::send(&mut Connection::new(target), target, None, &turn).await
}

struct Bench<'a> {
    target: &'a Target,
    program: &'a Program,
    prompts: &'a mut Prompts,
}

impl Bench<'_> {
    async fn prefill(&mut self) -> Result<f64, LoadError> {
        let prompt = self.prompts.next(PREFILL_TOKENS);
        let outcome = self.good(&prompt, 1).await?;
        let usage = outcome.usage.unwrap_or_default();
        if usage.cached_tokens > 0 || usage.prompt_tokens.abs_diff(PREFILL_TOKENS as u64) > 1 {
            return Err(self
                .program
                .trouble(&format!("not a cold prompt of 512: {usage:?}")));
        }
        let first = outcome.first_token.unwrap_or(outcome.done);
        Ok(usage.prompt_tokens as f64 / (first - outcome.sent).as_secs_f64())
    }

    async fn decode(&mut self, tokens: u32) -> Result<f64, LoadError> {
        // A model may stop early where the peer's ignore_eos is not known: try other prompts.
        for _ in 0..20 {
            let prompt = self.prompts.next(DECODE_PROMPT_TOKENS);
            let outcome = self.good(&prompt, tokens).await?;
            let usage = outcome.usage.unwrap_or_default();
            if let Some(ms) = outcome.tpot_ms()
                && usage.completion_tokens >= u64::from(tokens) / 2
            {
                return Ok(1e3 / ms);
            }
        }
        Err(self.program.trouble("stopped early in 20 decodes"))
    }

    async fn good(&self, prompt: &str, tokens: u32) -> Result<Outcome, LoadError> {
        let outcome = complete(self.target, self.prompts.model_id(), prompt, tokens).await;
        match &outcome.failure {
            None => Ok(outcome),
            Some(failure) => Err(self.program.trouble(&failure.message)),
        }
    }
}
