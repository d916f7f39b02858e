//! Is this a JSON schema that a grammar can be made of, at a bounded cost?
//!
//! The grammar library reads most of JSON Schema and refuses by name what it cannot enforce. This
//! pass comes first. It bounds what it would let explode, turns what only looks unsupported into
//! what is supported (a `oneOf` of references, a format that is only a note), and takes out the
//! options that the library would read from a schema.

use serde_json::{Map, Value, json};

use crate::error::Refused;
use crate::limits;

/// Formats that are enforced. Others are notes for readers, as JSON Schema has it.
const FORMATS: &[&str] = &[
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
];

/// Keywords whose value is one subschema, a list of them, or a map to them.
const ONE: &[&str] = &["items", "additionalItems", "additionalProperties"];
const LISTS: &[&str] = &["anyOf", "oneOf", "allOf", "prefixItems", "items"];
const MAPS: &[&str] = &["properties", "patternProperties", "$defs", "definitions"];

/// The schema as the grammar library should see it.
pub(crate) fn prepare(schema: &Value, place: &str) -> Result<Value, Refused> {
    let mut pass = Pass {
        root: schema,
        place,
        subschemas: 0,
    };
    pass.subschema(schema, 0)
}

/// The schema of a tool's arguments, which are always an object. Absent parameters take any.
pub(crate) fn arguments(schema: &Value, place: &str) -> Result<Value, Refused> {
    let object = match schema {
        Value::Null => return Ok(json!({"type": "object"})),
        Value::Bool(true) => return Ok(json!({"type": "object"})),
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
            if let Some(value) = self.keyword(key, value, depth)? {
                out.insert(key.clone(), value);
            }
        }
        Ok(Value::Object(out))
    }

    /// The value that a keyword gets; none where it is dropped.
    fn keyword(
        &mut self,
        key: &str,
        value: &Value,
        depth: usize,
    ) -> Result<Option<Value>, Refused> {
        self.bounds(key, value)?;
        let value = match value {
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
            Value::String(name) if key == "format" && !FORMATS.contains(&name.as_str()) => {
                return Ok(None);
            }
            other => other.clone(),
        };
        Ok(Some(value))
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
            ("$ref", Value::String(target)) if !target.starts_with('#') => self.refuse(&format!(
                "$ref '{target}' leads out of the schema; only '#/…' is followed"
            )),
            _ => Ok(()),
        }
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
