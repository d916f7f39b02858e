//! How do Anthropic's messages become chat messages?
//!
//! A user's message splits into the results of tools, each a message of its own, and what the user
//! says after them. An assistant's blocks become one message, and so do assistants' messages in a
//! row. Texts side by side are joined with nothing between, as `prompt` joins the parts of a chat
//! message: the same conversation has the same prompt in each dialect. Checked as the API does:
//! every call has a result in the next turn, and every result a call in the turn before.

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::blocks::{Block, Call, Outcome, Speaker, block, not_blank};
use super::marks::Marks;
use super::path::{Object, Path};
use crate::error::ApiError;

pub(super) mod recalled;

/// Most messages in one request, as the API has it.
const MESSAGES_MAX: usize = 100_000;
/// Most ids that an error repeats.
const IDS_SHOWN_MAX: usize = 8;

/// Whose turn the last message is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Last {
    /// The model's: it is to answer.
    Asked,
    /// The conversation ends with the beginning of an answer.
    Begun,
}

/// Reads `system` and `messages`.
pub(super) fn conversation(
    system: Option<Value>,
    messages: Option<Value>,
    marks: &mut Marks,
) -> Result<(Vec<Value>, Last), ApiError> {
    let path = Path::root("messages");
    let items = match messages {
        None => return Err(path.required()),
        Some(Value::Array(items)) => items,
        Some(_) => return Err(path.should_be("a valid list")),
    };
    let none = || path.refuse("at least one message is required");
    if items.is_empty() {
        return Err(none());
    }
    if items.len() > MESSAGES_MAX {
        let found = items.len();
        return Err(path.refuse(format_args!(
            "at most {MESSAGES_MAX} messages are allowed. Found {found}."
        )));
    }
    let mut chat = Chat {
        messages: Vec::with_capacity(items.len() + 1),
        ..Chat::default()
    };
    if let Some(content) = system
        .map(|system| system_prompt(system, marks))
        .transpose()?
    {
        chat.messages
            .extend(content.map(|content| message("system", content)));
    }
    let is_user = |item: &Value| item.get("role").and_then(Value::as_str) == Some("user");
    let last_user = items.iter().rposition(is_user);
    for (at, item) in items.into_iter().enumerate() {
        let is_answered = last_user.is_some_and(|last| at < last);
        chat.add(at, Object::new(item, path.at(at))?, is_answered, marks)?;
    }
    let last = match chat.assistant {
        None => Last::Asked,
        Some(_) => Last::Begun,
    };
    if last == Last::Asked {
        chat.all_answered()?;
    }
    chat.close_assistant();
    if chat.messages.is_empty() {
        // Messages that only change the configuration.
        return Err(none());
    }
    Ok((chat.messages, last))
}

/// The content of the system message; none where it says nothing.
fn system_prompt(system: Value, marks: &mut Marks) -> Result<Option<Value>, ApiError> {
    let path = Path::root("system");
    let items = match system {
        Value::String(text) => return Ok((!text.is_empty()).then_some(Value::String(text))),
        Value::Array(items) => items,
        _ => return Err(path.should_be("a valid string or a valid list")),
    };
    let mut texts = Vec::with_capacity(items.len());
    for (at, item) in items.into_iter().enumerate() {
        let path = path.at(at);
        match block(item, path, Speaker::System, marks)? {
            Block::Text(text) => texts.push(text),
            _ => return Err(path.refuse("`system` takes text blocks only")),
        }
    }
    let text = joined(texts);
    Ok((!text.is_empty()).then_some(Value::String(text)))
}

/// Texts side by side.
fn joined(texts: Vec<String>) -> String {
    let mut texts = texts.into_iter();
    let mut all = texts.next().unwrap_or_default();
    texts.for_each(|text| all.push_str(&text));
    all
}

fn message(role: &str, content: Value) -> Value {
    let mut message = Map::new();
    message.insert("role".to_owned(), role.into());
    message.insert("content".to_owned(), content);
    Value::Object(message)
}

