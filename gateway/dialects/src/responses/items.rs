//! What is an item of the input?
//!
//! One reading of all item forms, for requests, for stored turns and for conversations: typed,
//! borrowed from the JSON. Calls of the API's own tools (`web_search_call`, `mcp_call`, …) say
//! nothing to a model that has no such tools and are left out; the calls that clients run
//! themselves (shell, patch) read like function calls.

use std::borrow::Cow;

use serde_json::{Value, json};

use super::read::{Object, Path};
use super::refuse;
use crate::error::ApiError;

/// Marks reasoning as ours in `encrypted_content`: the text itself is in the summary beside it.
pub(super) const OUR_REASONING: &str = "homing:summary";
/// The API's bound of one text.
const TEXT_CHARS_MAX: usize = 10 << 20;

const ROLES: &[&str] = &["assistant", "system", "developer", "user"];
const PARTS: &[&str] = &[
    "input_text",
    "input_image",
    "input_file",
    "output_text",
    "refusal",
];

/// Items that the API knows and that nothing is made of here.
const ELSEWHERE: &[&str] = &[
    "additional_tools",
    "code_interpreter_call",
    "compaction",
    "compaction_trigger",
    "computer_call",
    "computer_call_output",
    "configuration_update",
    "file_search_call",
    "image_generation_call",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "mcp_list_tools",
    "program",
    "program_output",
    "tool_search_call",
    "tool_search_output",
    "web_search_call",
];
/// The types that a refusal names.
const KNOWN: &[&str] = &[
    "apply_patch_call",
    "apply_patch_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "function_call",
    "function_call_output",
    "item_reference",
    "local_shell_call",
    "local_shell_call_output",
    "message",
    "reasoning",
    "shell_call",
    "shell_call_output",
    "web_search_call",
];

/// An item.
pub(super) enum Item<'v> {
    /// Somebody said something.
    Message { role: &'v str, text: Cow<'v, str> },
    /// The model thought; none where the text is not ours to read.
    Reasoning(Option<Cow<'v, str>>),
    /// The model called a tool.
    Call {
        id: &'v str,
        name: &'v str,
        arguments: Cow<'v, str>,
    },
    /// What came of a call; some clients tell results of calls that nobody made, without an id.
    Output {
        id: Option<&'v str>,
        text: Cow<'v, str>,
    },
    /// A stored item, by its id.
    Reference(&'v str),
    /// Nothing that the model can read.
    Elsewhere,
}

/// Reads an item.
pub(super) fn read<'v>(value: &'v Value, path: &Path<'_>) -> Result<Item<'v>, ApiError> {
    let item = Object::of(value, path)?;
    item.text("id")?;
    match item.text("type")? {
        Some("message") => message(item),
        // The short form of a message.
        None if item.get("role").is_some() => message(item),
        None => match reference(value) {
            Some(id) => Ok(Item::Reference(id)),
            None => Err(item.missing("type")),
        },
        Some("item_reference") => Ok(Item::Reference(item.needed_text("id")?)),
        Some("reasoning") => reasoning(item),
        Some("function_call") => call(item, item.needed_text("arguments")?.into()),
        Some("custom_tool_call") => {
            let input = item.needed_text("input")?;
            call(item, json!({"input": input}).to_string().into())
        }
        Some("function_call_output" | "custom_tool_call_output") => {
            // Clients tell results that nobody asked for under a name alone.
            let id = item.text("call_id")?;
            if id.is_none() && item.get("name").is_none() {
                return Err(item.missing("call_id"));
            }
            let text = output(item)?;
            Ok(Item::Output { id, text })
        }
        Some("local_shell_call") => action(item, "local_shell", "action"),
        Some("shell_call") => action(item, "shell", "action"),
        Some("apply_patch_call") => action(item, "apply_patch", "operation"),
        Some("local_shell_call_output" | "shell_call_output" | "apply_patch_call_output") => {
            acted(item)
        }
        Some(kind) if ELSEWHERE.contains(&kind) => Ok(Item::Elsewhere),
        Some(kind) => Err(refuse::unknown_value(&Path::Key(path, "type"), kind, KNOWN)),
    }
}

/// The id of a stored item that stands in for it; an id alone is a reference.
pub(super) fn reference(value: &Value) -> Option<&str> {
    let item = value.as_object()?;
    let is_reference = match item.get("type") {
        None | Some(Value::Null) => item.get("role").is_none() && item.get("id").is_some(),
        Some(kind) => kind == "item_reference",
    };
    item.get("id")
        .and_then(Value::as_str)
        .filter(|_| is_reference)
}

fn message<'v>(item: Object<'v, '_>) -> Result<Item<'v>, ApiError> {
    let role = item
        .word("role", ROLES)?
        .ok_or_else(|| item.missing("role"))?;
    let path = Path::Key(item.path, "content");
    let text = match item.get("content") {
        None => return Err(refuse::missing(&path)),
        Some(Value::String(text)) => checked(text, &path)?.into(),
        Some(Value::Array(parts)) => parts_text(parts, &path)?,
        Some(other) => {
            let expected = "one of an array of objects or string";
            return Err(refuse::wrong_type(&path, expected, other));
        }
    };
    Ok(Item::Message { role, text })
}

fn checked<'v>(text: &'v str, path: &Path<'_>) -> Result<&'v str, ApiError> {
    // Bytes bound characters from above, and counting megabytes is rarely needed.
    if text.len() > TEXT_CHARS_MAX {
        let length = text.chars().count();
        if length > TEXT_CHARS_MAX {
            return Err(refuse::text_too_long(path, TEXT_CHARS_MAX, length));
        }
    }
    Ok(text)
}

/// The parts' texts, one after the other.
fn parts_text<'v>(parts: &'v [Value], path: &Path<'_>) -> Result<Cow<'v, str>, ApiError> {
    let mut text = Cow::Borrowed("");
    for (at, part) in parts.iter().enumerate() {
        let path = Path::At(path, at);
        let said = part_text(Object::of(part, &path)?)?;
        match text.is_empty() {
            true => text = said.into(),
            false => text.to_mut().push_str(said),
        }
    }
    Ok(text)
}

fn part_text<'v>(part: Object<'v, '_>) -> Result<&'v str, ApiError> {
    let field = match part.needed_text("type")? {
        "input_text" | "output_text" | "text" | "summary_text" | "reasoning_text" => "text",
        "refusal" => "refusal",
        kind @ ("input_image" | "input_file" | "input_audio" | "computer_screenshot") => {
            let what = match kind {
                "input_file" => "file",
                "input_audio" => "audio",
                _ => "image",
            };
            let path = Path::Key(part.path, "type");
            return Err(refuse::invalid(
                &path,
                format!(
                    "Invalid value: '{kind}'. This model does not support {what} inputs; send text."
                ),
            ));
        }
        kind => {
            return Err(refuse::unknown_value(
                &Path::Key(part.path, "type"),
                kind,
                PARTS,
            ));
        }
    };
    checked(part.needed_text(field)?, &Path::Key(part.path, field))
}

/// Ours is text that a template can show; another service's is sealed, or a summary of what the
/// model never wrote so.
fn reasoning<'v>(item: Object<'v, '_>) -> Result<Item<'v>, ApiError> {
    let sealed = item.text("encrypted_content")?;
    let path = Path::Key(item.path, "content");
    let content = item.list("content")?.map_or(&[][..], Vec::as_slice);
    let content = parts_text(content, &path)?;
    let path = Path::Key(item.path, "summary");
    let summary = item.list("summary")?.map_or(&[][..], Vec::as_slice);
    let summary = parts_text(summary, &path)?;
    if sealed.is_some_and(|sealed| sealed != OUR_REASONING) {
        return Ok(Item::Reasoning(None));
    }
    let text = if content.is_empty() { summary } else { content };
    Ok(Item::Reasoning(Some(text).filter(|text| !text.is_empty())))
}

fn call<'v>(item: Object<'v, '_>, arguments: Cow<'v, str>) -> Result<Item<'v>, ApiError> {
    Ok(Item::Call {
        id: call_id(item)?,
        name: filled(item, "name")?,
        arguments,
    })
}

