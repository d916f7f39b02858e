//! Catches a conversation whose prompt is not the one that the same conversation has in chat, or
//! depends on how the client spelled it, and a parameter that is lost on its way to a node.

use dialects::caching::Retention;
use serde_json::{Value, json};

use super::{read, request};

fn messages(extra: &Value) -> Value {
    let body = request(extra).to_string();
    let (prompt, node) = read(body.as_bytes()).unwrap_or_else(|error| panic!("{extra}: {error}"));
    let messages = Value::from(prompt.messages);
    assert_eq!(node["messages"], messages, "{extra}");
    messages
}

#[test]
fn systems_and_users_are_text() {
    let mark = json!({"type": "ephemeral"});
    let hi = json!([{"role": "user", "content": "hi"}]);
    let said = |system: &str| json!([{"role": "system", "content": system}, hi[0]]);
    let text = |text: &str| json!({"type": "text", "text": text});
    let marked = |text: &str| json!({"type": "text", "text": text, "cache_control": mark});
    let user = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    for (extra, expected) in [
        (json!({}), hi.clone()),
        (json!({"system": null}), hi.clone()),
        (json!({"system": ""}), hi.clone()),
        (json!({"system": []}), hi.clone()),
        (json!({"system": "be"}), said("be")),
        (json!({"system": [text("be")]}), said("be")),
        (
            json!({"system": [text("be"), marked(" kind")]}),
            said("be kind"),
        ),
        (user(json!([text("hi")])), hi.clone()),
        (user(json!([text("h"), marked("i")])), hi.clone()),
        (
            json!({"system": [text("x-anthropic-billing-header: cc_version=1;"), text("be"), marked(" kind")]}),
            said("x-anthropic-billing-header: cc_version=1;be kind"),
        ),
        // The same words in the user's mouth are the user's.
        (
            user(json!([text("x-anthropic-billing-header: a=b;"), text("c")])),
            json!([{"role": "user", "content": "x-anthropic-billing-header: a=b;c"}]),
        ),
        (
            user(json!([
                {"type": "document", "title": "T", "source":
                    {"type": "text", "media_type": "text/plain", "data": "D"}},
                {"type": "search_result", "title": "S", "source": "u", "content": [text("C")]},
            ])),
            json!([{"role": "user", "content": "<document>\n<title>T</title>\nD\n</document>\
                <search_result>\n<title>S</title>\n<source>u</source>\nC\n</search_result>"}]),
        ),
    ] {
        assert_eq!(messages(&extra), expected, "{extra}");
    }
}

#[test]
fn systems_stand_where_they_are_said() {
    let user = |text: &str| json!({"role": "user", "content": text});
    let system = |text: &str| json!({"role": "system", "content": text});
    let fleeting = json!({"role": "system", "content": "now", "clear_at": "next_user_message"});
    let parts = json!({"role": "system", "content": [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "t"}}]});
    let answer = json!({"role": "assistant", "content": "b"});
    for (sent, expected) in [
        (
            json!([user("x"), system("a")]),
            json!([user("x"), system("a")]),
        ),
        (json!([user("x"), parts]), json!([user("x"), system("a")])),
        (
            json!([user("x"), {"role": "system", "output_config": {"effort": "low"}}]),
            json!([user("x")]),
        ),
        (
            json!([user("x"), fleeting]),
            json!([user("x"), system("now")]),
        ),
        (
            json!([user("x"), fleeting, answer, user("y")]),
            json!([user("x"), answer, user("y")]),
        ),
        (
            json!([user("x"), system("a"), answer, user("y"), user("z")]),
            json!([user("x"), system("a"), answer, user("y"), user("z")]),
        ),
    ] {
        assert_eq!(messages(&json!({"messages": sent})), expected, "{sent}");
    }
}

