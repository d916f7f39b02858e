//! Who holds how much of this prefix?
//!
//! Bytes and values in, values out: no IO, no clock, no threads. A prompt's tokens become a chain
//! of block hashes ([`block`]); engines' KV-cache events say which blocks a node holds.

pub mod block;
pub mod ids;
