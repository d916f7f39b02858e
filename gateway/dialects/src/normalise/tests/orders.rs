//! Catches a tool whose spelling depends on the order in which a client's maps give their keys, an
//! order that costs a square of its size, and a spelling that is not the last.

use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use serde_json::{Map, Value, json};

use super::super::*;
use super::Shared;
use super::{LINE, prompt};

#[test]
fn tools_are_the_same_in_any_order_of_keys() {
    let tools = json!([{"type": "function", "function": {
        "name": "edit",
        "description": "Edits.",
        "parameters": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {
                "path": {"type": "string", "minLength": 1, "description": "Where"},
                "edits": {"type": "array", "description": "What", "items": {
                    "type": "object",
                    "properties": {
                        "old": {"type": "string"},
                        "all": {"anyOf": [{"type": "boolean", "default": false}, {"type": "null"}]},
                        "new": {"type": "string"},
                    },
                    "required": ["old", "all", "new"],
                    "additionalProperties": false,
                }},
                "mode": {"type": "string", "enum": ["b", "a"], "description": "How"},
                "type": {"$ref": "#/$defs/kind"},
            },
            "required": ["path", "edits"],
            "additionalProperties": false,
            "$defs": {"kind": {"default": {"z": 1, "a": 2}}, "other": {}},
        },
        "strict": true,
    }}]);
    let mut expected = prompt(json!([]), Some(tools.clone()));
    assert!(
        !normalise(&mut expected, Options::default()).any(),
        "already in order"
    );
    let mut random = StdRng::seed_from_u64(7);
    for _ in 0..200 {
        let mut given = prompt(json!([]), Some(shuffled(&tools, &mut random)));
        let sent = given.tools.as_deref().map(Value::to_string);
        let changed = normalise(&mut given, Options::default());
        let now = given.tools.as_deref().map(Value::to_string);
        assert_eq!(changed.tools, sent != now);
        assert_eq!(now, Some(tools.to_string()));
        let mut kept = prompt(json!([]), Some(shuffled(&tools, &mut random)));
        let off = Options {
            schema_order: false,
            ..Options::default()
        };
        assert!(!normalise(&mut kept, off).any());
    }
}

#[test]
fn members_that_say_nothing_are_left_out() {
    let of = |function: Value| {
        let tools = json!([{"type": "function", "function": function}]);
        let mut given = prompt(json!([]), Some(tools));
        let changed = normalise(&mut given, Options::default()).tools;
        (
            given.tools.expect("tools")[0]["function"].to_string(),
            changed,
        )
    };
    let plain = json!({"name": "f"});
    let strict = json!({"name": "f", "strict": true});
    for (function, expected) in [
        (json!({"name": "f", "strict": false}), &plain),
        (
            json!({"name": "f", "description": null, "strict": null}),
            &plain,
        ),
    ] {
        assert_eq!(of(function), (expected.to_string(), true));
    }
    assert_eq!(of(strict.clone()), (strict.to_string(), false));
}

/// The same value with its objects' keys in another order; what is no schema keeps its own.
fn shuffled(value: &Value, random: &mut StdRng) -> Value {
    match value {
        Value::Array(items) => items.iter().map(|item| shuffled(item, random)).collect(),
        Value::Object(fields) => {
            let mut entries: Vec<(String, Value)> = fields
                .iter()
                .map(|(name, field)| match name.as_str() {
                    "default" => (name.clone(), field.clone()),
                    _ => (name.clone(), shuffled(field, random)),
                })
                .collect();
            entries.shuffle(random);
            Value::Object(entries.into_iter().collect())
        }
        other => other.clone(),
    }
}

#[test]
fn many_required_properties_cost_no_square() {
    let names: Vec<String> = (0..20_000).map(|at| format!("p{at}")).collect();
    let properties: Map<String, Value> = names
        .iter()
        .rev()
        .map(|name| (name.clone(), json!({})))
        .collect();
    let tool = json!([{"type": "function", "function": {"name": "f", "parameters":
        {"type": "object", "properties": properties, "required": names}}}]);
    let mut given = prompt(json!([]), Some(tool));
    assert!(normalise(&mut given, Options::default()).tools);
    let ordered = given.tools.as_ref().expect("tools")[0]["function"]["parameters"]["properties"]
        .as_object()
        .expect("an object")
        .keys();
    assert!(ordered.eq(&names));
}

#[test]
fn any_prompt_is_normalised_once() {
    bolero::check!().with_type::<u64>().for_each(|seed| {
        let mut random = StdRng::seed_from_u64(*seed);
        let list = |random: &mut StdRng| -> Vec<Value> {
            (0..random.random_range(0..4))
                .map(|_| any(random, 4))
                .collect()
        };
        let messages = list(&mut random);
        let tools = Some(Value::Array(list(&mut random)));
        let mut given = ChatPrompt {
            messages: messages.into_iter().map(Shared::from).collect(),
            tools: tools.map(Shared::from),
            template_kwargs: None,
        };
        normalise(
            &mut given,
            Options {
                billing_line: false,
                ..Options::default()
            },
        );
        let once = given.clone();
        let again = normalise(&mut given, Options::default());
        assert!(!again.tools);
        // A second system message may begin like the first.
        assert!(!again.messages || given.messages != once.messages);
    });
}

/// Any value, of the words that the spellings know.
fn any(random: &mut StdRng, depth: u32) -> Value {
    const NAMES: &[&str] = &[
        "role",
        "content",
        "type",
        "text",
        "tool_calls",
        "function",
        "function_call",
        "arguments",
        "cache_control",
        "prompt_cache_breakpoint",
        "parameters",
        "properties",
        "required",
        "items",
        "anyOf",
        "$defs",
        "default",
        "name",
    ];
    const TEXTS: &[&str] = &[
        "system",
        "assistant",
        "text",
        "{ }",
        "{\"a\": \"\\u00e4\"}",
        "{\"",
        "name",
        "\n",
        LINE,
    ];
    match random.random_range(0..if depth == 0 { 3 } else { 8 }) {
        0 => json!(null),
        1 | 2 => json!(TEXTS[random.random_range(0..TEXTS.len())]),
        3 => (0..random.random_range(0..3))
            .map(|_| any(random, depth - 1))
            .collect(),
        _ => Value::Object(
            (0..random.random_range(0..6))
                .map(|_| {
                    let name = NAMES[random.random_range(0..NAMES.len())];
                    (name.to_owned(), any(random, depth - 1))
                })
                .collect(),
        ),
    }
}
