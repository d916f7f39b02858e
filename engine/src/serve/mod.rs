//! How does a node start, and how does it end?
//!
//! Start: fetch the model, if it is one of the hub → read the header → size the pool, or refuse → bind every address → serve `/health`
//! (503) while the weights load → start the engine's thread → say so in one line on stdout.
//!
//! End, on SIGTERM or SIGINT: refuse new requests (`/health` 503) → running ones finish, up to the
//! grace period → stop accepting, let connections send their last bytes → stop the engine's thread
//! → exit 0. A second signal, or stdin's end with `--exit-with-stdin`, ends the process at once.

mod error;
mod memory;
mod signals;
mod size;
mod sockets;
mod transfer;

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use prompt::PromptBuilder;
use serde_json::json;
use tokio::sync::oneshot;

use crate::cli::Config;
use crate::engine::{self, Handle, Parts, Show};
use crate::events::EventLog;
use crate::kv::layout::BlockLayout;
use crate::kv::store::disk::{Disk, Identity};
use crate::kv::store::form::Form;
use crate::kv::store::shared::mooncake::Mooncake;
use crate::kv::store::shared::{Seal, SharedTier};
use crate::metrics::Metrics;
use crate::model::{Model, ModelConfig, ModelFile, ModelOptions};
use crate::parallel::RankGroup;
use crate::progress::Progress;
use crate::request::constraint::Formats;
use crate::request::prepare::{Served, ServedParts};
use crate::server::{App, Loaded, Settings};
pub use error::ServeError;
pub use memory::Of as MemoryOf;
use signals::{Signals, exit_with_stdin};
pub use size::PoolSizeError;
use size::{Fixed, Given, PoolSize, pool_size};
use sockets::{Addresses, Sockets, carry_events};
use transfer::{KvParts, KvSockets};

/// Time for connections to send their last bytes once all requests are done.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Runs a node until it is told to end.
pub fn run(config: Config) -> Result<(), ServeError> {
    if config.exit_with_stdin {
        exit_with_stdin()?;
    }
    let model = config.model.local()?;
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
    let served = runtime.block_on(serve(config, &model));
    // Not waited for: a replay to a slow joiner must not hold up the exit.
    runtime.shutdown_background();
    served
}

