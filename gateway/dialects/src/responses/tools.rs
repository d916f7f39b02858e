//! Which tools does the model see, and must it call one?
//!
//! Function tools lose the members that no template renders. A custom tool (free text, or text of a
//! grammar) becomes a function with the one string `input`, and its calls turn back into custom
//! calls on the way out ([`Tools::custom`]). What runs on the API's own servers (`web_search`, …),
//! and groups of tools (`namespace`), are left out of the prompt: no node can run them, and the
//! clients that send them get along without. A `tool_choice` that names one is refused.

use serde_json::{Map, Value, json};

use super::read::{Object, Path};
use super::refuse;
use crate::error::ApiError;
use crate::shared::Shared;

/// More tools than this are refused: what a node takes, and eight times what the API allows.
const TOOLS_MAX: usize = 1024;
/// The API's bound of a tool's name.
const NAME_CHARS_MAX: usize = 128;

pub(super) const CHOICES: &[&str] = &["none", "auto", "required"];

/// What a request says about tools, as the node is to read it.
#[derive(Default)]
pub(super) struct Tools {
    /// Chat Completions' `tools`; none where the model sees none.
    pub(super) offered: Option<Shared>,
    /// Chat Completions' `tool_choice`.
    pub(super) choice: Option<Value>,
    /// Names of custom tools.
    pub(super) custom: Vec<String>,
}

/// Reads `tools` and `tool_choice`. The list is taken apart: schemas are the larger part of an
/// agent's first request, and copying them costs as much as parsing them.
pub(super) fn read(list: Option<Value>, top: Object<'_, '_>) -> Result<Tools, ApiError> {
    let path = Path::Key(top.path, "tools");
    let list = match list {
        None => Vec::new(),
        Some(Value::Array(list)) => list,
        Some(other) => return Err(refuse::wrong_type(&path, "an array", &other)),
    };
    if list.len() > TOOLS_MAX {
        return Err(refuse::list_too_long(&path, TOOLS_MAX, list.len()));
    }
    let mut seen = Seen::default();
    for (at, tool) in list.into_iter().enumerate() {
        seen.add(tool, &Path::At(&path, at))?;
    }
    let path = Path::Key(top.path, "tool_choice");
    let choice = match top.get("tool_choice") {
        None => None,
        Some(choice) => seen.choose(choice, &path)?,
    };
    let Seen {
        offered, custom, ..
    } = seen;
    let choice = choice.filter(|_| !offered.is_empty());
    Ok(Tools {
        offered: (!offered.is_empty()).then(|| {
            let list: Value = offered.into_iter().map(|tool| tool.chat).collect();
            list.into()
        }),
        choice,
        custom,
    })
}

struct Tool {
    name: String,
    chat: Value,
}

#[derive(Default)]
struct Seen {
    offered: Vec<Tool>,
    custom: Vec<String>,
    /// Types of the tools that no node can run.
    elsewhere: Vec<String>,
}

impl Seen {
    fn add(&mut self, tool: Value, path: &Path<'_>) -> Result<(), ApiError> {
        let read = Object::of(&tool, path)?;
        let kind = match read.needed_text("type")? {
            "function" => Kind::Function,
            "custom" => Kind::Custom(custom_input(read)?),
            other => {
                self.elsewhere.push(other.to_owned());
                return Ok(());
            }
        };
        let name = name(read)?.to_owned();
        if self.offered.iter().any(|other| other.name == name) {
            let path = Path::Key(path, "name");
            let message =
                format!("Invalid '{path}': tool names must be unique, '{name}' is used twice.");
            return Err(refuse::invalid(&path, message));
        }
        read.text("description")?;
        read.object("parameters")?;
        let strict = read.flag("strict")? == Some(true);
        if matches!(kind, Kind::Custom(_)) {
            self.custom.push(name.clone());
        }
        let chat = kind.chat(&name, strict, tool);
        self.offered.push(Tool { name, chat });
        Ok(())
    }

    /// The node's `tool_choice`.
    fn choose(&mut self, choice: &Value, path: &Path<'_>) -> Result<Option<Value>, ApiError> {
        let choice = match choice {
            Value::String(word) if CHOICES.contains(&word.as_str()) => {
                return self.mode(word, path).map(Some);
            }
            Value::String(word) => return Err(refuse::unknown_value(path, word, CHOICES)),
            other => Object::of(other, path).map_err(|_| {
                refuse::wrong_type(path, "one of a tool choice mode or an object", other)
            })?,
        };
        match choice.needed_text("type")? {
            "function" | "custom" => {
                let name = choice.needed_text("name")?;
                if !self.offered.iter().any(|tool| tool.name == name) {
                    return Err(not_found(path, name));
                }
                Ok(Some(named(name)))
            }
            "allowed_tools" => self.allowed(choice).map(Some),
            kind if self.elsewhere.iter().any(|other| other == kind) => Err(refuse::invalid(
                path,
                format!(
                    "Tool choice '{kind}' cannot be served: this model calls function and custom tools only."
                ),
            )),
            kind => Err(not_found(path, kind)),
        }
    }

