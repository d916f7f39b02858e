//! Demanded forms of the content. Catches content that is not of the form, and a refusal that does
//! not name the field.

use serde_json::{Value, json};

use crate::common::{chat_body, content, shared, tool, user};

const CHAT: &str = "/v1/chat/completions";

fn asked(more: &Value) -> Value {
    let mut fields = json!({"messages": user("Describe a person."), "max_tokens": 120});
    for (name, value) in more.as_object().expect("an object") {
        fields[name] = value.clone();
    }
    fields
}

fn person() -> Value {
    json!({
        "type": "object", "additionalProperties": false, "required": ["name", "age"],
        "properties": {"name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    })
}

fn format(schema: Value) -> Value {
    json!({"type": "json_schema", "json_schema": {"name": "p", "strict": true, "schema": schema}})
}

#[test]
fn a_schema_is_kept() {
    let node = shared();
    for seed in 0..4 {
        for way in [
            json!({"response_format": format(person())}),
            json!({"structured_outputs": {"json": person()}}),
            json!({"guided_json": person().to_string()}),
        ] {
            let mut fields = asked(&way);
            fields["temperature"] = json!(1.2);
            fields["seed"] = json!(seed);
            let answer = node.chat(fields);
            let value: Value = serde_json::from_str(&content(&answer)).expect("JSON");
            assert!(value["name"].is_string(), "{value}");
            assert!(
                value["age"]
                    .as_i64()
                    .is_some_and(|age| (0..=120).contains(&age)),
                "{value}"
            );
            assert_eq!(value.as_object().map(serde_json::Map::len), Some(2));
            assert_eq!(answer["choices"][0]["finish_reason"], "stop");
        }
    }
}

#[test]
fn a_stream_of_a_form_is_the_whole_answer_in_pieces() {
    let node = shared();
    let fields = asked(&json!({"response_format": format(person())}));
    let whole = node.chat(fields.clone());
    let mut body = chat_body(fields);
    body["stream"] = json!(true);
    let chunks = node.stream(CHAT, &body).chunks();
    let pieces = chunks
        .iter()
        .filter_map(|c| c["choices"][0]["delta"]["content"].as_str());
    assert_eq!(pieces.collect::<String>(), content(&whole));
}

#[test]
fn other_forms_are_kept() {
    let node = shared();
    let object = node.chat(asked(&json!({"response_format": {"type": "json_object"}})));
    let value: Value = serde_json::from_str(&content(&object)).expect("JSON");
    assert!(value.is_object());
    let date = node.chat(asked(
        &json!({"guided_regex": "[0-9]{4}-[01][0-9]-[0-3][0-9]"}),
    ));
    let text = content(&date);
    assert_eq!(text.len(), 10, "{text}");
    assert!(text.chars().enumerate().all(|(at, c)| match at {
        4 | 7 => c == '-',
        _ => c.is_ascii_digit(),
    }));
    let choice = node.chat(asked(
        &json!({"structured_outputs": {"choice": ["oui", "non"]}}),
    ));
    assert!(["oui", "non"].contains(&&*content(&choice)));
    let grammar = "start: \"a\" (\"b\" | \"c\") \"d\"";
    let text = content(&node.chat(asked(&json!({"guided_grammar": grammar}))));
    assert!(["abd", "acd"].contains(&&*text), "{text}");
    let body = json!({"model": "smol", "prompt": "Yes or no?", "guided_choice": ["yes", "no"]});
    let answer = node.post("/v1/completions", &body).json();
    let text = answer["choices"][0]["text"].as_str().expect("text");
    assert!(["yes", "no"].contains(&text), "{text}");
}

#[test]
fn a_demanded_call_comes_before_a_demanded_form() {
    let parameters = json!({"type": "object", "properties": {}, "additionalProperties": false});
    let answer = shared().chat(asked(&json!({
        "response_format": format(person()), "tools": [tool("nothing", parameters)],
        "tool_choice": "required", "parallel_tool_calls": false,
    })));
    let message = &answer["choices"][0]["message"];
    assert_eq!(
        message["tool_calls"][0]["function"]["name"], "nothing",
        "{answer}"
    );
    assert_eq!(message["tool_calls"][0]["function"]["arguments"], "{}");
}

#[test]
fn what_is_no_form_is_refused_by_name() {
    let node = shared();
    let schema = "response_format.json_schema.schema";
    let rows = [
        (
            json!({"response_format": format(json!({"type": "strange"}))}),
            schema,
        ),
        (
            json!({"response_format": format(json!({"type": "integer", "minimum": 3, "maximum": 1}))}),
            schema,
        ),
        (
            json!({"response_format": format(json!({"$ref": "#/nowhere"}))}),
            schema,
        ),
        (json!({"guided_regex": "("}), "guided_regex"),
        (json!({"guided_grammar": "no grammar"}), "guided_grammar"),
        (
            json!({"structured_outputs": {"regex": "[a"}}),
            "structured_outputs.regex",
        ),
    ];
    for (way, param) in rows {
        let reply = node.post(CHAT, &chat_body(asked(&way)));
        let expected = (400, "invalid_grammar".to_owned(), Some(param.to_owned()));
        assert_eq!(reply.error(), expected, "{way}");
    }
    // Its parts run into each other, which shows only once an answer is asked for: the request's own
    // fault still, since a gateway stops trusting nodes that fail.
    let greedy = json!({"guided_grammar": "start: /[a-z ]*/ \"x\"", "max_tokens": 24});
    let (status, code, _) = node.post(CHAT, &chat_body(asked(&greedy))).error();
    assert_eq!(status, 400, "{code}");
    let tight = asked(&json!({"response_format": format(person()), "max_tokens": 2}));
    let reply = node.post(CHAT, &chat_body(tight));
    assert_eq!(
        reply.error(),
        (400, "budget_too_small".into(), Some("max_tokens".into()))
    );
}
