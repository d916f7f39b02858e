//! How does a request reach a node, and how does its answer begin?
//!
//! One pool of connections for all nodes. The request is written with headers of our own making
//! only, so that nothing a client sends in a header reaches a node by accident. A pooled
//! connection that the node has just closed is noticed on use; then the same node is asked again
//! on another one, which is not a failure of the node.

use std::io;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HOST, USER_AGENT};
use pingora::connectors::{ConnectorOptions, TransportConnector};
use pingora::http::{RequestHeader, ResponseHeader};
use pingora::protocols::Stream;
use pingora::protocols::http::v1::client::{HttpSession, http_req_header_to_wire};
use pingora::upstreams::peer::{HttpPeer, Peer as _};
use pingora::{Error, ErrorType, OrErr as _};
use policies::retry::Outcome;
use tokio::io::AsyncWriteExt as _;
use tokio::time::timeout;

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
/// Up to so many bytes, head and body are sent as one piece: each piece wakes the node, which costs
/// more than to copy so much.
const JOIN_BYTES_MAX: usize = 32 << 10;
/// How long a client gives its request, in milliseconds.
pub(crate) const X_REQUEST_TIMEOUT_MS: &str = "x-request-timeout-ms";
/// Closed pooled connections to try before the node itself is blamed.
const STALE_MAX: u32 = 3;

/// The way to the nodes.
pub(crate) struct Upstream {
    connector: TransportConnector,
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
    /// Leading tokens of the prompt that the node's slower tiers are expected to hold: it may fetch them
    /// before the request has its turn.
    pub(crate) prefetch_tokens: Option<u64>,
    /// A JSON object.
    pub(crate) body: Bytes,
    /// More members for that object, each with a comma before it; usually empty. Kept apart, so
    /// that attempts share the body whatever their nodes understand.
    pub(crate) more: String,
}

impl NodeRequest<'_> {
    /// Bytes of the body.
    fn length(&self) -> usize {
        self.body.len() + self.more.len()
    }

    /// Head and body in the pieces in which they are written.
    fn pieces(&self, mut head: BytesMut) -> Vec<Bytes> {
        let (open, close) = match self.more.is_empty() {
            true => (self.body.clone(), ""),
            false => (self.body.slice(..self.body.len().saturating_sub(1)), "}"),
        };
        let rest = [self.more.as_bytes(), close.as_bytes()];
        if head.len() + self.length() > JOIN_BYTES_MAX {
            let pieces = vec![head.freeze(), open, rest.concat().into()];
            return pieces
                .into_iter()
                .filter(|piece| !piece.is_empty())
                .collect();
        }
        head.reserve(self.length());
        head.extend_from_slice(&open);
        rest.iter().for_each(|part| head.extend_from_slice(part));
        vec![head.freeze()]
    }
}

