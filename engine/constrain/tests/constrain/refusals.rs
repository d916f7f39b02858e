//! What is refused, how quickly, and does the reason say what to change?

use std::time::{Duration, Instant};

use constrain::{CallCount, Calls, Spec, Tool};
use serde_json::{Value, json};

use crate::vocabulary::compiler;

/// A refusal takes less than this, even on a busy machine; a fifth of it is usual.
const SOON: Duration = Duration::from_secs(1);

fn refused(spec: &Spec, reason: &str) {
    let started = Instant::now();
    let outcome = compiler().compile(spec, None);
    let took = started.elapsed();
    let name: String = format!("{spec:?}").chars().take(300).collect();
    let Err(refused) = outcome else {
        panic!("taken: {name}");
    };
    assert!(took < SOON, "{took:?} for {name}");
    let message = refused.to_string();
    assert!(
        message.contains(reason),
        "{message:?} lacks {reason:?}: {name}"
    );
    assert!(message.len() < 600, "{message:?}");
}

/// Refused or taken, whichever, but soon.
fn bounded(spec: &Spec) {
    let compiler = compiler();
    let started = Instant::now();
    let _ = compiler.compile(spec, None);
    let took = started.elapsed();
    let name: String = format!("{spec:?}").chars().take(300).collect();
    assert!(took < SOON, "{took:?} for {name}");
}

/// Would catch a schema that nothing satisfies and that is taken, to fail in the middle of an
/// answer.
#[test]
fn unsatisfiable_schemas_are_refused() {
    for (schema, reason) in [
        (json!(false), "false"),
        (json!({"enum": []}), "enum is empty"),
        // Not unsatisfiable, but answers would differ from them.
        (json!({"const": "a\u{1b}b"}), "control character"),
        (json!({"enum": [["\u{7f}"]]}), "control character"),
        (
            json!({"type": "string", "pattern": "^[\\x00-\\x1f]{3}$"}),
            "control characters",
        ),
        (
            json!({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}),
            "exclusive bound",
        ),
        (
            json!({"type": "integer", "minimum": 5, "maximum": 4}),
            "minimum",
        ),
        (
            json!({"type": "string", "minLength": 5, "maxLength": 4}),
            "minLength",
        ),
        (
            json!({"type": "array", "minItems": 3, "maxItems": 2}),
            "minItems",
        ),
        (
            json!({"type": "array", "items": false, "minItems": 1}),
            "unsatisfiable",
        ),
        (
            json!({"allOf": [{"type": "string"}, {"type": "integer"}]}),
            "incompatible types",
        ),
        (
            json!({"type": "object", "properties": {"a": false}, "required": ["a"]}),
            "'a'",
        ),
        (json!({"type": "string", "enum": [1, 2]}), "nsatisfiable"),
        // Every instance holds another one, for ever.
        (
            json!({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties":
                {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}}}),
            "no answer satisfies",
        ),
    ] {
        refused(&Spec::JsonSchema(schema), reason);
    }
}

/// Would catch a vague reason: the client has to know what to change.
#[test]
fn what_is_no_schema_or_not_supported_is_named() {
    for (schema, reason) in [
        (json!("string"), "not a string"),
        (json!({"type": "strin"}), "strin"),
        (json!({"type": 5}), "type must be"),
        (json!({"properties": []}), "properties must be an object"),
        (json!({"type": "array", "uniqueItems": true}), "uniqueItems"),
        (json!({"not": {"type": "string"}}), "not"),
        (json!({"if": true, "then": false}), "if"),
        (
            json!({"$ref": "https://example.com/x.json"}),
            "leads out of the schema",
        ),
        (json!({"$ref": "#/$defs/none"}), "none"),
        (json!({"type": "string", "pattern": "("}), "unclosed group"),
        (json!({"type": "string", "minLength": -1}), "minLength"),
        (
            json!({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}),
            "oneOf",
        ),
    ] {
        refused(&Spec::JsonSchema(schema), reason);
    }
    refused(&Spec::Regex("(".into()), "unclosed group");
    refused(&Spec::Lark("start: nowhere".into()), "nowhere");
    refused(&Spec::Lark(String::new()), "empty");
    refused(
        &Spec::Lark("start: A\nA[max_tokens=3]: /a+/".into()),
        "max_tokens",
    );
    refused(&Spec::Choice(Vec::new()), "no text");
}

fn nested(depth: usize, inner: Value) -> Value {
    (0..depth).fold(
        inner,
        |inner, _| json!({"type": "object", "properties": {"a": inner}, "required": ["a"]}),
    )
}

fn properties(count: usize) -> Value {
    let properties: serde_json::Map<String, Value> = (0..count)
        .map(|i| (format!("property_{i}"), json!({"type": "string"})))
        .collect();
    json!({"type": "object", "properties": properties})
}

