//! Is this assistant's call sound, and how does the template see it?
//!
//! Read once, borrowed from the request: a conversation brings all of its calls in every turn.

use std::borrow::Cow;

use indexmap::IndexMap;
use minijinja::Value;
use serde_json::{Map, Value as Json};

use crate::error::PromptError;
use crate::marks::Marks;
use crate::messages::{invalid, value};

/// One call.
pub(crate) struct Call<'a> {
    fields: &'a Map<String, Json>,
    function: &'a Map<String, Json>,
    /// A string.
    pub(crate) name: &'a Json,
    /// The object that their JSON text spells, as templates want them; none where there are none.
    pub(crate) arguments: Option<Cow<'a, Json>>,
}

/// The calls of `messages[at]`.
pub(crate) fn read(at: usize, calls: &Json) -> Result<Vec<Call<'_>>, PromptError> {
    let param = || format!("messages[{at}].tool_calls");
    let Json::Array(calls) = calls else {
        return Err(invalid(&param(), "must be an array of tool calls"));
    };
    let mut read = Vec::with_capacity(calls.len());
    for (call_at, call) in calls.iter().enumerate() {
        let param = |rest: &str| format!("{}[{call_at}]{rest}", param());
        let Json::Object(fields) = call else {
            let what = "must be an object with `id`, `type` and `function`";
            return Err(invalid(&param(""), what));
        };
        let Some(Json::Object(function)) = fields.get("function") else {
            let what = "must be an object with `name` and `arguments`";
            return Err(invalid(&param(".function"), what));
        };
        let Some(name) = function.get("name").filter(|name| name.is_string()) else {
            return Err(invalid(&param(".function.name"), "must be a string"));
        };
        let arguments = function.get("arguments");
        match arguments {
            None | Some(Json::Null | Json::String(_) | Json::Object(_)) => {}
            Some(_) => {
                let what = "must be a JSON object, written out as a string";
                return Err(invalid(&param(".function.arguments"), what));
            }
        }
        read.push(Call {
            fields,
            function,
            name,
            arguments: arguments.map(spelled_out),
        });
    }
    Ok(read)
}

/// Arguments given as JSON text, as the API has them, are what they spell. Text that is no JSON
/// stays: a call that ran into `max_tokens` looks so, and refusing it would end the session.
fn spelled_out(arguments: &Json) -> Cow<'_, Json> {
    let Json::String(text) = arguments else {
        return Cow::Borrowed(arguments);
    };
    if text.trim().is_empty() {
        return Cow::Owned(Json::Object(Map::new()));
    }
    match serde_json::from_str(text) {
        Ok(spelled @ (Json::Object(_) | Json::Array(_))) => Cow::Owned(spelled),
        _ => Cow::Borrowed(arguments),
    }
}

impl Call<'_> {
    /// As a template sees it that knows calls.
    pub(crate) fn value(&self, marks: &Marks) -> Value {
        object(marks, self.fields, |name, field| match name {
            "function" => object(marks, self.function, |name, field| {
                match (name, &self.arguments) {
                    ("arguments", Some(arguments)) => value(marks, arguments),
                    _ => value(marks, field),
                }
            }),
            _ => value(marks, field),
        })
    }
}

fn object(marks: &Marks, fields: &Map<String, Json>, of: impl Fn(&str, &Json) -> Value) -> Value {
    let fields = fields.iter().map(|(name, field)| {
        let key = Value::from(marks.escape(name).as_ref());
        (key, of(name, field))
    });
    fields.collect::<IndexMap<Value, Value>>().into()
}
