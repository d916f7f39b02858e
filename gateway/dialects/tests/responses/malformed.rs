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

fn check(body: &str, param: &str, code: &str, message: &str) {
    let error = refusal(body);
    let shown: String = body.chars().take(200).collect();
    assert_eq!(error.kind.status(), 400, "{shown}: {error}");
    assert_eq!(error.param.as_deref(), Some(param), "{shown}: {error}");
    let told: Value = serde_json::from_str(&error.body(Shape::OpenAi)).expect("JSON");
    assert_eq!(told["error"]["type"], "invalid_request_error");
    let code = match code {
        "null" => Value::Null,
        code => code.into(),
    };
    assert_eq!(told["error"]["code"], code, "{shown}: {error}");
    assert!(
        error.message.contains(message),
        "{shown}: {} lacks {message}",
        error.message
    );
}

/// Rows of: field, its value, the parameter and the code of the refusal, a part of its text.
fn table(rows: &str) {
    for row in rows.lines().filter(|row| !row.trim().is_empty()) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let [field, value, param, code, message] = cells.as_slice() else {
            unreachable!("five cells: {row}");
        };
        let value = serde_json::from_str(value).expect(row);
        check(&with(field, &value), param, code, message);
    }
}

#[test]
fn plain_fields() {
    table(
        r#"
model | null | model | missing_required_parameter | Missing required parameter: 'model'.
model | 7 | model | invalid_type | Invalid type for 'model': expected a string, but got an integer instead.
model | "" | model | empty_string | Expected a string with minimum length 1
input | 7 | input | invalid_type | expected one of an array of input items or string
input | null | input | missing_required_parameter | must be provided
input | [] | input | missing_required_parameter | must be provided
instructions | ["x"] | instructions | invalid_type | expected a string, but got an array
temperature | "hot" | temperature | invalid_type | expected a decimal, but got a string
temperature | 2.5 | temperature | decimal_above_max_value | Invalid 'temperature': decimal above maximum value. Expected a value <= 2, but got 2.5 instead.
top_p | -0.1 | top_p | decimal_below_min_value | Expected a value >= 0
max_output_tokens | 0 | max_output_tokens | integer_below_min_value | Expected a value >= 1
max_output_tokens | 1.5 | max_output_tokens | invalid_type | expected an integer, but got a decimal
max_tool_calls | -1 | max_tool_calls | integer_below_min_value | Expected a value >= 1
top_logprobs | 21 | top_logprobs | integer_above_max_value | <= 20
stream | "yes" | stream | invalid_type | expected a boolean
store | 1 | store | invalid_type | expected a boolean
parallel_tool_calls | "no" | parallel_tool_calls | invalid_type | expected a boolean
stream_options | {} | stream_options | invalid_value | only allowed when 'stream' is enabled
include | "x" | include | invalid_type | expected an array
include | [1] | include[0] | invalid_type | expected a string
include | ["everything"] | include[0] | invalid_value | Invalid value: 'everything'. Supported values are:
truncation | "middle" | truncation | invalid_value | Supported values are: 'auto' and 'disabled'.
service_tier | "gold" | service_tier | invalid_value | 'gold'
background | true | background | unsupported_parameter | not supported here
prompt | {"id": "pmpt_1"} | prompt | unsupported_parameter | not stored here
reasoning | "high" | reasoning | invalid_type | expected an object
reasoning | {"effort": "huge"} | reasoning.effort | invalid_value | 'none', 'minimal', 'low', 'medium', 'high', 'xhigh', and 'max'
reasoning | {"summary": true} | reasoning.summary | invalid_type | expected a string
user | 1 | user | invalid_type | expected a string
prompt_cache_retention | "1h" | prompt_cache_retention | invalid_value | 1h
client_metadata | [] | client_metadata | invalid_type | expected an object
chat_template_kwargs | 1 | chat_template_kwargs | invalid_type | expected an object
"#,
    );
}

