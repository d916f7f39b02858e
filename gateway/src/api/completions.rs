//! What does a Completions request ask for?
//!
//! One prompt a request: a list of prompts would need as many routes, and token ids would bypass
//! the tokenizer that billing and routing rest on. Both are refused by name.

use super::fields::Fields;
use super::{PromptInput, Turn, check, common};
use crate::error::ApiError;

pub(super) fn parse(fields: Fields<'_>) -> Result<Turn<'_>, ApiError> {
    let (model, delivery) = common(&fields)?;
    let raw = fields
        .get("prompt")
        .ok_or_else(|| check::missing("prompt"))?;
    let text: String = serde_json::from_str(raw.get()).map_err(|_| {
        check::wrong(
            "prompt",
            raw,
            "one string; send one request for each prompt",
        )
    })?;
    check::boolean(&fields, "echo")?;
    check::integer(&fields, "logprobs", (0, 20))?;
    check::integer(&fields, "best_of", (1, 128))?;
    check::string(&fields, "suffix")?;
    let most = check::integer(&fields, "max_tokens", (1, i64::MAX))?;
    let output_tokens_max = most.and_then(|most| u64::try_from(most).ok());
    Ok(Turn {
        model,
        prompt: PromptInput::Text(text),
        delivery,
        output_tokens_max,
        fields,
    })
}
