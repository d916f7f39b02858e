//! What of a chat request's prompt was read before, and what is new?
//!
//! The messages are taken one by one. A known one is what it was; those between known ones are
//! read, checked and normalised as ever, and known from then on. Nothing is refused here: where
//! anything is wrong, the full way says so.

use std::sync::Arc;

use serde_json::Value;

use super::{Kind as Json, check};
use crate::caching;
use crate::elements::{elements, values};
use crate::fields::Fields;
use crate::known::{Kind, Part, Reader};
use crate::normalise::{self, Billing, Changed, without_billing};
use crate::shared::Shared;
use crate::turn::ChatPrompt;

/// The prompt in its one spelling, and what of it is spelled otherwise than the client did; none
/// where only the full way can tell.
pub(super) fn prompt(fields: &Fields<'_>, reader: &Reader<'_>) -> Option<(ChatPrompt, Changed)> {
    check::kind(fields, "chat_template_kwargs", Json::Object).ok()?;
    let (messages, messages_changed) = messages(fields.get("messages")?.get(), reader)?;
    let (tools, tools_changed) = match fields.get("tools") {
        None => (None, false),
        Some(raw) => {
            let tools = tools(raw.get(), reader)?;
            (Some(tools.value.clone()), tools.is_changed)
        }
    };
    let prompt = ChatPrompt {
        messages,
        tools,
        template_kwargs: match super::value(fields, "chat_template_kwargs").ok()? {
            Some(Value::Object(map)) => Some(map),
            _ => None,
        },
    };
    let changed = Changed {
        messages: messages_changed,
        tools: tools_changed,
    };
    Some((prompt, changed))
}

fn tools(raw: &str, reader: &Reader<'_>) -> Option<Arc<Part>> {
    if let Some(known) = reader.recall(Kind::Tools, raw) {
        return Some(known);
    }
    let mut value: Value = serde_json::from_str(raw).ok()?;
    if !value.is_array() {
        return None;
    }
    caching::marks(&[], Some(&value)).ok()?;
    let is_changed = normalise::tools_alone(&mut value, reader.options);
    let tools = Arc::new(Part {
        value: value.into(),
        is_changed,
    });
    reader.remember(Kind::Tools, raw, Arc::clone(&tools));
    Some(tools)
}

fn messages(array: &str, reader: &Reader<'_>) -> Option<(Vec<Shared>, bool)> {
    let elements = elements(array)?;
    let kind = |at: usize| match at {
        0 => Kind::First,
        _ => Kind::Message,
    };
    let mut messages = Vec::with_capacity(elements.len());
    let mut is_changed = false;
    let mut at = 0;
    while let Some(element) = elements.get(at) {
        if let Some(known) = reader.recall::<Part>(kind(at), element) {
            is_changed |= known.is_changed;
            messages.push(known.value.clone());
            at += 1;
            continue;
        }
        let is_new = |at: usize, element: &str| reader.recall::<Part>(kind(at), element).is_none();
        let more = elements[at + 1..].iter().enumerate();
        let more = more.take_while(|(more, element)| is_new(at + 1 + more, element));
        let run = &elements[at..=at + more.count()];
        for (value, element) in values(array, run)?.into_iter().zip(run) {
            let is_alone = elements.len() == 1;
            let Read { part, lasts } = read(value, kind(at), reader)?;
            is_changed |= part.is_changed || !matches!(lasts, Lasts::Yes);
            match lasts {
                Lasts::Yes => reader.remember(kind(at), element, Arc::new(part.clone())),
                Lasts::Gone if !is_alone => {
                    at += 1;
                    continue;
                }
                Lasts::Gone | Lasts::No => {}
            }
            messages.push(part.value);
            at += 1;
        }
    }
    (!messages.is_empty()).then_some((messages, is_changed))
}

/// A message that was read.
struct Read {
    part: Part,
    lasts: Lasts,
}

/// Whether a message will come again as it is.
enum Lasts {
    Yes,
    /// It had a billing line, which is another in every turn.
    No,
    /// It was nothing else.
    Gone,
}

/// Reads a message that is sound.
fn read(mut value: Value, kind: Kind, reader: &Reader<'_>) -> Option<Read> {
    if !value.as_object()?.get("role")?.is_string() {
        return None;
    }
    caching::marks(std::slice::from_ref(&value), None).ok()?;
    let options = reader.options;
    let lasts = match kind == Kind::First && options.billing_line {
        false => Lasts::Yes,
        true => match without_billing(&mut value) {
            Billing::None => Lasts::Yes,
            Billing::Begins => Lasts::No,
            Billing::Alone => Lasts::Gone,
        },
    };
    let is_changed = normalise::message_alone(&mut value, options);
    let part = Part {
        value: value.into(),
        is_changed,
    };
    Some(Read { part, lasts })
}
