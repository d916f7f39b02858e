//! Requests that cannot be served. Catches a crash, a stuck batch, and an error that does not say
//! what is wrong.

use serde_json::{Value, json};

use crate::common::{MODEL, chat_body, shared, user};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// Path, body, status, code, param.
type Row = (
    &'static str,
    Vec<u8>,
    u16,
    &'static str,
    Option<&'static str>,
);

fn broken_bodies() -> Vec<Row> {
    vec![
        (CHAT, b"{\"model\":".to_vec(), 400, "invalid_json", None),
        (
            CHAT,
            b"{\"model\": \"\xff\xfe\"}".to_vec(),
            400,
            "invalid_json",
            None,
        ),
        (CHAT, b"".to_vec(), 400, "invalid_json", None),
        (CHAT, vec![b' '; (1 << 20) + 1], 413, "body_too_large", None),
        ("/v1/images", b"{}".to_vec(), 404, "unknown_path", None),
        (
            "/v1/models",
            b"{}".to_vec(),
            405,
            "method_not_allowed",
            None,
        ),
    ]
}

fn wrong_chats(too_long: &str) -> Vec<Row> {
    let wizard = json!([{"role": "wizard", "content": "hi"}]);
    let rows = [
        (json!({"model": "gpt-9"}), 404, "model_not_found", "model"),
        (json!({"messages": []}), 400, "invalid_value", "messages"),
        (json!({"messages": 5}), 400, "invalid_type", "messages"),
        (
            json!({"messages": wizard}),
            400,
            "invalid_value",
            "messages[0].role",
        ),
        (
            json!({"messages": user(too_long)}),
            400,
            "context_length_exceeded",
            "messages",
        ),
        (
            json!({"max_tokens": 1_000_000_000}),
            400,
            "context_length_exceeded",
            "max_tokens",
        ),
        (
            json!({"max_completion_tokens": 8192}),
            400,
            "context_length_exceeded",
            "max_completion_tokens",
        ),
        (
            json!({"max_tokens": "many"}),
            400,
            "invalid_type",
            "max_tokens",
        ),
        (json!({"n": 1000}), 400, "invalid_value", "n"),
        (
            json!({"cache_salt": ""}),
            400,
            "invalid_value",
            "cache_salt",
        ),
    ];
    let row = |(fields, status, code, param)| (CHAT, bytes(fields), status, code, Some(param));
    rows.into_iter().map(row).collect()
}

/// What a hostile or careless client sends, and which field it is told about.
fn hostile_chats() -> Vec<Row> {
    let many: Vec<_> = (0..1000).map(|i| format!("stop {i}")).collect();
    let orphan = json!([{"role": "user", "content": "hi"},
        {"role": "tool", "tool_call_id": "call_1", "content": "5"}]);
    let rows = [
        (json!({"stop": many}), "invalid_value", "stop"),
        (json!({"stop": "x".repeat(10_000)}), "invalid_value", "stop"),
        (
            json!({"logit_bias": {"49152": 1}}),
            "invalid_value",
            "logit_bias.49152",
        ),
        (
            json!({"logit_bias": {"5": 1e9}}),
            "invalid_value",
            "logit_bias.5",
        ),
        (json!({"temperature": 1e9}), "invalid_value", "temperature"),
        (json!({"seed": 1e300}), "invalid_type", "seed"),
        (json!({"top_logprobs": 5}), "invalid_value", "top_logprobs"),
        (
            json!({"min_tokens": 1_000_000_000}),
            "context_length_exceeded",
            "min_tokens",
        ),
        (json!({"messages": orphan}), "invalid_value", "messages[1]"),
        (
            json!({"tool_choice": "required"}),
            "invalid_value",
            "tool_choice",
        ),
        (
            json!({"response_format": {"type": "json_schema"}}),
            "missing_required_parameter",
            "response_format.json_schema",
        ),
    ];
    let row = |(fields, code, param)| (CHAT, bytes(fields), 400, code, Some(param));
    rows.into_iter().map(row).collect()
}

fn wrong_completions(too_long: &str) -> Vec<Row> {
    let rows = [
        (
            json!({"model": MODEL}),
            "missing_required_parameter",
            "prompt",
        ),
        (
            json!({"model": MODEL, "prompt": too_long}),
            "context_length_exceeded",
            "prompt",
        ),
        (
            json!({"model": MODEL, "prompt": [49_152]}),
            "invalid_type",
            "prompt[0]",
        ),
    ];
    let row = |(body, code, param): (Value, _, _)| {
        (
            COMPLETIONS,
            body.to_string().into_bytes(),
            400,
            code,
            Some(param),
        )
    };
    rows.into_iter().map(row).collect()
}

#[test]
fn bad_input_is_refused_by_name() {
    let node = shared();
    let too_long = "river ".repeat(9000);
    let rows = [
        broken_bodies(),
        wrong_chats(&too_long),
        hostile_chats(),
        wrong_completions(&too_long),
    ]
    .concat();
    for (path, body, status, code, param) in rows {
        let reply = node.send("POST", path, "", &body);
        let expected = (status, code.to_owned(), param.map(str::to_owned));
        let shown = String::from_utf8_lossy(&body[..body.len().min(80)]).into_owned();
        assert_eq!(reply.error(), expected, "{path} {shown}");
    }
    let reply = node.post(CHAT, &chat_body(json!({"max_tokens": 8192})));
    let message = reply.json()["error"]["message"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    assert!(message.contains("8192"), "the numbers are named: {message}");
}

fn bytes(fields: Value) -> Vec<u8> {
    chat_body(fields).to_string().into_bytes()
}
