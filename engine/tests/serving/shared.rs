//! The shared tier through the binary: what one node lost another has from the store, of its own scope
//! alone; what cannot work is refused at the start; the store's client ends with its node.

use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::common::{Node, TOKEN, cached, content, engine, model_path, until, user};
use crate::mooncake_twin::Twin;

fn start(twin: &Twin) -> Node {
    let python = twin.python();
    let args = [
        ("--kv-memory", "15MiB"),
        ("--kv-host-memory", "8MiB"),
        ("--kv-shared", "mooncake://127.0.0.1:50051"),
        ("--kv-shared-memory", "64MiB"),
        ("--kv-shared-python", python.to_str().expect("UTF-8")),
    ];
    let args = args.map(|(flag, value)| [flag, value]).concat();
    let node = Node::start_with(&args, Some(TOKEN));
    until("the store is reached", || shared(&node, "up") == 1.0);
    node
}

fn objects(twin: &Twin) -> Vec<PathBuf> {
    let folder = fs::read_dir(twin.path().join("objects")).expect("a folder");
    folder.flatten().map(|entry| entry.path()).collect()
}

fn shared(node: &Node, name: &str) -> f64 {
    node.metric(&format!("homing:kv_shared_{name}{{"))
}

fn tier(node: &Node, name: &str) -> f64 {
    let labels = "model_name=\"smol\",tier=\"shared\"";
    node.metric(&format!("homing:kv_tier_{name}{{{labels}}}"))
}

fn ask(node: &Node, which: usize, salt: &str) -> Value {
    let text = format!("{which} {}", "Rivers run to the sea. ".repeat(30));
    node.chat(json!({"messages": user(&text), "max_tokens": 4, "cache_salt": salt}))
}

#[test]
fn a_history_that_one_node_lost_is_served_to_another_of_the_same_scope() {
    let Some(twin) = Twin::new() else { return };
    let a = start(&twin);
    assert_eq!(a.ready["kv_shared"], "mooncake://127.0.0.1:50051");
    let first: Vec<_> = (0..12).map(|which| ask(&a, which, "ours")).collect();
    until("the store has some of it", || {
        tier(&a, "stored_total") >= 70.0
    });
    let b = start(&twin);
    for which in 0..3 {
        // At most what these prompts themselves have in common.
        assert!(cached(&ask(&b, which, "theirs")) <= 16, "of another scope");
    }
    assert_eq!(tier(&b, "hit_tokens_total"), 0.0);
    let again: Vec<_> = (0..6).map(|which| ask(&b, which, "ours")).collect();
    let mut found = 0;
    for (first, again) in first.iter().zip(&again) {
        assert_eq!(content(first), content(again));
        found += cached(again);
    }
    assert!(found > 400, "{found} tokens");
    assert!(tier(&b, "hit_tokens_total") > 400.0);
    assert!(tier(&b, "block_seconds") > 0.0 && tier(&b, "blocks") > 0.0);
    let failures = ["damaged_total", "failed_total", "no_room_total"];
    assert_eq!(failures.map(|name| shared(&b, name)), [0.0; 3]);

    // Everything that is there now is worthless: it is computed again, and said so.
    for object in objects(&twin) {
        let mut bytes = fs::read(&object).expect("an object");
        bytes[1000] ^= 1;
        fs::write(&object, bytes).expect("an object");
    }
    let c = start(&twin);
    let again = ask(&c, 0, "ours");
    assert_eq!((content(&again), cached(&again)), (content(&first[0]), 0));
    assert!(shared(&c, "damaged_total") > 0.0);
}

/// Also where the node cannot say goodbye.
#[test]
fn the_client_of_the_store_ends_with_its_node() {
    let Some(twin) = Twin::new() else { return };
    for signal in ["-TERM", "-KILL"] {
        let mut node = start(&twin);
        let client = client(&node);
        let is_running = || fs::exists(format!("/proc/{client}")).expect("/proc");
        assert!(is_running());
        node.signal(signal);
        let code = node.exit_code();
        assert_eq!(code, (signal == "-TERM").then_some(0));
        until("the client ends", || !is_running());
    }
}

/// The node's only child.
fn client(node: &Node) -> u32 {
    let tasks = fs::read_dir(format!("/proc/{}/task", node.child.id())).expect("/proc");
    let children = tasks.flatten().filter_map(|task| {
        let children = fs::read_to_string(task.path().join("children")).ok()?;
        children.split_whitespace().next()?.parse().ok()
    });
    children.last().expect("a client")
}

#[test]
fn what_cannot_work_is_refused_by_name() {
    let host = ["--kv-host-memory", "8MiB"];
    let rows: [(&[&str], bool, &str); 6] = [
        (
            &["--kv-shared", "mooncake://h:1"],
            true,
            "--kv-host-memory is 0",
        ),
        (
            &[&host[..], &["--kv-shared", "mooncake://h:1"]].concat(),
            false,
            "node token",
        ),
        (
            &[&host[..], &["--kv-shared", "redis://h:1"]].concat(),
            true,
            "mooncake://HOST:PORT",
        ),
        (
            &[&host[..], &["--kv-shared", "mooncake://h"]].concat(),
            true,
            "mooncake://HOST:PORT",
        ),
        (
            &[&host[..], &["--kv-shared-rdma", "mlx5_0"]].concat(),
            true,
            "--kv-shared",
        ),
        (
            &[
                &host[..],
                &[
                    "--kv-shared",
                    "mooncake://h:1",
                    "--kv-shared-memory",
                    "900000GiB",
                ],
            ]
            .concat(),
            true,
            "--kv-shared-memory",
        ),
    ];
    for (args, token, expected) in rows {
        let mut command = engine();
        command.args(["serve", "--listen", "127.0.0.1:0", "--model"]);
        command.arg(model_path()).args(args);
        if token {
            command.env("HOMING_NODE_TOKEN", TOKEN);
        }
        let output = command.output().expect("the engine runs");
        assert_ne!(output.status.code(), Some(0), "{args:?}");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains(expected), "{args:?}: {said}");
    }
}
