//! How does a test get a real stack, and what may it know about it?
//!
//! `homing up` from this build's own target directory, in a temporary data directory, on ports that
//! the system picks; killed by its process id when the test ends, its nodes with it. Everything that
//! a test checks it learns from outside: answers, headers, metrics, the report.

#![expect(dead_code, reason = "each test file uses its own part of this module")]
#![expect(clippy::panic, reason = "a helper fails its test with what it saw")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use load_tests::chat::{self, Outcome, Turn};
use load_tests::http::{Connection, Target};
use load_tests::process::{Program, is_alive, signal_process, wait_gone, wait_until};
use rustix::process::Signal;
use serde::Deserialize;
use serde_json::{Value, json};

/// Loading two models on a busy machine; far above what it takes.
pub(crate) const START: Duration = Duration::from_secs(90);
/// A drain with nothing in flight; far above what it takes.
pub(crate) const STOP: Duration = Duration::from_secs(30);
/// The default model, without its ending: the id under which a node serves it.
pub(crate) const MODEL: &str = "SmolLM2-135M-Instruct.Q4_1";

/// A binary of this build: beside the folder of the test's own executable.
pub(crate) fn binary(name: &str) -> PathBuf {
    let own = std::env::current_exe().expect("a test has a path");
    let path = own
        .ancestors()
        .nth(2)
        .expect("target/release/deps/test")
        .join(name);
    assert!(
        path.exists(),
        "{} is missing: run `make test`",
        path.display()
    );
    path
}

/// The GGUF that the stack serves.
pub(crate) fn model_path() -> PathBuf {
    let path = match std::env::var_os("HOMING_MODEL") {
        Some(path) => PathBuf::from(path),
        None => root().join("models").join(format!("{MODEL}.gguf")),
    };
    assert!(
        path.exists(),
        "{} is missing: run `make setup`",
        path.display()
    );
    path
}

/// The workspace.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("..")
        .canonicalize()
        .expect("the workspace root")
}

/// What `homing up --json` prints.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Ready {
    pub(crate) url: String,
    pub(crate) api_key: String,
    pub(crate) admin: String,
    pub(crate) pid: u32,
    pub(crate) nodes: Vec<ReadyNode>,
}

/// One node of it.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct ReadyNode {
    pub(crate) id: String,
    pub(crate) url: String,
    pub(crate) pid: u32,
}

/// A running stack.
pub(crate) struct Stack {
    pub(crate) ready: Ready,
    pub(crate) program: Program,
    pub(crate) data: PathBuf,
    /// Removed last; `None` when the data belongs to the test.
    _folder: Option<tempfile::TempDir>,
}

impl Stack {
    /// A fresh one.
    pub(crate) fn start(nodes: usize) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut stack = Self::start_on(&folder.path().join("data"), nodes);
        stack._folder = Some(folder);
        stack
    }

    /// One over data that may be there already.
    pub(crate) fn start_on(data: &Path, nodes: usize) -> Self {
        std::fs::create_dir_all(data).expect("a data folder");
        let mut command = Command::new(binary("homing"));
        command
            .args([
                "up",
                "--json",
                "--listen",
                "127.0.0.1:0",
                "--admin",
                "127.0.0.1:0",
            ])
            .args(["--nodes", &nodes.to_string(), "--threads-per-node", "1"])
            .arg("--data")
            .arg(data)
            .arg("--model")
            .arg(model_path());
        let log = data
            .parent()
            .expect("data lies in a folder")
            .join("homing.log");
        let program = Program::start("homing up", &mut command, &log).expect("it starts");
        let line = program.line(START).unwrap_or_else(|e| panic!("{e}"));
        let ready: Ready =
            serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e} in {line:?}"));
        assert_eq!(ready.nodes.len(), nodes, "{line}");
        Self {
            ready,
            program,
            data: data.to_owned(),
            _folder: None,
        }
    }

    /// Where its API is.
    pub(crate) fn target(&self) -> Target {
        Target::parse(&self.ready.url).expect("the printed address")
    }

    /// Ends it as Ctrl-C does and checks that nothing is left behind.
    pub(crate) fn stop(mut self, signal: Signal) {
        let pids = self.pids();
        self.program.signal(signal);
        let code = self.program.wait(STOP).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(
            code,
            Some(0),
            "{}",
            self.program.trouble("did not end cleanly")
        );
        for pid in pids {
            assert!(
                wait_gone(pid, Duration::from_secs(2)),
                "process {pid} is left behind"
            );
        }
    }

    /// Ends the gateway as a crash does; its nodes must follow.
    pub(crate) fn kill(&mut self) {
        self.program.signal(Signal::KILL);
        let _ = self.program.wait(STOP).unwrap_or_else(|e| panic!("{e}"));
    }

    /// Everything that it and its nodes have logged.
    pub(crate) fn logs(&self) -> String {
        let files = std::fs::read_dir(self.data.join("logs"))
            .into_iter()
            .flatten()
            .flatten();
        let logs = files.map(|file| std::fs::read_to_string(file.path()).unwrap_or_default());
        self.program.stderr() + &logs.collect::<Vec<_>>().join("\n")
    }

    /// Every process of it.
    pub(crate) fn pids(&self) -> Vec<u32> {
        let mut pids = load_tests::process::family(self.program.pid());
        pids.extend(self.ready.nodes.iter().map(|n| n.pid));
        pids
    }

    /// The node of that name.
    pub(crate) fn node(&self, id: &str) -> &ReadyNode {
        self.ready
            .nodes
            .iter()
            .find(|n| n.id == id)
            .unwrap_or_else(|| panic!("no node {id} in {:?}", self.ready.nodes))
    }

    /// `homing …` over this stack's data.
    pub(crate) fn homing(&self, arguments: &[&str]) -> Output {
        homing(&self.data, arguments)
    }

    /// The ledger's rows.
    pub(crate) fn report(&self, by: &str) -> Vec<Value> {
        report(&self.data, by)
    }

    /// A key of a new tenant.
    pub(crate) fn tenant(&self, name: &str, more: &[&str]) -> String {
        let mut arguments = vec!["tenant", "create", name];
        arguments.extend(more);
        let made = self.homing(&arguments);
        assert!(made.status.success(), "{made:?}");
        let made = self.homing(&["key", "create", "--tenant", name]);
        assert!(made.status.success(), "{made:?}");
        let text = String::from_utf8(made.stdout).expect("UTF-8");
        let key = text
            .split_whitespace()
            .find(|w| w.starts_with("sk-"))
            .map(str::to_owned);
        let key = key.unwrap_or_else(|| panic!("no key in {text:?}"));
        // The gateway takes up a new key within a second.
        let known = wait_until(Duration::from_secs(10), || {
            get(&format!("{}/models", self.ready.url), Some(&key)).0 == 200
        });
        assert!(known, "the gateway does not take up the key of {name}");
        key
    }

    /// The sum of a metric over its labels, 0 when it is not there.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let (status, text) = get(&format!("{}/metrics", self.ready.admin), None);
        assert_eq!(status, 200, "{text}");
        metric(&text, name)
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        // A failed test must not leave nodes behind, whatever the gateway does about it.
        let pids = self.pids();
        self.program.signal(Signal::KILL);
        for pid in pids.into_iter().filter(|pid| is_alive(*pid)) {
            signal_process(pid, Signal::KILL);
        }
    }
}

