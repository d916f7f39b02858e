//! What stands between the agents and the nodes, and when is it ready?

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::Request;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Args, Cell};
use crate::chat::{self, Turn};
use crate::error::LoadError;
use crate::gateway_bench::fronts::{free_address, make_key};
use crate::http::{Connection, Target};
use crate::process::Program;

/// A program that does not answer by then will not.
const START_TIMEOUT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(50);

/// Which front.
#[derive(Clone, Debug)]
pub(super) enum Kind {
    Homing,
    /// With these flags besides its policy.
    Smg(String),
}

impl Kind {
    pub(super) fn name(&self) -> String {
        match self {
            Self::Homing => "homing".into(),
            Self::Smg(flags) if flags.is_empty() => "smg".into(),
            Self::Smg(flags) => format!("smg {flags}"),
        }
    }
}

/// The simulated nodes of one run.
pub(super) struct Fleet {
    _program: Program,
    pub(super) model: String,
    control: Target,
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
struct Printed {
    model: String,
    control: String,
    nodes: Vec<Node>,
}

#[derive(Clone, Deserialize)]
struct Node {
    id: String,
    role: String,
    url: String,
    events: String,
    replay: String,
}

/// What one node has counted.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub(super) struct Counted {
    pub(super) prompt_tokens: u64,
    pub(super) cached_tokens: u64,
    pub(super) one_cache_tokens: u64,
}

impl Fleet {
    /// Starts them in one process.
    pub(super) fn start(args: &Args, cell: Cell, folder: &Path) -> Result<Self, LoadError> {
        let own = std::env::current_exe().map_err(LoadError::system("finding this program"))?;
        let mut command = Command::new(own);
        command.args(["node", "--exit-with-stdin", "--one-cache"]);
        command.args(["--events", "127.0.0.1:0", "--replay", "127.0.0.1:0"]);
        command.arg("--gguf").arg(&args.gguf);
        for (flag, value) in [
            ("--nodes", args.nodes.to_string()),
            ("--capacity", cell.capacity.to_string()),
            ("--prefill-rate", args.prefill_rate.to_string()),
            ("--speed", args.speed.to_string()),
            ("--answer-tokens", args.answer_tokens.to_string()),
            ("--prefill-nodes", cell.prefill_nodes.to_string()),
            (
                "--handover-gb-per-s",
                args.apart.handover_gb_per_s.to_string(),
            ),
            ("--chunk", args.apart.chunk.to_string()),
        ] {
            command.arg(flag).arg(value);
        }
        let program = Program::start("the nodes", &mut command, &folder.join("nodes.log"))?;
        let line = program.line(START_TIMEOUT)?;
        let printed: Printed = serde_json::from_str(&line)
            .map_err(|e| program.trouble(&format!("printed {line:?}: {e}")))?;
        Ok(Self {
            _program: program,
            model: printed.model,
            control: Target::parse(&format!("{}/nodes", printed.control))?,
            nodes: printed.nodes,
        })
    }

    /// What each node has counted so far.
    pub(super) async fn counts(&self) -> Result<Vec<Counted>, LoadError> {
        #[derive(Deserialize)]
        struct Listed {
            nodes: Vec<Counted>,
        }
        let value = get(&self.control, "").await?;
        let listed: Listed = serde_json::from_value(value)
            .map_err(|e| LoadError::program("the nodes", e.to_string()))?;
        Ok(listed.nodes)
    }
}

/// A front that runs.
pub(super) struct Standing {
    pub(super) url: String,
    pub(super) key: Option<String>,
    program: Program,
    /// Where the gateway says how its nodes are.
    admin: Option<Target>,
}

impl Standing {
    pub(super) fn start(
        args: &Args,
        kind: &Kind,
        fleet: &Fleet,
        folder: &Path,
    ) -> Result<Self, LoadError> {
        match (kind, &args.smg) {
            (Kind::Smg(flags), Some(smg)) => start_smg(smg, flags, fleet, folder),
            _ => start_homing(args, fleet, folder),
        }
    }

