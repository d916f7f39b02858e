//! What does this body ask for?
//!
//! Bytes → checked [`Generation`] → prompt tokens and a job for the engine ([`prepare`]). Every
//! refusal names the field and says what would do. What the engine does not support is refused
//! where ignoring it would change the answer (`unsupported`), and ignored elsewhere.

pub mod constraint;
mod ending;
mod fields;
mod format;
mod other;
pub mod prepare;
mod sampling;
mod source;
mod tools;
mod transfer;
mod unsupported;

use std::time::Duration;

use serde_json::{Map, Value};

use crate::error::{ApiError, Kind};
use crate::sample::Sampling;
pub use ending::{STOP_BYTES_MAX, STOPS_MAX, prefetch_header, retention_header, timeout_header};
use fields::{Fields, missing};
pub use format::Format;
pub use other::{
    Detokenization, Embedding, Encoding, INPUTS_MAX, Release, Tokenization, detokenization,
    embedding, release, tokenization,
};
pub use sampling::LOGIT_BIAS_MAX;
pub use tools::{Parallel, TOOLS_MAX, Tool, ToolChoice, Tools};
pub use transfer::{Task, TransferFrom, TransferTo};

/// Characters of a cache salt, as vLLM has it.
pub const CACHE_SALT_CHARS_MAX: usize = 128;
/// Answers to one prompt, as OpenAI has it.
pub const CHOICES_MAX: usize = 128;

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
#[derive(Clone, Debug)]
pub struct Generation {
    /// Which API.
    pub dialect: Dialect,
    /// The prompt's source.
    pub source: Source,
    /// Answers to the prompt.
    pub choices: usize,
    /// Tokens to produce; none for as many as the context holds.
    pub output_max: Option<OutputMax>,
    /// Tokens before which nothing ends the answer.
    pub output_min: usize,
    /// How to choose tokens.
    pub sampling: Sampling,
    /// Alternatives to report for each token; none for no report.
    pub logprobs: Option<usize>,
    /// Texts that end the answer.
    pub stops: Vec<String>,
    /// Tokens that end the answer, besides the model's own.
    pub stop_token_ids: Vec<u32>,
    /// The model's own end tokens do not end the answer.
    pub ignore_eos: bool,
    /// The tools, and whether they are called.
    pub tools: Tools,
    /// The form that the content must have.
    pub format: Option<Format>,
    /// The answer's text begins with the prompt's.
    pub echo: bool,
    /// The answer tells its tokens' ids.
    pub token_ids: bool,
    /// How the answer travels.
    pub delivery: Delivery,
    /// Whose cache.
    pub cache_salt: Option<String>,
    /// Lower goes first; 0 is ordinary.
    pub priority: i32,
    /// How long it may take.
    pub timeout: Option<Duration>,
    /// What is done.
    pub task: Task,
}

impl Generation {
    /// Whether a grammar has to be compiled for it.
    pub fn is_constrained(&self) -> bool {
        self.format.is_some() || self.tools.are_demanded()
    }
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
    with_fields(body, |fields| generation(fields, dialect, rules))
}

/// Reads a body as the fields of an object.
fn with_fields<T>(
    body: &[u8],
    read: impl FnOnce(&Fields<'_>) -> Result<T, ApiError>,
) -> Result<T, ApiError> {
    let value = parse_json(body)?;
    let object = value.as_object().ok_or_else(|| {
        invalid_json("The body must be a JSON object, such as {\"model\": …}.".into())
    })?;
    read(&Fields(object))
}

fn generation(
    fields: &Fields<'_>,
    dialect: Dialect,
    rules: &Rules<'_>,
) -> Result<Generation, ApiError> {
    check_model(fields, rules)?;
    unsupported::check(fields)?;
    let task = transfer::task(fields, rules)?;
    // A prompt that is computed for another node is as long as it is; the other node ends the answer.
    let output_max = match task {
        Task::HandOver(_) => None,
        Task::Answer | Task::Prefill | Task::TakeOver(_) => ending::output_max(fields, dialect)?,
    };
    let request = Generation {
        dialect,
        source: source::source(fields, dialect, rules)?,
        choices: fields.count("n", (1, CHOICES_MAX))?.unwrap_or(1),
        output_max,
        output_min: ending::output_min(fields, output_max)?,
        sampling: sampling::sampling(fields, rules)?,
        logprobs: sampling::logprobs(fields, dialect)?,
        stops: ending::stops(fields)?,
        stop_token_ids: fields
            .tokens("stop_token_ids", rules.vocab)?
            .unwrap_or_default(),
        ignore_eos: fields.flag("ignore_eos")?.unwrap_or(false),
        tools: match dialect {
            Dialect::Chat => tools::tools(fields)?,
            Dialect::Completions => Tools::NONE,
        },
        format: format::format(fields)?,
        echo: fields.flag("echo")?.unwrap_or(false),
        token_ids: fields.flag("return_token_ids")?.unwrap_or(false),
        delivery: ending::delivery(fields)?,
        cache_salt: cache_salt(fields)?,
        priority: priority(fields)?,
        timeout: ending::timeout(fields)?,
        task,
    };
    check_together(&request)?;
    Ok(request)
}

/// Refuses options that are sound alone and make no sense together.
fn check_together(request: &Generation) -> Result<(), ApiError> {
    let refused = |param: &str, message: &str| Err(ApiError::field(param, message));
    if request.echo && request.dialect == Dialect::Chat {
        return refused("echo", "`echo` is only served by /v1/completions.");
    }
    if request.echo && request.logprobs.is_some() {
        let message = "`echo` with `logprobs` is not served here: the prompt's tokens have none. \
                       Leave one of them out.";
        return refused("echo", message);
    }
    if request.is_constrained() && request.output_min > 0 {
        let message = "`min_tokens` cannot be kept where the answer's form says when it ends; \
                       leave it out.";
        return refused("min_tokens", message);
    }
    if matches!(request.task, Task::Prefill | Task::HandOver(_)) {
        if request.delivery != Delivery::Whole {
            let message = "`stream` must be false when only the prompt is computed.";
            return refused("stream", message);
        }
        if request.choices > 1 && request.task == Task::Prefill {
            return refused("n", "`n` must be 1 when only the prompt is computed.");
        }
    }
    Ok(())
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

fn priority(fields: &Fields<'_>) -> Result<i32, ApiError> {
    let least = i64::from(i32::MIN);
    let priority = fields.integer("priority", least)?.unwrap_or(0);
    i32::try_from(priority).map_err(|_| {
        let message = format!("`priority` must be {least} to {}.", i32::MAX);
        ApiError::field("priority", message)
    })
}

#[cfg(test)]
mod tests;
