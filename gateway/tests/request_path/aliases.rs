//! Catches a name that reaches the node, a client that reads another name than it asked by, a bill
//! under the wrong model, a tenant that uses another's name, and a list that leaves names out.

use serde_json::{Value, json};

use crate::support::client::{Answer, Connection};
use crate::support::node::{
    Act, CHUNKS_END, MODEL, Node, chunk, json as answer_of, stream_head, usage, usage_chunk,
};
use crate::support::{Gateway, Stream, chat};

const ALIASES: &str = r#"
[[aliases]]
name = "claude-*"
model = "scripted"
[[aliases]]
name = "org/fast"
model = "scripted"
[[aliases]]
name = "only-b"
model = "scripted"
tenants = ["b"]
[[aliases]]
name = "scrip*"
model = "other"
"#;

/// A gateway with two models, of which only the scripted one has a node and a price.
fn gateway(node: &Node) -> Gateway {
    let models = format!("[[models]]\nid = \"{MODEL}\"\n[[models]]\nid = \"other\"\n{ALIASES}");
    Gateway::with_models(&[node], &models)
}

fn asking(model: &str, stream: Stream) -> Value {
    let mut body = chat(stream, "hi");
    body["model"] = model.into();
    body
}

#[test]
fn the_node_hears_the_model_the_client_its_own_name_and_the_ledger_both() {
    let node = Node::start();
    let gateway = gateway(&node);
    let body = asking("claude-x", Stream::No);
    let said = json!({
        "id": "x", "object": "chat.completion", "created": 1.50, "model": MODEL,
        "choices": [{"index": 0, "finish_reason": "stop", "message":
            {"role": "assistant", "content": "\"model\":\"scripted\"", "model": MODEL}}],
        "usage": usage(100, 64, 20),
    })
    .to_string();
    node.script(vec![Act::Send(answer_of(200, &[], &said))]);
    let answer = gateway.chat(&body);
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(
        answer.text(),
        said.replacen(r#""model":"scripted""#, r#""model":"claude-x""#, 1)
    );
    assert_eq!(node.received().pop().unwrap().body["model"], MODEL);
    let row = gateway.row(answer.header("x-request-id").unwrap());
    assert_eq!(
        (&row["model"], &row["model_asked"]),
        (&MODEL.into(), &"claude-x".into())
    );
    // The scripted model's price: 36 uncached, 64 cached, 20 out.
    assert_eq!(row["cost_nano_usd"], 36 + 7 + 60);

    // Without an alias all bytes are the node's, and there is one name.
    node.script(vec![Act::Send(answer_of(200, &[], &said))]);
    let answer = gateway.chat(&chat(Stream::No, "hi"));
    assert_eq!(answer.text(), said);
    let row = gateway.row(answer.header("x-request-id").unwrap());
    assert_eq!(row["model_asked"], MODEL);
    gateway.assert_idle();
}

#[test]
fn every_chunk_has_the_clients_name() {
    let node = Node::start();
    let gateway = gateway(&node);
    let text = "\"model\":\"scripted\" ";
    let delta = json!({"id": "x", "object": "chat.completion.chunk", "model": MODEL,
        "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": null}]});
    let split = delta
        .to_string()
        .replacen(",\"model\"", ",\ndata: \"model\"", 1);
    let events = [
        format!("data: {delta}\n\n"),
        format!("data:{delta}\r\n\r\n"),
        format!(": ping\n\nid: 7\ndata: {delta}\n\n"),
        format!("data: {split}\n\n"),
        format!("data: {}\n\n", usage_chunk(100, 64, 20)),
        "data: [DONE]\n\n".to_owned(),
    ];
    let all = events.concat();
    for bytewise in [false, true] {
        let script = if bytewise {
            let framed: Vec<u8> = all.bytes().flat_map(|byte| chunk(&[byte])).collect();
            vec![
                Act::Send(stream_head()),
                Act::Bytewise([framed.as_slice(), CHUNKS_END].concat()),
            ]
        } else {
            vec![Act::Send(
                [stream_head(), chunk(all.as_bytes()), CHUNKS_END.to_vec()].concat(),
            )]
        };
        node.script(script);
        let answer = gateway.chat(&asking("claude-x", Stream::WithUsage));
        let renamed = all.replace(r#""model":"scripted""#, r#""model":"claude-x""#);
        // The event of several lines is one of several lines again.
        let split = split.replace(r#""model":"scripted""#, r#""model":"claude-x""#);
        assert!(
            answer.text().contains(&format!("data: {split}\n\n")),
            "{}",
            answer.text()
        );
        assert_eq!(answer.text(), renamed);
        // Of the four, the client of these tests reads those that are one line of data.
        assert_eq!(answer.content(), text.repeat(2));
        let row = gateway.row(answer.header("x-request-id").unwrap());
        assert_eq!(
            (&row["model"], &row["output_tokens"]),
            (&MODEL.into(), &20.into())
        );
    }
    gateway.assert_idle();
}

#[test]
fn a_name_is_its_tenants_and_a_models_id_means_the_model() {
    let node = Node::start();
    let gateway = gateway(&node);
    let ask = |key: &str, model: &str| -> Answer {
        let authorization = format!("authorization: Bearer {key}");
        let body = asking(model, Stream::No).to_string();
        let mut connection = Connection::open(gateway.addr);
        let path = "/v1/chat/completions";
        connection
            .request("POST", path, &[&authorization], body.as_bytes())
            .answer()
    };
    assert_eq!(ask(&gateway.other_key, "only-b").status, 200);
    let refused = ask(&gateway.key, "only-b");
    assert_eq!(refused.status, 404);
    let error = refused.json()["error"].clone();
    assert_eq!(
        (&error["code"], &error["param"]),
        (&"model_not_found".into(), &"model".into())
    );
    let message = error["message"].as_str().unwrap();
    for name in [
        "'only-b'",
        "'scripted'",
        "'other'",
        "'org/fast'",
        "'claude-*'",
    ] {
        assert!(message.contains(name), "{message} lacks {name}");
    }
    // `scrip*` means the other model, which has no node; the id itself does not.
    assert_eq!(ask(&gateway.key, MODEL).status, 200);
    assert_eq!(ask(&gateway.key, "script").status, 503);
    assert_eq!(gateway.rows().len(), 2);
    gateway.assert_idle();
}

#[test]
fn names_are_listed_and_shown_in_the_callers_shape() {
    let node = Node::start();
    let gateway = gateway(&node);
    let get = |key: &str, path: &str, more: &[&str]| -> Answer {
        let authorization = format!("authorization: Bearer {key}");
        let headers: Vec<&str> = more
            .iter()
            .copied()
            .chain([authorization.as_str()])
            .collect();
        let mut connection = Connection::open(gateway.addr);
        connection.request("GET", path, &headers, b"").answer()
    };
    let ids = |list: &Value| -> Vec<String> {
        let data = list["data"].as_array().unwrap();
        data.iter()
            .map(|model| model["id"].as_str().unwrap().to_owned())
            .collect()
    };
    let mine = get(&gateway.key, "/v1/models", &[]).json();
    assert_eq!(ids(&mine), ["scripted", "other", "org/fast"]);
    assert_eq!(mine["data"][2]["max_model_len"], 8192);
    let theirs = get(&gateway.other_key, "/v1/models", &[]).json();
    assert_eq!(ids(&theirs), ["scripted", "other", "only-b", "org/fast"]);

    let anthropic = ["anthropic-version: 2023-06-01"];
    let first = get(&gateway.key, "/v1/models?limit=2&beta=true", &anthropic).json();
    assert_eq!(ids(&first), ["scripted", "other"]);
    assert_eq!(first["has_more"], true);
    assert_eq!(first["data"][0]["type"], "model");
    assert_eq!(first["data"][0]["max_input_tokens"], 8192);
    let next = get(&gateway.key, "/v1/models?after_id=other", &anthropic).json();
    assert_eq!(
        (ids(&next), &next["has_more"]),
        (vec!["org/fast".to_owned()], &false.into())
    );
    let bad = get(&gateway.key, "/v1/models?limit=0", &anthropic);
    assert_eq!(bad.status, 400);
    assert_eq!(bad.json()["error"]["type"], "invalid_request_error");

    for name in ["org/fast", "org%2Ffast", "claude-x", MODEL] {
        let shown = get(&gateway.key, &format!("/v1/models/{name}"), &[]).json();
        assert_eq!(shown["id"], name.replace("%2F", "/"), "{shown}");
        assert_eq!(shown["max_model_len"], 8192);
    }
    let shown = get(&gateway.key, "/v1/models/claude-x", &anthropic).json();
    assert_eq!(
        (&shown["type"], &shown["id"]),
        (&"model".into(), &"claude-x".into())
    );
    let unknown = get(&gateway.key, "/v1/models/only-b", &anthropic);
    assert_eq!(unknown.status, 404);
    let unknown = unknown.json();
    assert_eq!(
        (&unknown["type"], &unknown["error"]["type"]),
        (&"error".into(), &"not_found_error".into())
    );
    assert!(
        unknown["error"]["message"]
            .as_str()
            .unwrap()
            .contains("'org/fast'")
    );
    gateway.assert_idle();
}
