//! Catches a stream that the SDKs cannot read, one that tells another message than the whole answer
//! does, and one whose message depends on how the node cut it.
//!
//! The twin is the whole translation beside the stream's, read by `reader`; answers come from
//! `generate`.

use dialects::Fields;
use dialects::answer::{End, Translation, Usage};
use dialects::error::{ApiError, ErrorKind};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};

use super::generate::answer;
use super::reader::{events, message};
use super::{read, request};

const USAGE: Usage = Usage {
    input: 120,
    cached: 96,
    output: 33,
    reasoning: 5,
};

fn translation(extra: &Value) -> Box<dyn Translation> {
    let body = request(extra).to_string();
    let fields = Fields::parse(body.as_bytes()).expect("an object");
    let (_, mut answer) = dialects::messages::parse(fields).expect("a sound request");
    answer.begin(Usage {
        cached: 64,
        output: 0,
        reasoning: 0,
        ..USAGE
    });
    answer
}

fn end() -> End {
    End {
        usage: USAGE,
        homing: None,
    }
}

fn streamed(mut answer: Box<dyn Translation>, chunks: &[Value]) -> Vec<u8> {
    let mut out = Vec::new();
    for chunk in chunks {
        let json = chunk.to_string();
        answer
            .chunk(json.as_bytes(), &mut out)
            .expect("a node's chunk");
    }
    answer.end(&end(), &mut out);
    out
}

fn whole(mut answer: Box<dyn Translation>, json: &[u8]) -> Value {
    let whole = answer.whole(json, &end()).expect("a node's answer");
    serde_json::from_slice(&whole).expect("JSON")
}

#[test]
fn any_cut_of_a_stream_is_the_whole_answer() {
    let requests = [
        json!({"stop_sequences": ["END"]}),
        json!({"stop_sequences": ["END"], "thinking": {"type": "disabled"}}),
        json!({"max_tokens": 0}),
        json!({"thinking": {"type": "adaptive", "display": "omitted"}}),
    ];
    for seed in 0..4000 {
        let random = &mut StdRng::seed_from_u64(seed);
        let extra = &requests[random.random_range(0..requests.len())];
        let said = answer(random);
        let mut expected = whole(translation(extra), &said.whole());
        // Told by whole answers only.
        expected["usage"]
            .as_object_mut()
            .expect("an object")
            .remove("service_tier");
        let stream = streamed(translation(extra), &said.chunks(random));
        let message = message(&stream);
        assert_eq!(message, expected, "seed {seed}");
    }
}

/// An answer that its client sends back is, in the next turn's prompt, the message that a chat
/// client sends back: nothing of it is lost, and the cached prefix reaches over it.
#[test]
fn answers_come_back_as_the_model_said_them() {
    let requests = [
        json!({}),
        json!({"thinking": {"type": "adaptive", "display": "omitted"}}),
    ];
    for seed in 0..2000 {
        let random = &mut StdRng::seed_from_u64(seed);
        let extra = &requests[random.random_range(0..requests.len())];
        let said = answer(random);
        let message = message(&streamed(translation(extra), &said.chunks(random)));
        let blocks = message["content"].as_array().expect("a list");
        if blocks.is_empty() {
            continue;
        }
        let calls = blocks.iter().filter(|block| block["type"] == "tool_use");
        let result = |call: &Value| json!({"type": "tool_result", "tool_use_id": call["id"]});
        let mut next: Vec<Value> = calls.map(result).collect();
        next.push(json!({"type": "text", "text": "go on"}));
        let body = request(&json!({"messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": next},
        ]}));
        let (prompt, _) = read(body.to_string().as_bytes()).expect("a next turn");
        assert_eq!(prompt.messages[1], said.replayed(), "seed {seed}");
    }
}

