//! Which tokens did this text become last time?

/// A bounded, thread-safe memory of text segments and their tokens.
#[derive(Debug)]
pub struct SegmentCache {
    bytes_max: usize,
}

impl SegmentCache {
    /// A cache that holds at most about `bytes_max` bytes of text and tokens.
    pub fn new(bytes_max: usize) -> Self {
        Self { bytes_max }
    }

    /// The bound given to `new`.
    pub fn bytes_max(&self) -> usize {
        self.bytes_max
    }
}
