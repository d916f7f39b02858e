//! What of a Messages request's prompt was read before, and what is new?
//!
//! A message's blocks become chat messages by themselves, except where the model's messages follow
//! each other or a system message is for one turn only. So what a message becomes is known by its
//! text, with the calls it makes, the results it brings and the marks it has, which are checked
//! anew against those of its neighbours. Nothing is refused here: where anything is wrong, or
//! depends on where it stands, the full way tells.

use std::sync::Arc;

use serde_json::Value;

use super::super::marks::Marks;
use super::super::path::{Object, Path};
use super::super::tools::{self, Tools};
use super::{Block, Chat, MESSAGES_MAX, Speaker, content, message, system_prompt};
use crate::caching::Retention;
use crate::elements::elements;
use crate::known::{Kind, Reader};
use crate::normalise::{self, Billing, without_billing};
use crate::shared::Shared;

/// What a message becomes by itself.
struct Alone {
    speaker: Speaker,
    messages: Vec<Shared>,
    calls: Vec<String>,
    results: Vec<String>,
    marks: Vec<Retention>,
}

/// What `system` becomes.
struct System {
    message: Option<Shared>,
    marks: Vec<Retention>,
}

/// The tools with their marks.
struct Marked {
    tools: Arc<Tools>,
    marks: Vec<Retention>,
}

/// Reads `tools`.
pub(in crate::messages) fn tools(
    raw: &str,
    reader: &Reader<'_>,
    marks: &mut Marks,
) -> Option<Arc<Tools>> {
    let known = match reader.recall::<Marked>(Kind::ItemTools, raw) {
        Some(known) => known,
        None => {
            let mut own = Marks::default();
            let value = serde_json::from_str(raw).ok()?;
            let mut tools = tools::tools(Some(value), &mut own).ok()?;
            if let Some(offered) = &mut tools.offered {
                offered.edit(|tools| normalise::tools_alone(tools, reader.options));
            }
            let marked = Arc::new(Marked {
                tools: Arc::new(tools),
                marks: own.into_taken(),
            });
            reader.remember(Kind::ItemTools, raw, Arc::clone(&marked));
            marked
        }
    };
    marks.take_again(&known.marks)?;
    Some(Arc::clone(&known.tools))
}

/// Reads `system` and `messages`; the model is to answer.
pub(in crate::messages) fn conversation(
    system: Option<&str>,
    array: &str,
    reader: &Reader<'_>,
    marks: &mut Marks,
) -> Option<Vec<Shared>> {
    let first = match system {
        Some(raw) => self::system(raw, reader, marks)?,
        None => None,
    };
    let items = items(array, reader)?;
    let mut messages = Vec::with_capacity(items.len() + 1);
    messages.extend(first);
    let is_begun = !messages.is_empty();
    // Calls of the latest turn of the model, and whether a result came.
    let mut asked: Vec<(&str, bool)> = Vec::new();
    let mut is_answering = false;
    for item in &items {
        marks.take_again(&item.marks)?;
        match item.speaker {
            Speaker::Assistant => {
                let is_open = asked.iter().any(|(_, has_result)| !has_result);
                if is_answering || is_open {
                    return None;
                }
                is_answering = true;
                asked = item.calls.iter().map(|id| (id.as_str(), false)).collect();
            }
            Speaker::User => {
                is_answering = false;
                for result in &item.results {
                    let (_, has_result) = asked.iter_mut().find(|(id, _)| id == result)?;
                    if std::mem::replace(has_result, true) {
                        return None;
                    }
                }
            }
            Speaker::System => is_answering &= item.messages.is_empty(),
        }
        messages.extend(item.messages.iter().cloned());
    }
    let is_open = asked.iter().any(|(_, has_result)| !has_result);
    // A billing line is looked for in a first message of the system's.
    let is_system = |message: &Shared| message.get("role").is_some_and(|role| role == "system");
    let starts_otherwise = !is_begun && messages.first().is_some_and(is_system);
    let is_sound = !is_answering && !is_open && !starts_otherwise && !messages.is_empty();
    is_sound.then_some(messages)
}

/// The first message, if `system` says anything.
fn system(raw: &str, reader: &Reader<'_>, marks: &mut Marks) -> Option<Option<Shared>> {
    if let Some(known) = reader.recall::<System>(Kind::System, raw) {
        marks.take_again(&known.marks)?;
        return Some(known.message.clone());
    }
    let mut own = Marks::default();
    let content = system_prompt(serde_json::from_str(raw).ok()?, &mut own).ok()?;
    let taken = own.into_taken();
    marks.take_again(&taken)?;
    let Some(content) = content else {
        return Some(None);
    };
    let mut value = message("system", content);
    let billing = match reader.options.billing_line {
        true => without_billing(&mut value),
        false => Billing::None,
    };
    if billing == Billing::Alone {
        // It goes where others follow.
        return None;
    }
    normalise::message_alone(&mut value, reader.options);
    let message = Some(Shared::from(value));
    if billing == Billing::None {
        let system = System {
            message: message.clone(),
            marks: taken,
        };
        reader.remember(Kind::System, raw, Arc::new(system));
    }
    Some(message)
}

fn items(array: &str, reader: &Reader<'_>) -> Option<Vec<Arc<Alone>>> {
    let elements = elements(array)?;
    if elements.is_empty() || elements.len() > MESSAGES_MAX {
        return None;
    }
    reader.each(Kind::Item, (array, &elements), |value| alone(value, reader))
}

/// Reads a message by itself, as if the calls that it answers had been made.
fn alone(value: Value, reader: &Reader<'_>) -> Option<Alone> {
    let path = Path::root("messages");
    let path = path.at(0);
    let mut item = Object::new(value, path).ok()?;
    let speaker = match item.required_text("role").ok()?.as_str() {
        "user" => Speaker::User,
        "assistant" => Speaker::Assistant,
        "system" => Speaker::System,
        _ => return None,
    };
    let mut marks = Marks::default();
    let blocks = content(&mut item, speaker, &mut marks).ok()?;
    if item.take("clear_at").is_some() {
        return None;
    }
    let mut chat = Chat::default();
    let results = blocks.iter().filter_map(|block| match block {
        Block::Outcome(outcome) => Some(outcome.id.clone()),
        _ => None,
    });
    let results: Vec<String> = results.collect();
    for (place, id) in results.iter().enumerate() {
        chat.asked.insert(id.clone(), (place, false));
    }
    let added = match speaker {
        Speaker::User => chat.user(path, blocks),
        Speaker::Assistant => chat.assistant(0, path, blocks),
        Speaker::System => chat.system(&mut item, blocks, false),
    };
    added.ok()?;
    chat.close_assistant();
    let calls = match speaker {
        Speaker::Assistant => chat.asked.into_keys().collect(),
        Speaker::User | Speaker::System => Vec::new(),
    };
    let normal = |mut message: Value| {
        normalise::message_alone(&mut message, reader.options);
        Shared::from(message)
    };
    Some(Alone {
        speaker,
        messages: chat.messages.into_iter().map(normal).collect(),
        calls,
        results,
        marks: marks.into_taken(),
    })
}
