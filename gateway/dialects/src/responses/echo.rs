//! What does a response object say of the request?
//!
//! The API repeats nearly every field of the request, with its defaults filled in, in every form of
//! the response. The text is made once for a request: 40 KB of tools are copied three times in a
//! stream, and not serialised three times.

use memchr::memchr2;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::params::{Params, default_text};
use crate::Fields;
use crate::answer::Continues;

/// Members of the response object, each with a comma behind or before it.
pub(super) struct Echo {
    /// Before `output`.
    pub(super) head: String,
    /// Behind it.
    pub(super) tail: String,
}

/// The request's fields as the response shows them.
pub(super) fn echo(fields: &Fields<'_>, top: &Map<String, Value>, params: &Params) -> Echo {
    let or = |name: &str, default: Value| match top.get(name) {
        Some(value) => value.to_string(),
        None => default.to_string(),
    };
    let raw = |name: &str, default: &str| match fields.get(name).map(RawValue::get) {
        // Nothing but white space between values can hold these, and they would end an event.
        Some(raw) if memchr2(b'\n', b'\r', raw.as_bytes()).is_some() => {
            raw.replace(['\n', '\r'], " ")
        }
        raw => raw.unwrap_or(default).to_owned(),
    };
    let null = Value::Null;
    let conversation = match &params.continues {
        Some(Continues::Conversation(id)) => format!("\"conversation\":{},", json!({"id": id})),
        Some(Continues::Response(_)) | None => String::new(),
    };
    let head = format!(
        "{conversation}\"instructions\":{},\"max_output_tokens\":{},\"max_tool_calls\":{},\"model\":{},",
        or("instructions", null.clone()),
        or("max_output_tokens", null.clone()),
        or("max_tool_calls", null.clone()),
        json!(params.model),
    );
    let mut tail = String::with_capacity(512);
    let mut add = |name: &str, value: &str| {
        tail.push_str(",\"");
        tail.push_str(name);
        tail.push_str("\":");
        tail.push_str(value);
    };
    add(
        "parallel_tool_calls",
        &or("parallel_tool_calls", true.into()),
    );
    for name in [
        "previous_response_id",
        "prompt_cache_key",
        "prompt_cache_retention",
    ] {
        add(name, &or(name, null.clone()));
    }
    if let Some(options) = top.get("prompt_cache_options") {
        add("prompt_cache_options", &options.to_string());
    }
    add("reasoning", &reasoning(top).to_string());
    add("safety_identifier", &or("safety_identifier", null.clone()));
    // What was served, whatever was asked for: there is one tier.
    add("service_tier", "\"default\"");
    add("store", &json!(params.stores).to_string());
    add("temperature", &or("temperature", json!(1.0)));
    add("text", &text(top).to_string());
    add("tool_choice", &or("tool_choice", "auto".into()));
    add("tools", &raw("tools", "[]"));
    add("top_logprobs", &or("top_logprobs", 0.into()));
    add("top_p", &or("top_p", json!(1.0)));
    add("truncation", &or("truncation", "disabled".into()));
    add("user", &or("user", null));
    add("metadata", &or("metadata", json!({})));
    Echo { head, tail }
}

fn with_defaults(mut defaults: Value, given: Option<&Value>) -> Value {
    if let (Some(defaults), Some(Value::Object(given))) = (defaults.as_object_mut(), given) {
        for (name, value) in given.iter().filter(|(_, value)| !value.is_null()) {
            defaults.insert(name.clone(), value.clone());
        }
    }
    defaults
}

fn reasoning(top: &Map<String, Value>) -> Value {
    with_defaults(
        json!({"effort": null, "summary": null}),
        top.get("reasoning"),
    )
}

fn text(top: &Map<String, Value>) -> Value {
    with_defaults(default_text(), top.get("text"))
}
