//! Is this conversation sound, and how does the template see it?
//!
//! Checked here, so that a template never fails on what the client could have been told by name:
//! messages are objects, roles come from a closed set, content is null, a string, or a list of
//! text parts. Normalised here, as the common servers do, because templates expect it: content is
//! one string; null fields and empty `tool_calls` are absent; the arguments of a tool call are
//! the object that their JSON text spells. What the template does not know of tools and reasoning
//! is put into contents (`hermes`). Every string of the user's passes through `escape`.
//!
//! Left out on purpose: images, audio and files (refused by the name of the part).

use indexmap::IndexMap;
use minijinja::Value;
use serde_json::{Map, Value as Json};

use crate::calls::{self, Call};
use crate::error::PromptError;
use crate::hermes::{Hermes, Knows, unspellable};
use crate::marks::Marks;
use crate::tools::{self, Called};

/// The roles of OpenAI's Chat Completions API.
const ROLES: &[&str] = &[
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
    "function",
];

/// How a template knows developer messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Developer {
    /// By their own role.
    AsDeveloper,
    /// Not at all: they are the newer name of system messages and are passed as such.
    AsSystem,
}

/// How conversations have to look for one template.
#[derive(Debug, Clone)]
pub(crate) struct Style {
    pub(crate) developer: Developer,
    pub(crate) knows: Knows,
    pub(crate) hermes: Hermes,
}

/// Turns requests' values into the template's.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Normaliser<'a> {
    pub(crate) marks: &'a Marks,
    pub(crate) style: &'a Style,
}

/// A conversation as its template sees it.
pub(crate) struct Conversation {
    pub(crate) messages: Vec<Value>,
    pub(crate) tools: Value,
    /// Whether messages to come cannot change where the tools are introduced.
    pub(crate) is_introduced: bool,
}

/// A message on its way to the template; every string in it is escaped.
struct Normal {
    role: &'static str,
    content: String,
    fields: IndexMap<Value, Value>,
}

/// Any JSON value as the template's.
pub(crate) fn value(marks: &Marks, json: &Json) -> Value {
    let text = |text: &str| Value::from(marks.escape(text).as_ref());
    match json {
        Json::Null => Value::from(()),
        Json::Bool(value) => Value::from(*value),
        Json::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(value), _) => Value::from(value),
            (None, Some(value)) => Value::from(value),
            (None, None) => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(string) => text(string),
        Json::Array(items) => items.iter().map(|item| value(marks, item)).collect(),
        Json::Object(fields) => fields
            .iter()
            .map(|(name, field)| (text(name), value(marks, field)))
            .collect::<IndexMap<Value, Value>>()
            .into(),
    }
}

