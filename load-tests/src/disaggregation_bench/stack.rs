//! Which programs stand before the load, and what have they counted?
//!
//! Engine nodes of one thread each and the gateway before them, all started anew, as an operator
//! would start them by hand: a configuration file, a node token, a tenant with a key.

use std::io::Write as _;
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use hyper::Method;
use serde_json::Value;

use super::{Args, Arrangement};
use crate::error::LoadError;
use crate::gateway_bench::fronts::{free_address, make_key};
use crate::http::Target;
use crate::process::{Program, cpu_seconds};
use crate::vllm_check::calls::{call, get, metric};

/// A program that is not up by then will not come up.
const START_TIMEOUT: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(50);
/// The part of a node in an arrangement is fixed, so its id is its place.
const IDS: [&str; 2] = ["n1", "n2"];

/// One engine.
pub(super) struct Node {
    program: Program,
    role: &'static str,
    http: SocketAddr,
    events: SocketAddr,
    replay: SocketAddr,
}

impl Node {
    /// Starts it; [`Self::wait_ready`] says when it has loaded the model.
    pub(super) fn start(
        args: &Args,
        role: &'static str,
        flags: &[String],
        log: &Path,
        token: &str,
    ) -> Result<Self, LoadError> {
        let [http, events, replay] = [free_address()?, free_address()?, free_address()?];
        let mut command = Command::new(&args.engine);
        command.arg("serve").arg("--model").arg(&args.model);
        command.args(["--threads", "1", "--kv-memory", "1GiB", "--exit-with-stdin"]);
        command.args(["--role", role, "--listen", &http.to_string()]);
        command.args(["--events", &format!("tcp://{events}")]);
        command.args(["--replay", &format!("tcp://{replay}")]);
        command.args(flags).env("HOMING_NODE_TOKEN", token);
        let program = Program::start("a node", &mut command, log)?;
        Ok(Self {
            program,
            role,
            http,
            events,
            replay,
        })
    }

    pub(super) fn wait_ready(&self) -> Result<(), LoadError> {
        self.program.line(START_TIMEOUT).map(|_| ())
    }

    pub(super) fn target(&self) -> Result<Target, LoadError> {
        Target::parse(&format!("http://{}/v1", self.http))
    }

    pub(super) fn trouble(&self, what: &str) -> LoadError {
        self.program.trouble(what)
    }

    async fn counted(&self, name: &str, token: &str) -> Result<u64, LoadError> {
        let url = format!("http://{}/metrics", self.http);
        let bearer = format!("Bearer {token}");
        let headers = [("authorization", bearer.as_str())];
        let answer = call((Method::GET, &url), &headers, None).await?;
        Ok(metric(&answer.body, name))
    }
}

/// The gateway with its nodes.
pub(super) struct Stack {
    pub(super) target: Target,
    pub(super) key: String,
    gateway: Program,
    admin: String,
    nodes: Vec<Node>,
    token: String,
}

/// CPU seconds that programs have used so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cpu {
    pub(super) nodes: [f64; 2],
    pub(super) gateway: f64,
    pub(super) load: f64,
}

/// What the nodes say of their transfers.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Transfers {
    pub(super) received: u64,
    pub(super) failed: u64,
}

impl Stack {
    /// Starts an arrangement and waits until the gateway knows all of its nodes.
    pub(super) async fn start(
        args: &Args,
        arrangement: &Arrangement,
        model: &str,
        folder: &Path,
    ) -> Result<Self, LoadError> {
        let token = token();
        let mut nodes = Vec::new();
        for (number, (role, flags)) in arrangement.nodes().into_iter().enumerate() {
            let log = folder.join(format!("node-{number}.log"));
            nodes.push(Node::start(args, role, &flags, &log, &token)?);
        }
        for node in &nodes {
            node.wait_ready()?;
        }
        let (address, admin) = (free_address()?, free_address()?);
        let data = folder.join("data");
        let path = folder.join("homing.toml");
        let token_file = folder.join("token");
        write_private(&token_file, &token)?;
        let gguf = args.model.canonicalize();
        let gguf = gguf.map_err(LoadError::file(&args.model))?;
        let mut config = format!(
            "listen = \"{address}\"\nadmin = \"{admin}\"\ndata = {data:?}\n\
             node_token_file = {token_file:?}\n\n[[models]]\nid = {model:?}\ngguf = {gguf:?}\n\n\
             [disaggregation]\nstall = {:?}\n",
            args.stall
        );
        for (node, id) in nodes.iter().zip(IDS) {
            let Node {
                role,
                http,
                events,
                replay,
                ..
            } = node;
            config += &format!(
                "\n[[nodes]]\nid = {id:?}\nrole = {role:?}\nurl = \"http://{http}\"\n\
                 events = \"tcp://{events}\"\nreplay = \"tcp://{replay}\"\n"
            );
        }
        std::fs::write(&path, config).map_err(LoadError::file(&path))?;
        let key = make_key(&args.homing, &data)?;
        let mut command = Command::new(&args.homing);
        command.arg("gateway").arg("--config").arg(&path);
        let gateway = Program::start("homing", &mut command, &folder.join("homing.log"))?;
        let stack = Self {
            target: Target::parse(&format!("http://{address}/v1"))?,
            key,
            gateway,
            admin: format!("http://{admin}/admin/nodes"),
            nodes,
            token,
        };
        stack.wait_ready().await?;
        Ok(stack)
    }

    async fn wait_ready(&self) -> Result<(), LoadError> {
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            let why = match get(&self.admin).await {
                Ok(told) if self.is_ready(&told) => return Ok(()),
                Ok(told) => format!("not all nodes are ready: {told}"),
                Err(error) => error.to_string(),
            };
            if Instant::now() > deadline {
                return Err(self.gateway.trouble(&why));
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Whether all nodes are up, their caches known, and those with roles can hand over.
    fn is_ready(&self, told: &Value) -> bool {
        let nodes = told["nodes"].as_array().map_or(&[][..], Vec::as_slice);
        let ready = |node: &&Value| {
            let hands_over = !node["kv_transfer_bytes_per_s"].is_null();
            node["state"] == "up"
                && node["trust"] == "exact"
                && (node["role"] == "mixed" || hands_over)
        };
        nodes.iter().filter(ready).count() == self.nodes.len()
    }

    pub(super) fn cpu(&self) -> Cpu {
        let of = |at: usize| {
            self.nodes
                .get(at)
                .map_or(0.0, |node| cpu_seconds(node.program.pid()))
        };
        Cpu {
            nodes: [of(0), of(1)],
            gateway: cpu_seconds(self.gateway.pid()),
            load: cpu_seconds(std::process::id()),
        }
    }

    pub(super) async fn transfers(&self) -> Result<Transfers, LoadError> {
        let mut transfers = Transfers::default();
        for node in &self.nodes {
            let counted = async |name| node.counted(name, &self.token).await;
            transfers.received += counted("homing:kv_transfers_received_total").await?;
            transfers.failed += counted("homing:kv_transfers_failed_total").await?;
        }
        Ok(transfers)
    }
}

/// A node token that nobody else has.
pub(super) fn token() -> String {
    format!("{:032x}", rand::random::<u128>())
}

fn write_private(path: &PathBuf, text: &str) -> Result<(), LoadError> {
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    options
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .map_err(LoadError::file(path))
}
