//! What is one node block, in the engine's name for it and in our blocks?
//!
//! A node block is what an engine stores and evicts as one: of our size, of a multiple of it, or
//! smaller. It is kept by the blocks of ours that end in it and by the tokens left over after the
//! last of them, never by its tokens as a whole. A node block of exactly our size, the common
//! case, needs nothing on the heap.

use std::collections::BTreeSet;

use super::spaces::SpaceId;
use crate::block::{BLOCK_TOKENS, BlockHash, Namespace, extend_chain};
use crate::event::EngineHash;

/// An engine hash in 128 bits. 16-byte hashes (ours) are kept as they are; other lengths are
/// digested. That an integer and a digest meet by intent harms only the node that does it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct EngineKey(u128);

impl EngineKey {
    pub(super) fn of(hash: &EngineHash) -> Self {
        let bytes = match hash {
            EngineHash::Int(value) => return Self(u128::from(*value)),
            EngineHash::Bytes(bytes) => bytes,
        };
        if let Ok(whole) = <[u8; 16]>::try_from(&**bytes) {
            return Self(u128::from_le_bytes(whole));
        }
        let digest = blake3::hash(bytes);
        let half = digest
            .as_bytes()
            .first_chunk()
            .expect("a digest has 32 bytes");
        Self(u128::from_le_bytes(*half))
    }
}

/// One node block that is held.
#[derive(PartialEq)]
pub(super) struct NodeBlock {
    /// The last of our blocks that ends in it or before it.
    pub(super) last: BlockHash,
    pub(super) space: SpaceId,
    /// Whether `last` ends in it.
    pub(super) completes: bool,
    /// What a node block of exactly our size does not need.
    pub(super) more: Option<Box<More>>,
}

/// The parts of a node block that is not one block of ours.
#[derive(PartialEq, Default)]
pub(super) struct More {
    /// Keys of our blocks that end in it, beside `last`.
    pub(super) earlier: Vec<u64>,
    /// Tokens after `last`: fewer than a block of ours.
    pub(super) tail: Vec<u32>,
    /// The node block before it, where our block begins in that one.
    pub(super) before: Option<EngineKey>,
    /// Node blocks after it that continue its tail.
    pub(super) after: BTreeSet<EngineKey>,
}

impl NodeBlock {
    pub(super) fn keys(&self) -> impl Iterator<Item = u64> {
        let earlier = self
            .more
            .iter()
            .flat_map(|more| more.earlier.iter().copied());
        earlier.chain(self.completes.then(|| self.last.short()))
    }

    pub(super) fn tail(&self) -> &[u32] {
        self.more.as_ref().map_or(&[], |more| &more.tail)
    }

    /// What it takes of the limits: its blocks of ours, and never nothing.
    pub(super) fn weight(&self) -> usize {
        self.keys().count().max(1)
    }

    /// Whether both stand for the same tokens; the hash covers all that came before.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.space == other.space
            && self.last == other.last
            && self.tail() == other.tail()
            && self.keys().eq(other.keys())
    }

    /// The node block with these tokens after `place`.
    pub(super) fn after(place: &Place, namespace: &Namespace, tokens: &[u32]) -> Self {
        let joined;
        let stream = if place.tail.is_empty() {
            tokens
        } else {
            joined = [&place.tail, tokens].concat();
            &joined
        };
        let hashes = extend_chain(namespace, place.last, stream);
        let tail = &stream[hashes.len() * BLOCK_TOKENS..];
        let (last, earlier) = match hashes.split_last() {
            Some((last, earlier)) => (*last, earlier),
            None => (place.last, &[][..]),
        };
        let before = place.parent.filter(|_| !place.tail.is_empty());
        let is_plain = earlier.is_empty() && tail.is_empty() && before.is_none();
        let more = || More {
            earlier: earlier.iter().map(|hash| hash.short()).collect(),
            tail: tail.to_vec(),
            before,
            after: BTreeSet::new(),
        };
        Self {
            last,
            space: place.space,
            completes: !hashes.is_empty(),
            more: (!is_plain).then(|| Box::new(more())),
        }
    }
}

/// A place in a chain, where the next node block goes.
pub(super) struct Place {
    pub(super) space: SpaceId,
    pub(super) parent: Option<EngineKey>,
    pub(super) last: BlockHash,
    pub(super) tail: Vec<u32>,
}
