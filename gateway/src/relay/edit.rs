//! How does an answer name the model as its client did?
//!
//! The node answers with the model's id. Where the client asked by an alias, the value of the
//! answer's own `model` is replaced by the client's name; all other bytes stay as the node wrote
//! them, the word `model` in a text too.

use serde::Deserialize;
use serde_json::value::RawValue;

#[derive(Deserialize)]
struct Answer<'a> {
    #[serde(borrow)]
    model: Option<&'a RawValue>,
}

/// The JSON object with this name (JSON too) for its model; none if it names none.
pub(super) fn with_model(json: &[u8], name: &str) -> Option<Vec<u8>> {
    let text = std::str::from_utf8(json).ok()?;
    let answer: Answer<'_> = serde_json::from_str(text).ok()?;
    let value = answer.model?.get();
    // A raw value is a part of the text that it was read from.
    let begin = value.as_ptr() as usize - text.as_ptr() as usize;
    let (before, behind) = (&json[..begin], &json[begin + value.len()..]);
    Some([before, name.as_bytes(), behind].concat())
}

#[cfg(test)]
mod tests {
    //! Catches a name changed in a text or a part of the answer, and bytes lost beside it.
    use super::*;

    #[test]
    fn only_the_answers_own_model_changes() {
        for (json, expected) in [
            (
                r#"{"id":"x", "model" : "m","x":1.50}"#,
                Some(r#"{"id":"x", "model" : "a\"b","x":1.50}"#),
            ),
            (
                r#"{"choices":[{"delta":{"content":"\"model\":\"m\""},"model":"m"}],"mod\u0065l":"m"}"#,
                Some(
                    r#"{"choices":[{"delta":{"content":"\"model\":\"m\""},"model":"m"}],"mod\u0065l":"a\"b"}"#,
                ),
            ),
            (r#"{"choices":[{"model":"m"}]}"#, None),
            (r#"{"model":null}"#, None),
            (r#"["model"]"#, None),
            ("not JSON", None),
        ] {
            let found = with_model(json.as_bytes(), r#""a\"b""#);
            let found = found.map(|json| String::from_utf8(json).expect("UTF-8"));
            assert_eq!(found.as_deref(), expected, "{json}");
        }
    }
}
