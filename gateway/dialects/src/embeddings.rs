//! What does an Embeddings request ask for?
//!
//! Vectors of texts, each on its own: no conversation, and nothing of them is read from a cache.
//! The body travels on as it is. Token ids are refused by name: those that clients make by
//! themselves are of another model's tokenizer, and would give vectors of some other text.

use serde_json::value::RawValue;

use super::check::{self, missing, wrong};
use super::{Delivery, PromptInput, TokenIds, Turn, TurnBody};
use crate::error::ApiError;
use crate::fields::Fields;

/// Texts in one request, as OpenAI has it.
const INPUTS_MAX: usize = 2048;

pub(super) fn parse(fields: Fields<'_>) -> Result<Turn<'_>, ApiError> {
    let model = check::model(&fields)?;
    let text_bytes = input(&fields)?;
    match check::string(&fields, "encoding_format")?.as_deref() {
        None | Some("float" | "base64") => {}
        Some(_) => {
            return Err(match fields.get("encoding_format") {
                Some(raw) => wrong("encoding_format", raw, "'float' or 'base64'"),
                None => missing("encoding_format"),
            });
        }
    }
    check::integer(&fields, "dimensions", (1, i64::MAX))?;
    check::string(&fields, "user")?;
    check::string(&fields, "pooling")?;
    check::priority(&fields)?;
    Ok(Turn {
        model,
        prompt: PromptInput::Vectors { text_bytes },
        delivery: Delivery::Whole,
        output_tokens_max: Some(0),
        choices: 1,
        token_ids: TokenIds::Hidden,
        body: TurnBody::Same(fields),
    })
}

/// Checks the texts; their size is all that is wanted of them here.
fn input(fields: &Fields<'_>) -> Result<u64, ApiError> {
    let raw = fields.get("input").ok_or_else(|| missing("input"))?;
    if raw.get().starts_with('"') {
        return text("input", raw);
    }
    let allowed = "a string or an array of strings";
    if !raw.get().starts_with('[') {
        return Err(wrong("input", raw, allowed));
    }
    let items: Vec<&RawValue> =
        serde_json::from_str(raw.get()).map_err(|_| wrong("input", raw, allowed))?;
    if !(1..=INPUTS_MAX).contains(&items.len()) {
        let found = items.len();
        let message = format!("'input' has {found} items; it must have 1 to {INPUTS_MAX}.");
        return Err(ApiError::invalid("input", message));
    }
    let sizes = items.into_iter().enumerate();
    sizes
        .map(|(at, item)| text(&format!("input[{at}]"), item))
        .sum()
}

/// The size of one text.
fn text(param: &str, raw: &RawValue) -> Result<u64, ApiError> {
    let first = raw.get().as_bytes().first();
    if matches!(first, Some(b'[' | b'0'..=b'9')) {
        let message = format!(
            "'{param}' holds token ids; send the text: ids are of one tokenizer, and clients that make them by themselves have another one."
        );
        return Err(ApiError::invalid(param, message));
    }
    let text: String =
        serde_json::from_str(raw.get()).map_err(|_| wrong(param, raw, "a string"))?;
    if text.is_empty() {
        let message = format!("'{param}' cannot be an empty string.");
        return Err(ApiError::invalid(param, message));
    }
    Ok(text.len() as u64)
}
