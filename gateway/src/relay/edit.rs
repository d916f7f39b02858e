//! How does an answer in the node's own words say what only the gateway knows?
//!
//! The node answers with the model's id: where the client asked by an alias, the value of the
//! answer's own `model` is replaced by the client's name. Where it asked how the answer came about,
//! that becomes one more member. All other bytes stay as the node wrote them, the word `model` in a
//! text too.

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
    // Lists of fields are objects to serde, and no answers.
    text.trim_start().strip_prefix('{')?;
    let answer: Answer<'_> = serde_json::from_str(text).ok()?;
    let value = answer.model?.get();
    // A raw value is a part of the text that it was read from.
    let begin = value.as_ptr() as usize - text.as_ptr() as usize;
    let (before, behind) = (&json[..begin], &json[begin + value.len()..]);
    Some([before, name.as_bytes(), behind].concat())
}

/// The JSON object with one more member (whose value is JSON too) at its end; none if it is no
/// object.
pub(super) fn with_member(json: &[u8], name: &str, value: &str) -> Option<Vec<u8>> {
    let body = json.trim_ascii_end().strip_suffix(b"}")?;
    let is_empty = body
        .trim_ascii()
        .strip_prefix(b"{")?
        .trim_ascii()
        .is_empty();
    let comma = if is_empty { "" } else { "," };
    let member = format!("{comma}\"{name}\":{value}");
    Some([body, member.as_bytes(), &json[body.len()..]].concat())
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

    #[test]
    fn a_member_is_added_at_the_end() {
        for (json, expected) in [
            (
                r#"{"a":{"b":1}}"#,
                Some(r#"{"a":{"b":1},"homing":{"x":1}}"#),
            ),
            (
                "{\"a\":1 }\r\n",
                Some("{\"a\":1 ,\"homing\":{\"x\":1}}\r\n"),
            ),
            (" { } ", Some(" { \"homing\":{\"x\":1}} ")),
            ("[1]", None),
            ("", None),
        ] {
            let found = with_member(json.as_bytes(), "homing", r#"{"x":1}"#);
            let found = found.map(|json| String::from_utf8(json).expect("UTF-8"));
            assert_eq!(found.as_deref(), expected, "{json}");
        }
    }
}
