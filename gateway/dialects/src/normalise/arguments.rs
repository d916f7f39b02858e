//! How are the arguments of a call spelled?
//!
//! They are JSON inside a string, and clients that read and write them again spell them in their
//! own way: `{"city": "Z\u00fcrich"}` in Python, `{"city":"Zürich"}` in JavaScript. The one spelling has
//! no blanks between its parts and no escapes but those that JSON demands. Keys stay in their order,
//! which is the model's own, and numbers keep their digits. A text that is no JSON object stays.

use std::borrow::Cow;

use serde::de::IgnoredAny;
use serde_json::Value;

/// Gives a function's `arguments` their one spelling; whether it was another.
pub(super) fn normalise(function: &mut Value) -> bool {
    match function.get_mut("arguments") {
        Some(Value::String(text)) => match respelled(text) {
            Some(spelled) => {
                *text = spelled;
                true
            }
            None => false,
        },
        // Some clients forget to write them out.
        Some(object @ Value::Object(_)) => {
            *object = Value::String(object.to_string());
            true
        }
        _ => false,
    }
}

/// The one spelling of a text that has another.
fn respelled(text: &str) -> Option<String> {
    if is_spelled(text.as_bytes()) || !text.trim_start().starts_with('{') {
        return None;
    }
    serde_json::from_str::<IgnoredAny>(text).ok()?;
    let spelled = transcribed(text)?;
    (spelled != text).then_some(spelled)
}

/// Whether a text, if it is JSON, has the one spelling already.
fn is_spelled(text: &[u8]) -> bool {
    let mut rest = text;
    while let Some(at) = rest
        .iter()
        .position(|byte| *byte == b'"' || is_blank(*byte))
    {
        if rest[at] != b'"' {
            return false;
        }
        rest = &rest[at + 1..];
        match string_end(rest) {
            Some((end, escapes)) => {
                if escapes == Escapes::Needless {
                    return false;
                }
                rest = &rest[end..];
            }
            // An open string: no JSON.
            None => return true,
        }
    }
    true
}

fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r')
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Escapes {
    /// None, or those that have to be.
    Needed,
    /// At least one that may be spelled otherwise.
    Needless,
}

/// Where a string, of which the opening quote is behind us, ends: behind its closing quote.
fn string_end(text: &[u8]) -> Option<(usize, Escapes)> {
    let mut escapes = Escapes::Needed;
    let mut at = 0;
    loop {
        at += memchr::memchr2(b'"', b'\\', &text[at..])?;
        if text[at] == b'"' {
            return Some((at + 1, escapes));
        }
        if matches!(text.get(at + 1)?, b'u' | b'/') {
            escapes = Escapes::Needless;
        }
        at += 2;
        if at > text.len() {
            return None;
        }
    }
}

/// JSON without its blanks, its strings with needed escapes only.
fn transcribed(text: &str) -> Option<String> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(|c: char| c == '"' || (c.is_ascii() && is_blank(c as u8))) {
        out.push_str(&rest[..at]);
        if !rest[at..].starts_with('"') {
            rest = &rest[at + 1..];
            continue;
        }
        let (length, escapes) = string_end(&rest.as_bytes()[at + 1..])?;
        let end = at + 1 + length;
        let literal = &rest[at..end];
        if escapes == Escapes::Needed {
            out.push_str(literal);
        } else {
            // Half a surrogate pair is no character: such a text stays as it is.
            let value: Cow<'_, str> = serde_json::from_str(literal).ok()?;
            out.push_str(&serde_json::to_string(&value).ok()?);
        }
        rest = &rest[end..];
    }
    out.push_str(rest);
    Some(out)
}
