//! Catches an answer that clients cannot read: events missing, out of order, or at odds with the
//! response object at their end.

use serde_json::{Value, json};

use crate::support::{RESPONSE, ask, ask_after, chunk, completion, end, stream};

fn names(events: &[(String, Value)]) -> Vec<&str> {
    events
        .iter()
        .map(|(name, _)| name.strip_prefix("response.").unwrap_or(name))
        .collect()
}

#[test]
fn a_text_is_told_by_the_events_that_the_api_has() {
    let tools = json!([{"type": "namespace", "name": "n", "tools": []}]);
    let body = json!({"model": "gpt-x", "input": "hi", "stream": true, "tools": tools});
    // Written over several lines, as people do.
    let body = serde_json::to_string_pretty(&body).expect("JSON");
    let asked = ask_after(Vec::new(), &body).expect("a sound request");
    let mut translation = asked.translation;
    let events = stream(
        translation.as_mut(),
        &[
            chunk(&json!({"role": "assistant", "content": ""}), None),
            chunk(&json!({"content": "He"}), None),
            chunk(&json!({"content": "llo\n🦀"}), Some("stop")),
        ],
    );
    assert_eq!(
        names(&events),
        [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "completed",
        ]
    );
    let response = &events.last().expect("events").1["response"];
    assert_eq!(response["id"], RESPONSE);
    assert_eq!(response["model"], "gpt-x");
    assert_eq!(response["tools"], tools);
    assert_eq!(response["status"], "completed");
    assert_eq!(response["output"][0]["content"][0]["text"], "Hello\n🦀");
    assert_eq!(response["output"][0], events[8].1["item"]);
    assert_eq!(
        response["usage"],
        json!({
            "input_tokens": 100,
            "input_tokens_details": {"cached_tokens": 64, "cache_write_tokens": 0},
            "output_tokens": 20,
            "output_tokens_details": {"reasoning_tokens": 5},
            "total_tokens": 120,
        })
    );
}

#[test]
fn reasoning_and_calls_become_items_of_their_own() {
    let body = json!({"model": "m", "input": "hi", "tools": [
        {"type": "function", "name": "f", "parameters": {"type": "object"}},
    ]});
    let message = json!({
        "role": "assistant", "content": null, "reasoning_content": "hm",
        "tool_calls": [
            {"id": "call_a", "type": "function", "function": {"name": "f", "arguments": "{}"}},
            {"id": "call_b", "type": "function", "function": {"name": "f", "arguments": "{\"x\":1}"}},
        ],
    });
    let whole = ask(&body)
        .translation
        .whole(&completion(&message, "tool_calls"), &end())
        .expect("sound");
    let whole: Value = serde_json::from_slice(&whole).expect("JSON");
    let output = whole["output"].as_array().expect("a list");
    let kinds: Vec<_> = output.iter().map(|item| item["type"].as_str()).collect();
    assert_eq!(
        kinds,
        [
            Some("reasoning"),
            Some("function_call"),
            Some("function_call")
        ]
    );
    assert_eq!(output[0]["summary"][0]["text"], "hm");
    assert_eq!(output[1]["call_id"], "call_a");
    assert_eq!(output[2]["arguments"], "{\"x\":1}");
}