/// A request that has been sent and whose answer's head has been read.
pub(crate) struct Exchange {
    session: HttpSession,
    peer: HttpPeer,
    /// A piece of the body that was awaited before anybody wanted it.
    first: Option<Bytes>,
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
            connector: TransportConnector::new(Some(ConnectorOptions::new(POOL_CONNECTIONS_MAX))),
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
        let failed = |outcome, cause: &Error| SendError {
            outcome,
            cause: cause.to_string(),
        };
        let mut stale = 0;
        loop {
            let found = self.connector.get_stream(&peer).await;
            let (stream, reused) = found.map_err(|error| failed(Outcome::ConnectFailed, &error))?;
            match self.exchange(stream, node, request).await {
                Ok(session) => {
                    return Ok(Exchange {
                        session,
                        peer,
                        first: None,
                    });
                }
                Err(error) if reused && stale < STALE_MAX && broken(&error) => stale += 1,
                Err(error) => return Err(failed(outcome(&error), &error)),
            }
        }
    }

    async fn exchange(
        &self,
        mut stream: Stream,
        node: &Node,
        request: &NodeRequest<'_>,
    ) -> pingora::Result<HttpSession> {
        for piece in request.pieces(self.head(node, request)?) {
            in_time(stream.write_all(&piece)).await?;
        }
        in_time(stream.flush()).await?;
        let mut session = HttpSession::new(stream);
        session.read_timeout = Some(self.silence);
        loop {
            session.read_response().await?;
            let informational = session
                .resp_header()
                .is_some_and(|head| head.status.is_informational());
            if !informational {
                return Ok(session);
            }
        }
    }

    /// The request's head as it goes over the wire.
    fn head(&self, node: &Node, request: &NodeRequest<'_>) -> pingora::Result<BytesMut> {
        let mut head = RequestHeader::build("POST", request.path.as_bytes(), Some(9))?;
        head.insert_header(HOST, &node.host)?;
        head.insert_header(CONTENT_TYPE, "application/json")?;
        head.insert_header(CONTENT_LENGTH, request.length())?;
        head.insert_header(ACCEPT, "application/json, text/event-stream")?;
        head.insert_header(USER_AGENT, concat!("homing/", env!("CARGO_PKG_VERSION")))?;
        head.insert_header(X_REQUEST_ID, request.request_id)?;
        head.insert_header(AUTHORIZATION, &self.authorization)?;
        if let Some(tokens) = request.prefetch_tokens {
            head.insert_header("x-kv-prefetch-tokens", tokens.to_string())?;
        }
        if let Some(seconds) = request.retention_s {
            head.insert_header("x-cache-retention-s", seconds.to_string())?;
        }
        if let Some(ms) = request.timeout_ms {
            head.insert_header(X_REQUEST_TIMEOUT_MS, ms.to_string())?;
        }
        http_req_header_to_wire(&head).ok_or_else(|| Error::new(ErrorType::InvalidHTTPHeader))
    }

    /// Gives a connection whose answer has been read whole back to the pool; any other is closed.
    pub(crate) async fn release(&self, mut exchange: Exchange) {
        if !exchange.is_done() {
            return;
        }
        exchange.session.respect_keepalive();
        if let Some(stream) = exchange.session.reuse().await {
            let key = exchange.peer.reuse_hash();
            self.connector.release_stream(stream, key, Some(IDLE));
        }
    }
}

impl Exchange {
    /// The head of the answer.
    pub(crate) fn head(&self) -> Option<&ResponseHeader> {
        self.session.resp_header()
    }

    /// A header of the answer, if it is text.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head()?.headers.get(name)?.to_str().ok()
    }

    /// The answer's status.
    pub(crate) fn status(&self) -> u16 {
        self.head().map_or(0, |head| head.status.as_u16())
    }

    /// Resolves when the body's first piece is there, or its orderly end.
    pub(crate) async fn begins(&mut self) -> pingora::Result<()> {
        if self.first.is_none() {
            self.first = self.next().await?;
        }
        Ok(())
    }

    /// The next piece of the body; none at its orderly end. Safe to drop before it is ready.
    pub(crate) async fn next(&mut self) -> pingora::Result<Option<Bytes>> {
        if let Some(first) = self.first.take() {
            return Ok(Some(first));
        }
        loop {
            match self.session.read_body_bytes().await? {
                Some(chunk) if chunk.is_empty() => {}
                other => return Ok(other),
            }
        }
    }

    /// Whether the body has been read to its end.
    pub(crate) fn is_done(&mut self) -> bool {
        self.session.is_body_done()
    }
}

/// Waits until the node has taken what is written, but not for longer than a stall may be.
async fn in_time(writing: impl Future<Output = io::Result<()>>) -> pingora::Result<()> {
    match timeout(WRITE_TIMEOUT, writing).await {
        Ok(written) => written.or_err(ErrorType::WriteError, "writing to the node"),
        Err(_) => Err(Error::new(ErrorType::WriteTimedout)),
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
