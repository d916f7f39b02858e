//! What is wrong with a model folder? Each kind names the file, and what would do in its place.

use super::{CONFIG, TOKENIZER};

/// Why a model in Hugging Face's layout cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CheckpointError {
    /// A file that every model has.
    #[error("the folder has no {name}; {}", advice(name))]
    Missing {
        /// The file.
        name: &'static str,
    },
    /// A file that is not what its name says.
    #[error("{file} {why}")]
    Damaged {
        /// The file.
        file: String,
        /// What is wrong with it.
        why: String,
    },
    /// A value of the wrong type, or one that nothing here can run.
    #[error("{file}: {key} is {found}; it must be {allowed}")]
    Value {
        /// The file.
        file: &'static str,
        /// The key, with dots where it lies deeper.
        key: String,
        /// What the file says, or "missing".
        found: String,
        /// What would do.
        allowed: String,
    },
    /// One tensor of a file of weights.
    #[error("{file}: tensor {name} {why}")]
    Tensor {
        /// The file.
        file: String,
        /// The tensor, as the file names it.
        name: String,
        /// What is wrong with it.
        why: String,
    },
}

impl CheckpointError {
    pub(super) fn damaged(file: &str, why: impl Into<String>) -> Self {
        Self::Damaged {
            file: file.to_owned(),
            why: why.into(),
        }
    }

    pub(super) fn tensor(file: &str, name: &str, why: impl Into<String>) -> Self {
        Self::Tensor {
            file: file.to_owned(),
            // Names come from the file and may be long.
            name: name.chars().take(200).collect(),
            why: why.into(),
        }
    }

    pub(super) fn value(
        file: &'static str,
        key: impl Into<String>,
        found: impl Into<String>,
        allowed: impl Into<String>,
    ) -> Self {
        Self::Value {
            file,
            key: key.into(),
            found: found.into(),
            allowed: allowed.into(),
        }
    }
}

fn advice(name: &str) -> &'static str {
    match name {
        CONFIG => "name a folder as `save_pretrained` writes it, or a GGUF file",
        TOKENIZER => {
            "save the tokenizer beside the model (`tokenizer.save_pretrained`): a tokenizer.model alone is not read"
        }
        _ => "download the model again; weights in pytorch_model.bin are not read",
    }
}
