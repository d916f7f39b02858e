//! What stands there during the check, and what does it say of itself?

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use hyper::Method;
use rand::RngExt;
use rustix::process::Signal;
use serde_json::{Value, json};

use super::Args;
use super::calls::{Answer, exchange, get, metric};
use super::patience::Patience;
use crate::error::LoadError;
use crate::gateway_bench::fronts::free_address;
use crate::process::{Program, family, is_alive, signal_process};

/// vLLM imports for half a minute before it writes anything; several times that on busy cores.
const START_STANDSTILL: Duration = Duration::from_secs(300);
/// A step of vLLM computes a prompt of at most two thousand tokens: some twenty seconds on two cores of
/// its own.
const STEP_STANDSTILL: Duration = Duration::from_secs(300);
/// The gateway looks at a node several times a second, and reads a tokenizer before that.
const READY_STANDSTILL: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(50);
/// Between two looks at whether vLLM still computes.
const STEPS_POLL: Duration = Duration::from_secs(5);
/// The node in the gateway's configuration.
const NODE: &str = "vllm";
/// In the gateway's configuration: whatever the machine's speed, each turn goes to the node at once
/// and is waited for. The check itself says when that is too long.
const PATIENT: &str = "[limits]\nrequest_timeout_s = 86400\n\n[policy]\nnode_queue_s = 3600\n";
/// Longest prompt and answer together. Eight of them fill the smallest pool several times.
const CONTEXT_MAX: usize = 2048;

/// A real vLLM, and where it can be reached in each of its lives.
pub(super) struct Vllm {
    python: PathBuf,
    model: PathBuf,
    blocks: usize,
    pub(super) served: String,
    folder: PathBuf,
    api: SocketAddr,
    events: SocketAddr,
    replay: SocketAddr,
    lives: usize,
    program: Option<Program>,
    /// Its process and those that this has started, which outlive it if it is killed.
    family: Vec<u32>,
}

impl Drop for Vllm {
    fn drop(&mut self) {
        self.program = None;
        for pid in self.family.drain(..).filter(|pid| is_alive(*pid)) {
            signal_process(pid, Signal::KILL);
        }
    }
}

impl Vllm {
    pub(super) async fn start(args: &Args, folder: &Path) -> Result<Self, LoadError> {
        let stem = args.gguf.file_stem().unwrap_or_default();
        let mut vllm = Self {
            python: args.python.clone(),
            model: args.model.clone(),
            blocks: args.blocks,
            served: stem.to_string_lossy().into_owned(),
            folder: folder.to_owned(),
            api: lasting_address()?,
            events: lasting_address()?,
            replay: lasting_address()?,
            lives: 0,
            program: None,
            family: Vec::new(),
        };
        vllm.begin().await?;
        Ok(vllm)
    }

    /// Ends its process, and begins another at the same addresses.
    pub(super) async fn restart(&mut self) -> Result<(), LoadError> {
        self.program = None;
        self.begin().await
    }

    async fn begin(&mut self) -> Result<(), LoadError> {
        self.lives += 1;
        let log = self.file("vllm", "log");
        let program = Program::start("vllm", &mut self.command(), &log)?;
        let program = self.program.insert(program);
        let mut patience = Patience::new(START_STANDSTILL, 0);
        let health = format!("http://{}/health", self.api);
        while let Err(why) = get(&health).await {
            if patience.is_over(program.stderr().len()) {
                return Err(program.trouble(&format!("does not come up: {why}")));
            }
            if let Ok(code) = program.wait(Duration::ZERO) {
                return Err(program.trouble(&format!("ended with code {code:?}")));
            }
            tokio::time::sleep(POLL * 10).await;
        }
        self.family = family(program.pid());
        Ok(())
    }

