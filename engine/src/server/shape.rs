//! What does an answer look like in OpenAI's two dialects?
//!
//! Values in, JSON out; no IO. Every chunk carries id, object, created and model; the role comes
//! in the first one; usage where the request asked for it.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::engine::Usage;
use crate::metrics::Ending;
use crate::request::{Dialect, UsageChunks};

/// What all chunks of one answer share.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    /// Which API.
    pub(super) dialect: Dialect,
    /// The answer's id.
    pub(super) id: String,
    /// Unix seconds.
    pub(super) created: i64,
    /// The model id.
    pub(super) model: Arc<str>,
}

impl Shape {
    /// The whole answer.
    pub(super) fn whole(&self, text: &str, ending: Ending, usage: &Usage) -> Value {
        let finish_reason = ending.as_str();
        let choice = match self.dialect {
            Dialect::Chat => json!({
                "index": 0,
                "message": {"role": "assistant", "content": text, "refusal": null},
                "logprobs": null,
                "finish_reason": finish_reason,
            }),
            Dialect::Completions => json!({
                "index": 0, "text": text, "logprobs": null, "finish_reason": finish_reason,
            }),
        };
        let object = match self.dialect {
            Dialect::Chat => "chat.completion",
            Dialect::Completions => "text_completion",
        };
        json!({
            "id": self.id, "object": object, "created": self.created, "model": &*self.model,
            "choices": [choice], "usage": usage_value(usage),
        })
    }

    /// The chunk that opens a stream: the role, for chat; nothing for completions.
    pub(super) fn opening(&self) -> Option<Value> {
        let delta = json!({"role": "assistant", "content": ""});
        match self.dialect {
            Dialect::Chat => Some(self.chunk(json!([{
                "index": 0, "delta": delta, "logprobs": null, "finish_reason": null,
            }]))),
            Dialect::Completions => None,
        }
    }

    /// A chunk with text, the last of them with the reason why it ended.
    pub(super) fn text(&self, text: &str, ending: Option<Ending>) -> Value {
        let finish_reason = ending.map(Ending::as_str);
        let choice = match self.dialect {
            Dialect::Chat => {
                let delta = if text.is_empty() {
                    json!({})
                } else {
                    json!({"content": text})
                };
                json!({
                    "index": 0, "delta": delta, "logprobs": null, "finish_reason": finish_reason,
                })
            }
            Dialect::Completions => json!({
                "index": 0, "text": text, "logprobs": null, "finish_reason": finish_reason,
            }),
        };
        self.chunk(json!([choice]))
    }

    /// The chunk that only tells the usage.
    pub(super) fn usage(&self, usage: &Usage) -> Value {
        let mut chunk = self.chunk(json!([]));
        chunk["usage"] = usage_value(usage);
        chunk
    }

    /// Adds what `usage_chunks` wants on a chunk that is not the last.
    pub(super) fn with_usage(&self, mut chunk: Value, chunks: UsageChunks, usage: &Usage) -> Value {
        match chunks {
            UsageChunks::None => {}
            UsageChunks::Last => chunk["usage"] = Value::Null,
            UsageChunks::Every => chunk["usage"] = usage_value(usage),
        }
        chunk
    }

    fn chunk(&self, choices: Value) -> Value {
        let object = match self.dialect {
            Dialect::Chat => "chat.completion.chunk",
            Dialect::Completions => "text_completion",
        };
        json!({
            "id": self.id, "object": object, "created": self.created, "model": &*self.model,
            "choices": choices,
        })
    }
}

fn usage_value(usage: &Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    })
}
