//! Tools, reasoning, several choices: catches answers of agents that are not relayed or not
//! counted, a refusal that loses its status or words, and fields that a client may not say.

use serde_json::{Value, json};

use crate::support::client::Connection;
use crate::support::node::{
    Act, CHUNKS_END, MODEL, Node, chunk, json as answer_of, stream_head, usage, usage_chunk,
};
use crate::support::{Gateway, Stream, chat};

fn event(index: u64, delta: &Value, finish: Option<&str>) -> String {
    let chunk = json!({"id": "x", "object": "chat.completion.chunk", "model": MODEL, "choices": [
        {"index": index, "delta": delta, "logprobs": null, "finish_reason": finish}]});
    format!("data: {chunk}\n\n")
}

fn stream(events: &[String], end: bool) -> Vec<u8> {
    let mut out = stream_head();
    events
        .iter()
        .for_each(|event| out.extend(chunk(event.as_bytes())));
    if end {
        out.extend(CHUNKS_END);
    }
    out
}

fn call(arguments: &str) -> Value {
    json!({"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]})
}

#[test]
fn calls_and_reasoning_are_relayed_untouched_and_counted() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let events = [
        event(0, &json!({"role": "assistant", "content": null}), None),
        event(0, &json!({"reasoning_content": "Hm."}), None),
        event(
            0,
            &json!({"tool_calls": [{"index": 0, "id": "call_1", "type": "function",
            "function": {"name": "look", "arguments": ""}}]}),
            None,
        ),
        event(0, &call("{\"a\":"), None),
        event(0, &call("1}"), None),
    ];
    // Cut in the middle of the call: what was relayed is on the bill, and the client is told.
    node.script(vec![Act::Send(stream(&events, false)), Act::Close]);
    let answer = gateway.chat(&chat(Stream::Yes, "hi"));
    assert!(
        answer.text().starts_with(&events.concat()),
        "{}",
        answer.text()
    );
    let last = answer.chunks().pop().unwrap();
    assert!(
        last["error"]["message"]
            .as_str()
            .unwrap()
            .contains("after 4 tokens"),
        "{last}"
    );
    let row = gateway.row(answer.header("x-request-id").unwrap());
    assert_eq!(
        (&row["status"], &row["output_tokens"]),
        (&"cut".into(), &4.into())
    );

    // Complete: the same bytes, and the node's own count.
    let mut all = events.to_vec();
    all.push(event(0, &json!({}), Some("tool_calls")));
    all.push(format!("data: {}\n\n", usage_chunk(50, 16, 9)));
    all.push("data: [DONE]\n\n".to_owned());
    node.script(vec![Act::Send(stream(&all, true))]);
    let answer = gateway.chat(&chat(Stream::WithUsage, "hi"));
    assert_eq!(answer.text(), all.concat());
    let row = gateway.row(answer.header("x-request-id").unwrap());
    assert_eq!(
        (&row["status"], &row["output_tokens"]),
        (&"complete".into(), &9.into())
    );
    gateway.assert_idle();
}

#[test]
fn several_choices_end_when_the_last_one_does() {
    // Catches a stream that is held back from the first choice's end on.
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let with_usage = |event: &str, output: u64| {
        let data = event.strip_prefix("data: ").unwrap().trim_end();
        let mut chunk: Value = serde_json::from_str(data).unwrap();
        chunk["usage"] = usage(50, 0, output);
        format!("data: {chunk}\n\n")
    };
    let first = [
        event(0, &json!({"content": "a"}), None),
        with_usage(&event(0, &json!({}), Some("stop")), 1),
        event(1, &json!({"content": "b"}), None),
    ];
    let rest = [
        event(1, &json!({"content": "c"}), None),
        with_usage(&event(1, &json!({}), Some("length")), 3),
        "data: [DONE]\n\n".to_owned(),
    ];
    let mut end = Vec::new();
    rest.iter()
        .for_each(|event| end.extend(chunk(event.as_bytes())));
    end.extend(CHUNKS_END);
    node.script(vec![
        Act::Send(stream(&first, false)),
        Act::Pause(std::time::Duration::from_millis(300)),
        Act::Send(end),
    ]);
    let mut body = chat(Stream::Yes, "hi");
    body["n"] = 2.into();
    let mut connection = gateway.begin_chat(&[], &body);
    let (status, _) = connection.head();
    assert_eq!(status, 200);
    // The second choice's text is there while the node is still silent.
    let mut read = String::new();
    while !read.contains("\"b\"") {
        read += &connection.line().unwrap();
    }
    assert!(!read.contains("[DONE]"));
    while !read.contains("[DONE]") {
        read += &connection.line().unwrap();
    }
    assert!(read.contains("\"length\""), "{read}");
    gateway.assert_idle();
    let rows = gateway.rows();
    assert_eq!(rows[0]["output_tokens"], 3, "{rows:?}");
}

#[test]
fn a_nodes_refusal_keeps_status_words_and_advice() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    for (status, headers) in [
        (400, &[][..]),
        (408, &[]),
        (422, &[]),
        (429, &["retry-after: 7"]),
        (503, &["retry-after: 9"]),
        (504, &[]),
    ] {
        let message = format!("The schema cannot be met ({status}).");
        let body = json!({"error": {"message": message, "type": "invalid_request_error",
            "param": "response_format", "code": "unsatisfiable_schema"}});
        node.script(vec![Act::Send(answer_of(
            status,
            headers,
            &body.to_string(),
        ))]);
        for stream in [Stream::No, Stream::Yes] {
            if stream == Stream::Yes {
                node.script(vec![Act::Send(answer_of(
                    status,
                    headers,
                    &body.to_string(),
                ))]);
            }
            let answer = gateway.chat(&chat(stream, "hi"));
            assert_eq!(answer.status, status);
            assert_eq!(answer.json(), body);
            let advice = headers.first().and_then(|header| header.split(' ').nth(1));
            assert_eq!(answer.header("retry-after"), advice, "{status}");
        }
    }
    gateway.assert_idle();
}

