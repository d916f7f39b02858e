//! What does a Completions request ask for?
//!
//! One prompt a request, as a string or as a list of one: more prompts would need as many routes,
//! and token ids would bypass the tokenizer that billing and routing rest on. Both are refused by
//! name.

use serde::Deserialize;

use super::{Common, PromptInput, Turn, TurnBody, caching, check, common};
use crate::error::ApiError;
use crate::fields::Fields;

/// The two spellings of one prompt.
#[derive(Deserialize)]
#[serde(untagged)]
enum Prompt {
    Text(String),
    List([String; 1]),
}

pub(super) fn parse(fields: Fields<'_>) -> Result<Turn<'_>, ApiError> {
    let Common {
        model,
        delivery,
        choices,
        token_ids,
    } = common(&fields)?;
    let raw = fields
        .get("prompt")
        .ok_or_else(|| check::missing("prompt"))?;
    let prompt: Prompt = serde_json::from_str(raw.get()).map_err(|_| {
        check::wrong(
            "prompt",
            raw,
            "one string; send one request for each prompt",
        )
    })?;
    let (Prompt::Text(text) | Prompt::List([text])) = prompt;
    check::boolean(&fields, "echo")?;
    check::integer(&fields, "logprobs", (0, 20))?;
    check::integer(&fields, "best_of", (1, 128))?;
    check::string(&fields, "suffix")?;
    caching::retention(&fields)?;
    // With `echo`, a prompt's own log probabilities cost no token of output.
    let most = check::integer(&fields, "max_tokens", (0, i64::MAX))?;
    let output_tokens_max = most.and_then(|most| u64::try_from(most).ok());
    Ok(Turn {
        model,
        prompt: PromptInput::Text(text),
        delivery,
        output_tokens_max,
        choices,
        token_ids,
        body: TurnBody::Same(fields),
    })
}
