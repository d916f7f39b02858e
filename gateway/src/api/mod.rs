//! Which endpoint does a request mean, and what does it ask for?
//!
//! Each dialect turns a body into a [`Turn`]: the few fields the gateway acts on, and the client's
//! own bytes for the rest. A dialect that a node does not speak will translate here too, in both
//! directions; nothing after this module knows dialects.

mod chat;
mod check;
mod completions;
mod fields;
pub(crate) mod models;

use http::Method;
use serde_json::{Map, Value};

pub(crate) use fields::Fields;

use crate::error::{ApiError, ErrorKind};

/// What a path and method mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Endpoint<'a> {
    /// Is the gateway well?
    Health,
    /// The list of models.
    Models,
    /// One model.
    Model(&'a str),
    /// A turn in this dialect.
    Turn(Dialect),
}

/// A dialect of turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    /// OpenAI Chat Completions.
    Chat,
    /// OpenAI Completions.
    Completions,
}

impl Dialect {
    /// The path, the same here and on the node.
    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
        }
    }

    /// The word in metrics and logs.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completions => "completions",
        }
    }

    /// Reads a body.
    pub(crate) fn parse(self, body: &[u8]) -> Result<Turn<'_>, ApiError> {
        let fields = Fields::parse(body)?;
        match self {
            Self::Chat => chat::parse(fields),
            Self::Completions => completions::parse(fields),
        }
    }
}

/// Resolves path and method; 404 and 405 say what exists.
pub(crate) fn endpoint<'a>(method: &Method, path: &'a str) -> Result<Endpoint<'a>, ApiError> {
    let (endpoint, allow) = match path.strip_suffix('/').unwrap_or(path) {
        "/health" => (Endpoint::Health, "GET, HEAD"),
        "/v1/models" => (Endpoint::Models, "GET, HEAD"),
        "/v1/chat/completions" => (Endpoint::Turn(Dialect::Chat), "POST"),
        "/v1/completions" => (Endpoint::Turn(Dialect::Completions), "POST"),
        other => match other.strip_prefix("/v1/models/") {
            // Ids may hold slashes, as in `organisation/model`.
            Some(id) => (Endpoint::Model(id), "GET, HEAD"),
            None => {
                return Err(ApiError::new(
                    ErrorKind::UnknownUrl,
                    format!(
                        "Unknown path {}. There are POST /v1/chat/completions, POST /v1/completions, GET /v1/models and GET /health.",
                        path.chars().take(128).collect::<String>()
                    ),
                ));
            }
        },
    };
    if allow.split(", ").any(|allowed| allowed == method.as_str()) {
        return Ok(endpoint);
    }
    let message = format!("{path} takes {allow}, not {method}.");
    Err(ApiError {
        allow: Some(allow),
        ..ApiError::new(ErrorKind::MethodNotAllowed, message)
    })
}

/// What a request asks for.
pub(crate) struct Turn<'a> {
    /// The model's id as the client wrote it.
    pub(crate) model: String,
    /// What becomes the prompt.
    pub(crate) prompt: PromptInput,
    /// Whether the answer is to be a stream.
    pub(crate) delivery: Delivery,
    /// Most tokens the client wants back; none leaves it to the node.
    pub(crate) output_tokens_max: Option<u64>,
    /// Everything the client sent.
    pub(crate) fields: Fields<'a>,
}

/// The part of a request that reaches the model.
pub(crate) enum PromptInput {
    /// Messages for the chat template.
    Chat {
        /// At least one object with a string `role`.
        messages: Vec<Value>,
        /// Tool definitions, as sent.
        tools: Option<Value>,
        /// Extra variables for the template.
        template_kwargs: Option<Map<String, Value>>,
    },
    /// Text as it is.
    Text(String),
}

/// How the client wants its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// One JSON object.
    Whole,
    /// Server-sent events; the chunk with the usage is hidden.
    Stream,
    /// Server-sent events, and the client asked for the chunk with the usage.
    StreamWithUsage,
}

impl Turn<'_> {
    /// The body for the node: the client's, with `cache_salt` ours, with usage always asked for,
    /// and without what only gateways may say.
    pub(crate) fn node_body(&self, cache_salt: &str) -> Vec<u8> {
        // Salts are hex and need no escapes.
        let salt = format!("\"{cache_salt}\"");
        let set: &[(&str, &str)] = match self.delivery {
            Delivery::Whole => &[("cache_salt", &salt)],
            Delivery::Stream | Delivery::StreamWithUsage => &[
                ("cache_salt", &salt),
                ("stream_options", r#"{"include_usage":true}"#),
            ],
        };
        self.fields.rebuild(dropped, set)
    }
}

/// Fields that a client may not say to a node: references into another request's KV cache have
/// returned another prompt's answer, and token ids would bypass the template.
fn dropped(field: &str) -> bool {
    matches!(
        field,
        "kv_transfer_params" | "prompt_token_ids" | "cache_salt" | "request_id"
    ) || field.starts_with("bootstrap_")
}

/// The checks that both OpenAI dialects share.
fn common(fields: &Fields<'_>) -> Result<(String, Delivery), ApiError> {
    let model = check::string(fields, "model")?
        .filter(|model| !model.is_empty())
        .ok_or_else(|| check::missing("model"))?;
    for (name, range) in [
        ("temperature", (0.0, 2.0)),
        ("top_p", (0.0, 1.0)),
        ("frequency_penalty", (-2.0, 2.0)),
        ("presence_penalty", (-2.0, 2.0)),
    ] {
        check::number(fields, name, range)?;
    }
    check::integer(fields, "n", (1, 128))?;
    check::integer(fields, "seed", (i64::MIN, i64::MAX))?;
    check::string(fields, "user")?;
    check::stop(fields)?;
    Ok((model, delivery(fields)?))
}

fn delivery(fields: &Fields<'_>) -> Result<Delivery, ApiError> {
    let stream = check::boolean(fields, "stream")?.unwrap_or(false);
    check::kind(fields, "stream_options", check::Kind::Object)?;
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
mod tests;