    fn mode(&self, word: &str, path: &Path<'_>) -> Result<Value, ApiError> {
        if word == "required" && self.offered.is_empty() {
            return Err(refuse::invalid(
                path,
                "Tool choice 'required' must be specified with a function or custom tool in the 'tools' parameter.",
            ));
        }
        Ok(word.into())
    }

    /// Some of the tools only: one that must be called is named, so that the prompt stays what it
    /// was; of several, the others are left out of it, since nodes know no other way.
    fn allowed(&mut self, choice: Object<'_, '_>) -> Result<Value, ApiError> {
        let path = Path::Key(choice.path, "tools");
        let tools = choice
            .list("tools")?
            .ok_or_else(|| choice.missing("tools"))?;
        let modes = &["auto", "required"];
        let mode = choice
            .word("mode", modes)?
            .ok_or_else(|| choice.missing("mode"))?;
        let mut names = Vec::with_capacity(tools.len());
        for (at, tool) in tools.iter().enumerate() {
            let path = Path::At(&path, at);
            let tool = Object::of(tool, &path)?;
            match tool.needed_text("type")? {
                "function" | "custom" => {
                    let name = tool.needed_text("name")?;
                    if !self.offered.iter().any(|tool| tool.name == name) {
                        return Err(not_found(choice.path, name));
                    }
                    names.push(name);
                }
                kind if self.elsewhere.iter().any(|other| other == kind) => {}
                kind => return Err(not_found(choice.path, kind)),
            }
        }
        match (names.as_slice(), mode) {
            ([], "required") => Err(refuse::invalid(
                choice.path,
                "Tool choice 'allowed_tools' allows no tool that this model can call.",
            )),
            ([name], "required") => Ok(named(name)),
            _ => {
                self.offered
                    .retain(|tool| names.contains(&tool.name.as_str()));
                Ok(mode.into())
            }
        }
    }
}

fn not_found(path: &Path<'_>, what: &str) -> ApiError {
    let message = format!("Tool choice '{what}' not found in 'tools' parameter.");
    refuse::invalid(path, message)
}

fn named(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name}})
}

fn name<'v>(tool: Object<'v, '_>) -> Result<&'v str, ApiError> {
    let name = tool.needed_text("name")?;
    let path = Path::Key(tool.path, "name");
    let length = name.chars().count();
    if length > NAME_CHARS_MAX {
        return Err(refuse::text_too_long(&path, NAME_CHARS_MAX, length));
    }
    if name.is_empty() {
        return Err(refuse::text_empty(&path));
    }
    Ok(name)
}

/// What a tool becomes.
enum Kind {
    Function,
    /// The schema of its text.
    Custom(Value),
}

impl Kind {
    /// Chat Completions' form of a tool that has been read.
    fn chat(self, name: &str, strict: bool, tool: Value) -> Value {
        let mut given = match tool {
            Value::Object(given) => given,
            _ => Map::new(),
        };
        let mut function = Map::with_capacity(4);
        function.insert("name".to_owned(), name.into());
        let description = given.remove("description");
        if let Some(description) = description.filter(Value::is_string) {
            function.insert("description".to_owned(), description);
        }
        let parameters = match &self {
            Self::Function => given.remove("parameters").filter(Value::is_object),
            Self::Custom(input) => Some(json!({
                "type": "object",
                "properties": {"input": input},
                "required": ["input"],
                "additionalProperties": false,
            })),
        };
        if let Some(parameters) = parameters {
            function.insert("parameters".to_owned(), parameters);
        }
        if strict && matches!(self, Self::Function) {
            function.insert("strict".to_owned(), true.into());
        }
        let mut chat = Map::with_capacity(2);
        chat.insert("type".to_owned(), "function".into());
        chat.insert("function".to_owned(), Value::Object(function));
        Value::Object(chat)
    }
}

/// The schema of a custom tool's text, whose description has what the model must know of the form.
fn custom_input(tool: Object<'_, '_>) -> Result<Value, ApiError> {
    let path = Path::Key(tool.path, "format");
    let mut about = "The tool's input, as plain text.".to_owned();
    if let Some(members) = tool.object("format")? {
        let format = Object {
            members,
            path: &path,
        };
        if format.word("type", &["text", "grammar"])? == Some("grammar") {
            let syntax = format.word("syntax", &["lark", "regex"])?;
            let syntax = syntax.ok_or_else(|| format.missing("syntax"))?;
            let definition = format.needed_text("definition")?;
            let what = match syntax {
                "lark" => "that this Lark grammar accepts",
                _ => "that this regular expression matches",
            };
            about = format!("The tool's input, as plain text {what}:\n{definition}");
        }
    }
    Ok(json!({"type": "string", "description": about}))
}
