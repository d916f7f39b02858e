//! Responses and conversations that are kept: catches a turn that forgets what it continues or
//! leaves its session, one tenant that reads or continues what is another's, and a conversation that
//! two turns write at once.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::client::{Answer, Connection};
use crate::support::node::{Act, MODEL, Node, stream_head, stream_of, whole_of};
use crate::support::{Gateway, eventually};

/// Asks with a key.
pub(crate) fn ask(
    gateway: &Gateway,
    key: &str,
    (method, path): (&str, &str),
    body: Option<&Value>,
) -> Answer {
    let authorization = format!("authorization: Bearer {key}");
    let body = body.map(Value::to_string).unwrap_or_default();
    Connection::open(gateway.addr)
        .request(method, path, &[&authorization], body.as_bytes())
        .answer()
}

pub(crate) fn get(gateway: &Gateway, path: &str) -> Answer {
    ask(gateway, &gateway.key, ("GET", path), None)
}

fn delete(gateway: &Gateway, path: &str) -> Answer {
    ask(gateway, &gateway.key, ("DELETE", path), None)
}

pub(crate) fn post(gateway: &Gateway, path: &str, body: &Value) -> Answer {
    ask(gateway, &gateway.key, ("POST", path), Some(body))
}

/// A turn, with more fields.
pub(crate) fn turn(input: &str, more: Value) -> Value {
    let mut body = json!({"model": MODEL, "input": input});
    if let (Value::Object(body), Value::Object(more)) = (&mut body, more) {
        body.extend(more);
    }
    body
}

pub(crate) fn respond(gateway: &Gateway, body: &Value) -> Answer {
    post(gateway, "/v1/responses", body)
}

/// The id of a response, whole or streamed.
pub(crate) fn id_of(answer: &Answer) -> String {
    if let Ok(whole) = serde_json::from_slice::<Value>(&answer.body) {
        return whole["id"].as_str().unwrap().to_owned();
    }
    let events = events(&answer.text());
    events.last().unwrap()["response"]["id"]
        .as_str()
        .unwrap()
        .to_owned()
}

pub(crate) fn events(text: &str) -> Vec<Value> {
    let data = text.lines().filter_map(|line| line.strip_prefix("data:"));
    data.filter_map(|data| serde_json::from_str(data.trim()).ok())
        .collect()
}

/// What the node was asked, as pairs of role and content.
fn prompts(node: &Node) -> Vec<Vec<(String, String)>> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    node.received()
        .iter()
        .map(|received| {
            let messages = received.body["messages"].as_array().unwrap().iter();
            messages
                .map(|message| (text(&message["role"]), text(&message["content"])))
                .collect()
        })
        .collect()
}

fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
    let pairs = expected.iter();
    pairs
        .map(|(role, content)| ((*role).to_owned(), (*content).to_owned()))
        .collect()
}

/// Status, code and parameter of a refusal.
pub(crate) fn refusal(answer: &Answer) -> (u16, Value, Value) {
    let error = &answer.json()["error"];
    assert!(error["message"].is_string(), "{error}");
    (answer.status, error["code"].clone(), error["param"].clone())
}

#[test]
fn a_chain_is_remembered_and_stays_in_its_session() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    node.script(whole_of("one"));
    let first = respond(&gateway, &turn("hi", json!({"instructions": "Be brief."})));
    assert_eq!(first.status, 200, "{}", first.text());
    let previous = id_of(&first);
    node.script(stream_of(&["t", "wo"]));
    let more = json!({"previous_response_id": previous, "stream": true});
    let second = respond(&gateway, &turn("and", more));
    let last = id_of(&second);
    // Other instructions, and so another beginning: the session is the chain's all the same.
    let more = json!({"previous_response_id": last, "instructions": "Be long."});
    assert_eq!(respond(&gateway, &turn("end", more)).status, 200);
    let all = prompts(&node);
    assert_eq!(
        all[1],
        pairs(&[("user", "hi"), ("assistant", "one"), ("user", "and")])
    );
    assert_eq!(
        all[2],
        pairs(&[
            ("system", "Be long."),
            ("user", "hi"),
            ("assistant", "one"),
            ("user", "and"),
            ("assistant", "two"),
            ("user", "end")
        ])
    );
    let mut sessions: Vec<String> = Vec::new();
    eventually("three rows", || {
        let rows = gateway.rows();
        sessions = rows.iter().map(|row| row["session"].to_string()).collect();
        rows.len() == 3
    });
    sessions.dedup();
    assert_eq!(sessions.len(), 1, "{sessions:?}");
    gateway.assert_idle();
}

