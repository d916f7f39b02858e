//! In which form are items kept and listed?
//!
//! As the API lists them: every item has an id, a type and, where the API has one, a status, and a
//! message's content is a list of parts. Ids are derived from the id of what the items came with
//! ([`Ids`]), so that an item that a client refers to is found through its response.

use serde_json::{Map, Value, json};

use super::items;
use super::read::Path;
use crate::error::ApiError;

/// What the caller decides about a response.
#[derive(Debug, Clone)]
pub struct Ids {
    /// `resp_` and 32 hex digits or more; the ids of items are derived from it.
    pub response: String,
    /// Unix seconds of its creation.
    pub created_s: i64,
}

/// On which side of a response an item is.
#[derive(Clone, Copy)]
pub(super) enum Side {
    Input,
    Output,
}

/// Digits behind the response's own in the id of an item: its side, and its place there.
const PLACE_DIGITS: usize = 7;
/// Fewest digits of a response's id.
const SEED_DIGITS_MIN: usize = 16;

impl Ids {
    /// The id of an item.
    pub(super) fn item(&self, prefix: &str, side: Side, at: usize) -> String {
        let seed = self.response.strip_prefix("resp_");
        item_id(prefix, seed.unwrap_or(&self.response), side, at)
    }
}

fn item_id(prefix: &str, seed: &str, side: Side, at: usize) -> String {
    let side = match side {
        Side::Input => '1',
        Side::Output => '0',
    };
    format!("{prefix}_{seed}{side}{at:06x}")
}

/// The response that has the item of this id; none for an id that is not ours.
pub fn response_of(item: &str) -> Option<String> {
    let (_, digits) = item.rsplit_once('_')?;
    let is_hex = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    let length = digits.len().checked_sub(PLACE_DIGITS)?;
    (is_hex && length >= SEED_DIGITS_MIN).then(|| format!("resp_{}", &digits[..length]))
}

/// Checks the items that a client adds to a conversation, and gives them form and ids; `seed` is
/// some 32 hex digits of their own.
pub fn kept_items(items: Vec<Value>, seed: &str) -> Result<Vec<Value>, ApiError> {
    let path = Path::Key(&Path::Root, "items");
    let keep = |(at, item): (usize, Value)| {
        if let items::Item::Reference(id) = items::read(&item, &Path::At(&path, at))? {
            return Err(super::refuse::item_not_found(id));
        }
        Ok(keep(item, |prefix| item_id(prefix, seed, Side::Input, at)))
    };
    items.into_iter().enumerate().map(keep).collect()
}

/// A sound item in its kept form. An id of ours stays, since it names an item of an earlier answer; a
/// client's own is replaced: two items may have the same, and one of them would be lost.
pub(super) fn keep(item: Value, id: impl FnOnce(&str) -> String) -> Value {
    let Value::Object(mut given) = item else {
        return item;
    };
    let kind = match given.remove("type") {
        Some(Value::String(kind)) => kind,
        _ => "message".to_owned(),
    };
    let id = match given.remove("id") {
        Some(Value::String(id)) if response_of(&id).is_some() => id,
        _ => id(prefix(&kind)),
    };
    let mut kept = Map::with_capacity(given.len() + 3);
    kept.insert("id".to_owned(), id.into());
    if has_status(&kind) {
        let status = given.remove("status").filter(Value::is_string);
        let status = status.unwrap_or_else(|| "completed".into());
        kept.insert("status".to_owned(), status);
    }
    if kind == "message" && given.get("content").is_some_and(Value::is_string) {
        let part = match given.get("role").and_then(Value::as_str) {
            Some("assistant") => {
                json!({"type": "output_text", "annotations": [], "text": given["content"]})
            }
            _ => json!({"type": "input_text", "text": given["content"]}),
        };
        given.insert("content".to_owned(), json!([part]));
    }
    kept.insert("type".to_owned(), kind.into());
    kept.extend(given);
    Value::Object(kept)
}

fn has_status(kind: &str) -> bool {
    matches!(kind, "message" | "function_call" | "function_call_output")
}

fn prefix(kind: &str) -> &'static str {
    match kind {
        "message" => "msg",
        "reasoning" => "rs",
        "function_call" => "fc",
        "function_call_output" => "fco",
        "custom_tool_call" => "ctc",
        "custom_tool_call_output" => "ctco",
        "local_shell_call" => "lsh",
        _ => "item",
    }
}
