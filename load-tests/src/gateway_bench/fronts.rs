//! What stands in front of the scripted node: nothing, nginx, SMG, our gateway, each started and
//! ready.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::agent_turns::{Bodies, Delivery, Dialect};
use super::lanes::{self, Load};
use super::{Args, WORDS};
use crate::error::LoadError;
use crate::process::{Program, cpu_seconds, family};

/// A program that does not answer by then will not.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// A request that every front must answer before the first round.
const PROBE_BYTES: usize = 4096;

/// What stands at one address.
pub(super) struct Front {
    pub(super) name: &'static str,
    pub(super) url: String,
    pub(super) key: Option<String>,
    pub(super) program: Option<Program>,
}

impl Front {
    /// CPU of its processes so far.
    pub(super) fn cpu_seconds(&self) -> f64 {
        let pid = self.program.as_ref().map(Program::pid);
        pid.map(family)
            .unwrap_or_default()
            .into_iter()
            .map(cpu_seconds)
            .sum()
    }
}

pub(super) fn url(address: SocketAddr) -> String {
    format!("http://{address}/v1")
}

pub(super) fn model_id(args: &Args) -> String {
    let stem = args
        .gguf
        .as_deref()
        .and_then(Path::file_stem)
        .and_then(|s| s.to_str());
    stem.unwrap_or("echo").to_owned()
}

pub(crate) fn free_address() -> Result<SocketAddr, LoadError> {
    TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .map_err(LoadError::system("asking for a port"))
}

pub(super) fn start_node(
    args: &Args,
    model: &str,
    folder: &Path,
) -> Result<(Program, SocketAddr), LoadError> {
    let own = std::env::current_exe().map_err(LoadError::system("finding this program"))?;
    let mut command = Command::new(own);
    command.args(["echo-node", "--exit-with-stdin", "--model", model]);
    command.arg("--tokens").arg(WORDS.to_string());
    command.arg("--token-ms").arg(args.word_ms.to_string());
    let node = Program::start("echo-node", &mut command, &folder.join("echo-node.log"))?;
    let line = node.line(START_TIMEOUT)?;
    let address = line
        .strip_prefix("http://")
        .and_then(|a| a.parse().ok())
        .ok_or_else(|| node.trouble(&format!("printed {line:?} in place of its address")))?;
    Ok((node, address))
}

/// One worker, keep-alive to the node, bodies in memory: what a tuned plain proxy would run.
pub(super) fn start_nginx(
    nginx: &Path,
    node: SocketAddr,
    folder: &Path,
) -> Result<Front, LoadError> {
    let address = free_address()?;
    let prefix = folder.join("nginx");
    for name in ["logs", "body", "proxy"] {
        let sub = prefix.join(name);
        std::fs::create_dir_all(&sub).map_err(LoadError::file(&sub))?;
    }
    let root = prefix.display();
    let config = format!(
        "daemon off; worker_processes 1; pid {root}/pid; error_log {root}/logs/error.log;\n\
         events {{ worker_connections 1024; }}\n\
         http {{ access_log off; tcp_nodelay on; keepalive_requests 1000000;\n\
         client_body_temp_path {root}/body; proxy_temp_path {root}/proxy;\n\
         fastcgi_temp_path {root}/proxy; uwsgi_temp_path {root}/proxy; scgi_temp_path {root}/proxy;\n\
         client_body_buffer_size 1m; client_max_body_size 64m;\n\
         upstream node {{ server {node}; keepalive 64; keepalive_requests 1000000; }}\n\
         server {{ listen {address} backlog=1024; location / {{ proxy_pass http://node;\n\
         proxy_http_version 1.1; proxy_set_header Connection \"\"; proxy_buffering off; }} }} }}\n"
    );
    let path = prefix.join("nginx.conf");
    std::fs::write(&path, config).map_err(LoadError::file(&path))?;
    let mut command = Command::new(nginx);
    command
        .arg("-p")
        .arg(&prefix)
        .arg("-c")
        .arg(&path)
        .arg("-e")
        .arg(prefix.join("logs/early"));
    let program = Program::start("nginx", &mut command, &folder.join("nginx.log"))?;
    Ok(Front {
        name: "nginx",
        url: url(address),
        key: None,
        program: Some(program),
    })
}

