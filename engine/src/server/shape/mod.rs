//! What does an answer look like in OpenAI's two dialects?
//!
//! Values in, JSON out; no IO. Whole answers are built as JSON values (`whole`); chunks of a stream
//! are written by hand (`chunk`), since there is one for every token of every client.

mod chunk;
mod logprobs;
mod whole;

use std::sync::Arc;

use serde_json::{Value, json};

use crate::engine::Usage;
use crate::request::Dialect;
use crate::request::prepare::Served;
pub(super) use chunk::ChunkUsage;
pub(super) use logprobs::Offset;

/// What all parts of one answer share.
pub(super) struct Shape {
    /// Which API.
    pub(super) dialect: Dialect,
    /// The answer's id.
    pub(super) id: String,
    /// Unix seconds.
    pub(super) created: i64,
    /// Knows the model's name, and what its tokens spell.
    pub(super) served: Arc<Served>,
    /// Whether token ids are told.
    pub(super) token_ids: bool,
    /// Whether log probabilities are told.
    pub(super) logprobs: bool,
    /// What each choice's text begins with.
    pub(super) echo: String,
    /// How every chunk begins, up to its choices.
    pub(super) prefix: Vec<u8>,
}

impl Shape {
    /// Makes the part of chunks that never changes; to be called once all else is known.
    pub(super) fn with_prefix(mut self) -> Self {
        let object = match self.dialect {
            Dialect::Chat => "chat.completion.chunk",
            Dialect::Completions => "text_completion",
        };
        let head = json!({
            "id": self.id, "object": object, "created": self.created,
            "model": &*self.served.model_id,
        });
        let head = head.to_string();
        let open = head.strip_suffix('}').unwrap_or(&head);
        self.prefix = format!("data: {open},\"choices\":[").into_bytes();
        self
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

#[cfg(test)]
mod tests;