#[test]
fn fields_for_the_node_travel_and_those_of_gateways_do_not() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let passed = json!({
        "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required",
        "parallel_tool_calls": false, "response_format": {"type": "json_object"},
        "structured_outputs": {"regex": "a+"}, "guided_choice": ["a", "b"], "n": 2, "logprobs": true,
        "top_logprobs": 3, "logit_bias": {"7": -100}, "presence_penalty": 0.5, "frequency_penalty": 0.5,
        "repetition_penalty": 1.1, "min_p": 0.1, "min_tokens": 2, "ignore_eos": true, "timeout": 2.5,
        "seed": 7, "priority": 3,
    });
    let mut body = chat(Stream::No, "hi");
    for (name, value) in passed.as_object().unwrap() {
        body[name] = value.clone();
    }
    body["kv_transfer_params"] = json!({"do_remote_decode": true});
    body["prompt_token_ids"] = json!([1, 2]);
    body["cache_salt"] = "theirs".into();
    let authorization = format!("authorization: Bearer {}", gateway.key);
    let send = |headers: &[&str], body: &Value| {
        let headers = [&[authorization.as_str()], headers].concat();
        let body = body.to_string();
        Connection::open(gateway.addr)
            .request("POST", "/v1/chat/completions", &headers, body.as_bytes())
            .answer()
    };
    assert_eq!(send(&["x-request-timeout-ms: 2500"], &body).status, 200);
    let sent = node.received().pop().unwrap();
    assert_eq!(sent.header("x-request-timeout-ms"), Some("2500"));
    for (name, value) in passed.as_object().unwrap() {
        assert_eq!(&sent.body[name], value, "{name}");
    }
    for name in ["kv_transfer_params", "prompt_token_ids"] {
        assert_eq!(sent.body[name], Value::Null, "{name}");
    }
    assert_ne!(sent.body["cache_salt"], "theirs");

    // Nobody goes ahead of other tenants.
    for priority in [json!(-5), json!(0), json!(null)] {
        body["priority"] = priority;
        assert_eq!(send(&[], &body).status, 200);
        let sent = node.received().pop().unwrap().body;
        assert!(sent["priority"].is_null(), "{sent}");
    }
    for (name, value) in [
        ("priority", json!("high")),
        ("logit_bias", json!([1])),
        ("response_format", json!("json")),
        ("structured_outputs", json!([])),
        ("min_p", json!(2)),
        ("min_tokens", json!(-1)),
        ("parallel_tool_calls", json!("no")),
        ("return_token_ids", json!(1)),
    ] {
        let mut body = chat(Stream::No, "hi");
        body[name] = value;
        let answer = send(&[], &body);
        assert_eq!(answer.status, 400);
        assert_eq!(answer.json()["error"]["param"], name);
    }
    let answer = send(&["x-request-timeout-ms: soon"], &chat(Stream::No, "hi"));
    assert_eq!(answer.status, 400, "{answer:?}");
    gateway.assert_idle();
}