impl Normaliser<'_> {
    /// The template's `messages` and `tools`.
    pub(crate) fn conversation(
        &self,
        messages: &[&Json],
        tools: Option<&Json>,
    ) -> Result<Conversation, PromptError> {
        let Style { knows, hermes, .. } = self.style;
        let tools = tools.map_or(Ok(None), tools::checked)?;
        if messages.is_empty() {
            return Err(invalid("messages", "is empty; send at least one message"));
        }
        let mut messages = self.messages(messages, Called::default())?;
        let is_introduced = tools.is_none()
            || knows.tools
            || knows.system
            || messages.iter().any(|message| message.role == "user");
        let tools = match tools {
            Some(tools) if knows.tools => tools.iter().map(|tool| self.value(tool)).collect(),
            Some(tools) => {
                self.introduce(&mut messages, hermes.preamble(tools, self.marks)?);
                Value::from(())
            }
            None => Value::from(()),
        };
        Ok(Conversation {
            messages: messages.into_iter().map(Value::from).collect(),
            tools,
            is_introduced,
        })
    }

    /// Messages that are added behind others, given from the last to the first; none where they
    /// are unsound, or do not stand for themselves.
    pub(crate) fn more<'m>(
        &self,
        earlier: impl Iterator<Item = &'m Json>,
        new: &[&'m Json],
    ) -> Option<Vec<Value>> {
        let role = |message: &Json| {
            message
                .get("role")
                .and_then(Json::as_str)
                .map(str::to_owned)
        };
        let is_result =
            |message: &Json| matches!(role(message).as_deref(), Some("tool" | "function"));
        if !self.style.knows.tool_role && new.first().is_some_and(|first| is_result(first)) {
            // It may belong to the turn of the results before it.
            return None;
        }
        let called = match new.iter().any(|message| is_result(message)) {
            true => Called::latest(earlier)?,
            false => Called::default(),
        };
        let normal = self.messages(new, called).ok()?;
        Some(normal.into_iter().map(Value::from).collect())
    }

    /// Any JSON value as the template's.
    pub(crate) fn value(&self, json: &Json) -> Value {
        value(self.marks, json)
    }

    fn text(&self, text: &str) -> Value {
        Value::from(self.marks.escape(text).as_ref())
    }

    /// Puts the preamble into the system message; where the template has none, before what the
    /// user said first.
    fn introduce(&self, messages: &mut Vec<Normal>, preamble: String) {
        let is_system = |message: &Normal| matches!(message.role, "system" | "developer");
        if self.style.knows.system {
            match messages.first_mut().filter(|first| is_system(first)) {
                Some(first) if first.content.is_empty() => first.content = preamble,
                Some(first) => first.content = format!("{}\n\n{preamble}", first.content),
                None => messages.insert(0, Normal::new("system", preamble)),
            }
            return;
        }
        match messages.iter_mut().find(|message| message.role == "user") {
            Some(user) => user.content = format!("{preamble}\n\n{}", user.content),
            None => messages.insert(0, Normal::new("user", preamble)),
        }
    }

    /// Messages behind those whose calls are `called`.
    fn messages<'m>(
        &self,
        messages: &[&'m Json],
        mut called: Called<'m>,
    ) -> Result<Vec<Normal>, PromptError> {
        let mut normal: Vec<Normal> = Vec::with_capacity(messages.len() + 1);
        // Whether the last message is a user turn that holds tool results.
        let mut in_results = false;
        for (at, message) in messages.iter().enumerate() {
            let Json::Object(fields) = message else {
                let what = "must be an object with `role` and `content`";
                return Err(invalid(&format!("messages[{at}]"), what));
            };
            let message = self.message(at, fields)?;
            let is_result = matches!(message.role, "tool" | "function");
            match message.role {
                "assistant" => called.assistant(fields),
                "tool" => called.result(at, fields)?,
                _ => {}
            }
            if !is_result || self.style.knows.tool_role {
                normal.push(message);
                in_results = false;
                continue;
            }
            if !in_results {
                normal.push(Normal::new("user", String::new()));
                in_results = true;
            }
            if let Some(turn) = normal.last_mut() {
                let hermes = &self.style.hermes;
                hermes.push_result(&mut turn.content, &message.content);
            }
        }
        Ok(normal)
    }

    fn message(&self, at: usize, fields: &Map<String, Json>) -> Result<Normal, PromptError> {
        let role = role(at, fields)?;
        let content = content(at, role, fields.get("content"))?;
        let role = match self.style.developer {
            Developer::AsSystem if role == "developer" => "system",
            _ => role,
        };
        let mut normal = Normal::new(role, self.marks.escape(&content).into_owned());
        let calls = match fields.get("tool_calls") {
            None | Some(Json::Null) => Vec::new(),
            Some(calls) => calls::read(at, calls)?,
        };
        for (name, value) in fields {
            match (name.as_str(), value) {
                ("role" | "content", _) | (_, Json::Null) => {}
                ("tool_calls", _) if calls.is_empty() => {}
                ("tool_calls", _) if self.style.knows.tool_calls => {
                    let calls = calls.iter().map(|call| call.value(self.marks));
                    normal
                        .fields
                        .insert(Value::from("tool_calls"), calls.collect());
                }
                ("tool_calls", _) => {}
                (_, value) => {
                    normal.fields.insert(self.text(name), self.value(value));
                }
            }
        }
        if role == "assistant" {
            self.replay(at, fields, &calls, &mut normal)?;
        }
        Ok(normal)
    }

    /// Puts an assistant's reasoning and calls where this template's model can see them.
    fn replay(
        &self,
        at: usize,
        fields: &Map<String, Json>,
        calls: &[Call<'_>],
        normal: &mut Normal,
    ) -> Result<(), PromptError> {
        let Style { knows, hermes, .. } = self.style;
        // `reasoning` is the name that newer servers give it.
        let reasoning = ["reasoning_content", "reasoning"]
            .into_iter()
            .find_map(|name| fields.get(name).and_then(Json::as_str))
            .filter(|reasoning| !reasoning.is_empty());
        if !knows.tool_calls {
            for (call_at, call) in calls.iter().enumerate() {
                hermes
                    .push_call(&mut normal.content, call, self.marks)
                    .map_err(|error| {
                        let param = format!("messages[{at}].tool_calls[{call_at}].function");
                        unspellable(&param, &error)
                    })?;
            }
        }
        if let Some(reasoning) = reasoning {
            let reasoning = self.marks.escape(reasoning);
            if knows.reasoning {
                let name = Value::from("reasoning_content");
                normal.fields.insert(name, Value::from(reasoning.as_ref()));
            } else {
                normal.content = hermes.with_reasoning(&reasoning, &normal.content);
            }
        }
        Ok(())
    }
}

