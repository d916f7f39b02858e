//! Catches a malformed request that reaches a node, and a refusal in other words than the API's:
//! clients search for its codes and parameters.

use serde_json::{Value, json};

use dialects::error::{ApiError, Shape};

use crate::support::ask_after;

fn refusal(body: &str) -> ApiError {
    let refused = ask_after(Vec::new(), body).err();
    refused.expect("a refusal")
}

/// A sound request but for one field.
fn with(field: &str, value: &Value) -> String {
    let mut body = json!({
        "model": "m", "input": "x",
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}, {"type": "web_search"}],
    });
    body[field] = value.clone();
    body.to_string()
}

fn check(body: &str, param: &str, code: Option<&str>, message: &str) {
    let error = refusal(body);
    let shown: String = body.chars().take(200).collect();
    assert_eq!(error.kind.status(), 400, "{shown}: {error}");
    assert_eq!(error.param.as_deref(), Some(param), "{shown}: {error}");
    assert_eq!(error.kind.code(), code, "{shown}: {error}");
    assert!(
        error.message.contains(message),
        "{shown}: {} lacks {message}",
        error.message
    );
    let told: Value = serde_json::from_str(&error.body(Shape::OpenAi)).expect("JSON");
    assert_eq!(told["error"]["type"], "invalid_request_error");
}

type Row = (
    &'static str,
    Value,
    &'static str,
    Option<&'static str>,
    &'static str,
);

fn table(rows: Vec<Row>) {
    for (field, value, param, code, message) in rows {
        check(&with(field, &value), param, code, message);
    }
}

const TYPE: Option<&str> = Some("invalid_type");
const VALUE: Option<&str> = Some("invalid_value");
const MISSING: Option<&str> = Some("missing_required_parameter");

#[test]
fn plain_fields() {
    table(vec![
        (
            "model",
            json!(null),
            "model",
            MISSING,
            "Missing required parameter: 'model'.",
        ),
        (
            "model",
            json!(7),
            "model",
            TYPE,
            "Invalid type for 'model': expected a string, but got an integer instead.",
        ),
        (
            "model",
            json!(""),
            "model",
            Some("empty_string"),
            "empty string",
        ),
        (
            "input",
            json!(7),
            "input",
            TYPE,
            "expected one of an array of input items or string",
        ),
        ("input", json!(null), "input", MISSING, "must be provided"),
        ("input", json!([]), "input", MISSING, "must be provided"),
        (
            "instructions",
            json!(["x"]),
            "instructions",
            TYPE,
            "expected a string, but got an array",
        ),
        (
            "temperature",
            json!("hot"),
            "temperature",
            TYPE,
            "expected a decimal, but got a string",
        ),
        (
            "temperature",
            json!(2.5),
            "temperature",
            Some("decimal_above_max_value"),
            "Invalid 'temperature': decimal above maximum value. Expected a value <= 2, but got 2.5 instead.",
        ),
        (
            "top_p",
            json!(-0.1),
            "top_p",
            Some("decimal_below_min_value"),
            "Expected a value >= 0",
        ),
        (
            "max_output_tokens",
            json!(0),
            "max_output_tokens",
            Some("integer_below_min_value"),
            "Expected a value >= 1",
        ),
        (
            "max_output_tokens",
            json!(1.5),
            "max_output_tokens",
            TYPE,
            "expected an integer, but got a decimal",
        ),
        (
            "top_logprobs",
            json!(21),
            "top_logprobs",
            Some("integer_above_max_value"),
            "<= 20",
        ),
        ("stream", json!("yes"), "stream", TYPE, "expected a boolean"),
        ("store", json!(1), "store", TYPE, "expected a boolean"),
        (
            "parallel_tool_calls",
            json!("no"),
            "parallel_tool_calls",
            TYPE,
            "expected a boolean",
        ),
        (
            "stream_options",
            json!({}),
            "stream_options",
            VALUE,
            "only allowed when 'stream' is enabled",
        ),
        ("include", json!("x"), "include", TYPE, "expected an array"),
        (
            "include",
            json!([1]),
            "include[0]",
            TYPE,
            "expected a string",
        ),
        (
            "include",
            json!(["everything"]),
            "include[0]",
            VALUE,
            "Invalid value: 'everything'. Supported values are: ",
        ),
        (
            "truncation",
            json!("middle"),
            "truncation",
            VALUE,
            "Supported values are: 'auto' and 'disabled'.",
        ),
        (
            "service_tier",
            json!("gold"),
            "service_tier",
            VALUE,
            "'gold'",
        ),
        (
            "background",
            json!(true),
            "background",
            Some("unsupported_parameter"),
            "not supported here",
        ),
        (
            "prompt",
            json!({"id": "pmpt_1"}),
            "prompt",
            Some("unsupported_parameter"),
            "not stored here",
        ),
        (
            "reasoning",
            json!("high"),
            "reasoning",
            TYPE,
            "expected an object",
        ),
        (
            "reasoning",
            json!({"effort": "huge"}),
            "reasoning.effort",
            VALUE,
            "'none', 'minimal', 'low', 'medium', 'high', 'xhigh', and 'max'",
        ),
        (
            "reasoning",
            json!({"summary": true}),
            "reasoning.summary",
            TYPE,
            "expected a string",
        ),
        ("user", json!(1), "user", TYPE, "expected a string"),
        (
            "prompt_cache_retention",
            json!("1h"),
            "prompt_cache_retention",
            VALUE,
            "1h",
        ),
        (
            "client_metadata",
            json!([]),
            "client_metadata",
            TYPE,
            "expected an object",
        ),
        (
            "chat_template_kwargs",
            json!(1),
            "chat_template_kwargs",
            TYPE,
            "expected an object",
        ),
    ]);
}

