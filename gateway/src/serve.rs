//! How does a gateway start, and how does it leave?
//!
//! Start: listeners first (a busy port is the commonest mistake and the cheapest to notice), then
//! ledger (which locks the data directory and settles what an ended process left), keys, secrets,
//! nodes, and last the proxy. Pingora's service runs on our runtime, without Pingora's `Server`:
//! that one sleeps a fixed grace period, drops running requests with its runtimes, and knows no
//! moment at which a journal could be closed.
//!
//! Order of shutdown, on SIGINT or SIGTERM:
//! 1. *draining*: no new connections; requests in flight may end, for `limits.drain` at most. A
//!    second signal ends this at once.
//! 2. *stopping*: what is left of requests tells its client and settles as `cut`; background tasks
//!    end (with `homing up`: the nodes, too).
//! 3. The runtime is dropped, and with it what is left of requests: each settles as `cut`.
//! 4. The stores of responses and decisions end their threads; the ledger syncs and projects. Exit code 0.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::IntoRawFd;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pingora::proxy::http_proxy_service_with_name;
use pingora::server::Fds;
use pingora::server::configuration::ServerConf;
use pingora::services::Service as _;
use tokio::runtime::Runtime;
use tokio::sync::watch;

use crate::admin::{self, Admin};
use crate::cli::Failure;
use crate::config::Config;
use crate::decisions::Decisions;
use crate::fleet::{self, Fleet};
use crate::ledger::Ledger;
use crate::ledger::sqlite::Projection;
use crate::metrics::Metrics;
use crate::prompt::Prompts;
use crate::proxy::{Gateway, GatewayParts};
use crate::responses::Responses;
use crate::secrets::Secrets;
use crate::signals::Signals;
use crate::store::Store;
use crate::tasks::{Phase, Tasks};

/// Background tasks get this long to end; with `homing up` that includes the nodes' own shutdown.
const TASKS_END: Duration = Duration::from_secs(8);

/// What is left of requests gets this long to notice that its runtime goes away.
const RUNTIME_END: Duration = Duration::from_secs(1);

/// How often a draining gateway looks whether it is idle.
const IDLE_CHECK_EVERY: Duration = Duration::from_millis(20);

/// Request ids of the last so many records are taken, also after a restart.
const REQUEST_IDS_SEEDED: usize = 200_000;

/// Runs a gateway until a signal ends it.
pub fn run(config: Config) -> Result<(), Failure> {
    let mut server = Server::start(config)?;
    tracing::info!(listen = %server.listen, admin = ?server.admin, "gateway is ready");
    server.until_signal();
    server.leave();
    Ok(())
}

/// A gateway that runs.
pub struct Server {
    /// Where background work goes; `homing up` adds the nodes to it.
    pub tasks: Tasks,
    /// Tenants and keys.
    pub store: Arc<Store>,
    /// The nodes.
    pub fleet: Arc<Fleet>,
    /// The secrets.
    pub secrets: Arc<Secrets>,
    /// Where clients connect.
    pub listen: SocketAddr,
    /// Where the operator connects.
    pub admin: Option<SocketAddr>,
    runtime: Runtime,
    signals: Signals,
    stop_accepting: watch::Sender<bool>,
    ledger: Arc<Ledger>,
    responses: Arc<Responses>,
    decisions: Arc<Decisions>,
    metrics: Arc<Metrics>,
    grace: Duration,
}

impl Server {
    /// Starts everything that `config` asks for.
    pub fn start(config: Config) -> Result<Self, Failure> {
        let listener = listen("listen", config.listen)?;
        let admin_listener = config.admin.map(|addr| listen("admin", addr)).transpose()?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .thread_name("homing")
            .build()?;
        let entered = runtime.enter();
        let signals = Signals::new()?;
        let tasks = Tasks::new(runtime.handle().clone());

        let ledger = Ledger::open(&config.data, config.price_book())?;
        let store = Store::open(&config.data)?;
        store.watch(&tasks);
        seed_request_ids(&config, &store);
        let secrets = Arc::new(secrets(&config)?);
        let metrics = Arc::new(Metrics::new()?);
        let fleet = Fleet::new(&config.nodes);
        fleet::metrics::register(metrics.registry(), &fleet, &ledger)?;
        let responses = Arc::new(Responses::open(&config)?);
        responses.watch(&tasks);
        let decisions = Arc::new(Decisions::of(&config, &metrics)?);
        let prompts = Prompts::load(&config)?;
        prompts.register(metrics.registry())?;
        // Nodes may hold blocks of these tenants from before: their events must find the salts.
        for tenant in store.tenants()? {
            fleet.issue_salt(&secrets.cache_salt(&tenant.cache_scope));
        }
        fleet.start(secrets.node_token(), &tasks);

        let mut admin = None;
        if let Some(listener) = admin_listener {
            admin = Some(listener.local_addr()?);
            let (fleet, metrics) = (Arc::clone(&fleet), Arc::clone(&metrics));
            let parts = Admin {
                fleet,
                metrics,
                decisions: Arc::clone(&decisions),
                drain: tasks.drain(),
            };
            administrate(listener, parts, &tasks)?;
        }
        let grace = config.limits.drain;
        let gateway = Gateway::new(GatewayParts {
            config: Arc::new(config),
            store: Arc::clone(&store),
            ledger: Arc::clone(&ledger),
            fleet: Arc::clone(&fleet),
            tasks: tasks.clone(),
            secrets: Arc::clone(&secrets),
            metrics: Arc::clone(&metrics),
            prompts,
            responses: Arc::clone(&responses),
            decisions: Arc::clone(&decisions),
        });
        let listen = listener.local_addr()?;
        let stop_accepting = accept(gateway, listener, &tasks)?;
        drop(entered);
        Ok(Self {
            tasks,
            store,
            fleet,
            secrets,
            listen,
            admin,
            runtime,
            signals,
            stop_accepting,
            ledger,
            responses,
            decisions,
            metrics,
            grace,
        })
    }

