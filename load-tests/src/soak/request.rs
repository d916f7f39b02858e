//! What does the soak ask for?
//!
//! Every request is drawn from the run's seed and its own number alone, so that a run can be
//! repeated whatever the timing was. The mix is meant to reach every part of a node at once: short
//! and long prompts over a few shared beginnings, both endpoints, streams and whole answers, several
//! choices, tools, demanded forms, penalties, priorities, deadlines, embeddings, tokens; clients that
//! leave; and requests that are wrong.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Map, Value, json};

use crate::workload::words;

/// How the client behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Patience {
    /// Reads to the end.
    Whole,
    /// Hangs up so long after sending.
    Leaves(Duration),
}

/// What must come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expect {
    /// An answer.
    Answer,
    /// An answer, or word that it did not end in time.
    AnswerOrTimeout,
    /// A refusal that says what is wrong.
    Refusal,
}

/// One request.
#[derive(Clone, Debug)]
pub(super) struct Request {
    /// The path below `/v1`, or beside it where it begins with `/`.
    pub(super) endpoint: &'static str,
    /// Its body.
    pub(super) body: Value,
    /// What the client does.
    pub(super) patience: Patience,
    /// What must come back.
    pub(super) expect: Expect,
    /// Its kind, for the report.
    pub(super) kind: &'static str,
}

/// The number's request.
pub(super) fn draw(seed: u64, number: u64, model: &str) -> Request {
    let mixed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number;
    let mut random = StdRng::seed_from_u64(mixed);
    let mut request = match random.random_range(0..100) {
        0..50 => chat(&mut random),
        50..68 => completion(&mut random),
        68..82 => structured(&mut random),
        82..86 => embedding(&mut random),
        86..90 => tokens(&mut random),
        _ => wrong(&mut random),
    };
    if let Some(fields) = request.body.as_object_mut() {
        let model = json!(model);
        fields.entry("model").or_insert(model);
    }
    if request.expect != Expect::Refusal && random.random_ratio(1, 6) {
        let after = Duration::from_millis(random.random_range(0..1500));
        request.patience = Patience::Leaves(after);
    }
    request
}

fn request(kind: &'static str, endpoint: &'static str, body: Value) -> Request {
    Request {
        endpoint,
        body,
        patience: Patience::Whole,
        expect: Expect::Answer,
        kind,
    }
}

/// One of a few beginnings that many requests share, and a question of its own.
fn messages(random: &mut StdRng) -> Value {
    let mut shared = StdRng::seed_from_u64(random.random_range(0..6));
    let length = shared.random_range(10..120);
    let mut messages = vec![json!({"role": "system", "content": words(&mut shared, length)})];
    for _ in 0..random.random_range(0..3) {
        let asked = words(random, 12);
        let answered = words(random, 12);
        messages.push(json!({"role": "user", "content": asked}));
        messages.push(json!({"role": "assistant", "content": answered}));
    }
    let length = match random.random_range(0..20) {
        0 => random.random_range(300..900),
        _ => random.random_range(3..40),
    };
    messages.push(json!({"role": "user", "content": words(random, length)}));
    json!(messages)
}

fn chat(random: &mut StdRng) -> Request {
    let mut body = json!({"messages": messages(random)});
    let mut asked = request("chat", "chat/completions", Value::Null);
    if let Some(fields) = body.as_object_mut() {
        if random.random_ratio(1, 4) {
            fields.insert("tools".into(), tools());
            fields.insert("tool_choice".into(), json!("auto"));
        }
        if random.random_ratio(1, 6) {
            fields.insert("logprobs".into(), json!(true));
            fields.insert("top_logprobs".into(), json!(random.random_range(0..6)));
        }
        asked.expect = options(random, fields);
    }
    asked.body = body;
    asked
}

fn completion(random: &mut StdRng) -> Request {
    let length = random.random_range(1..60);
    let mut body = json!({"prompt": words(random, length)});
    let mut asked = request("completion", "completions", Value::Null);
    if let Some(fields) = body.as_object_mut() {
        if random.random_ratio(1, 8) {
            fields.insert("logprobs".into(), json!(random.random_range(0..5)));
        } else if random.random_ratio(1, 8) {
            fields.insert("echo".into(), json!(true));
        }
        asked.expect = options(random, fields);
    }
    asked.body = body;
    asked
}

