//! Does the Messages dialect do what Anthropic's API does, towards its clients and towards nodes?
//!
//! Through the crate's public surface: `prompts` reads requests, `malformed` and `contradictions`
//! have them refused, `streams` turns answers back (made up by `generate`, read by `reader`) and
//! compares streams with whole answers, `fuzz` tries to upset both directions, `captures` replays
//! what real clients sent.

#![expect(clippy::panic, reason = "helpers of tests fail by panicking")]

mod captures;
mod contradictions;
mod fuzz;
mod generate;
mod malformed;
mod prompts;
mod reader;
mod streams;

use dialects::error::{ApiError, Shape};
use dialects::{ChatPrompt, Fields, NodeParams, PromptInput};
use serde_json::{Value, json};

/// A request with one user message, and what is added or replaced.
fn request(extra: &Value) -> Value {
    let mut body = json!({
        "model": "claude-x", "max_tokens": 4096,
        "messages": [{"role": "user", "content": "hi"}],
    });
    let members = extra.as_object().expect("an object");
    for (name, value) in members {
        body[name] = value.clone();
    }
    body
}

/// What a request becomes: the prompt, and the body that a node is sent.
fn read(body: &[u8]) -> Result<(ChatPrompt, Value), ApiError> {
    let fields = Fields::parse(body)?;
    let (turn, _) = dialects::messages::parse(fields)?;
    let node = turn.node_body(&PARAMS);
    let node = serde_json::from_slice(&node).expect("a node's body is JSON");
    let PromptInput::Chat(prompt) = turn.prompt else {
        panic!("Messages make a chat prompt");
    };
    Ok((prompt, node))
}

/// The message with which a request is refused.
fn refusal(body: &[u8]) -> String {
    let error = read(body).expect_err("a refusal");
    assert_eq!(error.kind.status_in(Shape::Anthropic), 400, "{error}");
    let told: Value = serde_json::from_str(&error.body(Shape::Anthropic)).expect("JSON");
    assert_eq!(told["type"], "error");
    assert_eq!(told["error"]["type"], "invalid_request_error");
    told["error"]["message"].as_str().expect("text").to_owned()
}

const PARAMS: NodeParams<'_> = NodeParams {
    model: "node-model",
    is_alias: true,
    cache_salt: "ours",
    usage_always: true,
};
