//! Does any body upset the reader of requests, or smuggle something to a node?
//!
//! Bodies are random bytes, and objects of known fields with values that are sound, odd or of
//! another type, some keys spelled with escapes. What is accepted must reach the node as JSON with
//! our salt, and without what only gateways may say.

use std::collections::HashMap;

use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::{Delivery, Dialect};
use crate::turn::only_gateways_say;

const FIELDS: &[&str] = &[
    "model",
    "messages",
    "prompt",
    "stream",
    "stream_options",
    "n",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "tools",
    "tool_choice",
    "response_format",
    "structured_outputs",
    "logit_bias",
    "logprobs",
    "stop",
    "seed",
    "priority",
    "return_token_ids",
    "chat_template_kwargs",
    "cache_salt",
    "kv_transfer_params",
    "prompt_token_ids",
    "bootstrap_room",
    "request_id",
    "x\"\u{e9}",
];

const VALUES: &[&str] = &[
    "null",
    "true",
    "0",
    "-1",
    "7",
    "1e400",
    "99999999999999999999",
    "\"\"",
    "\"theirs\"",
    "\"\\ud800\"",
    "[]",
    "[1,[2,[3]]]",
    "[\"a\",\"b\"]",
    "{}",
    "{\"include_usage\":true}",
    "{\"cache_salt\":\"theirs\"}",
    "[{\"role\":\"user\",\"content\":\"x\"}]",
    "[{\"role\":\"tool\",\"content\":[{\"type\":\"text\",\"text\":\"x\"}]}]",
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
    if first % 4 != 1 {
        members.push("\"model\":\"m\"".to_owned());
        members.push(format!("\"messages\":{}", VALUES[16]));
        members.push("\"prompt\":\"p\"".to_owned());
    }
    for pair in rest.chunks_exact(2).take(6) {
        let name = FIELDS[usize::from(pair[0]) % FIELDS.len()];
        let value = VALUES[usize::from(pair[1]) % VALUES.len()];
        let mut name = json!(name).to_string();
        if pair[0] >= 200 && name.len() > 3 {
            // The same key, spelled so that no search for its text finds it.
            let code = u32::from(name.as_bytes()[1]);
            name = format!("\"\\u{code:04x}{}", &name[2..]);
        }
        members.push(format!("{name}:{value}"));
    }
    format!("{{{}}}", members.join(",")).into_bytes()
}

#[test]
fn request_bodies() {
    bolero::check!()
        .with_iterations(20_000)
        .for_each(|bytes: &[u8]| {
            let body = body(bytes);
            for dialect in [Dialect::Chat, Dialect::Completions] {
                let turn = match super::tests::parse(dialect, &body) {
                    Ok(turn) => turn,
                    Err(error) => {
                        assert_eq!(error.kind.status(), 400, "{error}");
                        assert!(
                            serde_json::from_str::<Value>(&error.body(crate::error::Shape::OpenAi))
                                .is_ok()
                        );
                        continue;
                    }
                };
                // Unknown fields travel as they are, numbers that no `f64` holds included.
                let sent: HashMap<String, Box<RawValue>> =
                    serde_json::from_slice(&turn.node_body(&PARAMS)).expect("an object");
                let text = |name: &str| sent.get(name).map(|value| value.get());
                assert_eq!(text("cache_salt"), Some("\"ours\""));
                if turn.delivery != Delivery::Whole {
                    assert_eq!(text("stream_options"), Some(r#"{"include_usage":true}"#));
                }
                for name in sent.keys().filter(|name| *name != "cache_salt") {
                    assert!(!only_gateways_say(name), "{name} reaches the node");
                }
                let priority = text("priority").and_then(|text| text.parse::<i64>().ok());
                assert!(priority.is_none_or(|priority| priority > 0));
            }
        });
}

const PARAMS: crate::NodeParams<'_> = crate::NodeParams {
    model: "m",
    is_alias: false,
    cache_salt: "ours",
    usage_always: false,
};
