//! Which blocks does a tier below the pool hold, and which of them goes first?
//!
//! The order is the pool's: the least recently used leaf, where a block that is wanted for longer
//! counts as used later. A leaf is a block on which no other of this tier hangs; a block's parent
//! may well be in another tier. Among blocks that were let go together the deepest goes first.
//!
//! Slots are numbers here; what lies in them is the tier's business.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap, HashSet};

use cache_index::block::BlockHash;

use crate::kv::pool::Stored;
use crate::kv::prefix::LastUse;

/// A place for one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(pub u32);

/// A block of a tier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// What it is.
    pub stored: Stored,
    /// How many blocks its chain has up to it, itself included.
    pub depth: u32,
    /// When it was last used.
    pub last_use: LastUse,
}

type Order = (LastUse, Reverse<u32>, Slot);

/// The blocks of one tier.
#[derive(Debug)]
pub struct TierIndex {
    by_hash: HashMap<BlockHash, Slot>,
    entries: Vec<Option<Kept>>,
    free: Vec<Slot>,
    /// How many blocks of this tier hang on a block, itself in this tier or not.
    children: HashMap<BlockHash, u32>,
    leaves: BTreeSet<Order>,
}

impl TierIndex {
    /// An empty tier of so many slots.
    pub fn new(slots: usize) -> Self {
        let slots = u32::try_from(slots).unwrap_or(u32::MAX);
        Self {
            by_hash: HashMap::new(),
            entries: (0..slots).map(|_| None).collect(),
            free: (0..slots).rev().map(Slot).collect(),
            children: HashMap::new(),
            leaves: BTreeSet::new(),
        }
    }

    /// Where a block is, if it is here.
    pub fn find(&self, hash: BlockHash) -> Option<Slot> {
        self.by_hash.get(&hash).copied()
    }

    /// Blocks held.
    pub fn len(&self) -> usize {
        self.by_hash.len()
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.by_hash.is_empty()
    }

    /// Whether no slot is free.
    pub fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// Whether blocks of this tier hang on that block.
    pub fn has_children(&self, hash: BlockHash) -> bool {
        self.children.contains_key(&hash)
    }

    /// A tier with these blocks in these slots.
    pub fn with(slots: usize, blocks: impl Iterator<Item = (Slot, Kept)>) -> Self {
        let mut index = Self::new(slots);
        let blocks: Vec<_> = blocks.collect();
        let taken: HashSet<_> = blocks.iter().map(|(slot, _)| *slot).collect();
        index.free.retain(|slot| !taken.contains(slot));
        for (slot, kept) in blocks {
            index.place(slot, kept);
        }
        index
    }

    /// A block, if it is here.
    pub fn get(&self, hash: BlockHash) -> Option<&Kept> {
        let slot = self.find(hash)?;
        self.entries[slot.0 as usize].as_ref()
    }

    /// Takes a block that is not here; `None` if no slot is free.
    pub fn insert(&mut self, kept: Kept) -> Option<Slot> {
        let slot = self.reserve()?;
        self.place(slot, kept);
        Some(slot)
    }

    /// Takes a slot for a block that is still to come.
    pub fn reserve(&mut self) -> Option<Slot> {
        self.free.pop()
    }

    /// The same for the slot that was freed last, if it is one of these.
    pub fn reserve_if(&mut self, wanted: impl FnOnce(Slot) -> bool) -> Option<Slot> {
        self.free.pop_if(|slot| wanted(*slot))
    }

    /// Frees a slot, to be taken after all others.
    pub fn free_last(&mut self, slot: Slot) {
        self.free.insert(0, slot);
    }

    /// Keeps a block from being evicted, here or still to come: a child of it is on its way.
    pub fn adopt(&mut self, parent: BlockHash) {
        *self.children.entry(parent).or_default() += 1;
        self.unlist(parent);
    }

