//! How does a node's answer reach the client?
//!
//! Whole answers ([`whole`]) and streams ([`stream`]) share this: while the gateway waits for the
//! node, it watches the client and its own shutdown, so that a client that leaves closes the
//! node's connection at once. Nothing is written to the client before the node's first byte of
//! answer, so until then another node can take over ([`End::Retry`]).

pub(crate) mod chunk;
mod edit;
mod heard;
mod prefilled;
mod refusal;
mod sse;
mod stream;
mod strip;
mod whole;

use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use bytes::Bytes;
use http::{StatusCode, Version};
use pingora::http::ResponseHeader;
use pingora::protocols::http::ServerSession;
use policies::price::Usage;
use policies::retry::Outcome;
use serde_json::{Value, json};

pub(crate) use heard::Heard;
pub(crate) use prefilled::Prefilled;
pub(crate) use refusal::Refusal;
pub(crate) use whole::{Body, read_all, stopping};

use crate::ctx::Ctx;
use crate::fleet::{Failure, InFlight};
use crate::ledger::Status;
use crate::proxy::Gateway;
use crate::respond;
use crate::responses::Keeping;
use crate::route::Chosen;
use crate::settle::Bill;
use crate::turn::{Job, Stopping, beside_others};
use crate::upstream::Exchange;
use dialects::answer::{End as AnswerEnd, Stored, Translation};
use dialects::error::{ApiError, ErrorKind};
use dialects::{Delivery, TokenIds};

/// How often a client that has closed its sending side is asked whether it still reads. Two of
/// these are what a client that left costs a node at most, besides a round trip.
const PROBE_EVERY: Duration = Duration::from_millis(100);

/// Everything an attempt works with.
pub(crate) struct Flow<'a> {
    pub(crate) gateway: &'a Gateway,
    pub(crate) client: &'a mut ServerSession,
    pub(crate) ctx: &'a mut Ctx,
    pub(crate) job: &'a Job<'a>,
    pub(crate) bill: &'a mut Bill,
    /// What turns a node's answer into the client's dialect; none where they are the same.
    pub(crate) translation: Option<&'a dyn Translation>,
    /// What is kept of the answer; none in a dialect that keeps nothing.
    pub(crate) keeping: Option<&'a Keeping>,
    /// Resolves when the gateway's grace period is over, or the turn is cancelled.
    pub(crate) stopping: Stopping<'a>,
}

/// An answer that has begun.
pub(crate) struct Answer {
    pub(crate) exchange: Exchange,
    pub(crate) chosen: Chosen,
    /// Given back before the client reads the end, so that its next turn does not meet it.
    pub(crate) load: Option<InFlight>,
    /// What was said by which tokens, where the node tells.
    pub(crate) heard: Option<Heard>,
    /// What it owes to another node, where that computed the prompt.
    pub(crate) prefilled: Option<Box<Prefilled>>,
}

impl Answer {
    /// The nodes have done their part: their shares of the load are given back.
    fn give_back(&mut self) {
        self.load = None;
        if let Some(prefilled) = &mut self.prefilled {
            prefilled.load = None;
        }
    }

    /// Takes in a chunk of the answer, or all of it; says what the client is to see in its place,
    /// if that differs.
    fn listen(&mut self, json: &[u8], token_ids: TokenIds) -> Option<Vec<u8>> {
        let heard = self.heard.as_mut()?;
        heard.hear(json);
        match token_ids {
            TokenIds::Shown => None,
            TokenIds::Hidden => strip::without_token_ids(json),
        }
    }
}

/// How an attempt ended.
#[derive(Debug)]
pub(crate) enum End {
    /// The client has the answer and the record is written.
    Answered,
    /// Nothing was relayed; another node may do better.
    Retry(Outcome, String),
    /// The client left; the record says so.
    ClientGone,
    /// The answer broke off after its beginning; the client was told and the record says so.
    Cut(String),
    /// The gateway refuses by itself.
    Refused(ApiError),
}

