//! What serde_json thinks of the beginnings of JSON texts.

use serde::de::IgnoredAny;

/// JSON text, with control characters in strings as their escapes.
#[derive(Default)]
pub(super) struct Json {
    pub(super) text: String,
}

impl Json {
    /// Adds a character: whether the value is whole now, or `None` if it cannot stand here.
    pub(super) fn add(&mut self, c: char) -> Option<bool> {
        let (in_string, in_escape) = ending(&self.text);
        let hex = unfinished_hex(&self.text);
        let before = self.text.clone();
        if c < ' ' && in_string && !in_escape && !hex {
            let quoted = serde_json::Value::from(c.to_string()).to_string();
            let escape = match c {
                '\u{8}' => "\\u0008",
                '\u{c}' => "\\u000c",
                _ => &quoted[1..quoted.len() - 1],
            };
            self.text += escape;
        } else {
            self.text.push(c);
        }
        match serde_json::from_str::<IgnoredAny>(&self.text) {
            Ok(_) => Some(true),
            Err(_) if may_go_on(&self.text) => Some(false),
            Err(_) => {
                self.text = before;
                None
            }
        }
    }
}

/// Whether the text begins a JSON value. Of a number that lacks digits serde_json does not say so.
pub(crate) fn may_go_on(text: &str) -> bool {
    [text.to_owned(), format!("{text}0")].iter().any(|text| {
        let read = serde_json::from_str::<IgnoredAny>(text);
        read.is_ok() || read.is_err_and(|error| error.is_eof())
    })
}

/// Whether the text ends within `\uXXXX`.
pub(super) fn unfinished_hex(text: &str) -> bool {
    (2..6).any(|length| {
        let start = text.len().checked_sub(length);
        let Some((head, tail)) = start.and_then(|start| text.split_at_checked(start)) else {
            return false;
        };
        let slashes = head.chars().rev().take_while(|c| *c == '\\').count();
        tail.starts_with("\\u") && slashes % 2 == 0
    })
}

/// Each character, and whether it stands inside a string (the closing quote included).
pub(super) fn states(text: &str) -> Vec<(char, bool)> {
    let inside = |at: usize| ending(&text[..at]).0;
    text.char_indices().map(|(at, c)| (c, inside(at))).collect()
}

/// Whether the text ends inside a string, and there behind a backslash.
pub(super) fn ending(text: &str) -> (bool, bool) {
    let step = |(inside, escaped), c| match (inside, escaped, c) {
        (false, _, '"') => (true, false),
        (true, false, '"') => (false, false),
        (true, false, '\\') => (true, true),
        (inside, ..) => (inside, false),
    };
    text.chars().fold((false, false), step)
}

/// What an escape stands for, the place of its last character, and what follows it.
pub(super) fn escaped(text: &str, at: usize) -> Result<(char, usize, usize), usize> {
    let rest = &text[at..];
    let unit = |from: usize| -> Result<u32, usize> {
        for offset in 0..4 {
            match text[from..].chars().nth(offset) {
                Some(c) if c.is_ascii_hexdigit() => {}
                _ => return Err(from + offset),
            }
        }
        Ok(u32::from_str_radix(&text[from..from + 4], 16).expect("four digits"))
    };
    if !rest.starts_with("\\u") {
        let end = at + rest.chars().take(2).map(char::len_utf8).sum::<usize>();
        let decoded = serde_json::from_str::<String>(&format!("\"{}\"", &text[at..end]));
        let c = decoded.ok().and_then(|text| text.chars().next());
        return c.map(|c| (c, at + 1, end)).ok_or(at + 1);
    }
    let first = unit(at + 2)?;
    if (0xd800..0xdc00).contains(&first) {
        for (offset, expected) in ['\\', 'u'].into_iter().enumerate() {
            if !text[at + 6 + offset..].starts_with(expected) {
                return Err(at + 6 + offset);
            }
        }
        let second = unit(at + 8)?;
        let pair = [first, second].map(|unit| u16::try_from(unit).expect("16 bits"));
        let c = char::decode_utf16(pair).next().and_then(Result::ok);
        return c.map(|c| (c, at + 11, at + 12)).ok_or(at + 11);
    }
    let c = char::from_u32(first).ok_or(at + 5)?;
    Ok((c, at + 5, at + 6))
}
