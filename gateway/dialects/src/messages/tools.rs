//! Which tools may the model call, and must it?
//!
//! Tools with a schema become functions. Tools of Anthropic's own kinds (web search, shell, editor,
//! computer …) come without one, and most of them run at Anthropic: the model here cannot know
//! them, so they are left out of the prompt, and a `tool_choice` that names one is refused. Tools
//! whose loading is deferred are offered from the start: a list that grows in the middle of a
//! conversation would change the prompt's beginning, and nothing behind it would stay cached.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use super::marks::Marks;
use super::path::{Object, Path, clipped};
use crate::error::ApiError;
use crate::shared::Shared;

/// What the API allows in a tool's name.
const NAME_PATTERN: &str = "^[a-zA-Z0-9_-]{1,128}$";
/// Characters of a tool's name.
const NAME_CHARS_MAX: usize = 128;

/// The tools of a request.
#[derive(Debug, Default)]
pub(super) struct Tools {
    /// Definitions in Chat Completions' form; none where there are none.
    pub(super) offered: Option<Shared>,
    names: HashSet<String>,
    /// Names of tools that the model cannot be offered.
    unserved: HashSet<String>,
}

/// Reads `tools`.
pub(super) fn tools(value: Option<Value>, marks: &mut Marks) -> Result<Tools, ApiError> {
    let mut tools = Tools::default();
    let Some(value) = value else {
        return Ok(tools);
    };
    let path = Path::root("tools");
    let Value::Array(items) = value else {
        return Err(path.should_be("a valid list"));
    };
    let mut offered = Vec::with_capacity(items.len());
    for (at, item) in items.into_iter().enumerate() {
        offered.extend(tools.add(Object::new(item, path.at(at))?, marks)?);
    }
    tools.offered = (!offered.is_empty()).then(|| Value::Array(offered).into());
    Ok(tools)
}

impl Tools {
    /// The definition of a tool that can be offered.
    fn add(&mut self, mut tool: Object<'_>, marks: &mut Marks) -> Result<Option<Value>, ApiError> {
        let kind = tool.text("type")?;
        let kind = kind.as_deref().unwrap_or("custom");
        if kind != "custom" && !is_provider_kind(kind) {
            return Err(tool.path.unknown_tag(kind, &["custom"]));
        }
        let path = tool.path;
        let mut tool = tool.at(path.name(kind));
        marks.take(&mut tool)?;
        if kind != "custom" {
            // Toolsets have no name of their own.
            let name = tool.text("name")?.unwrap_or_else(|| kind.to_owned());
            self.unserved.insert(name);
            return Ok(None);
        }
        let name = tool.required_text("name")?;
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
        if !(1..=NAME_CHARS_MAX).contains(&name.len()) || !name.chars().all(allowed) {
            let what = format_args!("String should match pattern '{NAME_PATTERN}'");
            return Err(tool.path.name("name").refuse(what));
        }
        let description = tool.text("description")?;
        let is_strict = tool.flag("strict")?.unwrap_or(false);
        for flag in ["defer_loading", "eager_input_streaming"] {
            tool.flag(flag)?;
        }
        let schema = schema(&mut tool)?;
        if !self.names.insert(name.clone()) {
            let message = format!("tools: Tool names must be unique. Found twice: {name}");
            return Err(ApiError::invalid("tools", message));
        }
        let mut function = Map::new();
        function.insert("name".to_owned(), Value::String(name));
        if let Some(description) = description {
            function.insert("description".to_owned(), Value::String(description));
        }
        function.insert("parameters".to_owned(), schema);
        if is_strict {
            function.insert("strict".to_owned(), Value::Bool(true));
        }
        // Moved, not copied as `json!` would: agents send 40 KB of schemas.
        let mut tool = Map::new();
        tool.insert("type".to_owned(), Value::String("function".to_owned()));
        tool.insert("function".to_owned(), Value::Object(function));
        Ok(Some(Value::Object(tool)))
    }
}

fn schema(tool: &mut Object<'_>) -> Result<Value, ApiError> {
    let schema = tool.take("input_schema");
    let path = tool.path.name("input_schema");
    let schema = schema.ok_or_else(|| path.required())?;
    let Value::Object(members) = &schema else {
        return Err(path.should_be("a valid dictionary"));
    };
    match members.get("type") {
        Some(Value::String(kind)) if kind == "object" => Ok(schema),
        None | Some(Value::Null) => Err(path.name("type").required()),
        Some(_) => Err(path.name("type").should_be("'object'")),
    }
}

/// Whether a `type` is one of the provider's own kinds: they carry their version's date, so that
/// new ones are known by their form.
fn is_provider_kind(kind: &str) -> bool {
    let dated = kind.rsplit_once('_').is_some_and(|(name, date)| {
        !name.is_empty() && date.len() == 8 && date.bytes().all(|byte| byte.is_ascii_digit())
    });
    dated || kind == "mcp_toolset"
}

/// Reads `tool_choice` into chat's parameters.
pub(super) fn choice(
    value: Option<Value>,
    tools: &Tools,
    parameters: &mut Map<String, Value>,
) -> Result<Choice, ApiError> {
    let path = Path::root("tool_choice");
    let Some(value) = value else {
        return Ok(Choice::Free);
    };
    let mut choice = Object::new(value, path)?;
    let tag = choice.required_text("type")?;
    let tagged = path.name(&tag);
    let mut choice = choice.at(tagged);
    let (demand, chosen) = match tag.as_str() {
        "auto" => ("auto".into(), Choice::Free),
        "none" => ("none".into(), Choice::Free),
        "any" => ("required".into(), Choice::Forced),
        "tool" => (named(&mut choice, tools)?, Choice::Forced),
        _ => return Err(path.unknown_tag(&tag, &["auto", "any", "none", "tool"])),
    };
    let alone = choice.flag("disable_parallel_tool_use")?;
    if tools.offered.is_none() {
        return match (tag.as_str(), tools.unserved.is_empty()) {
            ("none", _) | ("auto", false) => Ok(Choice::Free),
            (_, true) => {
                Err(path.refuse("`tool_choice` may only be specified while providing `tools`."))
            }
            (_, false) => Err(path.refuse(
                "None of the `tools` can be called on this server; it serves tools with an \
                 `input_schema`.",
            )),
        };
    }
    // What means nothing else than its absence is left out, as other dialects' clients do.
    if demand != "auto" {
        parameters.insert("tool_choice".to_owned(), demand);
    }
    if alone == Some(true) {
        parameters.insert("parallel_tool_calls".to_owned(), Value::Bool(false));
    }
    Ok(chosen)
}

/// Whether a call is demanded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Choice {
    /// The model may answer in text.
    Free,
    /// It must call.
    Forced,
}

fn named(choice: &mut Object<'_>, tools: &Tools) -> Result<Value, ApiError> {
    let name = choice.required_text("name")?;
    if tools.unserved.contains(&name) {
        return Err(choice.path.name("name").refuse(format_args!(
            "Tool '{}' cannot be called on this server; it serves tools with an `input_schema`.",
            clipped(&name)
        )));
    }
    if !tools.names.contains(&name) {
        return Err(choice.path.name("name").refuse(format_args!(
            "Tool '{}' not found in provided tools",
            clipped(&name)
        )));
    }
    Ok(json!({"type": "function", "function": {"name": name}}))
}
