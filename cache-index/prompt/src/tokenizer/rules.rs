//! Which rules does a model file ask for? `tokenizer.ggml.model` names the kind of vocabulary,
//! `tokenizer.ggml.pre` what is done to text before merging. What has not been compared with its
//! reference is refused by name.

use super::bpe::WholeWords;
use super::split::{Marks, Split};
use crate::error::LoadError;
use crate::gguf::Header;

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";

/// What the reference does, by the names in the model file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    pub(super) scheme: Scheme,
    /// Whether a plain prompt begins with BOS where the file does not say.
    pub(super) adds_bos: bool,
}

/// How text becomes tokens.
#[derive(Debug, Clone, Copy)]
pub(super) enum Scheme {
    /// Words by a pattern, bytes merged by rank.
    ByteLevel {
        split: Split,
        normal_form: NormalForm,
        whole_words: WholeWords,
    },
    /// SentencePiece: blanks are characters of tokens, characters are merged by the score of what
    /// comes of it, and what has no token is spelled in bytes.
    SentencePiece { prefix: SpacePrefix },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NormalForm {
    AsIs,
    Nfc,
}

/// What stands before a text, and before the text behind a special token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SpacePrefix {
    Nothing,
    Blank,
}

impl Rules {
    pub(super) fn from_gguf(header: &Header) -> Result<Self, LoadError> {
        let text = |key| header.get(key).and_then(|value| value.as_str());
        match text(MODEL).unwrap_or("missing") {
            "gpt2" => Self::byte_level(text(PRE).unwrap_or("default")),
            "llama" => {
                let key = "tokenizer.ggml.add_space_prefix";
                let prefix = match header.get(key).and_then(|value| value.as_bool()) {
                    Some(false) => SpacePrefix::Nothing,
                    Some(true) | None => SpacePrefix::Blank,
                };
                Ok(Self {
                    scheme: Scheme::SentencePiece { prefix },
                    adds_bos: true,
                })
            }
            other => Err(LoadError::Unsupported {
                key: MODEL,
                value: other.to_owned(),
                supported: "gpt2 (byte-level BPE), llama (SentencePiece BPE)",
            }),
        }
    }

    fn byte_level(pre: &str) -> Result<Self, LoadError> {
        let words = |split| (split, NormalForm::AsIs, WholeWords::WhenMerged);
        let cl100k = |numbers_max, marks| Split::Cl100k { numbers_max, marks };
        let ((split, normal_form, whole_words), adds_bos) = match pre {
            "default" | "gpt-2" | "mpt" => (words(Split::Gpt2), false),
            "smollm" | "starcoder" | "refact" | "command-r" => (words(Split::SmolLm), false),
            "llama-bpe" | "llama-v3" | "llama3" => {
                let split = cl100k(3, Marks::AreOther);
                ((split, NormalForm::AsIs, WholeWords::Always), true)
            }
            "smaug-bpe" => (words(cl100k(3, Marks::AreOther)), false),
            "qwen2" => {
                let split = cl100k(1, Marks::AreOther);
                ((split, NormalForm::Nfc, WholeWords::WhenMerged), false)
            }
            // Its expected tokens leave decomposed characters as they are.
            "qwen35" => (words(cl100k(1, Marks::AreLetters)), false),
            "tekken" => ((Split::Tekken, NormalForm::AsIs, WholeWords::Always), true),
            other => {
                return Err(LoadError::Unsupported {
                    key: PRE,
                    value: other.to_owned(),
                    supported: "llama-bpe, smaug-bpe, tekken, qwen2, qwen35, smollm, starcoder, \
                                refact, command-r, gpt-2, mpt, default",
                });
            }
        };
        let scheme = Scheme::ByteLevel {
            split,
            normal_form,
            whole_words,
        };
        Ok(Self { scheme, adds_bos })
    }
}
