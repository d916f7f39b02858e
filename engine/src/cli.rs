//! What can be said on the command line?
//!
//! Flags are their own type, checked once and converted into [`Config`], so that nothing past this
//! file sees an unchecked value.

mod address;
mod error;
mod model;
mod packed;
mod pool;
mod shared;
mod tiers;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use answer::{ReasoningFormat, ToolFormat};
use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};

use crate::engine::Pooling;
use crate::hub::Reference;
use crate::kv::store::disk::Scope;
use crate::kv::store::form::Form;
use crate::kv::store::shared::mooncake::MooncakeConfig;
use crate::model::OpsKind;
use crate::request::constraint::FormatChoice;
use crate::scheduler::pace::Beside;
use crate::server::auth::NodeToken;
use crate::server::role::Role;
use address::{kv_listen, resolve};
pub use error::ConfigError;
pub use model::ModelSource;
pub use packed::PackedWeights;
use packed::parse_packed;
use pool::PoolArgs;
use shared::SharedArgs;
use tiers::TierArgs;

/// Where the node token is read from when no file is named.
pub(crate) const TOKEN_ENV: &str = "HOMING_NODE_TOKEN";

/// The Homing inference engine.
#[derive(Debug, Parser)]
#[command(name = "homing-engine", version, about, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve a model over OpenAI's API.
    ///
    /// Once the model is loaded, one JSON line on stdout says where: listening, events, replay,
    /// model, pid, kv_blocks, max_model_len. Logs and progress go to stderr. SIGTERM or SIGINT
    /// drains: running requests finish (up to --drain-s), new ones are refused, /health turns 503.
    Serve(Box<ServeArgs>),
    /// Bring a model of the Hugging Face hub into the cache that huggingface_hub uses, and print its path.
    ///
    /// HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_CACHE and HF_HUB_OFFLINE are respected. What was cut is
    /// continued; every file is checked before it appears.
    Fetch(FetchArgs),
    /// Look after the KV blocks that nodes keep on disks.
    #[command(subcommand)]
    Kv(KvCommand),
}

#[derive(Debug, Subcommand)]
enum KvCommand {
    /// Overwrite the blocks of one tenant, or all, in the folder of a node that does not run.
    ///
    /// Prints one JSON line: {"wiped": 42}.
    Wipe(WipeArgs),
}

#[derive(Debug, Args)]
struct FetchArgs {
    /// The model: hf:org/repo for a checkpoint or the only GGUF file, hf:org/repo/file.gguf; @revision
    /// behind either.
    model: Reference,
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("scope").required(true).args(["salt", "unsalted", "everything"]))]
struct WipeArgs {
    /// The folder that was given to `serve`.
    #[arg(long, value_name = "DIR")]
    kv_disk: PathBuf,
    /// Blocks of this cache salt.
    #[arg(long, value_name = "SALT")]
    salt: Option<String>,
    /// Blocks without a cache salt.
    #[arg(long)]
    unsalted: bool,
    /// All blocks.
    #[arg(long)]
    everything: bool,
}