#[test]
fn metadata_and_earlier_turns() {
    table(
        r#"
metadata | {"a": 1} | metadata.a | invalid_type | expected a string, but got an integer
previous_response_id | "msg_1" | previous_response_id | invalid_value | Expected an ID that begins with 'resp'.
previous_response_id | "resp_ü" | previous_response_id | invalid_value | Expected an ID that contains letters, numbers, underscores, or dashes
conversation | 7 | conversation | invalid_type | expected one of
conversation | {} | conversation.id | missing_required_parameter | 'conversation.id'
conversation | "resp_1" | conversation | invalid_value | begins with 'conv'
"#,
    );
    let many: Value = (0..17)
        .map(|at| (at.to_string(), json!("v")))
        .collect::<serde_json::Map<_, _>>()
        .into();
    let long = "string_above_max_length";
    for (value, param, code, message) in [
        (
            many,
            "metadata",
            "object_above_max_properties",
            "Expected an object with at most 16 properties, but got an object with 17 properties instead.",
        ),
        (
            json!({"a": "x".repeat(513)}),
            "metadata.a",
            long,
            "maximum length 512, but got a string with length 513",
        ),
        (
            json!({"k".repeat(65): "x"}),
            "metadata",
            long,
            "maximum length 64",
        ),
    ] {
        check(&with("metadata", &value), param, code, message);
    }
    check(
        r#"{"model":"m","input":"x","previous_response_id":"resp_1","conversation":"conv_1"}"#,
        "previous_response_id",
        "mutually_exclusive_parameters",
        "Mutually exclusive parameters",
    );
    check("{}", "model", "missing_required_parameter", "'model'");
    let error = dialects::responses::previous_response_not_found("resp_9");
    assert_eq!(
        error.message,
        "Previous response with id 'resp_9' not found."
    );
    let code = Some("previous_response_not_found");
    assert_eq!((error.kind.status(), error.kind.code()), (400, code));
    let error = dialects::responses::response_not_found("resp_9");
    assert_eq!((error.kind.status(), error.kind.code()), (404, None));
}

#[test]
fn items_of_the_input() {
    table(
        r#"
input | [1] | input[0] | invalid_type | expected an object, but got an integer
input | ["x", {}] | input[0] | invalid_type | expected an object, but got a string
input | [{}] | input[0].type | missing_required_parameter | 'input[0].type'
input | [{"type": "dance"}] | input[0].type | invalid_value | Invalid value: 'dance'.
input | [{"type": "message", "content": "x"}] | input[0].role | missing_required_parameter | role
input | [{"role": "tool", "content": "x"}] | input[0].role | invalid_value | Supported values are: 'assistant', 'system', 'developer', and 'user'.
input | [{"role": "user"}] | input[0].content | missing_required_parameter | content
input | [{"role": "user", "content": 5}] | input[0].content | invalid_type | array of objects or string
input | [{"role": "user", "content": ["x"]}] | input[0].content[0] | invalid_type | an object
input | [{"role": "user", "content": [{"text": "x"}]}] | input[0].content[0].type | missing_required_parameter | type
input | [{"role": "user", "content": [{"type": "video"}]}] | input[0].content[0].type | invalid_value | 'video'
input | [{"role": "user", "content": [{"type": "input_text"}]}] | input[0].content[0].text | missing_required_parameter | text
input | [{"role": "user", "content": [{"type": "input_text", "text": 1}]}] | input[0].content[0].text | invalid_type | a string
input | [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,%%%"}]}] | input[0].content[0].type | invalid_value | does not support image inputs
input | [{"role": "user", "content": [{"type": "input_file", "file_data": "!"}]}] | input[0].content[0].type | invalid_value | does not support file inputs
input | [{"role": "user", "content": "x", "id": 5}] | input[0].id | invalid_type | a string
input | [{"role": "user", "content": "x"}, {"type": "reasoning", "summary": "x"}] | input[1].summary | invalid_type | an array
input | [{"type": "function_call", "name": "f", "arguments": "{}"}] | input[0].call_id | missing_required_parameter | call_id
input | [{"type": "function_call", "call_id": "c", "arguments": "{}"}] | input[0].name | missing_required_parameter | name
input | [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}] | input[0].arguments | invalid_type | expected a string, but got an object
input | [{"type": "function_call", "call_id": "", "name": "f", "arguments": ""}] | input[0].call_id | empty_string | empty string
input | [{"type": "custom_tool_call", "call_id": "c", "name": "f"}] | input[0].input | missing_required_parameter | input
input | [{"type": "local_shell_call", "call_id": "c", "action": "ls"}] | input[0].action | invalid_type | an object
input | [{"type": "function_call_output", "output": "x"}] | input[0].call_id | missing_required_parameter | call_id
input | [{"type": "function_call_output", "call_id": "c"}] | input[0].output | missing_required_parameter | output
input | [{"type": "function_call_output", "call_id": "c", "output": 1}] | input[0].output | invalid_type | string
input | [{"type": "function_call_output", "call_id": "c9", "output": "x"}] | input | null | No tool call found for function call output with call_id c9.
input | [{"type": "function_call", "call_id": "c9", "name": "f", "arguments": "{}"}] | input | null | No tool output found for function call c9.
input | [{"type": "web_search_call", "id": "ws_1"}] | input | missing_required_parameter | must be provided
"#,
    );
    let long = json!([{"role": "user", "content": "x".repeat((10 << 20) + 1)}]);
    check(
        &with("input", &long),
        "input[0].content",
        "string_above_max_length",
        "maximum length 10485760",
    );
}

