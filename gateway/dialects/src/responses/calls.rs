//! How do a node's tool calls become items?
//!
//! States of a call: *unnamed* (its name has not come yet: nothing is told), *open* (added; what
//! comes of its arguments is told at once), *closed*. A custom call is told at its end, in one piece:
//! its text is a string inside the function's arguments.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::events::object;
use super::node;
use super::output::{Finish, Items, Stage};
use crate::answer::Malformed;

/// Calls that one answer may hold; more is a node that lost its mind.
const CALLS_MAX: usize = 1024;

/// The calls of an answer, in the order in which they began.
#[derive(Default)]
pub(super) struct Calls(Vec<Call>);

struct Call {
    /// The node's number for it.
    index: usize,
    id: String,
    name: String,
    arguments: String,
    state: State,
}

enum State {
    Unnamed,
    Open { at: usize, item: String, kind: Kind },
    Closed,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Function,
    Custom,
}

impl Calls {
    /// Whether this call has begun.
    pub(super) fn knows(&self, index: usize) -> bool {
        self.0.iter().rev().any(|call| call.index == index)
    }

    /// Takes in what a chunk adds to a call.
    pub(super) fn add(
        &mut self,
        stage: &mut Stage<'_>,
        items: &mut Items,
        index: usize,
        more: node::Call,
    ) -> Result<(), Malformed> {
        let place = match self.0.iter().rposition(|call| call.index == index) {
            Some(place) => place,
            None if self.0.len() >= CALLS_MAX => {
                return Err(Malformed(format!("more than {CALLS_MAX} tool calls")));
            }
            None => {
                self.0.push(Call::new(index));
                self.0.len() - 1
            }
        };
        self.0[place].add(stage, items, more)
    }

    /// Closes the calls that can have no more to say.
    pub(super) fn close_complete(&mut self, stage: &mut Stage<'_>, items: &mut Items) {
        for call in &mut self.0 {
            if matches!(call.state, State::Open { .. }) && call.is_complete() {
                call.close(stage, items, Finish::Complete);
            }
        }
    }

    /// Closes all calls.
    pub(super) fn close_all(&mut self, stage: &mut Stage<'_>, items: &mut Items, finish: Finish) {
        for call in &mut self.0 {
            call.close(stage, items, finish);
        }
    }
}

impl Call {
    fn new(index: usize) -> Self {
        Self {
            index,
            id: String::new(),
            name: String::new(),
            arguments: String::new(),
            state: State::Unnamed,
        }
    }

    fn add(
        &mut self,
        stage: &mut Stage<'_>,
        items: &mut Items,
        more: node::Call,
    ) -> Result<(), Malformed> {
        let function = more.function.unwrap_or_default();
        let arguments = function.arguments.unwrap_or_default();
        match &self.state {
            State::Unnamed => {
                self.id += more.id.as_deref().unwrap_or_default();
                self.name += function.name.as_deref().unwrap_or_default();
                self.arguments += &arguments;
                if !self.name.is_empty() {
                    self.open(stage, items);
                }
            }
            State::Open { at, item, kind } => {
                if *kind == Kind::Function && !arguments.is_empty() {
                    delta(stage, *at, item, &arguments);
                }
                self.arguments += &arguments;
            }
            State::Closed if arguments.trim().is_empty() => {}
            State::Closed => {
                return Err(Malformed(format!("tool call {} goes on", self.index)));
            }
        }
        Ok(())
    }

    fn open(&mut self, stage: &mut Stage<'_>, items: &mut Items) {
        let at = items.begin();
        let is_custom = stage.plan.custom.contains(&self.name);
        let (kind, prefix) = match is_custom {
            true => (Kind::Custom, "ctc"),
            false => (Kind::Function, "fc"),
        };
        let item = stage.plan.item_id(prefix, at);
        if self.id.is_empty() {
            // Without an id the result would find no call; the item's own is as good.
            self.id = format!(
                "call_{}",
                item.trim_start_matches("fc_").trim_start_matches("ctc_")
            );
        }
        let added = self.item(&item, kind, "in_progress", "");
        stage.item("response.output_item.added", at, &added);
        if kind == Kind::Function && !self.arguments.is_empty() {
            delta(stage, at, &item, &self.arguments);
        }
        self.state = State::Open { at, item, kind };
    }

    /// A complete JSON value cannot go on.
    fn is_complete(&self) -> bool {
        serde_json::from_str::<&RawValue>(&self.arguments).is_ok()
    }

    fn close(&mut self, stage: &mut Stage<'_>, items: &mut Items, finish: Finish) {
        let State::Open { at, item, kind } = std::mem::replace(&mut self.state, State::Closed)
        else {
            return;
        };
        // What is complete stays so, even if the budget ended right behind it.
        let status = match self.is_complete() {
            true => "completed",
            false => finish.status(),
        };
        let said = match kind {
            Kind::Function => std::mem::take(&mut self.arguments),
            Kind::Custom => custom_input(&self.arguments),
        };
        match kind {
            Kind::Function => stage.event("response.function_call_arguments.done", |members| {
                members.text("item_id", &item).number("output_index", at);
                members.text("arguments", &said).text("name", &self.name);
            }),
            Kind::Custom => {
                stage.event("response.custom_tool_call_input.delta", |members| {
                    members.text("item_id", &item).number("output_index", at);
                    members.text("delta", &said);
                });
                stage.event("response.custom_tool_call_input.done", |members| {
                    members.text("item_id", &item).number("output_index", at);
                    members.text("input", &said);
                });
            }
        }
        let done = self.item(&item, kind, status, &said);
        items.close(stage, at, done);
    }

    fn item(&self, item: &str, kind: Kind, status: &str, said: &str) -> Vec<u8> {
        let (word, name) = match kind {
            Kind::Function => ("function_call", "arguments"),
            Kind::Custom => ("custom_tool_call", "input"),
        };
        object(|members| {
            members.text("id", item).text("type", word);
            members.text("status", status).text(name, said);
            members.text("call_id", &self.id).text("name", &self.name);
        })
    }
}

fn delta(stage: &mut Stage<'_>, at: usize, item: &str, arguments: &str) {
    stage.event("response.function_call_arguments.delta", |members| {
        members.text("item_id", item).number("output_index", at);
        members.text("delta", arguments);
    });
}

/// The text of a custom call. A model that did not keep to the form has its words told as they are.
fn custom_input(arguments: &str) -> String {
    #[derive(Deserialize)]
    struct Custom {
        input: String,
    }
    match serde_json::from_str::<Custom>(arguments) {
        Ok(Custom { input }) => input,
        Err(_) => arguments.to_owned(),
    }
}
