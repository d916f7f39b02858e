//! Is this field of the body what it claims to be?
//!
//! The body is read as a JSON value, not derived into a struct: a wrong type is then answered with
//! the field's name, what was found and what would do. `null` counts as absent, as OpenAI has it.

use serde_json::{Map, Value};

use crate::error::{ApiError, Kind};

/// The body's top-level fields.
pub(super) struct Fields<'a>(pub(super) &'a Map<String, Value>);

impl<'a> Fields<'a> {
    pub(super) fn get(&self, name: &str) -> Option<&'a Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    pub(super) fn required(&self, name: &str) -> Result<&'a Value, ApiError> {
        self.get(name).ok_or_else(|| missing(name))
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        let text = |value: &'a Value| value.as_str().ok_or_else(|| wrong(name, "a string", value));
        self.get(name).map(text).transpose()
    }

    pub(super) fn flag(&self, name: &str) -> Result<Option<bool>, ApiError> {
        let flag = |value: &Value| {
            value
                .as_bool()
                .ok_or_else(|| wrong(name, "a boolean", value))
        };
        self.get(name).map(flag).transpose()
    }

    pub(super) fn list(&self, name: &str) -> Result<Option<&'a Vec<Value>>, ApiError> {
        let list = |value: &'a Value| {
            value
                .as_array()
                .ok_or_else(|| wrong(name, "an array", value))
        };
        self.get(name).map(list).transpose()
    }

    pub(super) fn object(&self, name: &str) -> Result<Option<&'a Map<String, Value>>, ApiError> {
        let object = |value: &'a Value| {
            value
                .as_object()
                .ok_or_else(|| wrong(name, "an object", value))
        };
        self.get(name).map(object).transpose()
    }

    pub(super) fn number(&self, name: &str, range: (f64, f64)) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let number = value
            .as_f64()
            .ok_or_else(|| wrong(name, "a number", value))?;
        if (range.0..=range.1).contains(&number) {
            return Ok(Some(number));
        }
        let (low, high) = range;
        Err(ApiError::field(
            name,
            format!("`{name}` is {number}; it must be {low} to {high}."),
        ))
    }

    pub(super) fn integer(&self, name: &str, least: i64) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let integer = value.as_i64().or_else(|| {
            // Past i64 only the size matters, and every bound above is smaller.
            value.as_u64().map(|_| i64::MAX)
        });
        let integer = integer.ok_or_else(|| wrong(name, "an integer", value))?;
        if integer < least {
            let message = format!("`{name}` is {integer}; it must be at least {least}.");
            return Err(ApiError::field(name, message));
        }
        Ok(Some(integer))
    }

    /// A small number of things, within bounds.
    pub(super) fn count(
        &self,
        name: &str,
        (least, most): (usize, usize),
    ) -> Result<Option<usize>, ApiError> {
        let Some(count) = self.integer(name, i64::try_from(least).unwrap_or(i64::MAX))? else {
            return Ok(None);
        };
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        if count > most {
            let message = format!("`{name}` is {count}; it must be {least} to {most}.");
            return Err(ApiError::field(name, message));
        }
        Ok(Some(count))
    }

    /// An array of token ids below `vocab`.
    pub(super) fn tokens(&self, name: &str, vocab: usize) -> Result<Option<Vec<u32>>, ApiError> {
        let Some(values) = self.list(name)? else {
            return Ok(None);
        };
        token_ids(name, values, vocab).map(Some)
    }
}

/// Token ids below `vocab`, from an array.
pub(super) fn token_ids(name: &str, values: &[Value], vocab: usize) -> Result<Vec<u32>, ApiError> {
    let token = |(index, value): (usize, &Value)| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.filter(|id| (*id as usize) < vocab).ok_or_else(|| {
            let param = format!("{name}[{index}]");
            let expected = format!("a token id below {vocab}");
            wrong(&param, &expected, value)
        })
    };
    values.iter().enumerate().map(token).collect()
}

/// A required field is absent.
pub(super) fn missing(name: &str) -> ApiError {
    let message = format!("`{name}` is missing; the request needs it.");
    ApiError::new(Kind::Invalid, "missing_required_parameter", message).with_param(name)
}

/// A field has the wrong type.
pub(super) fn wrong(name: &str, expected: &str, found: &Value) -> ApiError {
    let found = match found {
        Value::Null => "null".to_owned(),
        Value::Bool(value) => format!("the boolean {value}"),
        Value::Number(value) => format!("the number {value}"),
        Value::String(_) => "a string".to_owned(),
        Value::Array(_) => "an array".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    };
    let message = format!("`{name}` must be {expected}; it is {found}.");
    ApiError::new(Kind::Invalid, "invalid_type", message).with_param(name)
}

/// An error of a field within the object `outer`.
pub(super) fn under(outer: &str, error: ApiError) -> ApiError {
    let inner = error.param.clone().unwrap_or_default();
    let param = format!("{outer}.{inner}");
    let message = error
        .message
        .replacen(&format!("`{inner}`"), &format!("`{param}`"), 1);
    ApiError { message, ..error }.with_param(param)
}
