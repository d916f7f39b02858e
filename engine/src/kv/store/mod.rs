//! Where do blocks go that the pool has no room for, and how do they come back?
//!
//! Tiers: the *device* (the pool itself), then *host* memory, then a [`disk`] and a store that nodes
//! [share](shared): either, both or none. What the pool evicts
//! and what is [worth keeping](choose::worth_keeping) is copied into a host arena, bytes as they
//! are; when a request joins whose chain goes on there, the blocks are copied back into the pool and
//! leave the arena: a block is in one of the two, so that their sizes add up. What the arena evicts
//! is written to the disk, from the root of its chain on, since only what a chain leads to can be
//! found again; what is read from there passes through the arena and stays on the disk. The same goes
//! for the shared store: the disk is for this node's own sessions, and asked first; the store for those
//! that come to other nodes. Whether a
//! copy or a read is cheaper than computing is decided by [measured rates](choose::Rates).
//!
//! The engine's thread owns all of it, so nothing here is locked, and nothing here waits: the disk
//! and the shared store have threads of their own.
//!
//! Every move is noted in the order in which it happened, with its tier. Between pool and host
//! memory a block is announced where it went before it is taken back from where it was: for a reader
//! of the events it is never away. On its way to the disk it is, for as long as writing takes.

pub mod choose;
pub mod disk;
mod fetch;
pub mod form;
pub mod index;
mod runs;
mod save;
pub mod shared;

use std::time::Instant;

use cache_index::block::BlockHash;

use crate::kv::pool::{Change, Evicted, Pool, Stored};
use crate::model::BlockId;
use choose::{Rates, worth_keeping};
use disk::{Disk, DiskMoved};
pub use fetch::Wanted;
use index::{Kept, Slot, TierIndex};
use shared::{SharedMoved, SharedTier};

/// Where a block lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// The pool, which attention reads.
    Device,
    /// Host memory.
    Host,
    /// A drive of this machine.
    Disk,
    /// A store that other nodes use too.
    Shared,
}

impl Tier {
    /// The label in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Host => "host",
            Self::Disk => "disk",
            Self::Shared => "shared",
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
    /// Bytes of a block as the tiers keep it.
    fn kept_bytes(&self) -> usize {
        self.block_bytes()
    }
    /// Copies a full block out for the tiers.
    fn keep_block(&mut self, block: BlockId, to: &mut [u8]) {
        self.read_block(block, to);
    }
    /// Copies a full block back in from there.
    fn restore_block(&mut self, block: BlockId, from: &[u8]) {
        self.write_block(block, from);
    }
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
    disk: Option<Disk>,
    shared: Option<SharedTier>,
    changes: Vec<TierChange>,
    moved: Moved,
}

impl Store {
    /// A host tier of `host_blocks` blocks, at least one, and a disk tier below it if there is one.
    /// One slot more is kept free, for the block that leaves the pool while another comes back.
    pub fn new(host_blocks: usize, block_bytes: usize, disk: Option<Disk>) -> Self {
        let slots = host_blocks + 1;
        Self {
            host: TierIndex::new(slots),
            // Zeroed by the operating system: costs nothing before it is first written.
            arena: vec![0; slots * block_bytes],
            block_bytes,
            rates: Rates::default(),
            disk,
            shared: None,
            changes: Vec::new(),
            moved: Moved::default(),
        }
    }

    /// The same with a shared tier, if there is one.
    pub fn sharing(self, shared: Option<SharedTier>) -> Self {
        Self { shared, ..self }
    }

    /// Takes note of what changed in the pool, in order, and of the blocks it evicted meanwhile:
    /// their bytes must still be there.
    pub fn note(
        &mut self,
        changes: Vec<Change>,
        evicted: Vec<Evicted>,
        pool: &Pool,
        blocks: &mut dyn Blocks,
    ) {
        let mut evicted = evicted.into_iter().peekable();
        for change in changes {
            if let Change::Removed(hash) = &change
                && let Some(gone) = evicted.next_if(|gone| gone.stored.content.hash == *hash)
            {
                self.spill(gone, pool, blocks);
            }
            self.changes.push(TierChange::on_device(change));
        }
        assert!(evicted.next().is_none(), "evicted, and not removed");
    }

    fn spill(&mut self, gone: Evicted, pool: &Pool, blocks: &mut dyn Blocks) {
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
        self.make_room(pool, blocks);
        let slot = self.host.insert(kept).expect("a tier has a slot");
        let began = Instant::now();
        blocks.keep_block(
            gone.block,
            slot_mut(&mut self.arena, self.block_bytes, slot),
        );
        self.rates.copied(began.elapsed().as_secs_f64() * 1e3);
        self.moved.stored += 1;
        self.changes.push(TierChange {
            tier: Tier::Host,
            change: Change::Stored(gone.stored),
        });
    }

    /// Evicts until a slot is free again.
    pub fn make_room(&mut self, pool: &Pool, blocks: &mut dyn Blocks) {
        while self.host.is_full() {
            let (slot, kept) = self.host.evict().expect("a full tier has a leaf");
            self.save(&kept, slot, pool, blocks);
            self.host.free(slot);
            self.moved.evicted += 1;
            self.removed(kept.stored.content.hash);
        }
    }

