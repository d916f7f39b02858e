//! How fast is a node of one thread when nobody is in its way?
//!
//! Two nodes without a gateway, one to answer and one to compute prompts: the streams alone on the
//! first, then agents' sessions turn by turn on the second while the first streams, since the
//! other core is busy in every arrangement. From these come the rates of requests and the bounds.

use std::path::Path;
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::task::JoinSet;

use super::Args;
use super::plan::{Growth, Kind, Planned};
use super::play::{Door, Record};
use super::stack::{Node, token};
use crate::engine_bench::prompts::Prompts;
use crate::error::LoadError;
use crate::measure::Summary;

/// Tokens of each answer while all of them stream.
const STREAM_TOKENS: u32 = 100;

/// What a node does by itself.
#[derive(Clone, Debug, Serialize)]
pub struct Uncontended {
    /// Time per token with all streams on one node and nothing else on it, in milliseconds.
    pub tpot_ms: f64,
    /// Time to the first token of each turn of an agent's session, alone on its node.
    pub ttft_ms: Vec<f64>,
    /// New prompt tokens a second over that session.
    pub prefill_tokens_per_s: f64,
}

impl Uncontended {
    /// What a turn occupies a node that computes prompts, on average, in seconds.
    pub(super) fn turn_s(&self) -> f64 {
        Summary::of(self.ttft_ms.iter().copied()).mean / 1e3
    }

    pub(super) fn longest_ttft_ms(&self) -> f64 {
        Summary::of(self.ttft_ms.iter().copied()).max
    }
}

/// Measures it.
pub(super) async fn calibrate(
    args: &Args,
    growth: Growth,
    prompts: &mut Prompts,
    folder: &Path,
) -> Result<Uncontended, LoadError> {
    let token = token();
    let start = |name: &str| Node::start(args, "mixed", &[], &folder.join(name), &token);
    let (answers, computes) = (start("answers.log")?, start("computes.log")?);
    answers.wait_ready()?;
    computes.wait_ready()?;
    let door = |node: &Node| -> Result<Door, LoadError> {
        Ok(Door {
            target: node.target()?,
            key: Some(token.clone()),
            model: prompts.model_id().to_owned(),
        })
    };
    let (answering, computing) = (door(&answers)?, door(&computes)?);
    // Once unmeasured: pages of the weights and of the pool are touched for the first time.
    let warm = session(growth, prompts).into_iter().take(1).collect();
    turns(&computing, &computes, warm).await?;
    let stream = |tokens, prompts: &mut Prompts| Planned {
        tokens,
        ..request(Kind::Stream, prompts.next(args.stream_prompt_tokens))
    };
    let alone = (0..args.streams).map(|_| stream(STREAM_TOKENS, prompts));
    let alone = stream_all(&answering, alone.collect());
    let alone = good(&answers, alone.join_all().await)?;
    let tpot_ms = together_ms(&alone);
    let measured = [session(growth, prompts), session(growth, prompts)];
    let tokens = growth.longest() as f64;
    let busy = (0..args.streams).map(|_| stream(4000, prompts));
    let busy = stream_all(&answering, busy.collect());
    // Of two sessions the faster turn: whatever else the machine did can only have slowed it down.
    let [first, second] = measured;
    let first = turns(&computing, &computes, first).await?;
    let second = turns(&computing, &computes, second).await?;
    let both = first.iter().zip(&second);
    let ttft_ms: Vec<f64> = both.map(|(a, b)| a.min(*b)).collect();
    drop(busy);
    Ok(Uncontended {
        tpot_ms,
        prefill_tokens_per_s: tokens * 1e3 / ttft_ms.iter().sum::<f64>(),
        ttft_ms,
    })
}

/// Time per token while all of them stream: before, others' prompts are computed, and after, fewer
/// are left.
fn together_ms(streams: &[Record]) -> f64 {
    let firsts = streams.iter().filter_map(|record| record.tokens.first());
    let lasts = streams.iter().filter_map(|record| record.tokens.last());
    let (Some(from), Some(to)) = (firsts.max(), lasts.min()) else {
        return 0.0;
    };
    let tokens = streams.iter().flat_map(|record| &record.tokens);
    let among = tokens.filter(|at| (from..to).contains(at)).count() as f64;
    to.saturating_sub(*from).as_secs_f64() * 1e3 * streams.len() as f64 / among.max(1.0)
}

fn session(growth: Growth, prompts: &mut Prompts) -> Vec<Planned> {
    let mut prompt = String::new();
    (0..growth.turns)
        .map(|turn| {
            prompt += &prompts.next(growth.of(turn));
            request(Kind::Turn, prompt.clone())
        })
        .collect()
}

fn request(kind: Kind, prompt: String) -> Planned {
    Planned {
        at: Duration::ZERO,
        kind,
        session: "calibration".into(),
        prompt,
        tokens: 1,
    }
}

fn stream_all(door: &Door, streams: Vec<Planned>) -> JoinSet<Record> {
    let (mut set, start) = (JoinSet::new(), Instant::now());
    for stream in streams {
        set.spawn(door.clone().send(stream, start));
    }
    set
}

/// One turn after another; how long each took to its first token.
async fn turns(door: &Door, node: &Node, turns: Vec<Planned>) -> Result<Vec<f64>, LoadError> {
    let mut ttft_ms = Vec::new();
    for turn in turns {
        let record = door.clone().send(turn, Instant::now()).await;
        ttft_ms.push(good(node, vec![record])?[0].ttft_ms);
    }
    Ok(ttft_ms)
}

fn good(node: &Node, records: Vec<Record>) -> Result<Vec<Record>, LoadError> {
    match records.iter().find_map(|record| record.failure.as_ref()) {
        Some(failure) => Err(node.trouble(failure)),
        None => Ok(records),
    }
}
