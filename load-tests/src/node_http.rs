//! What does every scripted node need of HTTP?
//!
//! One listener that serves each connection on a task of its own, bodies that are whole or a stream
//! of server-sent events, JSON answers. What a node answers is its own file's business. A node may
//! also break a connection off, as one that dies does ([`Cut`]).

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream, stream};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::error::LoadError;

/// A node's answer, whole or streamed.
pub(crate) type Body = UnsyncBoxBody<Bytes, Cut>;

/// The connection ends here, without an answer or in the middle of it.
#[derive(Debug, thiserror::Error)]
#[error("the node breaks the connection off")]
pub(crate) struct Cut;

/// Takes the port.
pub(crate) async fn listen(address: SocketAddr) -> Result<TcpListener, LoadError> {
    TcpListener::bind(address)
        .await
        .map_err(LoadError::system("listening"))
}

/// Where it listens.
pub(crate) fn address(listener: &TcpListener) -> Result<SocketAddr, LoadError> {
    listener
        .local_addr()
        .map_err(LoadError::system("asking for the port"))
}

/// Serves until dropped; its connections end with it.
pub(crate) async fn serve<F, A>(listener: TcpListener, answer: F) -> Result<(), LoadError>
where
    F: Fn(Request<Incoming>) -> A + Clone + Send + 'static,
    A: Future<Output = Result<Response<Body>, Cut>> + Send,
{
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next() => continue,
        };
        let (stream, _) = accepted.map_err(LoadError::system("accepting"))?;
        // Small writes must leave at once: a delayed chunk would be blamed on the proxy.
        let _ = stream.set_nodelay(true);
        let answer = answer.clone();
        connections.spawn(async move {
            let service = service_fn(answer);
            // A client that goes away ends its connection with an error; nothing to do.
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}

/// How long a stream waits before what it writes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pace {
    /// Before its first write.
    pub(crate) first: Duration,
    /// Before each further one.
    pub(crate) next: Duration,
}

/// The events of a stream, each string written by itself.
pub(crate) fn events(events: Vec<String>, pace: Pace) -> Response<Body> {
    let writes = events.into_iter().enumerate();
    let frames = stream::unfold(writes, move |mut writes| async move {
        let (number, event) = writes.next()?;
        let pause = if number == 0 { pace.first } else { pace.next };
        if !pause.is_zero() {
            tokio::time::sleep(pause).await;
        }
        Some((Ok::<_, Cut>(Frame::data(Bytes::from(event))), writes))
    });
    event_stream(frames)
}

/// A stream of server-sent events whose frames somebody else makes.
pub(crate) fn event_stream(
    frames: impl Stream<Item = Result<Frame<Bytes>, Cut>> + Send + 'static,
) -> Response<Body> {
    let body = StreamBody::new(frames).boxed_unsync();
    typed(StatusCode::OK, body, "text/event-stream")
}

/// A JSON answer.
pub(crate) fn json_response(status: StatusCode, value: &Value) -> Response<Body> {
    typed(status, full(value.to_string()), "application/json")
}

/// OpenAI's form of an error.
pub(crate) fn error(message: &str, code: Option<&str>) -> Value {
    json!({"error": {"message": message, "type": "invalid_request_error",
                     "param": null, "code": code}})
}

/// A whole body.
pub(crate) fn full(text: impl Into<Bytes>) -> Body {
    Full::new(text.into())
        .map_err(|never| match never {})
        .boxed_unsync()
}

fn typed(status: StatusCode, body: Body, kind: &'static str) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let kind = HeaderValue::from_static(kind);
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}
