//! Is this a JSON schema that a grammar can be made of, at a bounded cost?
//!
//! The grammar library reads most of JSON Schema and refuses by name what it cannot enforce. This
//! pass comes first. It bounds what it would let explode, turns what only looks unsupported into
//! what is supported (a `oneOf` of references, a format that is only a note), and takes out the
//! options that the library would read from a schema.

use serde_json::{Map, Value, json};

use crate::error::Refused;
use crate::limits;
use crate::worst;

macro_rules! date {
    () => {
        concat!(
            r"[1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])",
            r"|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
        )
    };
}
macro_rules! time {
    () => {
        concat!(
            r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?",
            r"(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
        )
    };
}

/// Formats that are enforced as the grammar library knows them. Others are notes for readers, as
/// JSON Schema has it.
const FORMATS: &[&str] = &["duration", "ipv4", "ipv6", "uuid", "uri"];

/// Formats whose expression in the library also takes what validators refuse: a 29th of February in
/// any year, a 60th second in any minute, names without an end. A little less than the format is
/// taken here, and all of it is valid.
const PATTERNS: &[(&str, &str)] = &[
    ("date", concat!("^", date!(), "$")),
    ("time", concat!("^", time!(), "$")),
    ("date-time", concat!("^", date!(), "T", time!(), "$")),
    (
        "email",
        concat!(
            r"^[A-Za-z0-9_+-]{1,32}(\.[A-Za-z0-9_+-]{1,15}){0,2}",
            r"@[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?(\.[a-z]{2,12}){1,3}$"
        ),
    ),
    (
        "hostname",
        r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?){0,4}$",
    ),
];

/// Numbers without a bound get this one, on both sides: it keeps a small model from writing digits
/// without end, and what it leaves out no 64-bit number holds exactly anyway.
const NUMBER_MAX: f64 = 1e18;

/// Keywords whose value is one subschema, a list of them, or a map to them.
const ONE: &[&str] = &["items", "additionalItems", "additionalProperties"];
const LISTS: &[&str] = &["anyOf", "oneOf", "allOf", "prefixItems", "items"];
const MAPS: &[&str] = &["properties", "patternProperties", "$defs", "definitions"];

/// A schema as the grammar library should see it.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) schema: Value,
    /// Bytes that any text of it may still need once begun, at most; none where that is not known.
    pub(crate) worst: Option<u32>,
    /// Characters of its patterns, their repetitions written out.
    pub(crate) written_out: u64,
}

/// What the texts of no schema need more of: numbers, and those with a format.
const WORST: u32 = 64;

/// Checks a schema and makes it ready.
pub(crate) fn prepare(schema: &Value, place: &str) -> Result<Prepared, Refused> {
    let mut pass = Pass {
        root: schema,
        place,
        subschemas: 0,
        worst: Some(WORST),
        patterns: false,
        written_out: 0,
        intersections: false,
    };
    let schema = pass.subschema(schema, 0)?;
    // Where expressions have to hold together, the worst is none of theirs.
    let known = !(pass.patterns && pass.intersections);
    Ok(Prepared {
        schema,
        written_out: pass.written_out,
        worst: pass.worst.filter(|_| known),
    })
}

/// The schema of a tool's arguments, which are always an object. Absent parameters take any.
pub(crate) fn arguments(schema: &Value, place: &str) -> Result<Prepared, Refused> {
    let object = match schema {
        Value::Null | Value::Bool(true) => return prepare(&json!({"type": "object"}), place),
        Value::Object(object) => object,
        _ => {
            return Err(Refused::new(format!(
                "{place}: a JSON schema is an object, not {}",
                kind(schema)
            )));
        }
    };
    match object.get("type") {
        Some(Value::String(name)) if name == "object" => prepare(schema, place),
        None if !object.contains_key("$ref") => {
            let mut typed = object.clone();
            typed.insert("type".to_owned(), json!("object"));
            prepare(&Value::Object(typed), place)
        }
        None => prepare(schema, place),
        Some(other) => Err(Refused::new(format!(
            "{place}: arguments are an object, so its \"type\" must be \"object\", not {other}"
        ))),
    }
}

struct Pass<'a> {
    root: &'a Value,
    place: &'a str,
    subschemas: usize,
    worst: Option<u32>,
    patterns: bool,
    written_out: u64,
    intersections: bool,
}

