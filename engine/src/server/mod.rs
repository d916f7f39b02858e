//! How do requests come in over HTTP, and answers go out?
//!
//! An accept loop; a task for each connection; hyper for HTTP/1. `routes` names what is served,
//! `generate` is the way of one request, `client` watches for clients that go away. Nothing
//! here computes: the engine's thread does, and is reached through its handle.
//!
//! Shutdown, in order: `/health` turns 503 and new requests are refused; running ones finish, up
//! to a grace period; the listener closes; idle connections are closed, busy ones get their last
//! bytes. `serve` walks through these steps.

pub mod auth;
mod body;
mod choices;
mod client;
mod embed;
mod generate;
mod message;
mod prefill;
mod respond;
pub mod role;
mod routes;
mod shape;
mod stream;
mod tokens;

use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::{Request, Response};
use http_body_util::{Either, Full};
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};

use crate::engine::Handle;
use crate::error::{ApiError, Kind};
use crate::metrics::Metrics;
use crate::request::prepare::Served;
use auth::NodeToken;
use body::ReadLimits;
use client::{Client, ClientIo};
use role::KvNode;
use stream::{ClientGone, StreamBody};

/// Bytes of a request's head that are accepted.
pub const HEADER_BYTES_MAX: usize = 64 << 10;
/// Up to here an oversized head is read, so that its answer can say what is wrong; past it hyper
/// answers 431 with no body.
const HEADER_READ_BYTES_MAX: usize = 512 << 10;
/// Open connections; more wait in the listen queue.
const CONNECTIONS_MAX: usize = 4096;
/// After failing to accept (out of file descriptors), how long until the next try.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Grammars compiled at a time: each takes a core, which the engine then lacks.
const GRAMMARS_MAX: usize = 2;

/// An answer: whole or streamed.
type Answer = Response<Either<Full<Bytes>, StreamBody>>;

/// What the server needs to know from the start.
#[derive(Debug)]
pub struct Settings {
    /// The model id served here.
    pub model_id: Arc<str>,
    /// Demanded of every caller, if set.
    pub token: Option<NodeToken>,
    /// Bytes of a body.
    pub body_bytes_max: usize,
    /// How long a client may be silent while it sends a request.
    pub read_timeout: Duration,
}

/// The server's state.
pub struct App {
    settings: Settings,
    metrics: Arc<Metrics>,
    loaded: OnceLock<Loaded>,
    stop: watch::Sender<bool>,
    connections: watch::Sender<usize>,
    started: SystemTime,
}

/// What exists once the model is loaded.
#[derive(Clone)]
pub struct Loaded {
    /// The model as requests see it.
    pub served: Arc<Served>,
    /// The engine.
    pub engine: Handle,
    /// What it is to other nodes.
    node: Arc<KvNode>,
    /// How many grammars may be compiled at a time.
    grammars: Arc<Semaphore>,
}

impl Loaded {
    /// A model, its engine, and what it is to other nodes.
    pub fn new(served: Arc<Served>, engine: Handle, node: KvNode) -> Self {
        let grammars = Arc::new(Semaphore::new(GRAMMARS_MAX));
        Self {
            served,
            engine,
            node: Arc::new(node),
            grammars,
        }
    }
}

impl App {
    /// A server whose model is still loading.
    pub fn new(settings: Settings, metrics: Arc<Metrics>) -> Arc<Self> {
        let (stop, _) = watch::channel(false);
        let (connections, _) = watch::channel(0);
        let started = SystemTime::now();
        Arc::new(Self {
            settings,
            metrics,
            loaded: OnceLock::new(),
            stop,
            connections,
            started,
        })
    }

    /// Opens for business.
    pub fn loaded(&self, loaded: Loaded) {
        // A second call would come from a second load, which there is none of.
        let _ = self.loaded.set(loaded);
    }

    /// The loaded model, unless requests cannot be served (yet, or any more).
    fn ready(&self) -> Result<&Loaded, ApiError> {
        let loaded = self.loaded.get().ok_or_else(|| {
            let message = "This node is still loading its model.";
            ApiError::new(Kind::Overloaded, "model_loading", message)
        })?;
        if loaded.engine.is_draining() {
            let message = "This node is shutting down and takes no new requests.";
            return Err(ApiError::new(Kind::Overloaded, "node_draining", message));
        }
        if loaded.engine.has_ended() {
            let message = "This node's engine has ended; it will be restarted.";
            return Err(ApiError::new(Kind::Overloaded, "engine_ended", message));
        }
        Ok(loaded)
    }