#[test]
fn metadata_and_earlier_turns() {
    let many: Value = (0..17)
        .map(|at| (at.to_string(), json!("v")))
        .collect::<serde_json::Map<_, _>>()
        .into();
    table(vec![
        (
            "metadata",
            many,
            "metadata",
            Some("object_above_max_properties"),
            "Expected an object with at most 16 properties, but got an object with 17 properties instead.",
        ),
        (
            "metadata",
            json!({"a": 1}),
            "metadata.a",
            TYPE,
            "expected a string, but got an integer",
        ),
        (
            "metadata",
            json!({"a": "x".repeat(513)}),
            "metadata.a",
            Some("string_above_max_length"),
            "maximum length 512, but got a string with length 513",
        ),
        (
            "metadata",
            json!({"k".repeat(65): "x"}),
            "metadata",
            Some("string_above_max_length"),
            "maximum length 64",
        ),
        (
            "previous_response_id",
            json!("msg_1"),
            "previous_response_id",
            VALUE,
            "Expected an ID that begins with 'resp'.",
        ),
        (
            "previous_response_id",
            json!("resp_ü"),
            "previous_response_id",
            VALUE,
            "Expected an ID that contains letters, numbers, underscores, or dashes",
        ),
        (
            "conversation",
            json!(7),
            "conversation",
            TYPE,
            "expected one of",
        ),
        (
            "conversation",
            json!({}),
            "conversation.id",
            MISSING,
            "'conversation.id'",
        ),
        (
            "conversation",
            json!("resp_1"),
            "conversation",
            VALUE,
            "begins with 'conv'",
        ),
    ]);
    check(
        r#"{"model":"m","input":"x","previous_response_id":"resp_1","conversation":"conv_1"}"#,
        "previous_response_id",
        Some("mutually_exclusive_parameters"),
        "Mutually exclusive parameters",
    );
    check("{}", "model", MISSING, "'model'");
    check(r#"{"model":"m"}"#, "input", MISSING, "must be provided");
    let error = dialects::responses::previous_response_not_found("resp_9");
    assert_eq!(
        error.message,
        "Previous response with id 'resp_9' not found."
    );
    assert_eq!(
        (error.kind.status(), error.kind.code()),
        (400, Some("previous_response_not_found"))
    );
    let error = dialects::responses::response_not_found("resp_9");
    assert_eq!((error.kind.status(), error.kind.code()), (404, None));
}

#[test]
fn items_of_the_input() {
    let item = |item: Value| json!([{"role": "user", "content": "x"}, item]);
    table(vec![
        (
            "input",
            json!([1]),
            "input[0]",
            TYPE,
            "expected an object, but got an integer",
        ),
        (
            "input",
            item(json!({})),
            "input[1].type",
            MISSING,
            "'input[1].type'",
        ),
        (
            "input",
            item(json!({"type": "dance"})),
            "input[1].type",
            VALUE,
            "Invalid value: 'dance'.",
        ),
        (
            "input",
            item(json!({"type": "message", "content": "x"})),
            "input[1].role",
            MISSING,
            "role",
        ),
        (
            "input",
            item(json!({"role": "tool", "content": "x"})),
            "input[1].role",
            VALUE,
            "Supported values are: 'assistant', 'system', 'developer', and 'user'.",
        ),
        (
            "input",
            item(json!({"role": "user"})),
            "input[1].content",
            MISSING,
            "content",
        ),
        (
            "input",
            item(json!({"role": "user", "content": 5})),
            "input[1].content",
            TYPE,
            "array of objects or string",
        ),
        (
            "input",
            item(json!({"role": "user", "content": ["x"]})),
            "input[1].content[0]",
            TYPE,
            "an object",
        ),
        (
            "input",
            item(json!({"role": "user", "content": [{"text": "x"}]})),
            "input[1].content[0].type",
            MISSING,
            "type",
        ),
        (
            "input",
            item(json!({"role": "user", "content": [{"type": "video"}]})),
            "input[1].content[0].type",
            VALUE,
            "'video'",
        ),
        (
            "input",
            item(json!({"role": "user", "content": [{"type": "input_text"}]})),
            "input[1].content[0].text",
            MISSING,
            "text",
        ),
        (
            "input",
            item(
                json!({"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,%%%"}]}),
            ),
            "input[1].content[0].type",
            VALUE,
            "does not support image inputs",
        ),
        (
            "input",
            item(json!({"role": "user", "content": [{"type": "input_file", "file_data": "!"}]})),
            "input[1].content[0].type",
            VALUE,
            "does not support file inputs",
        ),
        (
            "input",
            item(json!({"role": "user", "content": "x", "id": 5})),
            "input[1].id",
            TYPE,
            "a string",
        ),
        (
            "input",
            item(json!({"type": "reasoning", "summary": "x"})),
            "input[1].summary",
            TYPE,
            "an array",
        ),
        (
            "input",
            item(json!({"type": "function_call", "name": "f", "arguments": "{}"})),
            "input[1].call_id",
            MISSING,
            "call_id",
        ),
        (
            "input",
            item(json!({"type": "function_call", "call_id": "c", "arguments": "{}"})),
            "input[1].name",
            MISSING,
            "name",
        ),
        (
            "input",
            item(json!({"type": "function_call", "call_id": "c", "name": "f", "arguments": {}})),
            "input[1].arguments",
            TYPE,
            "expected a string, but got an object",
        ),
        (
            "input",
            item(json!({"type": "function_call", "call_id": "", "name": "f", "arguments": ""})),
            "input[1].call_id",
            Some("empty_string"),
            "empty string",
        ),
        (
            "input",
            item(json!({"type": "function_call_output", "output": "x"})),
            "input[1].call_id",
            MISSING,
            "call_id",
        ),
        (
            "input",
            item(json!({"type": "function_call_output", "call_id": "c"})),
            "input[1].output",
            MISSING,
            "output",
        ),
        (
            "input",
            item(json!({"type": "function_call_output", "call_id": "c", "output": 1})),
            "input[1].output",
            TYPE,
            "string",
        ),
        (
            "input",
            item(json!({"type": "function_call_output", "call_id": "c9", "output": "x"})),
            "input",
            None,
            "No tool call found for function call output with call_id c9.",
        ),
        (
            "input",
            item(json!({"type": "function_call", "call_id": "c9", "name": "f", "arguments": "{}"})),
            "input",
            None,
            "No tool output found for function call c9.",
        ),
        (
            "input",
            json!([{"role": "user", "content": "x".repeat((10 << 20) + 1)}]),
            "input[0].content",
            Some("string_above_max_length"),
            "maximum length 10485760",
        ),
    ]);
}

