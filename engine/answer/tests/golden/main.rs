//! Do real answers of each family come apart as their templates mean them?
//!
//! Each row is an answer and what it holds. It is parsed whole, cut at every character, in single
//! characters, and at random. The forms are those of the families' chat templates, of the examples
//! in their documentation, and of what models write when they err.

mod check;
mod deepseek;
mod detect;
mod hermes;
mod kimi;
mod limits;
mod llama;
mod mistral;
mod reasoning;
