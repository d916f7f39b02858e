//! What can go wrong: loading a model file's prompt parts, and turning one request into tokens.
//!
//! `LoadError` is for the operator and names the metadata key; `PromptError` is for the client,
//! names the parameter of the request, and says what to do.

use crate::gguf::GgufError;

/// Why tokenizer or chat template could not be built from a model file.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The header itself could not be read.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A metadata key is missing or holds something unusable.
    #[error("GGUF metadata `{key}`: {why}")]
    Metadata {
        /// The metadata key.
        key: String,
        /// What is wrong with it.
        why: String,
    },
    /// The file wants a tokenizer that this crate does not implement.
    #[error("GGUF metadata `{key}` is {value:?}, which is not supported; supported: {supported}")]
    Unsupported {
        /// The metadata key.
        key: &'static str,
        /// Its value.
        value: String,
        /// What would work.
        supported: &'static str,
    },
    /// The chat template could not be compiled.
    #[error("GGUF metadata `tokenizer.chat_template` does not compile: {0}")]
    Template(String),
}

/// Why a request could not become a prompt; always the client's to fix.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PromptError {
    /// A parameter has the wrong type or a value outside the allowed set.
    #[error("{message}")]
    Invalid {
        /// The parameter, such as `messages[2].role`.
        param: String,
        /// What is wrong and what to send in its place.
        message: String,
    },
    /// The chat template refused the conversation or failed on it.
    #[error("{message}")]
    Template {
        /// The template's own words, and what to do.
        message: String,
    },
    /// The model file has no chat template.
    #[error("this model has no chat template; send the prompt to /v1/completions instead")]
    NoTemplate,
}

impl PromptError {
    /// The parameter of the request to name in the answer, such as `messages[2].content`.
    pub fn param(&self) -> &str {
        match self {
            Self::Invalid { param, .. } => param,
            Self::Template { .. } | Self::NoTemplate => "messages",
        }
    }
}
