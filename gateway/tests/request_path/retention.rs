//! Catches a wish about the cache that does not reach the node, and one that nobody had.

use serde_json::json;

use crate::support::Gateway;
use crate::support::node::Node;

#[test]
fn the_node_hears_for_how_long_a_prefix_is_wanted() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let hi = json!([{"role": "user", "content": "hi"}]);
    let marked = |ttl: &str| {
        json!([{"role": "user", "content": [
            {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral", "ttl": ttl}},
        ]}])
    };
    // A user's words are no mark.
    let said = json!([{"role": "user", "content": "\"cache_control\": {\"ttl\": \"1h\"}"}]);
    for (path, field, value, expected) in [
        (
            "chat/completions",
            "prompt_cache_retention",
            json!("24h"),
            Some("86400"),
        ),
        (
            "chat/completions",
            "prompt_cache_retention",
            json!("in_memory"),
            None,
        ),
        ("chat/completions", "messages", marked("1h"), Some("3600")),
        ("chat/completions", "messages", said.clone(), None),
        ("messages", "messages", marked("1h"), Some("3600")),
        ("messages", "messages", marked("5m"), Some("300")),
        ("messages", "messages", said, None),
        (
            "responses",
            "prompt_cache_retention",
            json!("24h"),
            Some("86400"),
        ),
        (
            "responses",
            "prompt_cache_options",
            json!({"ttl": "30m"}),
            Some("1800"),
        ),
    ] {
        let mut body = json!({"model": "scripted", "max_tokens": 9});
        match path {
            "responses" => body = json!({"model": "scripted", "input": "hi"}),
            _ => body["messages"] = hi.clone(),
        }
        body[field] = value;
        let forged = ["x-cache-retention-s: 7", "anthropic-version: 2023-06-01"];
        let answer = gateway.post(&format!("/v1/{path}"), &forged, body.to_string().as_bytes());
        assert_eq!(answer.status, 200, "{answer:?}");
        let received = node.received().pop().unwrap();
        assert_eq!(received.header("x-cache-retention-s"), expected, "{body}");
    }
}
