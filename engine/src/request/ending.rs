//! What ends this answer, and how does it travel?

use std::time::Duration;

use serde_json::Value;

use super::fields::{Fields, under, wrong};
use super::{Delivery, Dialect, OutputMax, UsageChunks};
use crate::error::ApiError;

/// Stop strings in one request. OpenAI allows 4; agents send more to local engines.
pub const STOPS_MAX: usize = 16;
/// Bytes of one stop string; it is searched for after every token.
pub const STOP_BYTES_MAX: usize = 256;
/// What `/v1/completions` produces when the request does not say, as OpenAI has it.
const COMPLETION_TOKENS_DEFAULT: usize = 16;
/// The longest time that a request may give itself: a day.
const TIMEOUT_S_MAX: f64 = 86_400.0;

/// Reads how many tokens there may be.
pub(super) fn output_max(
    fields: &Fields<'_>,
    dialect: Dialect,
) -> Result<Option<OutputMax>, ApiError> {
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

/// Reads how many tokens there must be.
pub(super) fn output_min(fields: &Fields<'_>, most: Option<OutputMax>) -> Result<usize, ApiError> {
    let least = fields.integer("min_tokens", 0)?.unwrap_or(0);
    let least = usize::try_from(least).unwrap_or(usize::MAX);
    match most {
        Some(most) if least > most.tokens => {
            let message = format!(
                "`min_tokens` is {least}, and `{}` allows at most {}.",
                most.field, most.tokens
            );
            Err(ApiError::field("min_tokens", message))
        }
        _ => Ok(least),
    }
}

/// Reads `stop`.
pub(super) fn stops(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
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

/// Reads `stream` and its options.
pub(super) fn delivery(fields: &Fields<'_>) -> Result<Delivery, ApiError> {
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
    let flag = |name| {
        let flag = options.flag(name);
        let flag = flag.map_err(|error| under("stream_options", error))?;
        Ok::<_, ApiError>(flag.unwrap_or(false))
    };
    let last = flag("include_usage")?;
    let every = flag("continuous_usage_stats")?;
    Ok(Delivery::Stream(match (last, every) {
        (true, true) => UsageChunks::Every,
        (true, false) => UsageChunks::Last,
        (false, _) => UsageChunks::None,
    }))
}

/// Reads `timeout`, in seconds.
pub(super) fn timeout(fields: &Fields<'_>) -> Result<Option<Duration>, ApiError> {
    let seconds = fields.number("timeout", (0.001, TIMEOUT_S_MAX))?;
    Ok(seconds.map(Duration::from_secs_f64))
}

/// Reads the header `x-cache-retention-s`.
pub fn retention_header(value: &str) -> Result<Duration, ApiError> {
    let seconds = value.trim().parse::<u32>().ok();
    let keep = seconds.map(|seconds| Duration::from_secs(seconds.into()));
    keep.ok_or_else(|| {
        let message = "`x-cache-retention-s` must be a whole number of seconds.";
        ApiError::field("x-cache-retention-s", message)
    })
}

/// Reads the header `x-kv-prefetch-tokens`.
pub fn prefetch_header(value: &str) -> Result<usize, ApiError> {
    value.trim().parse::<u32>().map_or_else(
        |_| {
            let message = "`x-kv-prefetch-tokens` must be a whole number of tokens.";
            Err(ApiError::field("x-kv-prefetch-tokens", message))
        },
        |tokens| Ok(tokens as usize),
    )
}

/// Reads the header `x-request-timeout-ms`.
pub fn timeout_header(value: &str) -> Result<Duration, ApiError> {
    let most = TIMEOUT_S_MAX * 1e3;
    let milliseconds = value.trim().parse::<u64>().ok();
    let milliseconds = milliseconds.filter(|ms| (1..=most as u64).contains(ms));
    milliseconds.map(Duration::from_millis).ok_or_else(|| {
        let message = format!("`x-request-timeout-ms` must be an integer, 1 to {most}.");
        ApiError::field("x-request-timeout-ms", message)
    })
}
