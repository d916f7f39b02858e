//! Which pieces does the client get?
//!
//! Adjacent pieces of a kind are joined, and white space in content waits until it is known what
//! follows: next to calls it belongs to their form.

use crate::Piece;
use crate::lexer::Mark;

/// Collects pieces.
#[derive(Debug)]
pub(crate) struct Sink {
    pieces: Vec<Piece>,
    /// White space at the end of the content so far.
    space: String,
    /// Whether white space waits: only where calls may come.
    may_call: bool,
    /// Whether the content has more than white space.
    has_content: bool,
    calls: usize,
    /// The last part of the last call's form that was seen, while nothing else has followed.
    closing: Option<Mark>,
}

impl Sink {
    pub(crate) fn new(may_call: bool) -> Self {
        Self {
            pieces: Vec::new(),
            space: String::new(),
            may_call,
            has_content: false,
            calls: 0,
            closing: None,
        }
    }

    /// How many calls have begun.
    pub(crate) fn calls(&self) -> usize {
        self.calls
    }

    /// Takes the pieces so far.
    pub(crate) fn take(&mut self) -> Vec<Piece> {
        std::mem::take(&mut self.pieces)
    }

    /// The answer is over.
    pub(crate) fn finish(&mut self) {
        if self.calls == 0 {
            let space = std::mem::take(&mut self.space);
            self.emit(&space);
        }
        self.space.clear();
    }

    /// Adds reasoning.
    pub(crate) fn reasoning(&mut self, text: &str) {
        match self.pieces.last_mut() {
            _ if text.is_empty() => {}
            Some(Piece::Reasoning(last)) => last.push_str(text),
            _ => self.pieces.push(Piece::Reasoning(text.into())),
        }
    }

    /// Adds content.
    pub(crate) fn content(&mut self, text: &str) {
        let solid = if self.may_call { text.trim_end() } else { text };
        if solid.is_empty() {
            return self.space.push_str(text);
        }
        let mut solid = solid;
        let after = &text[solid.len()..];
        let space = std::mem::take(&mut self.space);
        if self.calls > 0 && !self.has_content {
            solid = solid.trim_start();
        } else {
            self.emit(&space);
        }
        self.emit(solid);
        self.space.push_str(after);
        self.has_content = true;
        self.closing = None;
    }

    fn emit(&mut self, text: &str) {
        match self.pieces.last_mut() {
            _ if text.is_empty() => {}
            Some(Piece::Content(last)) => last.push_str(text),
            _ => self.pieces.push(Piece::Content(text.into())),
        }
    }

    /// Begins a call.
    pub(crate) fn call(&mut self, name: String, id: Option<String>) {
        if !self.has_content {
            self.space.clear();
        }
        let index = self.calls;
        self.calls += 1;
        self.pieces.push(Piece::CallStart { index, name, id });
    }

    /// Adds to the last call's arguments.
    pub(crate) fn arguments(&mut self, text: String) {
        let at = self.calls - 1;
        match self.pieces.last_mut() {
            _ if text.is_empty() => {}
            Some(Piece::Arguments { index, json }) if *index == at => json.push_str(&text),
            _ => self.pieces.push(Piece::Arguments {
                index: at,
                json: text,
            }),
        }
    }

    /// The last call's arguments are over: what closes a call may follow.
    pub(crate) fn call_over(&mut self) {
        self.closing = Some(Mark::Separator);
    }

    /// Whether this marker closes the last call, or the calls; if so it is no content.
    pub(crate) fn closes(&mut self, mark: Mark) -> bool {
        let closes = mark >= Mark::Fence && self.closing.is_some_and(|last| mark > last);
        if closes {
            self.closing = Some(mark);
        }
        closes
    }
}
