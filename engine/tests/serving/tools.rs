//! Tools: forced calls, calls that the model may make, and what is refused. Catches arguments that
//! the schema does not accept, a stream that differs from the whole answer, and a call that is
//! left in the content.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::common::{Node, TOKEN, chat_body, shared, tool, user};

const CHAT: &str = "/v1/chat/completions";

fn weather() -> Value {
    tool(
        "get_weather",
        json!({
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "days"],
            "additionalProperties": false,
        }),
    )
}

fn clock() -> Value {
    tool(
        "get_time",
        json!({"type": "object", "properties": {"zone": {"type": "string"}},
        "required": ["zone"], "additionalProperties": false}),
    )
}

fn asked(more: Value) -> Value {
    let mut fields = json!({
        "messages": user("What is the weather in Rome in the next 3 days?"),
        "tools": [weather(), clock()], "max_tokens": 200,
    });
    for (name, value) in more.as_object().expect("an object") {
        fields[name] = value.clone();
    }
    fields
}

fn calls(answer: &Value) -> Vec<Value> {
    let calls = answer["choices"][0]["message"]["tool_calls"].as_array();
    calls.cloned().unwrap_or_default()
}

fn arguments(call: &Value) -> Value {
    let text = call["function"]["arguments"]
        .as_str()
        .expect("arguments are text");
    serde_json::from_str(text).unwrap_or_else(|_| panic!("not JSON: {text}"))
}

fn check_weather(call: &Value) {
    assert_eq!(call["type"], "function");
    assert!(
        call["id"]
            .as_str()
            .is_some_and(|id| id.starts_with("call_")),
        "{call}"
    );
    assert_eq!(call["function"]["name"], "get_weather");
    let arguments = arguments(call);
    let city = arguments["city"].as_str().expect("a city");
    assert!(["Paris", "Rome", "Oslo"].contains(&city), "{arguments}");
    assert!(
        arguments["days"]
            .as_i64()
            .is_some_and(|days| (1..=7).contains(&days))
    );
}

#[test]
fn a_named_tool_is_called() {
    let named = json!({"type": "function", "function": {"name": "get_weather"}});
    let answer = shared().chat(asked(json!({"tool_choice": named})));
    let calls = calls(&answer);
    assert_eq!(calls.len(), 1, "{answer}");
    check_weather(&calls[0]);
    assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls");
    assert_eq!(answer["choices"][0]["message"]["content"], Value::Null);
}

#[test]
fn a_required_call_streams_as_deltas() {
    let node = shared();
    let fields = asked(json!({"tool_choice": "required", "parallel_tool_calls": false}));
    let whole = node.chat(fields.clone());
    let expected = calls(&whole);
    assert_eq!(expected.len(), 1, "{whole}");
    let mut body = chat_body(fields);
    body["stream"] = json!(true);
    let chunks = node.stream(CHAT, &body).chunks();
    let deltas: Vec<&Value> = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["tool_calls"].as_array())
        .flatten()
        .collect();
    let first = deltas[0];
    assert!(
        first["id"]
            .as_str()
            .is_some_and(|id| id.starts_with("call_")),
        "{first}"
    );
    assert_eq!(first["type"], "function");
    assert_eq!(first["function"]["name"], expected[0]["function"]["name"]);
    assert!(deltas.iter().all(|delta| delta["index"] == 0));
    assert!(
        deltas[1..].iter().all(|delta| delta.get("id").is_none()),
        "the id comes once"
    );
    let pieces = deltas
        .iter()
        .filter_map(|delta| delta["function"]["arguments"].as_str());
    let text: String = pieces.collect();
    assert_eq!(expected[0]["function"]["arguments"], text);
    let last = chunks.last().expect("chunks");
    assert_eq!(last["choices"][0]["finish_reason"], "tool_calls");
}

#[test]
fn parallel_calls_have_numbers() {
    let fields = asked(json!({"tool_choice": "required", "temperature": 1.0, "max_tokens": 300}));
    let mut most = 0;
    for seed in 0..6 {
        let mut fields = fields.clone();
        fields["seed"] = json!(seed);
        let answer = shared().chat(fields);
        let calls = calls(&answer);
        most = most.max(calls.len());
        for call in &calls {
            let known = ["get_weather", "get_time"];
            assert!(
                known.iter().any(|name| call["function"]["name"] == *name),
                "{call}"
            );
            assert!(arguments(call).is_object());
        }
        let mut ids: Vec<_> = calls.iter().map(|call| call["id"].to_string()).collect();
        ids.dedup();
        assert_eq!(ids.len(), calls.len(), "every call has an id of its own");
    }
    assert!(most >= 1);
}

/// The model of these tests is too small to call tools by itself, so a grammar over the raw text
/// writes the answer, and the server has to see the calls in it.
fn written(text: &str) -> Value {
    json!({"structured_outputs": {"choice": [text]}})
}