    /// Takes note of what drive and shared store have done; blocks that came go into host memory.
    pub fn poll(&mut self, pool: &Pool, blocks: &mut dyn Blocks) {
        let read = self.disk.as_mut().map(Disk::poll).unwrap_or_default();
        self.changes.extend(
            self.disk
                .as_mut()
                .map(Disk::take_changes)
                .unwrap_or_default(),
        );
        for arrived in read {
            self.rates.read(arrived.ms);
            self.arrive(&arrived.kept, arrived.body(self.block_bytes), pool, blocks);
            if let Some(disk) = &mut self.disk {
                disk.give_back(arrived);
            }
        }
        let host = &self.host;
        let leads_here = |hash| host.find(hash).is_some() || pool.find(hash).is_some();
        let Some(shared) = &mut self.shared else {
            return;
        };
        let brought = shared.poll(&leads_here);
        self.changes.extend(shared.take_changes());
        for arrived in brought {
            self.rates.brought(arrived.ms);
            self.arrive(&arrived.kept, arrived.body(), pool, blocks);
            if let Some(shared) = &mut self.shared {
                shared.give_back(arrived);
            }
        }
    }

    /// Takes a block that came into host memory, unless it is here already.
    fn arrive(&mut self, kept: &Kept, body: &[u8], pool: &Pool, blocks: &mut dyn Blocks) {
        let hash = kept.stored.content.hash;
        if self.host.find(hash).is_some() || pool.find(hash).is_some() {
            return;
        }
        self.make_room(pool, blocks);
        let kept = Kept {
            last_use: pool.now(),
            ..kept.clone()
        };
        let stored = kept.stored.clone();
        let slot = self.host.insert(kept).expect("room was made");
        slot_mut(&mut self.arena, self.block_bytes, slot).copy_from_slice(body);
        self.changes.push(TierChange {
            tier: Tier::Host,
            change: Change::Stored(stored),
        });
    }

    /// Whether something may change while nothing is asked for: a shared store is lost or reached again.
    pub fn must_be_watched(&self) -> bool {
        self.shared.is_some()
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
        blocks.restore_block(to, self.bytes(slot));
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
        slot_of(&self.arena, self.block_bytes, slot)
    }

    /// What changed in all tiers since the last call.
    pub fn take_changes(&mut self) -> Vec<TierChange> {
        std::mem::take(&mut self.changes)
    }

    /// What moved since the last call.
    pub fn take_moved(&mut self) -> Moved {
        std::mem::take(&mut self.moved)
    }

    /// What the drive did since the last call, if there is one.
    pub fn take_disk_moved(&mut self) -> Option<DiskMoved> {
        self.disk.as_mut().map(Disk::take_moved)
    }

    /// What the shared store did since the last call, if there is one.
    pub fn take_shared_moved(&mut self) -> Option<SharedMoved> {
        self.shared.as_mut().map(SharedTier::take_moved)
    }

    /// The shared tier, if there is one.
    pub fn shared(&self) -> Option<&SharedTier> {
        self.shared.as_ref()
    }

    /// Blocks on the disk.
    pub fn disk_blocks(&self) -> usize {
        self.disk.as_ref().map_or(0, |disk| disk.index().len())
    }

    /// Blocks that host memory has room for.
    pub fn host_capacity(&self) -> usize {
        self.arena.len() / self.block_bytes - 1
    }

    /// Blocks that the disk has room for.
    pub fn disk_capacity(&self) -> usize {
        self.disk.as_ref().map_or(0, Disk::capacity)
    }

    /// Bytes of a block.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Blocks in host memory.
    pub fn host_blocks(&self) -> usize {
        self.host.len()
    }

    /// Adds what the tiers hold to what the pool holds, a parent before its children. Blocks whose
    /// parents are nowhere are left out: no chain leads to them.
    pub fn snapshot(&self, device: Vec<Vec<Stored>>) -> Vec<(Tier, Vec<Stored>)> {
        let above = device.iter().flatten().map(|s| s.content.hash).collect();
        let named = |tier| move |stored| (hash_of(stored), stored, tier);
        let host = self.host.all().map(named(Tier::Host));
        let disk = self.disk.iter().flat_map(|disk| disk.index().all());
        let shared = self.shared.iter().flat_map(|shared| shared.told().all());
        let all = host.chain(disk.map(named(Tier::Disk)));
        let below = runs::of(&above, all.chain(shared.map(named(Tier::Shared))));
        let device = device.into_iter().map(|run| (Tier::Device, run));
        device.chain(below).collect()
    }

    /// Panics if the structure contradicts itself. For tests, after every step.
    pub fn check_integrity(&self) {
        self.host.check_integrity();
        if let Some(disk) = &self.disk {
            disk.index().check_integrity();
        }
        if let Some(shared) = &self.shared {
            shared.told().check_integrity();
        }
        assert!(!self.host.is_full(), "one slot is kept free");
    }
}

fn hash_of(stored: &Stored) -> BlockHash {
    stored.content.hash
}

fn slot_of(arena: &[u8], block_bytes: usize, slot: Slot) -> &[u8] {
    let start = slot.0 as usize * block_bytes;
    &arena[start..start + block_bytes]
}

fn slot_mut(arena: &mut [u8], block_bytes: usize, slot: Slot) -> &mut [u8] {
    let start = slot.0 as usize * block_bytes;
    &mut arena[start..start + block_bytes]
}

#[cfg(test)]
mod tests;
