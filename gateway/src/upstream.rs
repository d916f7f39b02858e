//! How does a request reach a node, and how does its answer begin?
//!
//! One pool of connections for all nodes. The request is written with headers of our own making
//! only, so that nothing a client sends in a header reaches a node by accident. A pooled
//! connection that the node has just closed is noticed on use; then the same node is asked again
//! on another one, which is not a failure of the node.

use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HOST, USER_AGENT};
use pingora::connectors::ConnectorOptions;
use pingora::connectors::http::Connector;
use pingora::http::{RequestHeader, ResponseHeader};
use pingora::protocols::http::client::HttpSession;
use pingora::upstreams::peer::HttpPeer;
use pingora::{Error, ErrorType};
use policies::retry::Outcome;

use crate::fleet::Node;
use crate::respond::X_REQUEST_ID;

/// Idle connections kept over all nodes: more than the concurrency of any tenant by default.
const POOL_CONNECTIONS_MAX: usize = 1024;
/// An idle connection is closed after this; most servers close theirs after 60 s or more.
const IDLE: Duration = Duration::from_secs(50);
/// A node in another region answers a SYN within half a second; a lost one is sent again after 1 s.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Longest stall while a node takes the request's bytes.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// Up to so many bytes, a body and its addition are sent as one piece.
const JOIN_BYTES_MAX: usize = 16 << 10;
/// How long a client gives its request, in milliseconds.
pub(crate) const X_REQUEST_TIMEOUT_MS: &str = "x-request-timeout-ms";
/// Closed pooled connections to try before the node itself is blamed.
const STALE_MAX: u32 = 3;

/// The way to the nodes.
pub(crate) struct Upstream {
    connector: Connector,
    authorization: String,
    silence: Duration,
}

/// What is sent.
pub(crate) struct NodeRequest<'a> {
    pub(crate) path: &'static str,
    pub(crate) request_id: &'a str,
    pub(crate) timeout_ms: Option<u64>,
    /// For how long the prompt's prefix is wanted, in seconds; nodes may take it as a hint.
    pub(crate) retention_s: Option<u32>,
    /// A JSON object.
    pub(crate) body: Bytes,
    /// More members for that object, each with a comma before it; usually empty. Kept apart, so
    /// that attempts share the body whatever their nodes understand.
    pub(crate) more: String,
}

impl NodeRequest<'_> {
    /// The body in the pieces in which it is written.
    fn pieces(&self) -> Vec<Bytes> {
        if self.more.is_empty() {
            return vec![self.body.clone()];
        }
        let open = self.body.slice(..self.body.len().saturating_sub(1));
        let rest = format!("{}}}", self.more);
        if open.len() + rest.len() > JOIN_BYTES_MAX {
            return vec![open, rest.into()];
        }
        vec![[&open[..], rest.as_bytes()].concat().into()]
    }
}

/// A request that has been sent and whose answer's head has been read.
pub(crate) struct Exchange {
    session: HttpSession,
    peer: HttpPeer,
}

/// An attempt that ended before the answer's head.
#[derive(Debug)]
pub(crate) struct SendError {
    pub(crate) outcome: Outcome,
    pub(crate) cause: String,
}

impl Upstream {
    /// `silence` is how long a node may say nothing.
    pub(crate) fn new(token: &str, silence: Duration) -> Self {
        Self {
            connector: Connector::new(Some(ConnectorOptions::new(POOL_CONNECTIONS_MAX))),
            authorization: format!("Bearer {token}"),
            silence,
        }
    }