impl Pass<'_> {
    fn refuse<T>(&self, why: &str) -> Result<T, Refused> {
        Err(Refused::new(format!("{}: {why}", self.place)))
    }

    fn subschema(&mut self, schema: &Value, depth: usize) -> Result<Value, Refused> {
        self.subschemas += 1;
        if self.subschemas > limits::SUBSCHEMAS_MAX {
            return self.refuse(&format!(
                "it holds more than {} subschemas",
                limits::SUBSCHEMAS_MAX
            ));
        }
        if depth > limits::SCHEMA_DEPTH_MAX {
            return self.refuse(&format!(
                "it nests deeper than {} levels; flatten it or use $ref",
                limits::SCHEMA_DEPTH_MAX
            ));
        }
        let object = match schema {
            Value::Bool(_) => return Ok(schema.clone()),
            Value::Object(object) => object,
            _ => {
                return self.refuse(&format!(
                    "a JSON schema is an object or a boolean, not {}",
                    kind(schema)
                ));
            }
        };
        let mut out = Map::new();
        for (key, value) in object {
            if key == "x-guidance" {
                continue;
            }
            out.insert(key.clone(), self.keyword(key, value, depth)?);
        }
        self.write_format(&mut out);
        if is_narrow(&out) {
            return self.refuse(
                "an exclusive bound that is a whole number lies less than 1 from the other bound, \
                 which is not supported; use minimum and maximum",
            );
        }
        bound_numbers(&mut out);
        Ok(Value::Object(out))
    }

    /// Replaces a format by its pattern.
    fn write_format(&mut self, schema: &mut Map<String, Value>) {
        let Some(name) = schema.get("format").and_then(Value::as_str) else {
            return;
        };
        let known = PATTERNS.iter().find(|(format, _)| *format == name);
        match known {
            Some((_, pattern)) if !schema.contains_key("pattern") => {
                schema.remove("format");
                self.note("pattern", &json!(pattern));
                schema.insert("pattern".to_owned(), json!(pattern));
            }
            None if !FORMATS.contains(&name) => {
                schema.remove("format");
            }
            _ => {}
        }
    }

    /// The value that a keyword gets.
    fn keyword(&mut self, key: &str, value: &Value, depth: usize) -> Result<Value, Refused> {
        self.bounds(key, value)?;
        self.note(key, value);
        Ok(match value {
            Value::Object(map) if MAPS.contains(&key) => {
                if key == "properties" && map.len() > limits::PROPERTIES_MAX {
                    return self.refuse(&format!(
                        "an object has {} properties; at most {} are taken",
                        map.len(),
                        limits::PROPERTIES_MAX
                    ));
                }
                let mut out = Map::new();
                for (name, inner) in map {
                    out.insert(name.clone(), self.subschema(inner, depth + 1)?);
                }
                Value::Object(out)
            }
            Value::Array(list) if LISTS.contains(&key) => {
                let mut out = Vec::with_capacity(list.len());
                for inner in list {
                    let inner = if key == "oneOf" {
                        resolved(self.root, inner)
                    } else {
                        inner
                    };
                    out.push(self.subschema(inner, depth + 1)?);
                }
                Value::Array(out)
            }
            _ if ONE.contains(&key) => self.subschema(value, depth + 1)?,
            other => other.clone(),
        })
    }

    /// Takes note of how long texts may be that this keyword asks for.
    fn note(&mut self, key: &str, value: &Value) {
        let text = match (key, value) {
            ("pattern", Value::String(regex)) => {
                self.patterns = true;
                let length = worst::written_out(regex).unwrap_or(0);
                self.written_out = self.written_out.saturating_add(length);
                worst::of_regex(regex).map(worst::of_json_string)
            }
            ("patternProperties", Value::Object(map)) => {
                self.patterns = true;
                let mut all = map.keys().map(|regex| worst::of_regex(regex));
                all.try_fold(0, |most, one| one.map(|one| most.max(one)))
                    .map(worst::of_json_string)
            }
            ("format", _) => {
                self.patterns = true;
                Some(WORST)
            }
            ("properties", Value::Object(map)) => {
                let longest = map.keys().map(|name| bytes(&json!(name))).max();
                Some(longest.unwrap_or(0) + 8)
            }
            ("enum", Value::Array(values)) => values.iter().map(bytes).max(),
            ("const", value) => Some(bytes(value)),
            ("minLength", value) => {
                self.intersections = true;
                let count = value.as_u64().and_then(|count| u32::try_from(count).ok());
                count.map(worst::of_json_string)
            }
            ("maxLength" | "allOf", _) => {
                self.intersections = true;
                Some(0)
            }
            ("multipleOf", _) => None,
            _ => Some(0),
        };
        self.worst = self.worst.zip(text).map(|(worst, text)| worst.max(text));
    }

    fn bounds(&self, key: &str, value: &Value) -> Result<(), Refused> {
        let most = match key {
            "minItems" | "minProperties" => limits::ITEMS_MIN_MAX,
            "minLength" => limits::LENGTH_MIN_MAX,
            "maxLength" | "maxItems" => limits::LENGTH_MAX_MAX,
            _ => u64::MAX,
        };
        if value.as_u64().is_some_and(|n| n > most) {
            return self.refuse(&format!("{key} is {value}; at most {most} is taken"));
        }
        match (key, value) {
            ("enum", Value::Array(values)) if values.is_empty() => {
                self.refuse("an enum is empty, so that no value is valid")
            }
            ("enum", Value::Array(values)) if values.len() > limits::ENUM_MAX => {
                self.refuse(&format!(
                    "an enum has {} values; at most {} are taken",
                    values.len(),
                    limits::ENUM_MAX
                ))
            }
            ("pattern", Value::String(regex)) if regex.len() > limits::REGEX_BYTES_MAX => self
                .refuse(&format!(
                    "a pattern is longer than {} bytes",
                    limits::REGEX_BYTES_MAX
                )),
            ("const" | "enum", value) if holds_control(value) => self.refuse(&format!(
                "{key} holds a control character other than \\n, \\r, \\t, \\b and \\f, which is not \
                 supported"
            )),
            ("pattern", Value::String(regex)) if names_control(regex) => self.refuse(
                "a pattern names control characters, which is not supported; leave them out of it",
            ),
            ("$ref", Value::String(target)) if !target.starts_with('#') => self.refuse(&format!(
                "$ref '{target}' leads out of the schema; only '#/…' is followed"
            )),
            _ => Ok(()),
        }
    }
}

