//! What does one node hold, in its own names and in ours?
//!
//! The engine's hashes resolve parents and removals; our chained hash of the tokens is what gets
//! credited. A node block of any size works: one of 32 tokens completes two of our blocks, one of
//! 4 completes ours with every fourth, and what is left over (the tail) waits for the next block.
//! Two node blocks may complete the same block of ours (SGLang and vLLM both can compute a prefix
//! twice), so each key is counted and its bit goes with the last holder.
//! A node block that begins inside one of our blocks goes when the node block before it goes:
//! without it, it cannot be used either. Blocks further on keep their bits; the hole in front of
//! them already ends every overlap.
//! Left out: media other than the device (an event about them is counted and ignored), and all
//! attention groups but one, the first that serves full attention.

use std::collections::HashMap;

use super::held::{EngineKey, More, NodeBlock, Place};
use super::spaces::{Salts, Spaces};
use super::table::{Occupancy, Table};
use super::{Applied, Limits};
use crate::block::{BLOCK_TOKENS, BlockHash};
use crate::event::{EngineHash, ExtraKeys, GroupKind, Medium};

/// A `BlockStored` event, as the index reads it.
pub(super) struct Stored<'a> {
    pub(super) block_hashes: &'a [EngineHash],
    pub(super) parent: Option<&'a EngineHash>,
    pub(super) token_ids: &'a [u32],
    pub(super) block_size: usize,
    pub(super) adapter: Option<&'a str>,
    pub(super) extra_keys: &'a ExtraKeys,
}

/// What all nodes share while one of them changes.
pub(super) struct Shared<'a> {
    pub(super) table: &'a Table,
    pub(super) occupancy: &'a mut Occupancy,
    pub(super) spaces: &'a mut Spaces,
    pub(super) salts: &'a Salts,
    pub(super) limits: &'a Limits,
    /// Weight of all nodes together.
    pub(super) total: &'a mut usize,
    pub(super) applied: &'a mut Applied,
}

/// One node's blocks.
pub(super) struct Node {
    /// Its bit in the table.
    slot: usize,
    blocks: HashMap<EngineKey, NodeBlock>,
    /// Holders of a key beyond the first.
    extra_holders: HashMap<u64, u32>,
    held: usize,
    weight: usize,
    /// Tokens in its blocks, by its last event.
    block_tokens: usize,
    /// The attention group that is believed.
    group: Option<u32>,
}

impl Node {
    pub(super) fn new(slot: usize) -> Self {
        Self {
            slot,
            blocks: HashMap::new(),
            extra_holders: HashMap::new(),
            held: 0,
            weight: 0,
            block_tokens: BLOCK_TOKENS,
            group: None,
        }
    }

    pub(super) fn slot(&self) -> usize {
        self.slot
    }

    pub(super) fn held(&self) -> usize {
        self.held
    }

    pub(super) fn weight(&self) -> usize {
        self.weight
    }

    pub(super) fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    /// Whether a stored event is about blocks that prefill can reuse.
    pub(super) fn believes_stored(
        &mut self,
        medium: Option<&Medium>,
        group_idx: Option<u32>,
        kind: GroupKind,
    ) -> bool {
        if !is_device(medium) {
            return false;
        }
        let index = group_idx.unwrap_or(0);
        let is_full = kind == GroupKind::Full || kind == GroupKind::Unsaid && index == 0;
        is_full && *self.group.get_or_insert(index) == index
    }

    /// The same for a removal, which carries only the group's number.
    pub(super) fn believes_removed(&self, medium: Option<&Medium>, group_idx: Option<u32>) -> bool {
        is_device(medium)
            && self
                .group
                .is_none_or(|group| group == group_idx.unwrap_or(0))
    }

    /// Stores consecutive blocks.
    pub(super) fn store(&mut self, event: &Stored<'_>, shared: &mut Shared<'_>) {
        let count = event.block_hashes.len();
        if count.checked_mul(event.block_size) != Some(event.token_ids.len()) {
            shared.applied.malformed += 1;
            return;
        }
        self.block_tokens = event.block_size.max(1);
        let Some(mut place) = self.first_place(event, shared) else {
            return;
        };
        let tokens = event.token_ids.chunks_exact(event.block_size.max(1));
        for (at, (hash, tokens)) in event.block_hashes.iter().zip(tokens).enumerate() {
            let keys = event.extra_keys.of(at);
            if at > 0 && !shared.spaces.continues(place.space, event.adapter, keys) {
                shared.applied.uncreditable += count - at;
                return;
            }
            let block = NodeBlock::after(&place, shared.spaces.namespace(place.space), tokens);
            let key = EngineKey::of(hash);
            let parent = place.parent;
            place = Place {
                space: block.space,
                parent: Some(key),
                last: block.last,
                tail: block.tail().to_vec(),
            };
            if self.blocks.get(&key).is_some_and(|old| old.is_same(&block)) {
                shared.applied.repeated += 1;
                continue;
            }
            // The engine gave the name to another block: the removal was lost on the way.
            self.remove(key, shared);
            if parent.is_some_and(|parent| !self.blocks.contains_key(&parent)) {
                shared.applied.orphans += count - at;
                return;
            }
            if !self.insert(key, block, shared) {
                shared.applied.over_limit += count - at;
                return;
            }
        }
    }