#[test]
fn answers_end_for_their_reasons() {
    let call = json!([{"id": "c", "function": {"name": "f", "arguments": "{}"}}]);
    for (finish, stop, calls, expected) in [
        ("stop", json!(null), json!(null), json!(["end_turn", null])),
        (
            "stop",
            json!("END"),
            json!(null),
            json!(["stop_sequence", "END"]),
        ),
        // A stop token, or a stop that the client did not send.
        (
            "stop",
            json!(151_645),
            json!(null),
            json!(["end_turn", null]),
        ),
        (
            "stop",
            json!("<|end|>"),
            json!(null),
            json!(["end_turn", null]),
        ),
        (
            "length",
            json!(null),
            json!(null),
            json!(["max_tokens", null]),
        ),
        (
            "length",
            json!(null),
            call.clone(),
            json!(["max_tokens", null]),
        ),
        (
            "tool_calls",
            json!(null),
            call.clone(),
            json!(["tool_use", null]),
        ),
        // vLLM's reason where a call was demanded.
        ("stop", json!(null), call, json!(["tool_use", null])),
        (
            "content_filter",
            json!(null),
            json!(null),
            json!(["refusal", null]),
        ),
        (
            "whatever",
            json!(null),
            json!(null),
            json!(["end_turn", null]),
        ),
    ] {
        let node = json!({"id": "chatcmpl-1", "choices": [{"index": 0, "finish_reason": finish,
            "stop_reason": stop, "message": {"content": "x", "tool_calls": calls}}]});
        let answer = translation(&json!({"stop_sequences": ["END"]}));
        let message = whole(answer, node.to_string().as_bytes());
        let told = json!([message["stop_reason"], message["stop_sequence"]]);
        assert_eq!(told, expected, "{node}");
        let details = &message["stop_details"]["type"];
        assert_eq!(*details == "refusal", finish == "content_filter", "{node}");
    }
}

