//! Do required tool calls and strict schemas hold over the real stack, whatever the model writes?
//!
//! Schemas of the kinds that agents use are made up from a seed. Each is asked for twice: as the
//! parameters of a tool that has to be called, and as the form of the answer. Arguments and answers
//! must parse and must satisfy the schema, by a validator that shares no code with the engine.
//!
//! `HOMING_SCHEMAS=200 cargo test --release -p homing-load-tests --test constrained -- --nocapture`
//! runs the whole figure of docs/MEASUREMENTS.md; without it fewer keep the test short.

#[path = "../../engine/constrain/tests/constrain/schemas.rs"]
mod schemas;
mod support;

use std::time::{Duration, Instant};

use futures_util::StreamExt;
use load_tests::chat::{self, FailureKind, Turn};
use load_tests::http::{Connection, Target};
use rustix::process::Signal;
use serde_json::{Value, json};

use self::schemas::Schemas;
use self::support::{MODEL, Stack};

/// Schemas that `make test` asks for.
const SCHEMAS: u64 = 24;
/// How long a refusal may take here. It takes less than a second on a machine of its own; a test has
/// to hold on a busy one.
const REFUSAL_MAX: Duration = Duration::from_secs(5);
/// Requests in flight.
const AT_ONCE: usize = 16;
/// As figure 1 has it.
const TOKENS_MAX: u32 = 512;
/// An answer of 512 tokens beside 15 others on a busy machine; far above what it takes.
const PATIENCE: Duration = Duration::from_secs(240);

fn schemas_wanted() -> u64 {
    let wanted = std::env::var("HOMING_SCHEMAS").ok();
    wanted.map_or(SCHEMAS, |n| n.parse().expect("HOMING_SCHEMAS is a number"))
}

fn function(name: &str, parameters: &Value) -> Value {
    json!({"type": "function", "function": {
        "name": name, "description": format!("Does {name}."), "parameters": parameters}})
}

/// One way to ask for a schema, and the schemas that calls or the answer must satisfy.
struct Case {
    what: String,
    body: Value,
    /// By tool; the empty name stands for the answer itself.
    expected: Vec<(String, Value)>,
}

fn cases(seed: u64) -> [Case; 2] {
    let mut made = Schemas::new(seed);
    let (schema, other) = (made.object(), made.object());
    let body = |question: &str| {
        json!({
            "model": MODEL,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": TOKENS_MAX,
            "temperature": 0.8,
            "seed": seed,
        })
    };
    let mut call = body("Please do the task with the tool. Make up what you do not know.");
    call["tools"] = json!([function("do_task", &schema), function("other_task", &other)]);
    let named = seed.is_multiple_of(2);
    call["tool_choice"] = if named {
        json!({"type": "function", "function": {"name": "do_task"}})
    } else {
        json!("required")
    };
    let mut expected = vec![("do_task".to_owned(), schema.clone())];
    if !named {
        expected.push(("other_task".to_owned(), other));
    }
    let mut answer = body("Make up a record of the form that you know, and write only it.");
    answer["response_format"] = json!({"type": "json_schema", "json_schema": {
        "name": "record", "strict": true, "schema": schema}});
    [
        Case {
            what: format!("seed {seed}, {}", if named { "named" } else { "required" }),
            body: call,
            expected,
        },
        Case {
            what: format!("seed {seed}, json_schema"),
            body: answer,
            expected: vec![(String::new(), schema)],
        },
    ]
}

/// Why an answer is not what was asked for.
fn fault(case: &Case, answer: &Value) -> Option<String> {
    let choice = &answer["choices"][0];
    let message = &choice["message"];
    let finish = choice["finish_reason"].as_str().unwrap_or_default();
    let mut written = Vec::new();
    if case.expected[0].0.is_empty() {
        if finish != "stop" {
            return Some(format!("finish_reason {finish}"));
        }
        written.push((String::new(), message["content"].clone()));
    } else {
        if finish != "tool_calls" {
            return Some(format!("finish_reason {finish}"));
        }
        for call in message["tool_calls"].as_array().into_iter().flatten() {
            let name = call["function"]["name"].as_str().unwrap_or_default();
            written.push((name.to_owned(), call["function"]["arguments"].clone()));
        }
        if case.expected.len() == 1 && written.len() != 1 {
            return Some(format!("{} calls of the named tool", written.len()));
        }
    }
    if written.is_empty() {
        return Some("no call".into());
    }
    written.into_iter().find_map(|(name, text)| {
        let text = text.as_str().unwrap_or_default();
        let Some((_, schema)) = case.expected.iter().find(|(known, _)| *known == name) else {
            return Some(format!("a call of {name:?}"));
        };
        invalid(schema, text).map(|why| format!("{why}: {text}"))
    })
}

fn invalid(schema: &Value, text: &str) -> Option<String> {
    let value: Value = match serde_json::from_str(text) {
        Ok(value) => value,
        Err(error) => return Some(error.to_string()),
    };
    let validator = jsonschema::options()
        .should_validate_formats(true)
        .build(schema)
        .expect("a schema");
    validator.validate(&value).err().map(|e| e.to_string())
}

