//! What happens until a turn has its answer?
//!
//! Choose a node, count the load, send, relay; when that fails before the client has seen a byte,
//! ask the retry policy and try elsewhere. Ends with the record settled in every case.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use cache_index::ids::NodeId;
use policies::price::Usage;
use policies::retry::{Attempts, Outcome, RetryParams, Verdict, after_failure};

use crate::decisions::Routed;
use crate::fleet::{Dispatch, Node, Part};
use crate::ledger::Status;
use crate::pair;
use crate::relay::{Answer, End, Flow, Heard, Refusal, Waited, failure, relay, watched};
use crate::route::{Chosen, Question, choose};
use crate::session::Known;
use crate::turn::Job;
use crate::upstream::NodeRequest;
use dialects::error::{ApiError, ErrorKind};
use dialects::{Dialect, TokenIds};

/// A failed attempt, kept until another one succeeds or the client has to hear of it.
pub(crate) enum Failed {
    /// The node answered, with a no.
    Refusal(Refusal),
    /// There is no answer.
    Nothing(Outcome, String),
    /// There is none because of this other node, which had a part in it.
    Elsewhere(Arc<Node>, Outcome, String),
}

/// Runs attempts until one ends the turn.
pub(crate) async fn run(flow: &mut Flow<'_>, first: Chosen, known: &Known) -> End {
    let params = RetryParams::default();
    let deadline = Instant::now() + flow.gateway.config.limits.request_timeout;
    let mut excluded: Vec<NodeId> = Vec::new();
    let mut chosen = first;
    loop {
        flow.ctx.line.attempts += 1;
        let node = chosen.node.clone();
        let failed = match Box::pin(attempt(flow, chosen)).await {
            Ok(End::Retry(outcome, cause)) => Failed::Nothing(outcome, cause),
            Ok(end) => return end,
            Err(failed) => failed,
        };
        let node = failed.node().cloned().unwrap_or(node);
        if let Some(why) = failure(failed.outcome()) {
            flow.gateway.fleet.failed(&node, why);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let attempts = Attempts {
            made: flow.ctx.line.attempts,
            left_ms: u64::try_from(left.as_millis()).unwrap_or(u64::MAX),
        };
        let verdict = {
            let mut budget = flow
                .gateway
                .retry_budget
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            after_failure(
                failed.outcome(),
                attempts,
                &params,
                &mut budget,
                rand::random(),
            )
        };
        let Verdict::Again { after_ms } = verdict else {
            return give_up(flow, failed).await;
        };
        excluded.push(node.id.clone());
        let pause = tokio::time::sleep(Duration::from_millis(after_ms));
        match watched(flow.client, &mut flow.stopping, pause).await {
            Waited::Done(()) => {}
            Waited::ClientGone => return cancelled(flow),
            Waited::Stopping => return give_up(flow, failed).await,
        }
        match rechoose(flow, known, &excluded) {
            // The last failure says more than "no other node is left".
            None => return give_up(flow, failed).await,
            Some(next) => {
                tracing::warn!(
                    request_id = flow.ctx.request_id,
                    node = %node.id,
                    cause = failed.cause(),
                    "an attempt failed and is made again elsewhere"
                );
                flow.gateway
                    .metrics
                    .retries
                    .with_label_values(&[node.id.as_str()])
                    .inc();
                chosen = next;
            }
        }
    }
}

fn rechoose(flow: &Flow<'_>, known: &Known, excluded: &[NodeId]) -> Option<Chosen> {
    let job = flow.job;
    let question = Question {
        model: &job.model,
        prompt: &job.prompt,
        session: &job.session.id,
        known,
        output_tokens: job.output_tokens_expected,
        excluded,
        splits: pair::splits(job),
    };
    let gateway = flow.gateway;
    choose(
        &gateway.fleet,
        &gateway.bindings,
        &gateway.policy,
        &question,
    )
    .ok()
}

/// One attempt at one node, or at two that share the turn.
async fn attempt(flow: &mut Flow<'_>, chosen: Chosen) -> Result<End, Failed> {
    let (gateway, job) = (flow.gateway, flow.job);
    let node = chosen.node.clone();
    note(flow, &chosen);
    if let Some(prefill) = chosen.prefill.clone() {
        return Box::pin(pair::attempt(flow, chosen, prefill)).await;
    }
    let dispatch = Dispatch {
        prompt_tokens: job.prompt.tokens,
        cached_tokens: chosen.decision.expected_cached_tokens,
        fetched: chosen.decision.fetched(),
        output_tokens: job.output_tokens_expected,
        chain: &job.prompt.chain.hashes,
        session: job.session.id.key,
        part: Part::Whole,
    };
    let load = gateway.fleet.dispatch(&node, &dispatch);
    let hears = hears(job, &node);
    let request = NodeRequest {
        path: job.dialect.node_path(),
        request_id: &flow.ctx.request_id,
        timeout_ms: job.timeout_left_ms(),
        retention_s: job.retention_s,
        prefetch_tokens: prefetch_tokens(&chosen),
        body: job.body.clone(),
        more: more(flow, &chosen, hears),
    };
    // Boxed, as below: Pingora's futures carry their parse buffers, some 20 KB.
    let send = Box::pin(gateway.upstream.send(&node, &request));
    let exchange = match watched(flow.client, &mut flow.stopping, send).await {
        Waited::Done(Ok(exchange)) => exchange,
        Waited::Done(Err(error)) => return Err(Failed::Nothing(error.outcome, error.cause)),
        Waited::ClientGone => return Ok(cancelled(flow)),
        Waited::Stopping => {
            return Ok(End::Refused(ApiError::new(
                ErrorKind::Stopping,
                "The gateway is being stopped. Try again.",
            )));
        }
    };
    // A prompt's tokens may be megabytes, and the answer may take minutes.
    drop(request);
    let answer = Answer {
        exchange,
        load: Some(load),
        heard: hears.then(Heard::default),
        prefilled: None,
        chosen,
    };
    answered(flow, answer).await
}

/// What the node is expected to fetch from its own slower tiers.
pub(crate) fn prefetch_tokens(chosen: &Chosen) -> Option<u64> {
    let fetches = chosen.giver.is_none() && chosen.decision.fetched().tokens > 0;
    fetches.then_some(chosen.decision.expected_cached_tokens)
}

/// What the body gets besides the client's own.
fn more(flow: &Flow<'_>, chosen: &Chosen, hears: bool) -> String {
    let mut more = match hears {
        true => token_fields(flow.job),
        false => String::new(),
    };
    if let Some(giver) = &chosen.giver
        && let Some(fetch) = giver.fetch(chosen.decision.fetched().ms)
    {
        more += &fetch;
        let fetches = &flow.gateway.metrics.fetches;
        fetches.with_label_values(&[giver.id().as_str()]).inc();
    }
    more
}

/// The head of an answer has come.
pub(crate) async fn answered(flow: &mut Flow<'_>, answer: Answer) -> Result<End, Failed> {
    let (gateway, job) = (flow.gateway, flow.job);
    let status = answer.exchange.status();
    if !(200..300).contains(&status) {
        return match Refusal::read(flow, answer).await {
            Ok(refusal) => Err(Failed::Refusal(refusal)),
            Err(End::Retry(outcome, cause)) => Err(Failed::Nothing(outcome, cause)),
            Err(end) => Ok(end),
        };
    }
    if let Some(going) = &flow.ctx.going {
        going.first_token();
    }
    compare(flow, &answer);
    // Bound from its first answer on, so that a session's parallel turns stay together.
    if job.dialect.is_conversation() {
        let session = job.session.id.key;
        gateway
            .bindings
            .bind(session, &answer.chosen.node.id, None, Instant::now());
    }
    Ok(Box::pin(relay(flow, answer)).await)
}

/// Whether this node is asked for the tokens of its answer: they are of use only where the gateway
/// makes the next turn's prompt from messages, with the same tokenizer.
pub(crate) fn hears(job: &Job<'_>, node: &Node) -> bool {
    job.dialect != Dialect::Completions && job.prompt.exact && node.facts().token_ids
}

/// The fields about tokens in the node's body. The prompt's own are sent only where the node would
/// not make the same of the messages.
fn token_fields(job: &Job<'_>) -> String {
    answer_token_field(job).to_owned() + &prompt_token_field(job)
}

/// The field that asks for an answer's tokens.
pub(crate) fn answer_token_field(job: &Job<'_>) -> &'static str {
    match job.token_ids {
        TokenIds::Hidden => r#","return_token_ids":true"#,
        // The client's own field asks for them.
        TokenIds::Shown => "",
    }
}

/// The prompt's own tokens, where a node would not make the same of the messages.
pub(crate) fn prompt_token_field(job: &Job<'_>) -> String {
    if job.prompt.answers == 0 {
        return String::new();
    }
    // Numbers always serialise.
    let ids = serde_json::to_string(job.prompt.token_ids()).unwrap_or_default();
    format!(r#","prompt_token_ids":{ids}"#)
}

/// What the record and the log line say of the route.
fn note(flow: &mut Flow<'_>, chosen: &Chosen) {
    let (id, reason) = (chosen.node.id.as_str(), chosen.decision.reason.as_str());
    flow.bill.at_node(id);
    id.clone_into(&mut flow.ctx.line.node);
    let prefill = chosen.prefill.as_ref();
    flow.ctx.line.prefill_node = prefill.map(|node| node.id.to_string());
    flow.ctx.line.route = reason;
    flow.ctx.line.expected_cached = chosen.decision.expected_cached_tokens;
    let job = flow.job;
    flow.ctx
        .routed
        .get_or_insert_with(|| Routed {
            session: job.session.id.key.0,
            prompt_tokens: job.prompt.tokens,
            exact: job.prompt.exact,
            output_tokens_expected: job.output_tokens_expected,
            blocks: job.log_blocks.clone(),
            decisions: Vec::new(),
        })
        .decisions
        .push(Arc::clone(&chosen.decision));
    flow.gateway
        .metrics
        .routes
        .with_label_values(&[id, reason])
        .inc();
}

/// Compares our count and last block with the node's, where it tells.
fn compare(flow: &Flow<'_>, answer: &Answer) {
    let prompt = &flow.job.prompt;
    if !prompt.exact {
        return;
    }
    let tokens = answer.exchange.header("x-node-prompt-tokens");
    let block = answer.exchange.header("x-node-last-block");
    let same_tokens = tokens.is_none_or(|tokens| tokens.parse() == Ok(prompt.tokens));
    let same_block = block.is_none_or(|block| block == prompt.last_block());
    if same_tokens && same_block {
        return;
    }
    let node = answer.chosen.node.id.as_str();
    flow.gateway
        .metrics
        .prompt_mismatch
        .with_label_values(&[node])
        .inc();
    tracing::warn!(
        request_id = flow.ctx.request_id,
        node,
        ours = prompt.tokens,
        theirs = tokens,
        same_block,
        "gateway and node disagree about a prompt"
    );
}

/// The client left before a byte was relayed. The node has computed for it, so the prompt counts.
pub(crate) fn cancelled(flow: &mut Flow<'_>) -> End {
    let usage = Usage {
        input: flow.job.prompt.tokens,
        cached: flow.ctx.line.expected_cached,
        output: 0,
    };
    flow.settle_quietly(Status::Cancelled, usage);
    End::ClientGone
}

/// No further attempt: the client hears of the last failure.
async fn give_up(flow: &mut Flow<'_>, failed: Failed) -> End {
    match failed {
        Failed::Refusal(refusal) => refusal.answer(flow).await,
        Failed::Nothing(outcome, cause) | Failed::Elsewhere(_, outcome, cause) => {
            let error = match outcome {
                Outcome::TimeoutBeforeFirstByte => ApiError::new(
                    ErrorKind::NodeTimeout,
                    "The node did not answer in time. Try again, or ask for less at once.",
                ),
                _ => ApiError::new(
                    ErrorKind::NodeFailed,
                    "The node failed before it answered, and no other could take over. Try again.",
                ),
            };
            End::Refused(error.because(cause))
        }
    }
}

impl Failed {
    pub(crate) fn outcome(&self) -> Outcome {
        match self {
            Self::Refusal(refusal) => refusal.outcome(),
            Self::Nothing(outcome, _) | Self::Elsewhere(_, outcome, _) => *outcome,
        }
    }

    pub(crate) fn cause(&self) -> String {
        match self {
            Self::Refusal(refusal) => refusal.cause(),
            Self::Nothing(_, cause) | Self::Elsewhere(_, _, cause) => cause.clone(),
        }
    }

    /// The node that failed, where that need not be the one that was to answer.
    fn node(&self) -> Option<&Arc<Node>> {
        match self {
            Self::Refusal(refusal) => Some(refusal.node()),
            Self::Nothing(..) => None,
            Self::Elsewhere(node, ..) => Some(node),
        }
    }
}
