//! What is the way of one generation request?
//!
//! Read the body → check it → make tokens → queue it → wait for the first output → answer whole,
//! or stream. While it waits, the client is watched; if it goes away, the tickets are dropped and
//! the engine frees the blocks in its next step. The head of a stream is sent with the first
//! token: until then a failure is still an honest status code, and the gateway may go elsewhere.
//!
//! Of several choices the first runs ahead until its first token: by then the prompt's blocks are
//! in the cache, and the others share them instead of computing the prompt again.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use cache_index::block::BlockHash;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, Version};
use http_body_util::Either;
use hyper::body::Incoming;
use tokio::sync::Semaphore;

use super::choices::Choices;
use super::client::Client;
use super::message::{Message, Reader};
use super::respond::json_answer;
use super::routes::Refusal;
use super::shape::Shape;
use super::stream::{Opening, StreamBody};
use super::{Answer, App, Loaded, body, prefill};
use crate::engine::{Job, Output, Usage};
use crate::error::ApiError;
use crate::request::prepare::{Arrival, Prepared, Reading};
use crate::request::{self, Caller, Delivery, Dialect, Generation, Rules, Task};

/// Bodies past this size are parsed and tokenised off the threads that serve connections: a long
/// prompt takes milliseconds, in which no stream would be written.
pub(super) const INLINE_BODY_BYTES_MAX: usize = 16 << 10;

const PROMPT_TOKENS: HeaderName = HeaderName::from_static("x-node-prompt-tokens");
const LAST_BLOCK: HeaderName = HeaderName::from_static("x-node-last-block");
const TIMEOUT_MS: HeaderName = HeaderName::from_static("x-request-timeout-ms");
const RETENTION_S: HeaderName = HeaderName::from_static("x-cache-retention-s");
const PREFETCH_TOKENS: HeaderName = HeaderName::from_static("x-kv-prefetch-tokens");
/// Tells proxies such as nginx to pass a stream on as it comes.
const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// What is known of a request before its body is read.
#[derive(Clone)]
pub(super) struct Asked {
    pub(super) caller: Caller,
    pub(super) arrival: Arrival,
    /// From the header; the body may ask for a shorter one.
    pub(super) timeout: Option<Duration>,
}

impl Asked {
    /// Reads what the head says.
    pub(super) fn new(
        caller: Caller,
        request_id: &Arc<str>,
        headers: &HeaderMap,
    ) -> Result<Self, ApiError> {
        let header = |name| Some(headers.get(name)?.to_str().unwrap_or(""));
        let timeout = header(TIMEOUT_MS).map(request::timeout_header);
        let keep = header(RETENTION_S).map(request::retention_header);
        let prefetch = header(PREFETCH_TOKENS).map(request::prefetch_header);
        Ok(Self {
            caller,
            arrival: Arrival {
                request_id: Arc::clone(request_id),
                at: Instant::now(),
                unix_seconds: unix_seconds(),
                keep: keep.transpose()?.unwrap_or_default(),
                prefetch_tokens: prefetch.transpose()?.unwrap_or_default(),
            },
            timeout: timeout.transpose()?,
        })
    }

    /// The shorter of what head and body ask for.
    pub(super) fn timeout(&self, asked: Option<Duration>) -> Option<Duration> {
        match (self.timeout, asked) {
            (Some(head), Some(body)) => Some(head.min(body)),
            (head, body) => head.or(body),
        }
    }

    pub(super) fn rules<'a>(&self, loaded: &'a Loaded) -> Rules<'a> {
        Rules {
            model_id: &loaded.served.model_id,
            vocab: loaded.served.vocab(),
            caller: self.caller,
            seed: rand::random(),
        }
    }
}

/// Reads a request's body.
pub(super) async fn read(app: &App, request: Request<Incoming>) -> Result<Bytes, ApiError> {
    body::plain(request.headers())?;
    body::read(request.into_body(), &app.read_limits()).await
}

