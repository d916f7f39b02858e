//! How does a node live again at the same address?
//!
//! A slot keeps a node's addresses and lets one life after another stand there. A life is over when
//! a restart is ordered: its tasks are dropped, its connections break, its sockets close. After a
//! pause the next one binds the same addresses, with an empty cache, another boot id, another start
//! time and events that are numbered from 0.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use serde::Serialize;
use simulate::engine::Params;
use simulate::engine::tiers::{Tier, TierParams};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use zeromq::{PubSocket, RouterSocket};

use super::Place;
use super::api::{Api, Served};
use super::events;
use super::faults::Fault;
use super::handover::Handovers;
use super::life::{Birth, Life, drive};
use super::numbers::Numbers;
use super::one_cache::OneCache;
use super::roles::Role;
use super::shelf::Shelf;
use super::state::{Counts, HandoverCounts};
use crate::error::LoadError;
use crate::node_http;

/// Restarts that wait to be carried out.
const RESTARTS_WAITING_MAX: usize = 4;
/// A port whose last user has just gone may take a moment to be free.
const BIND_TRIES: u32 = 100;
const BIND_PAUSE: Duration = Duration::from_millis(20);

/// A node's addresses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Addresses {
    pub(super) http: SocketAddr,
    pub(super) events: Option<SocketAddr>,
    pub(super) replay: Option<SocketAddr>,
}

/// What does not change from life to life.
pub(super) struct Facts {
    pub(super) id: String,
    pub(super) addresses: Addresses,
    pub(super) params: Params,
    pub(super) capacity: usize,
    pub(super) speed: f64,
    pub(super) role: Role,
    pub(super) handover_gb_per_s: f64,
    /// Its memory below the pool.
    pub(super) host: Option<TierParams>,
    pub(super) shared: Shared,
}

/// What the nodes of a process share.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) numbers: Arc<Numbers>,
    pub(super) handovers: Arc<Handovers>,
    pub(super) shelf: Option<Shelf>,
    pub(super) one_cache: Option<Arc<OneCache>>,
}

/// The sockets of one life.
pub(super) struct Sockets {
    http: TcpListener,
    events: Option<(PubSocket, SocketAddr)>,
    replay: Option<(RouterSocket, SocketAddr)>,
}

/// Where a node stands, whichever life it is.
pub(super) struct Slot {
    facts: Facts,
    served: Arc<Served>,
    life: Mutex<Arc<Life>>,
    orders: mpsc::Sender<Restart>,
    restarts: Mutex<Option<mpsc::Receiver<Restart>>>,
}

struct Restart {
    pause: Duration,
    is_down: oneshot::Sender<()>,
}

/// What a node says of itself at the control address.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    #[serde(flatten)]
    place: Place,
    running: usize,
    waiting: usize,
    pool_usage: f64,
    cached_blocks: usize,
    host_blocks: usize,
    /// Blocks in the store that this node has told of.
    store_blocks: usize,
    held_blocks: usize,
    event_batches: u64,
    #[serde(flatten)]
    counts: Counts,
    #[serde(flatten)]
    handovers: HandoverCounts,
}

impl Sockets {
    /// Takes the ports.
    pub(super) async fn bind(wanted: &Addresses) -> Result<Self, LoadError> {
        let mut tries = 0;
        let http = loop {
            match node_http::listen(wanted.http).await {
                Err(_) if tries < BIND_TRIES => {
                    tries += 1;
                    tokio::time::sleep(BIND_PAUSE).await;
                }
                bound => break bound?,
            }
        };
        Ok(Self {
            http,
            events: match wanted.events {
                Some(address) => Some(events::bind_live(address).await?),
                None => None,
            },
            replay: match wanted.replay {
                Some(address) => Some(events::bind_replay(address).await?),
                None => None,
            },
        })
    }

    /// The ports that were taken.
    pub(super) fn addresses(&self) -> Result<Addresses, LoadError> {
        Ok(Addresses {
            http: node_http::address(&self.http)?,
            events: self.events.as_ref().map(|(_, address)| *address),
            replay: self.replay.as_ref().map(|(_, address)| *address),
        })
    }
}

impl Slot {
    pub(super) fn new(facts: Facts, served: Arc<Served>) -> Self {
        let (orders, restarts) = mpsc::channel(RESTARTS_WAITING_MAX);
        Self {
            life: Mutex::new(born(&facts, &served)),
            facts,
            served,
            orders,
            restarts: Mutex::new(Some(restarts)),
        }
    }

