//! How does each request of a plan fare, and what do the programs cost meanwhile?
//!
//! Every turn is sent at its planned time, and its first token counts from then. Requests that come
//! in the measured time are followed to their end, however long it takes; those before and after it
//! keep the nodes as busy as they are in between.

use std::time::{Duration, Instant};

use serde_json::json;
use tokio::task::JoinSet;

use super::plan::{Kind, Plan, Planned};
use super::stack::{Cpu, Stack};
use crate::chat::{self, Outcome, Turn, Usage};
use crate::error::LoadError;
use crate::http::{Connection, Target};

/// A request that has not ended by then has failed.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(90);
/// Tells that two nodes shared a turn.
const SHARED: &str = "x-homing-prefill-node";

/// How one request went.
#[derive(Clone, Debug)]
pub(super) struct Record {
    pub(super) kind: Kind,
    /// When it was due, from the start.
    pub(super) at: Duration,
    pub(super) failure: Option<String>,
    pub(super) shared: bool,
    /// From when it was due to the first token.
    pub(super) ttft_ms: f64,
    /// Mean time of a token after the first; none where there is no second.
    pub(super) tpot_ms: Option<f64>,
    /// When each token came, from the start.
    pub(super) tokens: Vec<Duration>,
    pub(super) usage: Usage,
}

/// What came of a plan.
pub(super) struct Played {
    pub(super) records: Vec<Record>,
    /// CPU seconds during the measured time.
    pub(super) cpu: Cpu,
}

/// The measured time, from the start.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    pub(super) from: Duration,
    pub(super) to: Duration,
}

impl Window {
    pub(super) fn has(&self, at: Duration) -> bool {
        (self.from..self.to).contains(&at)
    }

    pub(super) fn seconds(&self) -> f64 {
        (self.to - self.from).as_secs_f64()
    }
}

/// Plays a plan against a stack.
pub(super) async fn play(
    stack: &Stack,
    model: &str,
    plan: &Plan,
    window: Window,
    until: Duration,
) -> Result<Played, LoadError> {
    let door = Door {
        target: stack.target.clone(),
        key: Some(stack.key.clone()),
        model: model.to_owned(),
    };
    let mut primers = JoinSet::new();
    let now = Instant::now();
    for primer in &plan.primers {
        primers.spawn(door.clone().send(primer.clone(), now));
    }
    for primed in primers.join_all().await {
        if let Some(failure) = primed.failure {
            return Err(LoadError::program("the stack", failure));
        }
    }
    let start = Instant::now();
    let watch = async {
        tokio::time::sleep_until((start + window.from).into()).await;
        let before = stack.cpu();
        tokio::time::sleep_until((start + window.to).into()).await;
        stack.cpu().since(before)
    };
    let turns = async {
        let mut sent = JoinSet::new();
        for planned in &plan.turns {
            tokio::time::sleep_until((start + planned.at).into()).await;
            sent.spawn(door.clone().send(planned.clone(), start));
        }
        sent.join_all().await
    };
    let mut readers = JoinSet::new();
    for streams in &plan.readers {
        readers.spawn(read(door.clone(), streams.clone(), start, until));
    }
    let (cpu, mut records, streams) = tokio::join!(watch, turns, readers.join_all());
    records.extend(streams.into_iter().flatten());
    Ok(Played { records, cpu })
}

/// One answer after another; none is begun after `until`.
async fn read(door: Door, streams: Vec<Planned>, start: Instant, until: Duration) -> Vec<Record> {
    let mut records = Vec::new();
    for stream in streams.iter().cycle() {
        tokio::time::sleep_until((start + stream.at).into()).await;
        let at = start.elapsed();
        if at >= until {
            break;
        }
        let now = Planned {
            at,
            ..stream.clone()
        };
        let record = door.clone().send(now, start).await;
        let failed = record.failure.is_some();
        records.push(record);
        // A node that refuses is not asked a thousand times a second.
        if failed {
            break;
        }
    }
    records
}

impl Cpu {
    fn since(self, before: Self) -> Self {
        Self {
            nodes: [0, 1].map(|at| self.nodes[at] - before.nodes[at]),
            gateway: self.gateway - before.gateway,
            load: self.load - before.load,
        }
    }
}

/// Where requests go.
#[derive(Clone)]
pub(super) struct Door {
    pub(super) target: Target,
    pub(super) key: Option<String>,
    pub(super) model: String,
}

impl Door {
    /// Sends a request now, and says how it went by a clock that began at `start`.
    pub(super) async fn send(self, planned: Planned, start: Instant) -> Record {
        let turn = Turn {
            endpoint: "completions",
            body: json!({
                "model": self.model,
                "prompt": planned.prompt,
                "max_tokens": planned.tokens,
                "temperature": 0,
                "stream": true,
                "stream_options": {"include_usage": true},
                "ignore_eos": true,
            }),
            headers: vec![("x-session-affinity", planned.session.clone())],
            timeout: REQUEST_TIMEOUT,
        };
        let mut connection = Connection::new(&self.target);
        let outcome = chat::send(&mut connection, &self.target, self.key.as_deref(), &turn).await;
        record(&planned, &outcome, start)
    }
}

fn record(planned: &Planned, outcome: &Outcome, start: Instant) -> Record {
    let due = start + planned.at;
    let failure = outcome.failure.as_ref();
    let mut failure = failure.map(|failure| format!("{}: {}", failure.kind, failure.message));
    let first = outcome.first_token.unwrap_or(outcome.done);
    let usage = outcome.usage.unwrap_or_default();
    // An answer cut short would be a light one.
    if failure.is_none() && usage.completion_tokens != u64::from(planned.tokens) {
        let found = usage.completion_tokens;
        failure = Some(format!("{found} tokens in place of {}", planned.tokens));
    }
    Record {
        kind: planned.kind,
        at: planned.at,
        failure,
        shared: outcome.headers.contains_key(SHARED),
        ttft_ms: (first.saturating_duration_since(due)).as_secs_f64() * 1e3,
        tpot_ms: outcome.tpot_ms(),
        tokens: outcome
            .piece_times
            .iter()
            .map(|at| at.saturating_duration_since(start))
            .collect(),
        usage,
    }
}
