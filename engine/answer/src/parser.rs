//! Is this reasoning, or the answer itself?
//!
//! Reasoning is one block at the answer's beginning. States: `Before` (only white space so far),
//! `Inside`, `After`. What is not reasoning goes on to [`Calls`]. A section of calls inside the
//! block ends it: Kimi's models go over to calling without closing their thoughts.

use crate::calls::Calls;
use crate::format::marks;
use crate::lexer::{Item, Lexer, Mark};
use crate::sink::Sink;
use crate::{Piece, Syntax};

/// Takes an answer's text apart, piece by piece.
#[derive(Debug)]
pub struct Parser {
    lexer: Lexer,
    splitter: Splitter,
}

#[derive(Debug)]
enum State {
    Before,
    /// `said`: something other than line breaks came.
    Inside {
        said: bool,
    },
    /// `fresh`: only line breaks came since a block ended.
    After {
        fresh: bool,
    },
}

/// Everything behind the lexer.
#[derive(Debug)]
struct Splitter {
    state: State,
    /// White space in front of the answer, or line breaks at the end of the reasoning so far.
    held: String,
    calls: Calls,
    sink: Sink,
}

impl Parser {
    /// A parser for one answer; `offered` are the names of the request's tools.
    pub fn new(syntax: Syntax, offered: &[String]) -> Self {
        let state = match (syntax.reasoning, syntax.opened) {
            (None, _) => State::After { fresh: false },
            (Some(_), true) => State::Inside { said: false },
            (Some(_), false) => State::Before,
        };
        Self {
            lexer: Lexer::new(marks(syntax.tools, syntax.reasoning)),
            splitter: Splitter {
                state,
                held: String::new(),
                calls: Calls::new(syntax.tools, offered.to_vec()),
                sink: Sink::new(syntax.tools.is_some()),
            },
        }
    }

    /// Adds text, and returns what is certain now.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        let Self { lexer, splitter } = self;
        lexer.push(text, |item| splitter.take(item));
        splitter.sink.take()
    }

    /// The answer is over: what was held back is text after all. Nothing may follow.
    pub fn finish(&mut self) -> Vec<Piece> {
        let Self { lexer, splitter } = self;
        lexer.finish(|item| splitter.take(item));
        splitter.finish();
        splitter.sink.take()
    }

    /// How many calls have begun.
    pub fn calls(&self) -> usize {
        self.splitter.sink.calls()
    }
}

impl Splitter {
    fn take(&mut self, item: Item<'_>) {
        match (&mut self.state, item) {
            (State::Before, Item::Text(text)) if text.trim().is_empty() => {
                self.held.push_str(text);
            }
            (State::Before, Item::Marker((Mark::ReasoningOpen, _))) => {
                self.held.clear();
                self.state = State::Inside { said: false };
            }
            (State::Before, item) => {
                self.state = State::After { fresh: false };
                let held = std::mem::take(&mut self.held);
                self.answer(Item::Text(&held));
                self.answer(item);
            }
            (State::Inside { .. }, Item::Text(text)) => self.reasoning(text),
            (State::Inside { said }, Item::Marker((mark, text))) => match mark {
                Mark::ReasoningClose => {
                    self.held.clear();
                    self.state = State::After { fresh: true };
                }
                Mark::SectionOpen => {
                    self.held.clear();
                    self.state = State::After { fresh: false };
                    self.answer(item);
                }
                // The prompt has opened the block, and the model does it again.
                Mark::ReasoningOpen if !*said => {}
                _ => self.reasoning(text),
            },
            (State::After { fresh: true }, Item::Text(text)) => {
                let text = text.trim_start_matches(['\r', '\n']);
                if !text.is_empty() {
                    self.state = State::After { fresh: false };
                    self.answer(Item::Text(text));
                }
            }
            (State::After { fresh }, item) => {
                *fresh = false;
                self.answer(item);
            }
        }
    }

    /// Reasoning without the line breaks around it.
    fn reasoning(&mut self, text: &str) {
        let State::Inside { said } = &mut self.state else {
            return;
        };
        let breaks = ['\r', '\n'];
        let text = if *said {
            text
        } else {
            text.trim_start_matches(breaks)
        };
        let solid = text.trim_end_matches(breaks);
        if !solid.is_empty() {
            *said = true;
            let held = std::mem::take(&mut self.held);
            self.sink.reasoning(&held);
            self.sink.reasoning(solid);
        }
        self.held.push_str(&text[solid.len()..]);
    }

    fn answer(&mut self, item: Item<'_>) {
        let item = match item {
            Item::Text("") => return,
            Item::Marker((Mark::ReasoningOpen | Mark::ReasoningClose, text)) => Item::Text(text),
            other => other,
        };
        self.calls.take(item, &mut self.sink);
    }

    fn finish(&mut self) {
        let held = std::mem::take(&mut self.held);
        if matches!(self.state, State::Before) {
            self.calls.take(Item::Text(&held), &mut self.sink);
        }
        self.calls.finish(&mut self.sink);
        self.sink.finish();
    }
}