#[test]
fn tools_and_formats() {
    let tool = |tool: Value| json!([tool]);
    let many: Value = (0..10_000)
        .map(|at| json!({"type": "function", "name": format!("f{at}")}))
        .collect();
    let format = |format: Value| json!({"format": format});
    table(vec![
        ("tools", json!({}), "tools", TYPE, "expected an array"),
        ("tools", tool(json!(1)), "tools[0]", TYPE, "an object"),
        ("tools", tool(json!({})), "tools[0].type", MISSING, "type"),
        (
            "tools",
            tool(json!({"type": "function", "function": {"name": "f"}})),
            "tools[0].name",
            MISSING,
            "'tools[0].name'",
        ),
        (
            "tools",
            tool(json!({"type": "function", "name": ""})),
            "tools[0].name",
            Some("empty_string"),
            "empty",
        ),
        (
            "tools",
            tool(json!({"type": "function", "name": "f", "parameters": []})),
            "tools[0].parameters",
            TYPE,
            "an object",
        ),
        (
            "tools",
            tool(json!({"type": "function", "name": "f", "strict": "x"})),
            "tools[0].strict",
            TYPE,
            "a boolean",
        ),
        (
            "tools",
            tool(
                json!({"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "abnf"}}),
            ),
            "tools[0].format.syntax",
            VALUE,
            "'lark' and 'regex'",
        ),
        (
            "tools",
            json!([{"type": "function", "name": "f"}, {"type": "custom", "name": "f"}]),
            "tools[1].name",
            VALUE,
            "used twice",
        ),
        (
            "tools",
            many,
            "tools",
            Some("array_above_max_length"),
            "maximum length 1024, but got an array with length 10000",
        ),
        (
            "tool_choice",
            json!("maybe"),
            "tool_choice",
            VALUE,
            "'none', 'auto', and 'required'",
        ),
        (
            "tool_choice",
            json!(1),
            "tool_choice",
            TYPE,
            "tool choice mode or an object",
        ),
        (
            "tool_choice",
            json!({"type": "function"}),
            "tool_choice.name",
            MISSING,
            "name",
        ),
        (
            "tool_choice",
            json!({"type": "function", "name": "g"}),
            "tool_choice",
            VALUE,
            "Tool choice 'g' not found in 'tools' parameter.",
        ),
        (
            "tool_choice",
            json!({"type": "web_search"}),
            "tool_choice",
            VALUE,
            "cannot be served",
        ),
        (
            "tool_choice",
            json!({"type": "file_search"}),
            "tool_choice",
            VALUE,
            "Tool choice 'file_search' not found",
        ),
        (
            "tool_choice",
            json!({"type": "allowed_tools", "mode": "auto"}),
            "tool_choice.tools",
            MISSING,
            "tools",
        ),
        (
            "tool_choice",
            json!({"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]}),
            "tool_choice",
            VALUE,
            "allows no tool",
        ),
        ("text", json!("x"), "text", TYPE, "an object"),
        (
            "text",
            json!({"verbosity": "loud"}),
            "text.verbosity",
            VALUE,
            "'loud'",
        ),
        (
            "text",
            format(json!({})),
            "text.format.type",
            MISSING,
            "type",
        ),
        (
            "text",
            format(json!({"type": "xml"})),
            "text.format.type",
            VALUE,
            "'xml'",
        ),
        (
            "text",
            format(json!({"type": "json_schema", "schema": {}})),
            "text.format.name",
            MISSING,
            "name",
        ),
        (
            "text",
            format(json!({"type": "json_schema", "name": "n"})),
            "text.format.schema",
            MISSING,
            "schema",
        ),
        (
            "text",
            format(json!({"type": "json_schema", "name": "a b", "schema": {}})),
            "text.format.name",
            VALUE,
            "'^[a-zA-Z0-9_-]+$'",
        ),
        (
            "text",
            format(json!({"type": "json_schema", "name": "n", "schema": {}, "strict": "x"})),
            "text.format.strict",
            TYPE,
            "a boolean",
        ),
    ]);
    check(
        r#"{"model":"m","input":"x","tools":[{"type":"web_search"}],"tool_choice":"required"}"#,
        "tool_choice",
        VALUE,
        "must be specified with",
    );
}

#[test]
fn what_only_looks_like_json() {
    let deep = "[".repeat(5000) + &"]".repeat(5000);
    for (field, json) in [
        ("input", r#""\ud800""#),
        ("input", r#"[{"role":"user","content":"\udc00x"}]"#),
        ("input", &deep),
        ("tools", &deep),
        ("metadata", &format!("{{\"a\":{deep}}}")),
        ("text", &deep),
    ] {
        let mut body = format!(r#"{{"model":"m","{field}":{json}"#);
        if field != "input" {
            body += r#","input":"x""#;
        }
        check(&(body + "}"), field, VALUE, "cannot be read");
    }
}

#[test]
fn large_but_sound_requests_are_taken() {
    let schema = json!({"$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"});
    let tools: Value = (0..1024)
        .map(|at| json!({"type": "function", "name": format!("f{at}"), "parameters": schema}))
        .collect();
    let body = json!({"model": "m", "input": [{"role": "user", "content": "x".repeat(5 << 20)}], "tools": tools});
    assert!(ask_after(Vec::new(), &body.to_string()).is_ok());
}