pub(super) async fn answer(
    app: &Arc<App>,
    client: &Arc<Client>,
    request: Request<Incoming>,
    (dialect, asked): (Dialect, Asked),
) -> Result<Answer, Refusal> {
    let loaded = app.ready()?;
    let watched = Watched {
        client,
        understands_probe: request.version() >= Version::HTTP_11,
    };
    let body = read(app, request).await?;
    let caller = asked.caller;
    let (plan, prepared) = check(loaded, body, dialect, asked).await?;
    let Prepared {
        jobs,
        last_block,
        reading,
        echo,
    } = prepared;
    let shape = Shape {
        dialect,
        id: answer_id(dialect),
        created: unix_seconds(),
        served: Arc::clone(&loaded.served),
        token_ids: plan.token_ids,
        logprobs: plan.logprobs,
        echo,
        prefix: Vec::new(),
    };
    let begun = begin(loaded, jobs, &watched).await?;
    let prompt_tokens = begun.usage.prompt_tokens;
    let mut answer = match (&plan.task, plan.delivery) {
        (Task::Prefill | Task::HandOver(_), _) => {
            let named = (loaded.served.boot_id.as_str(), &plan.task);
            prefill::answer(&shape, begun, &reading, named)?
        }
        (Task::Answer | Task::TakeOver(_), Delivery::Whole) => {
            whole(&shape, begun, &reading, &watched).await?
        }
        (Task::Answer | Task::TakeOver(_), Delivery::Stream(chunks)) => {
            let opening = Opening {
                shape: shape.with_prefix(),
                chunks,
                usage: begun.usage,
                reading: &reading,
                count: begun.count,
                choices: begun.choices,
                first: (0, begun.first),
            };
            stream(StreamBody::new(opening, Arc::clone(client)))
        }
    };
    if caller == Caller::TokenHolder {
        name_prompt(&mut answer, prompt_tokens, last_block);
    }
    Ok(answer)
}

/// What the answer's side keeps of a request.
struct Plan {
    delivery: Delivery,
    task: Task,
    token_ids: bool,
    logprobs: bool,
}

async fn check(
    loaded: &Loaded,
    body: Bytes,
    dialect: Dialect,
    asked: Asked,
) -> Result<(Plan, Prepared), ApiError> {
    let inline = body.len() <= INLINE_BODY_BYTES_MAX;
    let rules = (loaded.clone(), asked.clone());
    let parse = move || request::parse(&body, dialect, &rules.1.rules(&rules.0));
    let mut generation: Generation = match inline {
        true => parse()?,
        false => aside(parse).await?,
    };
    loaded.node.role.allows(&generation.task)?;
    generation.timeout = asked.timeout(generation.timeout);
    // More could never be queued, however often a client tried again.
    let most = loaded.engine.queue_max(generation.cache_salt.as_deref());
    if generation.choices > most {
        let message = format!(
            "`n` is {}; this node takes up to {most}.",
            generation.choices
        );
        return Err(ApiError::field("n", message));
    }
    let plan = Plan {
        delivery: generation.delivery,
        task: generation.task.clone(),
        token_ids: generation.token_ids,
        logprobs: generation.logprobs.is_some(),
    };
    let inline = inline && !generation.is_constrained();
    let deadline = generation.timeout.map(|timeout| asked.arrival.at + timeout);
    // Grammars take up to a second each; a few at a time leave the cores to the engine.
    let turns = generation
        .is_constrained()
        .then(|| Arc::clone(&loaded.grammars));
    let served = Arc::clone(&loaded.served);
    let prepare = move || served.prepare(generation, &asked.arrival);
    let prepared = match (inline, deadline) {
        (true, _) => prepare()?,
        (false, None) => in_turn(turns, prepare).await?,
        (false, Some(deadline)) => {
            let prepared = in_turn(turns, prepare);
            let prepared = tokio::time::timeout_at(deadline.into(), prepared).await;
            prepared.unwrap_or_else(|_| Err(ApiError::timed_out()))?
        }
    };
    Ok((plan, prepared))
}

/// Runs something aside once it is its turn. The turn is held until it has ended, also if nobody
/// waits for it any more.
async fn in_turn<T: Send + 'static>(
    turns: Option<Arc<Semaphore>>,
    run: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let turn = match turns {
        Some(turns) => turns.acquire_owned().await.ok(),
        None => None,
    };
    aside(move || {
        let _turn = turn;
        run()
    })
    .await
}

