//! Is this conversation sound, and how does the template see it?
//!
//! Checked here, so that a template never fails on what the client could have been told by name:
//! messages are objects, roles come from a closed set, content is null, a string, or a list of
//! text parts. Normalised here, as the common servers do, because templates expect it: content is
//! one string; null fields and empty `tool_calls` are absent; the arguments of a tool call are
//! the object that their JSON text spells. Every string of the user's passes through `escape`.
//!
//! Left out on purpose: images, audio and files (refused by the name of the part).

use indexmap::IndexMap;
use minijinja::Value;
use serde_json::{Map, Value as Json};

use crate::error::PromptError;
use crate::marks::Marks;

/// The roles of OpenAI's Chat Completions API.
const ROLES: &[&str] = &[
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
    "function",
];

/// How a template knows developer messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Developer {
    /// By their own role.
    AsDeveloper,
    /// Not at all: they are the newer name of system messages and are passed as such.
    AsSystem,
}

/// Turns requests' values into the template's.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Normaliser<'a> {
    pub(crate) marks: &'a Marks,
    pub(crate) developer: Developer,
}

impl Normaliser<'_> {
    /// The template's `messages`.
    pub(crate) fn messages(&self, messages: &[Json]) -> Result<Value, PromptError> {
        if messages.is_empty() {
            return Err(invalid("messages", "is empty; send at least one message"));
        }
        let normal = messages
            .iter()
            .enumerate()
            .map(|(at, message)| self.message(at, message));
        normal.collect::<Result<Vec<Value>, _>>().map(Value::from)
    }

    /// The template's `tools`.
    pub(crate) fn tools(&self, tools: &Json) -> Result<Value, PromptError> {
        let tools = match tools {
            Json::Null => return Ok(Value::from(())),
            Json::Array(tools) => tools,
            _ => return Err(invalid("tools", "must be an array of tool objects")),
        };
        for (at, tool) in tools.iter().enumerate() {
            if !tool.is_object() {
                return Err(invalid(&format!("tools[{at}]"), "must be an object"));
            }
        }
        Ok(tools.iter().map(|tool| self.value(tool)).collect())
    }

    /// Any JSON value as the template's.
    pub(crate) fn value(&self, json: &Json) -> Value {
        match json {
            Json::Null => Value::from(()),
            Json::Bool(value) => Value::from(*value),
            Json::Number(number) => match (number.as_u64(), number.as_i64()) {
                (Some(value), _) => Value::from(value),
                (None, Some(value)) => Value::from(value),
                (None, None) => Value::from(number.as_f64().unwrap_or(f64::NAN)),
            },
            Json::String(text) => self.text(text),
            Json::Array(items) => items.iter().map(|item| self.value(item)).collect(),
            Json::Object(fields) => fields
                .iter()
                .map(|(name, value)| (self.text(name), self.value(value)))
                .collect::<IndexMap<Value, Value>>()
                .into(),
        }
    }

    fn text(&self, text: &str) -> Value {
        Value::from(self.marks.escape(text).as_ref())
    }

    fn message(&self, at: usize, message: &Json) -> Result<Value, PromptError> {
        let Json::Object(fields) = message else {
            let what = "must be an object with `role` and `content`";
            return Err(invalid(&format!("messages[{at}]"), what));
        };
        let role = role(at, fields)?;
        let content = content(at, role, fields.get("content"))?;
        let mut normal = IndexMap::with_capacity(fields.len() + 1);
        let role = match self.developer {
            Developer::AsSystem if role == "developer" => "system",
            _ => role,
        };
        normal.insert(Value::from("role"), Value::from(role));
        normal.insert(Value::from("content"), self.text(&content));
        for (name, value) in fields {
            match (name.as_str(), value) {
                ("role" | "content", _) | (_, Json::Null) => {}
                ("tool_calls", calls) => {
                    if let Some(calls) = self.tool_calls(at, calls)? {
                        normal.insert(Value::from("tool_calls"), calls);
                    }
                }
                (_, value) => {
                    normal.insert(self.text(name), self.value(value));
                }
            }
        }
        Ok(normal.into())
    }

    fn tool_calls(&self, at: usize, calls: &Json) -> Result<Option<Value>, PromptError> {
        let param = format!("messages[{at}].tool_calls");
        let Json::Array(calls) = calls else {
            return Err(invalid(&param, "must be an array of tool calls"));
        };
        let mut normal = Vec::with_capacity(calls.len());
        for (call_at, call) in calls.iter().enumerate() {
            let param = format!("{param}[{call_at}]");
            let Json::Object(call) = call else {
                return Err(invalid(
                    &param,
                    "must be an object with `id`, `type` and `function`",
                ));
            };
            let mut call = call.clone();
            match call.get_mut("function") {
                Some(Json::Object(function)) => spell_out_arguments(function),
                // Custom tools have no function.
                None => {}
                Some(_) => return Err(invalid(&format!("{param}.function"), "must be an object")),
            }
            normal.push(self.value(&Json::Object(call)));
        }
        Ok(if normal.is_empty() {
            None
        } else {
            Some(normal.into())
        })
    }
}

