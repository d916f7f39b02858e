//! How does this request choose its tokens?
//!
//! OpenAI's limits where it has them, vLLM's for its own fields. Bounds keep arithmetic finite: a
//! repetition penalty near 0 would turn ordinary logits into infinities.

use serde_json::Value;

use super::fields::{Fields, wrong};
use super::{Dialect, Rules};
use crate::error::ApiError;
use crate::sample::Sampling;

/// Entries of `logit_bias`. OpenAI names no bound; lists of forbidden words have some hundred.
pub const LOGIT_BIAS_MAX: usize = 1024;
/// Alternatives for each token in chat, as OpenAI has it.
const CHAT_LOGPROBS_MAX: usize = 20;
/// Alternatives for each token in completions, as OpenAI has it.
const COMPLETION_LOGPROBS_MAX: usize = 5;

/// Reads the fields that decide how tokens are drawn.
pub(super) fn sampling(fields: &Fields<'_>, rules: &Rules<'_>) -> Result<Sampling, ApiError> {
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
    let number = |name, range, neutral| {
        let number = fields.number(name, range)?;
        Ok::<_, ApiError>(number.unwrap_or(neutral) as f32)
    };
    Ok(Sampling {
        temperature: number("temperature", (0.0, 2.0), 1.0)?,
        top_k: top_k.map(|k| usize::try_from(k).unwrap_or(usize::MAX)),
        top_p: top_p as f32,
        min_p: number("min_p", (0.0, 1.0), 0.0)?,
        seed,
        presence_penalty: number("presence_penalty", (-2.0, 2.0), 0.0)?,
        frequency_penalty: number("frequency_penalty", (-2.0, 2.0), 0.0)?,
        repetition_penalty: number("repetition_penalty", (0.01, 100.0), 1.0)?,
        logit_bias: logit_bias(fields, rules.vocab)?,
    })
}

fn logit_bias(fields: &Fields<'_>, vocab: usize) -> Result<Vec<(u32, f32)>, ApiError> {
    let Some(entries) = fields.object("logit_bias")? else {
        return Ok(Vec::new());
    };
    if entries.len() > LOGIT_BIAS_MAX {
        let message = format!(
            "`logit_bias` has {} entries; at most {LOGIT_BIAS_MAX} are allowed.",
            entries.len()
        );
        return Err(ApiError::field("logit_bias", message));
    }
    let entry = |(name, value): (&String, &Value)| {
        let param = || format!("logit_bias.{}", name.chars().take(32).collect::<String>());
        let id = name.parse::<u32>().ok();
        let id = id.filter(|id| (*id as usize) < vocab).ok_or_else(|| {
            let message = format!("`{}` must be named by a token id below {vocab}.", param());
            ApiError::field(param(), message)
        })?;
        let bias = value
            .as_f64()
            .ok_or_else(|| wrong(&param(), "a number", value))?;
        if !(-100.0..=100.0).contains(&bias) {
            let message = format!("`{}` is {bias}; it must be -100 to 100.", param());
            return Err(ApiError::field(param(), message));
        }
        Ok((id, bias as f32))
    };
    entries.iter().map(entry).collect()
}

/// How many alternatives to report for each token; none for no report.
pub(super) fn logprobs(fields: &Fields<'_>, dialect: Dialect) -> Result<Option<usize>, ApiError> {
    match dialect {
        Dialect::Chat => {
            let asked = fields.flag("logprobs")?.unwrap_or(false);
            let top = fields.count("top_logprobs", (0, CHAT_LOGPROBS_MAX))?;
            match (asked, top) {
                (false, Some(1..)) => {
                    let message = "`top_logprobs` needs `logprobs` to be true.";
                    Err(ApiError::field("top_logprobs", message))
                }
                (false, _) => Ok(None),
                (true, top) => Ok(Some(top.unwrap_or(0))),
            }
        }
        Dialect::Completions => {
            // Some clients send chat's boolean; false asks for nothing.
            if fields.get("logprobs") == Some(&Value::Bool(false)) {
                return Ok(None);
            }
            fields.count("logprobs", (0, COMPLETION_LOGPROBS_MAX))
        }
    }
}
