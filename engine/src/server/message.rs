//! What do an answer's tokens add to its message?
//!
//! One output of the engine becomes one [`Delta`]: content, reasoning and calls taken apart by the
//! model family's parser, where one is at work. A stream sends deltas; a whole answer is their sum.

use answer::{Parser, Piece};

use crate::engine::Produced;
use crate::metrics::Ending;
use crate::request::Parallel;
use crate::request::prepare::Reading;

/// What one output adds.
#[derive(Debug, Default)]
pub(super) struct Delta {
    pub(super) content: String,
    pub(super) reasoning: String,
    pub(super) calls: Vec<CallDelta>,
    /// The tokens, where the request wants to see them.
    pub(super) tokens: Vec<Produced>,
    /// Why it ended, with the last one.
    pub(super) finish: Option<&'static str>,
    /// The stop string that ended it.
    pub(super) stop: Option<String>,
}

impl Delta {
    /// Whether a client has anything to see in it.
    pub(super) fn is_empty(&self) -> bool {
        self.content.is_empty()
            && self.reasoning.is_empty()
            && self.calls.is_empty()
            && self.tokens.is_empty()
            && self.finish.is_none()
    }
}

/// What is added to one call.
#[derive(Debug)]
pub(super) struct CallDelta {
    pub(super) index: usize,
    /// Id and name, when the call begins.
    pub(super) start: Option<CallStart>,
    pub(super) arguments: String,
}

/// How a call begins.
#[derive(Debug)]
pub(super) struct CallStart {
    pub(super) id: String,
    pub(super) name: String,
}

/// Reads one choice's text.
pub(super) struct Reader {
    /// None where the text is the content.
    parser: Option<Parser>,
    calls: Parallel,
}

impl Reader {
    pub(super) fn new(reading: &Reading) -> Self {
        let parser = || Parser::new(reading.syntax, &reading.offered);
        Self {
            parser: (!reading.is_plain()).then(parser),
            calls: reading.calls,
        }
    }

    /// Takes an output's text.
    pub(super) fn take(&mut self, text: String, tokens: Vec<Produced>) -> Delta {
        let mut delta = Delta {
            tokens,
            ..Delta::default()
        };
        match &mut self.parser {
            None => delta.content = text,
            Some(parser) => {
                let pieces = parser.push(&text);
                self.add(pieces, &mut delta);
            }
        }
        delta
    }

    /// Takes the last output's text.
    pub(super) fn end(
        &mut self,
        text: String,
        tokens: Vec<Produced>,
        (ending, stop): (Ending, Option<String>),
    ) -> Delta {
        let mut delta = self.take(text, tokens);
        delta.stop = stop;
        let mut called = false;
        if let Some(parser) = &mut self.parser {
            let pieces = parser.finish();
            called = parser.calls() > 0;
            self.add(pieces, &mut delta);
        }
        delta.finish = Some(match ending {
            // A budget that ran out within a call is told as such: its arguments are not whole.
            Ending::Stop if called => "tool_calls",
            ending => ending.as_str(),
        });
        delta
    }

    fn add(&self, pieces: Vec<Piece>, delta: &mut Delta) {
        for piece in pieces {
            match piece {
                Piece::Content(text) => delta.content += &text,
                Piece::Reasoning(text) => delta.reasoning += &text,
                // As vLLM has it: further calls are dropped, and not the first one's end.
                Piece::CallStart { index, .. } | Piece::Arguments { index, .. }
                    if index > 0 && self.calls == Parallel::One => {}
                Piece::CallStart { index, name, id } => delta.calls.push(CallDelta {
                    index,
                    start: Some(CallStart {
                        id: id.unwrap_or_else(call_id),
                        name,
                    }),
                    arguments: String::new(),
                }),
                Piece::Arguments { index, json } => match delta.calls.last_mut() {
                    Some(call) if call.index == index => call.arguments += &json,
                    _ => delta.calls.push(CallDelta {
                        index,
                        start: None,
                        arguments: json,
                    }),
                },
            }
        }
    }
}

fn call_id() -> String {
    format!("call_{}", uuid::Uuid::new_v4().simple())
}

/// A whole choice: the sum of its deltas.
#[derive(Debug, Default)]
pub(super) struct Message {
    pub(super) content: String,
    pub(super) reasoning: String,
    pub(super) calls: Vec<Call>,
    pub(super) tokens: Vec<Produced>,
    pub(super) finish: Option<&'static str>,
    pub(super) stop: Option<String>,
}

/// A whole call.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) id: String,
    pub(super) name: String,
    pub(super) arguments: String,
}

impl Message {
    pub(super) fn add(&mut self, delta: Delta) {
        self.content += &delta.content;
        self.reasoning += &delta.reasoning;
        self.tokens.extend(delta.tokens);
        self.finish = delta.finish;
        self.stop = delta.stop;
        for call in delta.calls {
            match call.start {
                Some(CallStart { id, name }) => self.calls.push(Call {
                    id,
                    name,
                    arguments: call.arguments,
                }),
                None => {
                    if let Some(last) = self.calls.last_mut() {
                        last.arguments += &call.arguments;
                    }
                }
            }
        }
    }
}
