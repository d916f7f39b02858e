//! How does one connection carry many turns?
//!
//! OpenAI's WebSocket mode of Responses: each text from the client is a request with the type
//! `response.create`, each text to it an event of the stream, one response at a time. A turn here is
//! the very turn that a POST makes: it runs over a session of its own whose other end is this loop,
//! with its own record, log line and place in the queue.
//!
//! States of a connection: waiting for a request → in a turn → waiting …; it ends when the client
//! closes or leaves, when nothing came for [`IDLE`], when the gateway drains (after the turn), or at
//! the first request after [`LIFE`].

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use dialects::error::{ApiError, ErrorKind, Shape};
use dialects::{Dialect, Fields};
use http::header::{
    CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, SEC_WEBSOCKET_ACCEPT,
    SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_VERSION, TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderMap, Method};
use pingora::http::{RequestHeader, ResponseHeader};
use pingora::protocols::http::subrequest::server::{HttpSession, SubrequestHandle};
use pingora::protocols::http::{HttpTask, ServerSession};
use sha1::{Digest, Sha1};
use tungstenite::Utf8Bytes;
use tungstenite::protocol::frame::coding::CloseCode;

use super::frames::{Frames, Sent};
use super::local::Local;
use crate::ctx::{Ctx, Wanted};
use crate::identify::identify;
use crate::proxy::Gateway;
use crate::respond::X_REQUEST_ID;
use crate::tasks::Phase;
use crate::turn::Over;

/// How long a connection may wait for a request: clients keep theirs for 5 minutes of silence.
const IDLE: Duration = Duration::from_secs(600);
/// How long a connection may take requests; the API's own bound, after which clients make a new one.
const LIFE: Duration = Duration::from_secs(3600);
/// Requests that may wait for the one before them.
const WAITING_MAX: usize = 4;
/// What the accepting side appends to the key (RFC 6455).
const ACCEPT_SUFFIX: &[u8] = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

/// One connection.
struct Socket<'a> {
    gateway: &'a Gateway,
    client: &'a mut ServerSession,
    frames: Frames,
    local: Arc<Local>,
    waiting: VecDeque<Utf8Bytes>,
    /// Tenant and key, for the log.
    who: (String, String),
}

/// Whether a request wants to become a WebSocket.
pub(crate) fn is_upgrade(request: &RequestHeader) -> bool {
    let is = |name, value: &str| {
        let sent = request.headers.get_all(name);
        let mut words = sent.iter().filter_map(|sent| sent.to_str().ok());
        words.any(|sent| {
            let mut words = sent.split(',');
            words.any(|word| word.trim().eq_ignore_ascii_case(value))
        })
    };
    request.method == Method::GET && is(CONNECTION, "upgrade") && is(UPGRADE, "websocket")
}

/// Accepts the connection and serves it to its end.
pub(crate) async fn run(
    gateway: &Gateway,
    client: &mut ServerSession,
    ctx: &mut Ctx,
) -> Result<Over, ApiError> {
    let identity = identify(&gateway.store, &client.req_header().headers)?;
    ctx.line.is_of(&identity);
    let head = accepted(ctx, &client.req_header().headers)?;
    if client.write_response_header(Box::new(head)).await.is_err() {
        return Ok(Over::ClientGone);
    }
    ctx.status = 101;
    // Silence is bounded here, as a whole.
    client.set_read_timeout(None);
    let mut socket = Socket {
        frames: Frames::new(gateway.config.limits.body_bytes_max),
        local: Arc::new(gateway.responses.local()),
        gateway,
        client,
        waiting: VecDeque::new(),
        who: (ctx.line.tenant.clone(), ctx.line.key_id.clone()),
    };
    socket.serve().await;
    // The client has its close frame, or is gone.
    let _ = client.write_response_body(Bytes::new(), true).await;
    Ok(Over::Answered)
}

/// The head that accepts a handshake.
fn accepted(ctx: &Ctx, headers: &HeaderMap) -> Result<ResponseHeader, ApiError> {
    let refused = |message: &str| ApiError::new(ErrorKind::InvalidValue, message);
    if headers
        .get(SEC_WEBSOCKET_VERSION)
        .is_none_or(|version| version != "13")
    {
        return Err(refused("A WebSocket here has the version 13."));
    }
    let key = headers
        .get(SEC_WEBSOCKET_KEY)
        .filter(|key| STANDARD.decode(key).is_ok_and(|key| key.len() == 16))
        .ok_or_else(|| refused("A WebSocket needs a 'sec-websocket-key' of 16 bytes in base64."))?;
    let digest = Sha1::new_with_prefix(key.as_bytes())
        .chain_update(ACCEPT_SUFFIX)
        .finalize();
    let accept = STANDARD.encode(digest);
    let head = || {
        let mut head = ResponseHeader::build(101, Some(4))?;
        head.insert_header(UPGRADE, "websocket")?;
        head.insert_header(CONNECTION, "Upgrade")?;
        head.insert_header(SEC_WEBSOCKET_ACCEPT, &accept)?;
        head.insert_header(X_REQUEST_ID, &ctx.request_id)?;
        Ok(head)
    };
    head().map_err(|error: Box<pingora::Error>| {
        ApiError::new(ErrorKind::Internal, "The handshake failed.").because(error)
    })
}

