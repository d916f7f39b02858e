//! What does a URL say behind its `?`, and how is a part of a path read?
//!
//! Parameters in the client's order, escapes undone; of one that is given twice the first counts.

use std::borrow::Cow;

use percent_encoding::percent_decode_str;

/// The parameters of a request.
#[derive(Debug, Default)]
pub(crate) struct Query(Vec<(String, String)>);

impl Query {
    /// Reads the text behind the `?`.
    pub(crate) fn parse(text: &str) -> Self {
        let pair = |pair: &str| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let plain = |part: &str| unescaped(&part.replace('+', " ")).into_owned();
            (plain(name), plain(value))
        };
        Self(
            text.split('&')
                .filter(|pair| !pair.is_empty())
                .map(pair)
                .collect(),
        )
    }

    /// The value of a parameter.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        let (_, value) = self.0.iter().find(|(found, _)| found == name)?;
        Some(value)
    }
}

/// A part of a path as its writer meant it.
pub(crate) fn unescaped(part: &str) -> Cow<'_, str> {
    percent_decode_str(part).decode_utf8_lossy()
}

#[cfg(test)]
mod tests {
    //! Catches a cursor or a limit that is read otherwise than it was written.
    use super::*;

    #[test]
    fn values_are_read_as_they_were_written() {
        for (text, expected) in [
            ("a=1", Some("1")),
            ("b=2&a=x%2Fy+z&a=3", Some("x/y z")),
            ("%61=%3D&b", Some("=")),
            ("a", Some("")),
            ("a=%zz%ff", Some("%zz\u{fffd}")),
            ("", None),
            ("&&b=a", None),
        ] {
            assert_eq!(Query::parse(text).get("a"), expected, "{text}");
        }
    }
}
