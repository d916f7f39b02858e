//! What does a client talk to? A gateway before a scripted node, or `homing up` with a model.
//!
//! Both are real gateways, each with its data in a temporary folder; all is gone when the guard is
//! dropped.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::error::LoadError;
use crate::gateway_bench::fronts::{free_address, make_key};
use crate::http::{Connection, Target};
use crate::process::Program;

/// Loading a model on a busy machine; far above what it takes.
const START_TIMEOUT: Duration = Duration::from_secs(90);
/// The scripted model's name.
const SCRIPTED: &str = "scripted";
/// Names that coding agents ask for by themselves; `homing up` takes them too.
const ALIASES: &[&str] = &["claude-*", "gpt-*", "codex-*"];

/// What a client has to be told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// `http://…/v1`.
    pub url: String,
    /// A key of a tenant.
    pub key: String,
    /// The model's id.
    pub model: String,
}

/// A running gateway and its nodes.
pub struct Stack {
    /// Where it is.
    pub endpoint: Endpoint,
    _programs: Vec<Program>,
}

/// A gateway before a scripted node.
pub async fn scripted(homing: &Path, folder: &Path) -> Result<Stack, LoadError> {
    let load = homing.with_file_name("homing-load");
    let mut command = Command::new(load);
    command.args(["scripted-node", "--exit-with-stdin", "--model", SCRIPTED]);
    let node = Program::start("scripted-node", &mut command, &folder.join("node.log"))?;
    let node_url = node.line(START_TIMEOUT)?;
    let (address, data) = (free_address()?, folder.join("scripted"));
    let alias = |name| format!("\n[[aliases]]\nname = {name:?}\nmodel = {SCRIPTED:?}\n");
    let aliases: String = ALIASES.iter().map(alias).collect();
    let config = format!(
        "listen = \"{address}\"\ndata = {:?}\n\n[[models]]\nid = {SCRIPTED:?}\n\n\
         [[nodes]]\nid = {SCRIPTED:?}\nurl = {node_url:?}\n{aliases}",
        data.display().to_string()
    );
    let path = folder.join("homing.toml");
    std::fs::write(&path, config).map_err(LoadError::file(&path))?;
    let endpoint = Endpoint {
        url: format!("http://{address}/v1"),
        key: make_key(homing, &data)?,
        model: SCRIPTED.to_owned(),
    };
    let mut command = Command::new(homing);
    command.arg("gateway").arg("--config").arg(&path);
    let gateway = Program::start("homing gateway", &mut command, &folder.join("gateway.log"))?;
    wait_ready(&endpoint, &gateway).await?;
    Ok(Stack {
        endpoint,
        _programs: vec![gateway, node],
    })
}

/// `homing up` with two nodes of one thread each.
pub fn engine(homing: &Path, model: &Path, folder: &Path) -> Result<Stack, LoadError> {
    /// The line that `homing up --json` prints.
    #[derive(Deserialize)]
    struct Ready {
        url: String,
        api_key: String,
        model: String,
    }
    let mut command = Command::new(homing);
    command
        .args([
            "up",
            "--json",
            "--listen",
            "127.0.0.1:0",
            "--admin",
            "127.0.0.1:0",
        ])
        .args(["--nodes", "2", "--threads-per-node", "1", "--model"])
        .arg(model)
        .arg("--data")
        .arg(folder.join("engine"));
    let program = Program::start("homing up", &mut command, &folder.join("up.log"))?;
    let line = program.line(START_TIMEOUT)?;
    let ready: Ready = serde_json::from_str(&line)
        .map_err(|e| program.trouble(&format!("printed {line:?}: {e}")))?;
    let endpoint = Endpoint {
        url: ready.url,
        key: ready.api_key,
        model: ready.model,
    };
    Ok(Stack {
        endpoint,
        _programs: vec![program],
    })
}

/// Asks for the model until the gateway has seen the node that serves it.
async fn wait_ready(endpoint: &Endpoint, gateway: &Program) -> Result<(), LoadError> {
    let target = Target::parse(&endpoint.url)?;
    let deadline = Instant::now() + START_TIMEOUT;
    loop {
        let request = hyper::Request::get(target.path(&format!("models/{}", endpoint.model)))
            .header("host", target.authority())
            .header("authorization", format!("Bearer {}", endpoint.key))
            .body(http_body_util::Full::default())
            .map_err(|e| LoadError::program("homing gateway", e.to_string()))?;
        let answer = Connection::new(&target).send(request).await;
        if answer.is_ok_and(|response| response.status().is_success()) {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(gateway.trouble("does not serve its model"));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
