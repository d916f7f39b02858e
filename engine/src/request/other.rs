//! What do the smaller routes ask for: vectors, tokens, text of tokens, the release of blocks?
//!
//! Shapes of OpenAI (`/v1/embeddings`) and vLLM (`/tokenize`, `/detokenize`).

use serde_json::Value;

use super::fields::{Fields, missing, token_ids, wrong};
use super::source::{chat_source, token_demanded};
use super::{Caller, Rules, Source, check_model, ending, source, with_fields};
use crate::engine::{Pooling, TicketId};
use crate::error::{ApiError, Kind};

/// Inputs in one request for embeddings, as OpenAI has it.
pub const INPUTS_MAX: usize = 2048;

/// How a vector is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// A list of numbers.
    Float,
    /// The little-endian bytes of its f32, in base64.
    Base64,
}

/// A checked request for embeddings.
#[derive(Clone, Debug, PartialEq)]
pub struct Embedding {
    /// Texts, or tokens from a caller that holds the node token.
    pub inputs: Vec<Source>,
    /// How the vectors are written.
    pub encoding: Encoding,
    /// Numbers in a vector; it must be the model's own.
    pub dimensions: Option<usize>,
    /// How tokens' vectors become one; none for the node's own way.
    pub pooling: Option<Pooling>,
    /// Whose cache.
    pub cache_salt: Option<String>,
    /// Lower goes first; 0 is ordinary.
    pub priority: i32,
    /// How long it may take.
    pub timeout: Option<std::time::Duration>,
}

/// Reads a body of `/v1/embeddings`.
pub fn embedding(body: &[u8], rules: &Rules<'_>) -> Result<Embedding, ApiError> {
    with_fields(body, |fields| {
        check_model(fields, rules)?;
        let encoding = match fields.text("encoding_format")? {
            None | Some("float") => Encoding::Float,
            Some("base64") => Encoding::Base64,
            Some(_) => {
                let message = "`encoding_format` must be \"float\" or \"base64\".";
                return Err(ApiError::field("encoding_format", message));
            }
        };
        let pooling = match fields.text("pooling")? {
            None => None,
            Some("mean") => Some(Pooling::Mean),
            Some("last") => Some(Pooling::Last),
            Some(_) => {
                let message = "`pooling` must be \"mean\" or \"last\".";
                return Err(ApiError::field("pooling", message));
            }
        };
        Ok(Embedding {
            inputs: inputs(fields, rules)?,
            encoding,
            dimensions: fields.count("dimensions", (1, usize::MAX))?,
            pooling,
            cache_salt: super::cache_salt(fields)?,
            priority: super::priority(fields)?,
            timeout: ending::timeout(fields)?,
        })
    })
}

fn inputs(fields: &Fields<'_>, rules: &Rules<'_>) -> Result<Vec<Source>, ApiError> {
    let wanted = "a string, an array of strings, or arrays of token ids";
    let items = match fields.required("input")? {
        Value::String(text) => return Ok(vec![text_input("input", text)?]),
        Value::Array(items) => items,
        other => return Err(wrong("input", wanted, other)),
    };
    if matches!(items.first(), Some(Value::Number(_))) {
        let tokens = token_ids("input", items, rules.vocab)?;
        return Ok(vec![source::tokens_source("input", tokens, rules)?]);
    }
    if !(1..=INPUTS_MAX).contains(&items.len()) {
        let found = items.len();
        let message = format!("`input` has {found} items; it must have 1 to {INPUTS_MAX}.");
        return Err(ApiError::field("input", message));
    }
    let input = |(at, item): (usize, &Value)| {
        let param = format!("input[{at}]");
        match item {
            Value::String(text) => text_input(&param, text),
            Value::Array(ids) => {
                let tokens = token_ids(&param, ids, rules.vocab)?;
                source::tokens_source(&param, tokens, rules)
            }
            other => Err(wrong(&param, "a string or an array of token ids", other)),
        }
    };
    items.iter().enumerate().map(input).collect()
}

fn text_input(param: &str, text: &str) -> Result<Source, ApiError> {
    if text.is_empty() {
        let message = format!("`{param}` is empty; send some text.");
        return Err(ApiError::field(param, message));
    }
    Ok(Source::Text(text.to_owned()))
}

/// A checked request for tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Tokenization {
    /// Text or a conversation.
    pub source: Source,
    /// Whether a text gets the token that begins sequences.
    pub add_special_tokens: bool,
    /// Whether the tokens' texts come with them.
    pub token_strings: bool,
}

/// Reads a body of `/tokenize`.
pub fn tokenization(body: &[u8], rules: &Rules<'_>) -> Result<Tokenization, ApiError> {
    with_fields(body, |fields| {
        check_named_model(fields, rules)?;
        let source = match (fields.get("messages"), fields.get("prompt")) {
            (Some(_), _) => chat_source(fields)?,
            (None, Some(Value::String(text))) => Source::Text(text.clone()),
            (None, Some(other)) => return Err(wrong("prompt", "a string", other)),
            (None, None) => return Err(missing("prompt")),
        };
        Ok(Tokenization {
            source,
            add_special_tokens: fields.flag("add_special_tokens")?.unwrap_or(true),
            token_strings: fields.flag("return_token_strs")?.unwrap_or(false),
        })
    })
}

/// A checked request for the text of tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Detokenization {
    /// The tokens.
    pub tokens: Vec<u32>,
}

/// Reads a body of `/detokenize`.
pub fn detokenization(body: &[u8], rules: &Rules<'_>) -> Result<Detokenization, ApiError> {
    with_fields(body, |fields| {
        check_named_model(fields, rules)?;
        let tokens = fields.tokens("tokens", rules.vocab)?;
        let tokens = tokens.ok_or_else(|| missing("tokens"))?;
        Ok(Detokenization { tokens })
    })
}

/// vLLM's routes for tokens know the model without being told; a wrong name is still wrong.
fn check_named_model(fields: &Fields<'_>, rules: &Rules<'_>) -> Result<(), ApiError> {
    match fields.get("model") {
        None => Ok(()),
        Some(_) => check_model(fields, rules),
    }
}

/// A checked request to let go of pinned blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Release {
    /// What they were pinned under.
    pub ticket: TicketId,
}

/// Reads a body of `/v1/kv/release`.
pub fn release(body: &[u8], caller: Caller) -> Result<Release, ApiError> {
    if caller != Caller::TokenHolder {
        let error = token_demanded("ticket", "A release of blocks", "Let them expire");
        return Err(error);
    }
    with_fields(body, |fields| {
        let text = fields.text("ticket")?.ok_or_else(|| missing("ticket"))?;
        let ticket = text.parse::<TicketId>().map_err(|_| {
            let message = "`ticket` is none that a node gives out.";
            ApiError::new(Kind::Invalid, "invalid_value", message).with_param("ticket")
        })?;
        Ok(Release { ticket })
    })
}
