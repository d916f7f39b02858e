//! In which order are the keys of a tool?
//!
//! A definition's keys follow Chat Completions (`type`, `function`; `name`, `description`,
//! `parameters`). A schema's keywords follow what most clients send, so that most have nothing to
//! change: what the schema is, then what bounds it by name, then its description and its parts.
//! Properties follow `required`, which is a list and so means its order; the others come behind
//! them by name. A strict schema requires all of its properties, so that its order stays its own:
//! models write arguments in it. Members that say nothing are left out. Values (`enum`, `const`, `default`, `examples`) are no schemas and
//! stay.

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::Options;
use super::messages::unmark;

/// From so many required properties on, a table costs less than looking through the list.
const TABLE_MIN: usize = 16;

/// Gives tools their one spelling; whether anything changed.
pub(super) fn normalise(tools: &mut Value, options: Options) -> bool {
    let mut changed = false;
    let tools = tools.as_array_mut().into_iter().flatten();
    for tool in tools.filter_map(Value::as_object_mut) {
        changed |= options.cache_marks && unmark(tool);
        if let Some(function) = tool.get_mut("function").and_then(Value::as_object_mut) {
            changed |= options.cache_marks && unmark(function);
            if options.schema_order {
                changed |= without_defaults(function);
                if let Some(parameters) = function.get_mut("parameters") {
                    changed |= order_schema(parameters);
                }
                changed |= sort(function, &|name| match name {
                    "name" => 0,
                    "description" => 1,
                    "parameters" => 2,
                    _ => 3,
                });
            }
        }
        if options.schema_order {
            changed |= sort(tool, &|name| match name {
                "type" => 0,
                "function" => 1,
                _ => 2,
            });
        }
    }
    changed
}

/// Leaves out what says no more than its absence: null, and `strict: false`, which SDKs of some
/// dialects add by themselves.
fn without_defaults(function: &mut Map<String, Value>) -> bool {
    let says =
        |name: &str, value: &Value| !value.is_null() && (name != "strict" || *value != false);
    if function.iter().all(|(name, value)| says(name, value)) {
        return false;
    }
    function.retain(|name, value| says(name, value));
    true
}

/// Where a keyword stands among others; equal ones go by name.
fn keyword_rank(name: &str) -> usize {
    match name {
        "$schema" => 0,
        "$id" => 1,
        "$ref" => 2,
        "title" => 3,
        "type" => 4,
        "description" => 6,
        "properties" => 7,
        "items" => 8,
        "required" => 9,
        "additionalProperties" => 10,
        "$defs" | "definitions" => 11,
        _ => 5,
    }
}

/// Orders a schema and those inside it. They are as deep as JSON may be (128).
fn order_schema(schema: &mut Value) -> bool {
    let Some(schema) = schema.as_object_mut() else {
        return false;
    };
    let mut changed = false;
    for (keyword, value) in schema.iter_mut() {
        match keyword.as_str() {
            "properties" => changed |= order_each(value),
            "patternProperties" | "$defs" | "definitions" | "dependentSchemas" => {
                changed |= order_each(value);
                if let Some(named) = value.as_object_mut() {
                    changed |= sort(named, &|_| 0);
                }
            }
            "items"
            | "prefixItems"
            | "additionalItems"
            | "contains"
            | "anyOf"
            | "oneOf"
            | "allOf"
            | "not"
            | "if"
            | "then"
            | "else"
            | "additionalProperties"
            | "unevaluatedProperties"
            | "unevaluatedItems"
            | "propertyNames" => match value.as_array_mut() {
                Some(list) => list
                    .iter_mut()
                    .for_each(|item| changed |= order_schema(item)),
                None => changed |= order_schema(value),
            },
            _ => {}
        }
    }
    changed |= order_properties(schema);
    changed | sort(schema, &keyword_rank)
}

/// Orders each schema of an object of them.
fn order_each(named: &mut Value) -> bool {
    let mut changed = false;
    for schema in named.as_object_mut().into_iter().flat_map(Map::values_mut) {
        changed |= order_schema(schema);
    }
    changed
}

/// Puts the required properties first, in the order of `required`.
fn order_properties(schema: &mut Map<String, Value>) -> bool {
    let Some(properties) = schema
        .get_mut("properties")
        .filter(|value| value.is_object())
    else {
        return false;
    };
    // Taken out, so that `required` can be read beside it.
    let mut taken = properties.take();
    let required = schema.get("required").and_then(Value::as_array);
    let required = required.map(Vec::as_slice).unwrap_or_default();
    let changed = taken.as_object_mut().is_some_and(|properties| {
        if required.len() < TABLE_MIN {
            return sort(properties, &|name| {
                let at = required.iter().position(|required| required == name);
                at.unwrap_or(required.len())
            });
        }
        let mut table: HashMap<&str, usize> = HashMap::with_capacity(required.len());
        for (at, name) in required.iter().filter_map(Value::as_str).enumerate() {
            table.entry(name).or_insert(at);
        }
        sort(properties, &|name| {
            table.get(name).copied().unwrap_or(required.len())
        })
    });
    if let Some(properties) = schema.get_mut("properties") {
        *properties = taken;
    }
    changed
}

/// Orders keys by rank and name; whether they were in another order.
fn sort(map: &mut Map<String, Value>, rank: &dyn Fn(&str) -> usize) -> bool {
    if map.keys().map(|name| (rank(name), name)).is_sorted() {
        return false;
    }
    let mut entries: Vec<(usize, String, Value)> = std::mem::take(map)
        .into_iter()
        .map(|(name, value)| (rank(&name), name, value))
        .collect();
    entries.sort_unstable_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
    map.extend(entries.into_iter().map(|(_, name, value)| (name, value)));
    true
}
