//! Does any body upset the readers of requests?
//!
//! Bodies are random bytes, and objects of the API's own fields with values that are sound, odd,
//! extreme or of another type. Whatever they are, reading them ends in a request or in a refusal
//! that names the field, or says that the body is no JSON.

use engine::error::ApiError;
use engine::request::{
    Caller, Dialect, Rules, detokenization, embedding, parse, release, tokenization,
};
use serde_json::{Map, Value, json};

const MODEL: &str = "m";

/// Every field that a reader looks at, and some that none does.
const FIELDS: [&str; 64] = [
    "model",
    "messages",
    "prompt",
    "prompt_token_ids",
    "input",
    "tokens",
    "ticket",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "n",
    "best_of",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "echo",
    "suffix",
    "return_token_ids",
    "cache_salt",
    "priority",
    "timeout",
    "kv_transfer_params",
    "chat_template_kwargs",
    "add_special_tokens",
    "return_token_strs",
    "encoding_format",
    "dimensions",
    "pooling",
    "functions",
    "function_call",
    "modalities",
    "audio",
    "prediction",
    "use_beam_search",
    "continue_final_message",
    "add_generation_prompt",
    "chat_template",
    "user",
    "metadata",
    "store",
    "reasoning_effort",
    "nobody_knows_this",
];

/// What the fields are given.
fn values() -> Vec<Value> {
    let tool = json!({"type": "function", "function": {"name": "now", "parameters": {}}});
    vec![
        json!(null),
        json!(true),
        json!(false),
        json!(0),
        json!(1),
        json!(-1),
        json!(7),
        json!(0.5),
        json!(-0.0),
        json!(1e308),
        json!(-1e308),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(1_000_000_000),
        json!(2.5e9),
        json!(""),
        json!("m"),
        json!("auto"),
        json!("none"),
        json!("required"),
        json!("text"),
        json!("mean"),
        json!("base64"),
        json!("\u{0}\u{fffd}🦀"),
        json!("x".repeat(5000)),
        json!([]),
        json!([1, 2, 3]),
        json!([-1]),
        json!([4_294_967_296u64]),
        json!([1.5]),
        json!(["a", ""]),
        json!([["a"], [1]]),
        json!(vec!["stop"; 300]),
        json!([null]),
        json!({}),
        json!({"a": 1}),
        json!({"5": 3.5, "7": -200}),
        json!({"x": 1}),
        json!({"": null}),
        json!([{"role": "user", "content": "hi"}]),
        json!([{"role": 5}]),
        json!([{}]),
        json!([{"role": "user", "content": [{"type": "text", "text": "hi"}]}]),
        json!([{"role": "tool", "tool_call_id": 1, "content": {}}]),
        json!([{"role": "assistant", "tool_calls": [{"function": {"arguments": 5}}]}]),
        json!([tool]),
        json!([{"type": "function"}]),
        json!([{"type": "function", "function": {}}]),
        json!(vec![tool; 200]),
        json!({"type": "function", "function": {"name": "now"}}),
        json!({"type": "function"}),
        json!({"type": "json_object"}),
        json!({"type": "json_schema"}),
        json!({"type": []}),
        json!({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}),
        json!({"type": "json_schema", "json_schema": {"schema": 5, "strict": "yes"}}),
        json!({"json": {}}),
        json!({"regex": "("}),
        json!({"choice": []}),
        json!({"grammar": 1}),
        json!({"json": {}, "regex": "a"}),
        json!({"do_remote_decode": true}),
        json!({"do_remote_prefill": true}),
        transfer(),
        json!({"include_usage": 1}),
        json!({"include_usage": true, "continuous_usage_stats": true}),
        (0..90).fold(json!(1), |inner, _| json!([inner])),
    ]
}

/// Everything that a second half can say.
fn transfer() -> Value {
    json!({
        "do_remote_prefill": true, "transfer_id": "0123456789abcdef0123456789abcdef",
        "remote_engine_id": "e", "remote_endpoints": ["unix:/s", "tcp://127.0.0.1:1"],
        "timeout_ms": 5, "total_timeout_ms": 7, "on_failure": "error",
    })
}

fn rules(caller: Caller) -> Rules<'static> {
    Rules {
        model_id: MODEL,
        vocab: 1000,
        caller,
        seed: 7,
    }
}

/// Reads a body in every way.
fn read(body: &[u8]) {
    for caller in [Caller::TokenHolder, Caller::Anonymous] {
        let rules = rules(caller);
        for dialect in [Dialect::Chat, Dialect::Completions] {
            check(body, parse(body, dialect, &rules));
        }
        check(body, embedding(body, &rules));
        check(body, tokenization(body, &rules));
        check(body, detokenization(body, &rules));
        check(body, release(body, caller));
    }
}

/// A refusal says which field is at fault.
fn check<T>(body: &[u8], read: Result<T, ApiError>) {
    let Err(error) = read else {
        return;
    };
    let body = String::from_utf8_lossy(body);
    assert!(!error.message.is_empty(), "no message for {body}");
    assert!(error.kind.status().is_client_error(), "{error} for {body}");
    let names_field = error.param.as_ref().is_some_and(|param| !param.is_empty());
    assert!(
        names_field || error.code == "invalid_json",
        "{error:?} names no field for {body}"
    );
    // A refusal is an answer too: it must not repeat a body of any size.
    assert!(error.message.len() < 2000, "{} for {body}", error.message);
}

#[test]
fn bytes() {
    bolero::check!().for_each(read);
}

#[test]
fn fields_with_odd_values() {
    let values = values();
    bolero::check!()
        .with_type::<(bool, Vec<(u8, u8)>)>()
        .for_each(|(is_sound_so_far, pairs)| {
            let mut body = Map::new();
            if *is_sound_so_far {
                body.insert("model".into(), json!(MODEL));
                body.insert(
                    "messages".into(),
                    json!([{"role": "user", "content": "hi"}]),
                );
                body.insert("prompt".into(), json!("hi"));
            }
            for (field, value) in pairs.iter().take(8) {
                let field = FIELDS[usize::from(*field) % FIELDS.len()];
                let value = &values[usize::from(*value) % values.len()];
                body.insert(field.into(), value.clone());
            }
            read(Value::Object(body).to_string().as_bytes());
        });
}
