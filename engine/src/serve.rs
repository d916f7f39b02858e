//! How does a node start, and how does it end?
//!
//! Start: read the file's header → size the pool, or refuse → bind every address → serve `/health`
//! (503) while the weights load → start the engine's thread → say so in one line on stdout.
//!
//! End, on SIGTERM or SIGINT: refuse new requests (`/health` 503) → running ones finish, up to the
//! grace period → stop accepting, let connections send their last bytes → stop the engine's thread
//! → exit 0. A second signal, or stdin's end with `--exit-with-stdin`, ends the process at once.

use std::future::Future;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use cache_index::block::BLOCK_TOKENS;
use prompt::PromptBuilder;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;
use zeromq::{PubSocket, RouterSocket, Socket, ZmqError};

use crate::cli::Config;
use crate::engine::{self, Handle, Parts};
use crate::events::replay::Replay;
use crate::events::{EventLog, publish, replay};
use crate::metrics::Metrics;
use crate::model::{GgufFile, Model, ModelConfig, ModelError, ModelOptions};
use crate::progress::Progress;
use crate::request::prepare::Served;
use crate::server::{App, Loaded, Settings};

/// Tokens that a pool must hold at least: a system prompt and a short answer.
const POOL_TOKENS_MIN: usize = 256;
/// Time for connections to send their last bytes once all requests are done.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Why a node could not start, or ended.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The model file cannot be served.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The model's tokenizer or template cannot be used.
    #[error("{path}: {source}")]
    Prompt {
        /// The model file.
        path: PathBuf,
        /// What is wrong with it.
        source: prompt::LoadError,
    },
    /// The tokenizer names tokens that the model does not have.
    #[error("{path}: the tokenizer has {tokens} tokens, the model only {vocab}")]
    Vocabulary {
        /// The model file.
        path: PathBuf,
        /// Tokens of the tokenizer.
        tokens: usize,
        /// Rows of the model's embedding.
        vocab: usize,
    },
    /// The KV pool would be too small or too large.
    #[error(transparent)]
    Pool(#[from] PoolSizeError),
    /// An address is taken or not ours.
    #[error("cannot listen at {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// A ZMQ endpoint is taken or not ours.
    #[error("cannot bind the KV events' endpoint {endpoint}: {source}")]
    Endpoint {
        /// The endpoint.
        endpoint: String,
        /// What ZMQ said.
        source: ZmqError,
    },
    /// A thread, a signal handler or the like.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The loading thread panicked.
    #[error("loading the model panicked; the file is broken in a way that was not foreseen")]
    LoadPanicked,
    /// The engine's thread panicked.
    #[error("the engine's thread has ended unexpectedly; see the log above")]
    EngineEnded,
}

/// The KV pool does not fit the model or the machine; the message shows the arithmetic.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolSizeError {
    /// Not enough for any conversation.
    #[error(
        "--kv-memory {given} bytes holds {tokens} tokens of this model ({block_bytes} bytes a \
         block of 16); at least {least} bytes are needed, and {whole} for its whole context of \
         {context} tokens"
    )]
    TooSmall {
        /// What was given.
        given: u64,
        /// Tokens that fit.
        tokens: usize,
        /// Bytes of one block.
        block_bytes: usize,
        /// Bytes that would do.
        least: u64,
        /// Bytes for a whole context.
        whole: u64,
        /// The model's context.
        context: usize,
    },
    /// More than the machine has.
    #[error("--kv-memory {given} bytes is more than this machine's memory of {memory} bytes")]
    TooLarge {
        /// What was given.
        given: u64,
        /// What there is.
        memory: u64,
    },
}

/// The pool of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PoolSize {
    blocks: u32,
    /// Prompt and answer together: the model's context, or the pool if that is smaller.
    max_model_len: usize,
}

fn pool_size(
    model: &ModelConfig,
    block_bytes: usize,
    given: u64,
    memory: Option<u64>,
) -> Result<PoolSize, PoolSizeError> {
    if let Some(memory) = memory.filter(|memory| *memory < given) {
        return Err(PoolSizeError::TooLarge { given, memory });
    }
    let blocks = u32::try_from(given / block_bytes as u64).unwrap_or(u32::MAX);
    let tokens = blocks as usize * BLOCK_TOKENS;
    let bytes_for = |tokens: usize| (tokens.div_ceil(BLOCK_TOKENS) * block_bytes) as u64;
    let least = POOL_TOKENS_MIN.min(model.context);
    if tokens < least {
        return Err(PoolSizeError::TooSmall {
            given,
            tokens,
            block_bytes,
            least: bytes_for(least),
            whole: bytes_for(model.context),
            context: model.context,
        });
    }
    Ok(PoolSize {
        blocks,
        max_model_len: model.context.min(tokens),
    })
}

