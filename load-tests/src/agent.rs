//! How does a server stand up to agents that do not wait for each other?
//!
//! Open loop: sessions begin at times drawn beforehand, whatever the server does. Within a session a
//! turn is due once the previous answer has been read and its think time is over, since its prompt
//! contains that answer; a sub-agent's first turn is due when its parent forks it. The due time is
//! the *intended* one, and every latency counts from it, so a client that falls behind (or a limit
//! on connections) cannot hide the server's delay; how late requests really left is reported too.
//! A session ends at its first failed turn: its later prompts would need the answer. The turns that
//! it did not get to are counted apart.

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::chat::{self, Failure, Outcome, Turn, Usage};
use crate::error::LoadError;
use crate::http::{Connection, Target};
use crate::workload::{self, PlannedTurn, Session, Shape};

/// Flags of `homing-load agent`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The API's address, for example http://127.0.0.1:8080/v1
    #[arg(long)]
    pub url: String,
    /// API key (also from the environment, so that it need not stand in the process list)
    #[arg(long, env = "HOMING_API_KEY", hide_env_values = true)]
    pub key: Option<String>,
    /// Model id to ask for
    #[arg(long)]
    pub model: String,
    /// Sessions in all
    #[arg(long, default_value_t = 8)]
    pub sessions: usize,
    /// Turns of each session
    #[arg(long, default_value_t = 8)]
    pub turns: usize,
    /// Sessions that begin per second, on average
    #[arg(long, default_value_t = 1.0)]
    pub rate: f64,
    /// Everything random is drawn from it
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Different system prompts among the sessions
    #[arg(long, default_value_t = 2)]
    pub system_prompts: usize,
    /// Tokens of a system prompt with its tools text, about
    #[arg(long, default_value_t = 1000)]
    pub system_tokens: usize,
    /// Tokens of each new message, about
    #[arg(long, default_value_t = 60)]
    pub message_tokens: usize,
    /// Mean pause between an answer and the session's next turn, in milliseconds
    #[arg(long, default_value_t = 500)]
    pub think_ms: u64,
    /// Sub-agents that each session forks in its middle
    #[arg(long, default_value_t = 0)]
    pub subagents: usize,
    /// Tokens of an answer at most
    #[arg(long, default_value_t = 48)]
    pub max_tokens: u32,
    /// Whether answers are streamed
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    pub stream: bool,
    /// Ask the gateway for its debug headers (the key must be permitted to)
    #[arg(long, visible_alias = "debug-headers")]
    pub debug: bool,
    /// Give a request up after so many seconds
    #[arg(long, default_value_t = 300)]
    pub timeout_s: u64,
    /// Write the report here as JSON (`-` for stdout, in place of the table)
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write one JSON line per request here
    #[arg(long, value_name = "FILE")]
    pub records: Option<PathBuf>,
}

impl Args {
    /// The workload's shape, or which flag makes no sense.
    pub fn shape(&self) -> Result<Shape, LoadError> {
        let flag = |flag, reason: &str| {
            Err(LoadError::Flag {
                flag,
                reason: reason.into(),
            })
        };
        if !(self.rate.is_finite() && self.rate > 0.0) {
            return flag("--rate", "a number above 0");
        }
        if self.sessions == 0 || self.turns == 0 {
            return flag("--sessions, --turns", "at least 1");
        }
        Ok(Shape {
            sessions: self.sessions,
            turns: self.turns,
            rate: self.rate,
            system_prompts: self.system_prompts,
            system_tokens: self.system_tokens,
            message_tokens: self.message_tokens,
            think: Duration::from_millis(self.think_ms),
            subagents: self.subagents,
            seed: self.seed,
        })
    }
}

/// One request of the run, as written to `--records`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// Session and number of the turn in it.
    pub session: String,
    /// From 0.
    pub turn: usize,
    /// When it was due, in milliseconds from the start of the run.
    pub intended_ms: f64,
    /// When it was sent.
    pub sent_ms: f64,
    /// First text, from the intended time.
    pub ttft_ms: Option<f64>,
    /// Time per further token.
    pub tpot_ms: Option<f64>,
    /// End of the answer, from the intended time.
    pub latency_ms: f64,
    /// HTTP status, if there was a response.
    pub status: Option<u16>,
    /// `x-request-id` of the response.
    pub request_id: Option<String>,
    /// `x-homing-node`.
    pub node: Option<String>,
    /// `x-homing-route`.
    pub route: Option<String>,
    /// `x-homing-expected-cached`.
    pub expected_cached: Option<u64>,
    /// `x-homing-prompt-tokens`, with `--debug`.
    pub gateway_prompt_tokens: Option<u64>,
    /// `x-homing-last-block`, with `--debug`.
    pub gateway_last_block: Option<String>,
    /// The server's usage report.
    pub usage: Option<Usage>,
    /// Pieces of text that were read.
    pub pieces: usize,
    /// Their text, which is part of the session's next prompt.
    pub answer: String,
    /// Why the model stopped.
    pub finish_reason: Option<String>,
    /// Whether usage or terminator was read.
    pub acknowledged: bool,
    /// What went wrong.
    pub failure: Option<Failure>,
}

/// Everything that a run leaves behind.
#[derive(Debug)]
pub struct Run {
    /// In the order in which they were sent.
    pub records: Vec<Record>,
    /// Turns that were not sent because an earlier one of their session failed.
    pub not_sent: usize,
    /// From the first intended request to the last answer.
    pub duration: Duration,
}

struct Context {
    args: Args,
    target: Target,
    start: Instant,
    progress: ProgressBar,
}

