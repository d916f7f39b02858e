//! How is one thing asked of a server, and read from what it says?

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{HeaderMap, Method, Request};
use serde_json::Value;

use crate::error::LoadError;
use crate::http::{Connection, Target};

/// For what is answered beside the model: states, metrics, decisions.
const CALL_TIMEOUT: Duration = Duration::from_secs(120);

/// A call that got an answer.
pub(crate) struct Answer {
    pub(crate) headers: HeaderMap,
    pub(crate) body: Value,
}

/// One request that nothing has to be computed for.
pub(crate) async fn call(
    to: (Method, &str),
    headers: &[(&str, &str)],
    body: Option<&Value>,
) -> Result<Answer, LoadError> {
    let url = to.1;
    let late = |_| LoadError::program(url, format!("no answer in {CALL_TIMEOUT:?}"));
    tokio::time::timeout(CALL_TIMEOUT, exchange(to, headers, body))
        .await
        .map_err(late)?
}

/// One request of its own connection, without a limit of time; a status that is no success is an
/// error with what was said.
pub(crate) async fn exchange(
    (method, url): (Method, &str),
    headers: &[(&str, &str)],
    body: Option<&Value>,
) -> Result<Answer, LoadError> {
    let trouble = |why: String| LoadError::program(url, why);
    let target = Target::parse(url)?;
    let path = url.splitn(4, '/').nth(3).unwrap_or_default();
    let mut request = Request::builder().method(method).uri(format!("/{path}"));
    for (name, value) in [
        ("host", target.authority()),
        ("content-type", "application/json"),
    ]
    .iter()
    .chain(headers)
    {
        request = request.header(*name, *value);
    }
    let body = body.map_or(Bytes::new(), |body| body.to_string().into());
    let request = request
        .body(Full::new(body))
        .map_err(|e| trouble(e.to_string()))?;
    let mut connection = Connection::new(&target);
    let response = connection.send(request).await;
    let (head, body) = response
        .map_err(|e| trouble(format!("{e:?}")))?
        .into_parts();
    let body = body.collect().await;
    let body = body.map_err(|e| trouble(e.to_string()))?.to_bytes();
    let text = String::from_utf8_lossy(&body);
    if !head.status.is_success() {
        return Err(trouble(format!("{}: {text}", head.status)));
    }
    Ok(Answer {
        headers: head.headers,
        // What is no JSON is metrics or nothing.
        body: serde_json::from_str(&text).unwrap_or_else(|_| Value::String(text.into_owned())),
    })
}

pub(crate) async fn get(url: &str) -> Result<Value, LoadError> {
    Ok(call((Method::GET, url), &[], None).await?.body)
}

/// The sum of a metric's samples in Prometheus text.
pub(crate) fn metric(text: &Value, name: &str) -> u64 {
    let lines = text.as_str().unwrap_or_default().lines();
    let samples = lines.filter(|line| line.split(['{', ' ']).next() == Some(name));
    let values = samples.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
    values.sum::<f64>() as u64
}
