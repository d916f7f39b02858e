//! How is an answer in one piece relayed?
//!
//! It is read whole before a byte goes out: its usage is inside, and a client may read that only
//! after the record is written. Until then a node that breaks off costs nothing but time.

use bytes::{Bytes, BytesMut};
use pingora::http::ResponseHeader;
use pingora::protocols::http::ServerSession;
use policies::price::Usage;
use policies::retry::Outcome;

use super::chunk::usage_of_whole;
use super::edit::{with_member, with_model};
use super::prefilled::with_cached;
use super::{Answer, AnswerEnd, End, Flow, Waited, watched};
use crate::ledger::Status;
use crate::respond;
use crate::turn::Stopping;
use crate::upstream::{Exchange, outcome};
use dialects::answer::{Malformed, Stored};
use dialects::error::{ApiError, ErrorKind};

/// Largest answer: far above any model's context in bytes, far below what hurts.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// What came of reading a body.
pub(crate) enum Body {
    Whole(Bytes),
    Broken(Outcome, String),
    ClientGone,
    Stopping,
}

/// Reads the rest of an answer.
pub(super) async fn read(flow: &mut Flow<'_>, answer: &mut Answer) -> Body {
    read_all(flow.client, &mut flow.stopping, &mut answer.exchange).await
}

/// Reads the rest of a node's answer for as long as its client waits.
pub(crate) async fn read_all(
    client: &mut ServerSession,
    stopping: &mut Stopping<'_>,
    exchange: &mut Exchange,
) -> Body {
    let mut first = Bytes::new();
    let mut all = BytesMut::new();
    loop {
        match watched(client, stopping, exchange.next()).await {
            Waited::Done(Ok(Some(chunk))) => {
                if first.len().max(all.len()) + chunk.len() > ANSWER_BYTES_MAX {
                    let cause = format!("the answer is larger than {ANSWER_BYTES_MAX} bytes");
                    return Body::Broken(Outcome::BadAnswer, cause);
                }
                if first.is_empty() {
                    first = chunk;
                    continue;
                }
                if all.is_empty() {
                    all.extend_from_slice(&first);
                }
                all.extend_from_slice(&chunk);
            }
            Waited::Done(Ok(None)) if all.is_empty() => return Body::Whole(first),
            Waited::Done(Ok(None)) => return Body::Whole(all.freeze()),
            Waited::Done(Err(error)) => return Body::Broken(outcome(&error), error.to_string()),
            Waited::ClientGone => return Body::ClientGone,
            Waited::Stopping => return Body::Stopping,
        }
    }
}

pub(super) async fn run(flow: &mut Flow<'_>, mut answer: Answer) -> End {
    let mut body = match read(flow, &mut answer).await {
        Body::Whole(body) => body,
        Body::Broken(outcome, cause) => return End::Retry(outcome, cause),
        Body::ClientGone => {
            let usage = flow.estimated(&answer, 0);
            flow.settle_quietly(Status::Cancelled, usage);
            return End::ClientGone;
        }
        Body::Stopping => return End::Refused(stopping()),
    };
    if let Some(prefilled) = &answer.prefilled
        && let Some(charged) = with_cached(&body, prefilled.cached_tokens)
    {
        body = charged.into();
    }
    if let Some(shown) = answer.listen(&body, flow.job.token_ids) {
        body = shown.into();
    }
    let reported = usage_of_whole(&body).map(Usage::from);
    let usage = reported.unwrap_or_else(|| flow.estimated(&answer, 0));
    let end = flow.end_of(&answer.chosen, usage);
    let (shown, stored) = match shown(flow, &body, &end) {
        Ok(shown) => shown,
        Err(error) => return End::Retry(Outcome::BadAnswer, error.to_string()),
    };
    if let Some(shown) = shown {
        body = shown.into();
    }
    flow.ctx.line.ttft_ms = Some(flow.ctx.elapsed_ms());
    if let Err(error) = flow.settle(Status::Complete, usage) {
        return End::Refused(error);
    }
    flow.keep(stored).await;
    flow.learn(&answer, reported);
    answer.give_back();
    let head = match head(flow, &answer, (usage, body.len())) {
        Ok(head) => head,
        Err(error) => {
            let refused =
                ApiError::new(ErrorKind::Internal, "The answer's head could not be made.");
            return End::Refused(refused.because(error));
        }
    };
    flow.ctx.status = 200;
    // The record stands whether or not the client is still there to read.
    let written = respond::whole(flow.client, head, body).await;
    flow.gateway.upstream.release(answer.exchange).await;
    match written {
        Ok(()) => End::Answered,
        Err(_) => End::ClientGone,
    }
}

/// What the client reads in place of the node's words, if that differs, and what is kept of it.
type Shown = (Option<Vec<u8>>, Option<Stored>);

fn shown(flow: &Flow<'_>, body: &[u8], end: &AnswerEnd) -> Result<Shown, Malformed> {
    if let Some(translation) = flow.translation {
        let mut translation = translation.fresh();
        let translated = translation.whole(body, end)?;
        return Ok((Some(translated), translation.stored()));
    }
    let alias = flow.job.alias.as_ref();
    let renamed = alias.and_then(|alias| with_model(body, &alias.json));
    let explained = end.homing.as_ref().and_then(|homing| {
        let body = renamed.as_deref().unwrap_or(body);
        with_member(body, "homing", &homing.to_string())
    });
    Ok((explained.or(renamed), None))
}

/// The head of a whole answer: the bill is known before it goes out.
fn head(
    flow: &Flow<'_>,
    answer: &Answer,
    (usage, length): (Usage, usize),
) -> pingora::Result<ResponseHeader> {
    let mut head = flow.head(&answer.chosen, "application/json", Some(length))?;
    head.insert_header("x-homing-cached-tokens", usage.cached.to_string())?;
    let cost = flow.cost_nano_usd(&usage).to_string();
    head.insert_header("x-homing-cost-nano-usd", cost)?;
    Ok(head)
}

/// The gateway's grace period is over.
pub(crate) fn stopping() -> ApiError {
    let message = "The gateway is being stopped and could not wait for the answer. Try again.";
    ApiError::new(ErrorKind::Stopping, message)
}
