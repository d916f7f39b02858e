//! How does one model span several ranks?
//!
//! A rank holds a part of every large matrix and the KV of some heads ([`crate::model`] says
//! which), and computes the same pass as all others; where a sum runs over what is spread, the
//! ranks add up through [`Collectives`]. The step loop sees a [`RankGroup`] and no rank.
//!
//! What runs in production today is a group of one. Groups of several ranks inside one process are
//! built and tested, because they hold the seams open for ranks on other devices: the cut of the
//! weights, the KV of some heads, the meeting points in the pass. They are no faster here: the
//! threads of a single rank share the work with less ado.

pub mod collectives;
mod group;

pub use collectives::{Alone, Collectives, Rank, Threads};
pub use group::RankGroup;