/// The machine's memory in bytes, where the operating system tells it.
fn machine_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Runs a node until it is told to end.
pub fn run(config: Config) -> Result<(), ServeError> {
    if config.exit_with_stdin {
        exit_with_stdin()?;
    }
    // Two threads: one writes streams while the other reads and tokenises. The cores are for the
    // engine; see `Config::threads`.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|source| ServeError::System {
            what: "cannot start the runtime",
            source,
        })?;
    let served = runtime.block_on(serve(config));
    // Not waited for: a replay to a slow joiner must not hold up the exit.
    runtime.shutdown_background();
    served
}

async fn serve(config: Config) -> Result<(), ServeError> {
    let mut signals = Signals::new()?;
    let file = GgufFile::open(&config.model)?;
    let model = Model::config(file.header())?;
    let block_bytes = Model::kv_block_bytes(&model, config.ops);
    let pool = pool_size(
        &model,
        block_bytes,
        config.kv_memory_bytes,
        machine_memory(),
    )?;
    let metrics = Arc::new(Metrics::new(&config.model_id, pool.blocks as usize));
    let settings = Settings {
        model_id: Arc::from(config.model_id.as_str()),
        token: config.token.clone(),
        body_bytes_max: config.body_bytes_max,
        read_timeout: config.read_timeout,
    };
    let app = App::new(settings, Arc::clone(&metrics));
    let sockets = Sockets::bind(&config).await?;
    let addresses = sockets.addresses.clone();
    let accepting = tokio::spawn(Arc::clone(&app).accept(sockets.http));
    let options = ModelOptions {
        ops: config.ops,
        threads: config.threads,
        kv_blocks: pool.blocks as usize,
    };
    let loading = load(file, options, Progress::new(config.progress_json))?;
    let Some(loaded) = signals.unless_ended(loading).await else {
        return Ok(());
    };
    let (model, prompts) = loaded.unwrap_or(Err(ServeError::LoadPanicked))?;
    let boot_id = uuid::Uuid::new_v4().to_string();
    let events = sockets
        .events
        .is_some()
        .then(|| Arc::new(EventLog::new(boot_id, config.replay_batches)));
    let parts = parts(&config, model, &prompts, pool, metrics, events.clone());
    let (engine, thread) = engine::start(parts).map_err(|source| ServeError::System {
        what: "cannot start the engine's thread",
        source,
    })?;
    if let Some(log) = events {
        carry_events(&config, sockets.events, sockets.replay, log, &engine);
    }
    let model_id = Arc::from(config.model_id.as_str());
    let served = Arc::new(Served::new(model_id, pool.max_model_len, prompts));
    app.loaded(Loaded {
        served,
        engine: engine.clone(),
    });
    announce(&config, &addresses, pool);
    let ended = tokio::select! {
        () = signals.next() => Ok(()),
        () = watch_engine(&engine) => Err(ServeError::EngineEnded),
    };
    tokio::select! {
        () = wind_down(&config, &app, &engine, thread) => {}
        () = signals.next() => tracing::warn!("second signal: exiting at once"),
    }
    accepting.abort();
    ended
}

/// The steps of an orderly end, see the head of this file.
async fn wind_down(config: &Config, app: &App, engine: &Handle, thread: JoinHandle<()>) {
    tracing::info!(grace_s = config.drain.as_secs_f64(), "draining");
    engine.drain();
    if !engine.has_ended()
        && tokio::time::timeout(config.drain, engine.idle())
            .await
            .is_err()
    {
        tracing::warn!("requests did not finish within the grace period; they are cut");
    }
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, app.close()).await;
    let engine = engine.clone();
    let stop = move || {
        engine.stop();
        // A panic of the engine's thread has been reported where it happened.
        let _ = thread.join();
    };
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, tokio::task::spawn_blocking(stop)).await;
}

fn parts(
    config: &Config,
    mut model: Model,
    prompts: &Arc<PromptBuilder>,
    pool: PoolSize,
    metrics: Arc<Metrics>,
    events: Option<Arc<EventLog>>,
) -> Parts {
    let vocab = model.shape().vocab;
    let tokenizer = Arc::clone(prompts);
    Parts {
        forward: Box::new(move |batch, logits| model.forward(batch, logits)),
        token_bytes: Box::new(move |id| tokenizer.tokenizer().token_bytes(id).to_vec()),
        vocab,
        kv_blocks: pool.blocks,
        step_tokens: config.step_tokens,
        queue_max: config.queue_max,
        metrics,
        events,
    }
}

type LoadOutcome = Result<(Model, Arc<PromptBuilder>), ServeError>;

/// Loads on a thread of its own, not the runtime's: at a signal the process may leave it behind.
fn load(
    file: GgufFile,
    options: ModelOptions,
    mut progress: Progress,
) -> Result<oneshot::Receiver<LoadOutcome>, ServeError> {
    let (sender, receiver) = oneshot::channel();
    let load = move || {
        let outcome = load_parts(&file, &options, &mut |share| progress.report(share));
        let _ = sender.send(outcome);
    };
    std::thread::Builder::new()
        .name("load".into())
        .spawn(load)
        .map_err(|source| ServeError::System {
            what: "cannot start the loading thread",
            source,
        })?;
    Ok(receiver)
}

