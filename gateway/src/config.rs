//! What does the operator decide? One path in: TOML file → `file` (its own types, unknown keys
//! are errors) → the checked [`Config`] everything else takes.
//!
//! An option exists when two deployments need different values; the rest are constants beside the
//! code they bound. Secrets are never in this file: it names the files that hold them.

mod aliases;
mod decisions;
mod disaggregation;
mod file;
mod nodes;
mod responses;
mod sessions;

use std::borrow::Cow;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cache_index::ids::NodeId;
use dialects::normalise::Options;
use dialects::session::Table;
use policies::pick::Params;
use policies::price::{PriceBook, Rates};
use policies::view::{FetchCosts, Role};

pub use self::disaggregation::DisaggregationConfig;
use crate::store::TenantId;

/// A checked configuration.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where clients connect.
    pub listen: SocketAddr,
    /// Where the operator connects (metrics, node states); none serves no admin interface.
    pub admin: Option<SocketAddr>,
    /// Where ledger, keys and secrets live.
    pub data: PathBuf,
    /// The models clients may ask for.
    pub models: Vec<ModelConfig>,
    /// Other names for them.
    pub aliases: Vec<AliasConfig>,
    /// The nodes that serve them.
    pub nodes: Vec<NodeConfig>,
    /// The file that holds the token nodes demand; none takes the one in the data directory.
    pub node_token_file: Option<PathBuf>,
    /// Bounds on what clients may ask.
    pub limits: Limits,
    /// What tokens cost.
    pub prices: Prices,
    /// How nodes are weighed.
    pub policy: PolicyConfig,
    /// What is kept of responses.
    pub responses: ResponsesConfig,
    /// Most bytes of the log of decisions; 0 keeps none.
    pub decisions_bytes_max: u64,
    /// How sessions are found.
    pub sessions: Table,
    /// Which spellings of a prompt are made one.
    pub normalise: NormaliseConfig,
    /// When two nodes share a turn.
    pub disaggregation: DisaggregationConfig,
}

/// Which spellings of a prompt are made one.
#[derive(Debug, Clone, Default)]
pub struct NormaliseConfig {
    /// Where a tenant has nothing of its own.
    pub everyone: Options,
    /// Tenants that have.
    pub tenants: HashMap<TenantId, Options>,
}

impl NormaliseConfig {
    /// A tenant's.
    pub fn of(&self, tenant: &TenantId) -> Options {
        self.tenants.get(tenant).copied().unwrap_or(self.everyone)
    }
}

/// One model.
#[derive(Debug, Clone)]
pub struct ModelConfig {
    /// The id in requests, in the ledger and in the nodes' `/v1/models`.
    pub id: String,
    /// The GGUF file, or folder in Hugging Face's layout, with tokenizer and chat template; without it
    /// token counts come from nodes alone and routes are approximate.
    pub gguf: Option<PathBuf>,
}

/// Another name for a model.
#[derive(Debug, Clone)]
pub struct AliasConfig {
    /// The name in requests; `*` in it stands for any run of characters.
    pub name: String,
    /// The id of the model that it means.
    pub model: String,
    /// Whose name it is; everyone's where none is listed.
    pub tenants: Vec<TenantId>,
}

/// One node.
#[derive(Debug, Clone)]
pub struct NodeConfig {
    /// Its name in logs, headers and the ledger.
    pub id: NodeId,
    /// Its HTTP address.
    pub addr: SocketAddr,
    /// What goes into the `host` header: the authority of its URL as written.
    pub host: String,
    /// Where it publishes KV events (`tcp://…`).
    pub events: Option<String>,
    /// Where it replays them.
    pub replay: Option<String>,
    /// The region it is in; `local` if the file does not say.
    pub region: String,
    /// What it does of a turn.
    pub duty: Duty,
    /// What fetching KV from its slower tiers costs, where it does not tell that itself.
    pub fetch_ms_per_block: FetchCosts,
}

/// What a node does where prompts and answers are computed apart.
#[derive(Debug, Clone, Default)]
pub struct Duty {
    /// Its part of a turn.
    pub role: Role,
    /// How it hands KV over, or takes it.
    pub connector: ConnectorKind,
    /// Where those who take its KV ask first; only of a node that computes prompts, and only where
    /// its connector has one.
    pub bootstrap: Option<Bootstrap>,
    /// Size of one token's KV where it does not tell; 0 if the file does not say.
    pub kv_bytes_per_token: u64,
    /// How fast KV travels until it has been measured; 0 if the file does not say.
    pub transfer_bytes_per_s: u64,
}

/// Which fields tell two nodes that they share a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ConnectorKind {
    /// Our engine's own.
    #[default]
    Homing,
    /// vLLM with its NIXL connector.
    Nixl,
    /// vLLM with its Mooncake connector.
    Mooncake,
    /// SGLang.
    Sglang,
}

