//! Did the server do what it was asked?
//!
//! A response is read as its kind says, JSON or events, and held against what must come back. What
//! an answer says is not judged here; that it is whole is.

use http_body_util::BodyExt;
use hyper::Response;
use hyper::body::Incoming;
use serde_json::Value;

use super::request::{Expect, Request};
use crate::sse::Events;

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// As it must.
    Good,
    /// With a refusal, as it must.
    Refused,
    /// The client left.
    Left,
    /// The server had no room and said when to come again.
    Busy,
    /// The deadline that the request itself set passed.
    TimedOut,
    /// Nothing came within the run's own limit.
    Stuck,
    /// Anything else.
    Wrong(String),
}

/// Reads a response to its end.
pub(super) async fn read(request: &Request, response: Response<Incoming>) -> Ending {
    let status = response.status().as_u16();
    let header = |name: &str| {
        let value = response.headers().get(name)?;
        value.to_str().ok().map(str::to_owned)
    };
    let is_stream = header("content-type").is_some_and(|t| t.starts_with("text/event-stream"));
    let retry_after = header("retry-after").is_some();
    if is_stream {
        return match read_stream(request, response.into_body()).await {
            Ok(ending) => ending,
            Err(what) => Ending::Wrong(what),
        };
    }
    let bytes = match response.into_body().collect().await {
        Ok(collected) => collected.to_bytes(),
        Err(error) => return Ending::Wrong(format!("{status}, and its body broke: {error}")),
    };
    let Ok(body) = serde_json::from_slice::<Value>(&bytes) else {
        return Ending::Wrong(format!("{status} without JSON"));
    };
    judge(request, status, retry_after, &body)
}

/// Holds a whole response against what must come back.
fn judge(request: &Request, status: u16, retry_after: bool, body: &Value) -> Ending {
    let message = body["error"]["message"].as_str().unwrap_or_default();
    let wrong = |what: &str| Ending::Wrong(format!("{what}: {status} {message}"));
    match (request.expect, status) {
        (_, 429 | 503) if retry_after => Ending::Busy,
        (Expect::Refusal, 400..=499) if !message.is_empty() => Ending::Refused,
        (Expect::Refusal, _) => wrong("no refusal"),
        (Expect::AnswerOrTimeout, 408) => Ending::TimedOut,
        (_, 200) => match incomplete(request, body) {
            Some(what) => wrong(&what),
            None => Ending::Good,
        },
        _ => wrong("no answer"),
    }
}

/// What an answer lacks.
fn incomplete(request: &Request, body: &Value) -> Option<String> {
    match request.endpoint {
        "chat/completions" | "completions" => {
            let choices = body["choices"].as_array()?;
            let ended = choices.iter().filter(|c| c["finish_reason"].is_string());
            let (ended, asked) = (ended.count(), choices_of(request));
            (ended != asked).then(|| format!("{ended} of {asked} choices ended"))
        }
        "embeddings" => {
            let vectors = body["data"].as_array().map_or(0, Vec::len);
            (vectors == 0).then(|| "no vectors".to_owned())
        }
        _ => None,
    }
}

fn choices_of(request: &Request) -> usize {
    let n = request.body["n"].as_u64().unwrap_or(1);
    usize::try_from(n).unwrap_or(usize::MAX)
}

async fn read_stream(request: &Request, mut body: Incoming) -> Result<Ending, String> {
    let mut events = Events::default();
    let mut stream = Stream::default();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| format!("a stream broke: {error}"))?;
        let Some(data) = frame.data_ref() else {
            continue;
        };
        for event in events.push(data).map_err(|error| error.to_string())? {
            stream.event(&event)?;
        }
    }
    stream.ending(request)
}

/// What a stream has shown so far.
#[derive(Default)]
struct Stream {
    ended: Vec<u64>,
    error: Option<String>,
    is_done: bool,
}

impl Stream {
    fn event(&mut self, event: &str) -> Result<(), String> {
        if self.is_done {
            return Err("an event after [DONE]".into());
        }
        if event == "[DONE]" {
            self.is_done = true;
            return Ok(());
        }
        let event: Value =
            serde_json::from_str(event).map_err(|error| format!("an event: {error}"))?;
        if !event["error"].is_null() {
            self.error = Some(event["error"].to_string());
        }
        for choice in event["choices"].as_array().into_iter().flatten() {
            let index = choice["index"].as_u64().ok_or("a choice without index")?;
            if self.ended.contains(&index) && choice["finish_reason"].is_string() {
                return Err(format!("choice {index} ended twice"));
            }
            if choice["finish_reason"].is_string() {
                self.ended.push(index);
            }
        }
        Ok(())
    }

    fn ending(self, request: &Request) -> Result<Ending, String> {
        match (request.expect, self.error) {
            (Expect::AnswerOrTimeout, Some(error)) if error.contains("timeout") => {
                Ok(Ending::TimedOut)
            }
            (_, Some(error)) => Err(format!("an error in a stream: {error}")),
            (_, None) if !self.is_done => Err("a stream without [DONE]".into()),
            (_, None) => {
                let asked = choices_of(request);
                if self.ended.len() == asked {
                    return Ok(Ending::Good);
                }
                Err(format!("{} of {asked} choices ended", self.ended.len()))
            }
        }
    }
}
