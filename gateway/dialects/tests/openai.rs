//! Catches a malformed request of OpenAI's older endpoints, or of vLLM's for tokens, that is taken,
//! that is refused without its parameter's name, or that costs more than its size.

#![expect(clippy::panic, reason = "a helper fails its test with what it saw")]

use dialects::error::{ApiError, ErrorKind, Shape};
use dialects::{Delivery, Fields, PromptInput, tokens};
use serde_json::{Value, json};

/// An endpoint's reader, and a body that it takes.
struct Endpoint {
    read: fn(&[u8]) -> Result<(), ApiError>,
    valid: fn() -> Value,
}

const CHAT: Endpoint = Endpoint {
    read: |body| Fields::parse(body).and_then(dialects::chat).map(drop),
    valid: || json!({"model": "m", "messages": [{"role": "user", "content": "x"}]}),
};
const COMPLETIONS: Endpoint = Endpoint {
    read: |body| {
        Fields::parse(body)
            .and_then(dialects::completions)
            .map(drop)
    },
    valid: || json!({"model": "m", "prompt": "x"}),
};
const EMBEDDINGS: Endpoint = Endpoint {
    read: |body| Fields::parse(body).and_then(dialects::embeddings).map(drop),
    valid: || json!({"model": "m", "input": "x"}),
};
const TOKENIZE: Endpoint = Endpoint {
    read: |body| tokens::tokenize(&Fields::parse(body)?).map(drop),
    valid: || json!({"prompt": "x"}),
};
const DETOKENIZE: Endpoint = Endpoint {
    read: |body| tokens::detokenize(&Fields::parse(body)?).map(drop),
    valid: || json!({"tokens": [1]}),
};

fn check(endpoint: &Endpoint, body: &str, expected: Result<(), (ErrorKind, Option<&str>)>) {
    let shown: String = body.chars().take(200).collect();
    match ((endpoint.read)(body.as_bytes()), expected) {
        (Ok(()), Ok(())) => {}
        (Err(error), Err((kind, param))) => {
            assert_eq!(
                (error.kind, error.param.as_deref()),
                (kind, param),
                "{shown}: {error}"
            );
            assert!(error.message.len() < 500, "{shown}: {error}");
            if let Some(param) = param {
                assert!(error.message.contains(param), "{shown}: {error}");
            }
            let body: Value = serde_json::from_str(&error.body(Shape::OpenAi)).expect("JSON");
            assert_eq!(body["error"]["param"].as_str(), param, "{body}");
        }
        (found, expected) => panic!("{shown}: {found:?}, expected {expected:?}"),
    }
}

/// The endpoint's valid body with these members on top.
fn with(endpoint: &Endpoint, more: Value) -> String {
    let mut body = (endpoint.valid)();
    let (Value::Object(body_), Value::Object(more)) = (&mut body, more) else {
        panic!("objects");
    };
    for (name, value) in more {
        body_.insert(name, value);
    }
    body.to_string()
}

fn refuses(endpoint: &Endpoint, rows: &[(Value, &str)]) {
    check(endpoint, &(endpoint.valid)().to_string(), Ok(()));
    for (more, param) in rows {
        let expected = Err((ErrorKind::InvalidValue, Some(*param)));
        check(endpoint, &with(endpoint, more.clone()), expected);
    }
}

fn tool(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
}

