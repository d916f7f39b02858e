//! A part of a prompt, shared by the turns that have it.
//!
//! A conversation's messages and tools come again with every turn. They are read once (`known`) and
//! shared from then on: a clone costs a count, and two turns can tell by the address that they have
//! the same message. It reads like the JSON value that it holds.

use std::borrow::Borrow;
use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use serde::{Serialize, Serializer};
use serde_json::Value;

/// A message, or tools, as the chat template takes them.
#[derive(Clone)]
pub struct Shared(Arc<Inner>);

struct Inner {
    value: Value,
    /// Its text, once somebody asked.
    json: OnceLock<Box<str>>,
}

impl Shared {
    /// Its JSON text, made once.
    pub fn json(&self) -> &str {
        // Values always serialise.
        let make = || {
            serde_json::to_string(&self.0.value)
                .unwrap_or_default()
                .into()
        };
        self.0.json.get_or_init(make)
    }

    /// The value, to be changed: other holders keep theirs as it is.
    pub fn edit<T>(&mut self, edit: impl FnOnce(&mut Value) -> T) -> T {
        if let Some(inner) = Arc::get_mut(&mut self.0) {
            inner.json = OnceLock::new();
            return edit(&mut inner.value);
        }
        let mut value = self.0.value.clone();
        let result = edit(&mut value);
        *self = value.into();
        result
    }

    /// Whether both are the same; of turns of one conversation, the address usually says so.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.0.value == other.0.value
    }
}

impl From<Value> for Shared {
    fn from(value: Value) -> Self {
        Self(Arc::new(Inner {
            value,
            json: OnceLock::new(),
        }))
    }
}

impl Deref for Shared {
    type Target = Value;

    fn deref(&self) -> &Value {
        &self.0.value
    }
}

impl Borrow<Value> for Shared {
    fn borrow(&self) -> &Value {
        self
    }
}

impl PartialEq for Shared {
    fn eq(&self, other: &Self) -> bool {
        self.is(other)
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.value.fmt(f)
    }
}

impl Serialize for Shared {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.value.serialize(serializer)
    }
}

impl PartialEq<Value> for Shared {
    fn eq(&self, other: &Value) -> bool {
        self.0.value == *other
    }
}

impl From<Shared> for Value {
    fn from(shared: Shared) -> Self {
        match Arc::try_unwrap(shared.0) {
            Ok(inner) => inner.value,
            Err(shared) => shared.value.clone(),
        }
    }
}
