//! Where do blocks go that the pool has no room for, and how do they come back?
//!
//! Tiers: the *device* (the pool itself), then *host* memory. What the pool evicts and what is
//! [worth keeping](choose::worth_keeping) is copied into a host arena, bytes as they are; when a
//! request joins whose chain goes on there, the blocks are copied back into the pool and leave the
//! arena: a block is in one of the two, so that their sizes add up. Whether a copy is cheaper than
//! computing is decided by [measured rates](choose::Rates).
//!
//! The engine's thread owns all of it, so nothing here is locked, and nothing here waits.
//!
//! Every move is noted in the order in which it happened, with its tier. A block is announced where
//! it went before it is taken back from where it was: for a reader of the events it is never away.

pub mod choose;
pub mod index;

use crate::kv::pool::{Change, Evicted, Stored};
use crate::model::BlockId;
use cache_index::block::BlockHash;
use choose::{Rates, worth_keeping};
use index::{Kept, Slot, TierIndex};

/// Where a block lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// The pool, which attention reads.
    Device,
    /// Host memory.
    Host,
}

impl Tier {
    /// The label in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Host => "host",
        }
    }
}

/// A change of what one tier holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TierChange {
    /// The tier.
    pub tier: Tier,
    /// What changed there.
    pub change: Change,
}

impl TierChange {
    /// A change of the pool.
    pub fn on_device(change: Change) -> Self {
        let tier = Tier::Device;
        Self { tier, change }
    }
}

/// Reads and writes the bytes of whole blocks; the pool's memory, seen from here.
pub trait Blocks {
    /// Bytes of one block over all its layers; 0 if blocks cannot be copied.
    fn block_bytes(&self) -> usize;
    /// Copies a full block out.
    fn read_block(&mut self, block: BlockId, to: &mut [u8]);
    /// Copies a full block in, as it was read.
    fn write_block(&mut self, block: BlockId, from: &[u8]);
}

/// What happened to blocks on their way down, since it was last asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Copied into host memory.
    pub stored: u64,
    /// Not worth keeping.
    pub refused: u64,
    /// Pushed out of host memory.
    pub evicted: u64,
}

/// The tiers below the pool.
#[derive(Debug)]
pub struct Store {
    host: TierIndex,
    /// The blocks' bytes, slot after slot.
    arena: Vec<u8>,
    block_bytes: usize,
    /// What copying and computing cost here.
    pub rates: Rates,
    changes: Vec<TierChange>,
    moved: Moved,
}

impl Store {
    /// A host tier of `host_blocks` blocks. One slot is kept free, for the block that leaves the
    /// pool while another comes back.
    pub fn new(host_blocks: usize, block_bytes: usize) -> Self {
        let slots = host_blocks + 1;
        Self {
            host: TierIndex::new(slots),
            // Zeroed by the operating system: costs nothing before it is first written.
            arena: vec![0; slots * block_bytes],
            block_bytes,
            rates: Rates::default(),
            changes: Vec::new(),
            moved: Moved::default(),
        }
    }

    /// Takes note of what changed in the pool, in order, and of the blocks it evicted meanwhile:
    /// their bytes must still be there.
    pub fn note(&mut self, changes: Vec<Change>, evicted: Vec<Evicted>, blocks: &mut dyn Blocks) {
        let mut evicted = evicted.into_iter().peekable();
        for change in changes {
            if let Change::Removed(hash) = &change
                && let Some(gone) = evicted.next_if(|gone| gone.stored.content.hash == *hash)
            {
                self.spill(gone, blocks);
            }
            self.changes.push(TierChange::on_device(change));
        }
        assert!(evicted.next().is_none(), "evicted, and not removed");
    }

    fn spill(&mut self, gone: Evicted, blocks: &mut dyn Blocks) {
        let hash = gone.stored.content.hash;
        if self.host.touch(hash, gone.last_use) {
            return;
        }
        if !worth_keeping(gone.depth, gone.found, self.host.has_children(hash)) {
            self.moved.refused += 1;
            return;
        }
        let kept = Kept {
            stored: gone.stored.clone(),
            depth: gone.depth,
            last_use: gone.last_use,
        };
        self.make_room();
        let slot = self.host.insert(kept).expect("a tier has a slot");
        blocks.read_block(
            gone.block,
            slot_mut(&mut self.arena, self.block_bytes, slot),
        );
        self.moved.stored += 1;
        self.changes.push(TierChange {
            tier: Tier::Host,
            change: Change::Stored(gone.stored),
        });
    }

    /// Evicts until a slot is free again.
    pub fn make_room(&mut self) {
        while self.host.is_full() {
            let (slot, kept) = self.host.evict().expect("a full tier has a leaf");
            self.host.free(slot);
            self.moved.evicted += 1;
            self.removed(kept.stored.content.hash);
        }
    }

    /// How many leading blocks of a chain are here.
    pub fn overlap(&self, chain: &[BlockHash]) -> usize {
        let held = chain
            .iter()
            .take_while(|hash| self.host.find(**hash).is_some());
        held.count()
    }

    /// Copies a block back into the pool; false if it is not here. It leaves this tier with
    /// [`Store::taken`], once the pool has published it.
    pub fn copy_back(&self, hash: BlockHash, to: BlockId, blocks: &mut dyn Blocks) -> bool {
        let Some(slot) = self.host.find(hash) else {
            return false;
        };
        blocks.write_block(to, self.bytes(slot));
        true
    }

    /// Lets go of a block that is in the pool again.
    pub fn taken(&mut self, hash: BlockHash) {
        if let Some((slot, _)) = self.host.remove(hash) {
            self.host.free(slot);
            self.removed(hash);
        }
    }

    fn removed(&mut self, hash: BlockHash) {
        self.changes.push(TierChange {
            tier: Tier::Host,
            change: Change::Removed(hash),
        });
    }

    fn bytes(&self, slot: Slot) -> &[u8] {
        let start = slot.0 as usize * self.block_bytes;
        &self.arena[start..start + self.block_bytes]
    }

    /// What changed in all tiers since the last call.
    pub fn take_changes(&mut self) -> Vec<TierChange> {
        std::mem::take(&mut self.changes)
    }

    /// What moved since the last call.
    pub fn take_moved(&mut self) -> Moved {
        std::mem::take(&mut self.moved)
    }

    /// Blocks in host memory.
    pub fn host_blocks(&self) -> usize {
        self.host.len()
    }

    /// Bytes of them.
    pub fn host_bytes(&self) -> usize {
        self.host.len() * self.block_bytes
    }

    /// Adds what the tiers hold to what the pool holds, a parent before its children. Blocks whose
    /// parents are nowhere are left out: no chain leads to them.
    pub fn snapshot(&self, device: Vec<Vec<Stored>>) -> Vec<(Tier, Vec<Stored>)> {
        let on_device = device.iter().flatten().map(|s| s.content.hash).collect();
        let below = self.host.runs(&on_device);
        let device = device.into_iter().map(|run| (Tier::Device, run));
        device
            .chain(below.into_iter().map(|run| (Tier::Host, run)))
            .collect()
    }

    /// Panics if the structure contradicts itself. For tests, after every step.
    pub fn check_integrity(&self) {
        self.host.check_integrity();
        assert!(!self.host.is_full(), "one slot is kept free");
    }
}

fn slot_mut(arena: &mut [u8], block_bytes: usize, slot: Slot) -> &mut [u8] {
    let start = slot.0 as usize * block_bytes;
    &mut arena[start..start + block_bytes]
}

#[cfg(test)]
mod tests;