#[test]
fn what_is_kept_is_what_was_answered_until_it_is_deleted() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let whole = respond(&gateway, &turn("hi", json!({"metadata": {"a": "b"}})));
    let path = format!("/v1/responses/{}", id_of(&whole));
    assert_eq!(get(&gateway, &path).json(), whole.json());
    let streamed = respond(&gateway, &turn("hi", json!({"stream": true})));
    let shown = get(&gateway, &format!("/v1/responses/{}", id_of(&streamed)));
    assert_eq!(
        shown.json(),
        events(&streamed.text()).pop().unwrap()["response"]
    );
    let refused = get(&gateway, &format!("{path}?stream=true"));
    assert_eq!(
        refusal(&refused),
        (400, "invalid_value".into(), "stream".into())
    );

    let deleted = delete(&gateway, &path);
    assert_eq!(
        (deleted.status, &deleted.json()["deleted"]),
        (200, &true.into())
    );
    for method in ["GET", "DELETE"] {
        let gone = ask(&gateway, &gateway.key, (method, &path), None);
        assert_eq!(refusal(&gone), (404, Value::Null, Value::Null), "{method}");
    }
    let unkept = respond(&gateway, &turn("hi", json!({"store": false})));
    let unkept = get(&gateway, &format!("/v1/responses/{}", id_of(&unkept)));
    assert_eq!(unkept.status, 404);
    gateway.assert_idle();
}

#[test]
fn a_deleted_link_breaks_the_chain() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let mut ids: Vec<String> = Vec::new();
    for _ in 0..3 {
        let more = ids
            .last()
            .map_or(json!({}), |id| json!({"previous_response_id": id}));
        ids.push(id_of(&respond(&gateway, &turn("hi", more))));
    }
    delete(&gateway, &format!("/v1/responses/{}", ids[1]));
    let asked = node.received().len();
    let answer = respond(
        &gateway,
        &turn("hi", json!({"previous_response_id": ids[2]})),
    );
    let expected = (
        400,
        "previous_response_not_found".into(),
        "previous_response_id".into(),
    );
    assert_eq!(refusal(&answer), expected);
    let answer = respond(
        &gateway,
        &turn("hi", json!({"previous_response_id": ids[0]})),
    );
    assert_eq!(answer.status, 200);
    assert_eq!(node.received().len(), asked + 1);
    gateway.assert_idle();
}

#[test]
fn input_items_come_in_pages() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let input: Vec<Value> = (0..5)
        .map(|at| json!({"role": "user", "content": format!("m{at}")}))
        .collect();
    let answer = respond(&gateway, &json!({"model": MODEL, "input": input}));
    let path = format!("/v1/responses/{}/input_items", id_of(&answer));
    let page = |query: &str| {
        let list = get(&gateway, &format!("{path}?{query}")).json();
        let items = list["data"].as_array().unwrap().clone();
        let texts: Vec<String> = items
            .iter()
            .map(|item| item["content"][0]["text"].as_str().unwrap().to_owned())
            .collect();
        assert_eq!(list["first_id"], items[0]["id"]);
        let last = items.last().unwrap()["id"].as_str().unwrap().to_owned();
        assert_eq!(list["last_id"], last);
        (texts, last, list["has_more"] == true)
    };
    assert_eq!(page("").0, ["m4", "m3", "m2", "m1", "m0"]);
    let (texts, last, more) = page("order=asc&limit=2");
    assert_eq!(
        (texts, more),
        (vec!["m0".to_owned(), "m1".to_owned()], true)
    );
    let (texts, _, more) = page(&format!("order=asc&limit=3&after={last}"));
    assert_eq!((texts.len(), more), (3, false));
    for (query, param) in [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("order=up", "order"),
        ("after=msg_none", "after"),
    ] {
        let refused = get(&gateway, &format!("{path}?{query}"));
        assert_eq!(refusal(&refused).2, param, "{query}");
    }
    gateway.assert_idle();
}