/// `homing …` over a data folder.
pub(crate) fn homing(data: &Path, arguments: &[&str]) -> Output {
    Command::new(binary("homing"))
        .args(arguments)
        .arg("--data")
        .arg(data)
        .output()
        .expect("homing runs")
}

/// The ledger's rows as `homing report` gives them.
pub(crate) fn report(data: &Path, by: &str) -> Vec<Value> {
    let output = homing(data, &["report", "--by", by, "--format", "json"]);
    assert!(output.status.success(), "{output:?}");
    let value: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|e| panic!("{e} in {}", String::from_utf8_lossy(&output.stdout)));
    let rows = value
        .as_array()
        .or_else(|| value.get("rows").and_then(Value::as_array));
    rows.unwrap_or_else(|| panic!("no rows in {value}")).clone()
}

/// A metric's sum in Prometheus' text format.
pub(crate) fn metric(text: &str, name: &str) -> f64 {
    text.lines()
        .filter(|line| !line.starts_with('#'))
        .filter(|line| line.split(['{', ' ']).next() == Some(name))
        .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
        .sum()
}

/// A plain GET: status and body.
pub(crate) fn get(url: &str, key: Option<&str>) -> (u16, String) {
    use std::io::{Read, Write};
    let rest = url.strip_prefix("http://").expect("http");
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let Ok(mut stream) = std::net::TcpStream::connect(authority) else {
        return (0, String::new());
    };
    let key = key
        .map(|k| format!("Authorization: Bearer {k}\r\n"))
        .unwrap_or_default();
    let request =
        format!("GET /{path} HTTP/1.1\r\nHost: {authority}\r\n{key}Connection: close\r\n\r\n");
    let mut text = Vec::new();
    let sent = stream
        .write_all(request.as_bytes())
        .and_then(|()| stream.read_to_end(&mut text));
    if sent.is_err() {
        return (0, String::new());
    }
    let text = String::from_utf8_lossy(&text).into_owned();
    let status = text
        .split(' ')
        .nth(1)
        .and_then(|s| s.parse().ok())
        .unwrap_or(0);
    (
        status,
        text.split_once("\r\n\r\n")
            .map(|(_, body)| body.to_owned())
            .unwrap_or_default(),
    )
}

/// A chat turn in a session, streamed unless the body says otherwise.
pub(crate) fn turn(session: &str, messages: &[Value], max_tokens: u32) -> Turn {
    Turn {
        endpoint: "chat/completions",
        body: json!({
            "model": MODEL,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": true,
            "stream_options": {"include_usage": true},
        }),
        headers: vec![("x-session-affinity", session.to_owned())],
        timeout: Duration::from_secs(120),
    }
}

/// Sends one turn over a connection of its own.
pub(crate) async fn send(stack: &Stack, key: &str, turn: &Turn) -> Outcome {
    let target = stack.target();
    chat::send(&mut Connection::new(&target), &target, Some(key), turn).await
}

/// Fails with the server's words when a turn failed.
pub(crate) fn good(outcome: Outcome) -> Outcome {
    assert!(
        outcome.failure.is_none(),
        "{:?} {:?}",
        outcome.failure,
        outcome.headers
    );
    assert!(
        outcome.usage.is_some(),
        "an answer without usage: {outcome:?}"
    );
    outcome
}

/// One message.
pub(crate) fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}