/// Carries the workload out; progress goes to stderr where that is a terminal.
pub async fn run(args: &Args) -> Result<Run, LoadError> {
    let sessions = workload::plan(&args.shape()?);
    let turns = workload::count_turns(&sessions);
    let context = Arc::new(Context {
        args: args.clone(),
        target: Target::parse(&args.url)?,
        start: Instant::now(),
        progress: progress(turns),
    });
    let mut running = tokio::task::JoinSet::new();
    for session in sessions {
        let context = Arc::clone(&context);
        let due = context.start + session.arrival;
        running.spawn(async move { converse(&context, &session, due).await.records });
    }
    let mut records = Vec::with_capacity(turns);
    while let Some(finished) = running.join_next().await {
        records.extend(finished.map_err(|e| LoadError::program("a session", e.to_string()))?);
    }
    context.progress.finish_and_clear();
    records.sort_by(|a, b| a.sent_ms.total_cmp(&b.sent_ms));
    let not_sent = turns - records.len();
    Ok(Run {
        records,
        not_sent,
        duration: context.start.elapsed(),
    })
}

fn progress(turns: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} turns, {elapsed}, {msg}");
    let bar = ProgressBar::new(turns as u64);
    if let Ok(style) = style {
        bar.set_style(style);
    }
    bar
}

/// What a conversation leaves: its requests, and its last answer for a parent.
struct Conversation {
    records: Vec<Record>,
    last_answer: String,
}

/// Boxed, since a session runs sub-agents, which are sessions.
fn converse<'a>(
    context: &'a Context,
    session: &'a Session,
    due: Instant,
) -> Pin<Box<dyn Future<Output = Conversation> + Send + 'a>> {
    Box::pin(async move {
        let mut connection = Connection::new(&context.target);
        let mut messages = vec![json!({"role": "system", "content": session.system})];
        let mut done = Conversation {
            records: Vec::new(),
            last_answer: String::new(),
        };
        let mut due = due;
        for (number, planned) in session.turns.iter().enumerate() {
            let message = fork(context, planned, due, &mut done.records).await;
            messages.push(json!({"role": "user", "content": message}));
            // A fork takes as long as it takes: the parent's turn is due when it has the answers.
            let intended = if planned.forks.is_empty() {
                due
            } else {
                Instant::now()
            } + if number == 0 {
                Duration::ZERO
            } else {
                planned.think
            };
            tokio::time::sleep_until(intended.into()).await;
            let turn = turn(&context.args, session, &messages);
            let key = context.args.key.as_deref();
            let outcome = chat::send(&mut connection, &context.target, key, &turn).await;
            done.records
                .push(record(context, session, number, intended, &outcome));
            context.progress.inc(1);
            if let Some(failure) = &outcome.failure {
                context
                    .progress
                    .set_message(format!("last failure: {}", failure.kind));
                break;
            }
            done.last_answer = outcome.text();
            messages.push(json!({"role": "assistant", "content": done.last_answer}));
            due = outcome.done;
        }
        done
    })
}

/// Runs a turn's sub-agents side by side; their answers go before its own message.
async fn fork(
    context: &Context,
    planned: &PlannedTurn,
    due: Instant,
    records: &mut Vec<Record>,
) -> String {
    let helpers = planned
        .forks
        .iter()
        .map(|helper| converse(context, helper, due));
    let mut message = String::new();
    for (number, helper) in futures_util::future::join_all(helpers)
        .await
        .into_iter()
        .enumerate()
    {
        message += &format!("Result of sub-agent {number}: {}\n", helper.last_answer);
        records.extend(helper.records);
    }
    message + &planned.message
}

fn turn(args: &Args, session: &Session, messages: &[Value]) -> Turn {
    let mut body = json!({
        "model": args.model,
        "messages": messages,
        "max_tokens": args.max_tokens,
        "temperature": 0,
        "stream": args.stream,
    });
    if args.stream {
        body["stream_options"] = json!({"include_usage": true});
    }
    let mut headers = vec![("x-session-affinity", session.id.clone())];
    if args.debug {
        headers.push(("x-homing-debug", "1".into()));
    }
    Turn {
        endpoint: "chat/completions",
        body,
        headers,
        timeout: Duration::from_secs(args.timeout_s),
    }
}

fn record(
    context: &Context,
    session: &Session,
    turn: usize,
    intended: Instant,
    outcome: &Outcome,
) -> Record {
    let ms = |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f64() * 1e3;
    let text = |name| outcome.header(name).map(str::to_owned);
    let number = |name| outcome.header(name).and_then(|v| v.parse().ok());
    Record {
        session: session.id.clone(),
        turn,
        intended_ms: ms(context.start, intended),
        sent_ms: ms(context.start, outcome.sent),
        ttft_ms: outcome.first_token.map(|at| ms(intended, at)),
        tpot_ms: outcome.tpot_ms(),
        latency_ms: ms(intended, outcome.done),
        status: outcome.status,
        request_id: text("x-request-id"),
        node: text("x-homing-node"),
        route: text("x-homing-route"),
        expected_cached: number("x-homing-expected-cached"),
        gateway_prompt_tokens: number("x-homing-prompt-tokens"),
        gateway_last_block: text("x-homing-last-block"),
        usage: outcome.usage,
        pieces: outcome.pieces.len(),
        answer: outcome.text(),
        finish_reason: outcome.finish_reason.clone(),
        acknowledged: outcome.acknowledged,
        failure: outcome.failure.clone(),
    }
}