/// Usage in the first event: the node's where it tells, else what was expected; in the last: what is
/// billed.
#[test]
fn usage_is_told_at_both_ends() {
    let first = |usage: Value| json!({"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {"content": "x"}}], "usage": usage});
    for (usage, input, cached, output) in [
        (json!(null), 56, 64, 0),
        (
            json!({"prompt_tokens": 100, "completion_tokens": 2}),
            36,
            64,
            2,
        ),
        (json!({"prompt_tokens": 50}), 0, 50, 0),
        (
            json!({"prompt_tokens": 100, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 80}}),
            20,
            80,
            1,
        ),
        (
            json!({"prompt_tokens": 100, "prompt_tokens_details": null}),
            36,
            64,
            0,
        ),
    ] {
        let stream = streamed(translation(&json!({})), &[first(usage.clone())]);
        let events = events(&stream);
        let told = &events[0].1["message"];
        assert_eq!(
            (&told["id"], &told["model"]),
            (&json!("msg_1"), &json!("claude-x"))
        );
        let told = &told["usage"];
        assert_eq!(told["input_tokens"], input, "{usage}");
        assert_eq!(told["cache_read_input_tokens"], cached, "{usage}");
        assert_eq!(told["cache_creation_input_tokens"], 0, "{usage}");
        assert_eq!(told["output_tokens"], output, "{usage}");
        let (name, last) = &events[events.len() - 2];
        assert_eq!(name, "message_delta");
        assert_eq!(
            last["usage"],
            json!({"input_tokens": 24, "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 96, "output_tokens": 33,
                "output_tokens_details": {"thinking_tokens": 5}})
        );
    }
}

#[test]
fn the_homing_field_comes_with_the_usage() {
    let end = End {
        usage: USAGE,
        homing: Some(json!({"node": "n1"})),
    };
    let mut out = Vec::new();
    translation(&json!({})).end(&end, &mut out);
    let events = events(&out);
    assert_eq!(events[1].1["homing"], json!({"node": "n1"}));
    let node = br#"{"id":"a","choices":[{"message":{"content":"x"}}]}"#;
    let whole = translation(&json!({}))
        .whole(node, &end)
        .expect("an answer");
    let whole: Value = serde_json::from_slice(&whole).expect("JSON");
    assert_eq!(whole["homing"], json!({"node": "n1"}));
}

#[test]
fn a_broken_stream_ends_in_an_error_event() {
    let error = ApiError::new(ErrorKind::NodeFailed, "The node is gone.");
    let mut answer = translation(&json!({}));
    let mut out = Vec::new();
    let chunk = json!({"id": "a", "choices": [{"index": 0, "delta": {"content": "x"}}]});
    answer
        .chunk(chunk.to_string().as_bytes(), &mut out)
        .expect("a chunk");
    answer.fail(&error, USAGE, &mut out);
    let events = events(&out);
    let (name, last) = events.last().expect("events");
    assert_eq!(name, "error");
    assert_eq!(
        last["error"],
        json!({"type": "api_error", "message": "The node is gone."})
    );
    assert_eq!(last["usage"]["output_tokens"], 33);
    // Told to nobody before: the same answer from the beginning.
    let mut again = Vec::new();
    let mut fresh = answer.fresh();
    fresh.begin(Usage::default());
    fresh
        .chunk(chunk.to_string().as_bytes(), &mut again)
        .expect("a chunk");
    fresh.end(&end(), &mut again);
    assert_eq!(
        message(&again)["content"],
        json!([{"type": "text", "text": "x"}])
    );
}

/// Nodes differ in how they spell calls.
#[test]
fn calls_are_understood_however_nodes_spell_them() {
    let call = |call: Value| json!({"id": "a", "choices": [{"index": 0, "delta": {"tool_calls": [call]}}]});
    let function = |name: &str, arguments: &str| json!({"name": name, "arguments": arguments});
    let uses = |expected: &[(&str, Value)]| {
        let block = |(id, input): &(&str, Value)| json!({"type": "tool_use", "id": id, "name": "f", "input": input});
        Value::Array(expected.iter().map(block).collect())
    };
    for (chunks, expected) in [
        // All calls at index 0, told apart by their ids.
        (
            vec![
                call(json!({"index": 0, "id": "x", "function": function("f", "{}")})),
                call(json!({"index": 0, "id": "y", "function": function("f", "{\"a\":1}")})),
            ],
            uses(&[("x", json!({})), ("y", json!({"a": 1}))]),
        ),
        // No index at all.
        (
            vec![
                call(json!({"id": "x", "function": function("f", "{\"a\"")})),
                call(json!({"function": {"arguments": ":1}"}})),
                call(json!({"id": "y", "function": function("f", "{}")})),
            ],
            uses(&[("x", json!({"a": 1})), ("y", json!({}))]),
        ),
        // Id and name in every part, and an empty part behind it all.
        (
            vec![
                call(json!({"index": 0, "id": "x", "function": function("f", "{\"a\"")})),
                call(json!({"index": 0, "id": "x", "function": function("f", ":2}")})),
                call(json!({"index": 1, "id": "", "function": {"name": null, "arguments": ""}})),
            ],
            uses(&[("x", json!({"a": 2}))]),
        ),
        // No id: one of ours.
        (
            vec![call(json!({"index": 0, "function": function("f", "{}")}))],
            uses(&[("call_msg_a_0", json!({}))]),
        ),
    ] {
        let stream = streamed(translation(&json!({})), &chunks);
        assert_eq!(message(&stream)["content"], expected, "{chunks:?}");
    }
    for chunk in [
        "{\"choices\": 7}",
        "[]",
        "",
        r#"{"choices":[{"delta":{"content":7}}]}"#,
        r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{}"}}]}}]}"#,
    ] {
        let mut answer = translation(&json!({}));
        assert!(
            answer.chunk(chunk.as_bytes(), &mut Vec::new()).is_err(),
            "{chunk}"
        );
    }
}
