//! What is the way of one generation request?
//!
//! Read the body → check it → make tokens → queue it → wait for the first output → answer whole,
//! or stream. While it waits, the client is watched; if it goes away, the ticket is dropped and
//! the engine frees the blocks in its next step. The head of a stream is sent with the first
//! token: until then a failure is still an honest status code, and the gateway may go elsewhere.

use std::pin::pin;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use cache_index::block::BlockHash;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderName, HeaderValue, Request, Response, StatusCode, Version};
use http_body_util::Either;
use hyper::body::Incoming;

use super::client::Client;
use super::routes::{Refusal, json_answer};
use super::shape::Shape;
use super::stream::{Opening, StreamBody};
use super::{Answer, App, body};
use crate::engine::{Output, Ticket, Usage};
use crate::error::ApiError;
use crate::request::prepare::{Prepared, Served};
use crate::request::{self, Caller, Delivery, Dialect, Rules, UsageChunks};

/// Bodies past this size are parsed and tokenised off the threads that serve connections: a long
/// prompt takes milliseconds, in which no stream would be written.
const INLINE_BODY_BYTES_MAX: usize = 16 << 10;

const PROMPT_TOKENS: HeaderName = HeaderName::from_static("x-node-prompt-tokens");
const LAST_BLOCK: HeaderName = HeaderName::from_static("x-node-last-block");
/// Tells proxies such as nginx to pass a stream on as it comes.
const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// What is known of a request before its body is read.
pub(super) struct Asked {
    pub(super) dialect: Dialect,
    pub(super) caller: Caller,
    pub(super) request_id: Arc<str>,
}

pub(super) async fn answer(
    app: &Arc<App>,
    client: &Arc<Client>,
    request: Request<Incoming>,
    asked: Asked,
) -> Result<Answer, Refusal> {
    let loaded = app.ready()?;
    let understands_probe = request.version() >= Version::HTTP_11;
    body::plain(request.headers())?;
    let body = body::read(request.into_body(), &app.read_limits()).await?;
    let (dialect, caller) = (asked.dialect, asked.caller);
    let (delivery, prepared) = check(&loaded.served, body, asked).await?;
    let Prepared { job, last_block } = prepared;
    let created = unix_seconds();
    let shape = Shape {
        dialect,
        id: answer_id(dialect),
        created,
        model: loaded.served.model_id.clone(),
    };
    let usage = Usage {
        prompt_tokens: job.prompt.len(),
        ..Usage::default()
    };
    let ticket = loaded.engine.submit(job)?;
    let waiting = Waiting {
        ticket,
        usage,
        client,
        understands_probe,
    };
    let mut answer = match delivery {
        Delivery::Whole => waiting.whole(&shape).await?,
        Delivery::Stream(chunks) => waiting.stream(shape, chunks).await?,
    };
    if caller == Caller::TokenHolder {
        name_prompt(&mut answer, usage.prompt_tokens, last_block);
    }
    Ok(answer)
}

async fn check(
    served: &Arc<Served>,
    body: Bytes,
    asked: Asked,
) -> Result<(Delivery, Prepared), ApiError> {
    let served = Arc::clone(served);
    let inline = body.len() <= INLINE_BODY_BYTES_MAX;
    let check = move || {
        let rules = Rules {
            model_id: &served.model_id,
            vocab: served.vocab(),
            caller: asked.caller,
            seed: rand::random(),
        };
        let generation = request::parse(&body, asked.dialect, &rules)?;
        let delivery = generation.delivery;
        let prepared = served.prepare(generation, asked.request_id, unix_seconds())?;
        Ok((delivery, prepared))
    };
    if inline {
        return check();
    }
    let checked = tokio::task::spawn_blocking(check).await;
    checked.unwrap_or_else(|error| Err(ApiError::internal(format!("reading panicked: {error}"))))
}

/// A queued request before its first output.
struct Waiting<'a> {
    ticket: Ticket,
    usage: Usage,
    client: &'a Arc<Client>,
    understands_probe: bool,
}

impl Waiting<'_> {
    async fn whole(mut self, shape: &Shape) -> Result<Answer, Refusal> {
        let mut gone = pin!(self.client.gone_before_head(self.understands_probe));
        let mut answer = String::new();
        loop {
            let output = tokio::select! {
                output = self.ticket.next() => output,
                () = &mut gone => return Err(Refusal::ClientGone),
            };
            match output {
                Some(Output::Joined { .. }) => {}
                Some(Output::Text { text, .. }) => answer += &text,
                Some(Output::Done {
                    text,
                    ending,
                    usage,
                    ..
                }) => {
                    answer += &text;
                    return Ok(json_answer(
                        StatusCode::OK,
                        &shape.whole(&answer, ending, &usage),
                    ));
                }
                Some(Output::Embedding(..)) => {
                    return Err(ApiError::internal("a vector nobody asked for").into());
                }
                Some(Output::Failed(error)) => return Err(error.into()),
                None => return Err(ApiError::internal("the engine's thread ended").into()),
            }
        }
    }

    async fn stream(mut self, shape: Shape, chunks: UsageChunks) -> Result<Answer, Refusal> {
        let first = {
            let mut gone = pin!(self.client.gone_before_head(self.understands_probe));
            loop {
                let output = tokio::select! {
                    output = self.ticket.next() => output,
                    () = &mut gone => return Err(Refusal::ClientGone),
                };
                match output {
                    Some(Output::Joined { cached_tokens }) => {
                        self.usage.cached_tokens = cached_tokens;
                    }
                    Some(Output::Failed(error)) => return Err(error.into()),
                    None => return Err(ApiError::internal("the engine's thread ended").into()),
                    Some(first) => break first,
                }
            }
        };
        let Self {
            ticket,
            usage,
            client,
            ..
        } = self;
        let opening = Opening {
            shape,
            chunks,
            usage,
            ticket,
            first,
        };
        let body = StreamBody::new(opening, Arc::clone(client));
        let mut answer = Response::new(Either::Right(body));
        let headers = answer.headers_mut();
        headers.insert(
            CONTENT_TYPE,
            HeaderValue::from_static("text/event-stream; charset=utf-8"),
        );
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        headers.insert(ACCEL_BUFFERING, HeaderValue::from_static("no"));
        Ok(answer)
    }
}

/// Tells a token holder how the engine counted, so that the gateway can compare.
fn name_prompt(answer: &mut Answer, prompt_tokens: usize, last_block: Option<BlockHash>) {
    let last_block = last_block.map(|hash| hash.to_string()).unwrap_or_default();
    let headers = answer.headers_mut();
    headers.insert(PROMPT_TOKENS, HeaderValue::from(prompt_tokens));
    if let Ok(value) = HeaderValue::from_str(&last_block) {
        headers.insert(LAST_BLOCK, value);
    }
}

fn answer_id(dialect: Dialect) -> String {
    let prefix = match dialect {
        Dialect::Chat => "chatcmpl",
        Dialect::Completions => "cmpl",
    };
    format!("{prefix}-{}", uuid::Uuid::new_v4().simple())
}

fn unix_seconds() -> i64 {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    i64::try_from(now.as_secs()).unwrap_or(i64::MAX)
}
