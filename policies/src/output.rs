//! How long will this answer be?
//!
//! From the session's own past where it has one, and else from everybody's: agents write about as
//! much in one turn as in the next, and much less than they are allowed to. Both are means that
//! fade, so that a few long answers do not count for ever. The caller names the session (and, if
//! it likes, the tenant) with a number.

use std::collections::HashMap;

use crate::cost::{to_f64, to_tokens};

/// Expected before anything is known: a turn of an agent that calls a tool.
const OUTPUT_TOKENS_FIRST: f64 = 256.0;
/// Weight of a new answer in its session's mean.
const SESSION_WEIGHT: f64 = 0.3;
/// Weight of a new answer in everybody's mean.
const ALL_WEIGHT: f64 = 0.01;
/// Sessions remembered; at the limit all are forgotten, which costs a worse guess for a turn each.
const SESSIONS_MAX: usize = 100_000;

/// Learns lengths of answers.
#[derive(Clone, Debug)]
pub struct OutputLengths {
    all: f64,
    sessions: HashMap<u64, f64>,
}

impl Default for OutputLengths {
    fn default() -> Self {
        Self {
            all: OUTPUT_TOKENS_FIRST,
            sessions: HashMap::new(),
        }
    }
}

impl OutputLengths {
    /// Tokens that the session's next answer will have, at least 1.
    pub fn expected(&self, session: u64) -> u64 {
        let tokens = self.sessions.get(&session).unwrap_or(&self.all);
        to_tokens(tokens.round()).max(1)
    }

    /// An answer of the session had so many.
    pub fn learn(&mut self, session: u64, tokens: u64) {
        let tokens = to_f64(tokens);
        self.all += ALL_WEIGHT * (tokens - self.all);
        if self.sessions.len() >= SESSIONS_MAX && !self.sessions.contains_key(&session) {
            self.sessions.clear();
        }
        let own = self.sessions.entry(session).or_insert(tokens);
        *own += SESSION_WEIGHT * (tokens - *own);
    }
}

#[cfg(test)]
mod tests;