    /// Ends what [`TierIndex::adopt`] began.
    pub fn disown(&mut self, parent: BlockHash) {
        let left = self.children.get_mut(&parent);
        let left = left.expect("a parent's children are counted");
        *left -= 1;
        if *left == 0 {
            self.children.remove(&parent);
            self.list(parent);
        }
    }

    /// Puts a block that is not here into a slot that was reserved.
    pub fn place(&mut self, slot: Slot, kept: Kept) {
        let hash = kept.stored.content.hash;
        let replaced = self.by_hash.insert(hash, slot);
        assert!(replaced.is_none(), "{hash} kept twice");
        if let Some(parent) = kept.stored.parent_hash {
            self.adopt(parent);
        }
        self.entries[slot.0 as usize] = Some(kept);
        self.list(hash);
    }

    /// Notes a later use of a block; false if it is not here.
    pub fn touch(&mut self, hash: BlockHash, last_use: LastUse) -> bool {
        let Some(slot) = self.find(hash) else {
            return false;
        };
        self.unlist(hash);
        if let Some(kept) = &mut self.entries[slot.0 as usize] {
            kept.last_use = kept.last_use.max(last_use);
        }
        self.list(hash);
        true
    }

    /// Forgets a block. Its slot is not free before [`TierIndex::free`].
    pub fn remove(&mut self, hash: BlockHash) -> Option<(Slot, Kept)> {
        self.unlist(hash);
        let slot = self.by_hash.remove(&hash)?;
        let kept = self.entries[slot.0 as usize].take();
        let kept = kept.expect("a slot found by hash holds a block");
        if let Some(parent) = kept.stored.parent_hash {
            self.disown(parent);
        }
        Some((slot, kept))
    }

    /// Forgets the least recently used leaf, as [`TierIndex::remove`] does.
    pub fn evict(&mut self) -> Option<(Slot, Kept)> {
        let (_, _, slot) = *self.leaves.first()?;
        let hash = self.entries[slot.0 as usize].as_ref()?.stored.content.hash;
        self.remove(hash)
    }

    /// Gives a slot back.
    pub fn free(&mut self, slot: Slot) {
        assert!(self.entries[slot.0 as usize].is_none(), "{slot:?} is taken");
        self.free.push(slot);
    }

    /// Every block held.
    pub fn all(&self) -> impl Iterator<Item = &Stored> {
        self.entries.iter().flatten().map(|kept| &kept.stored)
    }

    /// Panics if the structure contradicts itself.
    pub fn check_integrity(&self) {
        let mut children: HashMap<BlockHash, u32> = HashMap::new();
        let mut held = 0;
        for (slot, kept) in (0_u32..).zip(&self.entries) {
            let Some(kept) = kept else { continue };
            held += 1;
            let hash = kept.stored.content.hash;
            assert_eq!(self.find(hash), Some(Slot(slot)), "the slot of {hash}");
            if let Some(parent) = kept.stored.parent_hash {
                *children.entry(parent).or_default() += 1;
            }
        }
        for (parent, count) in children {
            // Children on their way count as well.
            assert!(self.children[&parent] >= count, "children of {parent}");
        }
        assert_eq!(held, self.by_hash.len(), "blocks");
        assert!(
            held + self.free.len() <= self.entries.len(),
            "slots given out twice"
        );
        let leaves = self
            .by_hash
            .keys()
            .filter(|hash| !self.has_children(**hash));
        assert_eq!(leaves.count(), self.leaves.len(), "leaves");
    }

    /// Puts a block among the leaves, if it is here and is one.
    fn list(&mut self, hash: BlockHash) {
        if let Some(order) = self.order(hash)
            && !self.has_children(hash)
        {
            self.leaves.insert(order);
        }
    }

    fn unlist(&mut self, hash: BlockHash) {
        if let Some(order) = self.order(hash) {
            self.leaves.remove(&order);
        }
    }

    fn order(&self, hash: BlockHash) -> Option<Order> {
        let slot = self.find(hash)?;
        let kept = self.entries[slot.0 as usize].as_ref()?;
        Some((kept.last_use, Reverse(kept.depth), slot))
    }
}
