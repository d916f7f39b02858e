//! Which events does a stream of bytes hold?
//!
//! Bytes arrive with borders anywhere, inside a character or between CR and LF, so the reader keeps
//! an unfinished line and decodes only whole ones. It follows the event-stream standard where
//! servers differ: any of LF, CRLF and CR end a line, the space after the colon is optional, several
//! `data` lines are one event. Only `data` is kept; no server that we measure uses the rest.

/// An event longer than this is no token of a language model: the stream counts as broken.
const EVENT_BYTES_MAX: usize = 8 << 20;

/// Turns pieces of a body into the data of its events.
#[derive(Default)]
pub struct Events {
    line: Vec<u8>,
    data: Vec<u8>,
    has_data: bool,
    after_cr: bool,
}

/// What the stream held that no event stream may.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SseError {
    /// The data of an event is not UTF-8.
    #[error("an event is not UTF-8")]
    NotUtf8,
    /// An event never ended.
    #[error("an event is longer than {EVENT_BYTES_MAX} bytes")]
    TooLong,
}

impl Events {
    /// Takes the next piece; gives the data of each event that ended in it.
    pub fn push(&mut self, piece: &[u8]) -> Result<Vec<String>, SseError> {
        let mut events = Vec::new();
        for &byte in piece {
            let lf_of_crlf = std::mem::take(&mut self.after_cr) && byte == b'\n';
            match byte {
                _ if lf_of_crlf => {}
                b'\n' | b'\r' => {
                    self.after_cr = byte == b'\r';
                    self.end_line(&mut events)?;
                }
                _ => self.line.push(byte),
            }
            if self.line.len() + self.data.len() > EVENT_BYTES_MAX {
                return Err(SseError::TooLong);
            }
        }
        Ok(events)
    }

    fn end_line(&mut self, events: &mut Vec<String>) -> Result<(), SseError> {
        if self.line.is_empty() {
            if std::mem::take(&mut self.has_data) {
                let data = std::mem::take(&mut self.data);
                events.push(String::from_utf8(data).map_err(|_| SseError::NotUtf8)?);
            }
        } else if let Some(value) = self.line.strip_prefix(b"data:") {
            if self.has_data {
                self.data.push(b'\n');
            }
            self.data
                .extend_from_slice(value.strip_prefix(b" ").unwrap_or(value));
            self.has_data = true;
        }
        self.line.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pieces: impl Iterator<Item = Vec<u8>>) -> Vec<String> {
        let mut events = Events::default();
        pieces
            .flat_map(|piece| events.push(&piece).expect("a valid stream"))
            .collect()
    }

    /// Catches dependence on where the network cut the bytes, and on the server's line ends.
    #[test]
    fn any_cut_gives_the_same_events() {
        let check = |stream: &str, expected: &[&str]| {
            let bytes = stream.as_bytes();
            for size in 1..=bytes.len() {
                let found = read(bytes.chunks(size).map(<[u8]>::to_vec));
                assert_eq!(found, expected, "{stream:?} in pieces of {size}");
            }
        };
        check("data: one\n\ndata:two\n\n", &["one", "two"]);
        check(
            "data: 你好🦀\r\n\r\ndata: [DONE]\r\n\r\n",
            &["你好🦀", "[DONE]"],
        );
        check("event: x\ndata: a\ndata: b\nid: 7\n\n", &["a\nb"]);
        check(": comment\n\n\n\ndata: a\r\rdata:  b\n\n", &["a", " b"]);
        check("data: unfinished\n", &[]);
        check("data\n\ndata:\n\n", &[""]);
    }

    /// Catches a stream of other bytes being taken for text.
    #[test]
    fn broken_text_is_an_error() {
        assert_eq!(
            Events::default().push(b"data: \xff\n\n"),
            Err(SseError::NotUtf8)
        );
    }
}
