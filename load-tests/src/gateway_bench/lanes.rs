//! How are the requests of one cell sent?
//!
//! Closed loop: a fixed number of agents, each on a connection of its own, each waiting for its
//! answer before its next turn. Every answer is checked: status 200, and in a stream every word.

use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::Full;
use hyper::Request;

use super::agent_turns::{Bodies, Delivery, Dialect};
use super::fronts::Front;
use crate::error::LoadError;
use crate::http::{Connection, Target};
use crate::http_bench::{Exchange, exchange};

/// Requests of one kind to one front.
#[derive(Clone, Copy)]
pub(super) struct Load<'a> {
    pub(super) front: &'a Front,
    pub(super) dialect: Dialect,
    pub(super) bodies: &'a Bodies,
    pub(super) delivery: Delivery,
    pub(super) agents: usize,
    /// Of all agents together.
    pub(super) requests: usize,
    /// Words that a stream must have.
    pub(super) words: usize,
    /// Tells the new steps of this load from those of every other.
    pub(super) new: u64,
}

/// What came back, request by request, and how long all of it took.
pub(super) struct Sent {
    /// Request to the end of its answer.
    pub(super) latencies: Vec<Duration>,
    /// Request to the first word of its stream, or to the first byte of its body.
    pub(super) firsts: Vec<Duration>,
    pub(super) took: Duration,
}

/// Steps that one agent may take in one load before its numbers meet the next agent's.
const STEPS_PER_AGENT_MAX: u64 = 1_000_000;

/// Sends a load; the first failure ends it.
pub(super) async fn send(load: Load<'_>) -> Result<Sent, LoadError> {
    let target = Target::parse(&load.front.url)?;
    let begun = Instant::now();
    let agents = (0..load.agents).map(|agent| lane(load, &target, agent));
    let lanes = futures_util::future::try_join_all(agents).await;
    let took = begun.elapsed();
    let exchanges = lanes.map_err(|failure| {
        let what = format!("{}: {failure}", load.dialect.as_str());
        match &load.front.program {
            Some(program) => program.trouble(&what),
            None => LoadError::program(load.front.name, what),
        }
    })?;
    let all = || exchanges.iter().flatten();
    Ok(Sent {
        latencies: all().map(|e| e.latency).collect(),
        firsts: all().map(|e| e.first).collect(),
        took,
    })
}

async fn lane(load: Load<'_>, target: &Target, agent: usize) -> Result<Vec<Exchange>, String> {
    let mut connection = Connection::new(target);
    let mark = match load.delivery {
        Delivery::Whole => b"",
        Delivery::Stream => load.dialect.word_mark(),
    };
    let own = load.new + agent as u64 * STEPS_PER_AGENT_MAX;
    let count = load.requests.saturating_sub(agent).div_ceil(load.agents);
    let mut exchanges = Vec::with_capacity(count);
    for number in 0..count {
        let body = load.bodies.body(agent as u64, own, number as u64);
        let request = request(load, target, body)?;
        let mut answer = exchange(&mut connection, request, mark).await?;
        if load.delivery == Delivery::Stream {
            let words = occurrences(&answer.body, mark);
            if words != load.words {
                let text = String::from_utf8_lossy(&answer.body);
                return Err(format!("{words} of {} words came: {text}", load.words));
            }
        }
        answer.body = Vec::new();
        exchanges.push(answer);
    }
    Ok(exchanges)
}

fn request(load: Load<'_>, target: &Target, body: Bytes) -> Result<Request<Full<Bytes>>, String> {
    let mut builder = Request::post(target.path(load.dialect.endpoint()))
        .header("host", target.authority())
        .header("content-type", "application/json");
    if load.dialect == Dialect::Messages {
        builder = builder.header("anthropic-version", "2023-06-01");
    }
    if let Some(key) = &load.front.key {
        builder = builder.header("authorization", format!("Bearer {key}"));
    }
    builder.body(Full::new(body)).map_err(|e| e.to_string())
}

/// How often `mark` is in `bytes`.
fn occurrences(bytes: &[u8], mark: &[u8]) -> usize {
    bytes.windows(mark.len()).filter(|w| *w == mark).count()
}
