//! Catches a tool that the model cannot call as its client means it, and calls that are told in
//! another form than the client's tool has.

use serde_json::{Value, json};

use crate::support::{ask, chunk, completion, end, stream};

fn names(tools: Option<&Value>) -> Vec<&str> {
    let tools = tools.and_then(Value::as_array).into_iter().flatten();
    let names = tools.map(|tool| tool["function"]["name"].as_str());
    names.map(|name| name.expect("a name")).collect()
}

#[test]
fn what_no_node_can_run_is_echoed_and_not_shown() {
    let tools = json!([
        {"type": "function", "name": "f", "parameters": null, "strict": null},
        {"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "function", "name": "inner"}]},
        {"type": "web_search", "external_web_access": true},
        {"type": "something_new", "x": [1]},
    ]);
    let mut asked =
        ask(&json!({"model": "m", "input": "x", "tools": tools, "tool_choice": "auto"}));
    assert_eq!(
        asked.prompt.tools.map(Value::from),
        Some(json!([{"type": "function", "function": {"name": "f"}}]))
    );
    assert_eq!(asked.node["tool_choice"], "auto");
    let answer = completion(&json!({"content": "x"}), "stop");
    let whole = asked.translation.whole(&answer, &end()).expect("sound");
    let whole: Value = serde_json::from_slice(&whole).expect("JSON");
    assert_eq!(whole["tools"], tools);
    // With nothing to call, nodes are not asked about tools at all.
    let asked = ask(
        &json!({"model": "m", "input": "x", "tools": [{"type": "web_search"}], "tool_choice": "auto",
            "parallel_tool_calls": true}),
    );
    assert_eq!(asked.prompt.tools, None);
    assert!(asked.node.is_empty(), "{:?}", asked.node);
}

#[test]
fn a_choice_among_some_tools_hides_the_others_or_names_one() {
    let tools = json!([
        {"type": "function", "name": "a"}, {"type": "function", "name": "b"},
        {"type": "custom", "name": "c"}, {"type": "web_search"},
    ]);
    let allowed = |mode: &str, names: &[&str]| {
        let tool = |name: &&str| match *name {
            "c" => json!({"type": "custom", "name": "c"}),
            "w" => json!({"type": "web_search"}),
            name => json!({"type": "function", "name": name}),
        };
        let some: Value = names.iter().map(tool).collect();
        json!({"type": "allowed_tools", "mode": mode, "tools": some})
    };
    for (choice, shown, told) in [
        (json!("required"), vec!["a", "b", "c"], json!("required")),
        (json!("none"), vec!["a", "b", "c"], json!("none")),
        (
            json!({"type": "custom", "name": "c"}),
            vec!["a", "b", "c"],
            json!({"type": "function", "function": {"name": "c"}}),
        ),
        (
            allowed("auto", &["a", "c", "w"]),
            vec!["a", "c"],
            json!("auto"),
        ),
        (
            allowed("required", &["a", "b"]),
            vec!["a", "b"],
            json!("required"),
        ),
        (
            allowed("required", &["b"]),
            vec!["a", "b", "c"],
            json!({"type": "function", "function": {"name": "b"}}),
        ),
        (allowed("auto", &["w"]), vec![], Value::Null),
    ] {
        let asked =
            ask(&json!({"model": "m", "input": "x", "tools": tools, "tool_choice": choice}));
        assert_eq!(names(asked.prompt.tools.as_deref()), shown, "{choice}");
        let node = asked.node.get("tool_choice").cloned();
        assert_eq!(node.unwrap_or_default(), told, "{choice}");
    }
}

#[test]
fn a_custom_tool_is_a_function_of_one_text_and_its_calls_are_custom_again() {
    let tool = json!({"type": "custom", "name": "apply_patch", "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: \"x\""}});
    let first = json!({"model": "m", "input": "go", "stream": true, "tools": [tool]});
    let asked = ask(&first);
    let function = &asked.prompt.tools.as_ref().expect("tools")[0]["function"];
    assert_eq!(function["name"], "apply_patch");
    assert_eq!(function["parameters"]["required"], json!(["input"]));
    let about = function["parameters"]["properties"]["input"]["description"].as_str();
    assert!(about.expect("a text").ends_with("start: \"x\""));
    let call = |arguments: &str| {
        json!({"tool_calls": [{"index": 0, "id": "c1",
        "function": {"name": "apply_patch", "arguments": arguments}}]})
    };
    let chunks = [
        chunk(&call("{\"input\": \"a\\"), None),
        chunk(
            &json!({"tool_calls": [{"index": 0, "function": {"arguments": "nb\"}"}}]}),
            Some("tool_calls"),
        ),
    ];
    let events = stream(asked.translation.fresh().as_mut(), &chunks);
    let told: Vec<_> = events
        .iter()
        .filter(|(name, _)| name.contains("custom_tool_call_input"))
        .map(|(_, data)| data.get("delta").or(data.get("input")).cloned())
        .collect();
    assert_eq!(told, [Some(json!("a\nb")), Some(json!("a\nb"))]);
    let item = &events.last().expect("events").1["response"]["output"][0];
    assert_eq!(item["type"], "custom_tool_call");
    assert_eq!(
        (&item["call_id"], &item["input"]),
        (&json!("c1"), &json!("a\nb"))
    );
    // The next turn shows the model what it wrote.
    let next = ask(&json!({"model": "m", "tools": [tool], "input": [
        {"role": "user", "content": "go"}, item,
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}]}));
    assert_eq!(
        Value::from(next.prompt.messages),
        json!([
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": null, "tool_calls": [{"id": "c1", "type": "function",
                "function": {"name": "apply_patch", "arguments": "{\"input\":\"a\\nb\"}"}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "done"},
        ])
    );
    // Words that are not in the form are told as they are.
    let mut translation = asked.translation.fresh();
    let events = stream(
        translation.as_mut(),
        &[chunk(&call("*** patch"), Some("length"))],
    );
    let response = &events.last().expect("events").1["response"];
    assert_eq!(response["output"][0]["input"], "*** patch");
    assert_eq!(response["output"][0]["status"], "incomplete");
    assert_eq!(
        response["incomplete_details"],
        json!({"reason": "max_output_tokens"})
    );
}

