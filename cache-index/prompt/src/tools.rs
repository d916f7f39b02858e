//! Are the request's tools and its tool results sound?
//!
//! Told by name here, because a template that meets a broken tool fails somewhere else, or prints
//! it. Left out on purpose: whether `parameters` is a JSON Schema that can be enforced, which only
//! the node can say, and custom (grammar) tools, which no template in use renders.

use hashbrown::{HashMap, HashSet};
use serde_json::{Map, Value as Json};

use crate::error::PromptError;
use crate::messages::{clipped, invalid};

/// The request's tools; none for null and for an empty list, which means the same.
pub(crate) fn checked(tools: &Json) -> Result<Option<&[Json]>, PromptError> {
    let tools = match tools {
        Json::Null => return Ok(None),
        Json::Array(tools) => tools,
        _ => return Err(invalid("tools", "must be an array of tool objects")),
    };
    let mut names: HashMap<&str, usize> = HashMap::with_capacity(tools.len());
    for (at, tool) in tools.iter().enumerate() {
        let name = checked_tool(at, tool)?;
        if let Some(before) = names.insert(name, at) {
            let what = format!(
                "{:?} is the name of tools[{before}] too; give each tool its own name",
                clipped(name)
            );
            return Err(invalid(&format!("tools[{at}].function.name"), &what));
        }
    }
    Ok(Some(tools.as_slice()).filter(|tools| !tools.is_empty()))
}

/// A tool's name.
fn checked_tool(at: usize, tool: &Json) -> Result<&str, PromptError> {
    let param = |rest: &str| format!("tools[{at}]{rest}");
    let Json::Object(tool) = tool else {
        let what = "must be an object such as {\"type\": \"function\", \"function\": {…}}";
        return Err(invalid(&param(""), what));
    };
    match tool.get("type") {
        None | Some(Json::Null) => {}
        Some(Json::String(kind)) if kind == "function" => {}
        Some(_) => return Err(invalid(&param(".type"), "must be \"function\"")),
    }
    let Some(Json::Object(function)) = tool.get("function") else {
        let what = "must be an object with `name`, `description` and `parameters`";
        return Err(invalid(&param(".function"), what));
    };
    match function.get("description") {
        None | Some(Json::Null | Json::String(_)) => {}
        Some(_) => {
            return Err(invalid(&param(".function.description"), "must be a string"));
        }
    }
    match function.get("parameters") {
        None | Some(Json::Null | Json::Object(_)) => {}
        Some(_) => {
            let what = "must be a JSON Schema object";
            return Err(invalid(&param(".function.parameters"), what));
        }
    }
    match function.get("name") {
        Some(Json::String(name)) if !name.is_empty() => Ok(name),
        _ => Err(invalid(
            &param(".function.name"),
            "must be a string that is not empty",
        )),
    }
}

/// The calls made so far in a conversation, which its tool results must answer.
#[derive(Debug, Default)]
pub(crate) struct Called<'a> {
    any: bool,
    ids: HashSet<&'a str>,
}

impl<'a> Called<'a> {
    /// An assistant's message was read.
    pub(crate) fn assistant(&mut self, message: &'a Map<String, Json>) {
        let calls = message.get("tool_calls").and_then(Json::as_array);
        for call in calls.into_iter().flatten() {
            self.any = true;
            self.ids.extend(call.get("id").and_then(Json::as_str));
        }
        self.any |= message.get("function_call").is_some_and(Json::is_object);
    }

    /// The calls that results behind these messages, given from the last to the first, are most
    /// likely to answer. None where only all calls can tell what a result may be.
    pub(crate) fn latest(messages: impl Iterator<Item = &'a Json>) -> Option<Self> {
        let mut called = Self::default();
        for message in messages.filter_map(Json::as_object) {
            called.assistant(message);
            if called.any {
                return (!called.ids.is_empty()).then_some(called);
            }
        }
        Some(called)
    }

    /// A tool's result came: is there a call that it answers?
    pub(crate) fn result(&self, at: usize, message: &Map<String, Json>) -> Result<(), PromptError> {
        if !self.any {
            let what = "is a tool result without a call; an assistant message with `tool_calls` \
                        must come before it";
            return Err(invalid(&format!("messages[{at}]"), what));
        }
        let param = || format!("messages[{at}].tool_call_id");
        match message.get("tool_call_id") {
            // Some clients number nothing at all.
            None | Some(Json::Null) => Ok(()),
            Some(Json::String(_)) if self.ids.is_empty() => Ok(()),
            Some(Json::String(id)) if self.ids.contains(id.as_str()) => Ok(()),
            Some(Json::String(id)) => {
                let what = format!(
                    "{:?} is the id of no call before it; send the id from `tool_calls`",
                    clipped(id)
                );
                Err(invalid(&param(), &what))
            }
            Some(_) => Err(invalid(&param(), "must be a string")),
        }
    }
}
