//! What is a node block that is not one block of ours?
//!
//! An engine stores and evicts blocks of its own size: a multiple of ours, or smaller. Such a block
//! is kept by the keys of ours that end in it and by the tokens left over after the last of them,
//! never by its tokens as a whole.

use std::collections::BTreeSet;

use super::runs::Loc;
use super::spaces::SpaceId;
use crate::block::{BLOCK_TOKENS, BlockHash, Namespace, extend_chain};
use crate::event::EngineHash;

/// An engine's name for a block in 64 bits. Longer ones are digests already, and folded. That two
/// names meet by intent harms only the node that does it.
pub(super) fn name_of(hash: &EngineHash) -> u64 {
    /// An odd number without a pattern: pi's first 64 bits after the point.
    const FOLD: u64 = 0x243f_6a88_85a3_08d3;
    let bytes = match hash {
        EngineHash::Int(value) => return *value,
        EngineHash::Bytes(bytes) => bytes,
    };
    let (words, rest) = bytes.as_chunks::<8>();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    let words = words.iter().chain((!rest.is_empty()).then_some(&last));
    words.fold(0, |folded, word| {
        (folded ^ u64::from_le_bytes(*word))
            .wrapping_mul(FOLD)
            .rotate_left(32)
    })
}

/// A place in a chain, where the next node block goes.
pub(super) struct Place {
    pub(super) space: SpaceId,
    /// The name of the node block before it, and its tier.
    pub(super) parent: Option<(usize, u64)>,
    /// The last of our keys that ends before it, and where that lies.
    pub(super) last: BlockHash,
    pub(super) at: Option<Loc>,
    /// Tokens after `last`: fewer than a block of ours.
    pub(super) tail: Vec<u32>,
}

/// A node block at some place, before it is held.
pub(super) struct Arrival {
    /// Keys of ours that end in it.
    pub(super) hashes: Vec<BlockHash>,
    /// The last of our keys that ends in it or before it.
    pub(super) last: BlockHash,
    pub(super) tail: Vec<u32>,
    /// The node block before it, where our block begins in that one.
    pub(super) before: Option<u64>,
}

impl Arrival {
    /// The node block with these tokens.
    pub(super) fn at(place: &Place, namespace: &Namespace, tokens: &[u32]) -> Self {
        let stream = [&place.tail, tokens].concat();
        let hashes = extend_chain(namespace, place.last, &stream);
        let tail = stream[hashes.len() * BLOCK_TOKENS..].to_vec();
        Self {
            last: hashes.last().copied().unwrap_or(place.last),
            tail,
            before: place
                .parent
                .filter(|_| !place.tail.is_empty())
                .map(|(_, name)| name),
            hashes,
        }
    }

    /// What it takes of the limits: its keys, and never nothing.
    pub(super) fn weight(&self) -> usize {
        self.hashes.len().max(1)
    }
}

/// A node block that is held, and is not one block of ours.
pub(super) struct Odd {
    pub(super) space: SpaceId,
    pub(super) last: BlockHash,
    /// Where `last` lies; pinned.
    pub(super) at: Option<Loc>,
    /// Where its own keys lie.
    pub(super) keys: Vec<Loc>,
    pub(super) tail: Vec<u32>,
    pub(super) before: Option<u64>,
    /// Node blocks after it that continue its tail.
    pub(super) after: BTreeSet<u64>,
}

impl Odd {
    pub(super) fn weight(&self) -> usize {
        self.keys.len().max(1)
    }
}
