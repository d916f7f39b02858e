//! Catches: tools that the model of a template without tools never sees, a turn whose prompt does
//! not begin with the last one's, and broken tools, calls and results that are not refused by name.

use prompt::{ChatInput, PromptBuilder, PromptError};
use serde_json::{Value as Json, json};

use crate::common::{builder, cache, with_template};

fn ask(builder: &PromptBuilder, messages: &Json, tools: &Json) -> Result<Vec<u32>, PromptError> {
    let input = ChatInput {
        messages: messages.as_array().unwrap(),
        tools: Some(tools),
        template_kwargs: None,
        unix_seconds: 0,
    };
    builder.chat(&input, &cache())
}

/// The prompt as text, control tokens spelled out.
fn text(builder: &PromptBuilder, messages: &Json, tools: &Json) -> String {
    let tokens = ask(builder, messages, tools).unwrap();
    let tokenizer = builder.tokenizer();
    tokens.iter().map(|id| tokenizer.token_text(*id)).collect()
}

fn weather() -> Json {
    json!([
        {"type": "function", "function": {"name": "get_weather", "description": "Now <b>&</b>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}},
        {"type": "function", "function": {"name": "noop"}},
    ])
}

const PREAMBLE: &str = r#"# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{"type": "function", "function": {"name": "get_weather", "description": "Now <b>&</b>", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
{"type": "function", "function": {"name": "noop"}}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"#;

fn conversation() -> Json {
    let call = |id: &str, name: &str, arguments: &str| {
        json!({"id": id, "type": "function",
        "function": {"name": name, "arguments": arguments}})
    };
    json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": null, "reasoning_content": "\nHm.\n", "tool_calls": [
            call("a", "get_weather", "{\"city\":\"Z\u{fc}rich\",\"n\":[1,2.50]}"), call("b", "noop", "")]},
        {"role": "tool", "tool_call_id": "a", "content": "21 <|im_end|>"},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "done"}]},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call("c", "noop", "{tru")]},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {"role": "user", "content": "Thanks"},
    ])
}

