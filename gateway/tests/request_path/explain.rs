//! Catches a decision that cannot be explained afterwards, one whose explanation differs from what
//! happened, and a log from which a prompt's shared beginning cannot be seen.

use serde_json::Value;

use crate::support::client::Answer;
use crate::support::node::{Act, Node};
use crate::support::{Gateway, Stream, chat, eventually};

fn explained(gateway: &Gateway, id: &str) -> Vec<Value> {
    let mut found = Vec::new();
    eventually("the decision is in the log", || {
        let Some(text) = gateway.explain(id, &["--json"]) else {
            return false;
        };
        found = serde_json::from_str(&text).unwrap();
        true
    });
    found
}

fn id(answer: &Answer) -> &str {
    answer.header("x-request-id").unwrap()
}

#[test]
fn every_attempt_is_told_with_its_candidates() {
    let nodes = [Node::start(), Node::start()];
    let gateway = Gateway::exact(&[&nodes[0], &nodes[1]]);
    // The node of the session's first turn hangs up at the second.
    let bound = gateway.chat(&chat(Stream::No, "hi"));
    let is_first = bound.header("x-homing-node") == Some("node-0");
    // Twice: a pooled connection that breaks is taken for a stale one, and the node asked again.
    for _ in 0..2 {
        nodes[usize::from(!is_first)].script(vec![Act::Close]);
    }
    let answer = gateway.chat(&chat(Stream::No, "hi"));
    assert_eq!(answer.status, 200, "{answer:?}");

    let found = explained(&gateway, id(&answer));
    let [told] = found.as_slice() else {
        panic!("{found:?}")
    };
    let attempts = told["attempts"].as_array().unwrap();
    let [first, second] = attempts.as_slice() else {
        panic!("{told}")
    };
    assert_eq!(second["node"], answer.header("x-homing-node").unwrap());
    assert_eq!(second["reason"], "retry");
    assert_eq!(second["refused"][0]["node"], first["node"]);
    assert_eq!(second["refused"][0]["reason"], "excluded");
    assert_eq!(first["candidates"].as_array().unwrap().len(), 2);
    for candidate in first["candidates"].as_array().unwrap() {
        let terms = candidate["terms"].as_object().unwrap();
        let sum: f64 = terms.values().filter_map(Value::as_f64).sum();
        let cost = candidate["cost_ms"].as_f64().unwrap();
        assert!((sum - cost).abs() < 0.01, "{candidate}");
    }
    let row = gateway.row(id(&answer));
    for field in ["cached_tokens", "output_tokens", "record_id", "tenant"] {
        assert_eq!(told[field], row[field], "{field}");
    }
    assert_eq!(told["outcome"], row["status"]);

    // The same from the admin interface, by either id, and as text.
    for id in [id(&answer), told["record_id"].as_str().unwrap()] {
        let shown = gateway.admin_get(&format!("/admin/decisions/{id}"));
        assert_eq!(shown.status, 200);
        assert_eq!(shown.json()["decisions"], Value::Array(found.clone()));
        let text = gateway.explain(id, &[]).unwrap();
        let chosen = format!("*{}", second["node"].as_str().unwrap());
        assert!(text.contains(&chosen), "{text}");
        assert!(text.contains("attempt 2"), "{text}");
    }
    let last = gateway.admin_get("/admin/decisions?limit=1").json();
    assert_eq!(last["decisions"], Value::Array(found.clone()));
    assert_eq!(gateway.admin_get("/admin/decisions/nobody").status, 404);
    assert_eq!(gateway.admin_get("/admin/decisions?limit=x").status, 400);
    assert_eq!(gateway.explain("nobody", &[]), None);
}

#[test]
fn equal_beginnings_have_equal_blocks() {
    let node = Node::start();
    let gateway = Gateway::exact(&[&node]);
    let long = "the same words over and over. ".repeat(200);
    let asked = |text: &str| {
        let answer = gateway.chat(&chat(Stream::No, text));
        assert_eq!(answer.status, 200, "{answer:?}");
        explained(&gateway, id(&answer)).remove(0)
    };
    let one = asked(&format!("{long} one"));
    let two = asked(&format!("{long} {long} two"));
    let other = asked(&format!("x {long}"));
    let blocks = |told: &Value| -> Vec<String> {
        let blocks = told["blocks"].as_array().unwrap();
        let tokens = told["prompt_tokens"].as_u64().unwrap();
        assert_eq!(blocks.len() as u64, tokens / 512, "{told}");
        blocks
            .iter()
            .map(|block| block.as_str().unwrap().to_owned())
            .collect()
    };
    let (one, two, other) = (blocks(&one), blocks(&two), blocks(&other));
    assert!(one.len() >= 2 && two.len() > one.len(), "{one:?} {two:?}");
    assert_eq!(one, two[..one.len()]);
    assert!(other.iter().all(|block| !one.contains(block)));
    // What was found beside what was expected, in tokens.
    let credit = |what: &str| {
        gateway.metric(&format!(
            "homing_cache_credit_tokens_total{{node=\"node-0\",what=\"{what}\"}}"
        ))
    };
    let balance = credit("expected") + credit("unexpected") - credit("missing");
    assert!((balance - credit("found")).abs() < 0.5);
    assert!(
        credit("unexpected") > 0.0,
        "the nodes of these tests always find 64"
    );
}
