//! What does a gateway see of a node that computes nothing and takes its time all the same?
//!
//! Simulated nodes over real HTTP and real ZeroMQ: prompts become tokens and blocks as in gateway
//! and engine (`prompts`, `blocks`), a model of one node's time and memory says when a first token
//! comes and what is cached (`simulate::engine`, moved along by `life` and `state`), what changed in
//! the cache is told as KV events (`changes`, `events`), and the API answers as late as the model
//! says (`api`, `answers`, `metrics`). Two nodes of a process may share a request (`roles`, `halves`,
//! `handover`), and a node may have tiers below its pool (`shelf`). Model time runs at a multiple of real time (`clock`), so that minutes
//! take seconds. Many nodes fit into one process. What can go wrong with a node is in `faults`, and
//! told at a control address that is none of the nodes' own (`control`).
//!
//! Left out: tools, and any answer that makes sense.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use cache_index::block::BLOCK_TOKENS;
use serde::Serialize;
use simulate::engine::Params;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use self::api::Served;
use self::control::Control;
use self::handover::Handovers;
use self::numbers::Numbers;
use self::one_cache::OneCache;
use self::prompts::Prompts;
use self::shelf::Shelf;
use self::slot::Slot;
use crate::error::LoadError;
use crate::node_http;

mod answers;
mod api;
mod blocks;
mod changes;
mod clock;
mod control;
mod events;
pub mod faults;
mod halves;
mod handover;
mod life;
mod metrics;
mod numbers;
mod one_cache;
mod post;
pub(crate) mod prompts;
mod roles;
mod shelf;
mod slot;
mod state;

pub use faults::Fault;
pub(crate) use roles::positive;
pub use roles::{Below, Role, Roles};
pub use state::{Counts, HandoverCounts};

/// Flags of `homing-load node`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Address of the first node's API; port 0 picks one for each node, any other counts up
    #[arg(long, default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
    /// Address of the first node's KV events; without it there are none
    #[arg(long)]
    pub events: Option<SocketAddr>,
    /// Address of the first node's replay of KV events; without it there is none
    #[arg(long)]
    pub replay: Option<SocketAddr>,
    /// Address at which faults are ordered and counts are told
    #[arg(long, default_value = "127.0.0.1:0")]
    pub control: SocketAddr,
    /// Nodes in this process
    #[arg(long, default_value_t = 1)]
    pub nodes: u16,
    /// The model's file: its tokenizer and template; without it four bytes are a token
    #[arg(long)]
    pub gguf: Option<PathBuf>,
    /// The model id; by default the file's name
    #[arg(long)]
    pub model: Option<String>,
    /// Tokens of prompt and answer together
    #[arg(long, default_value_t = 131_072)]
    pub context: usize,
    /// Tokens of an answer where the client allows more
    #[arg(long, default_value_t = 64)]
    pub answer_tokens: usize,
    /// Blocks of 16 tokens in a node's KV pool
    #[arg(long, value_name = "BLOCKS", default_value_t = 384_000)]
    pub capacity: usize,
    /// How fast a node is
    #[command(flatten)]
    pub pace: Pace,
    /// Who does what of a request
    #[command(flatten)]
    pub roles: Roles,
    /// What is below a node's pool
    #[command(flatten)]
    pub below: Below,
    /// Also count what one unbounded cache shared by all nodes would have had
    #[arg(long)]
    pub one_cache: bool,
    /// What goes wrong with every node from the beginning; may be given several times
    #[arg(long)]
    pub fault: Vec<Fault>,
    /// End when stdin ends: a test that is killed then leaves no node behind
    #[arg(long)]
    pub exit_with_stdin: bool,
}

/// How fast a node is; see `simulate::engine::Params`.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Pace {
    /// Model milliseconds in a real one
    #[arg(long, default_value_t = 1.0)]
    pub speed: f64,
    /// Prefill of the first tokens of a prompt, tokens a second
    #[arg(long, value_name = "TOK/S", default_value_t = 20_000.0)]
    pub prefill_rate: f64,
    /// After so many tokens of context a prefilled token costs twice as much
    #[arg(long, value_name = "TOKENS", default_value_t = 100_000.0)]
    pub prefill_doubling: f64,
    /// Prompt tokens that one step computes
    #[arg(long, value_name = "TOKENS", default_value_t = 2048.0)]
    pub chunk: f64,
    /// A decode step, ms
    #[arg(long, value_name = "MS", default_value_t = 12.0)]
    pub decode_step: f64,
    /// What each answer under way adds to a decode step, ms
    #[arg(long, value_name = "MS", default_value_t = 0.08)]
    pub decode_per_answer: f64,
    /// What each token of context of an answer under way adds to a decode step, ms
    #[arg(long, value_name = "MS", default_value_t = 1.5e-5)]
    pub decode_per_token: f64,
    /// Answers under way at once, at most
    #[arg(long, value_name = "ANSWERS", default_value_t = 256)]
    pub batch: usize,
    /// Size of one token's KV, bytes
    #[arg(long, value_name = "BYTES", default_value_t = 160_000.0)]
    pub kv_bytes_per_token: f64,
}