    /// The loaded model as long as its engine lives: blocks are let go while a node drains, too.
    fn ready_to_release(&self) -> Result<&Loaded, ApiError> {
        match self.loaded.get() {
            Some(loaded) if loaded.engine.is_draining() && !loaded.engine.has_ended() => Ok(loaded),
            _ => self.ready(),
        }
    }

    fn started_unix_seconds(&self) -> u64 {
        self.started
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_secs()
    }

    fn read_limits(&self) -> ReadLimits {
        let Settings {
            body_bytes_max,
            read_timeout,
            ..
        } = self.settings;
        ReadLimits {
            body_bytes_max,
            idle: read_timeout,
        }
    }

    /// Accepts connections until [`App::close`].
    pub async fn accept(self: Arc<Self>, listener: TcpListener) {
        let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        let mut stop = self.stop.subscribe();
        loop {
            // The semaphore is never closed.
            let Ok(place) = Arc::clone(&places).acquire_owned().await else {
                return;
            };
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = stopped(&mut stop) => return,
            };
            match accepted {
                Ok((stream, _address)) => {
                    let app = Arc::clone(&self);
                    tokio::spawn(async move {
                        app.connection(stream).await;
                        drop(place);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "could not accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    /// Stops accepting, lets connections finish what they are answering, and waits for that.
    pub async fn close(&self) {
        self.stop.send_replace(true);
        let mut connections = self.connections.subscribe();
        // The sender lives in `self`.
        let _ = connections.wait_for(|open| *open == 0).await;
    }

    async fn connection(self: Arc<Self>, stream: TcpStream) {
        let _open = OpenConnection::new(&self);
        // Tokens are small and each matters: waiting to fill a packet would delay every one.
        let _ = stream.set_nodelay(true);
        let client = Arc::new(Client::new(stream));
        self.serve(&client).await;
        if let Some(client) = Arc::into_inner(client) {
            client.close().await;
        }
    }

    async fn serve(self: &Arc<Self>, client: &Arc<Client>) {
        let service = service_fn(|request| {
            let (app, client) = (Arc::clone(self), Arc::clone(client));
            async move { app.answer(client, request).await }
        });
        let connection = http1::Builder::new()
            .half_close(true)
            .timer(TokioTimer::new())
            .header_read_timeout(self.settings.read_timeout)
            .max_buf_size(HEADER_READ_BYTES_MAX)
            .serve_connection(TokioIo::new(ClientIo::new(Arc::clone(client))), service);
        let mut stop = self.stop.subscribe();
        let mut connection = std::pin::pin!(connection);
        let ended = tokio::select! {
            ended = connection.as_mut() => ended,
            () = stopped(&mut stop) => {
                connection.as_mut().graceful_shutdown();
                connection.as_mut().await
            }
        };
        let Err(error) = ended else { return };
        if error.is_parse() {
            client.leave_unread();
        }
        if error.is_timeout() && client.in_head() {
            client
                .write_last(respond::header_timeout(self.settings.read_timeout).as_bytes())
                .await;
        }
        tracing::debug!(%error, client = ?client.address(), "connection ended");
    }

    async fn answer(
        self: Arc<Self>,
        client: Arc<Client>,
        request: Request<Incoming>,
    ) -> Result<Answer, ClientGone> {
        client.head_done();
        routes::answer(&self, &client, request).await
    }
}

/// Waits until the server closes. A function of its own, so that the guard that `wait_for` returns
/// is not held while a connection winds down.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

/// Counts a connection while it is open.
struct OpenConnection<'a>(&'a App);

impl<'a> OpenConnection<'a> {
    fn new(app: &'a App) -> Self {
        app.metrics.connections.inc();
        app.connections.send_modify(|open| *open += 1);
        Self(app)
    }
}

impl Drop for OpenConnection<'_> {
    fn drop(&mut self) {
        self.0.metrics.connections.dec();
        self.0.connections.send_modify(|open| *open -= 1);
    }
}
