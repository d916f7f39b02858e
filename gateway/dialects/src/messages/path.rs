//! Where in a request is something, and what does the API say about it there?
//!
//! Anthropic's errors begin with the place: `messages.0.content.1.tool_use.id: Field required`. A
//! place is a chain of steps on the stack, spelled out only when something is refused. The wording
//! follows the API's own, which clients and people search for.

use std::fmt;

use serde_json::{Map, Value};

use crate::error::{ApiError, ErrorKind};

/// A place in a request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Path<'a> {
    before: Option<&'a Path<'a>>,
    step: Step<'a>,
}

#[derive(Debug, Clone, Copy)]
enum Step<'a> {
    Name(&'a str),
    At(usize),
}

impl<'a> Path<'a> {
    /// A field of the request.
    pub(super) const fn root(name: &'a str) -> Self {
        Self {
            before: None,
            step: Step::Name(name),
        }
    }

    /// A member of what is here.
    pub(super) fn name(&'a self, name: &'a str) -> Self {
        Self {
            before: Some(self),
            step: Step::Name(name),
        }
    }

    /// An item of the list that is here.
    pub(super) fn at(&'a self, at: usize) -> Self {
        Self {
            before: Some(self),
            step: Step::At(at),
        }
    }

    /// A refusal of what is here.
    pub(super) fn refuse(&self, what: impl fmt::Display) -> ApiError {
        ApiError::invalid(self.to_string(), format!("{self}: {what}"))
    }

    /// A refusal because nothing is here.
    pub(super) fn required(&self) -> ApiError {
        let path = self.to_string();
        let message = format!("{path}: Field required");
        ApiError::param(ErrorKind::MissingParameter, path, message)
    }

    /// A refusal because something of another type is here.
    pub(super) fn should_be(&self, what: &str) -> ApiError {
        self.refuse(format_args!("Input should be {what}"))
    }

    /// A refusal of a `type`.
    pub(super) fn unknown_tag(&self, tag: &str, known: &[&str]) -> ApiError {
        let known: Vec<String> = known.iter().map(|known| format!("'{known}'")).collect();
        self.refuse(format_args!(
            "Input tag '{}' found using 'type' does not match any of the expected tags: {}",
            clipped(tag),
            known.join(", ")
        ))
    }
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(before) = self.before {
            write!(f, "{before}.")?;
        }
        match self.step {
            Step::Name(name) => f.write_str(name),
            Step::At(at) => write!(f, "{at}"),
        }
    }
}

/// The start of a client's string, short enough for an error message.
pub(super) fn clipped(text: &str) -> &str {
    const CHARS_MAX: usize = 64;
    match text.char_indices().nth(CHARS_MAX) {
        Some((end, _)) => &text[..end],
        None => text,
    }
}

/// An object at its place; its members are taken out one by one, and null counts as absent.
#[derive(Debug)]
pub(super) struct Object<'p> {
    /// Where it is.
    pub(super) path: Path<'p>,
    map: Map<String, Value>,
}

impl<'p> Object<'p> {
    /// What is at a place, if it is an object.
    pub(super) fn new(value: Value, path: Path<'p>) -> Result<Self, ApiError> {
        match value {
            Value::Object(map) => Ok(Self { path, map }),
            _ => Err(path.should_be("a valid dictionary")),
        }
    }

    /// The same object at another place: a tagged one is named by its tag.
    pub(super) fn at<'q>(self, path: Path<'q>) -> Object<'q> {
        Object {
            path,
            map: self.map,
        }
    }

    /// A member.
    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        // Blocks have few members: comparing their names costs less than hashing one.
        let (_, value) = self.map.iter_mut().find(|(known, _)| *known == name)?;
        let value = value.take();
        (!value.is_null()).then_some(value)
    }

    /// A string.
    pub(super) fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.path.name(name).should_be("a valid string")),
        }
    }

    /// A string that must be there.
    pub(super) fn required_text(&mut self, name: &str) -> Result<String, ApiError> {
        let text = self.text(name)?;
        text.ok_or_else(|| self.path.name(name).required())
    }

    /// A boolean.
    pub(super) fn flag(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(_) => Err(self.path.name(name).should_be("a valid boolean")),
        }
    }

    /// An object.
    pub(super) fn object<'q>(&'q mut self, name: &'q str) -> Result<Option<Object<'q>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(value) => Object::new(value, self.path.name(name)).map(Some),
        }
    }
}
