//! Which items does an answer consist of, and which events tell them?
//!
//! A state machine over what the node adds: at most one item of text is open (reasoning, or a
//! message with its parts), and any number of calls (`calls`). Anything new closes what can have no
//! more to say: the open text, and calls whose arguments are complete. A node that goes on with an
//! older call while another has begun is thus understood.
//!
//! A whole answer is one large chunk: the events are written all the same, and thrown away.

use super::calls::Calls;
use super::events::{Members, Sequence, object};
use super::items::OUR_REASONING;
use super::node::Choice;
use super::parts::{Part, PartKind};
use super::plan::Plan;
use crate::answer::Malformed;

/// How an answer ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Finish {
    /// By itself.
    Complete,
    /// At the end of its budget.
    Length,
    /// By a filter.
    Filter,
    /// By the client's wish.
    Cancelled,
}

impl Finish {
    fn of(reason: &str) -> Self {
        match reason {
            "length" => Self::Length,
            "content_filter" => Self::Filter,
            _ => Self::Complete,
        }
    }

    /// The API's word for why an answer is incomplete.
    pub(super) fn incomplete(self) -> Option<&'static str> {
        match self {
            Self::Complete | Self::Cancelled => None,
            Self::Length => Some("max_output_tokens"),
            Self::Filter => Some("content_filter"),
        }
    }

    /// The status of an item that was open.
    pub(super) fn status(self) -> &'static str {
        match self {
            Self::Complete => "completed",
            Self::Length | Self::Filter | Self::Cancelled => "incomplete",
        }
    }
}

/// Where a stream's events go, and what they are made with.
pub(super) struct Stage<'s> {
    pub(super) plan: &'s Plan,
    pub(super) out: &'s mut Vec<u8>,
    pub(super) sequence: &'s mut Sequence,
}

impl Stage<'_> {
    /// Appends an event.
    pub(super) fn event(&mut self, kind: &str, fill: impl FnOnce(&mut Members<'_>)) {
        self.sequence.event(self.out, kind, fill);
    }

    /// Appends the event that opens or closes an item.
    pub(super) fn item(&mut self, kind: &str, at: usize, item: &[u8]) {
        self.event(kind, |members| {
            members.number("output_index", at).json("item", item);
        });
    }
}

/// The items of an answer.
#[derive(Default)]
pub(super) struct Output {
    items: Items,
    open: Option<Open>,
    calls: Calls,
    pub(super) finish: Option<Finish>,
}

/// Items in the order in which they began; empty while they are open.
#[derive(Default)]
pub(super) struct Items(Vec<Vec<u8>>);

impl Items {
    /// The place of an item that begins now.
    pub(super) fn begin(&mut self) -> usize {
        self.0.push(Vec::new());
        self.0.len() - 1
    }

    /// An item is complete.
    pub(super) fn close(&mut self, stage: &mut Stage<'_>, at: usize, item: Vec<u8>) {
        stage.item("response.output_item.done", at, &item);
        self.0[at] = item;
    }

    /// The complete ones, with commas between them.
    fn joined(&self) -> Vec<u8> {
        let done = self.0.iter().filter(|item| !item.is_empty());
        let done: Vec<&[u8]> = done.map(Vec::as_slice).collect();
        done.join(&b","[..])
    }
}

enum Open {
    Reasoning {
        at: usize,
        id: String,
        text: String,
    },
    Message {
        at: usize,
        id: String,
        parts: Vec<Part>,
    },
}

impl Output {
    /// Takes in what a chunk adds.
    pub(super) fn add(
        &mut self,
        stage: &mut Stage<'_>,
        choice: &mut Choice<'_>,
    ) -> Result<(), Malformed> {
        let mut message = choice.take_message();
        let filled = |text: Option<String>| text.filter(|text| !text.is_empty());
        if let Some(text) = filled(message.take_reasoning()) {
            self.think(stage, &text);
        }
        let logprobs = if stage.plan.logprobs {
            choice.logprobs()
        } else {
            ""
        };
        if let Some(text) = filled(message.content.take()) {
            self.say(stage, PartKind::Text, &text, logprobs);
        }
        if let Some(text) = filled(message.refusal.take()) {
            self.say(stage, PartKind::Refusal, &text, "");
        }
        for (place, call) in message
            .tool_calls
            .unwrap_or_default()
            .into_iter()
            .enumerate()
        {
            let index = call.index.unwrap_or(place);
            if !self.calls.knows(index) {
                self.make_room(stage);
            }
            self.calls.add(stage, &mut self.items, index, call)?;
        }
        if let Some(reason) = &choice.finish_reason {
            self.finish(stage, Finish::of(reason));
        }
        Ok(())
    }

    /// Closes what can have no more to say, since something new begins.
    fn make_room(&mut self, stage: &mut Stage<'_>) {
        self.close_text(stage, Finish::Complete);
        self.calls.close_complete(stage, &mut self.items);
    }