/// Runs something long off the threads that serve connections.
pub(super) async fn aside<T: Send + 'static>(
    run: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(run).await;
    done.unwrap_or_else(|error| Err(ApiError::internal(format!("reading panicked: {error}"))))
}

/// A client that is watched while its answer has not begun.
pub(super) struct Watched<'a> {
    client: &'a Arc<Client>,
    understands_probe: bool,
}

impl<'a> Watched<'a> {
    pub(super) fn new(client: &'a Arc<Client>, version: Version) -> Self {
        Self {
            client,
            understands_probe: version >= Version::HTTP_11,
        }
    }

    /// Waits for something, unless the client goes away first.
    pub(super) async fn unless_gone<T>(&self, run: impl Future<Output = T>) -> Result<T, Refusal> {
        let gone = pin!(self.client.gone_before_head(self.understands_probe));
        tokio::select! {
            done = run => Ok(done),
            () = gone => Err(Refusal::ClientGone),
        }
    }
}

/// A request whose first token has come.
pub(super) struct Begun {
    pub(super) choices: Choices,
    pub(super) count: usize,
    pub(super) usage: Usage,
    /// Of the first choice.
    pub(super) first: Output,
}

async fn begin(loaded: &Loaded, jobs: Vec<Job>, watched: &Watched<'_>) -> Result<Begun, Refusal> {
    let count = jobs.len();
    let mut usage = Usage::default();
    let mut choices = Choices::default();
    let mut jobs = jobs.into_iter();
    if let Some(job) = jobs.next() {
        usage.prompt_tokens = job.prompt.len();
        choices.push(loaded.engine.submit(job)?);
    }
    let first = watched.unless_gone(async {
        loop {
            match choices.next().await.1 {
                Output::Joined { cached_tokens } => usage.cached_tokens = cached_tokens,
                Output::Failed(error) => return Err(error),
                first => return Ok(first),
            }
        }
    });
    let first = first.await??;
    for job in jobs {
        choices.push(loaded.engine.submit(job)?);
    }
    Ok(Begun {
        choices,
        count,
        usage,
        first,
    })
}

async fn whole(
    shape: &Shape,
    begun: Begun,
    reading: &Reading,
    watched: &Watched<'_>,
) -> Result<Answer, Refusal> {
    let Begun {
        mut choices,
        count,
        mut usage,
        first,
    } = begun;
    let mut messages: Vec<Message> = (0..count).map(|_| Message::default()).collect();
    let mut readers: Vec<Reader> = (0..count).map(|_| Reader::new(reading)).collect();
    let gather = async {
        let mut next = (0, first);
        loop {
            let (choice, output) = next;
            match output {
                Output::Joined { .. } => {}
                Output::Text { text, tokens, .. } => {
                    messages[choice].add(readers[choice].take(text, tokens));
                }
                Output::Done {
                    text,
                    tokens,
                    ending,
                    stop,
                    usage: took,
                    held: _,
                } => {
                    messages[choice].add(readers[choice].end(text, tokens, (ending, stop)));
                    usage.output_tokens += took.output_tokens;
                    if choices.are_over() {
                        return Ok(());
                    }
                }
                Output::Embedding(..) => return Err(ApiError::internal("a vector for an answer")),
                Output::Failed(error) => return Err(error),
            }
            next = choices.next().await;
        }
    };
    watched.unless_gone(gather).await??;
    Ok(json_answer(StatusCode::OK, &shape.whole(&messages, &usage)))
}

fn stream(body: StreamBody) -> Answer {
    let mut answer = Response::new(Either::Right(body));
    let headers = answer.headers_mut();
    let events = HeaderValue::from_static("text/event-stream; charset=utf-8");
    headers.insert(CONTENT_TYPE, events);
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(ACCEL_BUFFERING, HeaderValue::from_static("no"));
    answer
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

pub(super) fn unix_seconds() -> i64 {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    i64::try_from(now.as_secs()).unwrap_or(i64::MAX)
}
