//! How is a stream relayed?
//!
//! Every complete event goes on in the moment its last byte is there. Held back are only the
//! events that a client may not read before the record is written: the last chunk with the usage
//! and the terminator. States: nothing sent (another node may still take over) → relaying →
//! holding (the usage has come) → ended. A stream ends in one of six ways: complete; left by
//! the client; cancelled by another request of it; cut by the node; cut by the gateway's shutdown; withheld because the record
//! could not be written.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::Version;
use http::header::{CACHE_CONTROL, TRANSFER_ENCODING};
use policies::price::Usage;
use policies::retry::Outcome;

use super::chunk::ChunkFacts;
use super::edit::{with_member, with_model};
use super::prefilled::with_cached;
use super::sse::{Event, EventKind, Scanner};
use super::whole::stopping;
use super::{Answer, End, Flow, Waited, failure, told, watched};
use crate::ledger::Status;
use crate::upstream::outcome;
use dialects::Delivery;
use dialects::answer::{Malformed, Translation};
use dialects::error::{ApiError, ErrorKind};

/// How long the end of a finished answer's framing is awaited to keep the connection.
const FRAMING_END: Duration = Duration::from_millis(50);
/// What ends a stream; written by the gateway where a node forgot it.
const DONE: &[u8] = b"data: [DONE]\n\n";

/// A stream on its way.
struct Stream<'s, 'a> {
    flow: &'s mut Flow<'a>,
    answer: Answer,
    scanner: Scanner,
    /// Tokens relayed, as far as chunks show them.
    tokens: u64,
    /// Choices that have ended.
    finished: u64,
    usage: Option<Usage>,
    head_sent: bool,
    /// From the last chunk with usage on: bytes that wait for the record.
    held: Option<BytesMut>,
    /// The node said in an event that it failed.
    failed: bool,
    /// What it said.
    node_error: Option<ApiError>,
    /// What turns chunks into the client's events; none where the client reads the node's own.
    translation: Option<Box<dyn Translation>>,
}

/// What a batch of events came to.
struct Batch {
    /// To be relayed now.
    now: Bytes,
    /// The terminator was among them.
    done: bool,
}

pub(super) async fn run(flow: &mut Flow<'_>, answer: Answer) -> End {
    let translation = flow.translation.map(|translation| {
        let mut translation = translation.fresh();
        translation.begin(told(flow.estimated(&answer, 0)));
        translation
    });
    let stream = Stream {
        flow,
        answer,
        scanner: Scanner::default(),
        tokens: 0,
        finished: 0,
        usage: None,
        head_sent: false,
        held: None,
        failed: false,
        node_error: None,
        translation,
    };
    Box::pin(stream.run()).await
}

impl Stream<'_, '_> {
    async fn run(mut self) -> End {
        let mut events = Vec::new();
        loop {
            let next = self.answer.exchange.next();
            let waited = watched(self.flow.client, &mut self.flow.stopping, next).await;
            match waited {
                Waited::Done(Ok(Some(chunk))) => {
                    if let Err(error) = self.scanner.push(chunk, &mut events) {
                        return self.broken(Outcome::BadAnswer, error.to_string()).await;
                    }
                    let batch = match self.sort(&mut events) {
                        Ok(batch) => batch,
                        Err(error) => {
                            return self.broken(Outcome::BadAnswer, error.to_string()).await;
                        }
                    };
                    if self.failed && !self.head_sent {
                        let cause = "the node's first event was an error".to_owned();
                        return End::Retry(Outcome::BadAnswer, cause);
                    }
                    if self.write(batch.now).await.is_err() {
                        return self.cancelled();
                    }
                    if batch.done {
                        return self.complete().await;
                    }
                }
                Waited::Done(Ok(None)) => return Box::pin(self.ended()).await,
                Waited::Done(Err(error)) => {
                    return self.broken(outcome(&error), error.to_string()).await;
                }
                Waited::ClientGone => return self.cancelled(),
                Waited::Stopping if self.flow.is_cancelled() => {
                    return Box::pin(self.called_off()).await;
                }
                Waited::Stopping => {
                    return self
                        .cut(stopping(), "the gateway is stopping".to_owned())
                        .await;
                }
            }
        }
    }