    /// Runs `work` until it ends or a signal arrives; `None` says that it was a signal.
    pub fn run_until_signal<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        let Self {
            runtime, signals, ..
        } = self;
        runtime.block_on(async {
            tokio::select! {
                done = work => Some(done),
                () = signals.next() => None,
            }
        })
    }

    /// Waits for a signal.
    pub fn until_signal(&mut self) {
        self.run_until_signal(std::future::pending::<()>());
    }

    /// Drains, stops and closes everything, in the order given above.
    pub fn leave(mut self) {
        tracing::info!(
            grace_s = self.grace.as_secs(),
            "draining; a second signal ends it at once"
        );
        self.tasks.advance(Phase::Draining);
        // No receiver means that nothing is accepted any more, which is what is wanted.
        let _ = self.stop_accepting.send(true);
        let (metrics, grace) = (Arc::clone(&self.metrics), self.grace);
        let drained = async move { tokio::time::timeout(grace, idle(&metrics)).await.is_ok() };
        match self.run_until_signal(drained) {
            Some(true) => {}
            Some(false) => tracing::warn!("requests did not end within the grace period: cut"),
            None => tracing::warn!("a second signal: requests in flight are cut"),
        }
        self.tasks.advance(Phase::Stopping);
        // Requests that are cut still tell their clients so, and settle by themselves.
        let metrics = Arc::clone(&self.metrics);
        let told = async move {
            tokio::time::timeout(RUNTIME_END, idle(&metrics))
                .await
                .is_ok()
        };
        if !self.runtime.block_on(told) {
            tracing::warn!("not every request could be told that it was cut");
        }
        let left = self.runtime.block_on(self.tasks.finished(TASKS_END));
        if left > 0 {
            tracing::warn!(left, "background tasks did not end in time");
        }
        self.runtime.shutdown_timeout(RUNTIME_END);
        self.responses.close();
        self.decisions.close();
        self.ledger.close();
        tracing::info!("gateway has stopped");
    }
}

/// Serves the operator's interface.
fn administrate(listener: TcpListener, parts: Admin, tasks: &Tasks) -> io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let serving = admin::serve(listener, Arc::new(parts), tasks.clone());
    tasks.spawn("admin", serving);
    Ok(())
}

/// Resolves once no request has been in flight for two looks in a row: between two requests of one
/// connection there is a moment without any.
async fn idle(metrics: &Metrics) {
    let mut idle_looks = 0;
    while idle_looks < 2 {
        idle_looks = if metrics.in_flight.get() == 0 {
            idle_looks + 1
        } else {
            0
        };
        tokio::time::sleep(IDLE_CHECK_EVERY).await;
    }
}

/// Lets Pingora's service accept on a listener that is bound already; the sender stops it.
fn accept(
    gateway: Gateway,
    listener: TcpListener,
    tasks: &Tasks,
) -> Result<watch::Sender<bool>, Failure> {
    let addr = listener.local_addr()?.to_string();
    let mut service =
        http_proxy_service_with_name(&Arc::new(ServerConf::default()), gateway, "homing");
    service.add_tcp(&addr);
    let mut sockets = Fds::new();
    // From here on the service owns the socket and closes it.
    sockets.add(addr, listener.into_raw_fd());
    let sockets = Arc::new(Mutex::new(sockets));
    let (stop, stopped) = watch::channel(false);
    tasks.spawn("accept", async move {
        service.start_service(Some(sockets), stopped, 1).await;
    });
    Ok(stop)
}

/// The data directory's secrets, with the node token that the operator gives.
fn secrets(config: &Config) -> Result<Secrets, Failure> {
    let secrets = Secrets::open(&config.data)?;
    Ok(match &config.node_token_file {
        Some(file) => secrets.with_node_token(file)?,
        None => secrets,
    })
}

/// Binds an address, or says what to do about it.
fn listen(key: &str, addr: SocketAddr) -> Result<TcpListener, Failure> {
    let bound = TcpListener::bind(addr).and_then(|listener| {
        listener.set_nonblocking(true)?;
        Ok(listener)
    });
    bound.map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => format!(
            "{addr} is in use by another program: stop it, or choose another address for `{key}`"
        )
        .into(),
        _ => format!("cannot listen on {addr} (`{key}`): {error}").into(),
    })
}

/// Request ids of earlier lives stay taken. Without them, an id might name two requests; that is no
/// reason not to start.
fn seed_request_ids(config: &Config, store: &Store) {
    let recent = Projection::open(&config.data).and_then(|mut projection| {
        // What the last process had not projected yet.
        projection.catch_up(None)?;
        projection.recent_requests(REQUEST_IDS_SEEDED)
    });
    match recent {
        Ok(recent) => store.mark_seen(recent),
        Err(error) => tracing::warn!(%error, "request ids of earlier runs are not known"),
    }
}
