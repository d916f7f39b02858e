//! Catches an answer that clients cannot read: events missing, out of order, or at odds with the
//! response object at their end.

use serde_json::{Value, json};

use crate::support::{RESPONSE, ask, chunk, completion, end, stream};

fn names(events: &[(String, Value)]) -> Vec<&str> {
    events
        .iter()
        .map(|(name, _)| name.strip_prefix("response.").unwrap_or(name))
        .collect()
}

#[test]
fn a_text_is_told_by_the_events_that_the_api_has() {
    let asked = ask(&json!({"model": "gpt-x", "input": "hi", "stream": true}));
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
