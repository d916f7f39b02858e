//! Does any specification, however broken, end in a grammar or a refusal, and soon?
//!
//! `cargo test` runs it for a bounded time; `cargo bolero test any_specification` fuzzes it.

#[path = "constrain/vocabulary.rs"]
#[expect(dead_code, reason = "the other tests use the rest of it")]
mod vocabulary;

use std::sync::LazyLock;
use std::time::Duration;

use constrain::{Compiler, Spec};
use serde_json::Value;

/// What `cargo test` spends on a target.
const TEST_TIME: Duration = Duration::from_secs(2);

static COMPILER: LazyLock<Compiler> = LazyLock::new(vocabulary::compiler);

/// Pieces that schemas, expressions and grammars are put together from.
const PIECES: &[&str] = &[
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    "\"type\"",
    "\"object\"",
    "\"string\"",
    "\"array\"",
    "\"integer\"",
    "\"properties\"",
    "\"required\"",
    "\"items\"",
    "\"enum\"",
    "\"const\"",
    "\"anyOf\"",
    "\"oneOf\"",
    "\"allOf\"",
    "\"$ref\"",
    "\"#\"",
    "\"#/$defs/a\"",
    "\"$defs\"",
    "\"a\"",
    "\"pattern\"",
    "\"minLength\"",
    "\"minItems\"",
    "\"maximum\"",
    "\"multipleOf\"",
    "\"additionalProperties\"",
    "\"patternProperties\"",
    "\"format\"",
    "\"date\"",
    "true",
    "false",
    "null",
    "0",
    "-1",
    "3",
    "1e999",
    "1e400",
    "start",
    ": ",
    "\n",
    "|",
    "(",
    ")",
    "*",
    "+",
    "?",
    "{2,9}",
    "/a/",
    "/[a-z]+/",
    "%ignore",
    "%json",
    "@",
    "A",
    "b",
    "\\",
    "é",
    "\u{0}",
    " ",
];

fn put_together(bytes: &[u8]) -> String {
    bytes
        .iter()
        .map(|byte| PIECES[usize::from(*byte) % PIECES.len()])
        .collect()
}

/// A compile, and a few steps where it gives a grammar.
fn try_out(spec: &Spec) {
    let Ok(compiled) = COMPILER.compile(spec, None) else {
        return;
    };
    let mut constraint = compiled.start();
    for left in (0..compiled.shortest_tokens().min(8) + 4).rev() {
        match constraint.completion(left) {
            Ok(None) => {}
            Ok(Some(_)) | Err(_) => return,
        }
        let Ok(mask) = constraint.mask() else { return };
        let next = (0..vocabulary::size()).find(|token| mask.allows(*token));
        let Some(next) = next else { return };
        if constraint.commit(next).is_err() || constraint.is_over() {
            return;
        }
    }
}

#[test]
fn any_specification() {
    bolero::check!()
        .with_test_time(TEST_TIME)
        .with_type::<(u8, Vec<u8>)>()
        .for_each(|(kind, bytes)| {
            let text = if kind & 4 == 0 {
                put_together(bytes)
            } else {
                String::from_utf8_lossy(bytes).into_owned()
            };
            let spec = match kind & 3 {
                0 => Spec::Regex(text),
                1 => Spec::Lark(text),
                _ => match serde_json::from_str::<Value>(&text) {
                    Ok(schema) => Spec::JsonSchema(schema),
                    Err(_) => Spec::Choice(vec![text]),
                },
            };
            try_out(&spec);
        });
}

/// Schemas that are JSON to begin with, so that more than the JSON reader is tried.
#[test]
fn any_schema() {
    bolero::check!()
        .with_test_time(TEST_TIME)
        .with_type::<Vec<u8>>()
        .for_each(|bytes| {
            let mut bytes = bytes.iter().copied();
            let schema = value(&mut bytes, 0);
            try_out(&Spec::JsonSchema(schema));
        });
}

/// A schema from bytes: each byte chooses a keyword or a value.
fn value(bytes: &mut impl Iterator<Item = u8>, depth: usize) -> Value {
    const KEYS: &[&str] = &[
        "type",
        "properties",
        "required",
        "items",
        "enum",
        "const",
        "anyOf",
        "oneOf",
        "allOf",
        "$ref",
        "$defs",
        "pattern",
        "minLength",
        "maxLength",
        "minItems",
        "maxItems",
        "minimum",
        "maximum",
        "multipleOf",
        "additionalProperties",
        "prefixItems",
        "format",
        "not",
        "a",
        "b",
    ];
    const TEXTS: &[&str] = &[
        "object",
        "array",
        "string",
        "integer",
        "number",
        "null",
        "#",
        "#/$defs/a",
        "#/$defs/b",
        "date",
        "email",
        "^a+$",
        "(",
        "[a-z]{3}",
        "a",
    ];
    let byte = bytes.next().unwrap_or(0);
    let count = usize::from(byte >> 4) % 5;
    match byte % 8 {
        0..4 if depth < 6 => {
            let mut object = serde_json::Map::new();
            for _ in 0..count {
                let key = KEYS[usize::from(bytes.next().unwrap_or(0)) % KEYS.len()];
                object.insert(key.to_owned(), value(bytes, depth + 1));
            }
            Value::Object(object)
        }
        4 if depth < 6 => (0..count).map(|_| value(bytes, depth + 1)).collect(),
        5 => Value::from(TEXTS[usize::from(byte) / 8 % TEXTS.len()]),
        6 => Value::from(i64::from(byte) - 100),
        7 => Value::from(byte & 8 == 0),
        _ => Value::from(TEXTS[usize::from(byte >> 3) % TEXTS.len()]),
    }
}