/// An assistant's turn in the making.
#[derive(Debug, Default)]
struct Assistant {
    text: String,
    reasoning: String,
    calls: Vec<Call>,
}

#[derive(Debug, Default)]
struct Chat {
    messages: Vec<Value>,
    /// The assistant's turn that is not over.
    assistant: Option<Assistant>,
    /// Calls of the latest assistant's turn by their ids: their places, and whether a result came.
    asked: HashMap<String, (usize, bool)>,
    /// Where that turn's latest message is.
    asked_at: usize,
}

impl Chat {
    fn add(
        &mut self,
        at: usize,
        mut item: Object<'_>,
        is_answered: bool,
        marks: &mut Marks,
    ) -> Result<(), ApiError> {
        let path = item.path;
        let role = item.required_text("role")?;
        let speaker = match role.as_str() {
            "user" => Speaker::User,
            "assistant" => Speaker::Assistant,
            "system" => Speaker::System,
            _ => {
                let path = path.name("role");
                return Err(path.should_be("'user', 'assistant' or 'system'"));
            }
        };
        let blocks = content(&mut item, speaker, marks)?;
        match speaker {
            Speaker::User => self.user(path, blocks),
            Speaker::Assistant => self.assistant(at, path, blocks),
            Speaker::System => self.system(&mut item, blocks, is_answered),
        }
    }

    fn system(
        &mut self,
        item: &mut Object<'_>,
        blocks: Vec<Block>,
        is_answered: bool,
    ) -> Result<(), ApiError> {
        let clear_at = item.text("clear_at")?;
        let is_cleared = match clear_at.as_deref() {
            None | Some("never") => false,
            // For the turn it follows alone: gone once the user speaks again.
            Some("next_user_message") => is_answered,
            Some(_) => {
                let path = item.path.name("clear_at");
                return Err(path.should_be("'next_user_message' or 'never'"));
            }
        };
        let text = joined(blocks.into_iter().filter_map(said).collect());
        if !is_cleared && !text.is_empty() {
            self.close_assistant();
            self.messages.push(message("system", text.into()));
        }
        Ok(())
    }

    fn user(&mut self, path: Path<'_>, blocks: Vec<Block>) -> Result<(), ApiError> {
        self.close_assistant();
        let mut texts = Vec::new();
        let mut has_results = false;
        let content = path.name("content");
        for (at, block) in blocks.into_iter().enumerate() {
            match block {
                Block::Outcome(outcome) => {
                    self.result(content.at(at), outcome)?;
                    has_results = true;
                }
                other => texts.extend(said(other)),
            }
        }
        if texts.is_empty() && !has_results {
            return Err(path.refuse("user messages must have non-empty content"));
        }
        if !texts.is_empty() {
            self.messages.push(message("user", joined(texts).into()));
        }
        Ok(())
    }

    fn result(&mut self, path: Path<'_>, outcome: Outcome) -> Result<(), ApiError> {
        let Outcome { id, text } = outcome;
        match self.asked.get_mut(&id) {
            None => {
                return Err(path.refuse(format_args!(
                    "unexpected `tool_use_id` found in `tool_result` blocks: {id}. Each \
                     `tool_result` block must have a corresponding `tool_use` block in the \
                     previous message."
                )));
            }
            Some((_, true)) => {
                return Err(path.refuse(format_args!(
                    "each tool_use must have a single result. Found multiple `tool_result` blocks \
                     with id: {id}"
                )));
            }
            Some((_, has_result)) => *has_result = true,
        }
        let mut result = Map::new();
        result.insert("role".to_owned(), "tool".into());
        result.insert("tool_call_id".to_owned(), id.into());
        result.insert("content".to_owned(), text.into());
        self.messages.push(Value::Object(result));
        Ok(())
    }

