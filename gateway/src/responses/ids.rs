//! Which ids can be one of ours, and what does a client read about one that names nothing?

use dialects::error::{ApiError, ErrorKind};
use serde_json::Value;

use super::store::Item;

/// As much of a client's id as an error repeats.
const SHOWN_CHARS_MAX: usize = 80;

pub(super) fn shown(id: &str) -> String {
    id.chars().take(SHOWN_CHARS_MAX).collect()
}

/// Refuses what cannot be an id of this kind.
pub(super) fn check(param: &str, id: &str, prefix: &str) -> Result<(), ApiError> {
    if id.starts_with(prefix) {
        return Ok(());
    }
    Err(ApiError::invalid(
        param,
        format!(
            "Invalid '{param}': '{}'. Expected an ID that begins with '{prefix}'.",
            shown(id)
        ),
    ))
}

/// An item of a conversation that is not there.
pub(super) fn no_item(id: &str) -> ApiError {
    let message = format!("Item with id '{}' not found.", shown(id));
    ApiError::new(ErrorKind::NotFound, message)
}

/// An item for a conversation, under the id that it has.
pub(super) fn item(item: &Value) -> Item {
    Item {
        id: item["id"].as_str().unwrap_or_default().to_owned(),
        json: item.to_string(),
    }
}