#[test]
fn what_clients_run_themselves_reads_like_a_call() {
    let asked = ask(&json!({"model": "m", "input": [
        {"role": "user", "content": "go"},
        {"type": "local_shell_call", "id": "lsh_1", "call_id": "c1", "status": "completed",
         "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "local_shell_call_output", "id": "c1", "output": "{\"output\":\"a\"}"},
        {"type": "shell_call", "call_id": "c2", "action": {"commands": ["pwd"]}},
        {"type": "shell_call_output", "call_id": "c2", "output": [{"stdout": "/", "stderr": ""}]},
        {"type": "apply_patch_call", "call_id": "c3", "status": "completed",
         "operation": {"type": "delete_file", "path": "x"}},
        {"type": "apply_patch_call_output", "call_id": "c3", "status": "completed"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "function_call_output", "name": "news", "output": "It rains."},
    ]}));
    let call = |id: &str, name: &str, arguments: &str| {
        json!({"role": "assistant", "content": null, "tool_calls": [{"id": id, "type": "function",
            "function": {"name": name, "arguments": arguments}}]})
    };
    let result =
        |id: &str, text: &str| json!({"role": "tool", "tool_call_id": id, "content": text});
    assert_eq!(
        asked.prompt.messages,
        [
            json!({"role": "user", "content": "go"}),
            call(
                "c1",
                "local_shell",
                r#"{"type":"exec","command":["ls"],"env":{}}"#
            ),
            result("c1", r#"{"output":"a"}"#),
            call("c2", "shell", r#"{"commands":["pwd"]}"#),
            result("c2", r#"[{"stdout":"/","stderr":""}]"#),
            call("c3", "apply_patch", r#"{"type":"delete_file","path":"x"}"#),
            result("c3", "completed"),
            json!({"role": "user", "content": "It rains."}),
        ]
    );
}

#[test]
fn a_call_without_id_or_name() {
    let chunks = [
        chunk(
            &json!({"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}),
            None,
        ),
        chunk(
            &json!({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "}"}}, {"index": 1}]}),
            Some("stop"),
        ),
    ];
    let events = stream(
        ask(&json!({"model": "m", "input": "x"}))
            .translation
            .as_mut(),
        &chunks,
    );
    let output = &events.last().expect("events").1["response"]["output"];
    assert_eq!(output.as_array().map(Vec::len), Some(1), "{output}");
    assert_eq!(output[0]["arguments"], "{}");
    assert!(
        output[0]["call_id"]
            .as_str()
            .is_some_and(|id| id.starts_with("call_"))
    );
}
