//! Does the command line keep its promises: words, exit codes, what goes where, what stays secret?
//!
//! Black box over the `homing` program.

#![expect(clippy::unwrap_used, reason = "helpers fail their test")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

fn homing(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_homing"));
    command
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Runs a command that must work; returns its stdout.
fn works(arguments: &[&str]) -> String {
    let output = homing(arguments);
    assert!(
        output.status.success(),
        "{arguments:?}: {}",
        stderr(&output)
    );
    stdout(&output)
}

/// Would catch an option that scripts rely on and that is gone or unexplained.
#[test]
fn help_names_every_command_and_option() {
    for (arguments, words) in [
        (
            &["--help"][..],
            &["up", "gateway", "tenant", "key", "report"][..],
        ),
        (
            &["up", "--help"],
            &[
                "--model",
                "--alias",
                "--nodes",
                "--threads-per-node",
                "--listen",
                "--admin",
                "--data",
                "--json",
            ],
        ),
        (&["gateway", "--help"], &["--config"]),
        (&["tenant", "--help"], &["create", "list"]),
        (&["key", "--help"], &["create", "list", "revoke"]),
        (&["key", "create", "--help"], &["--tenant", "--data"]),
        (
            &["report", "--help"],
            &[
                "--data", "--tenant", "--from", "--to", "--by", "--format", "request", "session",
                "alias", "csv",
            ],
        ),
    ] {
        let help = works(arguments);
        for word in words {
            assert!(help.contains(word), "{arguments:?} does not explain {word}");
        }
    }
    assert!(works(&["--version"]).starts_with("homing "));
}

/// Would catch a failure that a script takes for success, or a mistake reported on stdout.
#[test]
fn exit_codes_tell_typing_from_failing() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let data = data.to_str().unwrap();
    let missing = dir.path().join("none.toml");
    let broken = dir.path().join("broken.toml");
    std::fs::write(&broken, "listen = \"127.0.0.1:0\"\nlisten_too = 1\n").unwrap();
    for (arguments, code, says) in [
        (&[][..], 2, "Usage"),
        (&["fly"], 2, "fly"),
        (&["up", "--nodes", "0"], 2, "--nodes"),
        (&["report", "--by", "colour"], 2, "colour"),
        (&["report", "--data", data], 1, "holds no ledger"),
        (
            &["gateway", "--config", missing.to_str().unwrap()],
            1,
            "none.toml",
        ),
        (
            &["gateway", "--config", broken.to_str().unwrap()],
            1,
            "listen_too",
        ),
        (
            &["up", "--model", "none.gguf", "--data", data],
            1,
            "make run",
        ),
        (
            &["key", "create", "--tenant", "nobody", "--data", data],
            1,
            "homing tenant create nobody",
        ),
        (&["key", "revoke", "key_0", "--data", data], 1, "key_0"),
        (&["tenant", "create", "no spaces", "--data", data], 1, "a-z"),
        (&["report", "--data", data, "--from", "soon"], 1, "--from"),
    ] {
        let output = homing(arguments);
        assert_eq!(
            output.status.code(),
            Some(code),
            "{arguments:?}: {}",
            stderr(&output)
        );
        assert!(
            stderr(&output).contains(says),
            "{arguments:?}: {}",
            stderr(&output)
        );
        assert_eq!(stdout(&output), "", "{arguments:?}");
    }
}

