//! Has a field the type and range that its documentation says?
//!
//! One function per type; every refusal names the parameter, what came and what is allowed. Only
//! fields whose meaning is the same everywhere are checked here; the rest is the node's business.

use serde_json::value::RawValue;

use crate::error::{ApiError, ErrorKind};
use crate::fields::Fields;

/// Longest excerpt of a client's value that an error repeats.
const SHOWN_CHARS_MAX: usize = 64;

/// The start of a client's value, short enough for an error.
pub(super) fn clipped(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

pub(super) fn wrong(name: &str, raw: &RawValue, allowed: &str) -> ApiError {
    ApiError::invalid(
        name,
        format!("'{name}' must be {allowed}, got {}.", clipped(raw.get())),
    )
}

pub(super) fn missing(name: &str) -> ApiError {
    ApiError::param(
        ErrorKind::MissingParameter,
        name,
        format!("Missing required parameter: '{name}'."),
    )
}

/// The model's name.
pub(super) fn model(fields: &Fields<'_>) -> Result<String, ApiError> {
    string(fields, "model")?
        .filter(|model| !model.is_empty())
        .ok_or_else(|| missing("model"))
}

/// `priority`, as vLLM has it.
pub(super) fn priority(fields: &Fields<'_>) -> Result<(), ApiError> {
    let range = (i64::from(i32::MIN), i64::from(i32::MAX));
    integer(fields, "priority", range).map(drop)
}

/// A boolean.
pub(super) fn boolean(fields: &Fields<'_>, name: &str) -> Result<Option<bool>, ApiError> {
    match fields.get(name) {
        None => Ok(None),
        Some(raw) => match raw.get() {
            "true" => Ok(Some(true)),
            "false" => Ok(Some(false)),
            _ => Err(wrong(name, raw, "true or false")),
        },
    }
}

/// An integer of `least` to `most`.
pub(super) fn integer(
    fields: &Fields<'_>,
    name: &str,
    (least, most): (i64, i64),
) -> Result<Option<i64>, ApiError> {
    let Some(raw) = fields.get(name) else {
        return Ok(None);
    };
    match serde_json::from_str::<i64>(raw.get()) {
        Ok(number) if (least..=most).contains(&number) => Ok(Some(number)),
        _ if most == i64::MAX => Err(wrong(name, raw, &format!("an integer of at least {least}"))),
        _ => Err(wrong(
            name,
            raw,
            &format!("an integer from {least} to {most}"),
        )),
    }
}

/// A number of `least` to `most`.
pub(super) fn number(
    fields: &Fields<'_>,
    name: &str,
    (least, most): (f64, f64),
) -> Result<(), ApiError> {
    let Some(raw) = fields.get(name) else {
        return Ok(());
    };
    match serde_json::from_str::<f64>(raw.get()) {
        Ok(number) if (least..=most).contains(&number) => Ok(()),
        _ => Err(wrong(
            name,
            raw,
            &format!("a number from {least} to {most}"),
        )),
    }
}

/// A string.
pub(super) fn string(fields: &Fields<'_>, name: &str) -> Result<Option<String>, ApiError> {
    let Some(raw) = fields.get(name) else {
        return Ok(None);
    };
    serde_json::from_str(raw.get())
        .map(Some)
        .map_err(|_| wrong(name, raw, "a string"))
}

/// A value of the given JSON kind.
pub(super) fn kind(fields: &Fields<'_>, name: &str, kind: Kind) -> Result<(), ApiError> {
    let Some(raw) = fields.get(name) else {
        return Ok(());
    };
    let first = raw.get().as_bytes().first();
    let allowed = match (kind, first) {
        (Kind::Array, Some(b'[')) | (Kind::Object, Some(b'{')) => return Ok(()),
        (Kind::StringOrObject, Some(b'"' | b'{')) => return Ok(()),
        (Kind::Array, _) => "an array",
        (Kind::Object, _) => "an object",
        (Kind::StringOrObject, _) => "a string or an object",
    };
    Err(wrong(name, raw, allowed))
}

/// What a JSON value may be.
#[derive(Clone, Copy)]
pub(super) enum Kind {
    Array,
    Object,
    StringOrObject,
}

/// `stop`: a string or a list of strings.
pub(super) fn stop(fields: &Fields<'_>) -> Result<(), ApiError> {
    let Some(raw) = fields.get("stop") else {
        return Ok(());
    };
    let good = serde_json::from_str::<String>(raw.get()).is_ok()
        || serde_json::from_str::<Vec<String>>(raw.get()).is_ok();
    if good {
        Ok(())
    } else {
        Err(wrong("stop", raw, "a string or an array of strings"))
    }
}
