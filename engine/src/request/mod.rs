//! What does this body ask for?
//!
//! Bytes → checked [`Generation`] → prompt tokens and a job for the engine ([`prepare`]). Every
//! refusal names the field and says what would do. What the engine does not support is refused
//! where ignoring it would change the answer (`unsupported`), and ignored elsewhere.

mod fields;
pub mod prepare;
mod unsupported;

use serde_json::{Map, Value};

use crate::error::{ApiError, Kind};
use crate::sample::Sampling;
use fields::{Fields, missing, token_ids, wrong};

/// Stop strings in one request. OpenAI allows 4; agents send more to local engines.
pub const STOPS_MAX: usize = 16;
/// Bytes of one stop string; it is searched for after every token.
pub const STOP_BYTES_MAX: usize = 256;
/// Characters of a cache salt, as vLLM has it.
pub const CACHE_SALT_CHARS_MAX: usize = 128;
/// What `/v1/completions` produces when the request does not say, as OpenAI has it.
const COMPLETION_TOKENS_DEFAULT: usize = 16;

/// Which of the two APIs a request uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
}

/// What the prompt is made from.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// Messages for the chat template.
    Chat {
        /// `messages`.
        messages: Vec<Value>,
        /// `tools`, for the template.
        tools: Option<Value>,
        /// `chat_template_kwargs`.
        template_kwargs: Option<Map<String, Value>>,
    },
    /// Plain text.
    Text(String),
    /// Tokens, from a caller that holds the node token.
    Tokens(Vec<u32>),
}

/// How the answer travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// One JSON object at the end.
    Whole,
    /// Server-sent events; usage as asked.
    Stream(UsageChunks),
}

/// When a stream tells its usage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UsageChunks {
    /// Never.
    None,
    /// In a chunk of its own at the end.
    Last,
    /// At the end and on every chunk (vLLM's `continuous_usage_stats`).
    Every,
}

/// How many tokens to produce at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutputMax {
    /// The bound.
    pub tokens: usize,
    /// The field that set it, for errors.
    pub field: &'static str,
}

/// A checked request.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// Which API.
    pub dialect: Dialect,
    /// The prompt's source.
    pub source: Source,
    /// Tokens to produce; none for as many as the context holds.
    pub output_max: Option<OutputMax>,
    /// How to choose tokens.
    pub sampling: Sampling,
    /// Texts that end the answer.
    pub stops: Vec<String>,
    /// Tokens that end the answer, besides the model's own.
    pub stop_token_ids: Vec<u32>,
    /// The model's own end tokens do not end the answer.
    pub ignore_eos: bool,
    /// How the answer travels.
    pub delivery: Delivery,
    /// Whose cache.
    pub cache_salt: Option<String>,
}

/// Who is asking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caller {
    /// Presented the node token: the gateway.
    TokenHolder,
    /// Anybody else that was let in.
    Anonymous,
}

/// What a request is checked against.
#[derive(Clone, Copy, Debug)]
pub struct Rules<'a> {
    /// The model id served here.
    pub model_id: &'a str,
    /// Token ids are below this.
    pub vocab: usize,
    /// Who asks.
    pub caller: Caller,
    /// Drawn by the server for requests without a seed.
    pub seed: u64,
}

/// Reads and checks a body.
pub fn parse(body: &[u8], dialect: Dialect, rules: &Rules<'_>) -> Result<Generation, ApiError> {
    let value = parse_json(body)?;
    let object = value.as_object().ok_or_else(|| {
        invalid_json("The body must be a JSON object, such as {\"model\": …}.".into())
    })?;
    let fields = Fields(object);
    check_model(&fields, rules)?;
    unsupported::check(&fields)?;
    let source = match fields.tokens("prompt_token_ids", rules.vocab)? {
        Some(tokens) => tokens_source("prompt_token_ids", tokens, rules)?,
        None => match dialect {
            Dialect::Chat => chat_source(&fields)?,
            Dialect::Completions => text_source(&fields, rules)?,
        },
    };
    Ok(Generation {
        dialect,
        source,
        output_max: output_max(&fields, dialect)?,
        sampling: sampling(&fields, rules)?,
        stops: stops(&fields)?,
        stop_token_ids: fields
            .tokens("stop_token_ids", rules.vocab)?
            .unwrap_or_default(),
        ignore_eos: fields.flag("ignore_eos")?.unwrap_or(false),
        delivery: delivery(&fields)?,
        cache_salt: cache_salt(&fields)?,
    })
}

fn parse_json(body: &[u8]) -> Result<Value, ApiError> {
    let text = std::str::from_utf8(body).map_err(|error| {
        let at = error.valid_up_to();
        invalid_json(format!(
            "The body is not UTF-8: the byte at offset {at} begins no character."
        ))
    })?;
    serde_json::from_str(text)
        .map_err(|error| invalid_json(format!("The body is not valid JSON: {error}.")))
}

fn invalid_json(message: String) -> ApiError {
    ApiError::new(Kind::Invalid, "invalid_json", message)
}

fn check_model(fields: &Fields<'_>, rules: &Rules<'_>) -> Result<(), ApiError> {
    let model = fields.text("model")?.ok_or_else(|| missing("model"))?;
    if model == rules.model_id {
        return Ok(());
    }
    let message = format!(
        "The model `{}` does not exist here; this node serves `{}`.",
        shortened(model),
        rules.model_id
    );
    Err(ApiError::new(Kind::NotFound, "model_not_found", message).with_param("model"))
}

/// At most this much of a client's own text comes back in an error.
fn shortened(text: &str) -> String {
    text.chars().take(128).collect()
}

