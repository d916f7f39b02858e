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
use check::Kind;

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
    /// Most tokens the client wants back in each choice; none leaves it to the node.
    pub(crate) output_tokens_max: Option<u64>,
    /// How many answers it wants.
    pub(crate) choices: u64,
    /// Whether it wants to see tokens.
    pub(crate) token_ids: TokenIds,
    /// Everything the client sent.
    pub(crate) fields: Fields<'a>,
}

/// The part of a request that reaches the model.
pub(crate) enum PromptInput {
    /// Messages for the chat template.
    Chat(ChatPrompt),
    /// Text as it is.
    Text(String),
}

/// What the chat template is given.
pub(crate) struct ChatPrompt {
    /// At least one object with a string `role`.
    pub(crate) messages: Vec<Value>,
    /// Tool definitions, as sent.
    pub(crate) tools: Option<Value>,
    /// Extra variables for the template.
    pub(crate) template_kwargs: Option<Map<String, Value>>,
}

/// Whether the client reads the tokens that a node reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenIds {
    /// It asked for them: the answer is relayed as it is.
    Shown,
    /// It did not: they are ours alone.
    Hidden,
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
        let mut set: Vec<(&str, &str)> = vec![("cache_salt", &salt)];
        if self.delivery != Delivery::Whole {
            set.push(("stream_options", r#"{"include_usage":true}"#));
        }
        let hides_ids = self.token_ids == TokenIds::Hidden;
        let urgent = self.is_urgent();
        self.fields.rebuild(
            |field| {
                only_gateways_say(field)
                    || (hides_ids && field == "return_token_ids")
                    || (urgent && field == "priority")
            },
            &set,
        )
    }

    /// Whether it asks to go before others (vLLM's numbers: lower goes first, 0 where nothing is
    /// said). A client may step back behind others, never ahead of another tenant. Zero is left
    /// out as well: a node without priorities refuses the field.
    fn is_urgent(&self) -> bool {
        self.fields
            .get("priority")
            .and_then(|raw| raw.get().parse::<i64>().ok())
            .is_some_and(|priority| priority <= 0)
    }
}

/// Fields that a client may not say to a node: references into another request's KV cache have
/// returned another prompt's answer, and token ids would bypass the template.
fn only_gateways_say(field: &str) -> bool {
    matches!(
        field,
        "kv_transfer_params" | "prompt_token_ids" | "cache_salt" | "request_id"
    ) || field.starts_with("bootstrap_")
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
    let model = check::string(fields, "model")?
        .filter(|model| !model.is_empty())
        .ok_or_else(|| check::missing("model"))?;
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
    check::integer(
        fields,
        "priority",
        (i64::from(i32::MIN), i64::from(i32::MAX)),
    )?;
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
