//! Blocks that lie deeper at the other node, or that this one keeps in another form.

use serde_json::{Value, json};

use super::{CHAT, FAILED, Pair, RECEIVED, asked, cached, prompt};
use crate::common::{Node, TOKEN, content, until};

fn on_disk(node: &Node) -> f64 {
    node.metric("homing:kv_tier_blocks{model_name=\"smol\",tier=\"disk\"}")
}

/// What the pool and host memory of the other node have lost is read from its disk and sent.
#[test]
fn a_moved_session_fetches_from_the_others_disk() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path().to_str().expect("a path in UTF-8");
    let old = [
        ("--kv-memory", "15MiB"),
        ("--kv-host-memory", "8MiB"),
        ("--kv-disk", dir),
        ("--kv-disk-size", "200MiB"),
    ];
    let old = Node::start_with(
        &old.map(|(flag, value)| [flag, value]).concat(),
        Some(TOKEN),
    );
    let pair = Pair::of(old, Node::start_with(&[], Some(TOKEN)));
    let messages = |which: usize| prompt(&format!("deep {which}"), 200);
    let ask = |node: &Node, which: usize, params: &Value| {
        let mut body = asked(messages(which), json!({}));
        body["kv_transfer_params"] = params.clone();
        let reply = node.post(CHAT, &body);
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()
    };
    let first: Vec<_> = (0..8)
        .map(|which| ask(&pair.prefill, which, &Value::Null))
        .collect();
    until("the disk has it", || on_disk(&pair.prefill) >= 30.0);
    let from = json!({
        "fetch_from": pair.endpoints, "remote_engine_id": pair.prefill_id, "on_failure": "error",
    });
    let mut found = 0;
    for (which, first) in first.iter().enumerate() {
        let moved = ask(&pair.decode, which, &from);
        assert_eq!(content(&moved), content(first));
        found += usize::from(cached(&moved) > 160);
    }
    // Pool and host memory hold four of these prompts at most.
    assert!(found > 5, "{found} of 8 prompts were found");
    assert_eq!(pair.decode.metric(FAILED), 0.0);
    pair.at_rest();
}

/// Wider values in another order of dimensions are made of what comes; narrower ones would lose bits.
#[test]
fn blocks_are_widened_for_other_ops_and_never_narrowed() {
    let body = asked(prompt("wider", 60), json!({}));
    let pair = Pair::start(&[], &["--ops", "reference"]);
    let (first, second) = pair.both(&body, &json!({"on_failure": "error"}));
    assert_eq!(
        (first.status, second.status),
        (200, 200),
        "{}",
        second.text()
    );
    let token = |reply: &Value| reply["choices"][0]["token_ids"][0].clone();
    assert_eq!(token(&first.json()), token(&second.json()));
    assert_eq!(pair.decode.metric(RECEIVED), 1.0);
    pair.at_rest();

    let pair = Pair::start(&["--ops", "reference"], &[]);
    let (_, second) = pair.both(&body, &json!({}));
    assert_eq!(second.status, 200, "computed here: {}", second.text());
    assert_eq!(pair.decode.metric(FAILED), 1.0);
    let (_, second) = pair.both(&body, &json!({"on_failure": "error"}));
    let (status, code, _) = second.error();
    assert_eq!((status, &*code), (503, "kv_transfer_failed"));
}
