//! How long does one request take through this address?
//!
//! Closed loop on purpose: a fixed number of requests over a fixed number of keep-alive
//! connections, each waiting for its answer, so that two addresses in front of the same node differ
//! by the proxy alone. The body is a conversation of the wanted size whose last message differs in
//! every request, as an agent's turns do: a proxy that remembers whole bodies gains nothing.

use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::Request;
use serde::Serialize;
use serde_json::json;

use crate::error::LoadError;
use crate::http::{Connection, SendFailure, Target, describe};
use crate::measure::Summary;

/// Stands in the body where each request's number goes.
const NUMBER_PLACE: &str = "0000000000000000";

/// Flags of `homing-load http-bench`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The API's address
    #[arg(long)]
    pub url: String,
    /// API key
    #[arg(long, env = "HOMING_API_KEY", hide_env_values = true)]
    pub key: Option<String>,
    /// Model id to ask for
    #[arg(long)]
    pub model: String,
    /// Bytes of the request body
    #[arg(long, default_value_t = 4096)]
    pub body_bytes: usize,
    /// Connections, each with one request at a time
    #[arg(long, default_value_t = 1)]
    pub concurrency: usize,
    /// Requests that are measured
    #[arg(long, default_value_t = 2000)]
    pub requests: usize,
    /// Requests before those
    #[arg(long, default_value_t = 200)]
    pub warmup: usize,
    /// Ask for a stream
    #[arg(long)]
    pub stream: bool,
}

/// What came out.
#[derive(Clone, Debug, Serialize)]
pub struct Figures {
    /// Requests that were measured.
    pub requests: usize,
    /// Those that did not bring status 200 and a whole body.
    pub failed: usize,
    /// The first failure.
    pub first_failure: Option<String>,
    /// From writing the request to the end of the body, in microseconds.
    pub latency_us: Summary,
    /// From writing the request to the first byte of the body, in microseconds.
    pub first_byte_us: Summary,
    /// Over the measured part.
    pub requests_per_s: f64,
}

/// A request body with a place for the request's number.
#[derive(Clone)]
pub struct Template {
    bytes: Vec<u8>,
    place: usize,
}

impl Template {
    /// A conversation of exactly `size` bytes (or the smallest possible).
    pub fn new(model: &str, size: usize, stream: bool) -> Self {
        let render = |system: usize, history: usize| {
            let filler = |n: usize| "the quick tool reads a file and says so. ".repeat(n / 41 + 1);
            let (system_text, answer) = (filler(system), filler(history / 2));
            let body = json!({
                "model": model,
                "messages": [
                    {"role": "system", "content": &system_text[..system]},
                    {"role": "user", "content": &answer[..history / 2]},
                    {"role": "assistant", "content": &answer[..history / 2]},
                    {"role": "user", "content": format!("Request {NUMBER_PLACE}, go on.")},
                ],
                "max_tokens": 16,
                "stream": stream,
            });
            body.to_string()
        };
        // Half system prompt, half history; the system prompt takes up what rounding leaves.
        let spare = size.saturating_sub(render(0, 0).len());
        let history = spare / 2 / 2 * 2;
        let bytes = render(spare - history, history).into_bytes();
        let place = bytes
            .windows(NUMBER_PLACE.len())
            .rposition(|w| w == NUMBER_PLACE.as_bytes())
            .unwrap_or(0);
        Self { bytes, place }
    }

    /// The body of one request.
    pub fn body(&self, number: u64) -> Bytes {
        let mut bytes = self.bytes.clone();
        let digits = format!("{number:016}");
        bytes[self.place..self.place + digits.len()].copy_from_slice(digits.as_bytes());
        Bytes::from(bytes)
    }
}

