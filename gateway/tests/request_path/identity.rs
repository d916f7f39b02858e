//! Catches a request billed under another's id, a tenant's cache opened to another, and headers
//! that a client or node forged.

use crate::support::client::Connection;
use crate::support::node::{Act, MODEL, Node, json, whole_of};
use crate::support::{Gateway, Stream, chat, eventually};

#[test]
fn request_ids_are_the_clients_where_usable_and_new() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let body = chat(Stream::No, "hi").to_string();
    let long = "x".repeat(128);
    for (sent, kept) in [
        ("req-1", true),
        ("req-1", false),
        (long.as_str(), true),
        ("two words", false),
        (&"y".repeat(129), false),
        ("", false),
        ("ünï", false),
    ] {
        let header = format!("x-request-id: {sent}");
        let answer = gateway.post("/v1/chat/completions", &[&header], body.as_bytes());
        let id = answer.header("x-request-id").unwrap();
        assert_eq!(id == sent, kept, "{sent:?} became {id:?}");
        assert_eq!(
            node.received().last().unwrap().header("x-request-id"),
            Some(id)
        );
        assert_eq!(gateway.row(id)["status"], "complete");
    }
    // Another tenant may use the same id.
    let authorization = format!("x-api-key: {}", gateway.other_key);
    let mut connection = Connection::open(gateway.addr);
    let headers = ["x-request-id: req-1", authorization.as_str()];
    let answer = connection
        .request("POST", "/v1/chat/completions", &headers, body.as_bytes())
        .answer();
    assert_eq!(answer.header("x-request-id"), Some("req-1"));
    gateway.assert_idle();
}

#[test]
fn h11_each_tenant_has_its_own_salt() {
    let node = Node::start();
    let gateway = Gateway::exact(&[&node]);
    let mut salts = Vec::new();
    for (key, salt) in [
        (&gateway.key, None),
        (&gateway.key, Some("theirs")),
        (&gateway.other_key, None),
        (&gateway.other_key, Some("theirs")),
    ] {
        let mut body = chat(
            Stream::No,
            "the same prompt for everyone, long enough for a whole block of it",
        );
        if let Some(salt) = salt {
            body["cache_salt"] = salt.into();
        }
        body["kv_transfer_params"] = serde_json::json!({"remote_engine_id": "x"});
        body["bootstrap_room"] = 7.into();
        body["prompt_token_ids"] = serde_json::json!([1, 2]);
        body["my_field"] = serde_json::json!({"kept": 1.0});
        let authorization = format!("authorization: Bearer {key}");
        let mut connection = Connection::open(gateway.addr);
        let answer = connection
            .request(
                "POST",
                "/v1/chat/completions",
                &[&authorization],
                body.to_string().as_bytes(),
            )
            .answer();
        assert_eq!(answer.status, 200);
        // This node tells nothing of its cache: what a tenant sent there before is expected there,
        // for that tenant alone.
        let is_first = salts.len() % 2 == 0;
        let expected = answer.header("x-homing-expected-cached");
        assert_eq!(expected == Some("0"), is_first, "{expected:?}");
        let sent = node.received().pop().unwrap().body;
        for forged in ["kv_transfer_params", "bootstrap_room", "prompt_token_ids"] {
            assert!(sent.get(forged).is_none(), "{forged} reached the node");
        }
        assert_eq!(sent["my_field"], serde_json::json!({"kept": 1.0}));
        let salt = sent["cache_salt"].as_str().unwrap().to_owned();
        assert!(
            salt.len() == 64 && salt.bytes().all(|byte| byte.is_ascii_hexdigit()),
            "{salt}"
        );
        salts.push(salt);
    }
    assert_eq!(salts[0], salts[1]);
    assert_eq!(salts[2], salts[3]);
    assert_ne!(salts[0], salts[2]);
    gateway.assert_idle();
}

