//! What does the next piece of text add?

use crate::{Piece, Syntax};

/// Takes an answer's text apart, piece by piece.
#[derive(Debug)]
pub struct Parser {
    syntax: Syntax,
    offered: Vec<String>,
    calls: usize,
}

impl Parser {
    /// A parser for one answer; `offered` are the names of the request's tools.
    pub fn new(syntax: Syntax, offered: &[String]) -> Self {
        Self {
            syntax,
            offered: offered.to_vec(),
            calls: 0,
        }
    }

    /// Adds text, and returns what is certain now.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        vec![Piece::Content(text.to_owned())]
    }

    /// The answer is over: what was held back is text after all.
    pub fn finish(&mut self) -> Vec<Piece> {
        let _ = (&self.syntax, &self.offered);
        Vec::new()
    }

    /// How many calls have begun.
    pub fn calls(&self) -> usize {
        self.calls
    }
}
