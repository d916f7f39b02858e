//! Catches a request of a real client that is refused, or whose next turn no longer begins with the
//! turn before, although the client only appended.

use std::path::PathBuf;

use dialects::Fields;
use dialects::normalise::{Options, normalise};
use serde_json::{Value, json};

use super::read;

const CLIENTS: &[&str] = &[
    "claude-code",
    "anthropic-py-stream",
    "ai-sdk-anthropic",
    "opencode-anthropic",
];

fn captures(client: &str) -> Option<Vec<Value>> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/agents/captures");
    let text = std::fs::read_to_string(root.join(format!("{client}.jsonl"))).ok()?;
    let lines = text.lines().map(serde_json::from_str);
    Some(lines.collect::<Result<_, _>>().expect("one JSON a line"))
}

/// A tool that was cut gets its schema back.
fn restored(mut body: Value) -> Value {
    for tool in body["tools"].as_array_mut().into_iter().flatten() {
        if tool["params"].is_array() {
            let names: Vec<String> = serde_json::from_value(tool["params"].take()).expect("names");
            let properties: serde_json::Map<String, Value> = names
                .into_iter()
                .map(|name| (name, json!({"type": "string"})))
                .collect();
            tool["input_schema"] = json!({"type": "object", "properties": properties});
        }
    }
    body
}

#[test]
fn real_clients_are_understood_and_their_turns_append() {
    for client in CLIENTS {
        let Some(captures) = captures(client) else {
            eprintln!("skipped: no ../shared/agents/captures beside the repository");
            return;
        };
        let mut before: Option<Vec<dialects::Shared>> = None;
        let mut appended = 0;
        for capture in captures {
            let path = capture["path"].as_str().expect("a path");
            let body = restored(capture["body"].clone());
            let text = body.to_string();
            if path.contains("/count_tokens") {
                let fields = Fields::parse(text.as_bytes()).expect("an object");
                dialects::messages::count_tokens(fields).expect("a real client's request");
                continue;
            }
            if !path.contains("/messages") {
                continue;
            }
            let (mut prompt, _) = read(text.as_bytes()).expect("a real client's request");
            normalise(&mut prompt, Options::default());
            assert_eq!(
                prompt
                    .tools
                    .and_then(|tools| tools.as_array().map(Vec::len)),
                body["tools"].as_array().map(Vec::len),
                "{client}"
            );
            let now = prompt.messages;
            if let Some(before) = before.filter(|_| capture["append_only"] == true) {
                assert_eq!(now[..before.len()], before, "{client} only appended");
                appended += 1;
            }
            before = Some(now);
        }
        assert!(appended > 0, "{client} has a turn that appends");
    }
}