    /// Waits until it answers, and where it can be asked, until it believes what every node says.
    pub(super) async fn wait_ready(&self, fleet: &Fleet) -> Result<(), LoadError> {
        let deadline = Instant::now() + START_TIMEOUT;
        while let Err(why) = self.probe(fleet).await {
            if Instant::now() > deadline {
                return Err(self.program.trouble(&why));
            }
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }

    async fn probe(&self, fleet: &Fleet) -> Result<(), String> {
        if let Some(admin) = &self.admin {
            let value = get(admin, "nodes").await.map_err(|e| e.to_string())?;
            let nodes = value["nodes"].as_array().map_or(&[][..], Vec::as_slice);
            let ready = |node: &&Value| node["state"] == "up" && node["trust"] == "exact";
            let ready = nodes.iter().filter(ready).count();
            return match ready == fleet.nodes.len() {
                true => Ok(()),
                false => Err(format!("{ready} nodes are ready: {value}")),
            };
        }
        let target = Target::parse(&self.url).map_err(|e| e.to_string())?;
        let turn = Turn {
            endpoint: "chat/completions",
            body: json!({"model": fleet.model, "max_tokens": 1,
                         "messages": [{"role": "user", "content": "Hello"}]}),
            headers: Vec::new(),
            timeout: Duration::from_secs(5),
        };
        let outcome = chat::send(&mut Connection::new(&target), &target, None, &turn).await;
        outcome
            .failure
            .map_or(Ok(()), |failure| Err(failure.message))
    }
}

/// A JSON value from a program of ours.
async fn get(target: &Target, endpoint: &str) -> Result<Value, LoadError> {
    let trouble = |why: String| LoadError::program(target.authority(), why);
    let path = target.path(endpoint);
    let request = Request::get(path.trim_end_matches('/'))
        .header("host", target.authority())
        .body(Full::new(Bytes::new()))
        .map_err(|e| trouble(e.to_string()))?;
    let sent = Connection::new(target).send(request).await;
    let response = sent.map_err(|e| trouble(format!("{e:?}")))?;
    let body = response.into_body().collect().await;
    let body = body.map_err(|e| trouble(e.to_string()))?.to_bytes();
    serde_json::from_slice(&body).map_err(|e| trouble(e.to_string()))
}

/// As its users run it before one pool; it logs no line a request, which is in its favour.
fn start_smg(smg: &Path, flags: &str, fleet: &Fleet, folder: &Path) -> Result<Standing, LoadError> {
    let (address, metrics) = (free_address()?, free_address()?);
    let mut command = Command::new(smg);
    command.arg("launch").args(["--policy", "cache_aware"]);
    command.args(["--host", "127.0.0.1", "--log-level", "warn"]);
    command.arg("--port").arg(address.port().to_string());
    command.arg("--worker-urls");
    command.args(fleet.nodes.iter().map(|node| &node.url));
    command.args(["--prometheus-host", "127.0.0.1"]);
    let port = metrics.port().to_string();
    command.arg("--prometheus-port").arg(port);
    command.args(flags.split_whitespace());
    let program = Program::start("smg", &mut command, &folder.join("smg.log"))?;
    Ok(Standing {
        url: url(address),
        key: None,
        program,
        admin: None,
    })
}

fn start_homing(args: &Args, fleet: &Fleet, folder: &Path) -> Result<Standing, LoadError> {
    let (address, admin) = (free_address()?, free_address()?);
    let data = folder.join("data");
    let gguf = args
        .gguf
        .canonicalize()
        .map_err(LoadError::file(&args.gguf))?;
    let mut config = format!(
        "listen = \"{address}\"\nadmin = \"{admin}\"\ndata = {:?}\n\n[[models]]\nid = {:?}\n\
         gguf = {:?}\n\n[disaggregation]\ntransfer_bytes_per_s = {:.0}\n\n[policy]\n{}\n",
        data.display().to_string(),
        fleet.model,
        gguf.display().to_string(),
        args.apart.handover_gb_per_s * 1e9 * args.speed,
        args.policy.join("\n"),
    );
    for Node {
        id,
        role,
        url,
        events,
        replay,
    } in &fleet.nodes
    {
        config += &format!(
            "\n[[nodes]]\nid = {id:?}\nrole = {role:?}\nurl = {url:?}\nevents = {events:?}\n\
             replay = {replay:?}\n"
        );
    }
    let path = folder.join("homing.toml");
    std::fs::write(&path, config).map_err(LoadError::file(&path))?;
    let key = make_key(&args.homing, &data)?;
    let mut command = Command::new(&args.homing);
    command.arg("gateway").arg("--config").arg(&path);
    let program = Program::start("homing", &mut command, &folder.join("homing.log"))?;
    Ok(Standing {
        url: url(address),
        key: Some(key),
        program,
        admin: Some(Target::parse(&format!("http://{admin}/admin"))?),
    })
}

fn url(address: SocketAddr) -> String {
    format!("http://{address}/v1")
}
