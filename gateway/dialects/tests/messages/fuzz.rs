//! Does any body upset the reader of requests, or any node the translation of its answer?
//!
//! What is accepted must reach the node as JSON with our salt and without what only gateways may
//! say; what is refused is a 400 with an error object. Whatever a node sends, the client reads whole
//! events.

use dialects::Fields;
use dialects::answer::{End, Usage};
use dialects::error::Shape;
use serde_json::{Value, json};

use super::{read, reader::events, request};

/// Members of requests and blocks, sound, odd or of another type.
const FIELDS: &[&str] = &[
    "model",
    "max_tokens",
    "messages",
    "system",
    "tools",
    "tool_choice",
    "thinking",
    "stream",
    "stop_sequences",
    "temperature",
    "top_k",
    "metadata",
    "output_config",
    "cache_control",
    "service_tier",
    "thread",
    "compaction",
    "cache_salt",
    "kv_transfer_params",
    "request_id",
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
    "\"x\"",
    "\"\\ud800\"",
    "[]",
    "[[[]]]",
    "{}",
    "{\"type\":\"ephemeral\"}",
    "{\"type\":\"enabled\",\"budget_tokens\":1024}",
    "{\"type\":\"disabled\"}",
    "{\"type\":\"any\"}",
    "{\"type\":\"tool\",\"name\":\"f\"}",
    "{\"format\":{\"type\":\"json_schema\",\"schema\":{}}}",
    "[\"a\",\"b\"]",
    "\u{e9}",
    "[{\"name\":\"f\",\"input_schema\":{\"type\":\"object\"}}]",
    "[{\"type\":\"web_search_20250305\",\"name\":\"f\"}]",
    "[{\"role\":\"user\",\"content\":\"x\"}]",
];

/// What a block's or message's members may be.
const BLOCKS: &[&str] = &[
    r#"{"type":"text","text":"x"}"#,
    r#"{"type":"text","text":""}"#,
    r#"{"type":"text","text":"x","cache_control":{"type":"ephemeral","ttl":"1h"}}"#,
    r#"{"type":"thinking","thinking":"t","signature":""}"#,
    r#"{"type":"redacted_thinking","data":"t"}"#,
    r#"{"type":"tool_use","id":"a","name":"f","input":{}}"#,
    r#"{"type":"tool_use","id":"b","name":"f","input":{"a":[1]}}"#,
    r#"{"type":"tool_result","tool_use_id":"a","content":[{"type":"text","text":"r"}]}"#,
    r#"{"type":"tool_result","tool_use_id":"b"}"#,
    r#"{"type":"image","source":{"type":"base64","media_type":"image/png","data":"AAAA"}}"#,
    r#"{"type":"document","source":{"type":"text","data":"d"}}"#,
    r#"{"type":"server_tool_use","id":"s","name":"n","input":{}}"#,
    r#"{"type":7}"#,
    "null",
];

fn messages(bytes: &[u8]) -> String {
    let roles = ["user", "assistant", "system", "other"];
    let message = |bytes: &[u8]| {
        let (first, rest) = bytes.split_first().unwrap_or((&0, &[]));
        let blocks = rest
            .iter()
            .map(|byte| BLOCKS[usize::from(*byte) % BLOCKS.len()]);
        let blocks: Vec<&str> = blocks.collect();
        let role = roles[usize::from(first % 16).min(17) % 3 + usize::from(*first > 250)];
        format!("{{\"role\":\"{role}\",\"content\":[{}]}}", blocks.join(","))
    };
    let all: Vec<String> = bytes.chunks(3).take(8).map(message).collect();
    format!("[{}]", all.join(","))
}

fn body(bytes: &[u8]) -> Vec<u8> {
    let [first, rest @ ..] = bytes else {
        return Vec::new();
    };
    if first % 8 == 0 {
        return rest.to_vec();
    }
    let mut members = vec![
        "\"model\":\"m\"".to_owned(),
        "\"max_tokens\":2000".to_owned(),
    ];
    let (head, tail) = rest.split_at(rest.len().min(usize::from(first % 7)));
    members.push(format!("\"messages\":{}", messages(tail)));
    for pair in head.chunks_exact(2) {
        let name = FIELDS[usize::from(pair[0]) % FIELDS.len()];
        let value = VALUES[usize::from(pair[1]) % VALUES.len()];
        members.retain(|member| !member.starts_with(&format!("\"{name}\":")));
        members.push(format!("\"{name}\":{value}"));
    }
    format!("{{{}}}", members.join(",")).into_bytes()
}

