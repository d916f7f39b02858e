//! How do KV-cache events look on the wire?
//!
//! MessagePack, vLLM's layout: an array of timestamp, events, replica rank and, from our engine, a
//! map with the boot id. An event is a map tagged `type` with default fields left out, or, from
//! older engines, an array of the same fields in the same order. [`decode_batch`] reads both and
//! skips what it does not know, [`encode_batch`] writes the map form.
//! Payloads come from the network: nesting is bounded, a count is compared with the bytes that are
//! left before anything is allocated for it, and every refusal is a [`WireError`]. Values go
//! straight into their types; an intermediate tree would take 40 bytes for a one-byte token.

mod decode;
mod encode;
mod read;
#[cfg(test)]
mod tests;
mod values;

pub use decode::decode_batch;
pub use encode::encode_batch;

/// Most tokens that a node block may have; real ones have 1 to 1024.
pub const BLOCK_SIZE_MAX: usize = 65_536;

/// Longest engine hash in bytes; real ones have 8 to 32.
pub const HASH_BYTES_MAX: usize = 64;

/// Deepest nesting; real payloads reach 5.
pub const DEPTH_MAX: u8 = 16;

/// Why a payload was refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum WireError {
    /// It ends in the middle of a value.
    #[error("the payload ends inside {reading}")]
    Truncated {
        /// What was being read.
        reading: &'static str,
    },
    /// A value of another type than the format demands.
    #[error("{reading} cannot be a value of type {found}")]
    Type {
        /// What was being read.
        reading: &'static str,
        /// The type's name in MessagePack.
        found: &'static str,
    },
    /// A number or length outside the range that makes sense.
    #[error("{reading} is out of range")]
    Range {
        /// What was being read.
        reading: &'static str,
    },
    /// It announces more elements than there are bytes left.
    #[error("{reading} announces {count} elements with {left} bytes left")]
    Count {
        /// What was being read.
        reading: &'static str,
        /// Elements announced.
        count: u64,
        /// Bytes left.
        left: usize,
    },
    /// It nests deeper than [`DEPTH_MAX`].
    #[error("the payload nests deeper than {DEPTH_MAX}")]
    Depth,
    /// A field without which the event means nothing.
    #[error("an event lacks {field}")]
    Missing {
        /// The field's name.
        field: &'static str,
    },
    /// Bytes follow the batch.
    #[error("{left} bytes follow the batch")]
    Trailing {
        /// How many.
        left: usize,
    },
}
