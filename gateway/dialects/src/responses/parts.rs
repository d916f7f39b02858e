//! What does a message consist of?
//!
//! Text, with the log probabilities of its tokens where they were asked for, and refusals.

use super::events::object;
use super::output::Stage;

/// A part of a message.
pub(super) struct Part {
    pub(super) kind: PartKind,
    text: String,
    /// JSON objects with commas between them.
    logprobs: String,
}

/// What kind of part.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum PartKind {
    /// `output_text`
    Text,
    /// `refusal`
    Refusal,
}

impl Part {
    /// One that begins now.
    pub(super) fn new(kind: PartKind) -> Self {
        Self {
            kind,
            text: String::new(),
            logprobs: String::new(),
        }
    }

    /// More of its text.
    pub(super) fn push(
        &mut self,
        stage: &mut Stage<'_>,
        (at, id, place): (usize, &str, usize),
        more: &str,
        logprobs: &str,
    ) {
        if !logprobs.is_empty() {
            if !self.logprobs.is_empty() {
                self.logprobs.push(',');
            }
            self.logprobs.push_str(logprobs);
        }
        self.text.push_str(more);
        let kind = match self.kind {
            PartKind::Text => "response.output_text.delta",
            PartKind::Refusal => "response.refusal.delta",
        };
        let is_text = self.kind == PartKind::Text;
        stage.event(kind, |members| {
            members.text("item_id", id).number("output_index", at);
            members.number("content_index", place).text("delta", more);
            if is_text {
                members.list("logprobs", logprobs.as_bytes());
            }
        });
    }

    /// It is complete.
    pub(super) fn close(&self, stage: &mut Stage<'_>, at: usize, id: &str, place: usize) {
        let (kind, name) = match self.kind {
            PartKind::Text => ("response.output_text.done", "text"),
            PartKind::Refusal => ("response.refusal.done", "refusal"),
        };
        stage.event(kind, |members| {
            members.text("item_id", id).number("output_index", at);
            members
                .number("content_index", place)
                .text(name, &self.text);
            if self.kind == PartKind::Text {
                members.list("logprobs", self.logprobs.as_bytes());
            }
        });
        stage.event("response.content_part.done", |members| {
            members.text("item_id", id).number("output_index", at);
            members
                .number("content_index", place)
                .json("part", &self.json());
        });
    }

    /// As it stands in its message.
    pub(super) fn json(&self) -> Vec<u8> {
        object(|members| match self.kind {
            PartKind::Text => {
                members.text("type", "output_text").list("annotations", b"");
                members.list("logprobs", self.logprobs.as_bytes());
                members.text("text", &self.text);
            }
            PartKind::Refusal => {
                members.text("type", "refusal").text("refusal", &self.text);
            }
        })
    }
}
