//! The stage: a real `homing gateway` process between raw clients and scripted nodes.

pub(crate) mod client;
pub(crate) mod duty;
pub(crate) mod node;

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use client::{Answer, Connection};
use node::{MODEL, Node};

/// Longest wait for something that is bound to happen.
const SOON: Duration = Duration::from_secs(20);

/// Waits for a condition.
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(
            start.elapsed() < SOON,
            "still not so after {SOON:?}: {what}"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A running gateway with its own data.
pub(crate) struct Gateway {
    process: Child,
    pub(crate) addr: SocketAddr,
    admin: SocketAddr,
    dir: tempfile::TempDir,
    /// Key of tenant `a`, which may ask for debug headers.
    pub(crate) key: String,
    /// Key of tenant `b`, which may not.
    pub(crate) other_key: String,
    /// What the process wrote to stderr.
    log: std::sync::Arc<std::sync::Mutex<String>>,
}

impl Gateway {
    /// A gateway in front of these nodes, with the scripted model only.
    pub(crate) fn start(nodes: &[&Node]) -> Self {
        Self::with(nodes, "", &format!("[[models]]\nid = \"{MODEL}\"\n"))
    }

    /// A gateway that knows the scripted model's tokenizer.
    pub(crate) fn exact(nodes: &[&Node]) -> Self {
        let gguf = model_file();
        Self::with(
            nodes,
            "",
            &format!("[[models]]\nid = \"{MODEL}\"\ngguf = {gguf:?}\n"),
        )
    }

    /// A gateway with these models and what else stands beside them in the file.
    pub(crate) fn with_models(nodes: &[&Node], models: &str) -> Self {
        Self::with(nodes, "", models)
    }

    /// A gateway with these limits.
    pub(crate) fn limited(nodes: &[&Node], limits: &str) -> Self {
        let models = format!("[[models]]\nid = \"{MODEL}\"\n");
        Self::with(nodes, limits, &models)
    }

    /// A gateway none of whose files may grow past this many blocks of 512 bytes.
    pub(crate) fn cramped(nodes: &[&Node], file_blocks_max: u32) -> Self {
        let models = format!("[[models]]\nid = \"{MODEL}\"\n");
        Self::launch(nodes, "", &models, Some(file_blocks_max))
    }

    fn with(nodes: &[&Node], limits: &str, models: &str) -> Self {
        Self::launch(nodes, limits, models, None)
    }

    fn launch(nodes: &[&Node], limits: &str, models: &str, file_blocks_max: Option<u32>) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let mut config = format!(
            "listen = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\ndata = \"data\"\nprice_version = \"t\"\n{models}"
        );
        for (at, node) in nodes.iter().enumerate() {
            let address = node.addr;
            config += &format!("[[nodes]]\nid = \"node-{at}\"\nurl = \"http://{address}\"\n");
            config += &node.lines();
            if let Some(events) = &node.events {
                config += &format!("events = \"{events}\"\n");
            }
            if let Some(ms) = node.disk_ms {
                config += &format!("kv_fetch_ms_per_block = {{ disk = {ms} }}\n");
            }
        }
        config += &format!(
            "[prices.{MODEL}]\ninput_nano_usd_per_million = 1000000\ncached_input_nano_usd_per_million = 100000\noutput_nano_usd_per_million = 3000000\n[limits]\n{limits}"
        );
        let file = dir.path().join("homing.toml");
        std::fs::write(&file, config).expect("a file");
        let data = dir.path().join("data");
        homing(&data, &["tenant", "create", "a", "--debug"]);
        homing(&data, &["tenant", "create", "b"]);
        let key = homing(&data, &["key", "create", "--tenant", "a"])
            .trim()
            .to_owned();
        let other_key = homing(&data, &["key", "create", "--tenant", "b"])
            .trim()
            .to_owned();
        // A limit on the size of files stands for a full disk; the kernel enforces both alike.
        let limit = file_blocks_max.map_or(String::new(), |blocks| format!("ulimit -f {blocks};"));
        let mut process = Command::new("sh")
            .arg("-c")
            .arg(format!("trap '' XFSZ; {limit} exec \"$@\""))
            .args(["sh", env!("CARGO_BIN_EXE_homing"), "gateway", "--config"])
            .arg(&file)
            .env("HOMING_LOG", "warn,gateway=info")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the gateway starts");
        let (log, addr, admin) = follow(&mut process);
        let gateway = Self {
            process,
            addr,
            admin,
            dir,
            key,
            other_key,
            log,
        };
        eventually("every node is up", || {
            let states = gateway.admin_get("/admin/nodes").text().to_lowercase();
            states.matches("\"up\"").count() == nodes.len()
        });
        // On a busy machine the first probe may take longer than a session is worth; the shortest
        // of several counts, and it comes within a second.
        eventually("round trips are those of loopback", || {
            gateway.metric("homing_node_round_trip_seconds") < 0.003
        });
        gateway
    }

    /// Posts a chat body with tenant a's key.
    pub(crate) fn chat(&self, body: &Value) -> Answer {
        self.post("/v1/chat/completions", &[], body.to_string().as_bytes())
    }

    /// Posts with tenant a's key.
    pub(crate) fn post(&self, path: &str, headers: &[&str], body: &[u8]) -> Answer {
        let mut connection = Connection::open(self.addr);
        let authorization = format!("authorization: Bearer {}", self.key);
        let headers: Vec<&str> = headers
            .iter()
            .copied()
            .chain([authorization.as_str()])
            .collect();
        connection.request("POST", path, &headers, body).answer()
    }

    /// Opens a connection and posts a chat body on it, without reading the answer.
    pub(crate) fn begin_chat(&self, headers: &[&str], body: &Value) -> Connection {
        let mut connection = Connection::open(self.addr);
        let authorization = format!("authorization: Bearer {}", self.key);
        let headers: Vec<&str> = headers
            .iter()
            .copied()
            .chain([authorization.as_str()])
            .collect();
        connection.request(
            "POST",
            "/v1/chat/completions",
            &headers,
            body.to_string().as_bytes(),
        );
        connection
    }

    /// Reads from the admin interface.
    pub(crate) fn admin_get(&self, path: &str) -> Answer {
        let mut connection = Connection::open(self.admin);
        connection.request("GET", path, &[], b"").answer()
    }

    /// The sum of a metric over its labels.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let text = self.admin_get("/metrics").text();
        let of = |line: &str| {
            let rest = line.strip_prefix(name)?;
            rest.starts_with([' ', '{'])
                .then(|| rest.rsplit(' ').next()?.parse::<f64>().ok())?
        };
        text.lines().filter_map(of).sum()
    }

    /// The ledger's row of a request.
    pub(crate) fn row(&self, request_id: &str) -> Value {
        let mut found = Value::Null;
        eventually(&format!("a ledger row of {request_id}"), || {
            let rows: Vec<Value> = self
                .rows()
                .into_iter()
                .filter(|row| row["request_id"] == request_id)
                .collect();
            assert!(
                rows.len() <= 1,
                "{request_id} was billed {} times",
                rows.len()
            );
            found = rows.into_iter().next().unwrap_or(Value::Null);
            !found.is_null()
        });
        found
    }

    /// All rows of the ledger, one a request.
    pub(crate) fn rows(&self) -> Vec<Value> {
        let data = self.dir.path().join("data");
        let text = homing(&data, &["report", "--by", "request", "--format", "json"]);
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// What `homing explain` says of a request; null where it knows none.
    pub(crate) fn explain(&self, id: &str, format: &[&str]) -> Option<String> {
        let data = self.dir.path().join("data");
        let output = Command::new(env!("CARGO_BIN_EXE_homing"))
            .args(["explain", id, "--data"])
            .arg(&data)
            .args(format)
            .output()
            .expect("homing runs");
        output
            .status
            .success()
            .then(|| String::from_utf8(output.stdout).expect("UTF-8"))
    }

    /// Everything that was taken is given back.
    pub(crate) fn assert_idle(&self) {
        eventually("no request is in flight", || {
            self.metric("homing_requests_in_flight") == 0.0
                && self.metric("homing_requests_waiting") == 0.0
        });
    }

    /// Sends the process a signal.
    pub(crate) fn signal(&self, name: &str) {
        let sent = Command::new("kill")
            .args([format!("-{name}"), self.process.id().to_string()])
            .status();
        assert!(sent.expect("kill runs").success());
    }

    /// Waits for the process to end by itself.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        let mut ended = None;
        eventually("the gateway ends", || {
            ended = self.process.try_wait().expect("a child");
            ended.is_some()
        });
        ended.expect("it ended")
    }

    /// The log so far.
    pub(crate) fn log(&self) -> String {
        self.log.lock().expect("no panic").clone()
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        if std::thread::panicking() {
            eprintln!("--- log of the gateway ---\n{}", self.log());
        }
    }
}