/// A whole answer and its stream put together: content, reasoning, calls, finish reason.
fn both_ways(node: &Node, fields: Value) -> (Value, Value, Value, Value) {
    let answer = node.chat(fields.clone());
    let choice = &answer["choices"][0];
    let message = &choice["message"];
    let made = calls(&answer);
    let functions: Value = made.iter().map(|call| call["function"].clone()).collect();
    let mut body = chat_body(fields);
    body["stream"] = json!(true);
    let chunks = node.stream(CHAT, &body).chunks();
    let text = |name: &str| {
        let pieces = chunks
            .iter()
            .filter_map(|c| c["choices"][0]["delta"][name].as_str());
        pieces.collect::<String>()
    };
    let mut streamed: Vec<(String, String)> = Vec::new();
    let deltas = chunks
        .iter()
        .filter_map(|c| c["choices"][0]["delta"]["tool_calls"].as_array());
    for delta in deltas.flatten() {
        if let Some(name) = delta["function"]["name"].as_str() {
            assert_eq!(delta["index"], streamed.len());
            streamed.push((name.to_owned(), String::new()));
        }
        let last = streamed.last_mut().expect("a call begins with its name");
        last.1 += delta["function"]["arguments"].as_str().unwrap_or_default();
    }
    let streamed = streamed
        .iter()
        .map(|(name, arguments)| json!({"name": name, "arguments": arguments}));
    assert_eq!(streamed.collect::<Value>(), functions, "calls, streamed");
    assert_eq!(
        text("content"),
        message["content"].as_str().unwrap_or_default(),
        "content"
    );
    let reasoning = message["reasoning_content"].as_str().unwrap_or_default();
    assert_eq!(text("reasoning_content"), reasoning, "reasoning, streamed");
    let finish = &chunks.last().expect("chunks")["choices"][0]["finish_reason"];
    assert_eq!(finish, &choice["finish_reason"]);
    (
        message["content"].clone(),
        message["reasoning_content"].clone(),
        functions,
        finish.clone(),
    )
}

#[test]
fn calls_that_the_model_makes_are_taken_out_of_the_content() {
    let node = shared();
    let one =
        "<tool_call>\n{\"name\": \"get_time\", \"arguments\": {\"zone\": \"CET\"}}\n</tool_call>";
    let two = format!("{one}\n{}", one.replace("CET", "UTC"));
    let call =
        |zone: &str| json!({"name": "get_time", "arguments": format!("{{\"zone\": \"{zone}\"}}")});
    let ask = |text: &str, more: Value| {
        let mut fields = asked(written(text));
        for (name, value) in more.as_object().expect("an object") {
            fields[name] = value.clone();
        }
        both_ways(node, fields)
    };
    let (content, _, made, finish) = ask(&two, json!({}));
    assert_eq!((content, finish), (Value::Null, json!("tool_calls")));
    assert_eq!(made, json!([call("CET"), call("UTC")]), "parallel calls");
    let (_, _, made, _) = ask(&two, json!({"parallel_tool_calls": false}));
    assert_eq!(made, json!([call("CET")]), "one where one was asked for");
    let (content, _, made, _) = ask(&format!("Let me look. {one}"), json!({}));
    assert!(
        content
            .as_str()
            .is_some_and(|text| text.starts_with("Let me look."))
    );
    assert_eq!(made, json!([call("CET")]));
    // Under `none` it is text, whatever it looks like, and so is what only looks like a call.
    let (content, _, made, finish) = ask(one, json!({"tool_choice": "none"}));
    assert_eq!(
        (content, made, finish),
        (json!(one), json!([]), json!("stop"))
    );
    let broken = "<tool_call>\n{\"nome\": 5}\n</tool_call>";
    let (content, _, made, finish) = ask(broken, json!({}));
    assert_eq!(
        (content, made, finish),
        (json!(broken), json!([]), json!("stop"))
    );
}

#[test]
fn reasoning_is_told_apart() {
    let mut node = Node::start(&["--reasoning-format", "think"]);
    let text = "<think>\nIt is so.\n</think>\n\nYes.";
    let mut fields = written(text);
    fields["max_tokens"] = json!(60);
    let (content, reasoning, _, finish) = both_ways(&node, fields);
    assert_eq!((content, reasoning), (json!("Yes."), json!("It is so.")));
    assert_eq!(finish, "stop");
    node.stdin.take();
    assert_eq!(node.exit_code(), Some(0));
}

#[test]
fn under_auto_the_answer_is_calls_or_of_the_form() {
    let node = shared();
    let schema = json!({"type": "object", "properties": {"answer": {"type": "boolean"}},
        "required": ["answer"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}});
    for seed in 0..5 {
        let fields = json!({"response_format": format, "temperature": 1.5, "seed": seed});
        let (content, _, made, _) = both_ways(node, asked(fields));
        match content.as_str() {
            None => assert!(made.as_array().is_some_and(|made| !made.is_empty())),
            Some(text) => {
                let value: Value = serde_json::from_str(text).expect("of the form");
                assert!(value["answer"].is_boolean(), "{value}");
                assert_eq!(made, json!([]));
            }
        }
    }
}

