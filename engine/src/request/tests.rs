//! Catches a wrong body that is taken for a right one, and an error that names the wrong field.

mod options;

use serde_json::{Value, json};

use super::*;

fn rules(caller: Caller) -> Rules<'static> {
    Rules {
        model_id: "m",
        vocab: 100,
        caller,
        seed: 9,
    }
}

fn with(fields: &Value) -> Vec<u8> {
    let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    for (name, value) in fields.as_object().expect("rows are objects") {
        body[name] = value.clone();
    }
    body.to_string().into_bytes()
}

fn chat(fields: &Value) -> Result<Generation, ApiError> {
    parse(&with(fields), Dialect::Chat, &rules(Caller::Anonymous))
}

#[expect(clippy::too_many_lines, reason = "a table of one row each")]
#[test]
fn refusals() {
    let many_stops: Vec<_> = (0..1000).map(|i| format!("stop {i}")).collect();
    let rows = [
        (
            json!({"model": null}),
            "missing_required_parameter",
            "model",
        ),
        (json!({"model": 5}), "invalid_type", "model"),
        (json!({"model": "other"}), "model_not_found", "model"),
        (
            json!({"messages": null}),
            "missing_required_parameter",
            "messages",
        ),
        (json!({"messages": "hi"}), "invalid_type", "messages"),
        (json!({"tools": "x"}), "invalid_type", "tools"),
        (json!({"temperature": "hot"}), "invalid_type", "temperature"),
        (json!({"temperature": 2.1}), "invalid_value", "temperature"),
        (json!({"temperature": -0.1}), "invalid_value", "temperature"),
        (json!({"top_p": 0}), "invalid_value", "top_p"),
        (json!({"top_p": 1.01}), "invalid_value", "top_p"),
        (json!({"top_k": -2}), "invalid_value", "top_k"),
        (json!({"top_k": 1.5}), "invalid_type", "top_k"),
        (json!({"seed": "a"}), "invalid_type", "seed"),
        (json!({"max_tokens": 0}), "invalid_value", "max_tokens"),
        (json!({"max_tokens": -1}), "invalid_value", "max_tokens"),
        (
            json!({"max_completion_tokens": 0}),
            "invalid_value",
            "max_completion_tokens",
        ),
        (json!({"max_tokens": "5"}), "invalid_type", "max_tokens"),
        (json!({"stop": 5}), "invalid_type", "stop"),
        (json!({"stop": ["a", 5]}), "invalid_type", "stop[1]"),
        (json!({"stop": ""}), "invalid_value", "stop"),
        (json!({"stop": many_stops}), "invalid_value", "stop"),
        (json!({"stop": "x".repeat(300)}), "invalid_value", "stop"),
        (
            json!({"stop_token_ids": [100]}),
            "invalid_type",
            "stop_token_ids[0]",
        ),
        (json!({"stream": "yes"}), "invalid_type", "stream"),
        (
            json!({"stream_options": {}}),
            "invalid_value",
            "stream_options",
        ),
        (
            json!({"stream": true, "stream_options": {"include_usage": 1}}),
            "invalid_type",
            "stream_options.include_usage",
        ),
        (json!({"cache_salt": ""}), "invalid_value", "cache_salt"),
        (json!({"cache_salt": "a/b"}), "invalid_value", "cache_salt"),
        (
            json!({"cache_salt": "é".repeat(129)}),
            "invalid_value",
            "cache_salt",
        ),
        (json!({"cache_salt": 7}), "invalid_type", "cache_salt"),
        (
            json!({"prompt_token_ids": [1]}),
            "node_token_required",
            "prompt_token_ids",
        ),
        (
            json!({"prompt_token_ids": [1, -1]}),
            "invalid_type",
            "prompt_token_ids[1]",
        ),
        (
            json!({"add_generation_prompt": false}),
            "invalid_value",
            "add_generation_prompt",
        ),
    ];
    check(&rows);
}

fn check(rows: &[(Value, &str, &str)]) {
    for (fields, code, param) in rows {
        let error = chat(fields).expect_err("refused");
        assert_eq!(
            (error.code, error.param.as_deref()),
            (*code, Some(*param)),
            "{fields}"
        );
        assert!(error.message.contains('`'), "{fields}: {}", error.message);
    }
}

