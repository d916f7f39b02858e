//! Which messages does the model read?
//!
//! Items become Chat Completions messages exactly as a chat client would have sent the same
//! conversation, so that both have one prompt and one cache: an answer's reasoning, text and calls
//! are one assistant message again, a text of several parts is one string.
//!
//! Calls and results must fit, as in the API: a result needs its call before it, and a call its
//! result before the conversation ends.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use super::items::Item;
use super::refuse;
use crate::error::ApiError;

/// The messages so far.
#[derive(Default)]
pub(super) struct Messages {
    done: Vec<Value>,
    /// The assistant's message that further items may belong to.
    open: Option<Said>,
    /// Ids of the calls, in their order.
    calls: Vec<String>,
    called: HashSet<String>,
    answered: HashSet<String>,
}

/// An assistant's message.
#[derive(Default)]
struct Said {
    reasoning: String,
    content: Option<String>,
    calls: Vec<Value>,
}

impl Messages {
    /// Adds what stands before everything else.
    pub(super) fn instructions(&mut self, text: &str) {
        self.done.push(json!({"role": "system", "content": text}));
    }

    /// Adds an item.
    pub(super) fn push(&mut self, item: Item<'_>) -> Result<(), ApiError> {
        match item {
            Item::Message {
                role: "assistant",
                text,
            } => self.said(text.into_owned()),
            Item::Message { role, text } => {
                self.close();
                self.done.push(json!({"role": role, "content": text}));
            }
            Item::Reasoning(Some(text)) => {
                // Thinking begins an answer; only more thinking stands before it.
                let begins = |said: &Said| said.content.is_some() || !said.calls.is_empty();
                if self.open.as_ref().is_some_and(begins) {
                    self.close();
                }
                self.open.get_or_insert_default().reasoning += &text;
            }
            Item::Reasoning(None) | Item::Elsewhere => {}
            Item::Call {
                id,
                name,
                arguments,
            } => {
                let call = json!({
                    "id": id, "type": "function",
                    "function": {"name": name, "arguments": arguments},
                });
                self.open.get_or_insert_default().calls.push(call);
                self.called.insert(id.to_owned());
                self.calls.push(id.to_owned());
            }
            Item::Output { id: Some(id), text } => {
                if !self.called.contains(id) {
                    return Err(refuse::result_without_call(id));
                }
                self.close();
                self.answered.insert(id.to_owned());
                self.done
                    .push(json!({"role": "tool", "tool_call_id": id, "content": text}));
            }
            // A result of no call is news that the client brings.
            Item::Output { id: None, text } => {
                self.close();
                self.done.push(json!({"role": "user", "content": text}));
            }
            Item::Reference(id) => return Err(refuse::item_not_found(id)),
        }
        Ok(())
    }

    /// Text of the assistant: more of an answer that has made calls since its last text, else a
    /// message of its own where the one before has text.
    fn said(&mut self, text: String) {
        let ended = |said: &Said| said.content.is_some() && said.calls.is_empty();
        if self.open.as_ref().is_some_and(ended) {
            self.close();
        }
        let said = self.open.get_or_insert_default();
        said.content.get_or_insert_default().push_str(&text);
    }

    fn close(&mut self) {
        let Some(Said {
            reasoning,
            content,
            calls,
        }) = self.open.take()
        else {
            return;
        };
        let mut message = Map::with_capacity(4);
        message.insert("role".to_owned(), "assistant".into());
        message.insert("content".to_owned(), content.into());
        if !reasoning.is_empty() {
            message.insert("reasoning_content".to_owned(), reasoning.into());
        }
        if !calls.is_empty() {
            message.insert("tool_calls".to_owned(), calls.into());
        }
        self.done.push(Value::Object(message));
    }

    /// A result of this call may come, as if it had been made.
    pub(super) fn expect(&mut self, call: &str) {
        self.called.insert(call.to_owned());
    }

    /// The messages so far, whatever calls have no result yet.
    pub(super) fn so_far(mut self) -> Vec<Value> {
        self.close();
        self.done
    }

    /// The conversation's messages.
    pub(super) fn finish(mut self) -> Result<Vec<Value>, ApiError> {
        let mut calls = self.calls.iter();
        if let Some(call) = calls.find(|call| !self.answered.contains(*call)) {
            return Err(refuse::call_without_result(call));
        }
        self.close();
        match self.done.is_empty() {
            true => Err(refuse::nothing_asked()),
            false => Ok(self.done),
        }
    }
}
