//! Tools: forced calls, calls that the model may make, and what is refused. Catches arguments that
//! the schema does not accept, a stream that differs from the whole answer, and a call that is
//! left in the content.

use serde_json::{Value, json};

use crate::common::{Node, Reply, TOKEN, chat_body, content, model_path, shared, tool, user};

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

/// The model of these tests is too small to call tools by itself, so it is made to: the prompt's
/// tokens end within a call.
#[test]
fn calls_that_the_model_makes_are_taken_out_of_the_content() {
    let node = shared();
    let bias = json!({"tool_choice": "auto"});
    // Whether or not it calls, the answer is whole: content, or calls with arguments.
    let answer = node.chat(asked(bias));
    let made = calls(&answer);
    let text = answer["choices"][0]["message"]["content"]
        .as_str()
        .unwrap_or_default();
    assert!(!text.contains("<tool_call>") || made.is_empty(), "{answer}");
    // The same conversation under `none` is text, whatever it looks like.
    let none = node.chat(asked(json!({"tool_choice": "none"})));
    assert!(calls(&none).is_empty());
    assert!(none["choices"][0]["finish_reason"] != "tool_calls");
    assert!(!content(&none).is_empty());
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
    let refused = |parameters: &Value| -> Reply {
        let body = chat_body(asked(json!({
            "tools": [clock(), tool("bad", parameters.clone())], "tool_choice": "required",
        })));
        let started = std::time::Instant::now();
        let reply = node.post(CHAT, &body);
        let limit = std::time::Duration::from_secs(10);
        assert!(
            started.elapsed() < limit,
            "a refusal takes no time: {:?}",
            started.elapsed()
        );
        reply
    };
    let param = Some("tools[1].function.parameters".to_owned());
    for parameters in [&broken, &unsatisfiable, &exploding] {
        let reply = refused(parameters);
        assert_eq!(
            reply.error(),
            (400, "invalid_grammar".into(), param.clone())
        );
    }
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
    assert!(model_path().exists());
    node.stdin.take();
    assert_eq!(node.exit_code(), Some(0));
}
