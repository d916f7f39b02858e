//! Which options of the API would change the answer, but are not served here?
//!
//! An option that this engine does not know how to honour is refused by name when it asks for
//! something; at its neutral value it passes. Options that change no answer (`user`, `metadata`,
//! `store`, …) and fields that nobody knows are ignored.

use serde_json::Value;

use super::fields::Fields;
use crate::error::{ApiError, Kind};

type Neutral = fn(&Value) -> bool;

/// Field and the test for its neutral value.
const ROWS: [(&str, Neutral); 11] = [
    ("best_of", |v| v.as_f64() == Some(1.0)),
    ("prompt_logprobs", |v| v.as_f64() == Some(0.0)),
    ("suffix", |v| v.as_str() == Some("")),
    ("functions", |v| v.as_array().is_some_and(Vec::is_empty)),
    ("function_call", |v| {
        matches!(v.as_str(), Some("auto" | "none"))
    }),
    ("modalities", |v| {
        v.as_array()
            .is_some_and(|list| list.iter().all(|m| m == "text"))
    }),
    ("audio", never),
    ("prediction", never),
    ("use_beam_search", is_false),
    ("continue_final_message", is_false),
    ("include_stop_str_in_output", is_false),
];

fn is_false(value: &Value) -> bool {
    value.as_bool() == Some(false)
}

fn never(_value: &Value) -> bool {
    false
}

/// Refuses the first option that would change the answer.
pub(super) fn check(fields: &Fields<'_>) -> Result<(), ApiError> {
    let asked = ROWS
        .iter()
        .find(|(name, neutral)| fields.get(name).is_some_and(|v| !neutral(v)));
    let Some((name, _)) = asked else {
        return Ok(());
    };
    let message = format!(
        "`{name}` is not supported by this engine yet, and ignoring it would change the answer. \
         Leave it out."
    );
    Err(ApiError::new(Kind::Invalid, "unsupported_parameter", message).with_param(*name))
}
