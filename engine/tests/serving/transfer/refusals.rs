//! Who may have which blocks, and how often.

use serde_json::{Value, json};

use super::{CHAT, FAILED, Pair, asked, fresh_id, prompt};
use crate::common::{Node, TOKEN, chat_body};

/// Who is refused, and that nothing is lost by it: the prompt is computed where it is needed.
#[test]
fn a_transfer_is_for_one_node_one_scope_and_one_prompt_and_for_once() {
    let pair = Pair::start(&[], &[]);
    let other = Node::start_with(&[], Some(TOKEN));
    let body = asked(prompt("tickets", 120), json!({"cache_salt": "tenant-a"}));
    let id = fresh_id();
    let answer = pair.prefill.post(CHAT, &pair.first_leg(&id, &body));
    assert_eq!(
        answer.json()["kv_transfer_params"]["transfer_id"],
        json!(id)
    );
    let fails = json!({"on_failure": "error", "timeout_ms": 300});
    let refused = |node: &Node, body: &Value| {
        let (status, code, _) = node.post(CHAT, &pair.second_leg(&id, body, &fails)).error();
        assert_eq!((status, &*code), (503, "kv_transfer_failed"), "{body}");
    };
    let with = |name: &str, value: Value| {
        let mut body = body.clone();
        body[name] = value;
        body
    };
    refused(&other, &body);
    refused(&pair.decode, &with("cache_salt", json!("tenant-b")));
    refused(&pair.decode, &with("messages", prompt("another", 120)));
    let forged = pair.second_leg(&fresh_id(), &body, &fails);
    assert_eq!(
        pair.decode.post(CHAT, &forged).error().0,
        503,
        "nobody prefills that"
    );
    let wrong = json!({"remote_engine_id": "somebody else", "on_failure": "error"});
    let wrong = pair.second_leg(&id, &body, &wrong);
    assert_eq!(pair.decode.post(CHAT, &wrong).error().0, 503);

    let again = pair.prefill.post(CHAT, &pair.first_leg(&id, &body)).error();
    assert_eq!(again.0, 400, "the name is taken");

    let whole = json!({"on_failure": "error"});
    let good = pair.decode.post(CHAT, &pair.second_leg(&id, &body, &whole));
    assert_eq!(good.status, 200, "and it still works: {}", good.text());
    refused(&pair.decode, &with("cache_salt", json!("tenant-a")));
    let again = pair.prefill.post(CHAT, &pair.first_leg(&id, &body)).error();
    let param = Some("kv_transfer_params.transfer_id".to_owned());
    assert_eq!(again, (400, "invalid_value".into(), param));

    let replayed = pair.second_leg(&id, &body, &json!({"timeout_ms": 300}));
    let replayed = pair.decode.post(CHAT, &replayed).json();
    assert_eq!(
        replayed["choices"],
        good.json()["choices"],
        "computed here instead"
    );
    assert!(pair.decode.metric(FAILED) >= 5.0);
    pair.at_rest();
}

#[test]
fn a_ticket_that_nobody_fetches_lets_go_and_is_late_from_then_on() {
    let pair = Pair::start(&[], &[]);
    let body = asked(prompt("late", 200), json!({}));
    let id = fresh_id();
    let mut first = pair.first_leg(&id, &body);
    first["kv_transfer_params"]["timeout_ms"] = json!(200);
    assert_eq!(pair.prefill.post(CHAT, &first).status, 200);
    // Nothing is held either before its blocks are counted as pinned.
    let expired = "homing:kv_tickets_expired_total";
    pair.prefill.wait_for_metric(expired, |count| count == 1.0);
    pair.at_rest();
    let fails = json!({"on_failure": "error", "timeout_ms": 200});
    let late = pair.decode.post(CHAT, &pair.second_leg(&id, &body, &fails));
    assert_eq!(late.error().0, 503);
    let body = pair.second_leg(&id, &body, &json!({"timeout_ms": 200}));
    assert_eq!(pair.decode.post(CHAT, &body).status, 200);
}

#[test]
fn what_cannot_be_served_is_refused_by_name() {
    let pair = Pair::start(&[], &[]);
    let refused = |node: &Node, params: Value| {
        let body = chat_body(json!({"kv_transfer_params": params, "max_tokens": 1}));
        let (status, code, param) = node.post(CHAT, &body).error();
        (status, code, param.unwrap_or_default())
    };
    let id = fresh_id();
    let whole = json!({
        "do_remote_prefill": true, "transfer_id": id, "remote_engine_id": "x",
        "remote_endpoints": ["tcp://127.0.0.1:1"],
    });
    let with = |name: &str, value: Value| {
        let mut params = whole.clone();
        params[name] = value;
        params
    };
    let rows = [
        (with("transfer_id", json!("xyz")), "transfer_id"),
        (with("transfer_id", Value::Null), "transfer_id"),
        (with("remote_engine_id", Value::Null), "remote_engine_id"),
        (with("remote_endpoints", json!([])), "remote_endpoints"),
        (
            with("remote_endpoints", json!(["http://a"])),
            "remote_endpoints[0]",
        ),
        (with("on_failure", json!("panic")), "on_failure"),
        (with("timeout_ms", json!(0)), "timeout_ms"),
        (with("do_remote_decode", json!(true)), "do_remote_prefill"),
    ];
    for (params, field) in rows {
        let found = refused(&pair.decode, params);
        assert_eq!(
            (found.0, found.2),
            (400, format!("kv_transfer_params.{field}"))
        );
    }
    let (status, code, _) = refused(&pair.prefill, whole.clone());
    assert_eq!((status, &*code), (400, "wrong_role"));
    let (status, code, _) = refused(&pair.decode, json!({"do_remote_decode": true}));
    assert_eq!((status, &*code), (400, "wrong_role"));
    let anonymous = Node::start(&[]);
    let (status, code, _) = refused(&anonymous, whole);
    assert_eq!((status, &*code), (403, "node_token_required"));
    assert_eq!(anonymous.get("/v1/kv/info").status, 403);
    assert_eq!(
        pair.prefill
            .send("GET", "/v1/kv/info", "authorization: x\r\n", b"")
            .status,
        401
    );
}