async fn serve(config: Config, model: &Path) -> Result<(), ServeError> {
    let mut signals = Signals::new()?;
    let file = ModelFile::open(model)?;
    let model = Model::config(file.header())?;
    let pool = sized(&config, &file, &model)?;
    let metrics = Arc::new(Metrics::new(&config.model_id, pool.blocks as usize));
    let settings = Settings {
        model_id: Arc::from(config.model_id.as_str()),
        token: config.token.clone(),
        body_bytes_max: config.body_bytes_max,
        read_timeout: config.read_timeout,
    };
    let app = App::new(settings, Arc::clone(&metrics));
    let sockets = Sockets::bind(&config).await?;
    let kv_sockets = KvSockets::bind(&config)?;
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
    let loaded = loaded.unwrap_or(Err(ServeError::LoadPanicked))?;
    let boot_id = uuid::Uuid::new_v4().to_string();
    let events = sockets
        .events
        .is_some()
        .then(|| Arc::new(EventLog::new(boot_id.clone(), config.replay_batches)));
    let served = served_parts(&config, &loaded, pool, &boot_id);
    let (orders, to_fetch) = transfer::orders();
    let kv = KvParts {
        layout: loaded.model.block_layout(),
        model: loaded.fingerprint,
        engine_id: boot_id,
        orders: to_fetch,
    };
    let mut parts = parts(&config, loaded, pool, metrics, events.clone())?;
    parts.orders = Some(orders);
    let (engine, thread) = engine::start(parts).map_err(|source| ServeError::System {
        what: "cannot start the engine's thread",
        source,
    })?;
    if let Some(log) = events {
        carry_events(&config, sockets.events, sockets.replay, log, &engine);
    }
    let served = Arc::new(Served::new(served));
    let (node, _folder) = transfer::start(&config, kv_sockets, kv, &engine)?;
    app.loaded(Loaded::new(served, engine.clone(), node));
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

fn served_parts(
    config: &Config,
    loaded: &LoadedModel,
    pool: PoolSize,
    boot_id: &str,
) -> ServedParts {
    let prompts = &loaded.prompts;
    ServedParts {
        model_id: Arc::from(config.model_id.as_str()),
        max_model_len: pool.max_model_len,
        boot_id: boot_id.to_owned(),
        prompts: Arc::clone(prompts),
        formats: Formats::new(prompts.template_source(), config.formats),
        pooling: config.pooling,
        width: loaded.model.shape().width,
    }
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

/// What the pool and the host tier have room for.
fn sized(config: &Config, file: &ModelFile, model: &ModelConfig) -> Result<PoolSize, ServeError> {
    let block_bytes = Model::kv_block_bytes(model, config.ops);
    let form = config.kv_tier_form;
    let kept_bytes = form.kept_bytes(config.ops.kv_dtype(), block_bytes);
    Ok(pool_size(
        model,
        (block_bytes, kept_bytes),
        Given::of(config),
        Fixed::of(file.header(), model, config.ops, config.step_tokens),
        memory::available(),
    )?)
}

fn parts(
    config: &Config,
    loaded: LoadedModel,
    pool: PoolSize,
    metrics: Arc<Metrics>,
    events: Option<Arc<EventLog>>,
) -> Result<Parts, ServeError> {
    let LoadedModel {
        model,
        prompts: tokenizer,
        fingerprint,
    } = loaded;
    // Below the pool, blocks of another form are another model's.
    let (form, layout) = (config.kv_tier_form, model.block_layout());
    let fingerprint = form.mark(fingerprint);
    let kept_bytes = form.kept_bytes(layout.dtype, layout.body_bytes());
    let disk = match &config.kv_disk {
        Some(disk) => {
            let identity = Identity::new(&layout, fingerprint);
            Some(Disk::open(&disk.dir, disk.bytes, identity, kept_bytes)?)
        }
        None => None,
    };
    let shared =
        shared(config, &layout, (fingerprint, (form, kept_bytes))).map_err(ServeError::Shared)?;
    let (vocab, layers) = (model.shape().vocab, model.shape().layers);
    Ok(Parts {
        device: Box::new(RankGroup::alone(model).keeping(form)),
        token_bytes: Box::new(move |id, show| match show {
            Show::Text => tokenizer.tokenizer().token_bytes(id).to_vec(),
            // A part of a character is bytes and no text, a control token text and no bytes.
            Show::Markers => match tokenizer.tokenizer().token_bytes(id) {
                [] => tokenizer.tokenizer().token_text(id).as_bytes().to_vec(),
                bytes => bytes.to_vec(),
            },
        }),
        vocab,
        layers,
        drafter: None,
        kv_blocks: pool.blocks,
        host_blocks: pool.host_blocks,
        disk,
        shared,
        orders: None,
        step_tokens: config.step_tokens,
        beside_decode: config.beside_decode,
        queue_max: config.queue_max,
        metrics,
        events,
    })
}

/// The shared tier, if one is asked for; there is a token then.
fn shared(
    config: &Config,
    layout: &BlockLayout,
    (fingerprint, kept): ([u8; 32], (Form, usize)),
) -> std::io::Result<Option<SharedTier>> {
    let Some((store, token)) = config.kv_shared.as_ref().zip(config.token.as_ref()) else {
        return Ok(None);
    };
    let seal = Seal::new(token.store_key(), layout, kept, fingerprint);
    let shared = SharedTier::start(seal, |object_bytes, ends| {
        let store = Mooncake::new(store.clone(), object_bytes, ends)?;
        Ok(Box::new(store))
    })?;
    Ok(Some(shared))
}

/// What was made of the file.
struct LoadedModel {
    model: Model,
    prompts: Arc<PromptBuilder>,
    /// Tells the file's weights from others.
    fingerprint: [u8; 32],
}

type LoadOutcome = Result<LoadedModel, ServeError>;

/// Loads on a thread of its own, not the runtime's: at a signal the process may leave it behind.
fn load(
    file: ModelFile,
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
    file: &ModelFile,
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
    Ok(LoadedModel {
        model,
        prompts: Arc::new(prompts),
        fingerprint: file.fingerprint(),
    })
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
        "role": config.role.as_str(),
        "pid": std::process::id(),
        "kv_blocks": pool.blocks,
        "kv_host_blocks": pool.host_blocks,
        "kv_shared": config.kv_shared.as_ref().map(|store| format!("mooncake://{}", store.master)),
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
        kv_host_blocks = pool.host_blocks,
        max_model_len = pool.max_model_len,
        threads = config.threads,
        "ready"
    );
}