/// Sends the warm-up, then the measured requests.
pub async fn run(args: &Args) -> Result<Figures, LoadError> {
    let target = Target::parse(&args.url)?;
    let template = Template::new(&args.model, args.body_bytes, args.stream);
    // Numbers go on from run to run, so that no two runs of one bench send the same body.
    let first = u64::try_from(
        std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or_default()
            .as_micros()
            % 10_u128.pow(15),
    )
    .unwrap_or(0);
    round(args, &target, &template, first, args.warmup).await;
    let begun = Instant::now();
    let samples = round(
        args,
        &target,
        &template,
        first + args.warmup as u64,
        args.requests,
    )
    .await;
    let duration = begun.elapsed();
    let us = |d: Duration| d.as_secs_f64() * 1e6;
    let good: Vec<&Sample> = samples.iter().filter_map(|s| s.as_ref().ok()).collect();
    Ok(Figures {
        requests: samples.len(),
        failed: samples.len() - good.len(),
        first_failure: samples.iter().find_map(|s| s.as_ref().err().cloned()),
        latency_us: Summary::of(good.iter().map(|s| us(s.latency))),
        first_byte_us: Summary::of(good.iter().map(|s| us(s.first_byte))),
        requests_per_s: good.len() as f64 / duration.as_secs_f64(),
    })
}

struct Sample {
    first_byte: Duration,
    latency: Duration,
}

/// `count` requests, shared out evenly over the connections.
async fn round(
    args: &Args,
    target: &Target,
    template: &Template,
    first: u64,
    count: usize,
) -> Vec<Result<Sample, String>> {
    let lanes = args.concurrency.max(1);
    let lane = |lane: usize| async move {
        let mut connection = Connection::new(target);
        let mut samples = Vec::with_capacity(count / lanes + 1);
        for number in (lane..count).step_by(lanes) {
            let body = template.body(first + number as u64);
            samples.push(one(&mut connection, target, args.key.as_deref(), body).await);
        }
        samples
    };
    let samples = futures_util::future::join_all((0..lanes).map(lane)).await;
    samples.into_iter().flatten().collect()
}

async fn one(
    connection: &mut Connection,
    target: &Target,
    key: Option<&str>,
    body: Bytes,
) -> Result<Sample, String> {
    let mut builder = Request::post(target.path("chat/completions"))
        .header("host", target.authority())
        .header("content-type", "application/json");
    if let Some(key) = key {
        builder = builder.header("authorization", format!("Bearer {key}"));
    }
    let request = builder.body(Full::new(body)).map_err(|e| e.to_string())?;
    let answer = exchange(connection, request, b"").await?;
    Ok(Sample {
        first_byte: answer.first,
        latency: answer.latency,
    })
}

/// A request's answer with status 200.
pub(crate) struct Exchange {
    /// From writing the request to the first sight of what was looked for.
    pub(crate) first: Duration,
    /// To the end of the body.
    pub(crate) latency: Duration,
    /// The whole body.
    pub(crate) body: Vec<u8>,
}

/// Sends a request and reads its answer, looking for `mark` in the body; without one, for its
/// first byte.
pub(crate) async fn exchange(
    connection: &mut Connection,
    request: Request<Full<Bytes>>,
    mark: &[u8],
) -> Result<Exchange, String> {
    let sent = Instant::now();
    let response = match connection.send(request).await {
        Ok(response) => response,
        Err(SendFailure::Connect(e) | SendFailure::Broken(e)) => return Err(e),
    };
    let status = response.status();
    let mut frames = response.into_body();
    let (mut first, mut body) = (None, Vec::new());
    while let Some(frame) = frames.frame().await {
        let frame = frame.map_err(|e| describe(&e))?;
        if let Some(data) = frame.data_ref() {
            body.extend_from_slice(data);
        }
        if first.is_none() && (mark.is_empty() || body.windows(mark.len()).any(|w| w == mark)) {
            first = Some(sent.elapsed());
        }
    }
    let latency = sent.elapsed();
    if status != hyper::StatusCode::OK {
        return Err(format!("{status}: {}", String::from_utf8_lossy(&body)));
    }
    Ok(Exchange {
        first: first.unwrap_or(latency),
        latency,
        body,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Catches a body of the wrong size, and one that does not change from request to request.
    #[test]
    fn bodies_have_the_wanted_size_and_differ() {
        for size in [1000, 4096, 4097, 65_536] {
            let template = Template::new("echo", size, false);
            let bodies = [template.body(1), template.body(2)];
            assert_eq!([bodies[0].len(), bodies[1].len()], [size, size]);
            assert_ne!(bodies[0], bodies[1]);
            let value: serde_json::Value = serde_json::from_slice(&bodies[1]).expect("JSON");
            let last = value
                .pointer("/messages/3/content")
                .and_then(|c| c.as_str());
            assert_eq!(last, Some("Request 0000000000000002, go on."));
        }
    }
}