/// What ended a wait.
pub(crate) enum Waited<T> {
    /// The work is done.
    Done(T),
    /// The client closed its connection.
    ClientGone,
    /// The gateway has to stop.
    Stopping,
}

/// Waits for `work` for as long as the client waits too.
pub(crate) async fn watched<T>(
    client: &mut ServerSession,
    stopping: &mut Stopping<'_>,
    work: impl Future<Output = T>,
) -> Waited<T> {
    let mut work = pin!(work);
    loop {
        tokio::select! {
            // The work first: an answer that is there is relayed even if the client has just left.
            biased;
            done = &mut work => return Waited::Done(done),
            // Bytes of a next request are kept (pipelining is on), so this resolves on a close only.
            // With such bytes there it never does: the socket itself is asked then.
            _ = client.read_body_or_idle(true) => break,
            () = tokio::time::sleep(PROBE_EVERY) => {}
            () = stopping.as_mut() => return Waited::Stopping,
        }
        match sending_side(client) {
            Sends::More => {}
            Sends::NothingMore => break,
            Sends::Gone => return Waited::ClientGone,
        }
    }
    if client.as_http1().is_none() {
        // Not a socket of its own, which could be closed on one side only: it is gone.
        return Waited::ClientGone;
    }
    loop {
        tokio::select! {
            biased;
            done = &mut work => return Waited::Done(done),
            () = tokio::time::sleep(PROBE_EVERY) => {}
            () = stopping.as_mut() => return Waited::Stopping,
        }
        // Outside the `select!`, which would drop a probe that is half written.
        if !still_reads(client).await {
            return Waited::ClientGone;
        }
    }
}

/// What the kernel says of a client's sending side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Sends {
    /// It may send more; or nothing can be known.
    More,
    /// It has closed its sending side.
    NothingMore,
    /// The connection is reset.
    Gone,
}

/// Whether a client may send more: what lies unread before a close hides it from who would read.
fn sending_side(client: &ServerSession) -> Sends {
    // States of a connection in Linux's `include/net/tcp_states.h`.
    const TCP_CLOSE: u8 = 7;
    const TCP_CLOSE_WAIT: u8 = 8;
    let socket = client.as_http1().map(|http1| http1.digest());
    let socket = socket.and_then(|digest| digest.socket_digest.as_ref());
    match socket.and_then(|socket| socket.tcp_info()) {
        Some(info) if info.tcpi_state == TCP_CLOSE => Sends::Gone,
        Some(info) if info.tcpi_state == TCP_CLOSE_WAIT => Sends::NothingMore,
        _ => Sends::More,
    }
}

/// Whether a client that has closed its sending side still reads. TCP tells by a reset, one round
/// trip after bytes reach a socket that nobody holds: so something harmless is written, an interim
/// answer before the head and a comment within a stream, and the next write fails.
async fn still_reads(client: &mut ServerSession) -> bool {
    let is_half_closed = client
        .as_http1()
        .is_some_and(|http1| http1.is_half_closed());
    match sending_side(client) {
        Sends::Gone => return false,
        Sends::More if !is_half_closed => return false,
        Sends::More | Sends::NothingMore => {}
    }
    let begun = client
        .response_written()
        .is_some_and(|head| !head.status.is_informational());
    let probe = if begun {
        client
            .write_response_body(Bytes::from_static(b":\n\n"), false)
            .await
            .map(drop)
    } else if client.req_header().version >= Version::HTTP_11 {
        match ResponseHeader::build(StatusCode::CONTINUE, Some(0)) {
            Ok(interim) => client.write_response_header(Box::new(interim)).await,
            Err(error) => Err(error),
        }
    } else {
        // An older client knows no interim answers.
        return false;
    };
    probe.is_ok()
}