/// Follows the log in a thread; the ready line says where the gateway listens.
fn follow(
    process: &mut Child,
) -> (
    std::sync::Arc<std::sync::Mutex<String>>,
    SocketAddr,
    SocketAddr,
) {
    let mut lines = BufReader::new(process.stderr.take().expect("piped")).lines();
    let log = std::sync::Arc::new(std::sync::Mutex::new(String::new()));
    let mut ready = None;
    for line in lines.by_ref().map_while(Result::ok) {
        log.lock().expect("no panic").push_str(&format!("{line}\n"));
        if line.contains("gateway is ready") {
            ready = Some(line);
            break;
        }
    }
    let ready = ready.unwrap_or_else(|| panic!("not ready: {}", log.lock().expect("no panic")));
    let after = |name: &str| -> SocketAddr {
        let at = ready.find(name).expect("an address") + name.len();
        let rest = &ready[at..];
        let end = rest.find([' ', ')']).unwrap_or(rest.len());
        rest[..end]
            .parse()
            .unwrap_or_else(|_| panic!("no address in {ready:?}"))
    };
    let (addr, admin) = (after(" listen="), after("admin=Some("));
    let shared = std::sync::Arc::clone(&log);
    std::thread::spawn(move || {
        for line in lines.map_while(Result::ok) {
            shared
                .lock()
                .expect("no panic")
                .push_str(&format!("{line}\n"));
        }
    });
    (log, addr, admin)
}

/// Runs a command of `homing` on a data directory.
fn homing(data: &Path, args: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_homing"))
        .args(args)
        .arg("--data")
        .arg(data)
        .output()
        .expect("homing runs");
    assert!(
        output.status.success(),
        "{args:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// The default model's file.
pub(crate) fn model_file() -> PathBuf {
    let path = std::env::var_os("HOMING_MODEL").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/SmolLM2-135M-Instruct.Q4_1.gguf"),
        PathBuf::from,
    );
    assert!(
        path.exists(),
        "{} is missing: run `make setup`",
        path.display()
    );
    path.canonicalize().expect("it exists")
}

/// A chat body.
pub(crate) fn chat(stream: Stream, content: &str) -> Value {
    let mut body = serde_json::json!({
        "model": MODEL, "messages": [{"role": "user", "content": content}],
    });
    match stream {
        Stream::No => {}
        Stream::Yes => body["stream"] = true.into(),
        Stream::WithUsage => {
            body["stream"] = true.into();
            body["stream_options"] = serde_json::json!({"include_usage": true});
        }
    }
    body
}

/// How the answer is to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    No,
    Yes,
    WithUsage,
}