async fn ask(target: &Target, key: &str, body: Value) -> Result<Value, chat::Failure> {
    let turn = Turn {
        endpoint: "chat/completions",
        body,
        headers: Vec::new(),
        timeout: PATIENCE,
    };
    chat::ask(&mut Connection::new(target), target, Some(key), &turn).await
}

/// Would catch arguments or an answer that a schema does not accept, that is cut, or that is no
/// call; and a schema that is refused for no reason.
#[tokio::test]
async fn required_calls_and_strict_schemas_hold() {
    let stack = Stack::start(1);
    let target = stack.target();
    let key = stack.ready.api_key.as_str();
    let wanted = schemas_wanted();
    let started = Instant::now();
    let outcomes: Vec<(String, u64, Option<String>)> =
        futures_util::stream::iter((0..wanted).flat_map(cases))
            .map(|case| {
                let target = &target;
                async move {
                    let answer = ask(target, key, case.body.clone()).await;
                    match answer {
                        Ok(answer) => {
                            let tokens = answer["usage"]["completion_tokens"].as_u64();
                            let fault = fault(&case, &answer);
                            (case.what, tokens.unwrap_or(0), fault)
                        }
                        Err(failure) => {
                            let shown = case.body["response_format"].to_string();
                            (case.what, 0, Some(format!("{failure:?} {shown}")))
                        }
                    }
                }
            })
            .buffer_unordered(AT_ONCE)
            .collect()
            .await;
    let faults: Vec<String> = outcomes
        .iter()
        .filter_map(|(what, _, fault)| Some(format!("{what}: {}", fault.as_ref()?)))
        .collect();
    let tokens: u64 = outcomes.iter().map(|(_, tokens, _)| tokens).sum();
    eprintln!(
        "{} of {} answers valid; {tokens} tokens in {:.0} s",
        outcomes.len() - faults.len(),
        outcomes.len(),
        started.elapsed().as_secs_f64(),
    );
    assert_eq!(outcomes.len() as u64, 2 * wanted);
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    stack.stop(Signal::TERM);
}

/// Schemas without an answer, with words of the reason why.
fn hopeless() -> Vec<(Value, &'static str)> {
    let nested = (0..55).fold(
        json!({}),
        |inner, _| json!({"type": "object", "properties": {"a": inner}}),
    );
    // As a tool's parameters they are part of the prompt, which has to fit.
    let many: serde_json::Map<String, Value> =
        (0..600).map(|i| (format!("p{i}"), json!({}))).collect();
    let needs = |count: usize| {
        let names: Vec<String> = (0..count).map(|i| format!("required_{i}")).collect();
        let properties: serde_json::Map<String, Value> = names
            .iter()
            .map(|name| (name.clone(), json!({"type": "integer"})))
            .collect();
        json!({"type": "object", "properties": properties, "required": names})
    };
    vec![
        (
            json!({"type": "object", "properties": {"a": false}, "required": ["a"]}),
            "'a'",
        ),
        (
            json!({"type": "object", "properties": {"a": {"enum": []}}}),
            "enum is empty",
        ),
        (
            json!({"type": "object", "minProperties": 2, "maxProperties": 1}),
            "minProperties",
        ),
        (nested, "nests deeper"),
        (json!({"type": "object", "properties": many}), "properties"),
        (
            json!({"type": "object", "properties": {"a": {"type": "array", "minItems": 1_000_000_000}}}),
            "minItems",
        ),
        (
            json!({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": true}}}),
            "uniqueItems",
        ),
        // Satisfiable, but in no answer of 512 tokens.
        (needs(300), "tokens"),
    ]
}

/// Would catch a hopeless schema that is tried, keeps the engine busy, or is refused without a
/// reason.
#[tokio::test]
async fn hopeless_schemas_are_refused_soon_with_a_reason() {
    let stack = Stack::start(1);
    let target = stack.target();
    for (schema, reason) in hopeless() {
        for tool in [false, true] {
            let mut body = json!({"model": MODEL, "max_tokens": TOKENS_MAX,
                "messages": [{"role": "user", "content": "Do it."}]});
            if tool {
                body["tools"] = json!([function("do_task", &schema)]);
                body["tool_choice"] = json!("required");
            } else {
                body["response_format"] = json!({"type": "json_schema", "json_schema": {
                    "name": "record", "strict": true, "schema": schema}});
            }
            let shown: String = schema.to_string().chars().take(200).collect();
            let started = Instant::now();
            let answer = ask(&target, &stack.ready.api_key, body).await;
            let took = started.elapsed();
            let Err(failure) = answer else {
                panic!("taken: {shown}");
            };
            assert_eq!(
                failure.kind,
                FailureKind::Status(400),
                "{failure:?}: {shown}"
            );
            assert!(
                failure.message.contains(reason),
                "{failure:?} lacks {reason:?}: {shown}"
            );
            assert!(took < REFUSAL_MAX, "{took:?}: {shown}");
        }
    }
    stack.stop(Signal::TERM);
}
