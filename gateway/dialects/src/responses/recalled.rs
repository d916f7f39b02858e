//! What of a Responses request's prompt was read before, and what is new?
//!
//! An item that is not the model's becomes a message by itself. The model's items that follow each
//! other (reasoning, texts, calls) become messages together, so a run of them is known by the text
//! of all. That calls and results fit is checked anew, by their ids. Nothing is refused here: where
//! anything is wrong, refers to stored items, or is to be stored, the full way takes over.

use std::collections::HashSet;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::items::{self, Item};
use super::prompt::Messages;
use super::read::{Object, Path};
use super::tools::{self, CHOICES, Tools};
use crate::elements::{elements, span};
use crate::fields::Fields;
use crate::known::{Kind, Reader};
use crate::normalise::{self, Billing, without_billing};
use crate::shared::Shared;

/// An item that was read.
struct Known {
    value: Value,
    /// Whether it belongs with the model's items beside it.
    is_models: bool,
    /// The call that it makes, or whose result it is.
    call: Option<String>,
    result: Option<String>,
    /// What it becomes if it stands alone.
    messages: Vec<Shared>,
}

/// Tools as any choice among them but a list leaves them.
struct Offered {
    list: Option<Shared>,
    custom: Vec<String>,
}

/// The messages of a request whose input is all there is, and is not to be stored.
pub(super) fn input(
    fields: &Fields<'_>,
    top: &Map<String, Value>,
    reader: &Reader<'_>,
) -> Option<Vec<Shared>> {
    let is_set = |name: &str| top.get(name).is_some_and(|value| !value.is_null());
    if top.get("store") != Some(&Value::Bool(false))
        || is_set("previous_response_id")
        || is_set("conversation")
    {
        return None;
    }
    let array = fields.get("input")?.get();
    let elements = elements(array).filter(|items| !items.is_empty())?;
    let items = known(array, &elements, reader)?;
    fits(&items)?;
    let mut messages = Vec::with_capacity(items.len() + 1);
    match top.get("instructions") {
        None | Some(Value::Null) => {}
        Some(Value::String(text)) => messages.push(instructions(text, reader)?),
        Some(_) => return None,
    }
    let is_instructed = !messages.is_empty();
    let mut at = 0;
    while let Some(item) = items.get(at) {
        let run = items[at..].iter().take_while(|item| item.is_models).count();
        if run < 2 {
            messages.extend(item.messages.iter().cloned());
            at += 1;
            continue;
        }
        let text = span(array, &elements[at..at + run])?;
        let items = &items[at..at + run];
        messages.extend(self::run(text, items, reader)?.iter().cloned());
        at += run;
    }
    let first = messages.first()?;
    if !is_instructed
        && reader.options.billing_line
        && without_billing(&mut Value::clone(first)) != Billing::None
    {
        return None;
    }
    Some(messages)
}

/// Whether each result has its call before it, and each call its result.
fn fits(items: &[Arc<Known>]) -> Option<()> {
    let (mut called, mut answered) = (HashSet::new(), HashSet::new());
    for item in items {
        called.extend(item.call.as_deref());
        if let Some(id) = item.result.as_deref() {
            if !called.contains(id) {
                return None;
            }
            answered.insert(id);
        }
    }
    (called == answered).then_some(())
}

fn instructions(text: &str, reader: &Reader<'_>) -> Option<Shared> {
    if let Some(known) = reader.recall::<Shared>(Kind::Instructions, text) {
        return Some(Shared::clone(&known));
    }
    let mut value = json!({"role": "system", "content": text});
    let billing = match reader.options.billing_line {
        true => without_billing(&mut value),
        false => Billing::None,
    };
    normalise::message_alone(&mut value, reader.options);
    let message = Shared::from(value);
    match billing {
        Billing::None => {
            reader.remember(Kind::Instructions, text, Arc::new(message.clone()));
            Some(message)
        }
        Billing::Begins => Some(message),
        // It goes where others follow.
        Billing::Alone => None,
    }
}

/// The messages of items of the model's that follow each other.
fn run(text: &str, items: &[Arc<Known>], reader: &Reader<'_>) -> Option<Arc<Vec<Shared>>> {
    if let Some(known) = reader.recall(Kind::Run, text) {
        return Some(known);
    }
    let mut messages = Messages::default();
    for item in items {
        messages
            .push(items::read(&item.value, &Path::Root).ok()?)
            .ok()?;
    }
    let messages = Arc::new(normal(messages, reader));
    reader.remember(Kind::Run, text, Arc::clone(&messages));
    Some(messages)
}

fn normal(messages: Messages, reader: &Reader<'_>) -> Vec<Shared> {
    let normal = |mut message: Value| {
        normalise::message_alone(&mut message, reader.options);
        Shared::from(message)
    };
    messages.so_far().into_iter().map(normal).collect()
}

/// The items, those that are new read now.
fn known(array: &str, elements: &[&str], reader: &Reader<'_>) -> Option<Vec<Arc<Known>>> {
    reader.each(Kind::Input, (array, elements), |value| read(value, reader))
}

fn read(value: Value, reader: &Reader<'_>) -> Option<Known> {
    let item = items::read(&value, &Path::Root).ok()?;
    let mut messages = Messages::default();
    let (mut call, mut result) = (None, None);
    let is_models = match &item {
        Item::Message { role, .. } => *role == "assistant",
        Item::Reasoning(_) | Item::Elsewhere => true,
        Item::Call { id, .. } => {
            call = Some((*id).to_owned());
            true
        }
        Item::Output { id, .. } => {
            if let Some(id) = id {
                messages.expect(id);
                result = Some((*id).to_owned());
            }
            false
        }
        Item::Reference(_) => return None,
    };
    messages.push(item).ok()?;
    let messages = normal(messages, reader);
    Some(Known {
        value,
        is_models,
        call,
        result,
        messages,
    })
}

/// What the model is offered, where `tool_choice` chooses no part of it.
pub(super) fn tools(
    fields: &Fields<'_>,
    top: &Map<String, Value>,
    reader: &Reader<'_>,
) -> Option<Tools> {
    let raw = fields.get("tools")?.get();
    let choice = match top.get("tool_choice") {
        None | Some(Value::Null) => None,
        Some(Value::String(word)) if CHOICES.contains(&word.as_str()) => Some(word),
        Some(_) => return None,
    };
    let known = match reader.recall::<Offered>(Kind::InputTools, raw) {
        Some(known) => known,
        None => {
            let all = Object {
                members: &Map::new(),
                path: &Path::Root,
            };
            let Tools {
                mut offered,
                custom,
                ..
            } = tools::read(Some(serde_json::from_str(raw).ok()?), all).ok()?;
            if let Some(offered) = &mut offered {
                offered.edit(|tools| normalise::tools_alone(tools, reader.options));
            }
            let known = Arc::new(Offered {
                list: offered,
                custom,
            });
            reader.remember(Kind::InputTools, raw, Arc::clone(&known));
            known
        }
    };
    if known.list.is_none() && choice.is_some_and(|word| word == "required") {
        return None;
    }
    Some(Tools {
        offered: known.list.clone(),
        choice: choice
            .filter(|_| known.list.is_some())
            .map(|word| word.as_str().into()),
        custom: known.custom.clone(),
    })
}
