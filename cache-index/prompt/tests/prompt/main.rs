//! Are the tokens the reference's, and are hostile files and requests refused? One test program,
//! so that the model is read once.

mod chat;
mod common;
mod gguf_file;
mod golden;
mod tokenizer_reference;
