//! Catches: a conversation whose tokens, or whose session, depend on the dialect or on a client's
//! way to spell it, and a user's words that are taken for a client's.

#![cfg(test)]

use std::path::PathBuf;

use dialects::normalise::{Options, normalise};
use dialects::session::{Found, Table, fingerprint};
use dialects::{ChatPrompt, Dialect, Fields, PromptInput, messages, responses};
use http::HeaderMap;
use prompt::gguf::Header;
use prompt::{ChatInput, PromptBuilder, SegmentCache};
use serde_json::{Value, json};

/// The default model's template and tokenizer.
fn builder() -> PromptBuilder {
    let path = std::env::var_os("HOMING_MODEL").map_or_else(
        || {
            let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
            root.join("models/SmolLM2-135M-Instruct.Q4_1.gguf")
        },
        PathBuf::from,
    );
    let bytes = std::fs::read(&path)
        .unwrap_or_else(|error| panic!("{}: {error}; run `make setup`", path.display()));
    let header = Header::parse(&bytes).expect("a model");
    PromptBuilder::from_gguf(&header).expect("tokenizer and template")
}

fn tokens(builder: &PromptBuilder, prompt: &ChatPrompt) -> Vec<u32> {
    let input = ChatInput {
        messages: &prompt.messages,
        tools: prompt.tools.as_deref(),
        template_kwargs: prompt.template_kwargs.as_ref(),
        unix_seconds: 0,
    };
    let known = SegmentCache::new(16 << 20);
    builder.chat(&input, &known).expect("a prompt")
}

/// The prompt of a request, with these spellings made one.
fn prompt(dialect: Dialect, body: &Value, options: Options) -> ChatPrompt {
    let text = body.to_string();
    let fields = Fields::parse(text.as_bytes()).expect("an object");
    let turn = match dialect {
        Dialect::Messages => messages::parse(fields).expect("a turn").0,
        Dialect::Responses => {
            let ids = responses::Ids {
                response: "resp_00000000000040008000000000000001".to_owned(),
                created_s: 0,
            };
            let request = responses::parse(fields).expect("a request");
            request.turn(Vec::new(), ids).expect("a turn").0
        }
        _ => dialects::chat(fields).expect("a turn"),
    };
    let PromptInput::Chat(mut prompt) = turn.prompt else {
        panic!("a chat")
    };
    normalise(&mut prompt, options);
    prompt
}

/// Field report H14: Claude Code's first line changes with every request.
#[test]
fn a_changing_billing_line_keeps_the_prefix_and_the_session() {
    let instructions = "You may read and write files. ".repeat(2_800);
    let request = |number: &str, user: &str| {
        let line = format!(
            "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={number};"
        );
        json!({
            "model": "claude", "max_tokens": 10,
            "system": [
                {"type": "text", "text": line},
                {"type": "text", "text": instructions, "cache_control": {"type": "ephemeral"}},
            ],
            "messages": [{"role": "user", "content": user}],
        })
    };
    let builder = builder();
    let of = |number, user, options| prompt(Dialect::Messages, &request(number, user), options);
    let on = Options::default();
    let first = of("aaaaa", "hi", on);
    let tokens_of = |prompt: &ChatPrompt| tokens(&builder, prompt);
    let session = |prompt: &ChatPrompt| fingerprint(&PromptInput::Chat(prompt.clone()));
    let second = of("bbbbb", "hi", on);
    assert_eq!(tokens_of(&first), tokens_of(&second));
    assert!(tokens_of(&first).len() > 16_000);
    assert_eq!(session(&first), session(&second));
    assert!(!first.messages[0].to_string().contains("billing"));

    // What a user says of it is the user's.
    let words = "x-anthropic-billing-header: cc_version=1; cch=ccccc; is in my logs";
    let quoted = of("aaaaa", words, on);
    assert_eq!(quoted.messages[1]["content"], words);

    // Switched off, the sessions share nothing: so the switch is what does it.
    let off = Options {
        billing_line: false,
        ..on
    };
    let (first, second) = (of("aaaaa", "hi", off), of("bbbbb", "hi", off));
    assert_ne!(session(&first), session(&second));
    let (first, second) = (tokens_of(&first), tokens_of(&second));
    let shared = first
        .iter()
        .zip(&second)
        .take_while(|(a, b)| a == b)
        .count();
    assert!(shared < 64, "{shared} tokens");
}

const SYSTEM: &str = "You are an assistant.";
const ARGUMENTS: &str = r#"{"city":"Zürich","days":[1,2]}"#;

fn schema() -> Value {
    json!({"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array",
        "items": {"type": "integer"}}}, "required": ["city", "days"], "additionalProperties": false})
}