#[derive(Debug, Args)]
struct ServeArgs {
    /// The model (Llama, Mistral, Qwen2, Qwen3): a GGUF file (F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0,
    /// Q5_1, Q4_K, Q5_K or Q6_K), a folder with config.json and safetensors (F32, F16, BF16), or
    /// `hf:org/repo[/file][@revision]` on the hub, which is fetched first.
    #[arg(long, value_name = "MODEL")]
    model: ModelSource,
    /// Where weights are kept as the kernels want them, so that the next start is quick: beside the
    /// model's file, off, or a folder.
    #[arg(long, value_name = "WHERE", default_value = "beside", value_parser = parse_packed)]
    packed_weights: PackedWeights,
    /// Address to listen at; port 0 takes a free one. Beyond loopback a node token is demanded.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8000")]
    listen: String,
    /// Threads that compute; all cores if not given.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    #[command(flatten)]
    pool: PoolArgs,
    #[command(flatten)]
    tiers: TierArgs,
    #[command(flatten)]
    shared: SharedArgs,
    /// Publish KV events at this ZMQ endpoint, e.g. tcp://127.0.0.1:5557; port 0 takes a free one.
    /// Events carry token ids in plain: loopback, or a private network.
    #[arg(long, value_name = "ENDPOINT", value_parser = parse_endpoint)]
    events: Option<String>,
    /// Answer replay requests for KV events at this ZMQ endpoint.
    #[arg(long, value_name = "ENDPOINT", value_parser = parse_endpoint, requires = "events")]
    replay: Option<String>,
    /// Batches of KV events kept for replay; older history is replaced by a snapshot.
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    replay_batches: usize,
    /// What the node is for: prefill computes prompts that others decode, decode goes on from prompts that
    /// others computed, mixed does both. Other roles than mixed need a node token; see
    /// docs/disaggregation.md.
    #[arg(long, value_enum, default_value_t = Role::Mixed)]
    role: Role,
    /// Give KV blocks out to other nodes at this address; port 0 takes a free one. Nodes on this host use a
    /// socket of their own. Only where there is a node token, from which the keys of what travels are
    /// made: loopback, or a private network.
    #[arg(long, value_name = "ENDPOINT", default_value = "tcp://127.0.0.1:0", value_parser = parse_endpoint)]
    kv_listen: String,
    /// Id of the model in the API; if not given the file's name without .gguf, the folder's name, or
    /// org/repo.
    #[arg(long, value_name = "ID")]
    model_id: Option<String>,
    /// File with the node token that every caller must present (/health excepted). Without it the
    /// token is taken from the environment variable HOMING_NODE_TOKEN, if set.
    #[arg(long, value_name = "FILE")]
    node_token_file: Option<PathBuf>,
    /// Kernels: cpu (quantised, chosen for this processor) or reference (slow f32, for tests).
    #[arg(long, value_enum, default_value_t = Ops::Cpu)]
    ops: Ops,
    /// Tokens computed in one step at most: larger is faster for long prompts, smaller keeps
    /// running answers smooth meanwhile.
    #[arg(long, value_name = "N", default_value_t = 256)]
    step_tokens: usize,
    /// How much of a prompt is computed in a step in which others decode: paced holds it back so that
    /// the step takes about twice as long at most (longer where more prompts than answers of the same
    /// cache salt wait), unpaced computes all that --step-tokens leaves.
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Beside::Paced)]
    prefill_beside_decode: Beside,
    /// Requests that may wait; more are refused with 503 and Retry-After.
    #[arg(long, value_name = "N", default_value_t = 256)]
    queue: usize,
    /// How the model writes tool calls: hermes, llama3, mistral, deepseek or kimi. Taken from the
    /// model's chat template if not given.
    #[arg(long, value_name = "FORMAT", value_parser = parse_tool_format)]
    tool_format: Option<ToolFormat>,
    /// How the model writes its reasoning. Taken from the model's chat template if not given.
    #[arg(long, value_enum, value_name = "FORMAT")]
    reasoning_format: Option<ReasoningFlag>,
    /// How /v1/embeddings makes one vector of a text, where a request does not say: the mean of
    /// its tokens' vectors, or the last one.
    #[arg(long, value_enum, default_value_t = PoolingFlag::Mean)]
    pooling: PoolingFlag,
    /// Bytes of a request body accepted.
    #[arg(long, value_name = "SIZE", default_value = "32MiB", value_parser = parse_size)]
    body_max: u64,
    /// Seconds a client may be silent while it sends a request.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = parse_seconds)]
    read_timeout_s: Duration,
    /// Seconds that running requests get to finish at SIGTERM.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = parse_seconds)]
    drain_s: Duration,
    /// Exit at once, with code 0, when stdin reaches its end: ties the node to its parent.
    #[arg(long)]
    exit_with_stdin: bool,
    /// Report load progress as JSON lines on stderr: {"progress":0.42}.
    #[arg(long)]
    progress_json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Ops {
    Cpu,
    Reference,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ReasoningFlag {
    /// <think>…</think>
    Think,
    /// ◁think▷…◁/think▷
    Kimi,
    /// `[THINK]…[/THINK]`
    Mistral,
    /// None: such text is content.
    None,
}

impl ReasoningFlag {
    fn format(self) -> Option<ReasoningFormat> {
        match self {
            Self::Think => Some(ReasoningFormat::Think),
            Self::Kimi => Some(ReasoningFormat::KimiThink),
            Self::Mistral => Some(ReasoningFormat::Mistral),
            Self::None => None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PoolingFlag {
    Mean,
    Last,
}

/// A checked configuration.
#[derive(Debug)]
pub struct Config {
    /// The model.
    pub model: ModelSource,
    /// Where its packed weights are kept.
    pub packed_weights: PackedWeights,
    /// Its id in the API.
    pub model_id: String,
    /// Where to listen.
    pub listen: SocketAddr,
    /// Threads that compute.
    pub threads: usize,
    /// Bytes of the KV pool.
    pub kv_memory_bytes: u64,
    /// Bytes of the host tier below it.
    pub kv_host_bytes: u64,
    /// The disk tier below that one.
    pub kv_disk: Option<DiskConfig>,
    /// The shared tier beside the disk.
    pub kv_shared: Option<MooncakeConfig>,
    /// How blocks are kept below the pool.
    pub kv_tier_form: Form,
    /// Where to publish events.
    pub events: Option<String>,
    /// Where to replay them.
    pub replay: Option<String>,
    /// Batches kept for replay.
    pub replay_batches: usize,
    /// Demanded of callers.
    pub token: Option<NodeToken>,
    /// What the node is for.
    pub role: Role,
    /// Where blocks are given out.
    pub kv_listen: SocketAddr,
    /// Kernels.
    pub ops: OpsKind,
    /// Tokens in one step.
    pub step_tokens: usize,
    /// What prompts may take of steps in which others decode.
    pub beside_decode: Beside,
    /// Requests that may wait.
    pub queue_max: usize,
    /// How answers are written.
    pub formats: FormatChoice,
    /// How tokens' vectors become one.
    pub pooling: Pooling,
    /// Bytes of a body.
    pub body_bytes_max: usize,
    /// Silence allowed while a request is read.
    pub read_timeout: Duration,
    /// Time to finish at shutdown.
    pub drain: Duration,
    /// Exit when stdin ends.
    pub exit_with_stdin: bool,
    /// Progress as JSON lines.
    pub progress_json: bool,
}

/// Where the disk tier lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskConfig {
    /// The folder.
    pub dir: PathBuf,
    /// What it may take.
    pub bytes: u64,
}

/// What the command line asks for.
#[derive(Debug)]
pub enum Task {
    /// Serve a model.
    Serve(Box<Config>),
    /// Bring a model from the hub.
    Fetch(Reference),
    /// Overwrite the blocks of a scope in a folder.
    Wipe(PathBuf, Scope),
}

impl Cli {
    /// Checks every value.
    pub fn task(self) -> Result<Task, ConfigError> {
        match self.command {
            Command::Serve(args) => Ok(Task::Serve(Box::new(args.config()?))),
            Command::Fetch(args) => Ok(Task::Fetch(args.model)),
            Command::Kv(KvCommand::Wipe(args)) => Ok(args.task()),
        }
    }
}

impl WipeArgs {
    fn task(self) -> Task {
        let scope = match self.salt {
            Some(salt) => Scope::Salt(salt),
            None if self.unsalted => Scope::Unsalted,
            None => Scope::Everything,
        };
        Task::Wipe(self.kv_disk, scope)
    }
}

impl ServeArgs {
    fn config(self) -> Result<Config, ConfigError> {
        let args = self;
        let listen = resolve(&args.listen)?;
        let token = token(args.node_token_file.as_deref())?;
        if !listen.ip().is_loopback() && token.is_none() {
            return Err(ConfigError::TokenDemanded { listen });
        }
        if args.role != Role::Mixed && token.is_none() {
            let role = args.role.as_str();
            return Err(ConfigError::RoleToken { role });
        }
        let ops = args.pool.ops(args.ops)?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let in_range = |flag, found: usize, most: usize| {
            let allowed = format!("between 1 and {most}");
            let value = (1..=most).contains(&found).then_some(found);
            value.ok_or(ConfigError::Value {
                flag,
                found: found.to_string(),
                allowed,
            })
        };
        Ok(Config {
            model_id: model_id(&args)?,
            model: args.model,
            packed_weights: args.packed_weights,
            listen,
            threads: in_range("threads", args.threads.unwrap_or(cores), 1024)?,
            kv_memory_bytes: args.pool.kv_memory,
            kv_host_bytes: args.tiers.kv_host_memory,
            kv_shared: args
                .shared
                .config(args.tiers.kv_host_memory, token.as_ref())?,
            kv_tier_form: args.tiers.form(ops.kv_dtype())?,
            kv_disk: args.tiers.disk()?,
            events: args.events,
            replay: args.replay,
            replay_batches: in_range("replay-batches", args.replay_batches, 10_000_000)?,
            token,
            role: args.role,
            kv_listen: kv_listen(&args.kv_listen)?,
            ops,
            step_tokens: in_range("step-tokens", args.step_tokens, 1 << 20)?,
            beside_decode: args.prefill_beside_decode,
            queue_max: in_range("queue", args.queue, 1024)?,
            formats: FormatChoice {
                tools: args.tool_format,
                reasoning: args.reasoning_format.map(ReasoningFlag::format),
            },
            pooling: match args.pooling {
                PoolingFlag::Mean => Pooling::Mean,
                PoolingFlag::Last => Pooling::Last,
            },
            body_bytes_max: in_range("body-max", args.body_max as usize, 1 << 30)?,
            read_timeout: args.read_timeout_s,
            drain: args.drain_s,
            exit_with_stdin: args.exit_with_stdin,
            progress_json: args.progress_json,
        })
    }
}

fn model_id(args: &ServeArgs) -> Result<String, ConfigError> {
    let own = || args.model.model_id();
    let id = args.model_id.clone().unwrap_or_else(own);
    let printable = |c: char| !c.is_control() && !c.is_whitespace();
    if (1..=256).contains(&id.len()) && id.chars().all(printable) {
        return Ok(id);
    }
    let allowed = "1 to 256 bytes without white space or control characters".to_owned();
    Err(ConfigError::Value {
        flag: "model-id",
        found: format!("{id:?}"),
        allowed,
    })
}

fn token(file: Option<&std::path::Path>) -> Result<Option<NodeToken>, ConfigError> {
    let (flag, text) = match file {
        Some(path) => {
            let text = std::fs::read_to_string(path).map_err(|source| ConfigError::TokenFile {
                path: path.to_owned(),
                source,
            })?;
            ("node-token-file", text)
        }
        None => match std::env::var(TOKEN_ENV) {
            Ok(text) => (TOKEN_ENV, text),
            Err(_) => return Ok(None),
        },
    };
    let found = "empty".to_owned();
    let allowed = "a secret of at least one character".to_owned();
    NodeToken::new(&text).map(Some).ok_or(ConfigError::Value {
        flag,
        found,
        allowed,
    })
}

/// Bytes from `1048576`, `512MiB`, `2GiB`; units of 1000 are refused, since half the readers would
/// take them for 1024.
fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim() {
        "" | "B" => Some(0),
        "KiB" => Some(10),
        "MiB" => Some(20),
        "GiB" => Some(30),
        _ => None,
    };
    let bytes = number
        .parse::<u64>()
        .ok()
        .zip(shift)
        .and_then(|(number, shift)| {
            let bytes = u128::from(number) << shift;
            u64::try_from(bytes).ok()
        });
    bytes.ok_or_else(|| "use a number of bytes, or one with KiB, MiB or GiB: 512MiB".to_owned())
}

fn parse_tool_format(text: &str) -> Result<ToolFormat, String> {
    text.parse()
        .map_err(|error: answer::UnknownFormat| error.to_string())
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text
        .parse::<f64>()
        .ok()
        .filter(|seconds| (0.0..=86_400.0).contains(seconds));
    let seconds = seconds.ok_or_else(|| "use seconds between 0 and 86400".to_owned())?;
    Ok(Duration::from_secs_f64(seconds))
}

/// `tcp://HOST:PORT`, with `*` for all addresses as ZMQ has it.
fn parse_endpoint(text: &str) -> Result<String, String> {
    let address = text.strip_prefix("tcp://");
    let parts = address.and_then(|address| address.rsplit_once(':'));
    match parts {
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => {
            let host = if host == "*" { "0.0.0.0" } else { host };
            Ok(format!("tcp://{host}:{port}"))
        }
        _ => Err("use tcp://HOST:PORT, such as tcp://127.0.0.1:5557".to_owned()),
    }
}

#[cfg(test)]
mod tests;
