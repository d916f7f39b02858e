//! Which tokens are this text, and which text are these tokens?
//!
//! For `/tokenize` and `/detokenize`, as the engine answers them; none where the model has no
//! tokenizer here.

use ::prompt::Tokenizer;
use dialects::PromptInput;
use dialects::error::{ApiError, ErrorKind};
use dialects::tokens::Tokenize;

use super::{Model, chat_input};

/// Tokens in one answer or request: more than any model's context, so that a body of 32 MB cannot
/// ask for an answer of gigabytes.
const TOKENS_MAX: usize = 1 << 20;

/// What was asked for.
pub(crate) struct Found {
    /// The tokens.
    pub(crate) tokens: Vec<u32>,
    /// Their own texts, where these are wanted.
    pub(crate) strings: Option<Vec<String>>,
}

impl Model {
    /// The tokens of a text or a conversation, and their own texts where these are wanted.
    pub(crate) fn tokenize(
        &self,
        salt: &str,
        request: &Tokenize,
        unix_seconds: i64,
    ) -> Option<Result<Found, ApiError>> {
        let (builder, segments) = self.exact.as_ref()?;
        let segments = &segments.for_scope(salt);
        let tokenizer = builder.tokenizer();
        let tokens = match &request.input {
            PromptInput::Chat(chat) => builder
                .chat(&chat_input(chat, unix_seconds), segments)
                .map_err(|error| {
                    ApiError::param(ErrorKind::InvalidValue, error.param(), error.to_string())
                }),
            PromptInput::Text(text) if request.begins => Ok(builder.completion(text, segments)),
            PromptInput::Text(text) => Ok(tokenizer.encode_with_specials(text)),
            PromptInput::Vectors { .. } => Ok(Vec::new()),
        };
        let tokens = tokens.and_then(|tokens| bounded("prompt", tokens.len()).map(|()| tokens));
        Some(tokens.map(|tokens| {
            let text = |token: &u32| String::from_utf8_lossy(bytes(tokenizer, *token)).into_owned();
            let strings = request.strings.then(|| tokens.iter().map(text).collect());
            Found { tokens, strings }
        }))
    }

    /// The text of tokens, control tokens included.
    pub(crate) fn detokenize(&self, tokens: &[u32]) -> Option<Result<String, ApiError>> {
        let (builder, _) = self.exact.as_ref()?;
        Some(text(builder.tokenizer(), tokens))
    }
}

fn text(tokenizer: &Tokenizer, tokens: &[u32]) -> Result<String, ApiError> {
    bounded("tokens", tokens.len())?;
    let known = tokenizer.vocab_size();
    let is_known = |token: u32| usize::try_from(token).is_ok_and(|token| token < known);
    if let Some(at) = tokens.iter().position(|token| !is_known(*token)) {
        let (found, last) = (tokens[at], known.saturating_sub(1));
        let message = format!("'tokens[{at}]' is {found}; this model's tokens are 0 to {last}.");
        return Err(ApiError::invalid("tokens", message));
    }
    let bytes = tokens.iter().flat_map(|token| bytes(tokenizer, *token));
    let bytes: Vec<u8> = bytes.copied().collect();
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// A token's bytes; for a control token those of its name.
fn bytes(tokenizer: &Tokenizer, token: u32) -> &[u8] {
    match tokenizer.token_bytes(token) {
        [] => tokenizer.token_text(token).as_bytes(),
        bytes => bytes,
    }
}

fn bounded(param: &str, count: usize) -> Result<(), ApiError> {
    if count <= TOKENS_MAX {
        return Ok(());
    }
    let message = format!("'{param}' has {count} tokens; send at most {TOKENS_MAX} at once.");
    Err(ApiError::invalid(param, message))
}
