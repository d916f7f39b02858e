//! Where does an event of a stream end, and does it matter to the bill?
//!
//! Chunks come in with arbitrary borders; events go out whole, each with its own bytes, so that
//! what is relayed is what the node wrote. A line ends with LF or CRLF, an event with an empty
//! line; `data:` may or may not be followed by a space; `[DONE]` ends a stream only as the whole
//! data of an event, never inside JSON text. Events that are complete in one chunk are slices of
//! it; only a torn one is copied.
//!
//! Left out: lines that end with a lone CR (no engine writes them).

use std::borrow::Cow;
use std::ops::Range;

use bytes::{Buf, Bytes, BytesMut};

use super::chunk::{ChunkFacts, facts};

/// Largest event; a node that sends more has lost its mind or its framing.
const EVENT_BYTES_MAX: usize = 8 << 20;

/// One event with its own bytes, the empty line that ends it included.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Event {
    /// As the node wrote it.
    pub(crate) bytes: Bytes,
    /// What it means.
    pub(crate) kind: EventKind,
}

/// What an event means to the gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EventKind {
    /// No data: a comment, a keep-alive.
    Comment,
    /// The end of the stream.
    Done,
    /// A chunk of the answer.
    Chunk(ChunkFacts),
    /// Data that is not a chunk; relayed as it is.
    Opaque,
}

/// The event is larger than any bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an event of the stream is larger than {EVENT_BYTES_MAX} bytes")]
pub(crate) struct TooLong;

/// Splits a stream into events.
#[derive(Debug, Default)]
pub(crate) struct Scanner {
    /// The start of an event whose end has not come.
    pending: BytesMut,
}

impl Scanner {
    /// Takes a chunk and appends the events that are complete now.
    pub(crate) fn push(&mut self, chunk: Bytes, events: &mut Vec<Event>) -> Result<(), TooLong> {
        let mut rest = chunk;
        if !self.pending.is_empty() {
            // The last two bytes may be part of the empty line.
            let from = self.pending.len().saturating_sub(2);
            self.pending.extend_from_slice(&rest);
            let Some(end) = event_end(&self.pending, from) else {
                return self.bounded();
            };
            let event = self.pending.split_to(end).freeze();
            rest.advance(rest.len() - self.pending.len());
            self.pending.clear();
            events.push(Event::new(event));
        }
        while let Some(end) = event_end(&rest, 0) {
            events.push(Event::new(rest.split_to(end)));
        }
        self.pending.extend_from_slice(&rest);
        self.bounded()
    }

    /// The stream ended in an orderly way: what is pending is an event without its empty line.
    pub(crate) fn finish(&mut self) -> Option<Event> {
        if self.pending.is_empty() {
            return None;
        }
        let mut last = std::mem::take(&mut self.pending);
        let missing: &[u8] = if last.ends_with(b"\n") {
            b"\n"
        } else {
            b"\n\n"
        };
        last.extend_from_slice(missing);
        Some(Event::new(last.freeze()))
    }

    fn bounded(&self) -> Result<(), TooLong> {
        if self.pending.len() > EVENT_BYTES_MAX {
            Err(TooLong)
        } else {
            Ok(())
        }
    }
}

impl Event {
    /// Where its data is, if that is one line, as all engines write it.
    pub(crate) fn data(&self) -> Option<Range<usize>> {
        let mut lines = self.bytes.split(|byte| *byte == b'\n').filter_map(data_of);
        match (lines.next(), lines.next()) {
            (Some(data), None) => {
                let begin = data.as_ptr() as usize - self.bytes.as_ptr() as usize;
                Some(begin..begin + data.len())
            }
            _ => None,
        }
    }

    /// Its data, joined from several lines if need be.
    pub(crate) fn json(&self) -> Cow<'_, [u8]> {
        match self.data() {
            Some(range) => Cow::Borrowed(&self.bytes[range]),
            None => {
                let lines = self.bytes.split(|byte| *byte == b'\n').filter_map(data_of);
                Cow::Owned(lines.collect::<Vec<_>>().join(&b'\n'))
            }
        }
    }

    /// Puts other data in the place of its own; around data of one line, all else stays as it is.
    pub(crate) fn edit(&mut self, edit: impl FnOnce(&[u8]) -> Option<Vec<u8>>) {
        let Some(edited) = edit(&self.json()) else {
            return;
        };
        self.bytes = match self.data() {
            Some(Range { start, end }) => [&self.bytes[..start], &edited, &self.bytes[end..]]
                .concat()
                .into(),
            None => {
                // Data of several lines: a newline within it stays the end of one.
                let lines = edited.split(|byte| *byte == b'\n');
                let mut bytes = BytesMut::new();
                for line in lines {
                    bytes.extend_from_slice(b"data: ");
                    bytes.extend_from_slice(line);
                    bytes.extend_from_slice(b"\n");
                }
                bytes.extend_from_slice(b"\n");
                bytes.freeze()
            }
        };
    }

    fn new(bytes: Bytes) -> Self {
        let kind = kind(&bytes);
        Self { bytes, kind }
    }
}

/// The end of the first event: just past the first empty line. `from` is where the search may
/// start; the line before it has no end in `bytes[..from]` that could matter.
fn event_end(bytes: &[u8], from: usize) -> Option<usize> {
    // An empty line at the very start is an (empty) event of its own.
    if from == 0 {
        match bytes {
            [b'\n', ..] => return Some(1),
            [b'\r', b'\n', ..] => return Some(2),
            _ => {}
        }
    }
    let mut at = from;
    while let Some(step) = memchr::memchr(b'\n', bytes.get(at..)?) {
        at += step + 1;
        match bytes.get(at..)? {
            [b'\n', ..] => return Some(at + 1),
            [b'\r', b'\n', ..] => return Some(at + 2),
            _ => {}
        }
    }
    None
}

fn kind(event: &[u8]) -> EventKind {
    let mut data = event.split(|byte| *byte == b'\n').filter_map(data_of);
    let Some(first) = data.next() else {
        return EventKind::Comment;
    };
    let joined = match data.next() {
        None => None,
        Some(second) => {
            let mut joined = [first, second].join(&b'\n');
            for line in data {
                joined.push(b'\n');
                joined.extend_from_slice(line);
            }
            Some(joined)
        }
    };
    let data = joined.as_deref().unwrap_or(first);
    if data.trim_ascii() == b"[DONE]" {
        return EventKind::Done;
    }
    facts(data).map_or(EventKind::Opaque, EventKind::Chunk)
}

/// The value of a `data` line, without the one optional space and the CR.
fn data_of(line: &[u8]) -> Option<&[u8]> {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let value = line.strip_prefix(b"data")?.strip_prefix(b":")?;
    Some(value.strip_prefix(b" ").unwrap_or(value))
}

#[cfg(test)]
mod tests;
