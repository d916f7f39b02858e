//! What does an answer owe to the node that computed its prompt?
//!
//! The cached tokens in its usage: the node that answers counts all that was handed to it as cached,
//! while the client is charged for what the other one had to compute. They are put into the usage of
//! every chunk and of whole answers before anything else reads them, so that the bill, the client
//! and every translation agree. Beside it, the other node's share of the load, which ends with the
//! first token: until then it keeps the prompt's KV.

use std::sync::Arc;
use std::time::Instant;

use policies::transfer::Handed;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::fleet::{InFlight, Node};

/// A prompt that another node has computed.
pub(crate) struct Prefilled {
    /// That node.
    pub(crate) node: Arc<Node>,
    /// Prompt tokens that it read from its cache.
    pub(crate) cached_tokens: u64,
    /// Its share of the load; none once the KV has been taken.
    pub(crate) load: Option<InFlight>,
    /// When it was done.
    pub(crate) at: Instant,
    /// How long KV travelled along with the prefill; 0 where it did not.
    pub(crate) along_ms: f64,
    /// What had to be moved.
    pub(crate) bytes: f64,
}

impl Prefilled {
    /// The first token has come: the KV has arrived, and the other node may let go of it.
    pub(super) fn arrived(&mut self, at: &Node) {
        if self.load.take().is_none() {
            return;
        }
        at.took(Handed {
            bytes: self.bytes,
            waited_ms: self.at.elapsed().as_secs_f64() * 1000.0,
            along_ms: self.along_ms,
        });
    }
}

#[derive(Deserialize)]
struct Answer<'a> {
    #[serde(borrow)]
    usage: Option<&'a RawValue>,
}

/// The JSON object with so many cached tokens in its usage; none if it has no usage.
pub(super) fn with_cached(json: &[u8], cached_tokens: u64) -> Option<Vec<u8>> {
    let text = std::str::from_utf8(json).ok()?;
    // Lists of fields are objects to serde, and no answers.
    text.trim_start().strip_prefix('{')?;
    let answer: Answer<'_> = serde_json::from_str(text).ok()?;
    let raw = answer.usage?.get();
    let mut usage: Map<String, Value> = serde_json::from_str(raw).ok()?;
    let prompt_tokens = usage.get("prompt_tokens").and_then(Value::as_u64);
    let cached = cached_tokens.min(prompt_tokens.unwrap_or(u64::MAX));
    let details = usage.entry("prompt_tokens_details").or_insert(Value::Null);
    match details {
        Value::Object(details) => {
            details.insert("cached_tokens".to_owned(), cached.into());
        }
        other => *other = serde_json::json!({ "cached_tokens": cached }),
    }
    // A raw value is a part of the text that it was read from.
    let begin = raw.as_ptr() as usize - text.as_ptr() as usize;
    let (before, behind) = (&json[..begin], &json[begin + raw.len()..]);
    let usage = Value::Object(usage).to_string();
    Some([before, usage.as_bytes(), behind].concat())
}

#[cfg(test)]
mod tests {
    //! Catches a usage whose other figures change, and one that is found within a text.
    use super::*;

    #[test]
    fn only_the_cached_tokens_change() {
        for (json, expected) in [
            (
                r#"{"choices":[],"usage":{"prompt_tokens":100,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":99,"audio_tokens":0}},"x":1.50}"#,
                Some(
                    r#"{"choices":[],"usage":{"prompt_tokens":100,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":64,"audio_tokens":0}},"x":1.50}"#,
                ),
            ),
            (
                r#"{"usage" : {"prompt_tokens":100,"prompt_tokens_details":null}}"#,
                Some(
                    r#"{"usage" : {"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":64}}}"#,
                ),
            ),
            (
                r#"{"usage":{"prompt_tokens":32}}"#,
                Some(
                    r#"{"usage":{"prompt_tokens":32,"prompt_tokens_details":{"cached_tokens":32}}}"#,
                ),
            ),
            (r#"{"usage":null}"#, None),
            (r#"{"choices":[{"usage":{"prompt_tokens":1}}]}"#, None),
            (r#"["usage"]"#, None),
            ("not JSON", None),
        ] {
            let found = with_cached(json.as_bytes(), 64);
            let found = found.map(|json| String::from_utf8(json).expect("UTF-8"));
            assert_eq!(found.as_deref(), expected, "{json}");
        }
    }
}