#[test]
fn tools_and_formats() {
    table(
        r#"
tools | {} | tools | invalid_type | expected an array
tools | [1] | tools[0] | invalid_type | an object
tools | [{}] | tools[0].type | missing_required_parameter | type
tools | [{"type": "function", "function": {"name": "f"}}] | tools[0].name | missing_required_parameter | 'tools[0].name'
tools | [{"type": "function", "name": ""}] | tools[0].name | empty_string | empty
tools | [{"type": "function", "name": "f", "parameters": []}] | tools[0].parameters | invalid_type | an object
tools | [{"type": "function", "name": "f", "strict": "x"}] | tools[0].strict | invalid_type | a boolean
tools | [{"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "abnf"}}] | tools[0].format.syntax | invalid_value | 'lark' and 'regex'
tools | [{"type": "function", "name": "f"}, {"type": "custom", "name": "f"}] | tools[1].name | invalid_value | used twice
tool_choice | "maybe" | tool_choice | invalid_value | 'none', 'auto', and 'required'
tool_choice | 1 | tool_choice | invalid_type | tool choice mode or an object
tool_choice | {"type": "function"} | tool_choice.name | missing_required_parameter | name
tool_choice | {"type": "function", "name": "g"} | tool_choice | invalid_value | Tool choice 'g' not found in 'tools' parameter.
tool_choice | {"type": "web_search"} | tool_choice | invalid_value | cannot be served
tool_choice | {"type": "file_search"} | tool_choice | invalid_value | Tool choice 'file_search' not found
tool_choice | {"type": "allowed_tools", "mode": "auto"} | tool_choice.tools | missing_required_parameter | tools
tool_choice | {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]} | tool_choice | invalid_value | allows no tool
text | "x" | text | invalid_type | an object
text | {"verbosity": "loud"} | text.verbosity | invalid_value | 'loud'
text | {"format": {}} | text.format.type | missing_required_parameter | type
text | {"format": {"type": "xml"}} | text.format.type | invalid_value | 'xml'
text | {"format": {"type": "json_schema", "schema": {}}} | text.format.name | missing_required_parameter | name
text | {"format": {"type": "json_schema", "name": "n"}} | text.format.schema | missing_required_parameter | schema
text | {"format": {"type": "json_schema", "name": "a b", "schema": {}}} | text.format.name | invalid_value | '^[a-zA-Z0-9_-]+$'
text | {"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": "x"}} | text.format.strict | invalid_type | a boolean
"#,
    );
    let many = (0..10_000).map(|at| json!({"type": "function", "name": format!("f{at}")}));
    check(
        &with("tools", &many.collect()),
        "tools",
        "array_above_max_length",
        "maximum length 1024, but got an array with length 10000",
    );
    check(
        r#"{"model":"m","input":"x","tools":[{"type":"web_search"}],"tool_choice":"required"}"#,
        "tool_choice",
        "invalid_value",
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
        check(&(body + "}"), field, "invalid_value", "cannot be read");
    }
}

#[test]
fn large_but_sound_requests_are_taken() {
    let cyclic = json!({"$ref": "#/$defs/n", "$defs": {
        "n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}}});
    let tool = |at| json!({"type": "function", "name": format!("f{at}"), "parameters": cyclic});
    let tools: Value = (0..1024).map(tool).collect();
    let input = json!([{"role": "user", "content": "x".repeat(5 << 20)}]);
    let body = json!({"model": "m", "input": input, "tools": tools});
    assert!(ask_after(Vec::new(), &body.to_string()).is_ok());
}
