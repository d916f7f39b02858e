//! How does a template print JSON? As Hugging Face's `tojson` does: Python's `json.dumps` with
//! `ensure_ascii=False`, keys in the order received, a blank behind commas and colons. The engine
//! of the template would escape `<` and `>` for HTML, which models have never seen.

use std::fmt::Write;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};
use serde_json::Value as Json;

use crate::marks::Marks;

/// Deepest nesting; the request's own JSON is at most 128 deep.
const DEPTH_MAX: usize = 200;

/// The `tojson` filter.
pub(crate) fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent = match options.get::<Option<Value>>("indent")? {
        Some(indent) if !indent.is_none() => Some(usize::try_from(indent)?.min(16)),
        _ => None,
    };
    let separators = options.get::<Option<Vec<String>>>("separators")?;
    let (comma, colon) = match separators.as_deref() {
        Some([comma, colon]) => (comma.clone(), colon.clone()),
        Some(_) => return Err(invalid("tojson: separators are two strings")),
        None => (
            if indent.is_some() { "," } else { ", " }.to_owned(),
            ": ".to_owned(),
        ),
    };
    let mut writer = Writer {
        out: String::new(),
        indent,
        comma,
        colon,
        ascii: options
            .get::<Option<bool>>("ensure_ascii")?
            .unwrap_or(false),
        sorted: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    writer.value(value, 0)?;
    Ok(writer.out)
}

/// Appends a request's value as `tojson` spells it without options. Straight from the request: a
/// conversation's tools are tens of kilobytes in every turn, and as the template's values they
/// would take ten times as long.
pub(crate) fn spell(json: &Json, marks: &Marks, out: &mut String) -> Result<(), Error> {
    let mut writer = Writer {
        out: std::mem::take(out),
        indent: None,
        comma: ", ".to_owned(),
        colon: ": ".to_owned(),
        ascii: false,
        sorted: false,
    };
    let done = writer.json(json, marks, 0);
    *out = writer.out;
    done
}

struct Writer {
    out: String,
    indent: Option<usize>,
    comma: String,
    colon: String,
    ascii: bool,
    sorted: bool,
}

impl Writer {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEPTH_MAX {
            return Err(invalid("tojson: nested too deep"));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self
                .out
                .push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => {
                let _ = write!(self.out, "{value}");
            }
            ValueKind::Number => self.out.push_str(&float(f64::try_from(value.clone())?)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?;
                self.sequence(items, depth)?;
            }
            ValueKind::Map => self.map(value, depth)?,
            other => return Err(invalid(&format!("tojson: {other} is not JSON"))),
        }
        Ok(())
    }

    /// The same from a request, its strings escaped.
    fn json(&mut self, json: &Json, marks: &Marks, depth: usize) -> Result<(), Error> {
        if depth > DEPTH_MAX {
            return Err(invalid("tojson: nested too deep"));
        }
        match json {
            Json::Null => self.out.push_str("null"),
            Json::Bool(true) => self.out.push_str("true"),
            Json::Bool(false) => self.out.push_str("false"),
            Json::Number(number) => match (number.as_u64(), number.as_i64()) {
                (Some(number), _) => _ = write!(self.out, "{number}"),
                (None, Some(number)) => _ = write!(self.out, "{number}"),
                (None, None) => self
                    .out
                    .push_str(&float(number.as_f64().unwrap_or(f64::NAN))),
            },
            Json::String(text) => self.string(&marks.escape(text)),
            Json::Array(items) => {
                self.out.push('[');
                for (at, item) in items.iter().enumerate() {
                    self.between(at == 0, depth);
                    self.json(item, marks, depth + 1)?;
                }
                self.close(items.is_empty(), depth, ']');
            }
            Json::Object(fields) => {
                self.out.push('{');
                for (at, (name, field)) in fields.iter().enumerate() {
                    self.between(at == 0, depth);
                    self.string(&marks.escape(name));
                    self.out.push_str(&self.colon);
                    self.json(field, marks, depth + 1)?;
                }
                self.close(fields.is_empty(), depth, '}');
            }
        }
        Ok(())
    }

    fn sequence(&mut self, items: impl Iterator<Item = Value>, depth: usize) -> Result<(), Error> {
        self.out.push('[');
        let mut is_empty = true;
        for item in items {
            self.between(is_empty, depth);
            is_empty = false;
            self.value(&item, depth + 1)?;
        }
        self.close(is_empty, depth, ']');
        Ok(())
    }

    fn map(&mut self, map: &Value, depth: usize) -> Result<(), Error> {
        let mut keys: Vec<Value> = map.try_iter()?.collect();
        if self.sorted {
            keys.sort();
        }
        self.out.push('{');
        for (at, key) in keys.iter().enumerate() {
            self.between(at == 0, depth);
            match key.kind() {
                ValueKind::String => self.string(key.as_str().unwrap_or_default()),
                ValueKind::Number | ValueKind::Bool | ValueKind::None => {
                    self.out.push('"');
                    self.value(key, depth + 1)?;
                    self.out.push('"');
                }
                other => return Err(invalid(&format!("tojson: {other} as a key"))),
            }
            self.out.push_str(&self.colon);
            self.value(&map.get_item(key)?, depth + 1)?;
        }
        self.close(keys.is_empty(), depth, '}');
        Ok(())
    }

    /// What stands before an item.
    fn between(&mut self, is_first: bool, depth: usize) {
        if !is_first {
            self.out.push_str(&self.comma);
        }
        self.line(depth + 1);
    }

    fn close(&mut self, is_empty: bool, depth: usize, bracket: char) {
        if !is_empty {
            self.line(depth);
        }
        self.out.push(bracket);
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        let mut rest = text;
        loop {
            let (plain, special) = rest.split_at(self.plain_bytes(rest));
            self.out.push_str(plain);
            let mut chars = special.chars();
            let Some(c) = chars.next() else {
                break;
            };
            rest = chars.as_str();
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c => self.escaped(c),
            }
        }
        self.out.push('"');
    }

    /// How much of the beginning of a text is printed as it is.
    fn plain_bytes(&self, text: &str) -> usize {
        /// So many bytes are looked at at once.
        const STRIDE: usize = 32;
        let ascii = self.ascii;
        // Every byte of a character beyond ASCII is above 0x7f, so the first one that is found
        // begins a character.
        let is_special =
            |byte: &u8| *byte < b' ' || matches!(byte, b'"' | b'\\') || (ascii && *byte >= 0x7f);
        let bytes = text.as_bytes();
        let holds_one = |stride: &[u8]| stride.iter().fold(false, |so, byte| so | is_special(byte));
        let whole = bytes.chunks(STRIDE).take_while(|stride| !holds_one(stride));
        let begin = (whole.count() * STRIDE).min(bytes.len());
        let found = bytes[begin..].iter().position(is_special);
        found.map_or(bytes.len(), |at| begin + at)
    }

    fn escaped(&mut self, c: char) {
        // Python's ensure_ascii leaves DEL as it is.
        if c == '\u{7f}' {
            return self.out.push(c);
        }
        for unit in c.encode_utf16(&mut [0; 2]) {
            let _ = write!(self.out, "\\u{unit:04x}");
        }
    }
}

