//! What of an answer may the client see already?
//!
//! Tokens are bytes, and a character may be spread over several of them; a stop string may begin
//! in one token and end in another. So text is held back in two places: bytes that do not make a
//! whole character yet, and text that could still turn out to be the start of a stop string. The
//! result does not depend on how the bytes were cut: the stop string that is complete first wins,
//! and of those complete at the same byte the longest.

/// Turns an answer's token bytes into text, up to a stop string.
#[derive(Debug, Default)]
pub struct TextStream {
    stops: Vec<String>,
    /// The start of a character whose rest has not come.
    partial: Vec<u8>,
    /// Text that may be the start of a stop string.
    held: String,
}

/// What a push made visible.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Visible {
    /// The new text.
    pub text: String,
    /// The stop string that is complete: the text ends before it, and nothing may follow.
    pub stopped: Option<String>,
}

impl TextStream {
    /// A stream that ends before the first of these strings; none of them is empty.
    pub fn new(stops: Vec<String>) -> Self {
        assert!(
            stops.iter().all(|stop| !stop.is_empty()),
            "a stop string has text"
        );
        Self {
            stops,
            partial: Vec::new(),
            held: String::new(),
        }
    }

    /// Adds a token's bytes.
    pub fn push(&mut self, bytes: &[u8]) -> Visible {
        self.partial.extend_from_slice(bytes);
        self.decode();
        if let Some((start, stop)) = self.stop_start() {
            self.held.truncate(start);
            return Visible {
                text: std::mem::take(&mut self.held),
                stopped: Some(stop),
            };
        }
        let keep = self.stop_prefix();
        let rest = self.held.split_off(self.held.len() - keep);
        Visible {
            text: std::mem::replace(&mut self.held, rest),
            stopped: None,
        }
    }

    /// Adds a token's bytes while nothing may end the answer yet (`min_tokens`): a stop string in it
    /// is text. What could be the start of one that ends later is held back as ever.
    pub fn push_unstoppable(&mut self, bytes: &[u8]) -> String {
        self.partial.extend_from_slice(bytes);
        self.decode();
        let keep = self.stop_prefix();
        let rest = self.held.split_off(self.held.len() - keep);
        std::mem::replace(&mut self.held, rest)
    }

    /// The answer ended: what was held back is text after all.
    pub fn finish(&mut self) -> String {
        self.held.push_str(&String::from_utf8_lossy(&self.partial));
        self.partial.clear();
        std::mem::take(&mut self.held)
    }

    /// Moves whole characters from `partial` to `held`. Bytes that no continuation could make
    /// valid become U+FFFD, as in any lossy decoding.
    fn decode(&mut self) {
        loop {
            let error = match std::str::from_utf8(&self.partial) {
                Ok(text) => {
                    self.held.push_str(text);
                    return self.partial.clear();
                }
                Err(error) => error,
            };
            let (valid, rest) = self.partial.split_at(error.valid_up_to());
            self.held.push_str(&String::from_utf8_lossy(valid));
            let Some(invalid) = error.error_len() else {
                self.partial = rest.to_vec();
                return;
            };
            self.held.push(char::REPLACEMENT_CHARACTER);
            self.partial = rest[invalid..].to_vec();
        }
    }

    /// Where the first complete stop string begins, and which it is.
    fn stop_start(&self) -> Option<(usize, String)> {
        let found = self.stops.iter().filter_map(|stop| {
            let start = self.held.find(stop.as_str())?;
            Some((start + stop.len(), start, stop))
        });
        found.min().map(|(_end, start, stop)| (start, stop.clone()))
    }

    /// Length of the longest tail of `held` that begins some stop string.
    fn stop_prefix(&self) -> usize {
        let longest = |stop: &String| {
            let begins = |length: &usize| {
                stop.is_char_boundary(*length) && self.held.ends_with(&stop[..*length])
            };
            (1..stop.len()).rev().find(begins).unwrap_or(0)
        };
        self.stops.iter().map(longest).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    //! Catches a broken character, a stop string missed at a token border or shown in part, and a
    //! result that depends on how the bytes were cut.
    use super::*;

    /// Feeds bytes in pieces and returns all visible text and whether it stopped.
    fn feed<'a>(stops: &[&str], pieces: impl Iterator<Item = &'a [u8]>) -> (String, bool) {
        let mut stream = TextStream::new(stops.iter().map(ToString::to_string).collect());
        let mut text = String::new();
        for piece in pieces {
            let visible = stream.push(piece);
            text += &visible.text;
            if visible.stopped.is_some() {
                return (text, true);
            }
        }
        text += &stream.finish();
        (text, false)
    }

    #[test]
    fn every_cut_gives_the_same_text() {
        let rows: [(&[&str], &[u8], &str, bool); 14] = [
            (&[], "plain".as_bytes(), "plain", false),
            (&[], "你好🦀!".as_bytes(), "你好🦀!", false),
            (&["STOP"], b"before STOP after", "before ", true),
            (&["STOP"], b"STO and ST and S", "STO and ST and S", false),
            (&["aab"], b"aaab", "a", true),
            (&["abc", "b"], b"xabc", "xa", true),
            (&["bc", "abc"], b"xabc", "x", true),
            (&["\n\n"], b"one\ntwo\n\nthree", "one\ntwo", true),
            (&["🦀"], "a🦁🦀b".as_bytes(), "a🦁", true),
            (&["é"], "caf\u{e8}\u{e9}".as_bytes(), "caf\u{e8}", true),
            (&["x"], b"x", "", true),
            (&[], b"a\xffb\xe4\xbd", "a\u{fffd}b\u{fffd}", false),
            (&[], b"\xf0\x9fA", "\u{fffd}A", false),
            (&["A"], b"\xf0\x9f\xa6A", "\u{fffd}", true),
        ];
        for (stops, bytes, text, stopped) in rows {
            let expected = (text.to_string(), stopped);
            for size in 1..=bytes.len() {
                assert_eq!(
                    feed(stops, bytes.chunks(size)),
                    expected,
                    "{bytes:?} by {size}"
                );
            }
            for cut in 0..=bytes.len() {
                let (head, tail) = bytes.split_at(cut);
                assert_eq!(
                    feed(stops, [head, tail].into_iter()),
                    expected,
                    "{bytes:?} at {cut}"
                );
            }
        }
    }

    #[test]
    fn nothing_stops_before_its_time() {
        let mut stream = TextStream::new(vec!["end".into()]);
        let rows = [
            ("an end, ", "an end, "),
            ("the e", "the "),
            ("nd e", "end "),
        ];
        for (pushed, text) in rows {
            assert_eq!(stream.push_unstoppable(pushed.as_bytes()), text, "{pushed}");
        }
        let visible = stream.push(b"nd");
        assert_eq!(
            (visible.text.as_str(), visible.stopped.as_deref()),
            ("", Some("end"))
        );
    }

    #[test]
    fn text_is_not_held_longer_than_needed() {
        let mut stream = TextStream::new(vec!["<end>".into()]);
        let rows = [
            ("a<", "a"),
            ("e", ""),
            ("x", "<ex"),
            ("<end", ""),
            ("<end", "<end"),
        ];
        for (pushed, text) in rows {
            let visible = stream.push(pushed.as_bytes());
            assert_eq!(
                visible,
                Visible {
                    text: text.into(),
                    stopped: None
                },
                "{pushed}"
            );
        }
        assert_eq!(
            stream.push(b">rest"),
            Visible {
                text: String::new(),
                stopped: Some("<end>".into())
            }
        );
    }
}
