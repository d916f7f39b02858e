//! Catches tools, choices and configurations that contradict themselves or each other, and are
//! accepted or refused in other words than the API's own.

use serde_json::{Value, json};

use super::malformed::{check, user};

#[expect(clippy::too_many_lines, reason = "a table of one row each")]
#[test]
fn tools_have_their_form_and_choices_name_them() {
    let tool = json!({"name": "f", "input_schema": {"type": "object"}});
    let tools = |tool: Value| json!({"tools": [tool]});
    let choose = |choice: Value| json!({"tools": [tool, {"type": "web_search_20250305", "name": "web_search"}], "tool_choice": choice});
    let pattern = "tools.0.custom.name: String should match pattern '^[a-zA-Z0-9_-]{1,128}$'";
    check(&[
        (json!({"tools": {}}), "tools: Input should be a valid list"),
        (
            tools(json!(1)),
            "tools.0: Input should be a valid dictionary",
        ),
        (
            tools(json!({"input_schema": {}})),
            "tools.0.custom.name: Field required",
        ),
        (
            tools(json!({"name": "a b", "input_schema": {"type": "object"}})),
            pattern,
        ),
        (
            tools(json!({"name": "", "input_schema": {"type": "object"}})),
            pattern,
        ),
        (
            tools(json!({"name": "x".repeat(129), "input_schema": {"type": "object"}})),
            pattern,
        ),
        (
            tools(json!({"name": "f"})),
            "tools.0.custom.input_schema: Field required",
        ),
        (
            tools(json!({"name": "f", "input_schema": "{}"})),
            "tools.0.custom.input_schema: Input should be a valid dictionary",
        ),
        (
            tools(json!({"name": "f", "input_schema": {}})),
            "tools.0.custom.input_schema.type: Field required",
        ),
        (
            tools(json!({"name": "f", "input_schema": {"type": "array"}})),
            "tools.0.custom.input_schema.type: Input should be 'object'",
        ),
        (
            tools(json!({"name": "f", "description": 5, "input_schema": {"type": "object"}})),
            "tools.0.custom.description: Input should be a valid string",
        ),
        (
            tools(json!({"type": "my_tool_2025", "name": "f"})),
            "tools.0: Input tag 'my_tool_2025' found using 'type' does not match any of the \
             expected tags: 'custom'",
        ),
        (
            tools(json!({"type": "function", "name": "f"})),
            "tools.0: Input tag 'function' found using 'type' does not match any of the expected \
             tags: 'custom'",
        ),
        (
            json!({"tools": [tool, tool]}),
            "tools: Tool names must be unique. Found twice: f",
        ),
        (
            choose(json!("auto")),
            "tool_choice: Input should be a valid dictionary",
        ),
        (choose(json!({})), "tool_choice.type: Field required"),
        (
            choose(json!({"type": "required"})),
            "tool_choice: Input tag 'required' found using 'type' does not match any of the \
             expected tags: 'auto', 'any', 'none', 'tool'",
        ),
        (
            choose(json!({"type": "tool"})),
            "tool_choice.tool.name: Field required",
        ),
        (
            choose(json!({"type": "tool", "name": "g"})),
            "tool_choice.tool.name: Tool 'g' not found in provided tools",
        ),
        (
            choose(json!({"type": "tool", "name": "web_search"})),
            "tool_choice.tool.name: Tool 'web_search' cannot be called on this server; it serves \
             tools with an `input_schema`.",
        ),
        (
            choose(json!({"type": "any", "disable_parallel_tool_use": 1})),
            "tool_choice.any.disable_parallel_tool_use: Input should be a valid boolean",
        ),
        (
            json!({"tool_choice": {"type": "any"}}),
            "tool_choice: `tool_choice` may only be specified while providing `tools`.",
        ),
        (
            json!({"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "any"}}),
            "tool_choice: None of the `tools` can be called on this server; it serves tools with \
             an `input_schema`.",
        ),
    ]);
}

#[test]
fn configurations_do_not_contradict_themselves() {
    let mark = |ttl: &str| json!({"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": ttl}});
    let thinking = json!({"type": "enabled", "budget_tokens": 2048});
    let tools = json!([{"name": "f", "input_schema": {"type": "object"}}]);
    check(&[
        (json!({"thinking": {}}), "thinking.type: Field required"),
        (
            json!({"thinking": {"type": "on"}}),
            "thinking: Input tag 'on' found using 'type' does not match any of the expected tags: \
             'enabled', 'disabled', 'adaptive', 'between_tools'",
        ),
        (
            json!({"thinking": {"type": "enabled"}}),
            "thinking.enabled.budget_tokens: Field required",
        ),
        (
            json!({"thinking": {"type": "enabled", "budget_tokens": 1023}}),
            "thinking.enabled.budget_tokens: Input should be greater than or equal to 1024",
        ),
        (
            json!({"thinking": thinking, "max_tokens": 2048}),
            "`max_tokens` must be greater than `thinking.budget_tokens`.",
        ),
        (
            json!({"thinking": thinking, "temperature": 0.5}),
            "`temperature` may only be set to 1 when thinking is enabled.",
        ),
        (
            json!({"thinking": thinking, "tools": tools, "tool_choice": {"type": "any"}}),
            "Thinking may not be enabled when tool_choice forces tool use.",
        ),
        (
            json!({"output_config": {"effort": "most"}}),
            "output_config.effort: Input should be 'low', 'medium', 'high', 'xhigh' or 'max'",
        ),
        (
            json!({"output_config": {"format": {"type": "json"}}}),
            "output_config.format: Input tag 'json' found using 'type' does not match any of the \
             expected tags: 'json_schema'",
        ),
        (
            json!({"output_config": {"format": {"type": "json_schema"}}}),
            "output_config.format.schema: Field required",
        ),
        (
            user(json!([{"type": "text", "text": "x", "cache_control": {"type": "forever"}}])),
            "messages.0.content.0.text.cache_control: Input tag 'forever' found using 'type' does \
             not match any of the expected tags: 'ephemeral'",
        ),
        (
            user(json!([mark("2h")])),
            "messages.0.content.0.text.cache_control.ephemeral.ttl: Input should be '5m' or '1h'",
        ),
        (
            user(json!([{"type": "text", "text": "", "cache_control": {"type": "ephemeral"}}])),
            "messages.0.content.0.text: cache_control cannot be set for empty text blocks",
        ),
        (
            user(json!([mark("5m"), mark("1h")])),
            "messages.0.content.1.text.cache_control: a ttl='1h' cache_control block must not \
             come after a ttl='5m' cache_control block. Note that blocks are processed in the \
             following order: `tools`, `system`, `messages`.",
        ),
        (
            json!({"system": [mark("1h"), mark("1h")], "cache_control": {"type": "ephemeral"},
                "messages": [{"role": "user", "content": [mark("5m"), mark("5m")]}]}),
            "A maximum of 4 blocks with cache_control may be provided. Found 5.",
        ),
    ]);
}