impl ConnectorKind {
    /// Its name in the file.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Homing => "homing",
            Self::Nixl => "nixl",
            Self::Mooncake => "mooncake",
            Self::Sglang => "sglang",
        }
    }

    /// Whether KV travels while the prompt is still being computed, as both nodes are asked at once.
    pub fn overlaps_prefill(self) -> bool {
        match self {
            Self::Homing | Self::Mooncake | Self::Sglang => true,
            Self::Nixl => false,
        }
    }

    /// Whether a node that computes prompts has a bootstrap server.
    pub fn needs_bootstrap(self) -> bool {
        match self {
            Self::Mooncake | Self::Sglang => true,
            Self::Homing | Self::Nixl => false,
        }
    }
}

/// A bootstrap server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bootstrap {
    /// As the file has it: nodes look it up themselves.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// Where the gateway asks it.
    pub addr: SocketAddr,
}

/// Bounds on requests. Each has its unit in its name or its type.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Largest request body, after decompression; above it the answer is 413.
    pub body_bytes_max: usize,
    /// Largest sum of request header names and values; above it the answer is 431.
    pub header_bytes_max: usize,
    /// Requests of one tenant that run at once; the next ones wait in its queue.
    pub concurrency_per_tenant: usize,
    /// Requests of one tenant that may wait; above it the answer is 429.
    pub queue_per_tenant: usize,
    /// Longest wait in the queue; after it the answer is 429.
    pub queue_wait: Duration,
    /// Longest silence of a client that still owes body bytes; after it the answer is 408.
    pub client_timeout: Duration,
    /// Longest silence of a node, before its headers or between bytes; after it the node is given
    /// up for this request.
    pub request_timeout: Duration,
    /// How long running requests may take to end once the gateway is asked to stop.
    pub drain: Duration,
}

/// What tokens cost, in integer nano-dollars.
#[derive(Debug, Clone)]
pub struct Prices {
    /// Written on every usage record.
    pub version: String,
    /// Model id and its rates; a model that is not listed is free of charge.
    pub models: Vec<(String, ModelPrice)>,
}

/// Rates of one model, nano-USD per million tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelPrice {
    /// An input token that had to be computed.
    pub input: i64,
    /// An input token read from cache.
    pub cached_input: i64,
    /// An output token.
    pub output: i64,
}

/// What is kept of responses and conversations.
#[derive(Debug, Clone, Copy)]
pub struct ResponsesConfig {
    /// How long a response is kept, and a conversation after its last use.
    pub ttl: Duration,
    /// Responses, conversations and items of one tenant; past it, its oldest go.
    pub rows_per_tenant: u64,
    /// Bytes of their JSON, likewise.
    pub bytes_per_tenant: u64,
}

/// How candidates are weighed.
#[derive(Debug, Clone)]
pub struct PolicyConfig {
    /// Weight of a request's own uncached tokens against those in flight before it (`b` in
    /// design.md; 4 to 8 is robust).
    pub b: f64,
    /// Which turns wait in the gateway, and for how long.
    pub hold: policies::hold::Params,
}

/// Why a configuration was refused: the file, the key, the value and what is allowed.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("cannot read the configuration {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is not TOML, or has an unknown or mistyped key.
    #[error("the configuration {path} is not valid: {source}")]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: Box<toml::de::Error>,
    },
    /// A value is outside what is allowed.
    #[error("configuration key `{key}` is {value}; allowed: {allowed}")]
    Value {
        /// The key, with its path.
        key: String,
        /// The refused value.
        value: String,
        /// What would be accepted.
        allowed: Cow<'static, str>,
    },
}

impl Config {
    /// Reads and checks the file at `path`. Relative paths inside are relative to its directory.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read {
            path: path.to_owned(),
            source,
        })?;
        Self::parse(&text, path)
    }

    /// Checks `text` as if it had been read from `path`.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let raw: file::ConfigFile = toml::from_str(text).map_err(|source| ConfigError::Syntax {
            path: path.to_owned(),
            source: Box::new(source),
        })?;
        raw.check(path.parent().unwrap_or(Path::new("")))
    }

    /// The prices as the rating policy takes them.
    pub fn price_book(&self) -> PriceBook {
        let rates = |price: &ModelPrice| {
            let ModelPrice {
                input,
                cached_input,
                output,
            } = *price;
            Rates {
                input,
                cached_input,
                output,
            }
        };
        PriceBook {
            version: self.prices.version.clone(),
            models: self
                .prices
                .models
                .iter()
                .map(|(id, price)| (id.clone(), rates(price)))
                .collect(),
        }
    }

    /// The weights as the routing policy takes them.
    pub fn policy_params(&self) -> Params {
        Params {
            b: self.policy.b,
            split_tokens_min: self.disaggregation.uncached_tokens_min,
            stall: self.disaggregation.stall,
            ..Params::default()
        }
    }
}

#[cfg(test)]
mod tests;
