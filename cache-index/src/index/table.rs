//! Which nodes hold a block, for readers that never wait?
//!
//! An open-addressed hash table of atomic words. A slot is the block's 64-bit key followed by one
//! bit for each node. There is one writer at a time (the index sees to that) and any number of
//! readers: a reader sees each slot as it was at some instant, which is all that an overlap needs,
//! since events are in flight anyway.
//! A slot keeps its key for the life of the table, even with no bit left: a reader must never meet
//! a slot that changes its key under it. The writer builds a fresh table when too many slots are
//! taken, and publishes it whole.
//! Keys are the first 64 bits of a keyed hash, so they are spread evenly as they are.

use std::sync::atomic::{AtomicU64, Ordering};

/// Smallest number of slots.
const CAPACITY_MIN: usize = 1024;

/// Bits in a word of the node set.
const WORD_BITS: usize = 64;

/// Nodes that the table can tell apart: 16 words, so that a lookup's state stays on the stack.
pub(super) const NODES_MAX: usize = WORDS_MAX * WORD_BITS;
const WORDS_MAX: usize = 16;

/// The key of a slot that was never taken. A block whose hash begins with 64 zero bits is moved to
/// the next key.
const EMPTY: u64 = 0;

/// What a write did, for the writer's own counts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Write {
    /// Nothing: the bit was as wanted.
    Unchanged,
    /// The bit changed in a slot that other nodes share.
    Shared,
    /// It was the first bit of a slot that had its key already.
    Revived,
    /// It was the first bit of a fresh slot.
    Fresh,
    /// It was the last bit of its slot.
    Emptied,
}

/// The table; its capacity never changes.
pub(super) struct Table {
    /// Slots of one key and `words` words of bits.
    slots: Box<[AtomicU64]>,
    words: usize,
    capacity: usize,
}

/// Slots in use, kept by the writer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Occupancy {
    /// Slots with a key.
    pub(super) taken: usize,
    /// Of these, the ones with a bit.
    pub(super) live: usize,
}

impl Occupancy {
    /// Follows a write.
    pub(super) fn note(&mut self, write: Write) {
        match write {
            Write::Unchanged | Write::Shared => {}
            Write::Revived => self.live += 1,
            Write::Fresh => {
                self.taken += 1;
                self.live += 1;
            }
            Write::Emptied => self.live -= 1,
        }
    }
}

impl Table {
    /// A table with room for twice `live` keys and for `nodes` nodes.
    pub(super) fn new(live: usize, nodes: usize) -> Self {
        let capacity = live.saturating_mul(2).next_power_of_two().max(CAPACITY_MIN);
        let words = nodes.div_ceil(WORD_BITS).clamp(1, WORDS_MAX);
        let slots = (0..capacity * (1 + words))
            .map(|_| AtomicU64::new(0))
            .collect();
        Self {
            slots,
            words,
            capacity,
        }
    }

    /// Nodes it has bits for.
    pub(super) fn nodes(&self) -> usize {
        self.words * WORD_BITS
    }

    /// Whether `more` fresh keys fit: three quarters of the slots may be taken, which keeps probe
    /// sequences short and guarantees that each of them ends.
    pub(super) fn has_room(&self, occupancy: Occupancy, more: usize) -> bool {
        occupancy.taken.saturating_add(more) <= self.capacity / 4 * 3
    }

    /// Whether so few keys are left that a smaller table would do. Far enough below what
    /// [`Table::new`] starts with that table sizes do not swing.
    pub(super) fn is_oversized(&self, occupancy: Occupancy) -> bool {
        self.capacity > CAPACITY_MIN && occupancy.live < self.capacity / 16
    }

    /// Sets a node's bit. The caller has checked the room.
    pub(super) fn set(&self, key: u64, node: usize) -> Write {
        let (word, bit) = place(node);
        match self.find(key) {
            Ok(slot) => {
                let was_dead = self.is_dead(slot);
                let before = self.slots[slot + 1 + word].fetch_or(bit, Ordering::Release);
                match (before & bit != 0, was_dead) {
                    (true, _) => Write::Unchanged,
                    (false, true) => Write::Revived,
                    (false, false) => Write::Shared,
                }
            }
            Err(slot) => {
                // Bits first: a reader that sees the key sees them.
                self.slots[slot + 1 + word].store(bit, Ordering::Relaxed);
                self.slots[slot].store(normal(key), Ordering::Release);
                Write::Fresh
            }
        }
    }