/// Would catch a key that cannot be scripted, is shown twice, or a report that fails without usage.
#[test]
fn tenants_keys_and_an_empty_bill() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let data = data.to_str().unwrap();
    assert_eq!(
        works(&["tenant", "create", "acme", "--data", data]),
        "acme\n"
    );
    assert_eq!(
        works(&[
            "tenant", "create", "--name", "beta", "--debug", "--data", data
        ]),
        "beta\n"
    );
    assert_eq!(
        homing(&["tenant", "create", "acme", "--data", data])
            .status
            .code(),
        Some(1)
    );
    assert_eq!(
        works(&["tenant", "list", "--data", data]),
        "acme\nbeta  (debug)\n"
    );
    let secret = works(&["key", "create", "--tenant", "acme", "--data", data]);
    assert!(secret.starts_with("sk-homing-") && secret.ends_with('\n') && secret.len() == 54);
    let made: Value = serde_json::from_str(&works(&[
        "key", "create", "--tenant", "beta", "--json", "--data", data,
    ]))
    .unwrap();
    let list = works(&["key", "list", "--data", data]);
    assert_eq!(list.matches("valid").count(), 2);
    assert!(!list.contains(secret.trim()) && !list.contains("sk-"));
    let id = made["id"].as_str().unwrap();
    works(&["key", "revoke", id, "--data", data]);
    let list = works(&["key", "list", "--tenant", "beta", "--data", data]);
    assert!(list.contains(id) && list.contains("revoked") && !list.contains("acme"));
    assert_eq!(
        works(&["report", "--data", data, "--format", "json"]),
        "[]\n"
    );
    let csv = works(&["report", "--data", data, "--format", "csv"]);
    assert_eq!(
        csv,
        "tenant,requests,input_tokens,cached_tokens,output_tokens,cost_nano_usd,cache_savings_nano_usd\n"
    );
    assert!(works(&["report", "--data", data]).contains("no requests"));
}

/// A gateway without nodes; killed when dropped.
struct Gateway {
    process: Child,
    listen: SocketAddr,
    admin: SocketAddr,
    config: PathBuf,
}

impl Gateway {
    fn start(dir: &Path) -> Self {
        let config = dir.join("homing.toml");
        let text = "listen = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\ndata = \"data\"\n\
                    [[models]]\nid = \"m\"\n";
        std::fs::write(&config, text).unwrap();
        let mut process = Command::new(env!("CARGO_BIN_EXE_homing"))
            .args(["gateway", "--config"])
            .arg(&config)
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut log = BufReader::new(process.stderr.take().unwrap());
        let mut line = String::new();
        while !line.contains("gateway is ready") {
            line.clear();
            assert!(
                log.read_line(&mut line).unwrap() > 0,
                "the gateway ended before it was ready"
            );
        }
        // Nobody else reads the pipe, and a full one would stop the gateway.
        std::thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
        let address = |key: &str| {
            let rest = line.split(key).nth(1).unwrap().trim_start_matches("Some(");
            rest.split([' ', ')', '\n'])
                .next()
                .unwrap()
                .parse()
                .unwrap()
        };
        Self {
            listen: address("listen="),
            admin: address("admin="),
            process,
            config,
        }
    }

