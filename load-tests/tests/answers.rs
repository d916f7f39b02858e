//! Does the next turn find the whole answer cached, whatever tokens the model chose for it?
//!
//! Against the real stack with the real model at temperature 1, where many answers are not what the
//! tokenizer would make of their text: plain text over several turns, and tool calls, whose JSON the
//! template spells in its own way. What may be credited is what the node has computed: the prompt
//! and all tokens of the answer but the last one produced, in whole blocks.

#![expect(clippy::panic, reason = "a helper fails its test with what it saw")]

mod support;

use load_tests::chat::{self, Turn};
use load_tests::http::Connection;
use rustix::process::Signal;
use serde_json::{Value, json};
use support::{MODEL, Stack};

const BLOCK: u64 = 16;

/// What a turn cost.
#[derive(Debug, Clone, Copy)]
struct Spent {
    prompt: u64,
    cached: u64,
    output: u64,
}

async fn ask(stack: &Stack, session: &str, body: Value) -> (Value, Spent) {
    let turn = Turn {
        endpoint: "chat/completions",
        body,
        headers: vec![("x-session-affinity", session.to_owned())],
        timeout: std::time::Duration::from_secs(120),
    };
    let target = stack.target();
    let mut connection = Connection::new(&target);
    let key = Some(stack.ready.api_key.as_str());
    let answer = chat::ask(&mut connection, &target, key, &turn).await;
    let answer = answer.unwrap_or_else(|e| panic!("{}: {}; {}", e.kind, e.message, stack.logs()));
    let count = |path: &str| {
        let count = answer.pointer(path).and_then(Value::as_u64);
        count.unwrap_or_else(|| panic!("{path} in {answer}"))
    };
    let spent = Spent {
        prompt: count("/usage/prompt_tokens"),
        cached: count("/usage/prompt_tokens_details/cached_tokens"),
        output: count("/usage/completion_tokens"),
    };
    (answer["choices"][0].clone(), spent)
}

/// The next turn's cached tokens are all that the node had computed, in whole blocks.
fn assert_covered(before: Spent, after: Spent, what: &str) {
    let computed = before.prompt + before.output - 1;
    let most = (after.prompt - 1) / BLOCK;
    let expected = (computed / BLOCK).min(most) * BLOCK;
    assert_eq!(after.cached, expected, "{what}: {before:?} then {after:?}");
}

#[tokio::test]
async fn answers_of_plain_text_stay_cached() {
    let stack = Stack::start(2);
    let mut differing = 0;
    for session in 0..6 {
        let system = format!("You are a helpful assistant with number {session}.");
        let mut messages = vec![
            json!({"role": "system", "content": system}),
            json!({"role": "user", "content": "Write a Python function, then a haiku in Japanese."}),
        ];
        let mut before: Option<Spent> = None;
        for turn in 0..4 {
            let body = json!({"model": MODEL, "messages": messages, "temperature": 1,
                "seed": session * 10 + turn, "max_tokens": 90, "return_token_ids": true});
            let (choice, spent) = ask(&stack, &format!("plain-{session}"), body).await;
            if let Some(before) = before {
                assert_covered(before, spent, &format!("session {session}, turn {turn}"));
            }
            before = Some(spent);
            let content = choice["message"]["content"].as_str().expect("text");
            differing += usize::from(!is_canonical(&choice, content));
            messages.push(json!({"role": "assistant", "content": content}));
            messages.push(json!({"role": "user", "content": "Go on."}));
        }
    }
    // Otherwise nothing was tested.
    assert!(differing > 0, "every answer was the tokenizer's own choice");
    assert_eq!(stack.metric("homing_prompt_mismatch_total"), 0.0);
    stack.stop(Signal::INT);
}

/// Whether an answer's tokens are those that the tokenizer makes of its text.
fn is_canonical(choice: &Value, content: &str) -> bool {
    use prompt::{PromptBuilder, gguf::Header};
    use std::sync::OnceLock;
    static BUILDER: OnceLock<PromptBuilder> = OnceLock::new();
    let builder = BUILDER.get_or_init(|| {
        let file = std::fs::read(support::model_path()).expect("the model");
        PromptBuilder::from_gguf(&Header::parse(&file).expect("a GGUF")).expect("a tokenizer")
    });
    let tokenizer = builder.tokenizer();
    let tokens: Vec<u32> = serde_json::from_value(choice["token_ids"].clone())
        .expect("the tokens that were asked for");
    let ends = tokenizer.eos_ids();
    let tokens: Vec<u32> = tokens.into_iter().filter(|t| !ends.contains(t)).collect();
    tokenizer.encode_text(content) == tokens
}

#[tokio::test]
async fn answers_of_tool_calls_stay_cached() {
    let stack = Stack::start(1);
    let tools = json!([
        {"type": "function", "function": {"name": "get_weather", "description": "The weather now.",
            "parameters": {"type": "object", "additionalProperties": false, "properties": {
                "city": {"type": "string", "maxLength": 30},
                "unit": {"enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer", "minimum": 0, "maximum": 9}},
                "required": ["city", "unit", "days"]}}}]);
    for session in 0..4 {
        let mut messages = vec![
            json!({"role": "system", "content": format!("You are agent {session}.")}),
            json!({"role": "user", "content": "What is the weather in Paris and in Zürich?"}),
        ];
        let mut before: Option<Spent> = None;
        for turn in 0..3 {
            let body = json!({"model": MODEL, "messages": messages, "tools": tools,
                "tool_choice": "required", "temperature": 1, "seed": session * 10 + turn,
                "max_tokens": 256});
            let (choice, spent) = ask(&stack, &format!("calls-{session}"), body).await;
            if let Some(before) = before {
                assert_covered(before, spent, &format!("session {session}, turn {turn}"));
            }
            before = Some(spent);
            let message = choice["message"].clone();
            assert!(choice.get("token_ids").is_none(), "{choice}");
            let calls = message["tool_calls"].as_array().expect("calls").clone();
            assert!(!calls.is_empty(), "{message}");
            messages.push(message);
            for call in calls {
                // A client spells the arguments in its own way.
                let result =
                    json!({"role": "tool", "tool_call_id": call["id"], "content": "21 degrees"});
                messages.push(result);
            }
        }
    }
    assert_eq!(stack.metric("homing_prompt_mismatch_total"), 0.0);
    stack.stop(Signal::INT);
}
