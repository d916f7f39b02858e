//! Which tokens may come next, when a grammar says so?
//!
//! A client's [`Spec`] (JSON schema, regular expression, grammar, choice, required tool call)
//! becomes a grammar that a [`Compiler`] checks, compiles and keeps. A [`Constraint`] walks it along
//! one answer: which tokens are allowed ([`Constraint::mask`]), which follow without a choice
//! ([`Constraint::forced`]), and how the answer can be completed before its budget of tokens runs
//! out ([`Constraint::completion`]).
//!
//! The grammar library (llguidance) reads grammars and computes masks. What it does not know is how
//! far an answer is from its end: it is only ever asked what may come next. So a second parse of the
//! same grammar runs beside it, over lexemes, that knows the cheapest way to finish from each state.
//! From it come the shortest completion and the promise that no allowed token makes an answer
//! impossible to finish within its budget.
//!
//! Pure: no IO, no clock, no threads. Bytes and a closure stand for the tokenizer.

mod chart;
mod compiler;
mod constraint;
mod error;
mod finish;
mod grammar;
mod lexemes;
mod limits;
mod rules;
mod schema;
mod spec;
mod vocabulary;
mod worst;

pub use compiler::{Compiled, Compiler};
pub use constraint::{Constraint, Mask};
pub use error::{BadVocabulary, Broken, Refused};
pub use spec::{CallCount, Calls, Reasoning, Spec, Tool};
pub use vocabulary::{TokenText, Tokenize, Vocabulary};