    fn think(&mut self, stage: &mut Stage<'_>, more: &str) {
        if !matches!(self.open, Some(Open::Reasoning { .. })) {
            self.make_room(stage);
            let at = self.items.begin();
            let id = stage.plan.item_id("rs", at);
            stage.item(
                "response.output_item.added",
                at,
                &reasoning_item(stage.plan, &id, None),
            );
            stage.event("response.reasoning_summary_part.added", |members| {
                members.text("item_id", &id).number("output_index", at);
                members.number("summary_index", 0);
                members.json("part", &summary_part(""));
            });
            let text = String::new();
            self.open = Some(Open::Reasoning { at, id, text });
        }
        let Some(Open::Reasoning { at, id, text }) = &mut self.open else {
            return;
        };
        stage.event("response.reasoning_summary_text.delta", |members| {
            members.text("item_id", id).number("output_index", at);
            members.number("summary_index", 0).text("delta", more);
        });
        text.push_str(more);
    }

    fn say(&mut self, stage: &mut Stage<'_>, kind: PartKind, more: &str, logprobs: &str) {
        if !matches!(self.open, Some(Open::Message { .. })) {
            self.make_room(stage);
            self.open_message(stage);
        }
        let Some(Open::Message { at, id, parts }) = &mut self.open else {
            return;
        };
        if parts.last().is_none_or(|part| part.kind != kind) {
            if let Some(part) = parts.last() {
                part.close(stage, *at, id, parts.len() - 1);
            }
            let part = Part::new(kind);
            stage.event("response.content_part.added", |members| {
                members.text("item_id", id).number("output_index", *at);
                members.number("content_index", parts.len());
                members.json("part", &part.json());
            });
            parts.push(part);
        }
        let place = parts.len() - 1;
        let Some(part) = parts.last_mut() else {
            return;
        };
        part.push(stage, (*at, id, place), more, logprobs);
    }

    fn open_message(&mut self, stage: &mut Stage<'_>) {
        let at = self.items.begin();
        let id = stage.plan.item_id("msg", at);
        let item = message_item(&id, "in_progress", &[]);
        stage.item("response.output_item.added", at, &item);
        let parts = Vec::new();
        self.open = Some(Open::Message { at, id, parts });
    }

    /// The answer is over.
    fn finish(&mut self, stage: &mut Stage<'_>, finish: Finish) {
        self.close_text(stage, finish);
        self.calls.close_all(stage, &mut self.items, finish);
        self.finish = Some(finish);
    }

    /// Nothing more comes: closes all, and tells the items with commas between them. An answer that
    /// ended and is empty is an empty message, so that clients find one; one that never began is not.
    pub(super) fn end(&mut self, stage: &mut Stage<'_>) -> (Finish, Vec<u8>) {
        let said = self.finish == Some(Finish::Complete);
        let finish = self.finish.unwrap_or(Finish::Complete);
        self.finish(stage, finish);
        let told = |item: &Vec<u8>| !item.is_empty();
        if said && !self.items.0.iter().any(told) {
            self.say(stage, PartKind::Text, "", "");
            self.close_text(stage, finish);
        }
        (finish, self.items.joined())
    }

    /// The client wants no more: closes all, and tells the items with commas between them.
    pub(super) fn cancel(&mut self, stage: &mut Stage<'_>) -> Vec<u8> {
        self.finish(stage, Finish::Cancelled);
        self.items.joined()
    }

    /// The items that are complete, with commas between them.
    pub(super) fn so_far(&self) -> Vec<u8> {
        self.items.joined()
    }

    fn close_text(&mut self, stage: &mut Stage<'_>, finish: Finish) {
        match self.open.take() {
            None => {}
            Some(Open::Reasoning { at, id, text }) => {
                let place = |members: &mut Members<'_>| {
                    members.text("item_id", &id).number("output_index", at);
                    members.number("summary_index", 0);
                };
                stage.event("response.reasoning_summary_text.done", |members| {
                    place(members);
                    members.text("text", &text);
                });
                stage.event("response.reasoning_summary_part.done", |members| {
                    place(members);
                    members.json("part", &summary_part(&text));
                });
                let item = reasoning_item(stage.plan, &id, Some(&text));
                self.items.close(stage, at, item);
            }
            Some(Open::Message { at, id, parts }) => {
                if let Some(part) = parts.last() {
                    part.close(stage, at, &id, parts.len() - 1);
                }
                let item = message_item(&id, finish.status(), &parts);
                self.items.close(stage, at, item);
            }
        }
    }
}

fn message_item(id: &str, status: &str, parts: &[Part]) -> Vec<u8> {
    let parts: Vec<Vec<u8>> = parts.iter().map(Part::json).collect();
    object(|members| {
        members.text("id", id).text("type", "message");
        members.text("status", status).text("role", "assistant");
        members.list("content", &parts.join(&b","[..]));
    })
}

fn summary_part(text: &str) -> Vec<u8> {
    object(|members| {
        members.text("type", "summary_text").text("text", text);
    })
}

/// The whole of it is the summary: that is where clients show it and what they send back.
fn reasoning_item(plan: &Plan, id: &str, text: Option<&str>) -> Vec<u8> {
    object(|members| {
        members.text("id", id).text("type", "reasoning");
        members.list("summary", &text.map(summary_part).unwrap_or_default());
        if plan.encrypted {
            members.text("encrypted_content", OUR_REASONING);
        }
    })
}
