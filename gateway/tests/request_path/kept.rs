//! Responses that are cancelled, and refusals about what is kept: catches a node that works on for a
//! cancelled response, a bill that is wrong for it, and a malformed request that is taken.

use std::time::Duration;

use serde_json::{Value, json};

use crate::stored::{ask, events, get, id_of, post, refusal, respond, turn};
use crate::support::client::Connection;
use crate::support::node::{Act, Node, chunk, delta, stream_head};
use crate::support::{Gateway, eventually};

/// Three words, and then silence.
fn three_words() -> Vec<Act> {
    let mut script = vec![Act::Send(stream_head())];
    for text in ["a", "b", "c"] {
        script.push(Act::Send(chunk(
            format!("data: {}\n\n", delta(text)).as_bytes(),
        )));
    }
    script.push(Act::AwaitClose(Duration::from_secs(20)));
    script
}

#[test]
fn a_running_response_can_be_cancelled() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    node.script(three_words());
    let authorization = format!("authorization: Bearer {}", gateway.key);
    let mut client = Connection::open(gateway.addr);
    let body = turn("hi", json!({"stream": true})).to_string();
    let headers = [authorization.as_str(), "x-request-id: called-off"];
    client.request("POST", "/v1/responses", &headers, body.as_bytes());
    assert_eq!(client.head().0, 200);
    let mut text = String::new();
    while text.matches("output_text.delta\"").count() < 3 {
        text += &String::from_utf8(client.chunk().unwrap()).unwrap();
    }
    let id = events(&text)[0]["response"]["id"]
        .as_str()
        .unwrap()
        .to_owned();
    let path = format!("/v1/responses/{id}");
    let foreign = ask(
        &gateway,
        &gateway.other_key,
        ("POST", &format!("{path}/cancel")),
        None,
    );
    assert_eq!(foreign.status, 404);
    let cancelled = ask(
        &gateway,
        &gateway.key,
        ("POST", &format!("{path}/cancel")),
        None,
    );
    assert_eq!(cancelled.status, 200, "{}", cancelled.text());
    assert_eq!(
        (&cancelled.json()["id"], &cancelled.json()["status"]),
        (&id.as_str().into(), &"cancelled".into())
    );
    while let Some(more) = client.chunk() {
        text += &String::from_utf8(more).unwrap();
    }
    assert_eq!(
        events(&text).pop().unwrap()["response"]["status"],
        "cancelled"
    );
    eventually("the node's connection is closed", || {
        node.hang_ups().len() == 1
    });
    let row = gateway.row("called-off");
    assert_eq!(
        (&row["status"], &row["output_tokens"]),
        (&"cancelled".into(), &3.into())
    );
    assert_eq!(get(&gateway, &path).json(), cancelled.json());
    let again = ask(
        &gateway,
        &gateway.key,
        ("POST", &format!("{path}/cancel")),
        None,
    );
    assert_eq!(
        (again.status, again.json()),
        (200, cancelled.json()),
        "twice is as good as once"
    );
    let finished = id_of(&respond(&gateway, &turn("hi", json!({}))));
    let late = format!("/v1/responses/{finished}/cancel");
    assert_eq!(
        refusal(&ask(&gateway, &gateway.key, ("POST", &late), None)).0,
        400
    );
    gateway.assert_idle();
}

/// Path, body, and the status and parameter of the refusal.
type Row = (String, String, (u16, &'static str));

fn about_responses() -> Vec<Row> {
    let of = |fields: Value| ("/v1/responses".to_owned(), turn("x", fields).to_string());
    let at = |path: &str, status| (path.to_owned(), String::new(), (status, ""));
    let rows = [
        (
            json!({"previous_response_id": "msg_1"}),
            (400, "previous_response_id"),
        ),
        (
            json!({"previous_response_id": "resp_1"}),
            (400, "previous_response_id"),
        ),
        (json!({"conversation": "resp_1"}), (400, "conversation")),
        (json!({"conversation": "conv_1"}), (404, "")),
    ];
    let rows = rows.into_iter().map(|(fields, expected)| {
        let (path, body) = of(fields);
        (path, body, expected)
    });
    rows.chain([
        (
            "/v1/responses/x/cancel".to_owned(),
            String::new(),
            (400, "response_id"),
        ),
        at("/v1/responses/resp_1/cancel", 404),
        at("/v1/responses/resp_1", 405),
        at("/v1/responses/resp_1/other", 404),
        at("/v1/conversations/conv_1/items/a/b", 404),
    ])
    .collect()
}

fn about_conversations(talk: &str) -> Vec<Row> {
    let long = "x".repeat(513);
    let many: Vec<Value> = (0..21)
        .map(|_| json!({"role": "user", "content": "x"}))
        .collect();
    let all = "/v1/conversations";
    let rows = [
        (all.to_owned(), json!([]), (400, "")),
        (all.to_owned(), json!({"metadata": []}), (400, "metadata")),
        (
            all.to_owned(),
            json!({"metadata": {"a": 1}}),
            (400, "metadata"),
        ),
        (
            all.to_owned(),
            json!({"metadata": {"a": long}}),
            (400, "metadata"),
        ),
        (all.to_owned(), json!({"items": {}}), (400, "items")),
        (all.to_owned(), json!({"items": many}), (400, "items")),
        (all.to_owned(), json!({"items": [1]}), (400, "items[0]")),
        (talk.to_owned(), json!({}), (400, "metadata")),
        (format!("{talk}/items"), json!({}), (400, "items")),
        (
            format!("{all}/x"),
            json!({"metadata": {}}),
            (400, "conversation_id"),
        ),
    ];
    let rows = rows
        .into_iter()
        .map(|(path, body, expected)| (path, body.to_string(), expected));
    rows.chain([(all.to_owned(), "{".to_owned(), (400, ""))])
        .collect()
}

#[test]
fn malformed_requests_about_what_is_kept() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let talk = post(&gateway, "/v1/conversations", &json!({})).json();
    let talk = format!("/v1/conversations/{}", talk["id"].as_str().unwrap());
    let rows = about_responses()
        .into_iter()
        .chain(about_conversations(&talk));
    for (path, body, expected) in rows {
        let answer = gateway.post(&path, &[], body.as_bytes());
        let (status, _, param) = refusal(&answer);
        let param = param.as_str().unwrap_or_default().to_owned();
        assert!(
            (status, param.starts_with(expected.1)) == (expected.0, true),
            "{path} {body}: {status} {}",
            answer.text()
        );
    }
    for path in ["/v1/responses/resp_1", "/v1/conversations"] {
        let answer = Connection::open(gateway.addr)
            .request("GET", path, &[], b"")
            .answer();
        let expected = if path.ends_with("1") { 401 } else { 405 };
        assert_eq!(answer.status, expected, "{path}");
    }
    assert!(node.received().is_empty());
    gateway.assert_idle();
}