impl Pace {
    pub(crate) fn params(&self) -> Result<Params, LoadError> {
        let figures = [
            ("--speed", self.speed),
            ("--prefill-rate", self.prefill_rate),
            ("--prefill-doubling", self.prefill_doubling),
            ("--chunk", self.chunk),
            ("--decode-step", self.decode_step),
            ("--kv-bytes-per-token", self.kv_bytes_per_token),
        ];
        for (flag, value) in figures {
            positive(flag, value)?;
        }
        Ok(Params {
            block_tokens: u32::try_from(BLOCK_TOKENS).unwrap_or(u32::MAX),
            prefill_tokens_per_s: self.prefill_rate,
            context_doubling_tokens: self.prefill_doubling,
            chunk_tokens: self.chunk,
            step_ms: self.decode_step,
            step_ms_per_answer: self.decode_per_answer.max(0.0),
            step_ms_per_context_token: self.decode_per_token.max(0.0),
            batch_max: self.batch.max(1),
            kv_bytes_per_token: self.kv_bytes_per_token,
        })
    }
}

/// Where one node is.
#[derive(Clone, Debug, Serialize)]
pub struct Place {
    /// Its name at the control address.
    pub id: String,
    /// What it does of a request.
    pub role: &'static str,
    /// Its API, without `/v1`.
    pub url: String,
    /// Its KV events.
    pub events: Option<String>,
    /// Their replay.
    pub replay: Option<String>,
}

/// What is printed once every node listens.
#[derive(Clone, Debug, Serialize)]
pub struct Places {
    /// The model that they serve.
    pub model: String,
    /// Where faults are ordered.
    pub control: String,
    /// The nodes.
    pub nodes: Vec<Place>,
}

/// Nodes that listen.
pub struct Nodes {
    model: String,
    control: TcpListener,
    slots: Vec<Arc<Slot>>,
    lives: Vec<slot::Sockets>,
}

impl Nodes {
    /// Takes every port.
    pub async fn bind(args: &Args) -> Result<Self, LoadError> {
        let params = args.pace.params()?;
        args.roles.check(args.nodes)?;
        args.below.check()?;
        if args.capacity <= 2 {
            let reason = "a pool needs more than 2 blocks".to_owned();
            let flag = "--capacity";
            return Err(LoadError::Flag { flag, reason });
        }
        let model = model_id(args);
        let served = Arc::new(Served {
            model: model.clone(),
            prompts: Prompts::load(args.gguf.as_deref())?,
            context_max: args.context,
            answer_tokens: args.answer_tokens,
        });
        let shared = shared(args);
        let (mut slots, mut lives) = (Vec::new(), Vec::new());
        for number in 0..args.nodes.max(1) {
            let wanted = slot::Addresses {
                http: counted(args.listen, number),
                events: args.events.map(|address| counted(address, number)),
                replay: args.replay.map(|address| counted(address, number)),
            };
            let sockets = slot::Sockets::bind(&wanted).await?;
            let addresses = sockets.addresses()?;
            let facts = slot::Facts {
                id: format!("node-{number}"),
                addresses,
                params,
                capacity: args.capacity,
                speed: args.pace.speed,
                role: args.roles.of(number),
                handover_gb_per_s: args.roles.handover_gb_per_s,
                host: args.below.host(),
                shared: shared.clone(),
            };
            let slot = Slot::new(facts, Arc::clone(&served));
            args.fault.iter().for_each(|fault| slot.suffer(*fault));
            slots.push(Arc::new(slot));
            lives.push(sockets);
        }
        Ok(Self {
            model,
            control: node_http::listen(args.control).await?,
            slots,
            lives,
        })
    }

    /// Where everything is.
    pub fn places(&self) -> Result<Places, LoadError> {
        Ok(Places {
            model: self.model.clone(),
            control: format!("http://{}", node_http::address(&self.control)?),
            nodes: self.slots.iter().map(|slot| slot.place()).collect(),
        })
    }

    /// Serves until dropped.
    pub async fn serve(self) -> Result<(), LoadError> {
        let control = Control::new(self.slots.clone());
        let mut tasks = JoinSet::new();
        for (slot, sockets) in self.slots.into_iter().zip(self.lives) {
            tasks.spawn(slot.live(sockets));
        }
        tasks.spawn(async move {
            let answer = move |request| control.clone().answer(request);
            node_http::serve(self.control, answer).await
        });
        match tasks.join_next().await {
            Some(Ok(ended)) => ended,
            Some(Err(panic)) => Err(LoadError::program("a node", panic.to_string())),
            None => Ok(()),
        }
    }
}

fn shared(args: &Args) -> slot::Shared {
    let numbers = Arc::new(Numbers::default());
    slot::Shared {
        handovers: Arc::new(Handovers::new()),
        shelf: args.below.store().map(|store| Shelf::new(store, &numbers)),
        one_cache: args.one_cache.then(|| Arc::new(OneCache::default())),
        numbers,
    }
}

fn counted(first: SocketAddr, number: u16) -> SocketAddr {
    match first.port() {
        0 => first,
        port => SocketAddr::new(first.ip(), port.saturating_add(number)),
    }
}

fn model_id(args: &Args) -> String {
    let stem = args
        .gguf
        .as_deref()
        .and_then(|path| path.file_stem()?.to_str());
    args.model
        .as_deref()
        .or(stem)
        .unwrap_or("simulated")
        .to_owned()
}
