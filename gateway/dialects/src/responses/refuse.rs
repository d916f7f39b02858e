//! What does the API say when it refuses?
//!
//! The texts and codes that clients of the Responses API know: some of them search for these words,
//! so they are kept to the letter.

use std::fmt::Display;

use serde_json::Value;

use super::read::Path;
use crate::error::{ApiError, Code, ErrorKind};

/// Longest excerpt of a client's value that an error repeats.
const SHOWN_CHARS_MAX: usize = 128;

fn shown(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

fn refused(code: Code, path: &Path<'_>, message: String) -> ApiError {
    ApiError::param(ErrorKind::Refused(code), path.to_string(), message)
}

/// A parameter that must be there.
pub(super) fn missing(path: &Path<'_>) -> ApiError {
    let message = format!("Missing required parameter: '{path}'.");
    ApiError::param(ErrorKind::MissingParameter, path.to_string(), message)
}

/// A value of another type.
pub(super) fn wrong_type(path: &Path<'_>, expected: &str, value: &Value) -> ApiError {
    let got = match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(number) if number.is_f64() => "a decimal",
        Value::Number(_) => "an integer",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    };
    let message = format!("Invalid type for '{path}': expected {expected}, but got {got} instead.");
    refused(Code::InvalidType, path, message)
}

/// A word that is not one of the known ones.
pub(super) fn unknown_value(path: &Path<'_>, got: &str, known: &[&str]) -> ApiError {
    let message = format!(
        "Invalid value: '{}'. Supported values are: {}.",
        shown(got),
        listed(known)
    );
    ApiError::invalid(path.to_string(), message)
}

/// `'a', 'b', and 'c'`.
fn listed(words: &[&str]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| format!("'{word}'")).collect();
    match quoted.as_slice() {
        [] => String::new(),
        [one] => one.clone(),
        [one, other] => format!("{one} and {other}"),
        [most @ .., last] => format!("{}, and {last}", most.join(", ")),
    }
}

/// A number below its range; `kind` is `integer` or `decimal`.
pub(super) fn below(path: &Path<'_>, kind: &str, least: impl Display, got: &Value) -> ApiError {
    let message = format!(
        "Invalid '{path}': {kind} below minimum value. Expected a value >= {least}, but got {got} instead."
    );
    let code = match kind {
        "integer" => Code::IntegerBelow,
        _ => Code::DecimalBelow,
    };
    refused(code, path, message)
}

/// A number above its range; `kind` is `integer` or `decimal`.
pub(super) fn above(path: &Path<'_>, kind: &str, most: impl Display, got: &Value) -> ApiError {
    let message = format!(
        "Invalid '{path}': {kind} above maximum value. Expected a value <= {most}, but got {got} instead."
    );
    let code = match kind {
        "integer" => Code::IntegerAbove,
        _ => Code::DecimalAbove,
    };
    refused(code, path, message)
}

/// A string that is too long.
pub(super) fn text_too_long(path: &Path<'_>, most: usize, got: usize) -> ApiError {
    let message = format!(
        "Invalid '{path}': string too long. Expected a string with maximum length {most}, but got a string with length {got} instead."
    );
    refused(Code::LongString, path, message)
}

/// An empty string where something must be said.
pub(super) fn text_empty(path: &Path<'_>) -> ApiError {
    let message = format!(
        "Invalid '{path}': empty string. Expected a string with minimum length 1, but got an empty string instead."
    );
    refused(Code::EmptyString, path, message)
}

/// A list that is too long.
pub(super) fn list_too_long(path: &Path<'_>, most: usize, got: usize) -> ApiError {
    let message = format!(
        "Invalid '{path}': array too long. Expected an array with maximum length {most}, but got an array with length {got} instead."
    );
    refused(Code::LongArray, path, message)
}

/// An object with too many members.
pub(super) fn too_many_properties(path: &Path<'_>, most: usize, got: usize) -> ApiError {
    let message = format!(
        "Invalid '{path}': too many properties. Expected an object with at most {most} properties, but got an object with {got} properties instead."
    );
    refused(Code::ManyProperties, path, message)
}

/// An id of another kind of thing.
pub(super) fn wrong_prefix(path: &Path<'_>, got: &str, prefix: &str) -> ApiError {
    let message = format!(
        "Invalid '{path}': '{}'. Expected an ID that begins with '{prefix}'.",
        shown(got)
    );
    ApiError::invalid(path.to_string(), message)
}

/// An id with characters that no id has.
pub(super) fn wrong_characters(path: &Path<'_>, got: &str) -> ApiError {
    let message = format!(
        "Invalid '{path}': '{}'. Expected an ID that contains letters, numbers, underscores, or dashes, but this value contained additional characters.",
        shown(got)
    );
    ApiError::invalid(path.to_string(), message)
}

/// A value that contradicts others, in words of its own.
pub(super) fn invalid(path: &Path<'_>, message: impl Into<String>) -> ApiError {
    ApiError::invalid(path.to_string(), message)
}

/// Something that is part of the API and not served here.
pub(super) fn unsupported(path: &Path<'_>, message: impl Into<String>) -> ApiError {
    refused(Code::Unsupported, path, message.into())
}

/// Both ways of continuing at once.
pub(super) fn exclusive() -> ApiError {
    ApiError::param(
        ErrorKind::Refused(Code::Exclusive),
        "previous_response_id",
        "Mutually exclusive parameters: ['conversation', 'previous_response_id']. Ensure you are only providing one of: 'previous_response_id' or 'conversation'.",
    )
}

/// Nothing to answer.
pub(super) fn nothing_asked() -> ApiError {
    ApiError::param(
        ErrorKind::MissingParameter,
        "input",
        "One of 'input' or 'previous_response_id' or 'prompt' or 'conversation' must be provided.",
    )
}

/// A result of a call that nobody made.
pub(super) fn result_without_call(call_id: &str) -> ApiError {
    let message = format!(
        "No tool call found for function call output with call_id {}.",
        shown(call_id)
    );
    ApiError::param(ErrorKind::Refused(Code::Null), "input", message)
}

/// A call that the conversation goes past without its result.
pub(super) fn call_without_result(call_id: &str) -> ApiError {
    let message = format!("No tool output found for function call {}.", shown(call_id));
    ApiError::param(ErrorKind::Refused(Code::Null), "input", message)
}

/// The answer to a `previous_response_id` that is unknown, expired or another tenant's.
pub fn previous_response_not_found(id: &str) -> ApiError {
    ApiError::param(
        ErrorKind::Refused(Code::PreviousResponse),
        "previous_response_id",
        format!("Previous response with id '{}' not found.", shown(id)),
    )
}

/// The answer to a path that names an unknown response.
pub fn response_not_found(id: &str) -> ApiError {
    let message = format!("Response with id '{}' not found.", shown(id));
    ApiError::new(ErrorKind::NotFound, message)
}

/// The answer to an unknown conversation.
pub fn conversation_not_found(id: &str) -> ApiError {
    let message = format!("Conversation with id '{}' not found.", shown(id));
    ApiError::new(ErrorKind::NotFound, message)
}

/// The answer to an unknown item of the input or of a conversation.
pub fn item_not_found(id: &str) -> ApiError {
    let message = format!(
        "Item with id '{}' not found. Items are not persisted when `store` is set to false. Try again with `store` set to true, or remove this item from your input.",
        shown(id)
    );
    ApiError::param(ErrorKind::NotFound, "input", message)
}
