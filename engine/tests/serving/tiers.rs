//! The tiers through the binary: a history that the pool lost is served from host memory or from the
//! disk, by the next life of the node too, and no more once it is wiped; the metrics say so, and what
//! does not fit the machine is refused at the start.

use serde_json::{Value, json};

use crate::common::{Node, cached, content, engine, model_path, until, user};

fn ask(node: &Node, which: usize) -> Value {
    let text = format!("{which} {}", "Rivers run to the sea. ".repeat(30));
    node.chat(json!({"messages": user(&text), "max_tokens": 4}))
}

fn tier(node: &Node, name: &str, tier: &str) -> f64 {
    let labels = format!("model_name=\"smol\",tier=\"{tier}\"");
    node.metric(&format!("homing:kv_tier_{name}{{{labels}}}"))
}

#[test]
fn a_history_that_the_pool_lost_is_served_from_host_memory() {
    let memory = ["--kv-memory", "15MiB", "--kv-host-memory", "60MiB"];
    serve_from_host_memory(&memory, 368_640.0);
}

/// Sizes are those of the pool's format, and so are the bytes that go down and come back.
#[test]
fn a_history_in_eight_bits_is_served_from_host_memory() {
    let memory = ["--kv-memory", "8MiB", "--kv-host-memory", "32MiB"];
    serve_from_host_memory(&[&memory[..], &["--kv-dtype", "int8"]].concat(), 207_360.0);
}

/// A pool has 43 blocks, and a prompt about 14.
fn serve_from_host_memory(args: &[&str], block_bytes: f64) {
    let node = Node::start(args);
    let blocks = |name: &str| node.ready[name].as_u64().expect("a count");
    assert!((40..50).contains(&blocks("kv_blocks")), "{}", node.ready);
    assert!(blocks("kv_host_blocks") > 3 * blocks("kv_blocks"));
    let first: Vec<_> = (0..8).map(|which| ask(&node, which)).collect();
    assert!(
        tier(&node, "block_seconds", "host") > 0.0,
        "before anybody comes back"
    );
    let again: Vec<_> = (0..8).map(|which| ask(&node, which)).collect();
    for (first, again) in first.iter().zip(&again) {
        assert_eq!(content(first), content(again));
        let prompt = again["usage"]["prompt_tokens"].as_u64().expect("a count");
        assert!(cached(again) + 16 >= prompt, "{again}");
    }
    assert!(tier(&node, "hit_tokens_total", "host") > 600.0);
    assert!(tier(&node, "stored_total", "host") > 40.0);
    let held = tier(&node, "blocks", "host");
    assert!(held > 0.0);
    assert_eq!(tier(&node, "bytes", "host"), held * block_bytes);
    let capacity = blocks("kv_host_blocks") as f64;
    assert_eq!(tier(&node, "capacity_blocks", "host"), capacity);
    // A copy of that takes more than a microsecond, and less than computing 16 tokens.
    let block_s = tier(&node, "block_seconds", "host");
    assert!(block_s > 1e-6 && block_s < 1.0, "{block_s}");
    assert_eq!(tier(&node, "capacity_blocks", "disk"), 0.0);
    assert_eq!(tier(&node, "block_seconds", "disk"), 0.0);
}

/// The node is killed, not stopped: what was written must serve all the same.
#[test]
fn a_history_survives_the_node_on_the_disk_until_it_is_wiped() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path().to_str().expect("a path in UTF-8");
    let start = || {
        Node::start(
            &[
                ("--kv-memory", "15MiB"),
                ("--kv-host-memory", "8MiB"),
                ("--kv-disk", dir),
                ("--kv-disk-size", "200MiB"),
            ]
            .map(|(flag, value)| [flag, value])
            .concat(),
        )
    };
    let node = start();
    let first: Vec<_> = (0..8).map(|which| ask(&node, which)).collect();
    until("the disk has it", || tier(&node, "blocks", "disk") >= 30.0);
    let again = (0..8).map(|which| ask(&node, which));
    for (first, again) in first.iter().zip(again) {
        assert_eq!(content(first), content(&again));
    }
    assert!(tier(&node, "hit_tokens_total", "disk") > 0.0);
    let block_s = tier(&node, "block_seconds", "disk");
    assert!(block_s > tier(&node, "block_seconds", "host"), "{block_s}");
    assert!(tier(&node, "capacity_blocks", "disk") > 400.0);
    drop(node);

    let node = start();
    until("it says what is there", || {
        tier(&node, "blocks", "disk") >= 30.0
    });
    let found: u64 = (0..4).map(|which| cached(&ask(&node, which))).sum();
    assert!(found > 400, "{found} tokens from the life before");
    assert_eq!(
        wipe(dir, "--everything").0,
        Some(1),
        "not while a node runs"
    );
    drop(node);

    assert_eq!(
        wipe(dir, "--salt=another"),
        (Some(0), r#"{"wiped": 0}"#.to_owned())
    );
    let (code, said) = wipe(dir, "--unsalted");
    assert!(code == Some(0) && said != r#"{"wiped": 0}"#, "{said}");
    let node = start();
    assert_eq!(cached(&ask(&node, 0)), 0);
}

fn wipe(dir: &str, scope: &str) -> (Option<i32>, String) {
    let output = engine()
        .args(["kv", "wipe", "--kv-disk", dir, scope])
        .output();
    let output = output.expect("the engine runs");
    let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    (output.status.code(), said)
}

#[test]
fn a_host_tier_that_does_not_fit_is_refused_with_the_numbers() {
    let mut command = engine();
    command.args([
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--kv-host-memory",
        "900000GiB",
    ]);
    let output = command.arg("--model").arg(model_path()).output();
    let output = output.expect("the engine runs");
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("of host tier (--kv-host-memory)"), "{said}");
    assert!(said.contains("less --kv-host-memory"), "{said}");
}