#[test]
fn turns_with_tools_are_chats() {
    let user = json!({"role": "user", "content": "x"});
    let call =
        |id: &str, input: Value| json!({"type": "tool_use", "id": id, "name": "f", "input": input});
    let chat_call = |id: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}});
    let result = |id: &str, content: Value| json!({"type": "tool_result", "tool_use_id": id, "content": content});
    let tool =
        |id: &str, content: &str| json!({"role": "tool", "tool_call_id": id, "content": content});
    let text = |text: &str| json!({"type": "text", "text": text});
    let sent = json!([
        user,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t", "signature": "aG9taW5nLXRoaW5raW5nLTE="},
            {"type": "thinking", "thinking": "theirs", "signature": "EqQBCgIYAhIM"},
            {"type": "redacted_thinking", "data": "zzz"},
            text("a"), {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}]},
        // In a row: one turn.
        {"role": "assistant", "content": [
            text("b"), call("1", json!({"z": 1, "a": [1.5, "é\n"]})), call("2", json!({}))]},
        {"role": "user", "content": [
            result("2", json!([text("two"), text("!")])),
            {"type": "tool_result", "tool_use_id": "1", "is_error": true},
            text("go "), text("on")]},
        {"role": "assistant", "content": [call("3", json!({"INVALID_JSON": "{\"a\":"}))]},
        {"role": "user", "content": [result("3", json!("three"))]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "u"}, call("4", json!({"INVALID_JSON": 1}))]},
        {"role": "user", "content": [result("4", json!([{"type": "tool_reference", "tool_name": "g"}]))]},
    ]);
    let expected = json!([
        user,
        {"role": "assistant", "content": "ab", "reasoning_content": "t", "tool_calls": [
            chat_call("1", "{\"z\":1,\"a\":[1.5,\"é\\n\"]}"), chat_call("2", "{}")]},
        tool("2", "two!"),
        tool("1", "The tool failed."),
        {"role": "user", "content": "go on"},
        {"role": "assistant", "content": null, "tool_calls": [chat_call("3", "{\"a\":")]},
        tool("3", "three"),
        {"role": "assistant", "content": null, "reasoning_content": "u",
            "tool_calls": [chat_call("4", "{\"INVALID_JSON\":1}")]},
        tool("4", "<tool_reference>g</tool_reference>"),
    ]);
    assert_eq!(messages(&json!({"messages": sent})), expected);
}

#[test]
fn tools_become_functions_and_others_stay_out() {
    let schema =
        json!({"type": "object", "properties": {"z": {"$ref": "#/properties/z"}, "a": {}}});
    let tools = json!([
        {"name": "f", "description": "d", "input_schema": schema, "strict": true,
            "cache_control": {"type": "ephemeral", "ttl": "1h"}, "defer_loading": true,
            "eager_input_streaming": null, "input_examples": [{}]},
        {"type": "custom", "name": "g-_9", "input_schema": {"type": "object"}},
        {"type": "web_search_20260318", "name": "web_search", "max_uses": 5},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "mcp_toolset", "mcp_server_name": "m"},
    ]);
    let body = request(&json!({"tools": tools, "tool_choice": {"type": "auto"}})).to_string();
    let (prompt, node) = read(body.as_bytes()).expect("sound tools");
    let expected = json!([
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema, "strict": true}},
        {"type": "function", "function": {"name": "g-_9", "parameters": {"type": "object"}}},
    ]);
    assert_eq!(
        prompt.tools.expect("tools").to_string(),
        expected.to_string()
    );
    assert_eq!(node["tools"], expected);
    assert_eq!(node.get("tool_choice"), None);
    // None that can be served: none at all.
    let only = request(&json!({"tools": [{"type": "bash_20250124", "name": "bash"}]}));
    let (prompt, node) = read(only.to_string().as_bytes()).expect("sound tools");
    assert_eq!((prompt.tools, node.get("tools")), (None, None));
}