#[test]
fn debug_headers_are_for_the_permitted() {
    let node = Node::start();
    let gateway = Gateway::exact(&[&node]);
    let body = chat(Stream::No, "0123456789 0123456789 0123456789").to_string();
    for (key, permitted) in [(&gateway.key, true), (&gateway.other_key, false)] {
        let authorization = format!("authorization: Bearer {key}");
        let mut connection = Connection::open(gateway.addr);
        let headers = ["x-homing-debug: 1", authorization.as_str()];
        let answer = connection
            .request("POST", "/v1/chat/completions", &headers, body.as_bytes())
            .answer();
        let tokens = answer
            .header("x-homing-prompt-tokens")
            .map(|text| text.parse::<u64>().unwrap());
        assert_eq!(tokens.is_some_and(|tokens| tokens > 32), permitted);
        assert_eq!(
            answer.header("x-homing-last-block").map(str::len),
            permitted.then_some(32)
        );
    }
    gateway.assert_idle();
}

#[test]
fn a_node_that_disagrees_about_the_prompt_is_counted() {
    let node = Node::start();
    let gateway = Gateway::exact(&[&node]);
    let ask = || {
        gateway.post(
            "/v1/chat/completions",
            &["x-homing-debug: 1"],
            chat(Stream::No, "hi").to_string().as_bytes(),
        )
    };
    let first = ask();
    let tokens = format!(
        "x-node-prompt-tokens: {}",
        first.header("x-homing-prompt-tokens").unwrap()
    );
    let block = format!(
        "x-node-last-block: {}",
        first.header("x-homing-last-block").unwrap()
    );
    for (headers, mismatches) in [
        ([tokens.as_str(), block.as_str()], 0.0),
        (["x-node-prompt-tokens: 3", block.as_str()], 1.0),
        ([tokens.as_str(), "x-node-last-block: 00"], 2.0),
    ] {
        node.script(vec![Act::Send(json(
            200,
            &headers,
            r#"{"choices":[],"usage":{"prompt_tokens":1}}"#,
        ))]);
        ask();
        assert_eq!(
            gateway.metric("homing_prompt_mismatch_total"),
            mismatches,
            "{headers:?}"
        );
    }
}

#[test]
fn the_node_sees_only_our_headers() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    node.script(whole_of("x"));
    let forged = [
        "x-homing-node: evil",
        "x-node-prompt-tokens: 1",
        "cookie: c",
        "connection: keep-alive, x-drop",
        "x-drop: 1",
    ];
    let answer = gateway.post(
        "/v1/chat/completions",
        &forged,
        chat(Stream::No, "hi").to_string().as_bytes(),
    );
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("x-homing-node"), Some("node-0"));
    let sent = node.received().pop().unwrap();
    for name in [
        "x-homing-node",
        "x-node-prompt-tokens",
        "cookie",
        "x-drop",
        "x-api-key",
    ] {
        assert_eq!(sent.header(name), None, "{name}");
    }
    let token = sent.header("authorization").unwrap();
    assert!(token.starts_with("Bearer ") && !token.contains(&gateway.key));
    let lines = || {
        gateway
            .log()
            .lines()
            .filter(|line| line.contains("request_id="))
            .count()
    };
    eventually("the request is logged", || lines() > 0);
    let log = gateway.log();
    assert_eq!(lines(), 1, "{log}");
    assert!(
        !log.contains(&gateway.key) && !log.contains(token),
        "a secret is in the log"
    );
}

#[test]
fn models_and_health() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let authorization = format!("authorization: Bearer {}", gateway.key);
    let get = |path: &str, headers: &[&str]| {
        Connection::open(gateway.addr)
            .request("GET", path, headers, b"")
            .answer()
    };
    let list = get("/v1/models", &[&authorization]).json();
    assert_eq!(
        (&list["object"], &list["data"][0]["id"]),
        (&"list".into(), &MODEL.into())
    );
    assert_eq!(list["data"][0]["max_model_len"], 8192);
    let one = get(&format!("/v1/models/{MODEL}"), &[&authorization]);
    assert_eq!(one.json()["object"], "model");
    assert_eq!(
        get("/v1/models/nope", &[&authorization]).json()["error"]["code"],
        "model_not_found"
    );
    assert_eq!(get("/v1/models", &[]).status, 401);
    assert_eq!(get("/health", &[]).status, 200);
    gateway.assert_idle();
}
