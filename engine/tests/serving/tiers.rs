//! The host tier through the binary: a history that the pool lost is served from it, the metrics
//! say so, and what does not fit the machine is refused at the start.

use serde_json::{Value, json};

use crate::common::{Node, cached, content, engine, model_path, user};

fn ask(node: &Node, which: usize) -> Value {
    let text = format!("{which} {}", "Rivers run to the sea. ".repeat(30));
    node.chat(json!({"messages": user(&text), "max_tokens": 4}))
}

#[test]
fn a_history_that_the_pool_lost_is_served_from_host_memory() {
    // 43 blocks, and a prompt has about 14.
    let node = Node::start(&["--kv-memory", "15MiB", "--kv-host-memory", "60MiB"]);
    let blocks = |name: &str| node.ready[name].as_u64().expect("a count");
    assert!(blocks("kv_host_blocks") > 3 * blocks("kv_blocks"));
    let first: Vec<_> = (0..8).map(|which| ask(&node, which)).collect();
    let again: Vec<_> = (0..8).map(|which| ask(&node, which)).collect();
    for (first, again) in first.iter().zip(&again) {
        assert_eq!(content(first), content(again));
        let prompt = again["usage"]["prompt_tokens"].as_u64().expect("a count");
        assert!(cached(again) + 16 >= prompt, "{again}");
    }
    assert!(node.metric("homing:kv_tier_hit_tokens_total{") > 600.0);
    assert!(node.metric("homing:kv_tier_stored_total{") > 40.0);
    let held = node.metric("homing:kv_tier_blocks{");
    assert!(held > 0.0);
    assert_eq!(node.metric("homing:kv_tier_bytes{"), held * 368_640.0);
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
