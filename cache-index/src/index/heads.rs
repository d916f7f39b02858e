//! Which run begins with a key, for readers that never wait?
//!
//! Open addressing over words: 32 bits of the key and the number of a run, which says whether it
//! really begins with that key. A run's number is written and read in one go; a vacated word may be
//! taken again at once. The writer exchanges a table that has no room left for a fresh one, which
//! readers find in the next snapshot; one that still has the old table sees it as it was when it was
//! exchanged, which is after its lookup began.
//! There is one word for each run, not for each block, so this is small beside everything else.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Tables: the exchange of one of them is short even with millions of runs.
pub(super) const TABLES: usize = 64;
const TABLE_BITS: u32 = 6;
const SLOTS_MIN: usize = 8;

/// A word that was never taken: every search ends here.
const EMPTY: u64 = 0;
/// A word whose run is gone: a search goes on behind it.
const VACATED: u64 = 1;
/// Numbers of runs begin here.
const FIRST: u64 = 2;

/// One table.
pub(super) type Words = Arc<[AtomicU64]>;

/// All tables, kept by the writer.
pub(super) struct Heads {
    tables: [Words; TABLES],
    usage: [Usage; TABLES],
}

#[derive(Clone, Copy, Default)]
struct Usage {
    /// Words taken, vacated ones included.
    taken: usize,
    live: usize,
}

impl Heads {
    pub(super) fn new() -> Self {
        let empty: Words = Arc::from([]);
        Self {
            tables: std::array::from_fn(|_| Arc::clone(&empty)),
            usage: [Usage::default(); TABLES],
        }
    }

    /// The tables as readers see them.
    pub(super) fn tables(&self) -> [Words; TABLES] {
        self.tables.clone()
    }

    /// Runs that may begin with a key.
    pub(super) fn find(&self, key: u64) -> Matches<'_> {
        matches(&self.tables, key)
    }

    /// Adds a run under its first key; true where a table was exchanged for that.
    pub(super) fn insert(&mut self, key: u64, run: u32) -> bool {
        let at = table_of(key);
        let usage = self.usage[at];
        let is_full = (usage.taken + 1) * 4 > self.tables[at].len() * 3;
        if is_full {
            self.rebuild(at);
        }
        let words = &self.tables[at];
        let mut slot = home(tag(key), words.len());
        while words[slot].load(Ordering::Relaxed) >= FIRST {
            slot = next(slot, words.len());
        }
        let fresh = words[slot].load(Ordering::Relaxed) == EMPTY;
        self.usage[at].taken += usize::from(fresh);
        self.usage[at].live += 1;
        words[slot].store(word(key, run), Ordering::Release);
        is_full
    }

    pub(super) fn remove(&mut self, key: u64, run: u32) {
        let at = table_of(key);
        let words = &self.tables[at];
        let wanted = word(key, run);
        let mut slot = home(tag(key), words.len());
        loop {
            match words[slot].load(Ordering::Relaxed) {
                EMPTY => return,
                word if word == wanted => break,
                _ => slot = next(slot, words.len()),
            }
        }
        words[slot].store(VACATED, Ordering::Release);
        self.usage[at].live -= 1;
    }

    /// Exchanges a table for one with the right room: half of it is taken then.
    fn rebuild(&mut self, at: usize) {
        let live = self.usage[at].live;
        let slots = (live * 2 + 2).next_multiple_of(SLOTS_MIN);
        let mut words = vec![EMPTY; slots];
        for word in self.tables[at].iter() {
            let word = word.load(Ordering::Relaxed);
            if word < FIRST {
                continue;
            }
            let mut slot = home(word >> 32, slots);
            while words[slot] != EMPTY {
                slot = next(slot, slots);
            }
            words[slot] = word;
        }
        self.tables[at] = words.into_iter().map(AtomicU64::new).collect();
        self.usage[at].taken = live;
    }

    /// Runs in all tables, by looking at every word. For integrity checks.
    pub(super) fn count(&self) -> usize {
        let words = self.tables.iter().flat_map(|table| table.iter());
        words
            .filter(|word| word.load(Ordering::Relaxed) >= FIRST)
            .count()
    }
}

/// Runs that may begin with a key.
pub(super) fn matches(tables: &[Words; TABLES], key: u64) -> Matches<'_> {
    let words = &tables[table_of(key)];
    Matches {
        words,
        tag: tag(key),
        slot: home(tag(key), words.len()),
    }
}

/// The run that a search would meet first, if any; it may begin with another key.
pub(super) fn nearest(tables: &[Words; TABLES], key: u64) -> Option<u32> {
    let words = &tables[table_of(key)];
    let word = words
        .get(home(tag(key), words.len()))?
        .load(Ordering::Relaxed);
    let run = (word & u64::from(u32::MAX)).checked_sub(FIRST)?;
    u32::try_from(run).ok()
}

/// See [`matches()`].
pub(super) struct Matches<'a> {
    words: &'a [AtomicU64],
    tag: u64,
    slot: usize,
}

impl Iterator for Matches<'_> {
    type Item = u32;

    fn next(&mut self) -> Option<u32> {
        loop {
            let word = self.words.get(self.slot)?.load(Ordering::Acquire);
            if word == EMPTY {
                return None;
            }
            self.slot = next(self.slot, self.words.len());
            if word >> 32 == self.tag && word & u64::from(u32::MAX) >= FIRST {
                let run = (word & u64::from(u32::MAX)) - FIRST;
                return u32::try_from(run).ok();
            }
        }
    }
}

/// The top bits of a key. Keys are the first 64 bits of a keyed hash, so they are spread evenly.
fn table_of(key: u64) -> usize {
    usize::try_from(key >> (64 - TABLE_BITS)).expect("six bits")
}

fn word(key: u64, run: u32) -> u64 {
    (tag(key) << 32) | (u64::from(run) + FIRST)
}

/// The 32 bits below those.
fn tag(key: u64) -> u64 {
    key >> (32 - TABLE_BITS) & u64::from(u32::MAX)
}

/// Where a search begins. The order of homes is that of tags: a rebuild then reads and writes from
/// front to back.
fn home(tag: u64, slots: usize) -> usize {
    usize::try_from((tag * slots as u64) >> 32).expect("below the number of slots")
}

fn next(slot: usize, slots: usize) -> usize {
    if slot + 1 == slots { 0 } else { slot + 1 }
}
