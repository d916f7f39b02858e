//! Where does each element of a JSON array begin and end?
//!
//! The array was scanned before, as part of the body, so it is known to be JSON: to find the ends
//! of its elements takes no more than passing over strings and counting brackets. That is several
//! times faster than another scan that checks.

use serde_json::Value;

/// The elements of an array that is known to be JSON, each as its own text; none if it is none.
pub(crate) fn elements(array: &str) -> Option<Vec<&str>> {
    let bytes = array.as_bytes();
    if bytes.first() != Some(&b'[') {
        return None;
    }
    let mut found = Vec::new();
    let mut at = 1;
    loop {
        while bytes.get(at)?.is_ascii_whitespace() || bytes[at] == b',' {
            at += 1;
        }
        if bytes[at] == b']' {
            return Some(found);
        }
        let end = end_of_value(bytes, at)?;
        found.push(&array[at..end]);
        at = end;
    }
}

/// The text of elements that follow each other in an array.
pub(crate) fn span<'a>(array: &'a str, run: &[&str]) -> Option<&'a str> {
    let (first, last) = (run.first()?, run.last()?);
    let place = |part: &str| part.as_ptr().addr().checked_sub(array.as_ptr().addr());
    array.get(place(first)?..place(last)? + last.len())
}

/// The values of elements that follow each other in an array. They are read as an array again, so
/// that they may be as deep as there.
pub(crate) fn values(array: &str, run: &[&str]) -> Option<Vec<Value>> {
    serde_json::from_str(&["[", span(array, run)?, "]"].concat()).ok()
}

/// Behind the value that begins at `at`.
fn end_of_value(bytes: &[u8], mut at: usize) -> Option<usize> {
    let mut depth = 0_usize;
    loop {
        match *bytes.get(at)? {
            b'"' => at = end_of_string(bytes, at + 1)?,
            b'{' | b'[' => {
                depth += 1;
                at += 1;
                continue;
            }
            b'}' | b']' => {
                depth = depth.checked_sub(1)?;
                at += 1;
            }
            b',' | b':' | b' ' | b'\n' | b'\r' | b'\t' => {
                at += 1;
                continue;
            }
            // A number or a word.
            _ => {
                let ends = |byte: &u8| b",]} \n\r\t".contains(byte);
                at += bytes[at..].iter().position(ends)?;
            }
        }
        if depth == 0 {
            return Some(at);
        }
    }
}

/// Behind the string whose text begins at `at`.
fn end_of_string(bytes: &[u8], mut at: usize) -> Option<usize> {
    loop {
        at += memchr::memchr2(b'"', b'\\', bytes.get(at..)?)?;
        if bytes[at] == b'"' {
            return Some(at + 1);
        }
        at += 2;
    }
}

#[cfg(test)]
mod tests {
    //! Catches an element that is cut elsewhere than a JSON parser does.
    use super::elements;
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};
    use serde_json::value::RawValue;

    /// A random JSON text, spelled with blanks here and there.
    fn any(random: &mut StdRng, depth: usize) -> String {
        let blank = [" ", "", "\n\t", ""][random.random_range(0..4)];
        let kinds = if depth == 0 { 6 } else { 8 };
        let value = match random.random_range(0..kinds) {
            0 => "null".to_owned(),
            1 => "-1.5e+3".to_owned(),
            2 => "true".to_owned(),
            3 => r#""a\"]},[{:\\""#.to_owned(),
            4 => r#""\\\"\u005d é""#.to_owned(),
            5 => "\"\"".to_owned(),
            6 => array(random, depth - 1),
            _ => {
                let members = (0..random.random_range(0..3))
                    .map(|at| format!("\"k]{at}\"{blank}:{}", any(random, depth - 1)));
                format!("{{{}{blank}}}", members.collect::<Vec<_>>().join(","))
            }
        };
        format!("{blank}{value}{blank}")
    }

    fn array(random: &mut StdRng, depth: usize) -> String {
        let items = (0..random.random_range(0..5)).map(|_| any(random, depth));
        format!("[{}]", items.collect::<Vec<_>>().join(","))
    }

    #[test]
    fn elements_are_those_of_a_parser() {
        let mut random = StdRng::seed_from_u64(1);
        for _ in 0..5000 {
            let text = array(&mut random, 4);
            let parsed: Vec<&RawValue> = serde_json::from_str(&text).expect("JSON");
            let parsed: Vec<&str> = parsed.into_iter().map(RawValue::get).collect();
            assert_eq!(elements(&text), Some(parsed), "{text}");
        }
        for other in ["{}", "1", "\"[]\"", "null"] {
            assert_eq!(elements(other), None, "{other}");
        }
    }
}