/// Options that any answer may be asked for with.
fn options(random: &mut StdRng, fields: &mut Map<String, Value>) -> Expect {
    let most: u32 = match random.random_range(0..12) {
        0 => random.random_range(60..120),
        _ => random.random_range(1..24),
    };
    fields.insert("max_tokens".into(), json!(most));
    stream(random, fields);
    let rows: [(&str, Value); 15] = [
        ("n", json!(random.random_range(1..4))),
        (
            "temperature",
            json!([0.0, 1e-6, 0.7, 2.0][random.random_range(0..4)]),
        ),
        ("top_p", json!(random.random_range(1..=10) as f64 / 10.0)),
        ("top_k", json!(random.random_range(1..50))),
        ("min_p", json!(0.1)),
        ("seed", json!(random.random::<u32>())),
        ("presence_penalty", json!(1.5)),
        ("frequency_penalty", json!(-1.0)),
        ("repetition_penalty", json!(1.2)),
        ("logit_bias", json!({"5": -100, "100": 3.5})),
        ("stop", json!(["the", "\n\n"])),
        ("min_tokens", json!(1)),
        ("ignore_eos", json!(true)),
        ("priority", json!(random.random_range(-5..6))),
        (
            "cache_salt",
            json!(format!("salt{}", random.random_range(0..3))),
        ),
    ];
    for (name, value) in rows {
        if random.random_ratio(1, 5) {
            fields.insert(name.into(), value);
        }
    }
    if random.random_ratio(1, 25) {
        fields.insert(
            "timeout".into(),
            json!(random.random_range(1..800) as f64 / 1000.0),
        );
        return Expect::AnswerOrTimeout;
    }
    Expect::Answer
}

fn stream(random: &mut StdRng, fields: &mut Map<String, Value>) {
    if random.random_ratio(1, 2) {
        fields.insert("stream".into(), json!(true));
        if random.random_ratio(1, 2) {
            fields.insert("stream_options".into(), json!({"include_usage": true}));
        }
    }
}

fn tools() -> Value {
    json!([
        {"type": "function", "function": {"name": "get_weather", "parameters": {
            "type": "object", "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"], "additionalProperties": false}}},
        {"type": "function", "function": {"name": "now", "parameters": {
            "type": "object", "properties": {}, "additionalProperties": false}}},
    ])
}

/// Calls and forms that are demanded.
fn structured(random: &mut StdRng) -> Request {
    let mut body = json!({"messages": messages(random), "max_tokens": random.random_range(60..90)});
    let form = match random.random_range(0..7) {
        0 => json!({"tools": tools(), "tool_choice": "required"}),
        1 => json!({"tools": tools(), "tool_choice":
            {"type": "function", "function": {"name": "get_weather"}}}),
        2 => json!({"tools": tools(), "tool_choice": "required", "parallel_tool_calls": false}),
        3 => json!({"response_format": {"type": "json_object"}}),
        4 => json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x",
            "strict": true, "schema": {"type": "object", "properties": {
                "kind": {"enum": ["a", "b"]}, "count": {"type": "integer"}},
                "required": ["kind", "count"], "additionalProperties": false}}}}),
        5 => json!({"structured_outputs": {"regex": "[a-z]{3,8}-[0-9]{2}"}}),
        _ => json!({"structured_outputs": {"choice": ["yes", "no", "perhaps"]}}),
    };
    if let (Some(fields), Value::Object(form)) = (body.as_object_mut(), form) {
        fields.extend(form);
        stream(random, fields);
    }
    request("structured", "chat/completions", body)
}

fn embedding(random: &mut StdRng) -> Request {
    let count = random.random_range(1..4);
    let texts: Vec<String> = (0..count).map(|_| words(random, 20)).collect();
    request("embedding", "embeddings", json!({"input": texts}))
}

fn tokens(random: &mut StdRng) -> Request {
    if random.random_ratio(1, 2) {
        let text = words(random, 30);
        return request("tokens", "/tokenize", json!({"prompt": text}));
    }
    let ids: Vec<u32> = (0..20).map(|_| random.random_range(0..1000)).collect();
    request("tokens", "/detokenize", json!({"tokens": ids}))
}

/// Requests that must be refused, each with what is wrong.
fn wrong(random: &mut StdRng) -> Request {
    let user = json!([{"role": "user", "content": "hi"}]);
    let with = |name: &str, value: Value| {
        let mut body = json!({"messages": user});
        body[name] = value;
        body
    };
    let bodies = [
        json!({}),
        json!({"messages": []}),
        json!({"messages": [{"role": "wizard", "content": "hi"}]}),
        with("model", json!("no-such-model")),
        with("max_tokens", json!(1_000_000_000)),
        with("max_tokens", json!(-1)),
        with("temperature", json!("hot")),
        with("top_p", json!(7)),
        with("n", json!(100_000)),
        with("logit_bias", json!({"999999999": 1})),
        with("logit_bias", json!({"1": 1000})),
        with("stop", json!(vec!["x"; 1000])),
        with("stop", json!([""])),
        with("response_format", json!({"type": "yaml"})),
        with(
            "response_format",
            json!({"type": "json_schema", "json_schema":
            {"name": "x", "schema": {"type": "nonsense"}}}),
        ),
        with("structured_outputs", json!({"regex": "("})),
        with("tools", json!([{"type": "function"}])),
        with("tool_choice", json!("required")),
    ];
    let body = bodies[random.random_range(0..bodies.len())].clone();
    let mut request = request("wrong", "chat/completions", body);
    request.expect = Expect::Refusal;
    request
}