#[test]
fn broken_bodies() {
    let deep = "[".repeat(100_000);
    let rows: [(&[u8], &str); 8] = [
        (b"", "not valid JSON"),
        (b"{\"model\": \"m\",", "not valid JSON"),
        (b"[1]", "JSON object"),
        (b"null", "JSON object"),
        (b"{\"model\": \"\xff\"}", "offset 11"),
        (b"{\"temperature\": 1e999}", "not valid JSON"),
        (b"{\"a\": \"\\ud800\"}", "not valid JSON"),
        (deep.as_bytes(), "not valid JSON"),
    ];
    for (body, expected) in rows {
        let error = parse(body, Dialect::Chat, &rules(Caller::Anonymous)).expect_err("refused");
        assert_eq!(error.code, "invalid_json");
        assert!(error.message.contains(expected), "{}", error.message);
    }
}

#[test]
fn neutral_and_unknown_options_pass() {
    let fields = json!({
        "n": 1, "logprobs": false, "top_logprobs": 0, "logit_bias": {}, "presence_penalty": 0,
        "frequency_penalty": 0.0, "repetition_penalty": 1.0, "response_format": {"type": "text"},
        "tool_choice": "auto", "user": "u", "metadata": {"a": 1}, "something_new": [1],
        "modalities": ["text"], "temperature": null, "stop": null,
    });
    let request = chat(&fields).expect("nothing changes the answer");
    assert_eq!(
        request.sampling,
        Sampling {
            temperature: 1.0,
            top_k: None,
            top_p: 1.0,
            seed: 9,
            ..Sampling::GREEDY
        }
    );
    assert_eq!(
        (request.output_max, request.delivery),
        (None, Delivery::Whole)
    );
}

#[test]
fn options_are_taken() {
    let fields = json!({
        "temperature": 0.5, "top_k": 3, "top_p": 0.25, "seed": -1, "max_tokens": 7,
        "max_completion_tokens": 5, "stop": ["a", "b"], "stop_token_ids": [3], "ignore_eos": true,
        "stream": true, "stream_options": {"include_usage": true, "continuous_usage_stats": true},
        "cache_salt": "salt",
    });
    let request = chat(&fields).expect("valid");
    let sampling = Sampling {
        temperature: 0.5,
        top_k: Some(3),
        top_p: 0.25,
        seed: u64::MAX,
        ..Sampling::GREEDY
    };
    assert_eq!(request.sampling, sampling);
    let newer = OutputMax {
        tokens: 5,
        field: "max_completion_tokens",
    };
    assert_eq!(request.output_max, Some(newer), "the newer name wins");
    assert_eq!(request.stops, ["a", "b"]);
    assert_eq!(
        (request.stop_token_ids, request.ignore_eos),
        (vec![3], true)
    );
    assert_eq!(request.delivery, Delivery::Stream(UsageChunks::Every));
    assert_eq!(request.cache_salt.as_deref(), Some("salt"));
}

#[test]
fn completion_prompts() {
    let parse_prompt = |prompt: Value, caller| {
        let body = json!({"model": "m", "prompt": prompt}).to_string();
        parse(body.as_bytes(), Dialect::Completions, &rules(caller))
    };
    let text = Source::Text("hi".into());
    let default = OutputMax {
        tokens: 16,
        field: "max_tokens",
    };
    for prompt in [json!("hi"), json!(["hi"])] {
        let request = parse_prompt(prompt, Caller::Anonymous).expect("valid");
        assert_eq!(
            (request.source, request.output_max),
            (text.clone(), Some(default))
        );
    }
    let tokens = parse_prompt(json!([1, 2]), Caller::TokenHolder).expect("valid");
    assert_eq!(tokens.source, Source::Tokens(vec![1, 2]));
    let rows = [
        (json!([1, 2]), "node_token_required", "prompt"),
        (json!(["a", "b"]), "unsupported_parameter", "prompt"),
        (json!([1, "b"]), "invalid_type", "prompt[1]"),
        (json!(5), "invalid_type", "prompt"),
        (json!(null), "missing_required_parameter", "prompt"),
    ];
    for (prompt, code, param) in rows {
        let error = parse_prompt(prompt, Caller::Anonymous).expect_err("refused");
        assert_eq!((error.code, error.param.as_deref()), (code, Some(param)));
    }
    let empty = parse_prompt(json!([]), Caller::TokenHolder).expect_err("refused");
    assert_eq!(
        (empty.code, empty.param.as_deref()),
        ("invalid_value", Some("prompt"))
    );
}
