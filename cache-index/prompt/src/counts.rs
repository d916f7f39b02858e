//! How much text went through the tokenizer, and how much was known?

use std::sync::atomic::{AtomicU64, Ordering};

/// How much text was encoded and how much was known, since the cache was made. Control tokens are
/// neither.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SegmentCounts {
    /// Bytes of text that went through the tokenizer.
    pub encoded_bytes: u64,
    /// Bytes of text whose tokens were known.
    pub reused_bytes: u64,
    /// Tokens that came from the tokenizer.
    pub encoded_tokens: u64,
    /// Tokens that were known.
    pub reused_tokens: u64,
}

/// [`SegmentCounts`], shared.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    encoded_bytes: AtomicU64,
    reused_bytes: AtomicU64,
    encoded_tokens: AtomicU64,
    reused_tokens: AtomicU64,
}

impl SegmentCounts {
    pub(crate) fn encoded(&mut self, text: &str, tokens: &[u32]) {
        self.encoded_bytes += text.len() as u64;
        self.encoded_tokens += tokens.len() as u64;
    }

    pub(crate) fn reused(&mut self, text: &str, tokens: &[u32]) {
        self.reused_bytes += text.len() as u64;
        self.reused_tokens += tokens.len() as u64;
    }
}

impl Counts {
    pub(crate) fn add(&self, more: &SegmentCounts) {
        let add = |total: &AtomicU64, more| total.fetch_add(more, Ordering::Relaxed);
        add(&self.encoded_bytes, more.encoded_bytes);
        add(&self.reused_bytes, more.reused_bytes);
        add(&self.encoded_tokens, more.encoded_tokens);
        add(&self.reused_tokens, more.reused_tokens);
    }

    pub(crate) fn read(&self) -> SegmentCounts {
        let read = |total: &AtomicU64| total.load(Ordering::Relaxed);
        SegmentCounts {
            encoded_bytes: read(&self.encoded_bytes),
            reused_bytes: read(&self.reused_bytes),
            encoded_tokens: read(&self.encoded_tokens),
            reused_tokens: read(&self.reused_tokens),
        }
    }
}
