//! How are bytes taken from a hostile file? Through one cursor that checks what remains, first.

use super::GgufError;

/// A position in the file's bytes.
#[derive(Debug)]
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Array elements still allowed in this file: see `take_elements`.
    elements_left: u64,
}

/// Most array elements in all of a header. An element costs 32 bytes in memory and may cost one in
/// the file, so this bounds what a hostile header can make us allocate to 128 MB besides its own
/// strings. The largest published vocabulary (262,144 tokens, three arrays, half a million merges)
/// needs 1.3 M.
const ELEMENTS_MAX: u64 = 4 << 20;

const _: () = assert!(size_of::<super::Value>() <= 32, "ELEMENTS_MAX counts on it");

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self {
            bytes,
            at: 0,
            elements_left: ELEMENTS_MAX,
        }
    }

    pub(super) fn position(&self) -> usize {
        self.at
    }

    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// The next `N` bytes.
    pub(super) fn take<const N: usize>(&mut self) -> Result<[u8; N], GgufError> {
        match self.bytes[self.at..].first_chunk::<N>() {
            Some(chunk) => {
                self.at += N;
                Ok(*chunk)
            }
            None => Err(self.truncated(N as u64)),
        }
    }

    pub(super) fn u32(&mut self) -> Result<u32, GgufError> {
        self.take().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, GgufError> {
        self.take().map(u64::from_le_bytes)
    }

    /// A string: 64-bit length, then UTF-8.
    pub(super) fn string(&mut self) -> Result<String, GgufError> {
        let length = self.u64()?;
        let at = self.at;
        if length > self.left() as u64 {
            return Err(self.truncated(length));
        }
        self.at += length as usize;
        std::str::from_utf8(&self.bytes[at..self.at])
            .map(str::to_owned)
            .map_err(|_| GgufError::Utf8 { at })
    }

    /// Refuses a count past `limit`, or one that the remaining bytes cannot hold at `bytes_min`
    /// bytes each.
    pub(super) fn check_count(
        &self,
        what: &'static str,
        count: u64,
        limit: u64,
        bytes_min: u64,
    ) -> Result<(), GgufError> {
        let max = limit.min(self.left() as u64 / bytes_min);
        if count > max {
            return Err(GgufError::Count {
                what,
                count,
                max,
                at: self.at,
            });
        }
        Ok(())
    }

    /// Takes an array's length from what this header may hold in all.
    pub(super) fn take_elements(&mut self, count: u64, bytes_min: u64) -> Result<(), GgufError> {
        self.check_count("array elements", count, self.elements_left, bytes_min)?;
        self.elements_left -= count;
        Ok(())
    }

    fn truncated(&self, wanted: u64) -> GgufError {
        GgufError::Truncated {
            at: self.at,
            wanted,
            left: self.left(),
        }
    }
}
