//! Catches a conversation whose prompt is not what a chat client would have sent: its cache would
//! be another one.

use serde_json::{Value, json};

use crate::support::{ask, ask_after, chunk, stream};

fn function(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name, "arguments": "{\"city\":\"Rome\"}"}})
}

fn call(id: &str, name: &str) -> Value {
    let mut call = json!({"id": id});
    let rest = function(name);
    for (name, value) in rest.as_object().expect("an object") {
        call[name] = value.clone();
    }
    call
}

#[test]
fn items_become_the_messages_of_a_chat_client() {
    let asked = ask(&json!({
        "model": "m", "instructions": "Be brief.",
        "input": [
            {"role": "developer", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"role": "user", "content": "Weather?"},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Two calls."}]},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
             "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}]},
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{\"city\":\"Rome\"}"},
            {"type": "function_call", "id": "fc_2", "call_id": "c2", "name": "g", "arguments": "{\"city\":\"Rome\"}"},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "21"}, {"type": "input_text", "text": "°"}]},
            {"role": "assistant", "content": "Sunny, 21°."},
            {"role": "assistant", "content": "More?"},
            {"role": "user", "content": [{"type": "input_text", "text": "No."}]},
        ],
    }));
    assert_eq!(
        Value::from(asked.prompt.messages),
        json!([
            {"role": "system", "content": "Be brief."},
            {"role": "developer", "content": "ab"},
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "Let me see.", "reasoning_content": "Two calls.",
             "tool_calls": [call("c1", "f"), call("c2", "g")]},
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
            {"role": "tool", "tool_call_id": "c2", "content": "21°"},
            {"role": "assistant", "content": "Sunny, 21°."},
            {"role": "assistant", "content": "More?"},
            {"role": "user", "content": "No."},
        ])
    );
}

#[test]
fn earlier_turns_come_first_and_bring_no_instructions() {
    let history = vec![
        json!({"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}),
        json!({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]}),
    ];
    let body =
        r#"{"model":"m","previous_response_id":"resp_1","instructions":"New.","input":"bye"}"#;
    let asked = ask_after(history, body).expect("sound");
    assert_eq!(
        Value::from(asked.prompt.messages),
        json!([
            {"role": "system", "content": "New."},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": "bye"},
        ])
    );
}

#[test]
fn parameters_reach_the_node_under_chat_names() {
    let asked = ask(&json!({
        "model": "m", "input": "x", "max_output_tokens": 9, "temperature": 0.5, "top_p": 0.9,
        "top_logprobs": 2, "include": ["message.output_text.logprobs"], "seed": 7,
        "reasoning": {"effort": "low", "summary": "auto"}, "parallel_tool_calls": false,
        "text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}, "strict": true}},
        "tools": [{"type": "function", "name": "f", "description": "d", "strict": true,
            "parameters": {"type": "object", "properties": {}}}, {"type": "web_search"}],
        "tool_choice": {"type": "function", "name": "f"},
        "metadata": {"a": "b"}, "user": "u", "kv_transfer_params": {"x": 1}, "foo": 1,
    }));
    assert_eq!(
        Value::Object(asked.node),
        json!({
            "seed": 7, "temperature": 0.5, "top_p": 0.9, "max_tokens": 9,
            "reasoning_effort": "low",
            "response_format": {"type": "json_schema", "json_schema":
                {"name": "s", "schema": {"type": "object"}, "strict": true}},
            "logprobs": true, "top_logprobs": 2,
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "parallel_tool_calls": false,
        })
    );
    assert_eq!(
        asked.prompt.tools.map(Value::from),
        Some(json!([{"type": "function", "function":
            {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}, "strict": true}}]))
    );
}

#[test]
fn an_answer_is_one_message_again_in_whatever_order_it_came() {
    let body = json!({"model": "m", "stream": true, "input": "x",
        "tools": [{"type": "function", "name": "f"}]});
    let begin = json!({"tool_calls": [{"index": 0, "id": "c1", "type": "function",
        "function": {"name": "f", "arguments": "{}"}}]});
    let chunks = [
        chunk(&json!({"reasoning_content": "hm"}), None),
        chunk(&json!({"content": "One. "}), None),
        chunk(&begin, None),
        chunk(&json!({"content": "Two."}), Some("tool_calls")),
    ];
    let events = stream(ask(&body).translation.as_mut(), &chunks);
    let output = &events.last().expect("events").1["response"]["output"];
    let mut input = output.as_array().expect("items").clone();
    assert_eq!(input.len(), 4);
    input.push(json!({"type": "function_call_output", "call_id": "c1", "output": "y"}));
    let next = ask(&json!({"model": "m", "input": input}));
    let call =
        json!({"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    assert_eq!(
        next.prompt.messages,
        [
            json!({"role": "assistant", "content": "One. Two.", "reasoning_content": "hm",
                "tool_calls": [call]}),
            json!({"role": "tool", "tool_call_id": "c1", "content": "y"}),
        ]
    );
    // Thinking begins the next answer.
    let reasoning = |text: &str| json!({"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]});
    let next = ask(&json!({"model": "m", "input": [
        reasoning("a"), reasoning("b"), {"role": "assistant", "content": "1"},
        reasoning("c"), {"role": "assistant", "content": "2"}, {"role": "user", "content": "z"}]}));
    assert_eq!(
        next.prompt.messages[..2],
        [
            json!({"role": "assistant", "content": "1", "reasoning_content": "ab"}),
            json!({"role": "assistant", "content": "2", "reasoning_content": "c"}),
        ]
    );
}