#[test]
fn another_tenants_ids_are_unknown_ids() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let answer = respond(&gateway, &turn("secret", json!({})));
    let id = id_of(&answer);
    let item = answer.json()["output"][0]["id"]
        .as_str()
        .unwrap()
        .to_owned();
    let talk = post(&gateway, "/v1/conversations", &json!({})).json();
    let talk = talk["id"].as_str().unwrap().to_owned();
    let none = id.replace(|digit: char| digit.is_ascii_digit(), "f");
    let asked = node.received().len();
    let other = |method: &str, path: &str, body: Option<&Value>, id: &str| {
        let answer = ask(&gateway, &gateway.other_key, (method, path), body);
        // Apart from the id itself, nothing tells the two cases from each other.
        (answer.status, answer.text().replace(id, "X"))
    };
    for (method, tail) in [
        ("GET", ""),
        ("DELETE", ""),
        ("GET", "/input_items"),
        ("POST", "/cancel"),
    ] {
        let of = |id: &str| other(method, &format!("/v1/responses/{id}{tail}"), None, id);
        let (theirs, unknown) = (of(&id), of(&none));
        assert_eq!((theirs.0, &theirs), (404, &unknown), "{method} {tail}");
    }
    let continued = |id: &str| {
        let body = turn("hi", json!({"previous_response_id": id}));
        other("POST", "/v1/responses", Some(&body), id)
    };
    assert_eq!((continued(&id).0, continued(&id)), (400, continued(&none)));
    for (method, tail, body) in [
        ("GET", "", None),
        ("POST", "", Some(json!({"metadata": {}}))),
        ("DELETE", "", None),
        ("GET", "/items", None),
        ("POST", "/items", Some(json!({"items": []}))),
        ("GET", "/items/msg_1", None),
        ("DELETE", "/items/msg_1", None),
    ] {
        let of = |id: &str| {
            let path = format!("/v1/conversations/{id}{tail}");
            other(method, &path, body.as_ref(), id)
        };
        let (theirs, unknown) = (of(&talk), of("conv_none"));
        assert_eq!((theirs.0, &theirs), (404, &unknown), "{method} {tail}");
    }
    let body = turn("hi", json!({"conversation": talk}));
    assert_eq!(other("POST", "/v1/responses", Some(&body), &talk).0, 404);
    let body = json!({"model": MODEL, "input": [{"type": "item_reference", "id": item}]});
    assert_eq!(other("POST", "/v1/responses", Some(&body), &item).0, 404);
    assert_eq!(node.received().len(), asked, "a node was asked");
    // The owner's own.
    assert_eq!(get(&gateway, &format!("/v1/responses/{id}")).status, 200);
    assert_eq!(respond(&gateway, &body).status, 200);
    gateway.assert_idle();
}