    pub(super) fn place(&self) -> Place {
        let Addresses {
            http,
            events,
            replay,
        } = self.facts.addresses;
        let endpoint = |address: SocketAddr| format!("tcp://{address}");
        Place {
            id: self.facts.id.clone(),
            role: self.facts.role.as_str(),
            url: format!("http://{http}"),
            events: events.map(endpoint),
            replay: replay.map(endpoint),
        }
    }

    pub(super) fn id(&self) -> &str {
        &self.facts.id
    }

    pub(super) fn report(&self) -> Report {
        let life = self.life();
        let state = life.lock();
        let (running, waiting) = state.running_and_waiting();
        Report {
            place: self.place(),
            running,
            waiting,
            pool_usage: state.pool_usage(),
            cached_blocks: state.blocks.count(Tier::Device),
            host_blocks: state.blocks.count(Tier::Host),
            store_blocks: state.blocks.count(Tier::Shared),
            held_blocks: state.held_blocks(),
            event_batches: state.log.count(),
            counts: state.counts,
            handovers: state.handed.counts,
        }
    }

    /// Something goes wrong with this life.
    pub(super) fn suffer(&self, fault: Fault) {
        self.life().suffer(fault);
    }

    /// Ends this life; returns once nothing of it is left.
    pub(super) async fn restart(&self, pause: Duration) {
        let (is_down, down) = oneshot::channel();
        if self.orders.send(Restart { pause, is_down }).await.is_ok() {
            // An error means that the whole process ends, which is as good.
            let _ = down.await;
        }
    }

    fn life(&self) -> Arc<Life> {
        let life = self.life.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&life)
    }

    /// One life after another.
    pub(super) async fn live(self: Arc<Self>, sockets: Sockets) -> Result<(), LoadError> {
        let taken = |receiver: &mut Option<_>| receiver.take();
        let restarts = taken(&mut self.restarts.lock().unwrap_or_else(PoisonError::into_inner));
        let Some(mut restarts) = restarts else {
            return Ok(());
        };
        let mut sockets = sockets;
        loop {
            let mut tasks = self.begin(sockets);
            let restart = tokio::select! {
                restart = restarts.recv() => restart,
                Some(Ok(ended)) = tasks.join_next() => return ended,
            };
            // All its tasks have ended when this returns; its sockets are closed with them.
            tasks.shutdown().await;
            let Some(Restart { pause, is_down }) = restart else {
                return Ok(());
            };
            *self.life.lock().unwrap_or_else(PoisonError::into_inner) =
                born(&self.facts, &self.served);
            let _ = is_down.send(());
            tokio::time::sleep(pause).await;
            sockets = Sockets::bind(&self.facts.addresses).await?;
        }
    }

    fn begin(&self, sockets: Sockets) -> JoinSet<Result<(), LoadError>> {
        let life = self.life();
        let topic = Bytes::from(format!("kv@{}@{}", self.facts.id, self.served.model));
        let mut tasks = JoinSet::new();
        let driven = Arc::clone(&life);
        tasks.spawn(async move {
            drive(driven).await;
            Ok(())
        });
        if let Some((socket, _)) = sockets.events {
            let (life, topic) = (Arc::clone(&life), topic.clone());
            tasks.spawn(async move { Err(events::publish(socket, life, topic).await) });
        }
        if let Some((socket, _)) = sockets.replay {
            let life = Arc::clone(&life);
            tasks.spawn(async move { Err(events::replay(socket, life, topic).await) });
        }
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let api = Api {
            served: Arc::clone(&self.served),
            life,
            role: self.facts.role,
            handovers: Arc::clone(&self.facts.shared.handovers),
            started_s: since.unwrap_or_default().as_secs_f64(),
        };
        tasks.spawn(node_http::serve(sockets.http, move |request| {
            api.clone().answer(request)
        }));
        tasks
    }
}

fn born(facts: &Facts, served: &Served) -> Arc<Life> {
    Life::new(Birth {
        params: facts.params,
        capacity: facts.capacity,
        speed: facts.speed,
        model: &served.model,
        host: facts.host,
        handover_gb_per_s: facts.handover_gb_per_s,
        numbers: Arc::clone(&facts.shared.numbers),
        shelf: facts.shared.shelf.clone(),
        one_cache: facts.shared.one_cache.clone(),
    })
}
