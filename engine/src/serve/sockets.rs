//! Which addresses does the node hold, and who carries the KV events?

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use tokio::net::TcpListener;
use zeromq::{PubSocket, RouterSocket, Socket, ZmqError};

use super::ServeError;
use crate::cli::Config;
use crate::engine::Handle;
use crate::events::replay::Replay;
use crate::events::{EventLog, publish, replay};

/// Everything bound, before the model is loaded: a taken address is told at once.
pub(super) struct Sockets {
    pub(super) http: TcpListener,
    pub(super) events: Option<PubSocket>,
    pub(super) replay: Option<RouterSocket>,
    pub(super) addresses: Addresses,
}

/// Where they are, free ports resolved.
#[derive(Clone)]
pub(super) struct Addresses {
    pub(super) http: SocketAddr,
    pub(super) events: Option<String>,
    pub(super) replay: Option<String>,
}

impl Sockets {
    pub(super) async fn bind(config: &Config) -> Result<Self, ServeError> {
        let address = config.listen;
        let listen = |source| ServeError::Listen { address, source };
        let http = TcpListener::bind(address).await.map_err(listen)?;
        let http_address = http.local_addr().map_err(listen)?;
        let (events, events_at) = bind::<PubSocket>(config.events.as_deref()).await?;
        let (replay, replay_at) = bind::<RouterSocket>(config.replay.as_deref()).await?;
        let addresses = Addresses {
            http: http_address,
            events: events_at,
            replay: replay_at,
        };
        Ok(Self {
            http,
            events,
            replay,
            addresses,
        })
    }
}

async fn bind<S: Socket>(
    endpoint: Option<&str>,
) -> Result<(Option<S>, Option<String>), ServeError> {
    let Some(endpoint) = endpoint else {
        return Ok((None, None));
    };
    let mut socket = S::new();
    let bound = socket
        .bind(endpoint)
        .await
        .map_err(|source| ServeError::Endpoint {
            endpoint: endpoint.to_owned(),
            source,
        })?;
    Ok((Some(socket), Some(bound.to_string())))
}

/// Starts the tasks that carry the event log to subscribers and late joiners.
pub(super) fn carry_events(
    config: &Config,
    events: Option<PubSocket>,
    replay: Option<RouterSocket>,
    log: Arc<EventLog>,
    engine: &Handle,
) {
    let topic = Bytes::from(format!("kv@{}", config.model_id));
    if let Some(socket) = replay {
        let replay = Replay {
            log: Arc::clone(&log),
            engine: engine.clone(),
            topic: topic.clone(),
        };
        tokio::spawn(report("replay of KV events", replay::run(socket, replay)));
    }
    if let Some(socket) = events {
        tokio::spawn(report(
            "publishing of KV events",
            publish::run(socket, log, topic),
        ));
    }
}

async fn report(what: &'static str, ended: impl Future<Output = ZmqError>) {
    let error = ended.await;
    tracing::error!(what, %error, "a task of the KV events has ended");
}