fn role(at: usize, message: &Map<String, Json>) -> Result<&'static str, PromptError> {
    let wanted = || format!("use one of {}", ROLES.join(", "));
    let param = format!("messages[{at}].role");
    match message.get("role") {
        Some(Json::String(role)) => match ROLES.iter().find(|known| *known == role) {
            Some(known) => Ok(known),
            None => Err(invalid(
                &param,
                &format!("{:?} is unknown; {}", clipped(role), wanted()),
            )),
        },
        Some(_) => Err(invalid(&param, &format!("must be a string; {}", wanted()))),
        None => Err(invalid(&param, &format!("is missing; {}", wanted()))),
    }
}

/// A message's content as one string.
fn content<'a>(
    at: usize,
    role: &str,
    content: Option<&'a Json>,
) -> Result<std::borrow::Cow<'a, str>, PromptError> {
    let param = || format!("messages[{at}].content");
    match content {
        Some(Json::Null) => Ok("".into()),
        Some(Json::String(text)) => Ok(text.into()),
        Some(Json::Array(parts)) => {
            let mut text = String::new();
            for (part_at, part) in parts.iter().enumerate() {
                text.push_str(part_text(&format!("{}[{part_at}]", param()), part)?);
            }
            Ok(text.into())
        }
        Some(_) => Err(invalid(
            &param(),
            "must be a string or an array of text parts",
        )),
        // An assistant may have called tools and said nothing.
        None if role == "assistant" => Ok("".into()),
        None => Err(invalid(
            &param(),
            "is missing; send a string or an array of text parts",
        )),
    }
}

fn part_text<'a>(param: &str, part: &'a Json) -> Result<&'a str, PromptError> {
    let Json::Object(part) = part else {
        return Err(invalid(
            param,
            "must be an object such as {\"type\": \"text\", \"text\": …}",
        ));
    };
    let kind = match part.get("type") {
        Some(Json::String(kind)) => kind.as_str(),
        _ => {
            return Err(invalid(
                &format!("{param}.type"),
                "must be the string \"text\"",
            ));
        }
    };
    let field = match kind {
        "text" => "text",
        "refusal" => "refusal",
        other => {
            let what = "is not supported by this model; send text parts only";
            let what = format!("{:?} {what}", clipped(other));
            return Err(invalid(&format!("{param}.type"), &what));
        }
    };
    match part.get(field) {
        Some(Json::String(text)) => Ok(text),
        _ => Err(invalid(&format!("{param}.{field}"), "must be a string")),
    }
}

/// Replaces arguments given as JSON text, as the API has them, by what they spell, as templates
/// want them. Text that is no JSON stays: models do write such calls, and refusing them would end
/// the session.
fn spell_out_arguments(function: &mut Map<String, Json>) {
    let Some(arguments) = function.get_mut("arguments") else {
        return;
    };
    let Json::String(text) = &*arguments else {
        return;
    };
    if text.trim().is_empty() {
        *arguments = Json::Object(Map::new());
    } else if let Ok(spelled @ (Json::Object(_) | Json::Array(_))) = serde_json::from_str(text) {
        *arguments = spelled;
    }
}

pub(crate) fn invalid(param: &str, what: &str) -> PromptError {
    PromptError::Invalid {
        param: param.to_owned(),
        message: format!("`{param}` {what}"),
    }
}

/// The start of a client's string, short enough for an error message.
fn clipped(text: &str) -> String {
    const CHARS_MAX: usize = 40;
    match text.char_indices().nth(CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
