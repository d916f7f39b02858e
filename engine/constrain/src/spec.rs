//! What may a client ask an answer to look like?

use answer::{CallForm, ReasoningFormat};
use serde_json::Value;

/// The form that an answer must have.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Spec {
    /// Any JSON object.
    JsonObject,
    /// JSON that this schema accepts.
    JsonSchema(Value),
    /// Text that this regular expression matches from end to end.
    Regex(String),
    /// Text of this grammar, in Lark's syntax.
    Lark(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// Calls of tools.
    Calls(Calls),
    /// Calls of tools, or text of another form.
    CallsOr(Calls, Box<Spec>),
}

impl Spec {
    /// Whether a schema in it nests deeper than `most`. Walks without recursion: it comes before
    /// everything that recurses.
    pub(crate) fn is_deeper_than(&self, most: usize) -> bool {
        let mut open: Vec<(&Value, usize)> = Vec::new();
        match self {
            Self::JsonSchema(schema) => open.push((schema, 0)),
            Self::Calls(calls) => open.extend(calls.tools.iter().map(|t| (&t.parameters, 0))),
            Self::CallsOr(calls, other) => {
                if other.is_deeper_than(most) {
                    return true;
                }
                open.extend(calls.tools.iter().map(|tool| (&tool.parameters, 0)));
            }
            Self::JsonObject | Self::Regex(_) | Self::Lark(_) | Self::Choice(_) => {}
        }
        while let Some((value, depth)) = open.pop() {
            if depth > most {
                return true;
            }
            match value {
                Value::Array(values) => open.extend(values.iter().map(|v| (v, depth + 1))),
                Value::Object(map) => open.extend(map.values().map(|v| (v, depth + 1))),
                _ => {}
            }
        }
        false
    }

    /// Whether the client wrote rules of its own, which may recur without a bracket.
    pub(crate) fn has_own_rules(&self) -> bool {
        match self {
            Self::Lark(_) => true,
            Self::CallsOr(_, other) => other.has_own_rules(),
            Self::JsonObject
            | Self::JsonSchema(_)
            | Self::Regex(_)
            | Self::Choice(_)
            | Self::Calls(_) => false,
        }
    }
}

/// Calls of tools, and nothing else.
#[derive(Clone, Debug)]
pub struct Calls {
    /// How the model's family writes a call.
    pub form: CallForm,
    /// The tools that may be called; one of them when the client named it.
    pub tools: Vec<Tool>,
    /// How many calls there may be.
    pub most: CallCount,
}

/// A tool that may be called.
#[derive(Clone, Debug)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// The JSON schema of its arguments.
    pub parameters: Value,
}

/// How many calls an answer may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CallCount {
    /// Exactly one.
    One,
    /// One or more, up to a bound.
    AtLeastOne,
}

/// A block of reasoning that may come before the constrained part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Reasoning {
    /// How the model's family writes it.
    pub format: ReasoningFormat,
    /// Whether the prompt's end has already opened it.
    pub opened: bool,
}