/// As its users run it before one pool: routing by prefix, its other settings as they come. It
/// logs no line a request here, which is in its favour. It tokenizes for gRPC nodes alone.
pub(super) fn start_smg(smg: &Path, node: SocketAddr, folder: &Path) -> Result<Front, LoadError> {
    let (address, metrics) = (free_address()?, free_address()?);
    let mut command = Command::new(smg);
    command.arg("launch").args(["--policy", "cache_aware"]);
    command.args(["--host", "127.0.0.1", "--log-level", "warn"]);
    command.arg("--port").arg(address.port().to_string());
    command.arg("--worker-urls").arg(format!("http://{node}"));
    command.args(["--prometheus-host", "127.0.0.1"]);
    command
        .arg("--prometheus-port")
        .arg(metrics.port().to_string());
    let program = Program::start("smg", &mut command, &folder.join("smg.log"))?;
    Ok(Front {
        name: "smg",
        url: url(address),
        key: None,
        program: Some(program),
    })
}

pub(super) fn start_homing(
    args: &Args,
    model: &str,
    node: SocketAddr,
    folder: &Path,
) -> Result<Front, LoadError> {
    let address = free_address()?;
    let data = folder.join("data");
    let gguf = match &args.gguf {
        Some(path) => {
            let path = path.canonicalize().map_err(LoadError::file(path))?;
            format!("gguf = {:?}\n", path.display().to_string())
        }
        None => String::new(),
    };
    let config = format!(
        "listen = \"{address}\"\ndata = {:?}\n\n[[models]]\nid = {model:?}\n{gguf}\n\
         [[nodes]]\nid = \"echo\"\nurl = \"http://{node}\"\n",
        data.display().to_string()
    );
    let path = folder.join("homing.toml");
    std::fs::write(&path, config).map_err(LoadError::file(&path))?;
    let key = make_key(&args.homing, &data)?;
    let mut command = Command::new(&args.homing);
    command.arg("gateway").arg("--config").arg(&path);
    let program = Program::start("homing", &mut command, &folder.join("homing.log"))?;
    Ok(Front {
        name: "homing",
        url: url(address),
        key: Some(key),
        program: Some(program),
    })
}

/// A tenant of its own with one key; the key is the only line on stdout that begins with `sk-`.
pub(crate) fn make_key(homing: &Path, data: &Path) -> Result<String, LoadError> {
    let call = |arguments: &[&str]| -> Result<String, LoadError> {
        let output = Command::new(homing)
            .args(arguments)
            .arg("--data")
            .arg(data)
            .output()
            .map_err(|e| LoadError::program("homing", e.to_string()))?;
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            return Err(LoadError::program(
                "homing",
                format!("{arguments:?}: {stderr}"),
            ));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    call(&["tenant", "create", "bench"])?;
    let printed = call(&["key", "create", "--tenant", "bench"])?;
    printed
        .split_whitespace()
        .find(|word| word.starts_with("sk-"))
        .map(str::to_owned)
        .ok_or_else(|| LoadError::program("homing", format!("no key in {printed:?}")))
}

/// Sends single requests in every dialect until one succeeds.
pub(super) async fn wait_ready(args: &Args, front: &Front, model: &str) -> Result<(), LoadError> {
    let deadline = std::time::Instant::now() + START_TIMEOUT;
    for &dialect in &args.dialects {
        while let Err(failure) = probe(front, dialect, model).await {
            if std::time::Instant::now() > deadline {
                return Err(failure);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    Ok(())
}

async fn probe(front: &Front, dialect: Dialect, model: &str) -> Result<(), LoadError> {
    let delivery = Delivery::Whole;
    let load = Load {
        front,
        dialect,
        bodies: &Bodies::new(dialect, model, PROBE_BYTES, delivery),
        delivery,
        agents: 1,
        requests: 1,
        words: 0,
        new: 0,
    };
    lanes::send(load).await.map(|_| ())
}