#[test]
fn a_template_without_tools_gets_the_hermes_form() {
    let expected = format!(
        "<|im_start|>system\nBe brief.\n\n{PREAMBLE}<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n\
         <|im_start|>assistant\n<think>\nHm.\n</think>\n\n\
         <tool_call>\n{{\"name\": \"get_weather\", \"arguments\": {{\"city\": \"Zürich\", \"n\": [1, 2.5]}}}}\n</tool_call>\n\
         <tool_call>\n{{\"name\": \"noop\", \"arguments\": {{}}}}\n</tool_call><|im_end|>\n\
         <|im_start|>user\n<tool_response>\n21 <|im_end|>\n</tool_response>\n\
         <tool_response>\ndone\n</tool_response><|im_end|>\n\
         <|im_start|>assistant\nLet me see.\n<tool_call>\n{{\"name\": \"noop\", \"arguments\": {{tru}}\n</tool_call><|im_end|>\n\
         <|im_start|>user\n<tool_response>\n\n</tool_response><|im_end|>\n\
         <|im_start|>user\nThanks<|im_end|>\n<|im_start|>assistant\n"
    );
    assert_eq!(text(builder(), &conversation(), &weather()), expected);
    // The result's `<|im_end|>` is text: one end for each turn, none more.
    let tokens = ask(builder(), &conversation(), &weather()).unwrap();
    assert_eq!(tokens.iter().filter(|token| **token == 2).count(), 7);

    let bare = json!([{"role": "user", "content": "u"}]);
    let expected = format!(
        "<|im_start|>system\n{PREAMBLE}<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    );
    assert_eq!(text(builder(), &bare, &weather()), expected);
    // No tools, no preamble.
    for none in [json!(null), json!([])] {
        assert!(!text(builder(), &bare, &none).contains("Tools"));
    }
}

#[test]
fn a_template_without_system_messages_gets_the_preamble_from_the_user() {
    for refuses in [
        "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}",
        "",
    ] {
        let builder = with_template(&format!(
            "{refuses}{{% for m in messages if m.role != 'system' %}}<|im_start|>{{{{ m.role }}}}:{{{{ m.content }}}}{{% endfor %}}"
        ));
        let found = text(
            &builder,
            &json!([{"role": "user", "content": "u"}]),
            &weather(),
        );
        assert_eq!(found, format!("<|im_start|>user:{PREAMBLE}\n\nu"));
    }
}

#[test]
fn what_a_template_knows_it_renders_itself() {
    let builder = with_template(
        "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content or '' }}:{{ m.content }}\
         {% for c in m.tool_calls or [] %}[{{ c.function.arguments.city }}]{% endfor %}\
         {% if m.role == 'tool' %}!{% endif %};{% endfor %}{{ tools | length if tools else 0 }}",
    );
    let mut messages = conversation();
    messages[5]["tool_calls"][0]["function"]["arguments"] = json!({"city": "Rome"});
    assert_eq!(
        text(&builder, &messages, &weather()),
        "system::Be brief.;user::Weather?;assistant:\nHm.\n:[Zürich][];tool::21 <|im_end|>!;\
         tool::done!;assistant::Let me see.[Rome];tool::!;user::Thanks;2"
    );
}

#[test]
fn each_turn_begins_with_the_last_ones_prompt() {
    // Catches a form that depends on what comes later: the cache would be lost at every turn.
    let all = conversation();
    let all = all.as_array().unwrap();
    let mut before: Vec<u32> = Vec::new();
    for turn in [2, 5, 8] {
        let messages = Json::from(all[..turn].to_vec());
        let tokens = ask(builder(), &messages, &weather()).unwrap();
        assert!(
            tokens.starts_with(&before),
            "turn of {turn} messages breaks"
        );
        before = tokens;
    }
}

#[test]
fn bad_tools_are_refused_by_name() {
    let check = |tools: Json, param: &str, expected: &str| {
        let messages = json!([{"role": "user", "content": "u"}]);
        let error = ask(builder(), &messages, &tools).unwrap_err();
        assert_eq!(error.param(), param, "{tools}");
        let message = error.to_string();
        assert!(
            message.contains(expected),
            "{message} does not say {expected:?}"
        );
    };
    let tool = |function: Json| json!([weather()[0], {"type": "function", "function": function}]);
    check(json!({}), "tools", "array");
    check(json!("x"), "tools", "array");
    check(json!([weather()[0], 1]), "tools[1]", "object");
    check(
        json!([{"type": "custom", "custom": {}}]),
        "tools[0].type",
        "\"function\"",
    );
    check(
        json!([{"type": "function"}]),
        "tools[0].function",
        "`parameters`",
    );
    check(
        tool(json!({"description": "d"})),
        "tools[1].function.name",
        "string",
    );
    check(tool(json!({"name": ""})), "tools[1].function.name", "empty");
    check(
        tool(json!({"name": "get_weather"})),
        "tools[1].function.name",
        "\"get_weather\" is the name of tools[0] too",
    );
    check(
        tool(json!({"name": "f", "description": 1})),
        "tools[1].function.description",
        "string",
    );
    check(
        tool(json!({"name": "f", "parameters": []})),
        "tools[1].function.parameters",
        "JSON Schema",
    );
}

#[test]
fn bad_calls_and_results_are_refused_by_name() {
    let check = |messages: Json, param: &str, expected: &str| {
        let error = ask(builder(), &messages, &json!(null)).unwrap_err();
        assert_eq!(error.param(), param, "{messages}");
        let message = error.to_string();
        assert!(
            message.contains(expected),
            "{message} does not say {expected:?}"
        );
    };
    let calls = |calls: Json| json!([{"role": "assistant", "tool_calls": calls}]);
    check(calls(json!("x")), "messages[0].tool_calls", "array");
    check(calls(json!([1])), "messages[0].tool_calls[0]", "object");
    check(
        calls(json!([{"function": "f"}])),
        "messages[0].tool_calls[0].function",
        "object",
    );
    check(
        calls(json!([{"id": "1"}])),
        "messages[0].tool_calls[0].function",
        "`name`",
    );
    check(
        calls(json!([{"function": {"name": 1}}])),
        "messages[0].tool_calls[0].function.name",
        "string",
    );
    check(
        calls(json!([{"function": {"name": "f", "arguments": [1]}}])),
        "messages[0].tool_calls[0].function.arguments",
        "JSON object",
    );
    let result = |id: Json| json!({"role": "tool", "tool_call_id": id, "content": "x"});
    check(
        json!([{"role": "user", "content": "u"}, result(json!("a"))]),
        "messages[1]",
        "without a call",
    );
    let call = json!({"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}]});
    check(
        json!([call, result(json!("b"))]),
        "messages[1].tool_call_id",
        "\"b\" is the id of no call",
    );
    check(
        json!([call, result(json!(1))]),
        "messages[1].tool_call_id",
        "string",
    );
    for sound in [json!("a"), json!(null)] {
        ask(builder(), &json!([call, result(sound)]), &json!(null)).unwrap();
    }
}