impl Socket<'_> {
    async fn serve(&mut self) {
        let begun = Instant::now();
        while let Some(request) = self.next().await {
            if begun.elapsed() > LIFE {
                self.tell(&limit_reached());
                self.frames
                    .close(CloseCode::Normal, "the connection is old");
                // The client leaves in any case.
                let _ = self.write().await;
                return;
            }
            if Box::pin(self.turn(&request)).await.is_break() {
                return;
            }
        }
    }

    /// The next request; none when the connection ends.
    async fn next(&mut self) -> Option<Utf8Bytes> {
        let drain = self.gateway.tasks.drain();
        let deadline = tokio::time::Instant::now() + IDLE;
        loop {
            if drain.phase() != Phase::Running {
                self.frames
                    .close(CloseCode::Restart, "the gateway is being stopped");
                let _ = self.write().await;
                return None;
            }
            if let Some(request) = self.waiting.pop_front() {
                return Some(request);
            }
            tokio::select! {
                read = self.client.read_request_body() => {
                    if self.take(read).await.is_break() {
                        return None;
                    }
                }
                () = tokio::time::sleep_until(deadline) => {
                    self.frames.close(CloseCode::Away, "nothing came for a long time");
                    let _ = self.write().await;
                    return None;
                }
                () = drain.reached(Phase::Draining) => {}
            }
        }
    }

    /// Takes in what the client sent; a break says that it is gone.
    async fn take(&mut self, read: pingora::Result<Option<Bytes>>) -> ControlFlow<()> {
        let Ok(Some(bytes)) = read else {
            return ControlFlow::Break(());
        };
        let mut over = false;
        for sent in self.frames.receive(&bytes) {
            match sent {
                Sent::Text(text) => self.waiting.push_back(text),
                Sent::Binary => {
                    let message = "Send requests as text, not as bytes.";
                    self.tell(&event(&ApiError::new(ErrorKind::InvalidValue, message)));
                }
                Sent::Closed => over = true,
            }
        }
        let bytes: usize = self.waiting.iter().map(|text| text.len()).sum();
        let bytes_max = self.gateway.config.limits.body_bytes_max;
        if !over && (self.waiting.len() > WAITING_MAX || bytes > bytes_max) {
            self.frames
                .close(CloseCode::Policy, "too many requests at once");
            over = true;
        }
        let written = self.write().await;
        if over {
            ControlFlow::Break(())
        } else {
            written
        }
    }

    /// Queues an event.
    fn tell(&mut self, event: &str) {
        self.frames.send(event);
    }

    /// Writes what is queued; a break says that the client is gone.
    async fn write(&mut self) -> ControlFlow<()> {
        let bytes = self.frames.take();
        if bytes.is_empty() {
            return ControlFlow::Continue(());
        }
        match self.client.write_response_body(bytes, false).await {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        }
    }

    /// Runs a turn; a break says that the connection is over.
    async fn turn(&mut self, request: &str) -> ControlFlow<()> {
        let mut ctx = Ctx::new(&self.gateway.metrics);
        ctx.endpoint = Dialect::Responses.as_str();
        ctx.local = Some(Arc::clone(&self.local));
        ctx.line.tenant.clone_from(&self.who.0);
        ctx.line.key_id.clone_from(&self.who.1);
        let flow = match self.session(&mut ctx, request).await {
            Err(error) => {
                ctx.status = error.kind.status();
                self.tell(&event(&error));
                ctx.line.cause = error.cause.or(Some(error.message));
                self.write().await
            }
            Ok((mut session, handle)) => Box::pin(self.relay(&mut session, handle, &mut ctx)).await,
        };
        self.gateway.note(&mut ctx);
        flow
    }

    /// A session that stands for a POST of this request.
    async fn session(
        &self,
        ctx: &mut Ctx,
        text: &str,
    ) -> Result<(ServerSession, SubrequestHandle), ApiError> {
        let body: Bytes = body(ctx, text)?.into();
        let internal = |error: Box<pingora::Error>| {
            let message = "The request could not be passed on.";
            ApiError::new(ErrorKind::Internal, message).because(error)
        };
        let (session, handle) = HttpSession::new_from_session(self.client);
        let mut session = ServerSession::new_subrequest(session);
        session.read_request().await.map_err(internal)?;
        let head = session.req_header_mut();
        head.set_method(Method::POST);
        for name in [
            CONNECTION,
            UPGRADE,
            CONTENT_ENCODING,
            TRANSFER_ENCODING,
            EXPECT,
        ] {
            head.remove_header(&name);
        }
        // Names one request; the connection has many.
        head.remove_header(X_REQUEST_ID);
        head.insert_header(CONTENT_TYPE, "application/json")
            .map_err(internal)?;
        head.insert_header(CONTENT_LENGTH, body.len())
            .map_err(internal)?;
        // There is room for it: nothing else has been sent yet.
        let _ = handle.tx.send(HttpTask::Body(Some(body), true)).await;
        Ok((session, handle))
    }

    /// Runs the turn over its session, and passes on what it writes.
    async fn relay(
        &mut self,
        session: &mut ServerSession,
        handle: SubrequestHandle,
        ctx: &mut Ctx,
    ) -> ControlFlow<()> {
        let SubrequestHandle {
            tx,
            rx: mut written,
            subreq_wants_body: _wants,
            subreq_proxy_error: _error,
        } = handle;
        // Dropped when the client leaves, which the turn then takes for its client leaving.
        let mut present = Some(tx);
        let mut answer = Answer::default();
        let over = {
            let mut turn = pin!(Box::pin(self.gateway.turn(
                session,
                ctx,
                Dialect::Responses
            )));
            loop {
                tokio::select! {
                    biased;
                    Some(task) = written.recv(), if present.is_some() => {
                        if self.pass(&mut answer, task).await.is_break() {
                            present = None;
                        }
                    }
                    over = &mut turn => break over,
                    read = self.client.read_request_body(), if present.is_some() => {
                        if self.take(read).await.is_break() {
                            present = None;
                        }
                    }
                }
                if present.is_none() {
                    // The turn's next write fails: nobody pays for what nobody reads.
                    written.close();
                    while written.try_recv().is_ok() {}
                }
            }
        };
        while let Ok(task) = written.try_recv() {
            if self.pass(&mut answer, task).await.is_break() {
                present = None;
            }
        }
        match over {
            Err(error) => {
                ctx.status = error.kind.status();
                self.tell(&event(&error));
                ctx.line.cause = error.cause.or(Some(error.message));
            }
            Ok(_) => {
                if let Some(refusal) = answer.refusal() {
                    self.tell(&refusal);
                }
            }
        }
        if self.write().await.is_break() || present.is_none() {
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    }

    /// Passes on what the turn wrote: events as texts.
    async fn pass(&mut self, answer: &mut Answer, task: HttpTask) -> ControlFlow<()> {
        match task {
            HttpTask::Header(head, _) => answer.status = head.status.as_u16(),
            HttpTask::Body(Some(bytes), _) if answer.status == 200 => {
                for event in texts(&bytes) {
                    self.tell(event);
                }
            }
            HttpTask::Body(Some(bytes), _) => answer.body.extend_from_slice(&bytes),
            _ => {}
        }
        self.write().await
    }
}