/// A float as Python's `repr` writes it: shortest digits, exponent below 1e-4 and from 1e16.
fn float(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else {
        return scientific;
    };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = value.to_string();
        return if plain.contains('.') {
            plain
        } else {
            format!("{plain}.0")
        };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

fn invalid(why: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, why.to_owned())
}

#[cfg(test)]
mod tests {
    //! Catches: JSON in prompts that differs from what the model was trained on.
    use super::*;

    /// Catches a request's value that is spelled otherwise than the template would.
    #[test]
    fn a_request_is_spelled_as_the_template_spells_it() {
        let marks = Marks::default();
        let no_options = || Kwargs::from_iter(std::iter::empty::<(&str, Value)>());
        let long = "a line of text that is longer than a stride, é 👋 \"quoted\"\n".repeat(9);
        let texts = [
            r#"{"b": [1, -2, 2.5, 1e20, 18446744073709551615, null, true, {}], "a\n": [[]]}"#,
            &serde_json::json!([long, "\u{f0001}\u{f0fff}", "\u{7f}\u{1}", ""]).to_string(),
        ];
        for text in texts {
            let json: Json = serde_json::from_str(text).unwrap();
            let mut spelled = "before ".to_owned();
            spell(&json, &marks, &mut spelled).unwrap();
            let value = crate::messages::value(&marks, &json);
            let expected = tojson(&value, no_options()).unwrap();
            assert_eq!(spelled, format!("before {expected}"));
        }
        let deep = (0..=DEPTH_MAX).fold(Json::Null, |inner, _| Json::from(vec![inner]));
        assert!(spell(&deep, &marks, &mut String::new()).is_err());
    }

    #[test]
    fn prints_as_json_dumps() {
        let check = |json: &str, options: &[(&str, Value)], expected: &str| {
            let marks = crate::marks::Marks::default();
            let value = crate::messages::value(&marks, &serde_json::from_str(json).unwrap());
            let options = options
                .iter()
                .map(|(k, v)| (*k, v.clone()))
                .collect::<Kwargs>();
            assert_eq!(tojson(&value, options).unwrap(), expected, "{json}");
        };
        // Expected values: json.dumps(json.loads(s), ensure_ascii=False, …) in Python 3.
        check(
            r#"{"b": [1, 2.5, null, true], "a": "<x> é 👋\u0001\n\"\\"}"#,
            &[],
            r#"{"b": [1, 2.5, null, true], "a": "<x> é 👋\u0001\n\"\\"}"#,
        );
        check(
            r#"[1e-5, 0.0001, 1e16, 1e15, 1.0, -0.0, 123456789012345678]"#,
            &[],
            "[1e-05, 0.0001, 1e+16, 1000000000000000.0, 1.0, -0.0, 123456789012345678]",
        );
        check(
            r#"{"a": {}, "b": [], "c": [1, {"d": 2}]}"#,
            &[("indent", Value::from(2))],
            "{\n  \"a\": {},\n  \"b\": [],\n  \"c\": [\n    1,\n    {\n      \"d\": 2\n    }\n  ]\n}",
        );
        check(
            r#"{"b": 1, "a": "é👋"}"#,
            &[
                ("sort_keys", Value::from(true)),
                ("ensure_ascii", Value::from(true)),
            ],
            r#"{"a": "\u00e9\ud83d\udc4b", "b": 1}"#,
        );
        check(
            r#"{"b": [1, 2]}"#,
            &[("separators", Value::from_iter([",", ":"]))],
            r#"{"b":[1,2]}"#,
        );
    }
}