    /// Sends a request and waits for the head of the answer.
    pub(crate) async fn send(
        &self,
        node: &Node,
        request: &NodeRequest<'_>,
    ) -> Result<Exchange, SendError> {
        let mut peer = HttpPeer::new(node.addr, false, String::new());
        peer.options.connection_timeout = Some(CONNECT_TIMEOUT);
        peer.options.total_connection_timeout = Some(CONNECT_TIMEOUT);
        let mut stale = 0;
        loop {
            let (mut session, reused) =
                self.connector
                    .get_http_session(&peer)
                    .await
                    .map_err(|error| SendError {
                        outcome: Outcome::ConnectFailed,
                        cause: error.to_string(),
                    })?;
            session.set_read_timeout(Some(self.silence));
            session.set_write_timeout(Some(WRITE_TIMEOUT));
            match self.exchange(&mut session, node, request).await {
                Ok(()) => return Ok(Exchange { session, peer }),
                Err(error) if reused && stale < STALE_MAX && broken(&error) => stale += 1,
                Err(error) => {
                    return Err(SendError {
                        outcome: outcome(&error),
                        cause: error.to_string(),
                    });
                }
            }
        }
    }

    async fn exchange(
        &self,
        session: &mut HttpSession,
        node: &Node,
        request: &NodeRequest<'_>,
    ) -> pingora::Result<()> {
        let pieces = request.pieces();
        let length: usize = pieces.iter().map(Bytes::len).sum();
        let mut head = RequestHeader::build("POST", request.path.as_bytes(), Some(9))?;
        head.insert_header(HOST, &node.host)?;
        head.insert_header(CONTENT_TYPE, "application/json")?;
        head.insert_header(CONTENT_LENGTH, length)?;
        head.insert_header(ACCEPT, "application/json, text/event-stream")?;
        head.insert_header(USER_AGENT, concat!("homing/", env!("CARGO_PKG_VERSION")))?;
        head.insert_header(X_REQUEST_ID, request.request_id)?;
        head.insert_header(AUTHORIZATION, &self.authorization)?;
        if let Some(seconds) = request.retention_s {
            head.insert_header("x-cache-retention-s", seconds.to_string())?;
        }
        if let Some(ms) = request.timeout_ms {
            head.insert_header(X_REQUEST_TIMEOUT_MS, ms.to_string())?;
        }
        session.write_request_header(Box::new(head)).await?;
        let last = pieces.len() - 1;
        for (at, piece) in pieces.into_iter().enumerate() {
            session.write_request_body(piece, at == last).await?;
        }
        session.finish_request_body().await?;
        loop {
            session.read_response_header().await?;
            let informational = session
                .response_header()
                .is_some_and(|head| head.status.is_informational());
            if !informational {
                return Ok(());
            }
        }
    }

    /// Gives a connection whose answer has been read whole back to the pool; any other is closed.
    pub(crate) async fn release(&self, mut exchange: Exchange) {
        if exchange.session.response_done() {
            self.connector
                .release_http_session(exchange.session, &exchange.peer, Some(IDLE))
                .await;
        }
    }
}

impl Exchange {
    /// The head of the answer.
    pub(crate) fn head(&self) -> Option<&ResponseHeader> {
        self.session.response_header()
    }

    /// A header of the answer, if it is text.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head()?.headers.get(name)?.to_str().ok()
    }

    /// The answer's status.
    pub(crate) fn status(&self) -> u16 {
        self.head().map_or(0, |head| head.status.as_u16())
    }

    /// The next piece of the body; none at its orderly end. Safe to drop before it is ready.
    pub(crate) async fn next(&mut self) -> pingora::Result<Option<Bytes>> {
        loop {
            match self.session.read_response_body().await? {
                Some(chunk) if chunk.is_empty() => {}
                other => return Ok(other),
            }
        }
    }

    /// Whether the body has been read to its end.
    pub(crate) fn is_done(&mut self) -> bool {
        self.session.response_done()
    }
}

/// Whether the error may only mean that the node had closed an idle connection.
fn broken(error: &Error) -> bool {
    matches!(
        error.etype(),
        ErrorType::ConnectionClosed | ErrorType::ReadError | ErrorType::WriteError
    )
}

/// What an error means for the retry policy.
pub(crate) fn outcome(error: &Error) -> Outcome {
    match error.etype() {
        ErrorType::ReadTimedout | ErrorType::WriteTimedout => Outcome::TimeoutBeforeFirstByte,
        ErrorType::InvalidHTTPHeader => Outcome::BadAnswer,
        _ => Outcome::BrokenBeforeFirstByte,
    }
}
