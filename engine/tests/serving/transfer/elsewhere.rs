//! Blocks that lie deeper at the other node, or that this one keeps in another form.

use serde_json::{Value, json};

use super::harm::{Harm, proxy};
use super::{CHAT, FAILED, HELD, Pair, RECEIVED, Way, asked, cached, prompt};
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

/// A fetch whose connections break is taken up again for what is missing, whatever order blocks came in, and
/// leaves nothing pinned.
#[test]
fn a_broken_fetch_is_taken_up_again_and_leaves_nothing_pinned() {
    let nodes = [(); 2].map(|()| Node::start_with(&[], Some(TOKEN)));
    let [old, new] = nodes;
    let pair = Pair::of(old, new);
    for (round, at) in [1_000_000, 1_700_000, 2_400_000, 3_100_000]
        .iter()
        .enumerate()
    {
        let body = asked(prompt(&format!("broken {round}"), 400), json!({}));
        assert_eq!(pair.prefill.post(CHAT, &body).status, 200);
        let cut = *at;
        let harm = move |number| {
            if number < 2 {
                Harm::Cut(cut)
            } else {
                Harm::None
            }
        };
        let through = proxy(&pair.endpoint(Way::Tcp), harm);
        let mut moved = body.clone();
        moved["kv_transfer_params"] = json!({
            "fetch_from": [through], "remote_engine_id": pair.prefill_id, "on_failure": "error",
        });
        let moved = pair.decode.post(CHAT, &moved);
        assert_eq!(moved.status, 200, "{round}: {}", moved.text());
        assert!(cached(&moved.json()) > 350, "{}", moved.text());
    }
    pair.prefill.wait_for_metric(HELD, |held| held == 0.0);
    let expired = "homing:kv_tickets_expired_total{model_name=\"smol\"}";
    assert_eq!(
        pair.prefill.metric(expired),
        0.0,
        "held for longer than anybody was there"
    );
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

/// Pools in 8 bits hand over what they have, in fewer bytes, and the answer is what one node would have given. A
/// pool in 16 bits does not take it, and computes instead.
#[test]
fn pools_in_eight_bits_hand_over_to_each_other_alone() {
    let int8 = ["--kv-dtype", "int8"];
    let pair = Pair::start(&int8, &int8);
    let mixed = Node::start_with(&int8, Some(TOKEN));
    for way in [Way::Tcp, Way::Shared] {
        let fields = json!({"cache_salt": format!("{way:?}")});
        let body = asked(prompt("eight bits", 300), fields);
        let expected = mixed.post(CHAT, &body).json();
        let only = json!({"remote_endpoints": [pair.endpoint(way)], "on_failure": "error"});
        let (_, second) = pair.both(&body, &only);
        assert_eq!(second.status, 200, "{}", second.text());
        let second = second.json();
        assert_eq!(second["choices"], expected["choices"], "{way:?}");
        assert_eq!(second["usage"], expected["usage"], "{way:?}");
    }
    let received = "homing:kv_transfer_received_bytes_total";
    let blocks = pair.decode.metric(received) / 207_360.0;
    assert!(blocks > 30.0 && blocks.fract() == 0.0, "{blocks} blocks");
    pair.at_rest();

    let pair = Pair::of(pair.prefill, Node::start_with(&[], Some(TOKEN)));
    let body = asked(prompt("sixteen bits", 100), json!({}));
    let (_, second) = pair.both(&body, &json!({}));
    assert_eq!(second.status, 200, "computed here: {}", second.text());
    assert_eq!(pair.decode.metric(FAILED), 1.0);
    let (_, second) = pair.both(&body, &json!({"on_failure": "error"}));
    let (status, code, _) = second.error();
    assert_eq!((status, &*code), (503, "kv_transfer_failed"));
}
