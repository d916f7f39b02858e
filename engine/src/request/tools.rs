//! Which tools may the answer call, and what else is its form?
//!
//! As OpenAI has it: `tool_choice` required or named demands calls, and then `response_format` has
//! nothing to say; under `auto` the answer is either calls or content of the asked form.

use serde_json::{Map, Value, json};

use super::fields::{Fields, under, wrong};
use crate::error::{ApiError, Kind};

/// Tools in one request. OpenAI allows 128; agents with several tool servers have more.
pub const TOOLS_MAX: usize = 1024;
/// Characters of a tool's name. OpenAI allows 64; names that carry their server's are longer.
const NAME_CHARS_MAX: usize = 128;

/// A tool that the answer may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// The JSON schema of its arguments.
    pub parameters: Value,
}

/// Whether tools are called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolChoice {
    /// Never: what looks like a call is text.
    None,
    /// As the model decides.
    Auto,
    /// At least one call, and nothing else.
    Required,
    /// One call of the tool at this place in the list.
    Named(usize),
}

/// How many calls one answer may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parallel {
    /// As many as the model makes.
    Many,
    /// One (`parallel_tool_calls` false).
    One,
}

/// What a request says about tools.
#[derive(Clone, Debug, PartialEq)]
pub struct Tools {
    /// The tools.
    pub offered: Vec<Tool>,
    /// Whether they are called.
    pub choice: ToolChoice,
    /// How often.
    pub parallel: Parallel,
}

impl Tools {
    /// No tools.
    pub const NONE: Self = Self {
        offered: Vec::new(),
        choice: ToolChoice::None,
        parallel: Parallel::Many,
    };

    /// Whether calls are looked for in the answer.
    pub fn are_parsed(&self) -> bool {
        self.choice != ToolChoice::None && !self.offered.is_empty()
    }

    /// Whether the answer must be calls.
    pub fn are_demanded(&self) -> bool {
        matches!(self.choice, ToolChoice::Required | ToolChoice::Named(_))
    }
}

/// Reads `tools`, `tool_choice` and `parallel_tool_calls`.
pub(super) fn tools(fields: &Fields<'_>) -> Result<Tools, ApiError> {
    let offered = offered(fields)?;
    let parallel = match fields.flag("parallel_tool_calls")? {
        Some(false) => Parallel::One,
        Some(true) | None => Parallel::Many,
    };
    let choice = choice(fields, &offered)?;
    Ok(Tools {
        offered,
        choice,
        parallel,
    })
}

fn offered(fields: &Fields<'_>) -> Result<Vec<Tool>, ApiError> {
    let Some(tools) = fields.list("tools")? else {
        return Ok(Vec::new());
    };
    if tools.len() > TOOLS_MAX {
        let found = tools.len();
        let message = format!("`tools` has {found} tools; at most {TOOLS_MAX} are allowed.");
        return Err(ApiError::field("tools", message));
    }
    let tool = |(at, tool): (usize, &Value)| {
        let param = format!("tools[{at}]");
        let tool = tool
            .as_object()
            .ok_or_else(|| wrong(&param, "an object", tool))?;
        one_tool(&Fields(tool)).map_err(|error| under(&param, error))
    };
    tools.iter().enumerate().map(tool).collect()
}

fn one_tool(tool: &Fields<'_>) -> Result<Tool, ApiError> {
    match tool.text("type")? {
        None | Some("function") => {}
        Some(_) => {
            let message = "Only tools of `type` \"function\" are served here.";
            let error = ApiError::new(Kind::Invalid, "unsupported_parameter", message);
            return Err(error.with_param("type"));
        }
    }
    tool.required("function")?;
    let none = Map::new();
    let function = Fields(tool.object("function")?.unwrap_or(&none));
    let in_function = |error| under("function", error);
    function.required("name").map_err(in_function)?;
    let name = function.text("name").map_err(in_function)?.unwrap_or("");
    // Names stand unquoted in some families' calls.
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | ':');
    if !(1..=NAME_CHARS_MAX).contains(&name.len()) || !name.chars().all(allowed) {
        let message = format!(
            "`name` must have 1 to {NAME_CHARS_MAX} letters, digits, `_`, `-`, `.` or `:`."
        );
        return Err(in_function(ApiError::field("name", message)));
    }
    let parameters = function.object("parameters").map_err(in_function)?;
    // Leaving it out says that there are none, as OpenAI has it.
    let empty = || json!({"type": "object", "properties": {}, "additionalProperties": false});
    Ok(Tool {
        name: name.to_owned(),
        parameters: parameters.map_or_else(empty, |schema| Value::Object(schema.clone())),
    })
}

fn choice(fields: &Fields<'_>, offered: &[Tool]) -> Result<ToolChoice, ApiError> {
    let wanted = "\"none\", \"auto\", \"required\" or {\"type\": \"function\", \"function\": \
                  {\"name\": …}}";
    let choice = match fields.get("tool_choice") {
        None if offered.is_empty() => ToolChoice::None,
        None => ToolChoice::Auto,
        Some(Value::String(choice)) => match choice.as_str() {
            "none" => ToolChoice::None,
            "auto" => ToolChoice::Auto,
            "required" => ToolChoice::Required,
            _ => {
                let message = format!("`tool_choice` must be {wanted}.");
                return Err(ApiError::field("tool_choice", message));
            }
        },
        Some(Value::Object(choice)) => named(&Fields(choice), offered)?,
        Some(other) => return Err(wrong("tool_choice", wanted, other)),
    };
    if choice == ToolChoice::Required && offered.is_empty() {
        return Err(no_tools());
    }
    Ok(choice)
}

fn no_tools() -> ApiError {
    let message = "`tool_choice` demands a call, but `tools` offers none; send the tools.";
    ApiError::field("tool_choice", message)
}

fn named(choice: &Fields<'_>, offered: &[Tool]) -> Result<ToolChoice, ApiError> {
    let in_choice = |error| under("tool_choice", error);
    if choice.text("type").map_err(in_choice)? != Some("function") {
        let message = "`tool_choice.type` must be \"function\".";
        return Err(ApiError::field("tool_choice.type", message));
    }
    choice.required("function").map_err(in_choice)?;
    let none = Map::new();
    let function = choice.object("function").map_err(in_choice)?;
    let function = Fields(function.unwrap_or(&none));
    let in_function = |error| in_choice(under("function", error));
    function.required("name").map_err(in_function)?;
    let name = function.text("name").map_err(in_function)?.unwrap_or("");
    if offered.is_empty() {
        return Err(no_tools());
    }
    let place = offered.iter().position(|tool| tool.name == name);
    place.map(ToolChoice::Named).ok_or_else(|| {
        let shown: String = name.chars().take(64).collect();
        let message = format!("`tool_choice` names `{shown}`, which `tools` does not offer.");
        ApiError::field("tool_choice.function.name", message)
    })
}