/// Whether some text in a value needs an escape by number, which the grammar library drops.
fn holds_control(value: &Value) -> bool {
    match value {
        Value::String(text) => text.chars().any(is_numbered_control),
        Value::Array(values) => values.iter().any(holds_control),
        Value::Object(map) => map.values().any(holds_control),
        _ => false,
    }
}

fn is_numbered_control(c: char) -> bool {
    matches!(c, '\0'..='\u{1f}' | '\u{7f}') && !matches!(c, '\n' | '\r' | '\t' | '\u{8}' | '\u{c}')
}

/// Whether a pattern speaks of such characters, as themselves or by number.
fn names_control(regex: &str) -> bool {
    const BY_NUMBER: [&str; 10] = [
        r"\x0", r"\x1", r"\x7f", r"\u000", r"\u001", r"\u007f", r"\0", r"\c", r"\x{", r"\u{",
    ];
    let lower = regex.to_ascii_lowercase();
    regex.chars().any(is_numbered_control) || BY_NUMBER.iter().any(|name| lower.contains(name))
}

/// Whether the library would let an exclusive bound itself through: it does where that bound is a
/// whole number and both bounds lie within 1.
fn is_narrow(schema: &Map<String, Value>) -> bool {
    let number = |key: &str| schema.get(key).and_then(Value::as_f64);
    let (above, below) = (number("exclusiveMinimum"), number("exclusiveMaximum"));
    let least = above.or_else(|| number("minimum"));
    let most = below.or_else(|| number("maximum"));
    let whole = |bound: Option<f64>| bound.is_some_and(|bound| bound.fract() == 0.0);
    let within = least
        .zip(most)
        .is_some_and(|(least, most)| most - least < 1.0);
    let integers = schema.get("type").is_some_and(|name| name == "integer");
    !integers && within && (whole(above) || whole(below))
}

fn bound_numbers(schema: &mut Map<String, Value>) {
    let is_number = |name: &Value| name == "number" || name == "integer";
    let numeric = match schema.get("type") {
        Some(Value::Array(names)) => names.iter().any(is_number),
        Some(name) => is_number(name),
        None => false,
    };
    let elsewhere = ["enum", "const", "$ref", "allOf"];
    if !numeric || elsewhere.iter().any(|key| schema.contains_key(*key)) {
        return;
    }
    let bound = |schema: &Map<String, Value>, keys: [&str; 2]| {
        keys.iter()
            .filter_map(|key| schema.get(*key))
            .find_map(|value| value.as_f64())
    };
    let least = bound(schema, ["minimum", "exclusiveMinimum"]);
    let most = bound(schema, ["maximum", "exclusiveMaximum"]);
    if least.is_none() && most.is_none_or(|most| most > -NUMBER_MAX) {
        schema.insert("minimum".to_owned(), json!(-NUMBER_MAX));
    }
    if most.is_none() && least.is_none_or(|least| least < NUMBER_MAX) {
        schema.insert("maximum".to_owned(), json!(NUMBER_MAX));
    }
}

/// What a branch of a `oneOf` refers to. The library can tell branches apart only when it sees
/// them, and discriminated unions are mostly written with references.
fn resolved<'a>(root: &'a Value, branch: &'a Value) -> &'a Value {
    let target = branch
        .as_object()
        .and_then(|object| object.get("$ref"))
        .and_then(Value::as_str)
        .and_then(|target| target.strip_prefix('#'));
    target
        .and_then(|pointer| root.pointer(pointer))
        .unwrap_or(branch)
}

/// How long a value is as JSON.
fn bytes(value: &Value) -> u32 {
    u32::try_from(value.to_string().len()).unwrap_or(u32::MAX)
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}