#[test]
fn prompt_ids_keep_tools_working() {
    let node = shared();
    let plain = asked(json!({"tool_choice": "required", "parallel_tool_calls": false}));
    let rendered = node.post(
        "/tokenize",
        &json!({"messages": plain["messages"], "tools": plain["tools"]}),
    );
    let mut by_ids = plain.clone();
    by_ids["prompt_token_ids"] = rendered.json()["tokens"].clone();
    let (one, other) = (node.chat(plain), node.chat(by_ids));
    assert_eq!(
        calls(&one)[0]["function"],
        calls(&other)[0]["function"],
        "ids beside messages are the prompt, and the rest goes on working"
    );
    assert_eq!(
        one["usage"]["prompt_tokens"],
        other["usage"]["prompt_tokens"]
    );
}

#[test]
fn what_cannot_be_called_is_refused_by_name() {
    let node = shared();
    // Every level doubles what a grammar that copies would hold.
    let mut levels = serde_json::Map::new();
    for level in 0..40 {
        let next = json!({"$ref": format!("#/$defs/l{}", level + 1)});
        let both = json!({"anyOf": [next, {"type": "array", "items": next, "minItems": 900}]});
        levels.insert(format!("l{level}"), both);
    }
    levels.insert(
        "l40".into(),
        json!({"type": "string", "pattern": "^(a{500}|b{500}){500}$"}),
    );
    let exploding = json!({"type": "object", "required": ["x"], "$defs": levels,
        "properties": {"x": {"$ref": "#/$defs/l0"}}});
    let unsatisfiable = json!({"type": "object", "required": ["x"],
        "properties": {"x": {"type": "string", "minLength": 5, "maxLength": 2}}});
    let broken = json!({"type": "object", "properties": {"x": {"type": "strange"}}});
    let named = json!({"type": "function", "function": {"name": "bad"}});
    let refused = |parameters: &Value, choice: Value| {
        let tools = json!([clock(), tool("bad", parameters.clone())]);
        let body = chat_body(asked(json!({"tools": tools, "tool_choice": choice})));
        let started = Instant::now();
        let reply = node.post(CHAT, &body);
        // A second on a machine that does nothing else.
        assert!(
            started.elapsed() < Duration::from_secs(5),
            "{:?}",
            started.elapsed()
        );
        let param = Some("tools[1].function.parameters".to_owned());
        assert_eq!(reply.error(), (400, "invalid_grammar".into(), param));
    };
    for parameters in [&broken, &unsatisfiable] {
        refused(parameters, json!("required"));
        refused(parameters, named.clone());
    }
    refused(&exploding, named);
    let tight = asked(json!({"tool_choice": "required", "max_tokens": 3}));
    let reply = node.post(CHAT, &chat_body(tight));
    assert_eq!(
        reply.error(),
        (400, "budget_too_small".into(), Some("max_tokens".into()))
    );
}

#[test]
fn a_budget_that_just_fits_gives_a_whole_call() {
    let node = shared();
    let named = json!({"type": "function", "function": {"name": "get_weather"}});
    let least = {
        let body = chat_body(asked(json!({"tool_choice": named, "max_tokens": 1})));
        let message = node.post(CHAT, &body).json()["error"]["message"].to_string();
        let numbers = message.split(|c: char| !c.is_ascii_digit());
        let least = numbers
            .filter_map(|number| number.parse::<u64>().ok())
            .next();
        least.unwrap_or_else(|| panic!("no number in {message}"))
    };
    for budget in [least, least + 1, least + 3, least + 10] {
        let answer = node.chat(asked(json!({
            "tool_choice": named, "max_tokens": budget, "temperature": 1.5, "seed": budget,
        })));
        let calls = calls(&answer);
        assert_eq!(calls.len(), 1, "{budget}: {answer}");
        check_weather(&calls[0]);
        let used = answer["usage"]["completion_tokens"]
            .as_u64()
            .expect("a count");
        assert!(used <= budget, "{used} of {budget}");
    }
}

#[test]
fn a_tool_format_can_be_said() {
    let mut node = Node::start_with(&["--tool-format", "mistral"], Some(TOKEN));
    let fields = asked(
        json!({"tool_choice": "required", "parallel_tool_calls": false,
        "return_token_ids": true}),
    );
    let answer = node.chat(fields);
    let ids = &answer["choices"][0]["token_ids"];
    let text = node.post("/detokenize", &json!({"tokens": ids})).json();
    let text = text["prompt"].as_str().expect("text").to_owned();
    assert!(text.starts_with("[TOOL_CALLS]"), "{text}");
    assert_eq!(calls(&answer).len(), 1, "{answer}");
    node.stdin.take();
    assert_eq!(node.exit_code(), Some(0));
}