    /// Sorts events into what goes on now and what waits for the record.
    fn sort(&mut self, events: &mut Vec<Event>) -> Result<Batch, Malformed> {
        let (mut now, mut more) = (Bytes::new(), BytesMut::new());
        let (before, mut done) = (self.tokens, false);
        for mut event in events.drain(..) {
            // One terminator; whatever a node writes after it is not part of the answer.
            if done {
                break;
            }
            let mut hidden = false;
            match event.kind {
                EventKind::Done => {
                    done = true;
                    self.held.get_or_insert_default();
                }
                EventKind::Chunk(mut facts) => {
                    self.charge(&mut event, &mut facts);
                    self.tokens += facts.tokens;
                    self.finished += facts.finished;
                    self.failed |= facts.failed;
                    if self.translation.is_some() {
                        self.translate(&mut event, &facts)?;
                    } else {
                        hidden = self.listen(&mut event, &facts);
                        self.show(&mut event, &facts);
                    }
                    if let Some(usage) = facts.usage {
                        self.usage = Some(usage.into());
                        let all_finished = self.finished >= self.flow.job.choices;
                        if facts.no_choices || (facts.finished > 0 && all_finished) {
                            self.held.get_or_insert_default();
                        }
                        hidden |= self.translation.is_none()
                            && facts.no_choices
                            && self.flow.job.delivery != Delivery::StreamWithUsage;
                    }
                }
                EventKind::Comment | EventKind::Opaque => {}
            }
            let is_translated = self.translation.is_some();
            if is_translated && !matches!(event.kind, EventKind::Chunk(_) | EventKind::Comment) {
                // The dialect has a terminator of its own, and nothing else of the node's.
                hidden = true;
            }
            match &mut self.held {
                _ if hidden => {}
                // A translation says its last words itself: nothing of it waits.
                Some(held) if !is_translated => held.extend_from_slice(&event.bytes),
                _ if now.is_empty() => now = event.bytes,
                _ => {
                    if more.is_empty() {
                        more.extend_from_slice(&now);
                    }
                    more.extend_from_slice(&event.bytes);
                }
            }
        }
        if self.tokens > before {
            self.count(self.tokens - before);
        }
        Ok(Batch {
            now: if more.is_empty() { now } else { more.freeze() },
            done,
        })
    }

    /// Puts the cached tokens of the node that computed the prompt into a chunk's usage.
    fn charge(&self, event: &mut Event, facts: &mut ChunkFacts) {
        if let (Some(prefilled), Some(usage)) = (&self.answer.prefilled, &mut facts.usage) {
            usage.cached = prefilled.cached_tokens.min(usage.input);
            event.edit(|json| with_cached(json, prefilled.cached_tokens));
        }
    }

    /// Puts the client's events in the place of a chunk.
    fn translate(&mut self, event: &mut Event, facts: &ChunkFacts) -> Result<(), Malformed> {
        let Some(translation) = &mut self.translation else {
            return Ok(());
        };
        let mut out = Vec::new();
        let json = event.json();
        if facts.failed {
            // The dialect's own error event ends the stream, with what the node said.
            self.node_error = Some(told_by_node(&json));
        } else {
            if let Some(heard) = &mut self.answer.heard {
                heard.hear(&json);
            }
            translation.chunk(&json, &mut out)?;
        }
        drop(json);
        event.bytes = out.into();
        Ok(())
    }

    /// Keeps what a chunk says by which tokens, and takes tokens out that the client did not ask
    /// for; says whether nothing is left in it then.
    fn listen(&mut self, event: &mut Event, facts: &ChunkFacts) -> bool {
        if self.answer.heard.is_none() {
            return false;
        }
        let Some(data) = event.data() else {
            self.answer.heard = None;
            return false;
        };
        let token_ids = self.flow.job.token_ids;
        let Some(shown) = self.answer.listen(&event.bytes[data.clone()], token_ids) else {
            return false;
        };
        let bytes = [&event.bytes[..data.start], &shown, &event.bytes[data.end..]];
        event.bytes = bytes.concat().into();
        !facts.tells
    }

