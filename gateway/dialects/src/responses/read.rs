//! Has a value the type that the API says, and where in the request is it?
//!
//! Values are read through [`Object`], which knows its place ([`Path`]): a refusal names it as the
//! API does (`input[0].content[1].type`). A place is spelled out only when something is refused.

use std::fmt;

use serde_json::{Map, Value};

use super::refuse;
use crate::error::ApiError;
use crate::fields::Fields;

/// A place in a request.
#[derive(Clone, Copy)]
pub(super) enum Path<'p> {
    /// The request itself.
    Root,
    /// A member of an object.
    Key(&'p Path<'p>, &'p str),
    /// An item of a list.
    At(&'p Path<'p>, usize),
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Root => Ok(()),
            Self::Key(Self::Root, name) => f.write_str(name),
            Self::Key(parent, name) => write!(f, "{parent}.{name}"),
            Self::At(parent, at) => write!(f, "{parent}[{at}]"),
        }
    }
}

/// A JSON object at its place.
#[derive(Clone, Copy)]
pub(super) struct Object<'v, 'p> {
    pub(super) members: &'v Map<String, Value>,
    pub(super) path: &'p Path<'p>,
}

impl<'v, 'p> Object<'v, 'p> {
    /// A value that must be an object.
    pub(super) fn of(value: &'v Value, path: &'p Path<'p>) -> Result<Self, ApiError> {
        match value {
            Value::Object(members) => Ok(Self { members, path }),
            other => Err(refuse::wrong_type(path, "an object", other)),
        }
    }

    /// A member; null counts as absent.
    pub(super) fn get(&self, name: &str) -> Option<&'v Value> {
        self.members.get(name).filter(|value| !value.is_null())
    }

    /// A string.
    pub(super) fn text(&self, name: &str) -> Result<Option<&'v str>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(name, "a string", other)),
        }
    }

    /// A string that must be there.
    pub(super) fn needed_text(&self, name: &str) -> Result<&'v str, ApiError> {
        self.text(name)?.ok_or_else(|| self.missing(name))
    }

    /// A string out of a list.
    pub(super) fn word(&self, name: &str, known: &[&str]) -> Result<Option<&'v str>, ApiError> {
        match self.text(name)? {
            Some(word) if !known.contains(&word) => Err(refuse::unknown_value(
                &Path::Key(self.path, name),
                word,
                known,
            )),
            word => Ok(word),
        }
    }

    /// A boolean.
    pub(super) fn flag(&self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => Err(self.wrong(name, "a boolean", other)),
        }
    }

    /// An integer of `least` to `most`.
    pub(super) fn integer(
        &self,
        name: &str,
        (least, most): (i64, i64),
    ) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        // A whole number written with a point counts, as in the API.
        let whole = value.as_f64().filter(|number| number.fract() == 0.0);
        let number = match (value.as_i64(), whole) {
            (Some(number), _) => number,
            #[expect(
                clippy::cast_possible_truncation,
                reason = "saturates, and is refused then"
            )]
            (None, Some(number)) => number as i64,
            (None, None) => return Err(self.wrong(name, "an integer", value)),
        };
        let path = Path::Key(self.path, name);
        match number {
            number if number < least => Err(refuse::below(&path, "integer", least, value)),
            number if number > most => Err(refuse::above(&path, "integer", most, value)),
            number => Ok(Some(number)),
        }
    }

    /// A number of `least` to `most`.
    pub(super) fn number(
        &self,
        name: &str,
        (least, most): (f64, f64),
    ) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let Some(number) = value.as_f64() else {
            return Err(self.wrong(name, "a decimal", value));
        };
        let path = Path::Key(self.path, name);
        match number {
            number if number < least => Err(refuse::below(&path, "decimal", least, value)),
            number if number > most => Err(refuse::above(&path, "decimal", most, value)),
            number => Ok(Some(number)),
        }
    }

    /// A list.
    pub(super) fn list(&self, name: &str) -> Result<Option<&'v Vec<Value>>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(other) => Err(self.wrong(name, "an array", other)),
        }
    }

    /// An object.
    pub(super) fn object(&self, name: &str) -> Result<Option<&'v Map<String, Value>>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Object(members)) => Ok(Some(members)),
            Some(other) => Err(self.wrong(name, "an object", other)),
        }
    }

    /// A member of another type than the API has.
    pub(super) fn wrong(&self, name: &str, expected: &str, value: &Value) -> ApiError {
        refuse::wrong_type(&Path::Key(self.path, name), expected, value)
    }

    /// A member that must be there.
    pub(super) fn missing(&self, name: &str) -> ApiError {
        refuse::missing(&Path::Key(self.path, name))
    }
}

/// The named fields of a request, parsed. JSON that the first scan let through (lone surrogates,
/// deep nesting) is refused here.
pub(super) fn parsed(fields: &Fields<'_>, names: &[&str]) -> Result<Map<String, Value>, ApiError> {
    let mut parsed = Map::with_capacity(names.len());
    for name in names {
        if let Some(raw) = fields.get(name) {
            let value = serde_json::from_str(raw.get()).map_err(|error| {
                ApiError::invalid(*name, format!("'{name}' cannot be read: {error}."))
            })?;
            parsed.insert((*name).to_owned(), value);
        }
    }
    Ok(parsed)
}
