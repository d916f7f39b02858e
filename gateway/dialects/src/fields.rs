//! How is a body read without being rewritten?
//!
//! A JSON object is split into its top-level fields, each still the client's own bytes. The few
//! fields acted on are parsed; [`Fields::rebuild`] puts the object together again with some fields
//! removed and some set, so that unknown fields travel on byte for byte and a 64 KB body costs one
//! scan and one copy. A key that appears twice is refused: overwriting one `cache_salt` and
//! forwarding the other would open another tenant's cache.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::error::{ApiError, ErrorKind};

/// The top-level fields of a request body, in the client's order.
pub struct Fields<'a> {
    entries: Vec<(Cow<'a, str>, &'a RawValue)>,
    bytes: usize,
}

impl<'a> Fields<'a> {
    /// Splits a body; the error says where it stops being a JSON object in UTF-8.
    pub fn parse(body: &'a [u8]) -> Result<Self, ApiError> {
        let text = std::str::from_utf8(body).map_err(|error| {
            ApiError::new(
                ErrorKind::InvalidJson,
                format!(
                    "The request body is not valid UTF-8: byte {} starts no character. Send JSON encoded as UTF-8.",
                    error.valid_up_to()
                ),
            )
        })?;
        let Object(entries) = serde_json::from_str(text).map_err(|error| {
            ApiError::new(
                ErrorKind::InvalidJson,
                format!("The request body is not a valid JSON object: {error}."),
            )
        })?;
        let fields = Self {
            entries,
            bytes: body.len(),
        };
        fields.refuse_repeated()?;
        Ok(fields)
    }

    fn refuse_repeated(&self) -> Result<(), ApiError> {
        let mut keys: Vec<&str> = self.entries.iter().map(|(key, _)| key.as_ref()).collect();
        keys.sort_unstable();
        match keys.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(ApiError::invalid(
                pair[0],
                format!("The field '{}' appears twice; send it once.", pair[0]),
            )),
            None => Ok(()),
        }
    }

    /// The raw value of a field; null counts as absent.
    pub fn get(&self, name: &str) -> Option<&'a RawValue> {
        let (_, value) = self.entries.iter().find(|(key, _)| key == name)?;
        (value.get() != "null").then_some(*value)
    }

    /// The object again, without the fields that `dropped` names, and with `set` (name, JSON) at
    /// its end.
    pub fn rebuild(&self, dropped: impl Fn(&str) -> bool, set: &[(&str, &str)]) -> Vec<u8> {
        let added: usize = set
            .iter()
            .map(|(name, json)| name.len() + json.len() + 4)
            .sum();
        let mut out = Vec::with_capacity(self.bytes + added + 2);
        let kept = |key: &str| !dropped(key) && !set.iter().any(|(name, _)| *name == key);
        out.push(b'{');
        for (key, value) in self.entries.iter().filter(|(key, _)| kept(key)) {
            push_field(&mut out, key, value.get());
        }
        for (name, json) in set {
            push_field(&mut out, name, json);
        }
        out.push(b'}');
        out
    }
}

fn push_field(out: &mut Vec<u8>, key: &str, json: &str) {
    if out.len() > 1 {
        out.push(b',');
    }
    // Keys may hold characters that need escapes; writing into a Vec cannot fail.
    let _ = serde_json::to_writer(&mut *out, key);
    out.push(b':');
    out.extend_from_slice(json.as_bytes());
}

struct Object<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'de> Deserialize<'de> for Object<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Object<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = Vec::with_capacity(16);
                while let Some(Key(key)) = map.next_key()? {
                    entries.push((key, map.next_value()?));
                }
                Ok(Object(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// A key, borrowed unless it holds escapes (serde's own `Cow` always copies).
struct Key<'a>(Cow<'a, str>);

impl<'de> Deserialize<'de> for Key<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl<'de> Visitor<'de> for Text {
            type Value = Key<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a field name")
            }

            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(Key(Cow::Borrowed(text)))
            }

            fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Key(Cow::Owned(text.to_owned())))
            }
        }
        deserializer.deserialize_str(Text)
    }
}

#[cfg(test)]
mod tests {
    //! Catches a forwarded body that differs from the client's in a field nobody asked to change,
    //! and a forged field that survives because of its spelling.
    use super::*;

    fn rebuilt(body: &str) -> String {
        let fields = Fields::parse(body.as_bytes()).expect("a valid body");
        let out = fields.rebuild(
            |key| key.starts_with("bootstrap_"),
            &[("cache_salt", "\"ours\"")],
        );
        String::from_utf8(out).expect("UTF-8")
    }

    #[test]
    fn unknown_fields_survive_and_forged_ones_do_not() {
        for (body, expected) in [
            ("{}", r#"{"cache_salt":"ours"}"#),
            (
                r#"{"model":"m","x":[1.50,{"a": null}],"y":1e400}"#,
                r#"{"model":"m","x":[1.50,{"a": null}],"y":1e400,"cache_salt":"ours"}"#,
            ),
            (
                r#"{"cache_salt":"theirs","a":1}"#,
                r#"{"a":1,"cache_salt":"ours"}"#,
            ),
            (
                r#"{"cache\u005fsalt":"theirs"}"#,
                r#"{"cache_salt":"ours"}"#,
            ),
            (
                r#"{"bootstrap_host":"h","a\"b":"\ud83e\udd80"}"#,
                r#"{"a\"b":"\ud83e\udd80","cache_salt":"ours"}"#,
            ),
        ] {
            assert_eq!(rebuilt(body), expected, "{body}");
        }
    }

    #[test]
    fn refusals_say_where() {
        for (body, part) in [
            (&b"{\"a\":1,}"[..], "line 1 column 8"),
            (b"[1]", "expected a JSON object"),
            (b"", "EOF while parsing"),
            (b"{\"a\":\"\xff\"}", "byte 6"),
            (b"{\"a\":1}x", "trailing characters at line 1 column 8"),
            (b"{\"a\":1,\"\\u0061\":2}", "'a' appears twice"),
        ] {
            let error = Fields::parse(body).err().expect("a refusal");
            assert_eq!(error.kind.status(), 400);
            assert!(
                error.message.contains(part),
                "{} does not contain {part}",
                error.message
            );
        }
    }
}