#[test]
fn request_bodies() {
    bolero::check!()
        .with_iterations(20_000)
        .for_each(|bytes: &[u8]| {
            let body = body(bytes);
            if let Ok(fields) = Fields::parse(&body) {
                // Counting takes whatever asking takes.
                let counted = dialects::messages::count_tokens(fields);
                assert!(counted.is_ok() || read(&body).is_err());
            }
            match read(&body) {
                Ok((prompt, node)) => {
                    assert!(!prompt.messages.is_empty());
                    assert_eq!(node["cache_salt"], "ours");
                    assert_eq!(node["model"], "node-model");
                    for name in ["kv_transfer_params", "request_id"] {
                        assert_eq!(node.get(name), None, "{name} reaches the node");
                    }
                    for message in &prompt.messages {
                        assert!(message["role"].is_string());
                    }
                }
                Err(error) => {
                    assert_eq!(error.kind.status_in(Shape::Anthropic), 400, "{error}");
                    let told: Value =
                        serde_json::from_str(&error.body(Shape::Anthropic)).expect("JSON");
                    assert_eq!(told["error"]["type"], "invalid_request_error");
                }
            }
        });
}

/// Members of a chunk.
const DELTAS: &[&str] = &[
    r#"{"role":"assistant","content":""}"#,
    r#"{"content":"x"}"#,
    r#"{"content":" \n"}"#,
    r#"{"content":"\ud83e\udd80\u0020"}"#,
    r#"{"content":"\ud83e"}"#,
    r#"{"content":7}"#,
    r#"{"reasoning_content":"t"}"#,
    r#"{"reasoning":"t","content":"y"}"#,
    r#"{"tool_calls":[{"index":0,"id":"a","function":{"name":"f","arguments":""}}]}"#,
    r#"{"tool_calls":[{"index":0,"function":{"arguments":"{\"a\":1"}}]}"#,
    r#"{"tool_calls":[{"index":1,"id":"b","function":{"name":"f","arguments":"{}"}}]}"#,
    r#"{"tool_calls":[{}]}"#,
    r#"{"tool_calls":null}"#,
    r#"{"refusal":"no"}"#,
    "null",
];

fn chunk(byte: u8) -> Vec<u8> {
    let delta = DELTAS[usize::from(byte) % DELTAS.len()];
    match byte {
        240.. => br#"{"id":"i","choices":[],"usage":{"prompt_tokens":3}}"#.to_vec(),
        230.. => br#"{"choices":null,"usage":null}"#.to_vec(),
        220.. => format!(r#"{{"choices":[{{"index":0,"delta":{delta},"finish_reason":"stop","stop_reason":{byte}}}]}}"#).into_bytes(),
        210.. => format!(r#"{{"choices":[{{"index":1,"delta":{delta}}}]}}"#).into_bytes(),
        _ => format!(r#"{{"id":"i","choices":[{{"index":0,"delta":{delta}}}]}}"#).into_bytes(),
    }
}

#[test]
fn node_streams() {
    let text = request(&json!({"stream": true})).to_string();
    bolero::check!()
        .with_iterations(10_000)
        .for_each(|bytes: &[u8]| {
            let fields = Fields::parse(text.as_bytes()).expect("an object");
            let (_, mut answer) = dialects::messages::parse(fields).expect("a sound request");
            let mut out = Vec::new();
            let _ = answer.fresh().chunk(bytes, &mut out);
            let _ = answer.fresh().whole(bytes, &End::default());
            out.clear();
            answer.begin(Usage::default());
            for byte in bytes.iter().take(64) {
                if answer.chunk(&chunk(*byte), &mut out).is_err() {
                    break;
                }
            }
            answer.end(&End::default(), &mut out);
            // Lone surrogates of a node travel as they are; all else is read back.
            let is_lone = |byte: &u8| chunk(*byte).windows(7).any(|part| part == br#"\ud83e""#);
            if !bytes.iter().any(is_lone) {
                let events = events(&out);
                let count = |name: &str| events.iter().filter(|(told, _)| told == name).count();
                assert_eq!(count("message_start"), 1);
                assert_eq!(count("message_stop"), 1);
                assert_eq!(count("content_block_start"), count("content_block_stop"));
            }
        });
}