fn chat() -> Value {
    json!({"model": "m", "messages": [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "How warm will it be?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}},
            {"id": "call_2", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}},
        ]},
        {"role": "tool", "tool_call_id": "call_1", "content": "21 °C"},
        {"role": "tool", "tool_call_id": "call_2", "content": "22 °C"},
        {"role": "assistant", "content": "Mild."},
        {"role": "user", "content": "Thanks."},
    ], "tools": [{"type": "function", "function":
        {"name": "weather", "description": "Tells the weather.", "parameters": schema()}}]})
}

/// The same conversation as `chat` in the other dialects, and in other spellings.
fn same_conversation() -> Vec<(Dialect, &'static str, Value)> {
    let arguments: Value = serde_json::from_str(ARGUMENTS).expect("JSON");
    let call =
        |id: &str| json!({"type": "tool_use", "id": id, "name": "weather", "input": arguments});
    let mark = json!({"type": "ephemeral"});
    let messages = json!({"model": "m", "max_tokens": 10, "system": SYSTEM, "messages": [
        {"role": "user", "content": [{"type": "text", "text": "How warm will it be?", "cache_control": mark}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, call("call_1"), call("call_2")]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "call_1", "content": "21 °C"},
            {"type": "tool_result", "tool_use_id": "call_2",
             "content": [{"type": "text", "text": "22 °C"}], "cache_control": mark},
        ]},
        {"role": "assistant", "content": "Mild."},
        {"role": "user", "content": "Thanks."},
    ], "tools": [{"name": "weather", "description": "Tells the weather.", "input_schema": schema()}]});
    let call = |id: &str| json!({"type": "function_call", "call_id": id, "name": "weather", "arguments": ARGUMENTS});
    let result = |id: &str, text: &str| json!({"type": "function_call_output", "call_id": id, "output": text});
    let responses = json!({"model": "m", "instructions": SYSTEM, "input": [
        {"role": "user", "content": "How warm will it be?"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        call("call_1"), call("call_2"), result("call_1", "21 °C"), result("call_2", "22 °C"),
        {"role": "assistant", "content": [{"type": "output_text", "text": "Mild."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "Thanks."}]},
    ], "tools": [{"type": "function", "name": "weather", "description": "Tells the weather.",
        "parameters": schema()}]});
    let text = chat().to_string();
    let spelled = |from: &str, to: &str| {
        assert!(text.contains(from), "{from}");
        serde_json::from_str(&text.replace(from, to)).expect("JSON")
    };
    vec![
        (Dialect::Messages, "messages", messages),
        (Dialect::Responses, "responses", responses),
        (
            Dialect::Chat,
            "list",
            spelled(
                r#""Thanks.""#,
                r#"[{"type":"text","text":"Tha"},{"type":"text","text":"nks."}]"#,
            ),
        ),
        (
            Dialect::Chat,
            "marks",
            spelled(
                r#""content":"Thanks.""#,
                r#""content":"Thanks.","cache_control":{"type":"ephemeral"}"#,
            ),
        ),
        (
            Dialect::Chat,
            "arguments",
            spelled(
                r#"{\"city\":\"Zürich\",\"days\":[1,2]}"#,
                r#"{\"city\": \"Z\\u00fcrich\", \"days\": [1, 2]}"#,
            ),
        ),
        (
            Dialect::Chat,
            "keys",
            spelled(
                r#""type":"array","items":{"type":"integer"}"#,
                r#""items":{"type":"integer"},"type":"array""#,
            ),
        ),
    ]
}

#[test]
fn a_conversation_has_one_prompt_in_every_dialect_and_spelling() {
    let builder = builder();
    let expected = prompt(Dialect::Chat, &chat(), Options::default());
    let spelled = |prompt: &ChatPrompt| {
        let messages: Vec<String> = prompt
            .messages
            .iter()
            .map(|message| message.to_string())
            .collect();
        (messages, prompt.tools.as_deref().map(Value::to_string))
    };
    for (dialect, name, body) in same_conversation() {
        let prompt = prompt(dialect, &body, Options::default());
        assert_eq!(
            tokens(&builder, &prompt),
            tokens(&builder, &expected),
            "{name}"
        );
        assert_eq!(spelled(&prompt), spelled(&expected), "{name}");
    }
}

#[test]
fn a_title_request_shares_the_session_and_not_the_prompt() {
    let table = Table::default();
    let mut headers = HeaderMap::new();
    headers.insert(
        "x-session-affinity",
        http::HeaderValue::from_static("ses_1"),
    );
    let title =
        json!({"model": "m", "messages": [{"role": "user", "content": "A title, please."}]});
    let mut fingerprints = Vec::new();
    for body in [chat(), title] {
        let text = body.to_string();
        let fields = Fields::parse(text.as_bytes()).expect("an object");
        let Found::Session(signal) = table.find(Dialect::Chat, &headers, &fields) else {
            panic!("no session")
        };
        assert_eq!(signal.id, "ses_1");
        let prompt = prompt(Dialect::Chat, &body, Options::default());
        fingerprints.push(fingerprint(&PromptInput::Chat(prompt)));
    }
    assert_ne!(fingerprints[0], fingerprints[1]);
}