#[test]
fn the_response_repeats_the_request_with_defaults() {
    let answer = completion(&json!({"content": "x"}), "stop");
    let told = |body: Value| -> Value {
        let whole = ask(&body)
            .translation
            .whole(&answer, &end())
            .expect("sound");
        serde_json::from_slice(&whole).expect("JSON")
    };
    let plain = told(json!({"model": "m", "input": "x"}));
    for (name, value) in [
        ("object", json!("response")),
        ("created_at", json!(1_764_460_000)),
        ("background", json!(false)),
        ("error", Value::Null),
        ("incomplete_details", Value::Null),
        ("instructions", Value::Null),
        ("max_output_tokens", Value::Null),
        ("parallel_tool_calls", json!(true)),
        ("previous_response_id", Value::Null),
        ("reasoning", json!({"effort": null, "summary": null})),
        ("service_tier", json!("default")),
        ("store", json!(true)),
        ("temperature", json!(1.0)),
        (
            "text",
            json!({"format": {"type": "text"}, "verbosity": "medium"}),
        ),
        ("tool_choice", json!("auto")),
        ("tools", json!([])),
        ("top_logprobs", json!(0)),
        ("top_p", json!(1.0)),
        ("truncation", json!("disabled")),
        ("user", Value::Null),
        ("metadata", json!({})),
    ] {
        assert_eq!(plain.get(name), Some(&value), "{name}");
    }
    let body = json!({
        "model": "m", "input": "x", "instructions": "i", "max_output_tokens": 5, "max_tool_calls": 2,
        "parallel_tool_calls": false, "previous_response_id": "resp_1", "prompt_cache_key": "k",
        "prompt_cache_retention": "24h", "reasoning": {"effort": "low", "summary": "auto"},
        "safety_identifier": "s", "store": false, "temperature": 0.2, "tool_choice": "none",
        "text": {"format": {"type": "json_object"}, "verbosity": "low"}, "top_p": 0.5,
        "top_logprobs": 3, "truncation": "auto", "user": "u", "metadata": {"a": "b"},
    });
    let full = told(body.clone());
    for (name, value) in body.as_object().expect("an object") {
        assert!(
            name == "input" || full[name] == *value,
            "{name}: {}",
            full[name]
        );
    }
    let body =
        json!({"model": "m", "input": "x", "conversation": "conv_1", "service_tier": "flex"});
    let talk = told(body);
    assert_eq!(talk["conversation"], json!({"id": "conv_1"}));
    assert_eq!(talk["service_tier"], "default");
}

#[test]
fn reasoning_is_given_back_where_clients_replay_it() {
    let body = json!({"model": "m", "input": "x", "include": ["reasoning.encrypted_content"]});
    let message = json!({"content": "y", "reasoning_content": "hm"});
    let whole = ask(&body)
        .translation
        .whole(&completion(&message, "stop"), &end())
        .expect("sound");
    let whole: Value = serde_json::from_slice(&whole).expect("JSON");
    let ours = &whole["output"][0];
    assert!(ours["encrypted_content"].is_string());
    let sealed = json!({"type": "reasoning", "id": "rs_1", "encrypted_content": "gAAAA", "summary":
        [{"type": "summary_text", "text": "theirs"}]});
    let raw = json!({"type": "reasoning", "summary": [], "content":
        [{"type": "reasoning_text", "text": "hm"}], "encrypted_content": null});
    for (item, expected) in [(ours, Some("hm")), (&raw, Some("hm")), (&sealed, None)] {
        let next = ask(
            &json!({"model": "m", "input": [item, whole["output"][1], {"role": "user", "content": "z"}]}),
        );
        let said = &next.prompt.messages[0];
        assert_eq!(said["content"], "y");
        assert_eq!(said["reasoning_content"].as_str(), expected, "{item}");
    }
}

#[test]
fn log_probabilities_come_with_the_text() {
    let body = json!({"model": "m", "input": "x", "stream": true, "top_logprobs": 1,
        "include": ["message.output_text.logprobs"]});
    let token =
        |text: &str| json!({"token": text, "logprob": -0.5, "bytes": [97], "top_logprobs": []});
    let chunk = |text: &str| {
        json!({"choices": [{"index": 0, "delta": {"content": text},
            "logprobs": {"content": [token(text)], "refusal": null}, "finish_reason": null}]})
        .to_string()
        .into_bytes()
    };
    let events = stream(ask(&body).translation.as_mut(), &[chunk("a"), chunk("b")]);
    let deltas: Vec<_> = events
        .iter()
        .filter(|(name, _)| name == "response.output_text.delta")
        .map(|(_, data)| data["logprobs"].clone())
        .collect();
    assert_eq!(deltas, [json!([token("a")]), json!([token("b")])]);
    let response = &events.last().expect("events").1["response"];
    let part = &response["output"][0]["content"][0];
    assert_eq!(part["logprobs"], json!([token("a"), token("b")]));
}
