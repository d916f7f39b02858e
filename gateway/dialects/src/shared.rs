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

    /// Whether both are the same, down to the order of keys, in which templates print them. Of
    /// turns of one conversation, the address usually says so.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.json() == other.json()
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

#[cfg(test)]
mod tests {
    //! Catches two prompts that are taken for one although a template prints them in two ways.
    use super::Shared;
    use serde_json::json;

    #[test]
    fn the_order_of_keys_counts() {
        let [one, other] = [json!({"a": 1, "b": 2}), json!({"b": 2, "a": 1})];
        assert_eq!(one, other);
        let [one, other] = [one, other].map(Shared::from);
        assert_ne!(one, other);
        assert_eq!(one, one.clone());
        assert_eq!(one, Shared::from(json!({"a": 1, "b": 2})));
    }

    #[test]
    fn an_edit_is_ones_own() {
        let mut one = Shared::from(json!([1]));
        let other = one.clone();
        assert_eq!(one.json(), "[1]");
        one.edit(|value| value[0] = json!(2));
        assert_eq!((one.json(), other.json()), ("[2]", "[1]"));
        one.edit(|value| value[0] = json!(3));
        assert_eq!(one.json(), "[3]");
    }
}