    /// Puts the client's name for the model into a chunk, and beside the usage that the client
    /// asked for how the answer came about.
    fn show(&self, event: &mut Event, facts: &ChunkFacts) {
        let job = self.flow.job;
        if let Some(alias) = &job.alias {
            event.edit(|json| with_model(json, &alias.json));
        }
        let usage = facts.usage.filter(|_| facts.no_choices);
        let homing = usage.and_then(|usage| {
            let asked = job.delivery == Delivery::StreamWithUsage;
            let chosen = &self.answer.chosen;
            asked.then(|| self.flow.homing(chosen, usage.into()))?
        });
        if let Some(homing) = homing {
            event.edit(|json| with_member(json, "homing", &homing.to_string()));
        }
    }

    /// More text is about to be relayed.
    fn count(&mut self, more: u64) {
        self.flow.first_text(&mut self.answer);
        if let Some(load) = &mut self.answer.load {
            load.decoded(more);
        }
        let so_far = self.so_far();
        self.flow.bill.checkpoint(so_far);
    }

    /// The tokens up to now: the node's own report, else what was relayed.
    fn so_far(&self) -> Usage {
        self.usage
            .unwrap_or_else(|| self.flow.estimated(&self.answer, self.tokens))
    }

    async fn write(&mut self, bytes: Bytes) -> pingora::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        if !self.head_sent {
            let mut head = self
                .flow
                .head(&self.answer.chosen, "text/event-stream", None)?;
            head.insert_header(CACHE_CONTROL, "no-cache")?;
            // An older client gets a body that ends with the connection.
            if self.flow.client.req_header().version >= Version::HTTP_11 {
                head.insert_header(TRANSFER_ENCODING, "chunked")?;
            }
            self.flow
                .client
                .write_response_header(Box::new(head))
                .await?;
            self.head_sent = true;
            self.flow.ctx.status = 200;
        }
        self.flow.client.write_response_body(bytes, false).await
    }

    /// The terminator has come: the record first, then what was held.
    async fn complete(mut self) -> End {
        let status = if self.failed {
            Status::Cut
        } else {
            Status::Complete
        };
        let usage = self.so_far();
        if let Err(error) = self.flow.settle(status, usage) {
            let cause = error.cause.clone().unwrap_or_default();
            return self.tell(error, cause).await;
        }
        if let Some(error) = self.node_error.take() {
            return self
                .tell(error, "the node ended the stream with an error".to_owned())
                .await;
        }
        self.flow.learn(&self.answer, self.usage);
        self.answer.give_back();
        let held = self.last_words(usage);
        self.keep().await;
        let written = self.write(held).await;
        let written = match written {
            Ok(()) => {
                self.flow
                    .client
                    .write_response_body(Bytes::new(), true)
                    .await
            }
            Err(error) => Err(error),
        };
        let Answer {
            mut exchange, load, ..
        } = self.answer;
        drop(load);
        if !exchange.is_done() {
            // The framing's end usually came with the terminator; a missing one only costs the
            // connection.
            let _ = tokio::time::timeout(FRAMING_END, exchange.next()).await;
        }
        self.flow.gateway.upstream.release(exchange).await;
        if written.is_ok() {
            End::Answered
        } else {
            End::ClientGone
        }
    }

    /// Keeps the answer as the translation has it now.
    async fn keep(&mut self) {
        let translation = self.translation.as_mut();
        let stored = translation.and_then(|translation| translation.stored());
        self.flow.keep(stored).await;
    }

    /// The client has cancelled the turn by another request: dropping the exchange closes the
    /// node's connection, and the stream ends as the dialect ends a cancelled one.
    async fn called_off(mut self) -> End {
        let usage = self.so_far();
        self.flow.settle_quietly(Status::Cancelled, usage);
        let mut last = Vec::new();
        if let Some(translation) = &mut self.translation {
            translation.cancel(told(usage), &mut last);
        }
        self.keep().await;
        // The record is written; a client that is gone as well changes nothing.
        let _ = self.write(last.into()).await;
        self.close("cancelled by another request".to_owned()).await
    }

    /// What the client reads once the record is written.
    fn last_words(&mut self, usage: Usage) -> Bytes {
        let Some(translation) = &mut self.translation else {
            return self.held.take().unwrap_or_default().freeze();
        };
        let mut out = Vec::new();
        let end = self.flow.end_of(&self.answer.chosen, usage);
        translation.end(&end, &mut out);
        out.into()
    }

    /// The body ended in an orderly way without a terminator.
    async fn ended(mut self) -> End {
        let last: Option<Event> = self.scanner.finish();
        let batch = match self.sort(&mut last.into_iter().collect()) {
            Ok(batch) => batch,
            Err(error) => return self.broken(Outcome::BadAnswer, error.to_string()).await,
        };
        if self.write(batch.now).await.is_err() {
            return self.cancelled();
        }
        if batch.done {
            return self.complete().await;
        }
        self.broken(
            Outcome::BadAnswer,
            "the stream ended without a terminator".to_owned(),
        )
        .await
    }

    /// The node broke off.
    async fn broken(mut self, outcome: Outcome, cause: String) -> End {
        if let Some(held) = &mut self.held {
            // The usage is there, so the answer is: only the terminator was lost.
            held.extend_from_slice(DONE);
            return self.complete().await;
        }
        if !self.head_sent {
            return End::Retry(outcome, cause);
        }
        if self.failed {
            // The node has said itself what went wrong, and the client has read it: often its own
            // deadline, or a form that could not be kept. A second event would invite a retry.
            let usage = self.so_far();
            self.flow.settle_quietly(Status::Cut, usage);
            let cause = "the node ended the stream with an error".to_owned();
            return match self.node_error.take() {
                Some(error) => self.tell(error, cause).await,
                None => self.close(cause).await,
            };
        }
        if let Some(why) = failure(Outcome::AfterFirstByte) {
            self.flow
                .gateway
                .fleet
                .failed(&self.answer.chosen.node, why);
        }
        let message = format!(
            "The node stopped in the middle of the answer, after {} tokens. Send the request again.",
            self.tokens
        );
        self.cut(ApiError::new(ErrorKind::NodeFailed, message), cause)
            .await
    }

    /// The answer stays incomplete: on the record, then in the stream.
    async fn cut(self, error: ApiError, cause: String) -> End {
        if !self.head_sent {
            return End::Refused(error.because(cause));
        }
        let usage = self.so_far();
        self.flow.settle_quietly(Status::Cut, usage);
        self.tell(error, cause).await
    }

    /// Ends the stream with an error event.
    async fn tell(mut self, error: ApiError, cause: String) -> End {
        if !self.head_sent {
            return End::Refused(error);
        }
        let so_far = self.so_far();
        let event = match &mut self.translation {
            None => format!("data: {}\n\n", error.body(self.flow.ctx.shape)).into_bytes(),
            Some(translation) => {
                let mut out = Vec::new();
                translation.fail(&error, told(so_far), &mut out);
                out
            }
        };
        // The record is written; a client that is gone as well changes nothing.
        let _ = self.write(event.into()).await;
        self.close(cause).await
    }

    /// Ends the body of a stream that stays incomplete.
    async fn close(self, cause: String) -> End {
        let _ = self
            .flow
            .client
            .write_response_body(Bytes::new(), true)
            .await;
        End::Cut(cause)
    }

    /// The client left: dropping the exchange closes the node's connection.
    fn cancelled(self) -> End {
        let usage = self.so_far();
        self.flow.settle_quietly(Status::Cancelled, usage);
        End::ClientGone
    }
}

/// A node's error in its stream, to be told in another dialect.
fn told_by_node(json: &[u8]) -> ApiError {
    let value: serde_json::Value = serde_json::from_slice(json).unwrap_or_default();
    let error = &value["error"];
    let message = error["message"].as_str().or_else(|| error.as_str());
    let kind = match (error["code"].as_str(), error["type"].as_str()) {
        (Some("request_timeout"), _) => ErrorKind::ClientTimeout,
        (_, Some("invalid_request_error")) => ErrorKind::InvalidValue,
        _ => ErrorKind::NodeFailed,
    };
    ApiError::new(
        kind,
        message.unwrap_or("The node failed and did not say why."),
    )
}
