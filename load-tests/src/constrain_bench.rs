//! What does a grammar cost while tokens are decoded, and what do forced tokens gain?
//!
//! One engine process a round, the same number of answers at once for every side. Two sides decode
//! the same number of tokens, one of them under a grammar that allows any text, so that lengths are
//! equal and only the masks differ. Two more write the same JSON answers: one takes the tokens that
//! the grammar forces without a forward pass each; the other asks for log probabilities, for which
//! every token is computed. What log probabilities cost by themselves is measured on free text, and
//! taken out of the second figure.
//!
//! The order of the sides turns around from round to round, so that a drift of the machine's speed
//! favours none.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde::Serialize;
use serde_json::{Value, json};

use crate::chat::{self, Outcome, Turn};
use crate::engine_bench::prompts::Prompts;
use crate::error::LoadError;
use crate::http::{Connection, Target};
use crate::measure::{median, ratio};
use crate::process::Program;

/// A program that is not up by then will not come up.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// The slowest side takes seconds; past this nothing is measured but a broken node.
const TIMEOUT: Duration = Duration::from_secs(300);
/// Tokens of an answer's prompt: long enough to be a prompt, short enough not to matter.
const PROMPT_TOKENS: usize = 32;
/// Room for a JSON answer; it ends by itself before.
const JSON_TOKENS_MAX: u32 = 400;

/// Flags of `homing-load constrain-bench`.
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
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// Answers at once
    #[arg(long, default_value_t = 16)]
    pub answers: usize,
    /// Tokens of each on the sides of equal length
    #[arg(long, default_value_t = 192)]
    pub tokens: u32,
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
    /// Tokens a second of all answers, free text.
    pub free_tokens_per_s: f64,
    /// The same under a grammar that allows any text.
    pub constrained_tokens_per_s: f64,
    /// Their ratio; the goal is at least 0.9.
    pub constrained_ratio: f64,
    /// The same ratio with the text of a JSON string as the grammar.
    pub string_ratio: f64,
    /// Tokens a second of JSON answers, forced tokens taken ahead.
    pub forced_tokens_per_s: f64,
    /// The same with a forward pass for every token, less the cost of log probabilities.
    pub unforced_tokens_per_s: f64,
    /// Their ratio: how many times faster.
    pub forced_gain: f64,
    /// Tokens of a JSON answer.
    pub json_tokens: f64,
}

/// The bench's result.
#[derive(Debug, Serialize)]
pub struct Costs {
    /// The engine's threads.
    pub threads: usize,
    /// Answers at once.
    pub answers: usize,
    /// Each round.
    pub rounds: Vec<Figures>,
    /// Their medians.
    pub median: Figures,
}

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Free,
    FreeWithLogprobs,
    AnyText,
    JsonString,
    Forced,
    Unforced,
}

const SIDES: [Side; 6] = [
    Side::Free,
    Side::AnyText,
    Side::JsonString,
    Side::FreeWithLogprobs,
    Side::Forced,
    Side::Unforced,
];

/// Runs all rounds.
pub async fn run(args: &Args) -> Result<Costs, LoadError> {
    let mut prompts = Prompts::new(&args.model, args.seed)?;
    let folder = tempfile::tempdir().map_err(LoadError::system("making a temporary folder"))?;
    let mut rounds = Vec::new();
    for number in 0..args.rounds {
        let figures = round(args, number, &mut prompts, &folder.path().join("engine")).await?;
        eprintln!("round {}: {}", number + 1, figures.line());
        rounds.push(figures);
    }
    Ok(Costs {
        threads: args.threads,
        answers: args.answers,
        median: Figures::median(&rounds),
        rounds,
    })
}

/// Tokens a second of one side, and tokens of one of its answers.
#[derive(Clone, Copy, Debug, Default)]
struct Rate {
    tokens_per_s: f64,
    tokens: f64,
}

async fn round(
    args: &Args,
    number: usize,
    prompts: &mut Prompts,
    log: &Path,
) -> Result<Figures, LoadError> {
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
    // One unmeasured: pages of weights and pool are touched, grammars compiled.
    for side in SIDES {
        measure(args, side, 16, prompts, &target, &program).await?;
    }
    let mut order = SIDES;
    if number % 2 == 1 {
        order.reverse();
    }
    let mut rates = [Rate::default(); SIDES.len()];
    for side in order {
        let rate = measure(args, side, args.tokens, prompts, &target, &program).await?;
        rates[side as usize] = rate;
    }
    Ok(Figures::of(&rates))
}

/// All answers of a side at once: tokens after each one's first, by the time from the first one's
/// first to the last one's last.
async fn measure(
    args: &Args,
    side: Side,
    tokens: u32,
    prompts: &mut Prompts,
    target: &Target,
    program: &Program,
) -> Result<Rate, LoadError> {
    let turns: Vec<Turn> = (0..args.answers)
        .map(|_| turn(side, tokens, prompts))
        .collect();
    let send = |turn| async move {
        let mut connection = Connection::new(target);
        chat::send(&mut connection, target, None, turn).await
    };
    let outcomes: Vec<Outcome> = join_all(turns.iter().map(send)).await;
    let (mut begin, mut end): (Option<Instant>, Option<Instant>) = (None, None);
    let (mut after_first, mut all) = (0, 0);
    for outcome in &outcomes {
        if let Some(failure) = &outcome.failure {
            return Err(program.trouble(&format!("{side:?}: {}", failure.message)));
        }
        let count = outcome.usage.unwrap_or_default().completion_tokens;
        after_first += count.saturating_sub(1);
        all += count;
        let first = outcome.first_token.unwrap_or(outcome.sent);
        begin = Some(begin.map_or(first, |begin| begin.min(first)));
        end = end.max(outcome.last_token);
    }
    let span = begin.zip(end).map_or(0.0, |(begin, end)| {
        end.saturating_duration_since(begin).as_secs_f64()
    });
    Ok(Rate {
        tokens_per_s: ratio(after_first as f64, span),
        tokens: ratio(all as f64, outcomes.len() as f64),
    })
}