    /// Where the event's first block goes, if that can be known.
    fn first_place(&self, event: &Stored<'_>, shared: &mut Shared<'_>) -> Option<Place> {
        let count = event.block_hashes.len();
        let keys = event.extra_keys.of(0);
        let Some(parent) = event.parent.map(EngineKey::of) else {
            let space = shared.spaces.of_chain(event.adapter, keys, shared.salts);
            if space.is_none() {
                shared.applied.uncreditable += count;
            }
            let begin = |space| Place {
                space,
                parent: None,
                last: BlockHash::ROOT,
                tail: Vec::new(),
            };
            return space.map(begin);
        };
        let Some(block) = self.blocks.get(&parent) else {
            shared.applied.orphans += count;
            return None;
        };
        if !shared.spaces.continues(block.space, event.adapter, keys) {
            shared.applied.uncreditable += count;
            return None;
        }
        let tail = block.tail().to_vec();
        Some(Place {
            space: block.space,
            parent: Some(parent),
            last: block.last,
            tail,
        })
    }

    /// False where a limit is reached: what does not fit gets no credit, and what is held already
    /// stays, since it is what requests are being routed by.
    fn insert(&mut self, key: EngineKey, block: NodeBlock, shared: &mut Shared<'_>) -> bool {
        let weight = block.weight();
        let fits = |used: usize, max: usize| used.saturating_add(weight) <= max;
        if !fits(self.weight, shared.limits.node_blocks_max)
            || !fits(*shared.total, shared.limits.total_blocks_max)
        {
            return false;
        }
        self.weight += weight;
        *shared.total += weight;
        for held in block.keys() {
            if shared.table.has(held, self.slot) {
                *self.extra_holders.entry(held).or_default() += 1;
            } else {
                shared.occupancy.note(shared.table.set(held, self.slot));
                self.held += 1;
                shared.applied.stored += 1;
            }
        }
        let before = block.more.as_ref().and_then(|more| more.before);
        if let Some(more) = before.and_then(|before| self.blocks.get_mut(&before)?.more.as_mut()) {
            more.after.insert(key);
        }
        self.blocks.insert(key, block);
        true
    }

    /// Removes blocks by their names.
    pub(super) fn remove_all(&mut self, hashes: &[EngineHash], shared: &mut Shared<'_>) {
        for hash in hashes {
            if !self.remove(EngineKey::of(hash), shared) {
                shared.applied.unknown_removals += 1;
            }
        }
    }

    /// Removes a block and those that continue its tail; false where it is not held.
    fn remove(&mut self, key: EngineKey, shared: &mut Shared<'_>) -> bool {
        let Some(block) = self.blocks.remove(&key) else {
            return false;
        };
        let before = block.more.as_ref().and_then(|more| more.before);
        if let Some(more) = before.and_then(|before| self.blocks.get_mut(&before)?.more.as_mut()) {
            more.after.remove(&key);
        }
        let mut gone = vec![block];
        while let Some(block) = gone.pop() {
            self.release(&block, shared);
            let after = block.more.map(|more| more.after).unwrap_or_default();
            gone.extend(after.iter().filter_map(|key| self.blocks.remove(key)));
        }
        true
    }

    /// Gives back the keys and the weight of a block that has left the map.
    fn release(&mut self, block: &NodeBlock, shared: &mut Shared<'_>) {
        self.weight -= block.weight();
        *shared.total -= block.weight();
        for key in block.keys() {
            match self.extra_holders.get_mut(&key) {
                Some(1) => drop(self.extra_holders.remove(&key)),
                Some(holders) => *holders -= 1,
                None => {
                    shared.occupancy.note(shared.table.clear(key, self.slot));
                    self.held -= 1;
                    shared.applied.removed += 1;
                }
            }
        }
    }

    /// Drops everything.
    pub(super) fn clear(&mut self, shared: &mut Shared<'_>) {
        // A fresh map, so that a node that restarts empty gives its memory back.
        for block in std::mem::take(&mut self.blocks).into_values() {
            self.release(&block, shared);
        }
        self.extra_holders = HashMap::new();
    }

    /// Recounts everything from the blocks.
    pub(super) fn check_integrity(&self, table: &Table, bits: usize) {
        let mut holders: HashMap<u64, u32> = HashMap::new();
        let mut weight = 0;
        for (key, block) in &self.blocks {
            weight += block.weight();
            block
                .keys()
                .for_each(|key| *holders.entry(key).or_default() += 1);
            let Some(more) = &block.more else { continue };
            assert!(
                more.tail.len() < BLOCK_TOKENS,
                "a tail of {} tokens",
                more.tail.len()
            );
            let linked = |other: &EngineKey, back: &dyn Fn(&More) -> bool| {
                self.blocks
                    .get(other)
                    .and_then(|block| block.more.as_deref())
                    .is_some_and(back)
            };
            assert!(
                more.before
                    .is_none_or(|before| linked(&before, &|m| m.after.contains(key)))
            );
            assert!(
                more.after
                    .iter()
                    .all(|after| linked(after, &|m| m.before == Some(*key)))
            );
        }
        assert_eq!(
            weight, self.weight,
            "weight of the node in bit {}",
            self.slot
        );
        assert_eq!(
            holders.len(),
            self.held,
            "blocks of the node in bit {}",
            self.slot
        );
        assert_eq!(bits, self.held, "bits of the node in bit {}", self.slot);
        for (key, count) in &holders {
            assert!(table.has(*key, self.slot), "a held key without its bit");
            let extra = self.extra_holders.get(key).copied().unwrap_or_default();
            assert_eq!(*count, extra + 1, "holders of a key");
        }
        assert!(
            self.extra_holders
                .keys()
                .all(|key| holders.contains_key(key))
        );
    }
}

fn is_device(medium: Option<&Medium>) -> bool {
    matches!(medium, None | Some(Medium::Device))
}