fn tokens_source(name: &str, tokens: Vec<u32>, rules: &Rules<'_>) -> Result<Source, ApiError> {
    if rules.caller != Caller::TokenHolder {
        let message = format!(
            "`{name}` with token ids is accepted only from a caller with the node token. \
             Send text, or start the node with a token and present it."
        );
        let error = ApiError::new(Kind::Forbidden, "node_token_required", message);
        return Err(error.with_param(name));
    }
    if tokens.is_empty() {
        return Err(ApiError::field(
            name,
            format!("`{name}` is empty; send at least one token."),
        ));
    }
    Ok(Source::Tokens(tokens))
}

fn chat_source(fields: &Fields<'_>) -> Result<Source, ApiError> {
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

fn output_max(fields: &Fields<'_>, dialect: Dialect) -> Result<Option<OutputMax>, ApiError> {
    let bound = |field| {
        let tokens = fields.integer(field, 1)?;
        let tokens = tokens.map(|tokens| usize::try_from(tokens).unwrap_or(usize::MAX));
        Ok(tokens.map(|tokens| OutputMax { tokens, field }))
    };
    let older = bound("max_tokens")?;
    match dialect {
        Dialect::Chat => Ok(bound("max_completion_tokens")?.or(older)),
        Dialect::Completions => {
            let default = OutputMax {
                tokens: COMPLETION_TOKENS_DEFAULT,
                field: "max_tokens",
            };
            Ok(older.or(Some(default)))
        }
    }
}

fn sampling(fields: &Fields<'_>, rules: &Rules<'_>) -> Result<Sampling, ApiError> {
    let top_p = fields.number("top_p", (0.0, 1.0))?.unwrap_or(1.0);
    if top_p == 0.0 {
        let message = "`top_p` is 0; it must be above 0. For the most likely token always, send \
                       `temperature` 0.";
        return Err(ApiError::field("top_p", message));
    }
    // vLLM's -1 and 0 both mean all.
    let top_k = fields.integer("top_k", -1)?.filter(|k| *k > 0);
    let seed = match fields.get("seed") {
        None => rules.seed,
        Some(value) => {
            let signed = value.as_i64().map(i64::cast_unsigned).or(value.as_u64());
            signed.ok_or_else(|| wrong("seed", "an integer of 64 bits", value))?
        }
    };
    Ok(Sampling {
        temperature: fields.number("temperature", (0.0, 2.0))?.unwrap_or(1.0) as f32,
        top_k: top_k.map(|k| usize::try_from(k).unwrap_or(usize::MAX)),
        top_p: top_p as f32,
        seed,
        ..Sampling::GREEDY
    })
}

fn stops(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    let stops = match fields.get("stop") {
        None => return Ok(Vec::new()),
        Some(Value::String(stop)) => vec![stop.clone()],
        Some(Value::Array(stops)) => {
            let text = |(index, stop): (usize, &Value)| {
                let param = format!("stop[{index}]");
                stop.as_str()
                    .map(str::to_owned)
                    .ok_or_else(|| wrong(&param, "a string", stop))
            };
            stops
                .iter()
                .enumerate()
                .map(text)
                .collect::<Result<_, _>>()?
        }
        Some(other) => return Err(wrong("stop", "a string or an array of strings", other)),
    };
    if stops.len() > STOPS_MAX {
        let message = format!(
            "`stop` has {} strings; at most {STOPS_MAX} are allowed.",
            stops.len()
        );
        return Err(ApiError::field("stop", message));
    }
    if stops
        .iter()
        .any(|stop| stop.is_empty() || stop.len() > STOP_BYTES_MAX)
    {
        let message = format!("Each string of `stop` must have 1 to {STOP_BYTES_MAX} bytes.");
        return Err(ApiError::field("stop", message));
    }
    Ok(stops)
}

fn delivery(fields: &Fields<'_>) -> Result<Delivery, ApiError> {
    let options = fields.object("stream_options")?;
    if !fields.flag("stream")?.unwrap_or(false) {
        return match options {
            None => Ok(Delivery::Whole),
            Some(_) => {
                let message = "`stream_options` is only allowed when `stream` is true.";
                Err(ApiError::field("stream_options", message))
            }
        };
    }
    let Some(options) = options else {
        return Ok(Delivery::Stream(UsageChunks::None));
    };
    let options = Fields(options);
    let named = |error: ApiError| {
        let param = format!(
            "stream_options.{}",
            error.param.as_deref().unwrap_or_default()
        );
        error.with_param(param)
    };
    let last = options
        .flag("include_usage")
        .map_err(named)?
        .unwrap_or(false);
    let every = options
        .flag("continuous_usage_stats")
        .map_err(named)?
        .unwrap_or(false);
    Ok(Delivery::Stream(match (last, every) {
        (true, true) => UsageChunks::Every,
        (true, false) => UsageChunks::Last,
        (false, _) => UsageChunks::None,
    }))
}

fn cache_salt(fields: &Fields<'_>) -> Result<Option<String>, ApiError> {
    let Some(salt) = fields.text("cache_salt")? else {
        return Ok(None);
    };
    let allowed = |c: char| !matches!(c, '@' | '/' | '\\' | '\0');
    let length = salt.chars().count();
    if (1..=CACHE_SALT_CHARS_MAX).contains(&length) && salt.chars().all(allowed) {
        return Ok(Some(salt.to_owned()));
    }
    let message = format!(
        "`cache_salt` must have 1 to {CACHE_SALT_CHARS_MAX} characters, none of them `@`, `/`, \
         `\\` or NUL."
    );
    Err(ApiError::field("cache_salt", message))
}

#[cfg(test)]
mod tests;
