//! Catches an explanation that differs from the bill, that nobody asked for, or that breaks what a
//! client reads beside it.

use serde_json::{Value, json};

use crate::support::client::Answer;
use crate::support::node::{Node, stream_of, whole_of};
use crate::support::{Gateway, Stream, chat};

const DETAIL: &str = "x-homing-detail: 1";

/// 36 uncached, 64 cached, 20 out, by the prices of these tests.
const COST: i64 = 36 + 7 + 60;

fn ask(gateway: &Gateway, headers: &[&str], stream: Stream) -> Answer {
    let body = chat(stream, "hi").to_string();
    let answer = gateway.post("/v1/chat/completions", headers, body.as_bytes());
    assert_eq!(answer.status, 200, "{answer:?}");
    answer
}

/// What the field says, beside what the headers and the bill say.
fn check(gateway: &Gateway, answer: &Answer, homing: &Value) {
    let expected: u64 = answer
        .header("x-homing-expected-cached")
        .and_then(|text| text.parse().ok())
        .unwrap();
    let row = gateway.row(answer.header("x-request-id").unwrap());
    assert_eq!(
        *homing,
        json!({
            "node": answer.header("x-homing-node").unwrap(),
            "route": answer.header("x-homing-route").unwrap(),
            "expected_cached_tokens": expected,
            "cached_tokens": row["cached_tokens"],
            "cost_nano_usd": row["cost_nano_usd"],
        })
    );
    assert_eq!(
        (&row["cached_tokens"], &row["cost_nano_usd"]),
        (&64.into(), &COST.into())
    );
}

#[test]
fn whole_answers_tell_their_bill() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    node.script(whole_of("x"));
    let plain = ask(&gateway, &["x-homing-detail: yes"], Stream::No);
    assert_eq!(plain.header("x-homing-cached-tokens"), Some("64"));
    assert_eq!(
        plain.header("x-homing-cost-nano-usd"),
        Some(COST.to_string().as_str())
    );
    assert_eq!(plain.json()["homing"], Value::Null);

    node.script(whole_of("x"));
    let told = ask(&gateway, &[DETAIL], Stream::No);
    let mut body = told.json();
    let homing = body.as_object_mut().unwrap().remove("homing").unwrap();
    check(&gateway, &told, &homing);
    assert_eq!(body, plain.json());
    gateway.assert_idle();
}

#[test]
fn streams_tell_it_beside_the_usage_that_was_asked_for() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let mut seen = Vec::new();
    for (stream, headers) in [
        (Stream::WithUsage, &[][..]),
        (Stream::WithUsage, &[DETAIL]),
        (Stream::Yes, &[DETAIL]),
    ] {
        node.script(stream_of(&["a", "b"]));
        let answer = ask(&gateway, headers, stream);
        assert_eq!(answer.content(), "ab");
        assert_eq!(answer.events().last().unwrap(), "[DONE]");
        let told: Vec<Value> = answer
            .chunks()
            .into_iter()
            .filter(|chunk| !chunk["homing"].is_null())
            .collect();
        let expected = usize::from(stream == Stream::WithUsage && !headers.is_empty());
        assert_eq!(told.len(), expected, "{}", answer.text());
        for chunk in told {
            assert_eq!(chunk["usage"]["prompt_tokens"], 100);
            check(&gateway, &answer, &chunk["homing"]);
        }
        seen.push(answer.text());
    }
    let begin = seen[1].find(",\"homing\":").unwrap();
    let end = begin + seen[1][begin..].find("}}").unwrap() + 1;
    assert_eq!(format!("{}{}", &seen[1][..begin], &seen[1][end..]), seen[0]);
    gateway.assert_idle();
}

#[test]
fn translated_answers_tell_it_too() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    node.script(whole_of("x"));
    let body = json!({
        "model": "scripted", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}],
    });
    let body = body.to_string();
    let headers = [DETAIL, "anthropic-version: 2023-06-01"];
    let answer = gateway.post("/v1/messages", &headers, body.as_bytes());
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(answer.header("x-homing-cached-tokens"), Some("64"));
    check(&gateway, &answer, &answer.json()["homing"]);
    gateway.assert_idle();
}
