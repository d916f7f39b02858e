//! Are the tokens the reference's, and are hostile files and requests refused? One test program,
//! so that the model is read once.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test stops at the first surprise"
)]

mod answers;
mod chat;
mod common;
mod gguf_file;
mod golden;
mod growing;
mod segments;
mod sentencepiece;
mod tokenizer_reference;
mod tools;
mod vocabularies;
