//! Does any request upset the reader, or any chunk the translator of streams?
//!
//! Requests are random bytes, and objects of known fields with values that are sound, odd or of
//! another type. Chunks are random, or built from the members that nodes send. Whatever is accepted
//! yields events that are events, and a response object with all that was echoed.

use std::panic::AssertUnwindSafe;

use dialects::answer::Usage;
use dialects::error::{ApiError, ErrorKind, Shape};
use serde_json::{Value, json};

use crate::support::{ask, ask_after, end, events};

const FIELDS: &[&str] = &[
    "model",
    "input",
    "instructions",
    "tools",
    "tool_choice",
    "stream",
    "stream_options",
    "store",
    "metadata",
    "reasoning",
    "text",
    "include",
    "previous_response_id",
    "conversation",
    "max_output_tokens",
    "temperature",
    "top_logprobs",
    "truncation",
    "parallel_tool_calls",
    "cache_salt",
    "kv_transfer_params",
    "bootstrap_room",
    "prompt_cache_options",
    "x\"\u{e9}",
];

const VALUES: &[&str] = &[
    "null",
    "true",
    "0",
    "-1",
    "7",
    "1e400",
    "\"\"",
    "\"auto\"",
    "\"resp_1\"",
    "\"\\ud800\"",
    "[]",
    "{}",
    "[1,[2,[3]]]",
    "{\"id\":\"conv_1\"}",
    "{\"effort\":\"low\"}",
    "[{\"role\":\"user\",\"content\":\"x\"}]",
    "[{\"role\":\"user\",\"content\":[{\"type\":\"input_text\",\"text\":\"a\"},{\"type\":\"input_text\",\"text\":\"b\"}]}]",
    "[{\"type\":\"function_call\",\"call_id\":\"c\",\"name\":\"f\",\"arguments\":\"{\"},{\"type\":\"function_call_output\",\"call_id\":\"c\",\"output\":\"x\"}]",
    "[{\"type\":\"reasoning\",\"summary\":[]},{\"type\":\"item_reference\",\"id\":\"rs_1\"}]",
    "[{\"type\":\"local_shell_call\",\"call_id\":\"c\",\"action\":{\"command\":[\"ls\"]}},{\"type\":\"local_shell_call_output\",\"id\":\"c\",\"output\":\"x\"}]",
    "[{\"type\":\"function\",\"name\":\"f\",\n\"parameters\":{}},{\"type\":\"namespace\",\"name\":\"n\"},{\"type\":\"custom\",\"name\":\"c\"}]",
    "{\"type\":\"allowed_tools\",\"mode\":\"auto\",\"tools\":[{\"type\":\"function\",\"name\":\"f\"}]}",
    "{\"format\":{\"type\":\"json_schema\",\"name\":\"s\",\"schema\":{}}}",
    "[\"message.output_text.logprobs\"]",
    "[{}]",
    "\u{e9}",
];

fn body(bytes: &[u8]) -> Vec<u8> {
    let [first, rest @ ..] = bytes else {
        return Vec::new();
    };
    if first % 8 == 0 {
        return rest.to_vec();
    }
    let mut members = Vec::new();
    let mut used = Vec::new();
    for pair in rest.chunks_exact(2).take(6) {
        let name = FIELDS[usize::from(pair[0]) % FIELDS.len()];
        let value = VALUES[usize::from(pair[1]) % VALUES.len()];
        if first % 4 != 1 || !used.contains(&name) {
            used.push(name);
            members.push(format!("{}:{value}", json!(name)));
        }
    }
    for (name, value) in [("model", "\"m\""), ("input", "\"x\"")] {
        if !used.contains(&name) {
            members.push(format!("{}:{value}", json!(name)));
        }
    }
    format!("{{{}}}", members.join(",")).into_bytes()
}