    /// An answer of the model, however long it takes while vLLM computes.
    pub(super) async fn answer(
        &self,
        url: &str,
        headers: &[(&str, &str)],
        body: &Value,
    ) -> Result<Answer, LoadError> {
        tokio::select! {
            answer = exchange((Method::POST, url), headers, Some(body)) => answer,
            standstill = self.standstill() => Err(standstill),
        }
    }

    /// Returns only when vLLM has taken no step for too long.
    async fn standstill(&self) -> LoadError {
        let url = self.url("metrics");
        let mut steps = 0;
        let mut patience = Patience::new(STEP_STANDSTILL, steps);
        loop {
            tokio::time::sleep(STEPS_POLL).await;
            if let Ok(metrics) = get(&url).await {
                steps = metric(&metrics, "vllm:iteration_tokens_total_count");
            }
            if patience.is_over(steps) {
                return self.trouble(&format!("has taken no step in {STEP_STANDSTILL:?}"));
            }
        }
    }

    /// An error about it, with the end of its log.
    pub(super) fn trouble(&self, what: &str) -> LoadError {
        match &self.program {
            Some(program) => program.trouble(what),
            None => LoadError::program("vllm", what),
        }
    }

    /// Where a file of its present life is kept.
    pub(super) fn file(&self, stem: &str, extension: &str) -> PathBuf {
        self.folder
            .join(format!("{stem}-{}.{extension}", self.lives))
    }

    /// Whether its process is gone.
    pub(super) fn has_ended(&self) -> bool {
        let program = self.program.as_ref();
        program.is_none_or(|program| !is_alive(program.pid()))
    }

    fn command(&self) -> Command {
        let events = json!({
            "enable_kv_cache_events": true,
            "publisher": "zmq",
            // The star makes vLLM bind; without one it would connect.
            "endpoint": format!("tcp://*:{}", self.events.port()),
            "replay_endpoint": format!("tcp://*:{}", self.replay.port()),
            "topic": "kv",
        });
        let mut command = Command::new(&self.python);
        // The module and not the command: `vllm serve` looks for a package called vllm.
        command.args(["-m", "vllm.entrypoints.openai.api_server"]);
        command.arg("--model").arg(&self.model);
        command.args(["--served-model-name", &self.served]);
        command.args([
            "--host",
            "127.0.0.1",
            "--port",
            &self.api.port().to_string(),
        ]);
        command.args(["--num-gpu-blocks-override", &self.blocks.to_string()]);
        command.args(["--max-model-len", &CONTEXT_MAX.to_string()]);
        // Without instructions for bfloat16, which few CPUs have, it is several times slower.
        command.args(["--dtype", "float32"]);
        // The CPU's attention takes only multiples of 32.
        command.args([
            "--block-size",
            "32",
            "--max-num-seqs",
            "8",
            "--enforce-eager",
        ]);
        command.args([
            "--enable-prompt-tokens-details",
            "--disable-uvicorn-access-log",
        ]);
        command.args(["--kv-events-config", &events.to_string()]);
        for (name, value) in [
            // For POST /reset_prefix_cache.
            ("VLLM_SERVER_DEV_MODE", "1"),
            ("VLLM_CPU_KVCACHE_SPACE", "1"),
            ("VLLM_LOGGING_STREAM", "ext://sys.stderr"),
            ("VLLM_NO_USAGE_STATS", "1"),
            ("HF_HUB_OFFLINE", "1"),
        ] {
            command.env(name, value);
        }
        command
    }

    pub(super) fn url(&self, path: &str) -> String {
        format!("http://{}/{path}", self.api)
    }

    pub(super) fn events(&self) -> String {
        format!("tcp://{}", self.events)
    }
}

/// An address that stays free while vLLM takes half a minute to bind it: none of those that the
/// system gives to outgoing connections (32768 and up).
fn lasting_address() -> Result<SocketAddr, LoadError> {
    let mut random = rand::rng();
    let tries =
        (0..100).map(|_| TcpListener::bind(("127.0.0.1", random.random_range(15_000..30_000))));
    let bound = tries
        .flatten()
        .next()
        .and_then(|listener| listener.local_addr().ok());
    bound.ok_or_else(|| LoadError::program("vllm", "no port between 15000 and 30000 is free"))
}

