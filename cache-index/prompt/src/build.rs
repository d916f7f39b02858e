//! How does a request become tokens?

use crate::error::{LoadError, PromptError};
use crate::gguf::Header;
use crate::segments::SegmentCache;
use crate::tokenizer::Tokenizer;

/// A chat request's parts that reach the model.
#[derive(Debug, Clone, Copy)]
pub struct ChatInput<'a> {
    /// The request's `messages`.
    pub messages: &'a [serde_json::Value],
    /// The request's `tools`.
    pub tools: Option<&'a serde_json::Value>,
    /// The request's `chat_template_kwargs`: extra variables for the template.
    pub template_kwargs: Option<&'a serde_json::Map<String, serde_json::Value>>,
    /// Now, for templates that print the date (UTC).
    pub unix_seconds: i64,
}

/// Tokenizer and chat template of one model.
#[derive(Debug)]
pub struct PromptBuilder {
    tokenizer: Tokenizer,
}

impl PromptBuilder {
    /// Builds both from a model file's metadata.
    pub fn from_gguf(header: &Header) -> Result<Self, LoadError> {
        Ok(Self {
            tokenizer: Tokenizer::from_gguf(header)?,
        })
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The tokens of a chat request, generation prompt included.
    pub fn chat(&self, _: &ChatInput<'_>, _: &SegmentCache) -> Result<Vec<u32>, PromptError> {
        Err(PromptError::NoTemplate)
    }

    /// The tokens of a plain prompt.
    pub fn completion(&self, text: &str, _: &SegmentCache) -> Vec<u32> {
        self.tokenizer.encode_with_specials(text)
    }
}