/// Would catch a schema that keeps the engine busy, or takes its memory.
#[test]
fn exploding_schemas_are_refused_soon() {
    let huge_enum: Vec<String> = (0..100_000).map(|i| format!("value {i}")).collect();
    let mut doubling = json!({"type": "string"});
    for _ in 0..12 {
        doubling = json!({"anyOf": [doubling, {"type": "array", "items": doubling}]});
    }
    for (schema, reason) in [
        (nested(400, json!({})), "nests deeper"),
        (nested(60, json!({})), "nests deeper"),
        (properties(5000), "properties"),
        (properties(100_000), "larger than"),
        (
            json!({"type": "array", "minItems": 1_000_000_000}),
            "minItems",
        ),
        (
            json!({"type": "string", "minLength": 1_000_000_000}),
            "minLength",
        ),
        (json!({"enum": huge_enum}), ""),
        (doubling, "more than"),
    ] {
        refused(&Spec::JsonSchema(schema), reason);
    }
}

/// Would catch patterns that are cheap one by one and take seconds together.
#[test]
fn many_patterns_are_bounded_together() {
    let options: Vec<_> = (1..1000)
        .map(|i| {
            let name = format!("p_{i}");
            let pattern = format!("^[a-z]{{{i}}}$");
            json!({"type": "object", "properties": {name.clone(): {"type": "string", "pattern": pattern}},
                "required": [name], "additionalProperties": false})
        })
        .collect();
    refused(
        &Spec::JsonSchema(json!({"anyOf": options})),
        "repetitions written out",
    );
}

/// Would catch work that no limit bounds, whether the specification is taken or not.
#[test]
fn heavy_specifications_are_done_with_soon() {
    for schema in [
        nested(40, properties(10)),
        properties(512),
        json!({"type": "string", "pattern": "^(a?){50}a{50}$"}),
        json!({"type": "string", "pattern": "(x+x+)+y"}),
        json!({"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$", "minLength": 500}),
        json!({"type": "string", "pattern": ".*a.{18}$"}),
        json!({"type": "string", "pattern": "^[a-z]{1000}$", "maxLength": 1000}),
        json!({"type": "string", "maxLength": 100_000}),
        json!({"type": "string", "minLength": 4096}),
        json!({"type": "array", "minItems": 1000, "items": {"type": "integer"}}),
        json!({"type": "array", "maxItems": 100_000, "items": properties(20)}),
        json!({"type": "integer", "multipleOf": 7919, "minimum": 123_456_789}),
        json!({"type": "number", "multipleOf": 0.001, "minimum": 0.5, "maximum": 1e15}),
        json!({"allOf": (0..12).map(|i| json!({"pattern": format!("a{{{i}}}")})).collect::<Vec<_>>()}),
        json!({"patternProperties": {"^a.*b$": {"type": "string"}, "^c": {"type": "integer"}}}),
        json!({"enum": (0..4096).map(|i| format!("value {i}")).collect::<Vec<_>>()}),
        json!({"anyOf": (0..500).map(|i| json!({"type": "object", "properties":
            {"kind": {"const": i}}, "required": ["kind"]})).collect::<Vec<_>>()}),
    ] {
        bounded(&Spec::JsonSchema(schema));
    }
    for regex in [
        "(?s:.{0,100000})",
        "(((a{100}){100}){100}){100}",
        "(.*a){30}",
        "[a-z]{5000}",
        ".*.*.*.*.*.*.*=.*",
    ] {
        bounded(&Spec::Regex(regex.into()));
    }
    for lark in [
        "start: a\na: a a | \"x\"",
        "start: a*\na: a? \"x\"?",
        "start: /(.*a){20}/ start | \"y\"",
    ] {
        bounded(&Spec::Lark(lark.into()));
    }
}

/// Would catch a refusal of tools that does not say which one.
#[test]
fn a_refused_tool_is_named() {
    let good = Tool {
        name: "good".into(),
        parameters: json!({"type": "object"}),
    };
    let bad = Tool {
        name: "bad".into(),
        parameters: json!({"type": "string"}),
    };
    let calls = |tools: Vec<Tool>| {
        Spec::Calls(Calls {
            form: answer::CallForm::of(answer::ToolFormat::Hermes),
            tools,
            most: CallCount::One,
        })
    };
    refused(&calls(vec![good.clone(), bad.clone()]), "'bad'");
    refused(&calls(Vec::new()), "no tool");
    refused(&calls(vec![good; 200]), "128");
    let refusal = compiler().compile(&calls(vec![bad]), None).err();
    assert_eq!(refusal.and_then(|refused| refused.tool), Some(0));
}