/// What a turn has written that is no stream.
#[derive(Default)]
struct Answer {
    status: u16,
    body: Vec<u8>,
}

impl Answer {
    /// A node's refusal as an event.
    fn refusal(&self) -> Option<String> {
        let body: serde_json::Value = serde_json::from_slice(&self.body).ok()?;
        Some(error_event(self.status, &body["error"]))
    }
}

/// The body of the POST that a request stands for.
fn body(ctx: &mut Ctx, text: &str) -> Result<Vec<u8>, ApiError> {
    let fields = Fields::parse(text.as_bytes())?;
    let kind = fields.get("type").map(|kind| kind.get());
    if kind != Some("\"response.create\"") {
        let message = "The 'type' of a request must be 'response.create'.";
        return Err(ApiError::invalid("type", message));
    }
    if fields
        .get("generate")
        .is_some_and(|generate| generate.get() == "false")
    {
        ctx.answer = Wanted::Preparation;
    }
    // What belongs to the transport is the transport's.
    let dropped =
        |field: &str| matches!(field, "type" | "background" | "stream_options" | "generate");
    Ok(fields.rebuild(dropped, &[("stream", "true")]))
}

/// The data of each event in a piece of a stream; the dialect writes events whole.
fn texts(bytes: &[u8]) -> impl Iterator<Item = &str> {
    let text = std::str::from_utf8(bytes).unwrap_or_default();
    text.lines().filter_map(|line| line.strip_prefix("data: "))
}

/// An error as an event.
fn event(error: &ApiError) -> String {
    let body = error.body(Shape::OpenAi);
    let body: serde_json::Value = serde_json::from_str(&body).unwrap_or_default();
    error_event(error.kind.status(), &body["error"])
}

fn error_event(status: u16, error: &serde_json::Value) -> String {
    serde_json::json!({"type": "error", "status": status, "error": error}).to_string()
}

/// The connection has had its time.
fn limit_reached() -> String {
    error_event(
        400,
        &serde_json::json!({
            "type": "invalid_request_error",
            "code": "websocket_connection_limit_reached",
            "message": "This connection has been open for 60 minutes. Open a new one to go on.",
            "param": null,
        }),
    )
}