/// One row: what is sent, what a node gets of it, and whether `stream` etc. stay as they are.
#[expect(clippy::too_many_lines, reason = "a table of one row each")]
#[test]
fn parameters_reach_the_node() {
    let tools = json!([{"name": "f", "input_schema": {"type": "object"}}]);
    let schema = json!({"type": "object", "properties": {}});
    let format = json!({"type": "json_schema", "json_schema":
        {"name": "output", "schema": schema, "strict": true}});
    for (extra, expected) in [
        (json!({}), json!({"max_tokens": 4096})),
        (json!({"max_tokens": 0}), json!({"max_tokens": 1})),
        (
            json!({"temperature": 0.5, "top_p": 1, "top_k": 7, "stop_sequences": ["a", "b "]}),
            json!({"temperature": 0.5, "top_p": 1.0, "top_k": 7, "stop": ["a", "b "]}),
        ),
        (
            json!({"top_k": 0, "stop_sequences": [], "temperature": null}),
            json!({}),
        ),
        (
            json!({"tools": tools, "tool_choice": {"type": "any", "disable_parallel_tool_use": true}}),
            json!({"tool_choice": "required", "parallel_tool_calls": false}),
        ),
        (
            json!({"tools": tools, "tool_choice": {"type": "tool", "name": "f"}}),
            json!({"tool_choice": {"type": "function", "function": {"name": "f"}}}),
        ),
        (
            json!({"tools": tools, "tool_choice": {"type": "none"}}),
            json!({"tool_choice": "none"}),
        ),
        (
            json!({"tools": tools, "tool_choice": {"type": "auto", "disable_parallel_tool_use": true}}),
            json!({"parallel_tool_calls": false}),
        ),
        (
            json!({"output_config": {"effort": "max", "format": {"type": "json_schema", "schema": schema}}}),
            json!({"reasoning_effort": "high", "response_format": format}),
        ),
        (
            json!({"output_format": {"type": "json_schema", "schema": schema}}),
            json!({"response_format": format}),
        ),
        (
            json!({"thinking": {"type": "enabled", "budget_tokens": 1024}, "temperature": 1}),
            json!({"chat_template_kwargs": {"enable_thinking": true}, "temperature": 1.0}),
        ),
        (
            json!({"thinking": {"type": "disabled"}}),
            json!({"chat_template_kwargs": {"enable_thinking": false}}),
        ),
        (
            json!({"thinking": {"type": "adaptive", "display": "updates"}}),
            json!({}),
        ),
        (
            json!({"stream": true}),
            json!({"stream": true, "stream_options": {"include_usage": true, "continuous_usage_stats": true}}),
        ),
        // Nothing that chat knows.
        (
            json!({"metadata": {"user_id": "u", "more": 1}, "service_tier": "auto",
                "context_management": {"edits": []}, "container": "c", "betas": ["b"],
                "mcp_servers": [], "speed": "fast", "inference_geo": "eu", "anything": [{}],
                "thread": {"type": "create"}, "cache_control": {"type": "ephemeral"},
                "kv_transfer_params": {"a": 1}, "cache_salt": "theirs"}),
            json!({}),
        ),
    ] {
        let (_, mut node) = read(request(&extra).to_string().as_bytes())
            .unwrap_or_else(|error| panic!("{extra}: {error}"));
        let node = node.as_object_mut().expect("an object");
        let mut wanted = json!({"max_tokens": 4096, "cache_salt": "ours", "model": "node-model"});
        for (name, value) in expected.as_object().expect("an object") {
            wanted[name] = value.clone();
        }
        node.remove("messages");
        node.remove("tools");
        assert_eq!(Value::Object(node.clone()), wanted, "{extra}");
    }
}

#[test]
fn marks_are_a_hint_of_how_long_the_prefix_is_wanted() {
    let mark = |ttl: Value| json!({"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": ttl}});
    let user = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    let top = json!({"cache_control": {"type": "ephemeral", "ttl": "1h"}});
    for (extra, expected) in [
        (json!({}), None),
        (user(json!([mark(json!(null))])), Some(Retention::Minutes5)),
        (
            user(json!([mark(json!("1h")), mark(json!("5m"))])),
            Some(Retention::Hour1),
        ),
        (top, Some(Retention::Hour1)),
        // Refused elsewhere.
        (user(json!([mark(json!("2h"))])), None),
    ] {
        let body = request(&extra).to_string();
        let fields = dialects::Fields::parse(body.as_bytes()).expect("an object");
        assert_eq!(dialects::messages::retention(&fields), expected, "{extra}");
    }
}

#[test]
fn counting_reads_the_same_prompt() {
    let extra = json!({"system": "s", "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "thinking": {"type": "disabled"}});
    let body = request(&extra);
    let (prompt, _) = read(body.to_string().as_bytes()).expect("sound");
    let mut count = body;
    // Counting needs no limit, and counts the beginning of an answer too.
    count
        .as_object_mut()
        .expect("an object")
        .remove("max_tokens");
    let counted = |count: &Value| {
        let text = count.to_string();
        let fields = dialects::Fields::parse(text.as_bytes()).expect("an object");
        dialects::messages::count_tokens(fields).expect("sound")
    };
    assert_eq!(counted(&count), ("claude-x".to_owned(), prompt));
    let begun = json!([{"role": "user", "content": "x"}, {"role": "assistant", "content": "{"}]);
    count["messages"] = begun.clone();
    let (_, counted) = counted(&count);
    assert_eq!(counted.messages[1..], *begun.as_array().expect("a list"));
}
