//! Memory that the drive can read into and write from directly.

use super::format::PAGE;

/// Bytes that begin on a page's border.
#[derive(Debug)]
pub(super) struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    /// Zeros.
    pub(super) fn new(len: usize) -> Self {
        let bytes = vec![0; len + PAGE];
        // A vector that is not grown does not move.
        let start = bytes.as_ptr().align_offset(PAGE).min(PAGE);
        Self { bytes, start, len }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}
