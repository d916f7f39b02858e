//! What tokens does this request become? One answer, used by gateway and engine alike.
//!
//! The way of a prompt: `gguf` reads the model file's header, `tokenizer` and `template` are built
//! from its metadata, `build` normalises a chat request, renders it and turns the text into
//! tokens, and `segments` remembers what text became which tokens, so that a turn costs its new
//! part. Pure: bytes and values in, values out; the clock is an argument.
//!
//! Left out on purpose: reading files (callers map them), SentencePiece vocabularies (refused by
//! name), images and audio in messages (refused by the name of the part).

pub mod gguf;

mod build;
mod error;
mod segments;
mod tokenizer;

pub use build::{ChatInput, PromptBuilder};
pub use error::{LoadError, PromptError};
pub use segments::SegmentCache;
pub use tokenizer::Tokenizer;