    fn assistant(&mut self, at: usize, path: Path<'_>, blocks: Vec<Block>) -> Result<(), ApiError> {
        if self.assistant.is_none() {
            self.all_answered()?;
            self.asked.clear();
        }
        self.asked_at = at;
        let turn = self.assistant.get_or_insert_default();
        let content = path.name("content");
        for (at, block) in blocks.into_iter().enumerate() {
            match block {
                Block::Text(text) if turn.text.is_empty() => turn.text = text,
                Block::Text(text) => turn.text.push_str(&text),
                Block::Thinking(thinking) => turn.reasoning.push_str(&thinking),
                Block::Call(call) => {
                    let place = self.asked.len();
                    if self.asked.insert(call.id.clone(), (place, false)).is_some() {
                        return Err(content.at(at).refuse("`tool_use` ids must be unique"));
                    }
                    turn.calls.push(call);
                }
                Block::Outcome(_) | Block::Silent => {}
            }
        }
        Ok(())
    }

    /// Refuses calls that nobody answered.
    fn all_answered(&self) -> Result<(), ApiError> {
        let open = self.asked.iter().filter(|(_, (_, has_result))| !has_result);
        let mut open: Vec<(usize, &str)> = open.map(|(id, (at, _))| (*at, &**id)).collect();
        if open.is_empty() {
            return Ok(());
        }
        open.sort_unstable();
        let open: Vec<&str> = open
            .into_iter()
            .take(IDS_SHOWN_MAX)
            .map(|(_, id)| id)
            .collect();
        Err(Path::root("messages").at(self.asked_at).refuse(format_args!(
            "`tool_use` ids were found without `tool_result` blocks immediately after: {}. Each \
             `tool_use` block must have a corresponding `tool_result` block in the next message.",
            open.join(", ")
        )))
    }

    fn close_assistant(&mut self) {
        let Some(turn) = self.assistant.take() else {
            return;
        };
        // What chat clients send back for an answer without a text.
        let content = match turn.text.is_empty() {
            true => Value::Null,
            false => Value::String(turn.text),
        };
        let mut message = Map::new();
        message.insert("role".to_owned(), "assistant".into());
        message.insert("content".to_owned(), content);
        if !turn.reasoning.is_empty() {
            message.insert("reasoning_content".to_owned(), turn.reasoning.into());
        }
        if !turn.calls.is_empty() {
            let calls = turn.calls.into_iter().map(tool_call).collect();
            message.insert("tool_calls".to_owned(), Value::Array(calls));
        }
        self.messages.push(Value::Object(message));
    }
}

fn said(block: Block) -> Option<String> {
    match block {
        Block::Text(text) => Some(text),
        _ => None,
    }
}

fn tool_call(call: Call) -> Value {
    let mut function = Map::new();
    function.insert("name".to_owned(), call.name.into());
    function.insert("arguments".to_owned(), call.arguments.into());
    let mut value = Map::new();
    value.insert("id".to_owned(), call.id.into());
    value.insert("type".to_owned(), "function".into());
    value.insert("function".to_owned(), Value::Object(function));
    Value::Object(value)
}

/// A message's blocks.
fn content(
    item: &mut Object<'_>,
    speaker: Speaker,
    marks: &mut Marks,
) -> Result<Vec<Block>, ApiError> {
    let content = item.take("content");
    let path = item.path.name("content");
    match content {
        Some(Value::String(text)) => {
            if speaker == Speaker::User {
                not_blank(&text, path)?;
            }
            Ok(vec![Block::Text(text)])
        }
        Some(Value::Array(items)) => {
            let blocks = items.into_iter().enumerate();
            let blocks = blocks.map(|(at, item)| block(item, path.at(at), speaker, marks));
            blocks.collect()
        }
        // A system message may only change the configuration.
        None if speaker == Speaker::System => Ok(Vec::new()),
        None => Err(path.required()),
        Some(_) => Err(path.should_be("a valid string or a valid list")),
    }
}