#[test]
fn requests() {
    bolero::check!()
        .with_iterations(8_000)
        .for_each(|bytes: &[u8]| {
            let body = body(bytes);
            let Ok(text) = std::str::from_utf8(&body) else {
                return;
            };
            let asked = match ask_after(Vec::new(), text) {
                Ok(asked) => asked,
                Err(error) => {
                    assert!(matches!(error.kind.status(), 400 | 404), "{error}");
                    assert!(serde_json::from_str::<Value>(&error.body(Shape::OpenAi)).is_ok());
                    return;
                }
            };
            assert!(!asked.prompt.messages.is_empty());
            for name in [
                "cache_salt",
                "kv_transfer_params",
                "bootstrap_room",
                "stream",
                "messages",
            ] {
                assert!(!asked.node.contains_key(name), "{name} reaches the node");
            }
            let mut translation = asked.translation;
            let mut out = Vec::new();
            translation.end(&end(), &mut out);
            let told = events(&out);
            let response = &told.last().expect("events").1["response"];
            // A field that nobody reads may hold what is no text.
            let sent: Value = serde_json::from_str(text).unwrap_or_default();
            for name in ["tools", "metadata", "instructions", "tool_choice"] {
                if !sent[name].is_null() {
                    assert_eq!(response[name], sent[name], "{name} is echoed");
                }
            }
        });
}

const DELTAS: &[&str] = &[
    "{}",
    "{\"content\":\"\"}",
    "{\"content\":\"x\"}",
    "{\"content\":null,\"reasoning_content\":\"r\"}",
    "{\"reasoning\":\"r\",\"reasoning_content\":\"r\"}",
    "{\"refusal\":\"no\"}",
    "{\"content\":7}",
    "{\"tool_calls\":[{\"index\":0,\"id\":\"a\",\"function\":{\"name\":\"f\",\"arguments\":\"\"}}]}",
    "{\"tool_calls\":[{\"index\":0,\"function\":{\"arguments\":\"{\"}}]}",
    "{\"tool_calls\":[{\"index\":0,\"function\":{\"arguments\":\"}\"}}]}",
    "{\"tool_calls\":[{\"index\":1,\"function\":{\"name\":\"p\"}},{\"index\":2}]}",
    "{\"tool_calls\":[{\"index\":18446744073709551615,\"function\":{\"name\":\"f\",\"arguments\":\"[\"}}]}",
    "{\"tool_calls\":[{\"function\":{}}]}",
    "{\"tool_calls\":null}",
    "null",
    "[]",
];
const ENDS: &[&str] = &[
    "null",
    "null",
    "null",
    "null",
    "null",
    "\"stop\"",
    "\"length\"",
    "7",
];

fn node_chunk(pair: &[u8]) -> String {
    let delta = DELTAS[usize::from(pair[0]) % DELTAS.len()];
    let finish = ENDS[usize::from(pair[1]) % ENDS.len()];
    let logprobs = [
        "null",
        "{\"content\":[{\"token\":\"x\"}]}",
        "{\"content\":null}",
    ][usize::from(pair[1] / 8) % 3];
    match pair[0] {
        250.. => "{\"choices\":[]}".to_owned(),
        _ => format!(
            "{{\"choices\":[{{\"delta\":{delta},\"logprobs\":{logprobs},\"finish_reason\":{finish}}}]}}"
        ),
    }
}

#[test]
fn streams() {
    let body = json!({"model": "m", "input": "x", "stream": true, "tools": [{"type": "custom", "name": "p"}],
        "include": ["message.output_text.logprobs", "reasoning.encrypted_content"]});
    let asked = AssertUnwindSafe(ask(&body).translation);
    bolero::check!()
        .with_iterations(8_000)
        .for_each(|bytes: &[u8]| {
            let AssertUnwindSafe(asked) = &asked;
            let mut translation = asked.fresh();
            let mut out = Vec::new();
            let [first, rest @ ..] = bytes else {
                return;
            };
            if first % 8 == 0 {
                let _ = translation.chunk(rest, &mut out);
            }
            for pair in rest.chunks_exact(2) {
                if translation
                    .chunk(node_chunk(pair).as_bytes(), &mut out)
                    .is_err()
                {
                    break;
                }
            }
            match first % 3 {
                0 => translation.end(&end(), &mut out),
                1 => {
                    let error = ApiError::new(ErrorKind::NodeFailed, "x");
                    translation.fail(&error, Usage::default(), &mut out);
                }
                _ => translation.cancel(Usage::default(), &mut out),
            }
            let told = events(&out);
            assert_eq!(told[0].0, "response.created");
            let (_, last) = told.last().expect("events");
            let stored = translation.stored().expect("kept");
            assert_eq!(stored.response, last["response"]);
        });
}
