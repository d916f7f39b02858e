//! How does one turn go, and how long does each part of it take?
//!
//! A turn is one request in OpenAI's Chat Completions (or Completions) form. The outcome holds what
//! a client can know: times, text, the server's own usage report, the `x-homing-*` headers, and
//! whether the turn was acknowledged, that is, whether the client has read its usage or its
//! terminator. A failure is a value with a kind from a closed set, never a panic, since a load run
//! must go on.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::{HeaderMap, Request, Response};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::http::{Connection, SendFailure, Target, describe};
use crate::sse::Events;

/// A body past this is no answer of a language model.
const BODY_BYTES_MAX: usize = 64 << 20;

/// What is to be sent.
pub struct Turn {
    /// `chat/completions` or `completions`.
    pub endpoint: &'static str,
    /// The JSON body.
    pub body: Value,
    /// Headers besides the key and the content type.
    pub headers: Vec<(&'static str, String)>,
    /// Given up after this long.
    pub timeout: Duration,
}

/// The server's own count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt, cached ones included.
    pub prompt_tokens: u64,
    /// Those of them that were not computed again.
    pub cached_tokens: u64,
    /// Tokens of the answer.
    pub completion_tokens: u64,
}

/// The closed set of ways in which a turn can fail; the label of a report's row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// No connection.
    Connect,
    /// The connection broke before the head of the response.
    Broken,
    /// Nothing more came in time.
    Timeout,
    /// The server answered with this status.
    Status(u16),
    /// The stream ended without its terminator.
    Cut,
    /// The stream brought an error event.
    StreamError,
    /// What came is not in the API's form.
    Malformed,
}

impl std::fmt::Display for FailureKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let label = match self {
            Self::Connect => "connect",
            Self::Broken => "broken",
            Self::Timeout => "timeout",
            Self::Status(code) => return write!(f, "http_{code}"),
            Self::Cut => "cut",
            Self::StreamError => "stream_error",
            Self::Malformed => "malformed",
        };
        f.write_str(label)
    }
}

/// A failed turn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Of which kind.
    pub kind: FailureKind,
    /// The server's or the system's words.
    pub message: String,
}

/// What came of a turn.
#[derive(Debug)]
pub struct Outcome {
    /// When the request was handed to the connection.
    pub sent: Instant,
    /// When the first text arrived.
    pub first_token: Option<Instant>,
    /// When the last text arrived.
    pub last_token: Option<Instant>,
    /// When everything was over.
    pub done: Instant,
    /// The response's status, if there was one.
    pub status: Option<u16>,
    /// The response's headers.
    pub headers: HeaderMap,
    /// The answer's text piece by piece as it arrived.
    pub pieces: Vec<String>,
    /// When each of them arrived.
    pub piece_times: Vec<Instant>,
    /// Why the model stopped.
    pub finish_reason: Option<String>,
    /// What the server counted.
    pub usage: Option<Usage>,
    /// Whether usage or terminator has been read.
    pub acknowledged: bool,
    /// What went wrong, if anything did.
    pub failure: Option<Failure>,
}

impl Outcome {
    fn new() -> Self {
        let now = Instant::now();
        Self {
            sent: now,
            first_token: None,
            last_token: None,
            done: now,
            status: None,
            headers: HeaderMap::new(),
            pieces: Vec::new(),
            piece_times: Vec::new(),
            finish_reason: None,
            usage: None,
            acknowledged: false,
            failure: None,
        }
    }

    /// The whole text of the answer.
    pub fn text(&self) -> String {
        self.pieces.concat()
    }

    /// A response header as text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// Milliseconds per token after the first.
    pub fn tpot_ms(&self) -> Option<f64> {
        let span = self.last_token?.duration_since(self.first_token?);
        let tokens = self
            .usage?
            .completion_tokens
            .checked_sub(1)
            .filter(|n| *n > 0)?;
        Some(span.as_secs_f64() * 1e3 / tokens as f64)
    }

    fn fail(&mut self, kind: FailureKind, message: impl Into<String>) {
        self.failure.get_or_insert(Failure {
            kind,
            message: message.into(),
        });
    }
}

