//! What do `/tokenize` and `/detokenize` ask for, in vLLM's forms?
//!
//! A text or a conversation, whose tokens are wanted; or tokens, whose text is. Neither needs to
//! name the model where there is only one.

use serde::Serialize;

use super::check::{self, missing, wrong};
use super::{PromptInput, chat};
use crate::error::ApiError;
use crate::fields::Fields;

/// Reads a body of `/tokenize`.
pub fn tokenize(fields: &Fields<'_>) -> Result<Tokenize, ApiError> {
    let model = check::string(fields, "model")?;
    let strings = check::boolean(fields, "return_token_strs")?.unwrap_or(false);
    let begins = check::boolean(fields, "add_special_tokens")?.unwrap_or(true);
    let input = match (fields.get("messages"), fields.get("prompt")) {
        (Some(_), Some(_)) => {
            let message = "'messages' and 'prompt' exclude each other; send one of them.";
            return Err(ApiError::invalid("prompt", message));
        }
        (Some(_), None) => {
            for (name, served) in [
                ("add_generation_prompt", true),
                ("continue_final_message", false),
            ] {
                if let (Some(_), Some(raw)) = (
                    check::boolean(fields, name)?.filter(|asked| *asked != served),
                    fields.get(name),
                ) {
                    return Err(wrong(name, raw, &format!("{served}: prompts are made so")));
                }
            }
            PromptInput::Chat(chat::prompt(fields)?)
        }
        (None, _) => {
            let text = check::string(fields, "prompt")?.ok_or_else(|| missing("prompt"))?;
            PromptInput::Text(text)
        }
    };
    Ok(Tokenize {
        model,
        input,
        begins,
        strings,
    })
}

/// Reads a body of `/detokenize`.
pub fn detokenize(fields: &Fields<'_>) -> Result<Detokenize, ApiError> {
    let model = check::string(fields, "model")?;
    let raw = fields.get("tokens").ok_or_else(|| missing("tokens"))?;
    let tokens = serde_json::from_str(raw.get())
        .map_err(|_| wrong("tokens", raw, "an array of token ids"))?;
    Ok(Detokenize { model, tokens })
}

/// A request for tokens.
pub struct Tokenize {
    /// The model, where the client names one.
    pub model: Option<String>,
    /// Text or a conversation.
    pub input: PromptInput,
    /// Whether a text gets the token that begins sequences.
    pub begins: bool,
    /// Whether the tokens' own texts are wanted.
    pub strings: bool,
}

/// A request for the text of tokens.
#[derive(Debug, PartialEq, Eq)]
pub struct Detokenize {
    /// The model, where the client names one.
    pub model: Option<String>,
    /// The tokens.
    pub tokens: Vec<u32>,
}

/// The answer to [`Tokenize`].
#[derive(Debug, Serialize)]
pub struct Tokenized<'a> {
    /// How many there are.
    pub count: usize,
    /// Most tokens of prompt and answer together, where a node has told.
    pub max_model_len: Option<u64>,
    /// The tokens.
    pub tokens: &'a [u32],
    /// Their texts, where they were asked for.
    pub token_strs: Option<Vec<String>>,
}