    fn status(&self, addr: SocketAddr, path: &str, key: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(addr).unwrap();
        let request = format!(
            "GET {path} HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {key}\r\nconnection: close\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        (answer.split(' ').nth(1).unwrap().parse().unwrap(), answer)
    }

    fn signal(&self, name: &str) {
        let mut kill = Command::new("kill");
        kill.args([&format!("-{name}"), &self.process.id().to_string()]);
        assert!(kill.status().unwrap().success());
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn within_a_second(what: &str, mut condition: impl FnMut() -> bool) {
    let since = Instant::now();
    while !condition() {
        assert!(
            since.elapsed() < Duration::from_secs(1),
            "not within a second: {what}"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Would catch a key that works on after its revocation, or a new one that does not work yet.
#[test]
fn a_running_gateway_notices_keys_within_a_second() {
    let dir = tempfile::tempdir().unwrap();
    let gateway = Gateway::start(dir.path());
    let data = dir.path().join("data");
    let data = data.to_str().unwrap();
    works(&["tenant", "create", "late", "--data", data]);
    let made = works(&[
        "key", "create", "--tenant", "late", "--json", "--data", data,
    ]);
    let made: Value = serde_json::from_str(&made).unwrap();
    let key = made["api_key"].as_str().unwrap();
    let status = || gateway.status(gateway.listen, "/v1/models", key).0;
    within_a_second("the new key works", || status() == 200);
    works(&[
        "key",
        "revoke",
        made["id"].as_str().unwrap(),
        "--data",
        data,
    ]);
    within_a_second("the revoked key is refused", || status() == 401);
}

/// Would catch a second gateway on the same data, a gateway that cannot start after a SIGKILL, a
/// signal that is not answered with exit code 0, and an admin interface on the clients' port.
#[test]
fn one_gateway_a_directory_and_a_clean_end() {
    let dir = tempfile::tempdir().unwrap();
    let mut gateway = Gateway::start(dir.path());
    let config = gateway.config.to_str().unwrap().to_owned();
    let second = homing(&["gateway", "--config", &config]);
    assert_eq!(second.status.code(), Some(1));
    let pid = gateway.process.id().to_string();
    assert!(stderr(&second).contains(&pid), "{}", stderr(&second));
    assert!(stderr(&second).contains("in use"), "{}", stderr(&second));

    let (code, metrics) = gateway.status(gateway.admin, "/metrics", "");
    assert!(
        code == 200 && metrics.contains("homing_ledger_open_requests 0"),
        "{metrics}"
    );
    assert_eq!(gateway.status(gateway.admin, "/health", "").0, 503);
    assert_eq!(gateway.status(gateway.admin, "/admin/nodes", "").0, 200);
    assert_eq!(gateway.status(gateway.admin, "/", "").0, 404);
    assert_ne!(gateway.status(gateway.listen, "/metrics", "").0, 200);
    assert_ne!(gateway.status(gateway.listen, "/admin/nodes", "").0, 200);

    gateway.process.kill().unwrap();
    gateway.process.wait().unwrap();
    let mut gateway = Gateway::start(dir.path());
    for name in ["TERM", "INT"] {
        gateway.signal(name);
        assert_eq!(gateway.process.wait().unwrap().code(), Some(0), "{name}");
        gateway = Gateway::start(dir.path());
    }
}

/// Would catch a busy port that is reported as anything else, or noticed after everything else.
#[test]
fn a_busy_port_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = taken.local_addr().unwrap();
    for key in ["listen", "admin"] {
        let other = if key == "listen" { "admin" } else { "listen" };
        let config = dir.path().join("homing.toml");
        let text = format!("{key} = \"{addr}\"\n{other} = \"127.0.0.1:0\"\ndata = \"data\"\n");
        std::fs::write(&config, text).unwrap();
        let output = homing(&["gateway", "--config", config.to_str().unwrap()]);
        assert_eq!(output.status.code(), Some(1));
        let says = stderr(&output);
        assert!(
            says.contains(&addr.to_string()) && says.contains(key),
            "{says}"
        );
        assert!(!dir.path().join("data").exists());
    }
}

/// Would catch an `up` that waits for ever for an engine that cannot start, or leaves one behind.
#[test]
fn up_says_why_a_node_did_not_start() {
    let model = std::env::var_os("HOMING_MODEL").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/SmolLM2-135M-Instruct.Q4_1.gguf"),
        PathBuf::from,
    );
    assert!(
        model.is_file(),
        "no model at {}: run `make setup`",
        model.display()
    );
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("homing");
    std::fs::copy(env!("CARGO_BIN_EXE_homing"), &program).unwrap();
    let engine = dir.path().join("homing-engine");
    std::fs::write(
        &engine,
        "#!/bin/sh\necho 'the roof is on fire' >&2\nexit 3\n",
    )
    .unwrap();
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&engine, executable).unwrap();
    let output = Command::new(&program)
        .args([
            "up",
            "--json",
            "--listen",
            "127.0.0.1:0",
            "--admin",
            "127.0.0.1:0",
            "--model",
        ])
        .arg(&model)
        .arg("--data")
        .arg(dir.path().join("data"))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let says = stderr(&output);
    assert!(
        says.contains("did not start") && says.contains("exit status: 3"),
        "{says}"
    );
    assert!(says.contains("the roof is on fire"), "{says}");
    assert_eq!(stdout(&output), "");
    let secret = std::fs::read_to_string(dir.path().join("data/secrets/node")).unwrap();
    for log in std::fs::read_dir(dir.path().join("data/logs")).unwrap() {
        let text = std::fs::read_to_string(log.unwrap().path()).unwrap();
        assert!(
            !text.contains(&secret) && !text.contains("sk-homing-"),
            "a secret is in a log"
        );
    }
}