/// Sends a turn and reads its answer to the end.
pub async fn send(
    connection: &mut Connection,
    target: &Target,
    key: Option<&str>,
    turn: &Turn,
) -> Outcome {
    let mut outcome = Outcome::new();
    let request = match request(target, key, turn) {
        Ok(request) => request,
        Err(message) => {
            outcome.fail(FailureKind::Malformed, message);
            return outcome;
        }
    };
    outcome.sent = Instant::now();
    let exchange = exchange(connection, request, &mut outcome);
    if tokio::time::timeout(turn.timeout, exchange).await.is_err() {
        outcome.fail(
            FailureKind::Timeout,
            format!("nothing after {:?}", turn.timeout),
        );
    }
    outcome.done = Instant::now();
    if outcome.failure.is_some() {
        // Part of a body may be unread: the next turn must not find it.
        connection.close();
    }
    outcome
}

/// Sends a turn and reads its answer as one JSON value, for what an outcome does not hold.
pub async fn ask(
    connection: &mut Connection,
    target: &Target,
    key: Option<&str>,
    turn: &Turn,
) -> Result<Value, Failure> {
    let failure = |kind, message: String| Failure { kind, message };
    let request = request(target, key, turn).map_err(|e| failure(FailureKind::Malformed, e))?;
    let exchange = async {
        let response = connection.send(request).await.map_err(|e| match e {
            SendFailure::Connect(message) => failure(FailureKind::Connect, message),
            SendFailure::Broken(message) => failure(FailureKind::Broken, message),
        })?;
        let status = response.status();
        let body = http_body_util::Limited::new(response.into_body(), BODY_BYTES_MAX)
            .collect()
            .await
            .map_err(|e| failure(FailureKind::Cut, e.to_string()))?;
        let value: Value = serde_json::from_slice(&body.to_bytes())
            .map_err(|e| failure(FailureKind::Malformed, e.to_string()))?;
        if status.is_success() {
            return Ok(value);
        }
        let kind = FailureKind::Status(status.as_u16());
        Err(failure(kind, error_message(&value)))
    };
    let answer = tokio::time::timeout(turn.timeout, exchange).await;
    let answer = answer.unwrap_or_else(|_| {
        let message = format!("nothing after {:?}", turn.timeout);
        Err(failure(FailureKind::Timeout, message))
    });
    if answer.is_err() {
        connection.close();
    }
    answer
}

fn request(
    target: &Target,
    key: Option<&str>,
    turn: &Turn,
) -> Result<Request<Full<Bytes>>, String> {
    let mut builder = Request::post(target.path(turn.endpoint))
        .header("host", target.authority())
        .header("content-type", "application/json");
    if let Some(key) = key {
        builder = builder.header("authorization", format!("Bearer {key}"));
    }
    for (name, value) in &turn.headers {
        builder = builder.header(*name, value);
    }
    builder
        .body(Full::new(Bytes::from(turn.body.to_string())))
        .map_err(|e| e.to_string())
}

async fn exchange(
    connection: &mut Connection,
    request: Request<Full<Bytes>>,
    outcome: &mut Outcome,
) {
    let response = match connection.send(request).await {
        Ok(response) => response,
        Err(SendFailure::Connect(message)) => return outcome.fail(FailureKind::Connect, message),
        Err(SendFailure::Broken(message)) => return outcome.fail(FailureKind::Broken, message),
    };
    outcome.status = Some(response.status().as_u16());
    outcome.headers = response.headers().clone();
    let streams = outcome
        .header("content-type")
        .is_some_and(|t| t.starts_with("text/event-stream"));
    if !response.status().is_success() {
        read_error(response, outcome).await;
    } else if streams {
        read_stream(response.into_body(), outcome).await;
    } else {
        read_whole(response.into_body(), outcome).await;
    }
}

async fn read_error(response: Response<Incoming>, outcome: &mut Outcome) {
    let kind = FailureKind::Status(response.status().as_u16());
    let body = match response.into_body().collect().await {
        Ok(body) => body.to_bytes(),
        Err(error) => return outcome.fail(kind, describe(&error)),
    };
    let message = match serde_json::from_slice::<Value>(&body) {
        Ok(value) => error_message(&value),
        Err(_) => String::from_utf8_lossy(&body).chars().take(300).collect(),
    };
    outcome.fail(kind, message);
}

