//! How are messages spelled? See [`super`].

use serde_json::{Map, Value};

use super::{Options, arguments};
use crate::shared::Shared;

/// Marks where another provider's cache should keep a prefix. They follow the newest message, so
/// that messages differ from turn to turn by nothing else.
const MARKS: [&str; 2] = ["cache_control", "prompt_cache_breakpoint"];

/// What Claude Code's first system text begins with.
const BILLING: &str = "x-anthropic-billing-header:";

/// Gives messages their one spelling; whether anything changed.
pub(crate) fn normalise(messages: &mut Vec<Shared>, options: Options) -> bool {
    let mut changed = false;
    if let Some(first) = messages.first_mut().filter(|_| options.billing_line) {
        let billing = first.edit(without_billing);
        changed = billing != Billing::None;
        if billing == Billing::Alone && messages.len() > 1 {
            messages.remove(0);
        }
    }
    for message in messages {
        changed |= message.edit(|message| super::message_alone(message, options));
    }
    changed
}

pub(super) fn normalise_message(message: &mut Map<String, Value>, options: Options) -> bool {
    let mut changed = options.content && without_blank(message);
    let mut is_marked = false;
    // Walking the few keys costs less than looking each up.
    for (name, value) in message.iter_mut() {
        match name.as_str() {
            "content" => changed |= normalise_content(value, options),
            "tool_calls" => {
                for call in value.as_array_mut().into_iter().flatten() {
                    changed |= normalise_call(call, options);
                }
            }
            "function_call" if options.arguments => changed |= arguments::normalise(value),
            name => is_marked |= MARKS.contains(&name),
        }
    }
    changed | (is_marked && options.cache_marks && unmark(message))
}

/// Blank content beside calls becomes null: models write line breaks there, and clients of some
/// dialects cannot send them back.
fn without_blank(message: &mut Map<String, Value>) -> bool {
    let has_calls = message
        .get("tool_calls")
        .and_then(Value::as_array)
        .is_some_and(|calls| !calls.is_empty());
    match message.get_mut("content").filter(|_| has_calls) {
        Some(content @ Value::String(_)) => {
            let text = content.as_str().unwrap_or_default();
            let is_blank = !text.is_empty() && text.trim().is_empty();
            if is_blank {
                *content = Value::Null;
            }
            is_blank
        }
        _ => false,
    }
}

fn normalise_call(call: &mut Value, options: Options) -> bool {
    let Some(call) = call.as_object_mut() else {
        return false;
    };
    let mut changed = options.cache_marks && unmark(call);
    if let Some(function) = call.get_mut("function").filter(|_| options.arguments) {
        changed |= arguments::normalise(function);
    }
    changed
}

/// A list of texts becomes one text; the texts follow each other as they are, which is how
/// templates that take lists print them.
fn normalise_content(content: &mut Value, options: Options) -> bool {
    let Value::Array(parts) = content else {
        return false;
    };
    let mut changed = false;
    if options.cache_marks {
        for part in parts.iter_mut().filter_map(Value::as_object_mut) {
            changed |= unmark(part);
        }
    }
    if options.content && parts.iter().all(is_plain_text) {
        *content = Value::String(joined(parts));
        changed = true;
    }
    changed
}

/// Whether a part is text and nothing that would be lost in a string. A mark that the operator
/// wants to keep needs its part.
fn is_plain_text(part: &Value) -> bool {
    let Some(part) = part.as_object() else {
        return false;
    };
    let is_text = part.get("type").is_some_and(|kind| kind == "text");
    let has_text = part.get("text").is_some_and(Value::is_string);
    is_text && has_text && !part.keys().any(|name| MARKS.contains(&name.as_str()))
}

fn joined(parts: &mut [Value]) -> String {
    let mut texts = parts
        .iter_mut()
        .filter_map(|part| match part.get_mut("text") {
            Some(Value::String(text)) => Some(std::mem::take(text)),
            _ => None,
        });
    let mut all = texts.next().unwrap_or_default();
    texts.for_each(|text| all.push_str(&text));
    all
}

/// Takes the marks off an object; whether it had any.
pub(super) fn unmark(object: &mut Map<String, Value>) -> bool {
    let mut had = false;
    for mark in MARKS {
        if object.keys().any(|name| name == mark) {
            // The others keep their order.
            had |= object.shift_remove(mark).is_some();
        }
    }
    had
}

/// What of a first message is a billing line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Billing {
    /// Nothing.
    None,
    /// Its beginning.
    Begins,
    /// All of it; the message goes with it where there are others.
    Alone,
}

/// Takes the billing line off the first message, where that is a system prompt.
pub(crate) fn without_billing(first: &mut Value) -> Billing {
    let Some(first) = first.as_object_mut() else {
        return Billing::None;
    };
    let is_system = |role: &Value| role == "system" || role == "developer";
    if !first.get("role").is_some_and(is_system) {
        return Billing::None;
    }
    let content = first.get_mut("content");
    let is_empty = match content {
        Some(Value::String(text)) => {
            if !cut_billing(text) {
                return Billing::None;
            }
            text.is_empty()
        }
        Some(Value::Array(parts)) => {
            let Some(Value::String(text)) = parts.first_mut().and_then(|part| part.get_mut("text"))
            else {
                return Billing::None;
            };
            if !cut_billing(text) {
                return Billing::None;
            }
            if text.is_empty() {
                parts.remove(0);
            }
            parts.is_empty()
        }
        _ => return Billing::None,
    };
    match is_empty {
        true => Billing::Alone,
        false => Billing::Begins,
    }
}

fn cut_billing(text: &mut String) -> bool {
    let length = billing_bytes(text);
    text.drain(..length);
    length > 0
}

/// The length of a billing line at the beginning of a text, its line breaks included; 0 where
/// there is none. Its form is `x-anthropic-billing-header: cc_version=…; cc_entrypoint=…; cch=…;`,
/// with more or fewer of such pairs in some versions; the text behind may follow on the same line.
fn billing_bytes(text: &str) -> usize {
    let Some(mut rest) = text.strip_prefix(BILLING) else {
        return 0;
    };
    let mut pairs = 0;
    while let Some(behind) = behind_pair(rest) {
        rest = behind;
        pairs += 1;
    }
    if pairs == 0 {
        return 0;
    }
    text.len() - rest.trim_start_matches('\n').len()
}

/// What follows ` name=value;`.
fn behind_pair(text: &str) -> Option<&str> {
    let text = text.strip_prefix(' ').unwrap_or(text);
    let (pair, behind) = text.split_once(';')?;
    let (name, value) = pair.split_once('=')?;
    let is_name = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    let is_pair = name.starts_with("cc")
        && name.bytes().all(is_name)
        && value.bytes().all(|byte| byte.is_ascii_graphic());
    is_pair.then_some(behind)
}
