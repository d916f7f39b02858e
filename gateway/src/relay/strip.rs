//! How do tokens that the client did not ask for leave an answer, and nothing else with them?
//!
//! `token_ids` is cut out of each choice's own bytes, its comma with it; all other bytes stay as
//! the node wrote them.

use std::ops::Range;

use serde::Deserialize;
use serde_json::value::RawValue;

const KEY: &str = "\"token_ids\"";

#[derive(Deserialize)]
struct Answer<'a> {
    #[serde(borrow, default)]
    choices: Vec<Choice<'a>>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow)]
    token_ids: Option<&'a RawValue>,
}

/// The JSON without its choices' `token_ids`; none if it has none.
pub(super) fn without_token_ids(json: &[u8]) -> Option<Vec<u8>> {
    let text = std::str::from_utf8(json).ok()?;
    let answer: Answer<'_> = serde_json::from_str(text).ok()?;
    let mut out = Vec::with_capacity(json.len());
    let mut from = 0;
    for choice in answer.choices {
        let Some(value) = choice.token_ids else {
            continue;
        };
        // A raw value is a part of the text that it was read from.
        let begin = value.get().as_ptr() as usize - text.as_ptr() as usize;
        let cut = member(text, begin..begin + value.get().len())?;
        out.extend_from_slice(&json[from..cut.start]);
        from = cut.end;
    }
    if from == 0 {
        return None;
    }
    out.extend_from_slice(&json[from..]);
    Some(out)
}

/// The range of a member of an object from the range of its value: key, colon, and one comma.
fn member(text: &str, value: Range<usize>) -> Option<Range<usize>> {
    let before = text[..value.start].trim_end().strip_suffix(':')?;
    let before = before.trim_end().strip_suffix(KEY)?;
    let trimmed = before.trim_end();
    if let Some(comma) = trimmed.strip_suffix(',') {
        return Some(comma.len()..value.end);
    }
    let behind = &text[value.end..];
    let rest = behind.trim_start();
    let end = match rest.strip_prefix(',') {
        Some(rest) => text.len() - rest.len(),
        None => value.end,
    };
    Some(before.len()..end)
}

#[cfg(test)]
mod tests {
    //! Catches an answer that is no JSON any more, or lost more than its tokens.
    use super::*;

    #[test]
    fn only_the_tokens_go() {
        for (json, expected) in [
            (
                r#"{"choices":[{"index":0,"delta":{"content":"a"},"token_ids":[1,2]}]}"#,
                Some(r#"{"choices":[{"index":0,"delta":{"content":"a"}}]}"#),
            ),
            (
                r#"{"choices":[{"token_ids" : [1] , "text":"\"token_ids\":[1]"}],"x":1.50}"#,
                Some(r#"{"choices":[{ "text":"\"token_ids\":[1]"}],"x":1.50}"#),
            ),
            (
                r#"{"choices":[{"a":1, "token_ids":[],"b":{"token_ids":[3]}},{"token_ids":[4]}]}"#,
                Some(r#"{"choices":[{"a":1,"b":{"token_ids":[3]}},{}]}"#),
            ),
            (
                r#"{"choices":[{"token_ids":null,"index":0}],"token_ids":[1]}"#,
                None,
            ),
            (r#"{"choices":[{"text":"token_ids"}]}"#, None),
            ("not JSON", None),
        ] {
            let found = without_token_ids(json.as_bytes());
            let found = found.map(|json| String::from_utf8(json).expect("UTF-8"));
            assert_eq!(found.as_deref(), expected, "{json}");
        }
    }
}