impl Normal {
    fn new(role: &'static str, content: String) -> Self {
        Self {
            role,
            content,
            fields: IndexMap::new(),
        }
    }
}

impl From<Normal> for Value {
    fn from(message: Normal) -> Self {
        let Normal {
            role,
            content,
            fields,
        } = message;
        let mut all = IndexMap::with_capacity(fields.len() + 2);
        all.insert(Self::from("role"), Self::from(role));
        all.insert(Self::from("content"), Self::from(content));
        all.extend(fields);
        all.into()
    }
}

fn role(at: usize, message: &Map<String, Json>) -> Result<&'static str, PromptError> {
    let wanted = || format!("use one of {}", ROLES.join(", "));
    let param = || format!("messages[{at}].role");
    match message.get("role") {
        Some(Json::String(role)) => match ROLES.iter().find(|known| *known == role) {
            Some(known) => Ok(known),
            None => Err(invalid(
                &param(),
                &format!("{:?} is unknown; {}", clipped(role), wanted()),
            )),
        },
        Some(_) => Err(invalid(
            &param(),
            &format!("must be a string; {}", wanted()),
        )),
        None => Err(invalid(&param(), &format!("is missing; {}", wanted()))),
    }
}

/// A message's content as one string.
fn content<'a>(
    at: usize,
    role: &str,
    content: Option<&'a Json>,
) -> Result<std::borrow::Cow<'a, str>, PromptError> {
    let param = || format!("messages[{at}].content");
    match content {
        Some(Json::Null) => Ok("".into()),
        Some(Json::String(text)) => Ok(text.into()),
        Some(Json::Array(parts)) => {
            let mut text = String::new();
            for (part_at, part) in parts.iter().enumerate() {
                text.push_str(part_text(&format!("{}[{part_at}]", param()), part)?);
            }
            Ok(text.into())
        }
        Some(_) => Err(invalid(
            &param(),
            "must be a string or an array of text parts",
        )),
        // An assistant may have called tools and said nothing.
        None if role == "assistant" => Ok("".into()),
        None => Err(invalid(
            &param(),
            "is missing; send a string or an array of text parts",
        )),
    }
}

fn part_text<'a>(param: &str, part: &'a Json) -> Result<&'a str, PromptError> {
    let Json::Object(part) = part else {
        return Err(invalid(
            param,
            "must be an object such as {\"type\": \"text\", \"text\": …}",
        ));
    };
    let kind = match part.get("type") {
        Some(Json::String(kind)) => kind.as_str(),
        _ => {
            return Err(invalid(
                &format!("{param}.type"),
                "must be the string \"text\"",
            ));
        }
    };
    let field = match kind {
        "text" => "text",
        "refusal" => "refusal",
        other => {
            let what = "is not supported by this model; send text parts only";
            let what = format!("{:?} {what}", clipped(other));
            return Err(invalid(&format!("{param}.type"), &what));
        }
    };
    match part.get(field) {
        Some(Json::String(text)) => Ok(text),
        _ => Err(invalid(&format!("{param}.{field}"), "must be a string")),
    }
}

pub(crate) fn invalid(param: &str, what: &str) -> PromptError {
    PromptError::Invalid {
        param: param.to_owned(),
        message: format!("`{param}` {what}"),
    }
}

/// The start of a client's string, short enough for an error message.
pub(crate) fn clipped(text: &str) -> String {
    const CHARS_MAX: usize = 40;
    match text.char_indices().nth(CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