#[test]
fn chat() {
    refuses(
        &CHAT,
        &[
            (json!({"model": 7}), "model"),
            (json!({"messages": {}}), "messages"),
            (json!({"messages": [[]]}), "messages[0]"),
            (json!({"messages": [{"role": null}]}), "messages[0].role"),
            (json!({"temperature": -0.1}), "temperature"),
            (json!({"temperature": "1"}), "temperature"),
            (json!({"top_p": 1.1}), "top_p"),
            (json!({"frequency_penalty": 2.5}), "frequency_penalty"),
            (json!({"presence_penalty": []}), "presence_penalty"),
            (json!({"n": 129}), "n"),
            (json!({"n": 1.0}), "n"),
            (json!({"seed": 1e30}), "seed"),
            (json!({"max_tokens": "9"}), "max_tokens"),
            (json!({"max_completion_tokens": 0}), "max_completion_tokens"),
            (json!({"stream": 1}), "stream"),
            (json!({"stream_options": {}}), "stream_options"),
            (
                json!({"stream": true, "stream_options": []}),
                "stream_options",
            ),
            (json!({"stop": {"a": 1}}), "stop"),
            (json!({"stop": ["a", null]}), "stop"),
            (json!({"logit_bias": [1]}), "logit_bias"),
            (json!({"logprobs": 5}), "logprobs"),
            (
                json!({"logprobs": true, "top_logprobs": 21}),
                "top_logprobs",
            ),
            (json!({"top_logprobs": 2}), "top_logprobs"),
            (
                json!({"logprobs": false, "top_logprobs": 2}),
                "top_logprobs",
            ),
            (json!({"response_format": "json"}), "response_format"),
            (json!({"structured_outputs": []}), "structured_outputs"),
            (json!({"user": 7}), "user"),
            (json!({"priority": 3_000_000_000_i64}), "priority"),
            (json!({"return_token_ids": "yes"}), "return_token_ids"),
            (json!({"parallel_tool_calls": "no"}), "parallel_tool_calls"),
            (json!({"chat_template_kwargs": []}), "chat_template_kwargs"),
        ],
    );
    let missing = |name| Err((ErrorKind::MissingParameter, Some(name)));
    check(&CHAT, r#"{"messages":[{"role":"user"}]}"#, missing("model"));
    check(&CHAT, r#"{"model":"","messages":[]}"#, missing("model"));
    check(
        &CHAT,
        r#"{"model":"m","messages":null}"#,
        missing("messages"),
    );
}

#[test]
fn tools_and_their_choice_in_chat() {
    let named = |name: Value| json!({"type": "function", "function": {"name": name}});
    refuses(
        &CHAT,
        &[
            (json!({"tools": {}}), "tools"),
            (json!({"tool_choice": 1}), "tool_choice"),
            (
                json!({"tool_choice": "always", "tools": [tool("f")]}),
                "tool_choice",
            ),
            (json!({"tool_choice": "required"}), "tool_choice"),
            (
                json!({"tool_choice": "required", "tools": []}),
                "tool_choice",
            ),
            (json!({"tool_choice": named("f".into())}), "tool_choice"),
            (
                json!({"tool_choice": named("g".into()), "tools": [tool("f")]}),
                "tool_choice.function.name",
            ),
            (
                json!({"tool_choice": named(7.into()), "tools": [tool("f")]}),
                "tool_choice.function.name",
            ),
        ],
    );
    for more in [
        json!({"tool_choice": "none"}),
        json!({"tool_choice": "auto", "logprobs": true, "top_logprobs": 2}),
        json!({"tool_choice": named("f".into()), "tools": [tool("e"), tool("f")]}),
        json!({"tool_choice": {"type": "allowed_tools"}, "tools": [tool("f")]}),
        json!({"top_logprobs": 0, "something_new": {"a": [1, null]}, "max_tokens": 5}),
        json!({"n": 128, "temperature": 2, "top_p": 0, "stop": [], "seed": -1, "user": null}),
    ] {
        check(&CHAT, &with(&CHAT, more), Ok(()));
    }
}

#[test]
fn completions() {
    refuses(
        &COMPLETIONS,
        &[
            (json!({"prompt": 7}), "prompt"),
            (json!({"prompt": []}), "prompt"),
            (json!({"prompt": [1, 2]}), "prompt"),
            (json!({"prompt": ["a", "b"]}), "prompt"),
            (json!({"prompt": [["a"]]}), "prompt"),
            (json!({"echo": 1}), "echo"),
            (json!({"logprobs": true}), "logprobs"),
            (json!({"logprobs": 21}), "logprobs"),
            (json!({"best_of": 0}), "best_of"),
            (json!({"suffix": 1}), "suffix"),
            (json!({"max_tokens": -1}), "max_tokens"),
            (
                json!({"stream_options": {"include_usage": true}}),
                "stream_options",
            ),
        ],
    );
    let missing = Err((ErrorKind::MissingParameter, Some("prompt")));
    check(&COMPLETIONS, r#"{"model":"m"}"#, missing);
    check(
        &COMPLETIONS,
        &with(&COMPLETIONS, json!({"prompt": ["a"], "max_tokens": 0})),
        Ok(()),
    );
}

#[test]
fn embeddings() {
    let many: Vec<Value> = vec!["x".into(); 2049];
    refuses(
        &EMBEDDINGS,
        &[
            (json!({"input": ""}), "input"),
            (json!({"input": 7}), "input"),
            (json!({"input": {}}), "input"),
            (json!({"input": []}), "input"),
            (json!({"input": many}), "input"),
            (json!({"input": ["a", ""]}), "input[1]"),
            (json!({"input": ["a", null]}), "input[1]"),
            (json!({"input": [1, 2]}), "input[0]"),
            (json!({"input": [[1, 2]]}), "input[0]"),
            (json!({"encoding_format": "hex"}), "encoding_format"),
            (json!({"encoding_format": 1}), "encoding_format"),
            (json!({"dimensions": 0}), "dimensions"),
            (json!({"dimensions": "8"}), "dimensions"),
            (json!({"pooling": 1}), "pooling"),
            (json!({"user": 1}), "user"),
        ],
    );
    let missing = Err((ErrorKind::MissingParameter, Some("input")));
    check(&EMBEDDINGS, r#"{"model":"m"}"#, missing);
    let body = with(
        &EMBEDDINGS,
        json!({"input": ["a\u{e9}", "b"], "encoding_format": "base64", "x": 1}),
    );
    let turn = dialects::embeddings(Fields::parse(body.as_bytes()).expect("JSON"));
    let turn = turn.map_err(|error| error.message).expect("valid");
    assert!(matches!(
        turn.prompt,
        PromptInput::Vectors { text_bytes: 4 }
    ));
    assert_eq!(turn.delivery, Delivery::Whole);
}

#[test]
fn tokens_and_texts() {
    let messages = json!([{"role": "user", "content": "x"}]);
    refuses(
        &TOKENIZE,
        &[
            (json!({"prompt": ["x"]}), "prompt"),
            (json!({"prompt": "x", "messages": messages}), "prompt"),
            (json!({"prompt": null, "messages": "x"}), "messages"),
            (
                json!({"prompt": null, "messages": messages, "add_generation_prompt": false}),
                "add_generation_prompt",
            ),
            (
                json!({"prompt": null, "messages": messages, "continue_final_message": true}),
                "continue_final_message",
            ),
            (
                json!({"prompt": null, "messages": messages, "tools": 1}),
                "tools",
            ),
            (json!({"add_special_tokens": 0}), "add_special_tokens"),
            (json!({"return_token_strs": "x"}), "return_token_strs"),
            (json!({"model": 1}), "model"),
        ],
    );
    check(
        &TOKENIZE,
        "{}",
        Err((ErrorKind::MissingParameter, Some("prompt"))),
    );
    refuses(
        &DETOKENIZE,
        &[
            (json!({"tokens": "x"}), "tokens"),
            (json!({"tokens": [-1]}), "tokens"),
            (json!({"tokens": [4_294_967_296_u64]}), "tokens"),
            (json!({"tokens": [1.5]}), "tokens"),
            (json!({"tokens": [[1]]}), "tokens"),
        ],
    );
    check(
        &DETOKENIZE,
        "{}",
        Err((ErrorKind::MissingParameter, Some("tokens"))),
    );
    let whole = with(
        &TOKENIZE,
        json!({"prompt": null, "messages": messages, "add_generation_prompt": true}),
    );
    check(&TOKENIZE, &whole, Ok(()));
}

/// Every endpoint, whatever it reads.
#[test]
fn what_is_no_json_object() {
    let deep = format!(
        r#"{{"model":{}1{}}}"#,
        "[".repeat(200_000),
        "]".repeat(200_000)
    );
    for endpoint in [&CHAT, &COMPLETIONS, &EMBEDDINGS, &TOKENIZE, &DETOKENIZE] {
        for body in [
            "",
            "null",
            "[]",
            "{",
            "{\"model\":}",
            "{}{}",
            "bm90IEpTT04=",
        ] {
            check(endpoint, body, Err((ErrorKind::InvalidJson, None)));
        }
        check(
            endpoint,
            &deep,
            Err((ErrorKind::InvalidValue, Some("model"))),
        );
        let twice = r#"{"model":"m","m\u006fdel":"n"}"#;
        check(
            endpoint,
            twice,
            Err((ErrorKind::InvalidValue, Some("model"))),
        );
    }
}

/// Lone surrogates are no text in any place that becomes some.
#[test]
fn lone_surrogates() {
    for (endpoint, body, param) in [
        (&CHAT, r#"{"model":"\ud800","messages":[]}"#, "model"),
        (
            &CHAT,
            r#"{"model":"m","messages":[{"role":"user","content":"\udc00"}]}"#,
            "messages",
        ),
        (
            &CHAT,
            r#"{"model":"m","messages":[{"role":"user"}],"tools":[{"function":{"name":"\ud83e"}}]}"#,
            "tools",
        ),
        (
            &COMPLETIONS,
            r#"{"model":"m","prompt":"\ud800\ud800"}"#,
            "prompt",
        ),
        (&EMBEDDINGS, r#"{"model":"m","input":"\ud800"}"#, "input"),
        (
            &EMBEDDINGS,
            r#"{"model":"m","input":["a","\ud800x"]}"#,
            "input[1]",
        ),
        (&TOKENIZE, r#"{"prompt":"\ud800"}"#, "prompt"),
    ] {
        check(endpoint, body, Err((ErrorKind::InvalidValue, Some(param))));
    }
}

/// Large and nested bodies are read in time with their size, and refused by name or taken.
#[test]
fn large_and_nested_bodies() {
    let five_megabytes = "word ".repeat(1 << 20);
    let content = json!({"messages": [{"role": "user", "content": five_megabytes}]});
    check(&CHAT, &with(&CHAT, content), Ok(()));
    check(
        &COMPLETIONS,
        &with(&COMPLETIONS, json!({"prompt": five_megabytes})),
        Ok(()),
    );
    check(
        &EMBEDDINGS,
        &with(&EMBEDDINGS, json!({"input": five_megabytes})),
        Ok(()),
    );
    let wrong = json!({"temperature": five_megabytes});
    let expected = Err((ErrorKind::InvalidValue, Some("temperature")));
    check(&CHAT, &with(&CHAT, wrong), expected);

    let tools: Vec<Value> = (0..10_000).map(|at| tool(&format!("f{at}"))).collect();
    let choice = json!({"type": "function", "function": {"name": "f9999"}});
    let many = json!({"tools": tools, "tool_choice": choice});
    check(&CHAT, &with(&CHAT, many), Ok(()));

    // A schema that refers to itself is the node's to refuse; reading it follows no reference.
    let cyclic = json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}});
    let mut cyclic_tool = tool("f");
    cyclic_tool["function"]["parameters"] = cyclic.clone();
    let format = json!({"type": "json_schema", "json_schema": {"name": "s", "schema": cyclic}});
    let more = json!({"tools": [cyclic_tool], "response_format": format});
    check(&CHAT, &with(&CHAT, more), Ok(()));

    let nested = |depth: usize| format!("{}1{}", "[".repeat(depth), "]".repeat(depth));
    for (depth, expected) in [
        (100, Ok(())),
        (1000, Err((ErrorKind::InvalidValue, Some("tools")))),
    ] {
        let body = format!(
            r#"{{"model":"m","messages":[{{"role":"user","content":"x"}}],"tools":[{{"x":{}}}]}}"#,
            nested(depth)
        );
        check(&CHAT, &body, expected);
    }
}