#[test]
fn a_conversation_grows_by_its_turns() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let items = json!([{"role": "user", "content": "before"}]);
    let body = json!({"metadata": {"topic": "t"}, "items": items});
    let talk = post(&gateway, "/v1/conversations", &body).json();
    assert_eq!(
        (&talk["object"], &talk["metadata"]["topic"]),
        (&"conversation".into(), &"t".into())
    );
    let id = talk["id"].as_str().unwrap();
    let path = format!("/v1/conversations/{id}");
    node.script(whole_of("one"));
    let first = respond(&gateway, &turn("hi", json!({"conversation": id})));
    assert_eq!(first.json()["conversation"]["id"], id, "{}", first.text());
    node.script(stream_of(&["two"]));
    let more = json!({"conversation": {"id": id}, "stream": true, "store": false});
    let second = respond(&gateway, &turn("and", more));
    assert_eq!(second.status, 200);
    assert_eq!(
        prompts(&node)[1],
        pairs(&[
            ("user", "before"),
            ("user", "hi"),
            ("assistant", "one"),
            ("user", "and")
        ])
    );
    let texts = || {
        let list = get(&gateway, &format!("{path}/items?order=asc")).json();
        let items = list["data"].as_array().unwrap().clone();
        let text = |item: &Value| item["content"][0]["text"].as_str().unwrap().to_owned();
        items
            .iter()
            .map(|item| (item["id"].as_str().unwrap().to_owned(), text(item)))
            .collect::<Vec<_>>()
    };
    let all = texts();
    let said: Vec<&str> = all.iter().map(|(_, text)| text.as_str()).collect();
    assert_eq!(said, ["before", "hi", "one", "and", "two"]);
    let (one, _) = &all[2];
    let item = get(&gateway, &format!("{path}/items/{one}"));
    assert_eq!(item.json()["role"], "assistant");
    let left = delete(&gateway, &format!("{path}/items/{one}"));
    assert_eq!(left.json()["id"], id);
    assert_eq!(texts().len(), 4);
    // A response of the conversation can be continued beside it: with what there was then.
    let more = json!({"previous_response_id": id_of(&first)});
    assert_eq!(respond(&gateway, &turn("beside", more)).status, 200);
    assert_eq!(
        prompts(&node)[2],
        pairs(&[
            ("user", "before"),
            ("user", "hi"),
            ("assistant", "one"),
            ("user", "beside")
        ])
    );
    assert_eq!(texts().len(), 4);
    let renamed = post(&gateway, &path, &json!({"metadata": {"topic": "u"}}));
    assert_eq!(renamed.json()["metadata"], json!({"topic": "u"}));
    let added = json!({"items": [{"type": "message", "role": "user", "content": "more"}]});
    let added = post(&gateway, &format!("{path}/items"), &added).json();
    assert_eq!(added["data"][0]["content"][0]["text"], "more");
    assert_eq!(
        delete(&gateway, &path).json()["object"],
        "conversation.deleted"
    );
    assert_eq!(get(&gateway, &path).status, 404);
    let gone = respond(&gateway, &turn("hi", json!({"conversation": id})));
    assert_eq!(gone.status, 404);
    gateway.assert_idle();
}

#[test]
fn items_with_one_id_are_all_kept() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let said =
        |text: &str| json!([{"type": "message", "id": "msg_1", "role": "user", "content": text}]);
    let twice = json!([{"id": "a", "role": "user", "content": "one"},
        {"id": "a", "role": "user", "content": "two"}]);
    let talk = post(&gateway, "/v1/conversations", &json!({"items": twice})).json();
    for text in ["three", "four"] {
        let mut body = turn("", json!({"conversation": talk["id"]}));
        body["input"] = said(text);
        assert_eq!(respond(&gateway, &body).status, 200);
    }
    let path = format!(
        "/v1/conversations/{}/items?order=asc",
        talk["id"].as_str().unwrap()
    );
    let list = get(&gateway, &path).json();
    let texts: Vec<_> = list["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| item["content"][0]["text"].as_str().unwrap())
        .collect();
    assert_eq!(texts, ["one", "two", "three", "ok", "four", "ok"]);
}

#[test]
fn two_turns_never_write_one_conversation_at_once() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let talk = post(&gateway, "/v1/conversations", &json!({})).json();
    let more = json!({"conversation": talk["id"], "stream": true});
    node.script(vec![
        Act::Send(stream_head()),
        Act::AwaitClose(Duration::from_secs(20)),
    ]);
    let body = turn("hi", more).to_string();
    let authorization = format!("authorization: Bearer {}", gateway.key);
    let mut first = Connection::open(gateway.addr);
    first.request("POST", "/v1/responses", &[&authorization], body.as_bytes());
    eventually("the first runs", || node.received().len() == 1);
    let second = respond(&gateway, &turn("hi", json!({"conversation": talk["id"]})));
    let expected = (400, "conversation_locked".into(), "conversation".into());
    assert_eq!(refusal(&second), expected);
    drop(first);
    // A turn that its client left wrote nothing.
    eventually("the first is gone", || {
        respond(
            &gateway,
            &turn("again", json!({"conversation": talk["id"]})),
        )
        .status
            == 200
    });
    assert_eq!(prompts(&node)[1], pairs(&[("user", "again")]));
    gateway.assert_idle();
}
