//! What is the prompt made from?

use serde_json::Value;

use super::fields::{Fields, token_ids, wrong};
use super::{Caller, Dialect, Rules, Source};
use crate::error::{ApiError, Kind};

/// Reads the prompt's source: token ids beside a conversation are the prompt, and the rest of the
/// request still says what the answer may be.
pub(super) fn source(
    fields: &Fields<'_>,
    dialect: Dialect,
    rules: &Rules<'_>,
) -> Result<Source, ApiError> {
    match fields.tokens("prompt_token_ids", rules.vocab)? {
        Some(tokens) => tokens_source("prompt_token_ids", tokens, rules),
        None => match dialect {
            Dialect::Chat => chat_source(fields),
            Dialect::Completions => text_source(fields, rules),
        },
    }
}

/// Token ids as a prompt, from whom may send them.
pub(super) fn tokens_source(
    name: &str,
    tokens: Vec<u32>,
    rules: &Rules<'_>,
) -> Result<Source, ApiError> {
    if rules.caller != Caller::TokenHolder {
        let what = format!("`{name}` with token ids");
        return Err(token_demanded(name, &what, "Send text"));
    }
    if tokens.is_empty() {
        return Err(ApiError::field(
            name,
            format!("`{name}` is empty; send at least one token."),
        ));
    }
    Ok(Source::Tokens(tokens))
}

/// Something that only a caller with the node token may send.
pub(super) fn token_demanded(name: &str, what: &str, instead: &str) -> ApiError {
    let message = format!(
        "{what} is accepted only from a caller with the node token. {instead}, or start the node \
         with a token and present it."
    );
    let error = ApiError::new(Kind::Forbidden, "node_token_required", message);
    error.with_param(name)
}

/// A conversation.
pub(super) fn chat_source(fields: &Fields<'_>) -> Result<Source, ApiError> {
    fields.required("messages")?;
    // Roles and contents are checked where they become text, so that gateway and engine agree.
    let messages = fields.list("messages")?.cloned().unwrap_or_default();
    fields.list("tools")?;
    if fields.flag("add_generation_prompt")? == Some(false) {
        let message = "`add_generation_prompt` must be true: the answer begins an assistant turn.";
        return Err(ApiError::field("add_generation_prompt", message));
    }
    let tools = fields.get("tools").cloned();
    let template_kwargs = fields.object("chat_template_kwargs")?.cloned();
    Ok(Source::Chat {
        messages,
        tools,
        template_kwargs,
    })
}

fn text_source(fields: &Fields<'_>, rules: &Rules<'_>) -> Result<Source, ApiError> {
    let prompt = fields.required("prompt")?;
    match prompt {
        Value::String(text) => Ok(Source::Text(text.clone())),
        Value::Array(items) => match &items[..] {
            [Value::String(text)] => Ok(Source::Text(text.clone())),
            [Value::String(_), Value::String(_), ..] => {
                let message = "`prompt` holds several prompts; send one request for each.";
                let error = ApiError::new(Kind::Invalid, "unsupported_parameter", message);
                Err(error.with_param("prompt"))
            }
            items => tokens_source("prompt", token_ids("prompt", items, rules.vocab)?, rules),
        },
        other => Err(wrong("prompt", "a string or an array of token ids", other)),
    }
}