/// The gateway before it.
pub(super) struct Gateway {
    program: Program,
    api: SocketAddr,
    admin: SocketAddr,
}

impl Gateway {
    pub(super) fn start(args: &Args, vllm: &Vllm, folder: &Path) -> Result<Self, LoadError> {
        let (api, admin) = (free_address()?, free_address()?);
        let gguf = args
            .gguf
            .canonicalize()
            .map_err(LoadError::file(&args.gguf))?;
        let config = format!(
            "listen = \"{api}\"\nadmin = \"{admin}\"\ndata = {:?}\n\n[[models]]\nid = {:?}\n\
             gguf = {:?}\n\n{PATIENT}\n[[nodes]]\nid = \"{NODE}\"\nurl = \"http://{}\"\n\
             events = \"tcp://{}\"\nreplay = \"tcp://{}\"\n",
            data(folder),
            vllm.served,
            gguf,
            vllm.api,
            vllm.events,
            vllm.replay,
        );
        let path = folder.join("homing.toml");
        std::fs::write(&path, config).map_err(LoadError::file(&path))?;
        let mut command = Command::new(&args.homing);
        command.arg("gateway").arg("--config").arg(&path);
        let program = Program::start("homing", &mut command, &folder.join("homing.log"))?;
        Ok(Self {
            program,
            api,
            admin,
        })
    }

    pub(super) fn url(&self, path: &str) -> String {
        format!("http://{}/{path}", self.api)
    }

    /// What the admin API says under a path.
    pub(super) async fn admin(&self, path: &str) -> Result<Value, LoadError> {
        get(&format!("http://{}/{path}", self.admin)).await
    }

    /// How the node is, as the gateway sees it.
    pub(super) async fn node(&self) -> Result<Value, LoadError> {
        Ok(self.admin("admin/nodes").await?["nodes"][0].clone())
    }

    /// Waits until it serves and believes all that the node says.
    pub(super) async fn wait_ready(&self) -> Result<(), LoadError> {
        let mut patience = Patience::new(READY_STANDSTILL, Value::Null);
        loop {
            let node = self.node().await.unwrap_or_default();
            if is_ready(&node) {
                return Ok(());
            }
            if patience.is_over(node["state"].clone()) {
                return Err(self
                    .program
                    .trouble(&format!("the node is not ready: {node}")));
            }
            tokio::time::sleep(POLL).await;
        }
    }
}

/// Whether the gateway sends turns to the node and believes all that it says.
pub(super) fn is_ready(node: &Value) -> bool {
    node["state"] == "up" && node["trust"] == "exact"
}

fn data(folder: &Path) -> PathBuf {
    folder.join("data")
}

/// Makes a tenant that may ask for debug headers, and a key of it.
pub(super) fn make_key(homing: &Path, folder: &Path, tenant: &str) -> Result<String, LoadError> {
    let call = |arguments: &[&str]| -> Result<String, LoadError> {
        let mut command = Command::new(homing);
        command.args(arguments).arg("--data").arg(data(folder));
        let output = command
            .output()
            .map_err(|e| LoadError::program("homing", e.to_string()))?;
        match output.status.success() {
            true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
            false => {
                let stderr = String::from_utf8_lossy(&output.stderr);
                Err(LoadError::program(
                    "homing",
                    format!("{arguments:?}: {stderr}"),
                ))
            }
        }
    };
    call(&["tenant", "create", tenant, "--debug"])?;
    let printed = call(&["key", "create", "--tenant", tenant])?;
    let key = printed
        .split_whitespace()
        .find(|word| word.starts_with("sk-"));
    key.map(str::to_owned)
        .ok_or_else(|| LoadError::program("homing", format!("no key in {printed:?}")))
}
