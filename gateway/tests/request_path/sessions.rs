//! Catches a session read from another signal than the first that counts, one that leaves its node
//! for a client's spelling (fault H14), and a node that sees another spelling than was hashed.

use serde_json::{Value, json};

use crate::support::client::{Answer, Connection};
use crate::support::node::{Act, MODEL, Node, json as answer_of, usage};
use crate::support::{Gateway, Stream, chat};

fn node_of(answer: &Answer) -> &str {
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.header("x-homing-node").unwrap()
}

/// The session that the ledger has for an answer.
fn session(gateway: &Gateway, answer: &Answer) -> String {
    let row = gateway.row(answer.header("x-request-id").unwrap());
    row["session"].as_str().unwrap().to_owned()
}

/// What a node says, with this many tokens cached.
fn cached(tokens: u64) -> Vec<Act> {
    let body = json!({"id": "x", "object": "chat.completion", "created": 1, "model": MODEL,
        "choices": [{"index": 0, "finish_reason": "stop",
            "message": {"role": "assistant", "content": "ok"}}],
        "usage": usage(tokens + 40, tokens, 2)});
    vec![Act::Send(answer_of(200, &[], &body.to_string()))]
}

#[test]
fn h14_a_changing_billing_line_keeps_node_and_prefix() {
    let nodes = [Node::start(), Node::start()];
    let gateway = Gateway::start(&[&nodes[0], &nodes[1]]);
    let rules = "Read before you write. ".repeat(3_000);
    let ask = |number: &str, user: &str| {
        let line = format!(
            "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={number};"
        );
        let body = json!({"model": MODEL, "max_tokens": 10, "messages": [
            {"role": "user", "content": [{"type": "text", "text": user}]}], "system": [
            {"type": "text", "text": line},
            {"type": "text", "text": rules, "cache_control": {"type": "ephemeral"}}]});
        gateway.post("/v1/messages", &[], body.to_string().as_bytes())
    };
    // Chance would keep one pair of two at its node, not eight.
    for at in 0..8 {
        let user = format!("conversation {at}");
        let first = ask("aaaaa", &user);
        let (name, node) = match node_of(&first) {
            "node-0" => ("node-0", &nodes[0]),
            _ => ("node-1", &nodes[1]),
        };
        node.script(cached(16_000));
        let second = ask("bbbbb", &user);
        assert_eq!(node_of(&second), name, "{user}");
        assert_eq!(session(&gateway, &first), session(&gateway, &second));
        assert_eq!(second.json()["usage"]["cache_read_input_tokens"], 16_000);
        let mut received = node.received();
        let (second, first) = (received.pop().unwrap(), received.pop().unwrap());
        assert_eq!(first.body["messages"], second.body["messages"]);
        assert_eq!(second.body["messages"][0]["content"], rules.as_str());
    }
    let words = "x-anthropic-billing-header: cc_version=1; cch=ccccc; is in my logs";
    let answer = ask("aaaaa", words);
    let node = &nodes[usize::from(node_of(&answer) == "node-1")];
    assert_eq!(
        node.received().pop().unwrap().body["messages"][1]["content"],
        words
    );
    gateway.assert_idle();
}

#[test]
fn the_first_signal_that_is_there_decides() {
    let node = Node::start();
    let models = format!(
        "[[models]]\nid = \"{MODEL}\"\n[sessions]\nheaders = [\"x-ticket\"]\ndisable = [\"x-grok-conv-id\"]\n"
    );
    let gateway = Gateway::with_models(&[&node], &models);
    let long = format!("session-id: {}", "x".repeat(256));
    let plain = json!({});
    let key = json!({"prompt_cache_key": "k"});
    let claude = "x-claude-code-session-id: c";
    let claude_body = json!({"max_tokens": 5, "metadata": {"user_id": "user_1_session_u"}});
    for (path, headers, more, expected) in [
        (
            "/v1/chat/completions",
            &["x-session-affinity: a", "session-id: s"][..],
            &key,
            "a",
        ),
        (
            "/v1/chat/completions",
            &["x-ticket: t", "session-id: s"],
            &key,
            "t",
        ),
        ("/v1/chat/completions", &["x-grok-conv-id: g"], &key, "k"),
        ("/v1/chat/completions", &[&long], &key, "fp-"),
        ("/v1/chat/completions", &[], &plain, "fp-"),
        ("/v1/messages", &[claude], &claude_body, "c"),
        (
            "/v1/messages",
            &[claude, "x-claude-code-agent-id: 7"],
            &claude_body,
            "c/7",
        ),
        ("/v1/messages", &[], &claude_body, "u"),
        (
            "/v1/responses",
            &["session-id: s", "thread-id: s"],
            &key,
            "s",
        ),
        ("/v1/responses", &[], &key, "k"),
    ] {
        let mut body = chat(Stream::No, "hi");
        if path == "/v1/responses" {
            body = json!({"model": MODEL, "input": "hi", "store": false});
        }
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        let answer = gateway.post(path, headers, body.to_string().as_bytes());
        assert_eq!(answer.status, 200, "{answer:?}");
        let session = session(&gateway, &answer);
        let is_expected = session == expected || (expected == "fp-" && session.starts_with("fp-"));
        assert!(
            is_expected,
            "{session} instead of {expected}: {path} {headers:?} {more}"
        );
    }
    gateway.assert_idle();
}

#[test]
fn a_node_sees_the_spelling_that_was_hashed() {
    let node = Node::start();
    let models = format!(
        "[[models]]\nid = \"{MODEL}\"\n[normalise.tenants.b]\ncontent = false\ncache_marks = false\n"
    );
    let gateway = Gateway::with_models(&[&node], &models);
    let mut body = chat(Stream::No, "");
    let part = json!({"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}});
    body["messages"] = json!([{"role": "user", "content": [part]}]);
    body["prompt_cache_retention"] = "24h".into();
    let bytes = body.to_string();
    let ask = |key: &str| {
        let authorization = format!("authorization: Bearer {key}");
        let mut connection = Connection::open(gateway.addr);
        let path = "/v1/chat/completions";
        let answer = connection
            .request("POST", path, &[&authorization], bytes.as_bytes())
            .answer();
        assert_eq!(answer.status, 200, "{answer:?}");
        node.received().pop().unwrap().body
    };
    let seen = ask(&gateway.key);
    assert_eq!(seen["messages"], json!([{"role": "user", "content": "hi"}]));
    assert_eq!(seen["prompt_cache_retention"], "24h");
    // Switched off for this tenant.
    assert_eq!(ask(&gateway.other_key)["messages"], body["messages"]);

    let mark = |ttl: &str| {
        let mut body = body.clone();
        body["messages"][0]["content"][0]["cache_control"]["ttl"] = Value::from(ttl);
        gateway.chat(&body)
    };
    assert_eq!(mark("1h").status, 200);
    let refused = mark("2h");
    assert_eq!(refused.status, 400, "{refused:?}");
    let param = "messages[0].content[0].cache_control.ttl";
    assert_eq!(refused.json()["error"]["param"], param);
    gateway.assert_idle();
}
