//! How long do the readers of several answers wait between two pieces?
//!
//! Each answer is read by a task of its own until the guard is dropped; every piece of text leaves
//! the time at which it came. A window of time is judged afterwards: what counts is the gaps that
//! ended within it.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Request, Response, body::Incoming};
use serde_json::{Value, json};
use tokio::task::{JoinHandle, LocalSet};

use crate::http::{Connection, Target, describe};
use crate::sse::Events;

/// More tokens than any window of the bench is long.
const TOKENS_MAX: u32 = 4000;
/// How long all answers together may take to begin.
const BEGIN_TIMEOUT: Duration = Duration::from_secs(60);

/// Answers being read. Dropping it hangs up.
pub(super) struct Streams {
    readers: Vec<Reader>,
}

struct Reader {
    task: JoinHandle<()>,
    heard: Rc<RefCell<Heard>>,
}

/// What one reader has heard.
#[derive(Default)]
struct Heard {
    pieces: Vec<Instant>,
    trouble: Option<String>,
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Streams {
    /// Asks for an answer to each prompt, and waits until all of them have begun.
    pub(super) async fn begin(
        tasks: &LocalSet,
        target: &Target,
        model: &str,
        prompts: &[String],
    ) -> Result<Self, String> {
        let reader = |prompt: &String| {
            let heard = Rc::new(RefCell::new(Heard::default()));
            let body = json!({
                "model": model,
                "prompt": prompt,
                "max_tokens": TOKENS_MAX,
                "temperature": 0,
                "stream": true,
                "ignore_eos": true,
            });
            let task = tasks.spawn_local(read(target.clone(), body, Rc::clone(&heard)));
            Reader { task, heard }
        };
        let streams = Self {
            readers: prompts.iter().map(reader).collect(),
        };
        let begun = async {
            while !streams.all_have(1) && streams.trouble().is_none() {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        let in_time = tasks
            .run_until(tokio::time::timeout(BEGIN_TIMEOUT, begun))
            .await
            .is_ok();
        match streams.trouble() {
            Some(trouble) => Err(trouble),
            None if !in_time => Err(format!("answers did not begin in {BEGIN_TIMEOUT:?}")),
            None => Ok(streams),
        }
    }

    /// What went wrong, if anything did: an answer that ended is a bench without a decode.
    pub(super) fn trouble(&self) -> Option<String> {
        self.readers
            .iter()
            .find_map(|reader| reader.heard.borrow().trouble.clone())
    }

    /// Milliseconds between two pieces of an answer, of those that came from `from` to `to`.
    pub(super) fn gaps_ms(&self, from: Instant, to: Instant) -> Vec<f64> {
        let mut gaps = Vec::new();
        for reader in &self.readers {
            for pair in reader.heard.borrow().pieces.windows(2) {
                if pair[0] >= from && pair[1] <= to {
                    gaps.push((pair[1] - pair[0]).as_secs_f64() * 1e3);
                }
            }
        }
        gaps
    }

    fn all_have(&self, pieces: usize) -> bool {
        self.readers
            .iter()
            .all(|reader| reader.heard.borrow().pieces.len() >= pieces)
    }
}

async fn read(target: Target, body: Value, heard: Rc<RefCell<Heard>>) {
    let ended = match open(&target, &body).await {
        Ok(response) => listen(response, &heard).await,
        Err(trouble) => trouble,
    };
    heard.borrow_mut().trouble = Some(ended);
}

async fn open(target: &Target, body: &Value) -> Result<Response<Incoming>, String> {
    let request = Request::post(target.path("completions"))
        .header("host", target.authority())
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body.to_string())))
        .map_err(|e| e.to_string())?;
    let response = Connection::new(target).send(request).await;
    let response = response.map_err(|failure| format!("{failure:?}"))?;
    if response.status().is_success() {
        Ok(response)
    } else {
        Err(format!("refused with {}", response.status()))
    }
}

async fn listen(response: Response<Incoming>, heard: &Rc<RefCell<Heard>>) -> String {
    let mut body = response.into_body();
    let mut events = Events::default();
    while let Some(frame) = body.frame().await {
        let now = Instant::now();
        let data = match frame.map(hyper::body::Frame::into_data) {
            Ok(Ok(data)) => data,
            Ok(Err(_trailers)) => continue,
            Err(error) => return describe(&error),
        };
        match events.push(&data) {
            Ok(events) if events.iter().any(|event| has_text(event)) => {
                heard.borrow_mut().pieces.push(now);
            }
            Ok(_) => {}
            Err(error) => return error.to_string(),
        }
    }
    "an answer ended before the bench did".into()
}

fn has_text(event: &str) -> bool {
    let value: Result<Value, _> = serde_json::from_str(event);
    value.is_ok_and(|value| {
        let text = value.pointer("/choices/0/text").and_then(Value::as_str);
        text.is_some_and(|text| !text.is_empty())
    })
}
