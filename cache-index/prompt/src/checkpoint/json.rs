//! How are values taken from JSON that anybody may have written? By key and type, `null` as if the key
//! were not there; an error names file, key, and what was found.

use serde_json::{Map, Value as Json};

use super::CheckpointError;

/// An object of a file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Object<'a> {
    file: &'static str,
    /// Of the keys around it, each with a dot behind.
    path: &'a str,
    map: &'a Map<String, Json>,
}

/// Parses a file whose top is an object.
pub(super) fn parse(file: &'static str, text: &str) -> Result<Map<String, Json>, CheckpointError> {
    match serde_json::from_str(text) {
        Ok(Json::Object(map)) => Ok(map),
        Ok(other) => Err(CheckpointError::damaged(
            file,
            format!("is {}, not an object", shown(&other)),
        )),
        Err(error) => Err(CheckpointError::damaged(
            file,
            format!("is not JSON: {error}"),
        )),
    }
}

impl<'a> Object<'a> {
    pub(super) fn new(file: &'static str, map: &'a Map<String, Json>) -> Self {
        Self {
            file,
            path: "",
            map,
        }
    }

    /// An object within, of the same file.
    pub(super) fn within(self, path: &'a str, map: &'a Map<String, Json>) -> Self {
        Self { path, map, ..self }
    }

    pub(super) fn get(&self, key: &str) -> Option<&'a Json> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Whether the key is there, be it with `null`.
    pub(super) fn says(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    pub(super) fn object(
        &self,
        key: &str,
    ) -> Result<Option<&'a Map<String, Json>>, CheckpointError> {
        self.of(key, "an object", Json::as_object)
    }

    pub(super) fn str(&self, key: &str) -> Result<Option<&'a str>, CheckpointError> {
        self.of(key, "a string", Json::as_str)
    }

    pub(super) fn bool(&self, key: &str) -> Result<Option<bool>, CheckpointError> {
        self.of(key, "true or false", Json::as_bool)
    }

    /// A count from 1 to `most`.
    pub(super) fn size(&self, key: &str, most: u64) -> Result<Option<u64>, CheckpointError> {
        let allowed = format!("a whole number from 1 to {most}");
        self.of(key, &allowed, |value| {
            value.as_u64().filter(|size| (1..=most).contains(size))
        })
    }

    /// The same where there must be one.
    pub(super) fn demand_size(&self, key: &str, most: u64) -> Result<u64, CheckpointError> {
        let missing = || self.error(key, "missing", format!("a whole number from 1 to {most}"));
        self.size(key, most)?.ok_or_else(missing)
    }

    pub(super) fn positive(&self, key: &str) -> Result<Option<f64>, CheckpointError> {
        self.of(key, "a positive number", |value| {
            // What is finite here and not in f32 would become infinite on its way.
            let number = value.as_f64()?;
            (number > 0.0 && number < f64::from(f32::MAX)).then_some(number)
        })
    }

    pub(super) fn demand_positive(&self, key: &str) -> Result<f64, CheckpointError> {
        let missing = || self.error(key, "missing", "a positive number");
        self.positive(key)?.ok_or_else(missing)
    }

    /// A token's id, or several.
    pub(super) fn ids(&self, key: &str) -> Result<Vec<u64>, CheckpointError> {
        let ids = self.of(key, "a token id or a list of such", |value| match value {
            Json::Array(ids) => ids.iter().map(Json::as_u64).collect(),
            one => Some(vec![one.as_u64()?]),
        })?;
        Ok(ids.unwrap_or_default())
    }

    pub(super) fn error(
        &self,
        key: &str,
        found: impl Into<String>,
        allowed: impl Into<String>,
    ) -> CheckpointError {
        let key = format!("{}{key}", self.path);
        CheckpointError::value(self.file, key, found, allowed)
    }

    /// The same about a value that is there.
    pub(super) fn wrong(&self, key: &str, allowed: impl Into<String>) -> CheckpointError {
        let found = self.get(key).map_or_else(|| "missing".to_owned(), shown);
        self.error(key, found, allowed)
    }

    fn of<T>(
        &self,
        key: &str,
        allowed: &str,
        take: impl FnOnce(&'a Json) -> Option<T>,
    ) -> Result<Option<T>, CheckpointError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let taken = take(value);
        taken.map(Some).ok_or_else(|| self.wrong(key, allowed))
    }
}

/// A value for a message: its beginning, if it is long.
pub(super) fn shown(value: &Json) -> String {
    /// Characters of a value in a message.
    const SHOWN_MAX: usize = 200;
    let text = match value {
        // Printing a large one whole would take a copy of it.
        Json::Array(items) if items.len() > SHOWN_MAX => "a long list".to_owned(),
        Json::Object(items) if items.len() > SHOWN_MAX => "a large object".to_owned(),
        other => other.to_string(),
    };
    match text.char_indices().nth(SHOWN_MAX) {
        None => text,
        Some((at, _)) => format!("{}…", &text[..at]),
    }
}
