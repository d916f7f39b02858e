//! Who holds how much of this prefix?
//!
//! Bytes and values in, values out: no IO, no clock, no threads. A prompt's tokens become a chain
//! of block hashes ([`block`]); engines' KV-cache events ([`event`], read and written by [`wire`])
//! say which blocks a node holds; [`index`] answers for a chain how many of its leading blocks
//! each node holds; [`trust`] decides from sequence numbers what may be believed and what must be
//! asked again. [`expected`] adds what requests in flight will leave behind, and [`approximate`]
//! stands in for nodes that say nothing. [`mod@reference`] is the slow, obvious twin that the index is tested against.

pub mod approximate;
pub mod block;
pub mod event;
pub mod expected;
pub mod ids;
pub mod index;
pub mod reference;
pub mod tiers;
pub mod trust;
pub mod wire;
