//! What stands there during the check, and what does it say of itself?

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{HeaderMap, Method, Request};
use rand::RngExt;
use serde_json::{Value, json};

use super::Args;
use crate::error::LoadError;
use crate::gateway_bench::fronts::free_address;
use crate::http::{Connection, Target};
use crate::process::Program;

/// vLLM imports for half a minute before it loads anything.
const START_TIMEOUT: Duration = Duration::from_secs(300);
/// A prompt of a thousand tokens on two busy cores, and room.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(180);
const POLL: Duration = Duration::from_millis(50);
/// The node in the gateway's configuration.
const NODE: &str = "vllm";
/// Longest prompt and answer together. Eight of them fill the smallest pool several times.
const CONTEXT_MAX: usize = 2048;

/// A call that got an answer.
pub(super) struct Answer {
    pub(super) headers: HeaderMap,
    pub(super) body: Value,
}

/// One request of its own connection; a status that is no success is an error with what was said.
pub(super) async fn call(
    (method, url): (Method, &str),
    headers: &[(&str, &str)],
    body: Option<&Value>,
) -> Result<Answer, LoadError> {
    let trouble = |why: String| LoadError::program(url, why);
    let target = Target::parse(url)?;
    let path = url.splitn(4, '/').nth(3).unwrap_or_default();
    let mut request = Request::builder().method(method).uri(format!("/{path}"));
    for (name, value) in [
        ("host", target.authority()),
        ("content-type", "application/json"),
    ]
    .iter()
    .chain(headers)
    {
        request = request.header(*name, *value);
    }
    let body = body.map_or(Bytes::new(), |body| body.to_string().into());
    let request = request
        .body(Full::new(body))
        .map_err(|e| trouble(e.to_string()))?;
    let exchange = async {
        let mut connection = Connection::new(&target);
        let response = connection
            .send(request)
            .await
            .map_err(|e| format!("{e:?}"))?;
        let (head, body) = response.into_parts();
        let body = body.collect().await.map_err(|e| e.to_string())?.to_bytes();
        Ok::<_, String>((head, body))
    };
    let exchanged = tokio::time::timeout(ANSWER_TIMEOUT, exchange).await;
    let (head, body) = exchanged
        .map_err(|_| trouble("no answer".into()))?
        .map_err(trouble)?;
    let text = String::from_utf8_lossy(&body);
    if !head.status.is_success() {
        return Err(trouble(format!("{}: {text}", head.status)));
    }
    Ok(Answer {
        headers: head.headers,
        // What is no JSON is metrics or nothing.
        body: serde_json::from_str(&text).unwrap_or_else(|_| Value::String(text.into_owned())),
    })
}

pub(super) async fn get(url: &str) -> Result<Value, LoadError> {
    Ok(call((Method::GET, url), &[], None).await?.body)
}

/// The sum of a metric's samples in Prometheus text.
pub(super) fn metric(text: &Value, name: &str) -> u64 {
    let lines = text.as_str().unwrap_or_default().lines();
    let samples = lines.filter(|line| line.split(['{', ' ']).next() == Some(name));
    let values = samples.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
    values.sum::<f64>() as u64
}

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
        let log = self.folder.join(format!("vllm-{}.log", self.lives));
        let program = Program::start("vllm", &mut self.command(), &log)?;
        let program = self.program.insert(program);
        let deadline = Instant::now() + START_TIMEOUT;
        let health = format!("http://{}/health", self.api);
        while let Err(why) = get(&health).await {
            if Instant::now() > deadline {
                return Err(program.trouble(&format!("does not come up: {why}")));
            }
            if let Ok(code) = program.wait(Duration::ZERO) {
                return Err(program.trouble(&format!("ended with code {code:?}")));
            }
            tokio::time::sleep(POLL * 10).await;
        }
        Ok(())
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
             gguf = {:?}\n\n[[nodes]]\nid = \"{NODE}\"\nurl = \"http://{}\"\n\
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
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            let node = self.node().await.unwrap_or_default();
            if node["state"] == "up" && node["trust"] == "exact" {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(self
                    .program
                    .trouble(&format!("the node is not ready: {node}")));
            }
            tokio::time::sleep(POLL).await;
        }
    }
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