fn turn(side: Side, tokens: u32, prompts: &mut Prompts) -> Turn {
    // No side may end early. A grammar says itself when an answer may end, so `ignore_eos` does not
    // keep it from it; a bias does, on every side alike.
    let unwanted = prompts.ends().iter().map(|end| (end.to_string(), -100));
    let bias: BTreeMap<String, i32> = unwanted.collect();
    let mut body = json!({
        "model": prompts.model_id(),
        "prompt": prompts.next(PROMPT_TOKENS),
        "temperature": 0,
        "stream": true,
        "stream_options": {"include_usage": true},
        "max_tokens": tokens,
        "logit_bias": bias,
    });
    match side {
        Side::Free => {}
        Side::FreeWithLogprobs => body["logprobs"] = json!(0),
        Side::AnyText => body["structured_outputs"] = json!({"regex": "(?s:.{0,100000})"}),
        // A JSON string that is never closed, so that its length is the other sides'.
        Side::JsonString => {
            body["structured_outputs"] = json!({"regex": r#""[^"\\\x00-\x1f]*"#});
        }
        Side::Forced | Side::Unforced => {
            body["structured_outputs"] = json!({"json": record()});
            body["max_tokens"] = json!(JSON_TOKENS_MAX);
            if side == Side::Unforced {
                body["logprobs"] = json!(0);
            }
        }
    }
    Turn {
        endpoint: "completions",
        body,
        headers: Vec::new(),
        timeout: TIMEOUT,
    }
}

/// A record as agents' tools have it: names that say what they mean, values of a few tokens.
fn record() -> Value {
    json!({
        "type": "object",
        "properties": {
            "ticket_identifier": {"type": "integer", "minimum": 1, "maximum": 99999},
            "short_description": {"type": "string", "minLength": 10, "maxLength": 60},
            "severity": {"enum": ["low", "medium", "high", "critical"]},
            "assigned_department": {"enum": ["engineering", "operations", "customer_support"]},
            "requires_confirmation": {"type": "boolean"},
            "contact": {
                "type": "object",
                "properties": {
                    "preferred_language": {"enum": ["english", "german", "french"]},
                    "telephone_extension": {"type": "integer", "minimum": 100, "maximum": 999},
                },
                "required": ["preferred_language", "telephone_extension"],
                "additionalProperties": false,
            },
        },
        "required": ["ticket_identifier", "short_description", "severity", "assigned_department",
            "requires_confirmation", "contact"],
        "additionalProperties": false,
    })
}

impl Costs {
    /// The result for a person.
    pub fn table(&self) -> String {
        let median = &self.median;
        format!(
            "{} answers at once, {} threads, medians of {} rounds (tokens a second of all)\n\
             free {:.0}, any text {:.0}: ratio {:.3}; a string {:.3}\n\
             JSON answers of {:.0} tokens: {:.0} with forced tokens taken ahead, {:.0} without: \
             {:.2} times as fast\n",
            self.answers,
            self.threads,
            self.rounds.len(),
            median.free_tokens_per_s,
            median.constrained_tokens_per_s,
            median.constrained_ratio,
            median.string_ratio,
            median.json_tokens,
            median.forced_tokens_per_s,
            median.unforced_tokens_per_s,
            median.forced_gain,
        )
    }
}

impl Figures {
    fn of(rates: &[Rate; SIDES.len()]) -> Self {
        let rate = |side: Side| rates[side as usize].tokens_per_s;
        let free = rate(Side::Free);
        // What remains of the speed where log probabilities are asked for.
        let logprobs = ratio(rate(Side::FreeWithLogprobs), free);
        let unforced = ratio(rate(Side::Unforced), logprobs);
        Self {
            free_tokens_per_s: free,
            constrained_tokens_per_s: rate(Side::AnyText),
            constrained_ratio: ratio(rate(Side::AnyText), free),
            string_ratio: ratio(rate(Side::JsonString), free),
            forced_tokens_per_s: rate(Side::Forced),
            unforced_tokens_per_s: unforced,
            forced_gain: ratio(rate(Side::Forced), unforced),
            json_tokens: rates[Side::Forced as usize].tokens,
        }
    }

    fn median(rounds: &[Self]) -> Self {
        let of = |part: fn(&Self) -> f64| median(&rounds.iter().map(part).collect::<Vec<_>>());
        Self {
            free_tokens_per_s: of(|f| f.free_tokens_per_s),
            constrained_tokens_per_s: of(|f| f.constrained_tokens_per_s),
            constrained_ratio: of(|f| f.constrained_ratio),
            string_ratio: of(|f| f.string_ratio),
            forced_tokens_per_s: of(|f| f.forced_tokens_per_s),
            unforced_tokens_per_s: of(|f| f.unforced_tokens_per_s),
            forced_gain: of(|f| f.forced_gain),
            json_tokens: of(|f| f.json_tokens),
        }
    }

    fn line(&self) -> String {
        format!(
            "free {:.0} tok/s, any text {:.3} of it, a string {:.3}; JSON {:.0} tok/s forced, \
             {:.0} not ({:.2})",
            self.free_tokens_per_s,
            self.constrained_ratio,
            self.string_ratio,
            self.forced_tokens_per_s,
            self.unforced_tokens_per_s,
            self.forced_gain,
        )
    }
}