/// Relays a successful answer.
pub(crate) async fn relay(flow: &mut Flow<'_>, answer: Answer) -> End {
    let streamed = answer
        .exchange
        .header("content-type")
        .is_some_and(|kind| kind.trim_start().starts_with("text/event-stream"));
    match (streamed, flow.job.delivery) {
        (true, Delivery::Stream | Delivery::StreamWithUsage) => stream::run(flow, answer).await,
        (false, _) => whole::run(flow, answer).await,
        (true, Delivery::Whole) => {
            let cause = "the node streamed where one object was asked for".to_owned();
            End::Retry(Outcome::BadAnswer, cause)
        }
    }
}

impl Flow<'_> {
    /// The head of the client's answer: what the gateway knows of the route, nothing of the
    /// node's own headers.
    fn head(
        &self,
        chosen: &Chosen,
        content_type: &str,
        length: Option<usize>,
    ) -> pingora::Result<ResponseHeader> {
        let mut head = respond::head(self.ctx, 200, content_type, length)?;
        self.explain(&mut head, chosen)?;
        Ok(head)
    }

    /// Adds the headers that explain the route.
    pub(crate) fn explain(
        &self,
        head: &mut ResponseHeader,
        chosen: &Chosen,
    ) -> pingora::Result<()> {
        head.insert_header("x-homing-node", chosen.node.id.as_str())?;
        if let Some(prefill) = &chosen.prefill {
            head.insert_header("x-homing-prefill-node", prefill.id.as_str())?;
        }
        head.insert_header("x-homing-route", chosen.decision.reason.as_str())?;
        let expected = chosen.decision.expected_cached_tokens;
        head.insert_header("x-homing-expected-cached", expected.to_string())?;
        if self.job.debug {
            head.insert_header("x-homing-prompt-tokens", self.job.prompt.tokens.to_string())?;
            head.insert_header("x-homing-last-block", self.job.prompt.last_block())?;
        }
        Ok(())
    }

    /// The tokens of an answer whose node did not report them (yet).
    fn estimated(&self, answer: &Answer, output: u64) -> Usage {
        let told = answer
            .exchange
            .header("x-node-prompt-tokens")
            .and_then(|text| text.parse().ok());
        let input: u64 = told.unwrap_or(self.job.prompt.tokens);
        let told = answer.prefilled.as_ref().map(|one| one.cached_tokens);
        let cached = told
            .unwrap_or(answer.chosen.decision.expected_cached_tokens)
            .min(input.saturating_sub(1));
        Usage {
            input,
            cached,
            output,
        }
    }

    /// What the end of the answer tells the client.
    fn end_of(&self, chosen: &Chosen, usage: Usage) -> AnswerEnd {
        AnswerEnd {
            usage: told(usage),
            homing: self.homing(chosen, usage),
        }
    }

    /// What so many tokens of this model cost.
    fn cost_nano_usd(&self, usage: &Usage) -> i64 {
        let rated = self.gateway.prices.rate(&self.job.model, usage);
        rated.cost_nano_usd
    }

    /// How the answer came about, where the client wants to read it there.
    fn homing(&self, chosen: &Chosen, usage: Usage) -> Option<Value> {
        self.job.detail.then(|| {
            let mut told = json!({
                "node": chosen.node.id.as_str(),
                "route": chosen.decision.reason.as_str(),
                "expected_cached_tokens": chosen.decision.expected_cached_tokens,
                "cached_tokens": usage.cached,
                "cost_nano_usd": self.cost_nano_usd(&usage),
            });
            if let Some(prefill) = &chosen.prefill {
                told["prefill_node"] = prefill.id.as_str().into();
            }
            told
        })
    }

    /// Writes the final record.
    fn settle(&mut self, status: Status, usage: Usage) -> Result<(), ApiError> {
        let Self {
            gateway, ctx, bill, ..
        } = self;
        bill.settle(&gateway.prices, &gateway.metrics, ctx, (status, usage)).map_err(|error| {
            let message =
                "The usage of this request could not be recorded, so its end is withheld. Try again.";
            ApiError::new(ErrorKind::LedgerUnavailable, message).because(error)
        })
    }

    /// Writes the final record where nobody is left to tell about a failure to do so.
    pub(crate) fn settle_quietly(&mut self, status: Status, usage: Usage) {
        if let Err(error) = self.settle(status, usage) {
            tracing::error!(
                request_id = self.ctx.request_id,
                cause = error.cause,
                "a record was not written"
            );
        }
    }

    /// The answer is complete: what is learnt from it.
    fn learn(&mut self, answer: &Answer, usage: Option<Usage>) {
        let node = &answer.chosen.node;
        self.gateway.fleet.succeeded(node);
        let output = usage.map(|usage| usage.output);
        if let Some(heard) = &answer.heard {
            beside_others(self.job.body.len(), || heard.remember(self));
        }
        let converses = self.job.dialect.is_conversation();
        if converses {
            let session = self.job.session.id.key;
            self.gateway
                .bindings
                .bind(session, &node.id, output, std::time::Instant::now());
        }
        match usage {
            Some(_) if !converses => {}
            Some(usage) => {
                // What another node had in its cache says nothing about this one's.
                let cached_at = match (&answer.prefilled, &answer.load) {
                    (Some(prefilled), _) => &prefilled.node,
                    (None, Some(load)) => {
                        load.reported(usage.cached);
                        node
                    }
                    (None, None) => node,
                };
                let expected = answer.chosen.decision.expected_cached_tokens;
                let metrics = &self.gateway.metrics;
                metrics.predicted(cached_at.id.as_str(), expected, usage.cached);
            }
            None => self.gateway.metrics.usage_missing.inc(),
        }
    }

    /// Keeps a complete answer for later turns, before the client can read its end.
    async fn keep(&mut self, stored: Option<Stored>) {
        if let (Some(keeping), Some(stored)) = (self.keeping, stored) {
            let session = &self.job.session.id;
            self.gateway.responses.keep(keeping, session, stored).await;
        }
    }

    /// Whether the client has cancelled the turn by another request.
    fn is_cancelled(&self) -> bool {
        self.keeping.is_some_and(Keeping::is_cancelled)
    }

    /// The first generated text: prefill is over.
    fn first_text(&mut self, answer: &mut Answer) {
        if self.ctx.line.ttft_ms.is_some() {
            return;
        }
        if let Some(load) = &mut answer.load {
            load.first_token();
        }
        if let Some(prefilled) = &mut answer.prefilled {
            prefilled.arrived(&answer.chosen.node);
        }
        self.ctx.line.ttft_ms = Some(self.ctx.elapsed_ms());
        let seconds = self.ctx.started.elapsed().as_secs_f64();
        self.gateway
            .metrics
            .time_to_first_token
            .with_label_values(&[&self.job.model])
            .observe(seconds);
    }
}

/// Billed tokens as a dialect tells them.
pub(super) fn told(usage: Usage) -> dialects::answer::Usage {
    let Usage {
        input,
        cached,
        output,
    } = usage;
    dialects::answer::Usage {
        input,
        cached,
        output,
        reasoning: 0,
    }
}

/// What the fleet's breaker is told of an outcome.
pub(crate) fn failure(outcome: Outcome) -> Option<Failure> {
    if !outcome.is_node_fault() {
        return None;
    }
    match outcome {
        Outcome::ConnectFailed => Some(Failure::Connect),
        Outcome::TimeoutBeforeFirstByte => Some(Failure::Timeout),
        Outcome::Status(status) => Some(Failure::Status(status)),
        Outcome::BrokenBeforeFirstByte | Outcome::BadAnswer | Outcome::AfterFirstByte => {
            Some(Failure::Broken)
        }
        Outcome::ClientGone => None,
    }
}