/// The message of OpenAI's error shape, or the whole value.
fn error_message(value: &Value) -> String {
    match value.pointer("/error/message").and_then(Value::as_str) {
        Some(message) => message.to_owned(),
        None => value.to_string(),
    }
}

async fn read_whole(body: Incoming, outcome: &mut Outcome) {
    let bytes = match http_body_util::Limited::new(body, BODY_BYTES_MAX)
        .collect()
        .await
    {
        Ok(body) => body.to_bytes(),
        Err(error) => return outcome.fail(FailureKind::Cut, error.to_string()),
    };
    let now = Instant::now();
    let value: Value = match serde_json::from_slice(&bytes) {
        Ok(value) => value,
        Err(error) => return outcome.fail(FailureKind::Malformed, error.to_string()),
    };
    outcome.usage = usage(&value);
    let Some(choice) = value.pointer("/choices/0") else {
        return outcome.fail(FailureKind::Malformed, "no choices in the answer");
    };
    take_choice(choice, outcome, now);
    outcome.acknowledged = true;
}

async fn read_stream(mut body: Incoming, outcome: &mut Outcome) {
    let mut events = Events::default();
    while let Some(frame) = body.frame().await {
        let now = Instant::now();
        let data = match frame.map(hyper::body::Frame::into_data) {
            Ok(Ok(data)) => data,
            Ok(Err(_trailers)) => continue,
            Err(error) => return outcome.fail(FailureKind::Cut, describe(&error)),
        };
        match events.push(&data) {
            Ok(events) => {
                for event in &events {
                    take_event(event, outcome, now);
                }
            }
            Err(error) => return outcome.fail(FailureKind::Malformed, error.to_string()),
        }
    }
    if !outcome.acknowledged {
        outcome.fail(FailureKind::Cut, "the stream ended without [DONE]");
    }
}

fn take_event(event: &str, outcome: &mut Outcome, now: Instant) {
    if event == "[DONE]" {
        outcome.acknowledged = true;
        return;
    }
    let value: Value = match serde_json::from_str(event) {
        Ok(value) => value,
        Err(error) => return outcome.fail(FailureKind::Malformed, error.to_string()),
    };
    if value.get("error").is_some_and(|e| !e.is_null()) {
        return outcome.fail(FailureKind::StreamError, error_message(&value));
    }
    if let Some(usage) = usage(&value) {
        outcome.usage = Some(usage);
        outcome.acknowledged = true;
    }
    if let Some(choice) = value.pointer("/choices/0") {
        take_choice(choice, outcome, now);
    }
}

fn take_choice(choice: &Value, outcome: &mut Outcome, now: Instant) {
    let text = ["/delta/content", "/message/content", "/text"]
        .into_iter()
        .find_map(|path| choice.pointer(path).and_then(Value::as_str))
        .unwrap_or_default();
    let calls = choice
        .pointer("/delta/tool_calls")
        .is_some_and(|c| !c.is_null());
    if !text.is_empty() {
        outcome.pieces.push(text.to_owned());
        outcome.piece_times.push(now);
    }
    if !text.is_empty() || calls {
        outcome.first_token.get_or_insert(now);
        outcome.last_token = Some(now);
    }
    if let Some(reason) = choice.get("finish_reason").and_then(Value::as_str) {
        outcome.finish_reason = Some(reason.to_owned());
    }
}

fn usage(value: &Value) -> Option<Usage> {
    let usage = value.get("usage").filter(|u| !u.is_null())?;
    let count = |path: &str| usage.pointer(path).and_then(Value::as_u64);
    Some(Usage {
        prompt_tokens: count("/prompt_tokens")?,
        cached_tokens: count("/prompt_tokens_details/cached_tokens").unwrap_or(0),
        completion_tokens: count("/completion_tokens").unwrap_or(0),
    })
}

/// How often each kind of failure occurred.
pub fn count_failures<'a>(
    failures: impl IntoIterator<Item = &'a Failure>,
) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for failure in failures {
        *counts.entry(failure.kind.to_string()).or_insert(0) += 1;
    }
    counts
}
