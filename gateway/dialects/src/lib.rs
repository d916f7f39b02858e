//! The APIs that agents speak, as pure functions over requests and events.
//!
//! [`chat()`], [`completions()`], [`messages::parse`] and [`responses::parse`] read a body into a
//! [`Turn`]: the few fields that the gateway acts on, the prompt as the chat template takes it, and
//! the body for the node. A [`answer::Translation`] turns the node's answer back. Beside them:
//! [`error`] (one table of errors, in each dialect's shape), [`session`] (which conversation),
//! [`normalise`] (one spelling of a prompt), [`known`] (what was read before is not read again) and [`caching`] (what a request says about its cache).
//! No IO, no clock, no configuration.

pub mod answer;
pub mod caching;
pub mod error;
pub mod known;
pub mod messages;
pub mod models;
pub mod normalise;
pub mod responses;
pub mod session;
pub mod tokens;
pub mod turn;

mod chat;
mod check;
mod completions;
mod elements;
mod embeddings;
mod fields;
mod shared;

pub use fields::Fields;
pub use shared::Shared;
pub use turn::{ChatPrompt, Delivery, NodeParams, PromptInput, TokenIds, Turn, TurnBody};

use crate::check::Kind;
use crate::error::{ApiError, Shape};
use crate::known::Reader;

/// A dialect of turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// OpenAI Chat Completions.
    Chat,
    /// OpenAI Completions.
    Completions,
    /// Anthropic Messages.
    Messages,
    /// OpenAI Responses.
    Responses,
    /// OpenAI Embeddings: no conversation, but answered and billed like one turn.
    Embeddings,
}

impl Dialect {
    /// The path on a node: a dialect that nodes need not speak is translated.
    pub fn node_path(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Embeddings => "/v1/embeddings",
            Self::Chat | Self::Messages | Self::Responses => "/v1/chat/completions",
        }
    }

    /// The word in metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completions => "completions",
            Self::Messages => "messages",
            Self::Responses => "responses",
            Self::Embeddings => "embeddings",
        }
    }

    /// Whether a turn continues something, so that its session stays where it is answered.
    pub fn is_conversation(self) -> bool {
        self != Self::Embeddings
    }

    /// Whose errors its clients read.
    pub fn shape(self) -> Shape {
        match self {
            Self::Messages => Shape::Anthropic,
            Self::Chat | Self::Completions | Self::Responses | Self::Embeddings => Shape::OpenAi,
        }
    }
}

/// Reads a Chat Completions request, as it is spelled.
pub fn chat(fields: Fields<'_>) -> Result<Turn<'_>, ApiError> {
    chat::parse(fields, None)
}

/// Reads a Chat Completions request and gives its prompt its one spelling; what the reader knows is
/// not read again.
pub fn chat_known<'a>(fields: Fields<'a>, reader: &Reader<'_>) -> Result<Turn<'a>, ApiError> {
    chat::parse(fields, Some(reader))
}

/// Reads a Completions request.
pub fn completions(fields: Fields<'_>) -> Result<Turn<'_>, ApiError> {
    completions::parse(fields)
}

/// Reads an Embeddings request.
pub fn embeddings(fields: Fields<'_>) -> Result<Turn<'_>, ApiError> {
    embeddings::parse(fields)
}

/// What both OpenAI dialects share.
struct Common {
    model: String,
    delivery: Delivery,
    choices: u64,
    token_ids: TokenIds,
}

/// Reads and checks it.
fn common(fields: &Fields<'_>) -> Result<Common, ApiError> {
    let model = check::model(fields)?;
    for (name, range) in [
        ("temperature", (0.0, 2.0)),
        ("top_p", (0.0, 1.0)),
        ("min_p", (0.0, 1.0)),
        ("frequency_penalty", (-2.0, 2.0)),
        ("presence_penalty", (-2.0, 2.0)),
    ] {
        check::number(fields, name, range)?;
    }
    let choices = check::integer(fields, "n", (1, 128))?.unwrap_or(1);
    check::integer(fields, "seed", (i64::MIN, i64::MAX))?;
    check::integer(fields, "min_tokens", (0, i64::MAX))?;
    check::priority(fields)?;
    check::string(fields, "user")?;
    check::kind(fields, "logit_bias", Kind::Object)?;
    check::kind(fields, "response_format", Kind::Object)?;
    check::kind(fields, "structured_outputs", Kind::Object)?;
    check::stop(fields)?;
    let token_ids = match check::boolean(fields, "return_token_ids")? {
        Some(true) => TokenIds::Shown,
        Some(false) | None => TokenIds::Hidden,
    };
    Ok(Common {
        model,
        delivery: delivery(fields)?,
        choices: u64::try_from(choices).unwrap_or(1),
        token_ids,
    })
}

fn delivery(fields: &Fields<'_>) -> Result<Delivery, ApiError> {
    let stream = check::boolean(fields, "stream")?.unwrap_or(false);
    check::kind(fields, "stream_options", Kind::Object)?;
    match fields.get("stream_options") {
        Some(_) if !stream => Err(ApiError::invalid(
            "stream_options",
            "'stream_options' is only allowed when 'stream' is true.",
        )),
        None if !stream => Ok(Delivery::Whole),
        None => Ok(Delivery::Stream),
        Some(options) => {
            let options = Fields::parse(options.get().as_bytes())?;
            match check::boolean(&options, "include_usage") {
                Ok(Some(true)) => Ok(Delivery::StreamWithUsage),
                Ok(_) => Ok(Delivery::Stream),
                Err(error) => Err(ApiError {
                    param: Some("stream_options.include_usage".to_owned()),
                    ..error
                }),
            }
        }
    }
}

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
