//! Constrained answers from outside: what is taken, what is refused, and what is promised.

#![expect(clippy::panic, reason = "a helper fails its test with what it saw")]

mod forms;
mod promise;
mod refusals;
mod schemas;
mod vocabulary;
mod walk;
