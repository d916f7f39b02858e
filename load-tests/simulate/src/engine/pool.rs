//! Which blocks does a node's KV pool hold, and which one goes first?
//!
//! Blocks of running requests are pinned. The others stay as a cache, least recently used first to
//! go. A path is always used from its root to its end and let go of from its end to its root, so a
//! block is never older than one that follows it: eviction takes leaves first, and what is held of
//! a path is always a prefix of it. Blocks of a prefill under way and of answers have no name yet:
//! they are only counted ([`Pool::reserve`]).

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// No slot.
const NIL: u32 = u32::MAX;

/// Spreads block numbers, which are consecutive, over a table.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u32(&mut self, value: u32) {
        self.write_u64(u64::from(value));
    }

    fn write_u64(&mut self, value: u64) {
        // The golden ratio's bits; the rotation brings the mixed high bits down to where a table
        // takes its index from.
        self.0 = (self.0 ^ value)
            .wrapping_mul(0x9E37_79B9_7F4A_7C15)
            .rotate_left(29);
    }
}

/// A map by block or by another small number.
pub(crate) type NumberMap<K, V> = HashMap<K, V, BuildHasherDefault<Spread>>;

#[derive(Clone, Copy, Debug)]
struct Slot {
    block: u32,
    newer: u32,
    older: u32,
    pins: u32,
}

/// What the use of a path has changed.
#[derive(Clone, Debug)]
pub(crate) struct Touched {
    /// `path[from..to]` is new.
    pub(crate) from: usize,
    /// One past the last.
    pub(crate) to: usize,
    /// These had to go.
    pub(crate) removed: Vec<u32>,
}

/// The blocks of one memory, least recently used first to go.
#[derive(Clone, Debug)]
pub(crate) struct Pool {
    capacity: usize,
    by_block: NumberMap<u32, u32>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    newest: u32,
    oldest: u32,
    pinned: usize,
    reserved: usize,
}

impl Pool {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            capacity,
            by_block: NumberMap::default(),
            slots: Vec::new(),
            free: Vec::new(),
            newest: NIL,
            oldest: NIL,
            pinned: 0,
            reserved: 0,
        }
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Leading blocks of this path that are held.
    pub(crate) fn overlap(&self, path: &[u32]) -> usize {
        path.partition_point(|block| self.by_block.contains_key(block))
    }

    /// Blocks that running requests hold.
    pub(crate) fn in_use(&self) -> usize {
        self.pinned + self.reserved
    }

    /// Blocks that could be had by evicting all that is not in use; below zero where one request
    /// alone is larger than the pool.
    pub(crate) fn available(&self) -> i64 {
        self.capacity as i64 - self.in_use() as i64
    }

    /// Counts blocks that have no name yet.
    pub(crate) fn reserve(&mut self, blocks: usize) {
        self.reserved += blocks;
    }

    /// Takes back what [`Pool::reserve`] counted.
    pub(crate) fn unreserve(&mut self, blocks: usize) {
        assert!(
            self.reserved >= blocks,
            "{blocks} blocks given back of {} reserved",
            self.reserved
        );
        self.reserved -= blocks;
    }

    /// Evicts until `blocks` more fit, or until nothing is left to evict.
    pub(crate) fn make_room(&mut self, blocks: usize, removed: &mut Vec<u32>) {
        while self.by_block.len() + self.reserved + blocks > self.capacity && self.oldest != NIL {
            removed.push(self.evict_oldest());
        }
    }

    /// Evicts all that no request holds.
    pub(crate) fn evict_all(&mut self, removed: &mut Vec<u32>) {
        while self.oldest != NIL {
            removed.push(self.evict_oldest());
        }
    }

    /// Pins blocks that are held; they must be.
    pub(crate) fn pin(&mut self, held: &[u32]) -> Vec<u32> {
        held.iter()
            .map(|block| {
                let slot = self.by_block[block];
                self.pin_slot(slot);
                slot
            })
            .collect()
    }

    /// Adds blocks, pinned from the start.
    pub(crate) fn insert_pinned(&mut self, blocks: &[u32], pins: &mut Vec<u32>) {
        for &block in blocks {
            let slot = match self.by_block.get(&block) {
                Some(&slot) => {
                    self.pin_slot(slot);
                    slot
                }
                None => {
                    let slot = self.new_slot(block);
                    self.slots[slot as usize].pins = 1;
                    self.pinned += 1;
                    slot
                }
            };
            pins.push(slot);
        }
    }

    /// Lets go of a path's pins, its end first.
    pub(crate) fn unpin(&mut self, pins: &[u32]) {
        for &slot in pins.iter().rev() {
            let entry = &mut self.slots[slot as usize];
            assert!(entry.pins > 0, "block {} unpinned too often", entry.block);
            entry.pins -= 1;
            if entry.pins == 0 {
                self.pinned -= 1;
                self.link_newest(slot);
            }
        }
    }

    /// Uses a whole path without pinning it: what an index that learns from dispatches does, and a
    /// tier that is written to. At most as many blocks as fit.
    pub(crate) fn touch(&mut self, path: &[u32]) -> Touched {
        let path = &path[..path.len().min(self.capacity)];
        let from = self.overlap(path);
        let mut slots = Vec::with_capacity(path.len());
        for block in &path[..from] {
            let slot = self.by_block[block];
            // Out of the list, so that room is not made of them.
            self.unlink(slot);
            slots.push(slot);
        }
        let mut removed = Vec::new();
        self.make_room(path.len() - from, &mut removed);
        slots.extend(path[from..].iter().map(|block| self.new_slot(*block)));
        for slot in slots.into_iter().rev() {
            self.link_newest(slot);
        }
        Touched {
            from,
            to: path.len(),
            removed,
        }
    }

    fn pin_slot(&mut self, slot: u32) {
        if self.slots[slot as usize].pins == 0 {
            self.unlink(slot);
            self.pinned += 1;
        }
        self.slots[slot as usize].pins += 1;
    }

    fn evict_oldest(&mut self) -> u32 {
        let slot = self.oldest;
        self.unlink(slot);
        let block = self.slots[slot as usize].block;
        self.by_block.remove(&block);
        self.free.push(slot);
        block
    }

    fn new_slot(&mut self, block: u32) -> u32 {
        let entry = Slot {
            block,
            newer: NIL,
            older: NIL,
            pins: 0,
        };
        let slot = match self.free.pop() {
            Some(slot) => {
                self.slots[slot as usize] = entry;
                slot
            }
            None => {
                self.slots.push(entry);
                self.slots.len() as u32 - 1
            }
        };
        self.by_block.insert(block, slot);
        slot
    }

    fn link_newest(&mut self, slot: u32) {
        self.slots[slot as usize].newer = NIL;
        self.slots[slot as usize].older = self.newest;
        match self.newest {
            NIL => self.oldest = slot,
            newest => self.slots[newest as usize].newer = slot,
        }
        self.newest = slot;
    }

    fn unlink(&mut self, slot: u32) {
        let Slot { newer, older, .. } = self.slots[slot as usize];
        match newer {
            NIL => self.newest = older,
            newer => self.slots[newer as usize].older = older,
        }
        match older {
            NIL => self.oldest = newer,
            older => self.slots[older as usize].newer = newer,
        }
    }
}