fn call_id<'v>(item: Object<'v, '_>) -> Result<&'v str, ApiError> {
    filled(item, "call_id")
}

fn filled<'v>(item: Object<'v, '_>, name: &str) -> Result<&'v str, ApiError> {
    match item.needed_text(name)? {
        "" => Err(refuse::text_empty(&Path::Key(item.path, name))),
        text => Ok(text),
    }
}

/// A call whose arguments are an object of the item.
fn action<'v>(item: Object<'v, '_>, name: &'v str, of: &str) -> Result<Item<'v>, ApiError> {
    let arguments = item.object(of)?.ok_or_else(|| item.missing(of))?;
    // JSON values always serialise.
    let arguments = serde_json::to_string(arguments).unwrap_or_default();
    Ok(Item::Call {
        id: call_id(item)?,
        name,
        arguments: arguments.into(),
    })
}

/// The result of such a call: text, or a list of what each command printed.
fn acted<'v>(item: Object<'v, '_>) -> Result<Item<'v>, ApiError> {
    // A local shell's result names its call as `id`.
    let id = match item.text("call_id")? {
        Some(id) => Some(id),
        None => item.text("id")?,
    };
    let text = match item.get("output") {
        Some(Value::String(text)) => text.into(),
        Some(other) => other.to_string().into(),
        None => item.text("status")?.unwrap_or_default().into(),
    };
    match id {
        Some(_) => Ok(Item::Output { id, text }),
        None => Err(item.missing("call_id")),
    }
}

fn output<'v>(item: Object<'v, '_>) -> Result<Cow<'v, str>, ApiError> {
    let path = Path::Key(item.path, "output");
    match item.get("output") {
        None => Err(refuse::missing(&path)),
        Some(Value::String(text)) => Ok(checked(text, &path)?.into()),
        Some(Value::Array(parts)) => parts_text(parts, &path),
        Some(other) => {
            let expected = "one of an array of objects or string";
            Err(refuse::wrong_type(&path, expected, other))
        }
    }
}