fn load_parts(
    file: &GgufFile,
    options: &ModelOptions,
    progress: &mut dyn FnMut(f32),
) -> LoadOutcome {
    let path = || file.path().to_owned();
    let prompts = PromptBuilder::from_gguf(file.header()).map_err(|source| ServeError::Prompt {
        path: path(),
        source,
    })?;
    let model = Model::load(file, options, progress)?;
    let (tokens, vocab) = (prompts.tokenizer().vocab_size(), model.shape().vocab);
    if tokens > vocab {
        return Err(ServeError::Vocabulary {
            path: path(),
            tokens,
            vocab,
        });
    }
    Ok((model, Arc::new(prompts)))
}

struct Sockets {
    http: TcpListener,
    events: Option<PubSocket>,
    replay: Option<RouterSocket>,
    addresses: Addresses,
}

#[derive(Clone)]
struct Addresses {
    http: SocketAddr,
    events: Option<String>,
    replay: Option<String>,
}

impl Sockets {
    async fn bind(config: &Config) -> Result<Self, ServeError> {
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

fn carry_events(
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

/// Ends when the engine's thread does, which it does on its own only by a panic.
async fn watch_engine(engine: &Handle) {
    let mut tick = tokio::time::interval(Duration::from_millis(200));
    while !engine.has_ended() {
        tick.tick().await;
    }
}

/// The one line on stdout that says the node is ready.
fn announce(config: &Config, addresses: &Addresses, pool: PoolSize) {
    let line = json!({
        "listening": format!("http://{}", addresses.http),
        "events": addresses.events,
        "replay": addresses.replay,
        "model": config.model_id,
        "pid": std::process::id(),
        "kv_blocks": pool.blocks,
        "max_model_len": pool.max_model_len,
    });
    let mut stdout = std::io::stdout().lock();
    // A closed stdout is no reason not to serve.
    let _ = writeln!(stdout, "{line}");
    let _ = stdout.flush();
    tracing::info!(
        listening = %addresses.http,
        model = config.model_id,
        kv_blocks = pool.blocks,
        max_model_len = pool.max_model_len,
        threads = config.threads,
        "ready"
    );
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> Result<Self, ServeError> {
        let install = |kind| {
            signal(kind).map_err(|source| ServeError::System {
                what: "cannot handle signals",
                source,
            })
        };
        Ok(Self {
            terminate: install(SignalKind::terminate())?,
            interrupt: install(SignalKind::interrupt())?,
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    /// The future's value, or none if a signal came first.
    async fn unless_ended<T>(&mut self, future: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            value = future => Some(value),
            () = self.next() => None,
        }
    }
}

/// Ends the process as soon as stdin does.
fn exit_with_stdin() -> Result<(), ServeError> {
    let watch = || {
        let mut stdin = std::io::stdin().lock();
        let mut buffer = [0; 4096];
        while matches!(stdin.read(&mut buffer), Ok(1..)) {}
        #[expect(
            clippy::disallowed_methods,
            reason = "the parent was killed: nobody is left to drain for, and nothing is on disk"
        )]
        std::process::exit(0);
    };
    std::thread::Builder::new()
        .name("stdin".into())
        .spawn(watch)
        .map(drop)
        .map_err(|source| ServeError::System {
            what: "cannot watch stdin",
            source,
        })
}

#[cfg(test)]
mod tests {
    //! Catches a pool that is too small to serve or larger than the machine being accepted.
    use super::*;

    #[test]
    fn pools() {
        let model = ModelConfig {
            vocab: 10,
            layers: 1,
            width: 32,
            heads: 1,
            kv_heads: 1,
            head_dim: 32,
            ff: 32,
            context: 2048,
            rope_base: 1e4,
            rms_eps: 1e-5,
        };
        let size = |given| pool_size(&model, 1000, given, Some(1 << 20));
        let fits = |blocks, max_model_len| {
            Ok(PoolSize {
                blocks,
                max_model_len,
            })
        };
        assert_eq!(size(16_000), fits(16, 256));
        assert_eq!(size(16_999), fits(16, 256));
        assert_eq!(size(200_000), fits(200, 2048));
        let too_large = PoolSizeError::TooLarge {
            given: 1 << 21,
            memory: 1 << 20,
        };
        assert_eq!(size(1 << 21), Err(too_large));
        let error = size(15_999).expect_err("too small").to_string();
        for part in ["15999", "240 tokens", "16000 bytes", "128000", "2048"] {
            assert!(error.contains(part), "{part} in {error}");
        }
    }
}
