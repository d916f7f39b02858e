//! How is an event of a stream written?
//!
//! Straight into the connection's buffer, since there is one for nearly every token: members are
//! literal but for the texts, which serde_json escapes.

use std::io::Write;

/// Appends members to a JSON object that is open.
pub(super) struct Members<'o> {
    out: &'o mut Vec<u8>,
    comma: &'static str,
}

impl<'o> Members<'o> {
    /// Of an object whose brace has just been written.
    pub(super) fn of(out: &'o mut Vec<u8>) -> Self {
        Self { out, comma: "" }
    }

    fn name(&mut self, name: &str) {
        self.raw(self.comma.as_bytes());
        self.comma = ",";
        self.raw(b"\"");
        self.raw(name.as_bytes());
        self.raw(b"\":");
    }

    fn raw(&mut self, bytes: &[u8]) {
        self.out.extend_from_slice(bytes);
    }

    /// A string.
    pub(super) fn text(&mut self, name: &str, text: &str) -> &mut Self {
        self.name(name);
        // Writing into a Vec cannot fail.
        let _ = serde_json::to_writer(&mut *self.out, text);
        self
    }

    /// A number.
    pub(super) fn number(&mut self, name: &str, number: impl std::fmt::Display) -> &mut Self {
        self.name(name);
        let _ = write!(self.out, "{number}");
        self
    }

    /// JSON as it is.
    pub(super) fn json(&mut self, name: &str, json: &[u8]) -> &mut Self {
        self.name(name);
        self.raw(json);
        self
    }

    /// A list around JSON values that have their commas.
    pub(super) fn list(&mut self, name: &str, values: &[u8]) -> &mut Self {
        self.name(name);
        self.raw(b"[");
        self.raw(values);
        self.raw(b"]");
        self
    }
}

/// An object of its own.
pub(super) fn object(fill: impl FnOnce(&mut Members<'_>)) -> Vec<u8> {
    let mut out = Vec::with_capacity(128);
    out.push(b'{');
    fill(&mut Members::of(&mut out));
    out.push(b'}');
    out
}

/// The events of one stream: they are numbered.
#[derive(Clone, Copy, Default)]
pub(super) struct Sequence(u64);

impl Sequence {
    /// Appends an event.
    pub(super) fn event(
        &mut self,
        out: &mut Vec<u8>,
        kind: &str,
        fill: impl FnOnce(&mut Members<'_>),
    ) {
        out.extend_from_slice(b"event: ");
        out.extend_from_slice(kind.as_bytes());
        out.extend_from_slice(b"\ndata: {");
        let mut members = Members::of(out);
        members.text("type", kind).number("sequence_number", self.0);
        fill(&mut members);
        out.extend_from_slice(b"}\n\n");
        self.0 += 1;
    }
}