    /// Clears a node's bit.
    pub(super) fn clear(&self, key: u64, node: usize) -> Write {
        let (word, bit) = place(node);
        let Ok(slot) = self.find(key) else {
            return Write::Unchanged;
        };
        let before = self.slots[slot + 1 + word].fetch_and(!bit, Ordering::Release);
        if before & bit == 0 {
            Write::Unchanged
        } else if self.is_dead(slot) {
            Write::Emptied
        } else {
            Write::Shared
        }
    }

    /// Whether a node's bit is set.
    pub(super) fn has(&self, key: u64, node: usize) -> bool {
        let (word, bit) = place(node);
        self.find(key)
            .is_ok_and(|slot| self.slots[slot + 1 + word].load(Ordering::Acquire) & bit != 0)
    }

    /// Calls `visit(node, run)` for each node that holds leading keys, with their number.
    pub(super) fn leading_runs(
        &self,
        keys: impl Iterator<Item = u64>,
        mut visit: impl FnMut(usize, usize),
    ) {
        let mut alive = [0_u64; WORDS_MAX];
        let alive = &mut alive[..self.words];
        let mut depth = 0;
        for key in keys {
            let slot = self.find(key).ok();
            let mut any = 0;
            for (word, left) in alive.iter_mut().enumerate() {
                let held = slot.map_or(0, |slot| {
                    self.slots[slot + 1 + word].load(Ordering::Acquire)
                });
                if depth == 0 {
                    *left = held;
                } else {
                    each_bit(word, *left & !held, |node| visit(node, depth));
                    *left &= held;
                }
                any |= *left;
            }
            if any == 0 {
                return;
            }
            depth += 1;
        }
        for (word, left) in alive.iter().enumerate() {
            each_bit(word, *left, |node| visit(node, depth));
        }
    }

    /// A new table with the same content and room for `more` keys and `nodes` nodes.
    pub(super) fn rebuilt(&self, live: usize, more: usize, nodes: usize) -> (Self, Occupancy) {
        let fresh = Self::new(live.saturating_add(more), nodes.max(self.nodes()));
        let mut occupancy = Occupancy::default();
        for slot in self.slots.chunks_exact(1 + self.words) {
            let key = slot[0].load(Ordering::Relaxed);
            for (word, bits) in slot[1..].iter().enumerate() {
                each_bit(word, bits.load(Ordering::Relaxed), |node| {
                    occupancy.note(fresh.set(key, node));
                });
            }
        }
        (fresh, occupancy)
    }

    /// Counts by looking at every slot, for integrity checks: occupancy, and bits of each node.
    pub(super) fn recount(&self) -> (Occupancy, Vec<usize>) {
        let mut occupancy = Occupancy::default();
        let mut held = vec![0; self.nodes()];
        for slot in self.slots.chunks_exact(1 + self.words) {
            let taken = slot[0].load(Ordering::Relaxed) != EMPTY;
            let mut live = false;
            for (word, bits) in slot[1..].iter().enumerate() {
                let bits = bits.load(Ordering::Relaxed);
                live |= bits != 0;
                each_bit(word, bits, |node| held[node] += 1);
            }
            assert!(taken || !live, "bits in a slot without a key");
            occupancy.taken += usize::from(taken);
            occupancy.live += usize::from(live);
        }
        (occupancy, held)
    }

    /// The offset of the key's slot, or of the empty slot where it belongs.
    fn find(&self, key: u64) -> Result<usize, usize> {
        let key = normal(key);
        let stride = 1 + self.words;
        // The truncation keeps the low bits, which is what the mask keeps as well.
        #[expect(
            clippy::cast_possible_truncation,
            reason = "masked to the capacity anyway"
        )]
        let mut at = key as usize & (self.capacity - 1);
        loop {
            match self.slots[at * stride].load(Ordering::Acquire) {
                found if found == key => return Ok(at * stride),
                EMPTY => return Err(at * stride),
                _ => at = (at + 1) & (self.capacity - 1),
            }
        }
    }

    fn is_dead(&self, slot: usize) -> bool {
        self.slots[slot + 1..=slot + self.words]
            .iter()
            .all(|bits| bits.load(Ordering::Relaxed) == 0)
    }
}

fn normal(key: u64) -> u64 {
    key.max(EMPTY + 1)
}

/// The word and the bit of a node.
fn place(node: usize) -> (usize, u64) {
    (node / WORD_BITS, 1 << (node % WORD_BITS))
}

/// Calls `visit` for each node whose bit is set in the word at this position.
fn each_bit(word: usize, bits: u64, mut visit: impl FnMut(usize)) {
    let mut rest = bits;
    while rest != 0 {
        visit(word * WORD_BITS + rest.trailing_zeros() as usize);
        rest &= rest - 1;
    }
}
