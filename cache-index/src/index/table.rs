//! Which nodes hold a key, over all shards?
//!
//! Readers get a published snapshot: a tree of two levels over the shards, which they keep for one
//! lookup, without a lock. The writer changes single words in place, and exchanges a shard that has
//! no room left (or much too much) for a fresh one: two short arrays are copied and one pointer is
//! swapped. A reader that still has the old shard sees it as it was when it was exchanged, which is
//! after its lookup began. Freed memory goes back to the allocator with the last such reader.
//! A thousand shards keep the pause of an exchange short: at ten million keys one has 10,000.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use arc_swap::ArcSwap;

use super::shard::{NODES_MAX, Shard, Tag, Usage, Write};
use crate::ids::NodeId;

/// Shards in a group, groups, and the bits of a key that choose among each.
const FAN: usize = 32;
const FAN_BITS: u32 = 5;
const SHARDS: usize = FAN * FAN;
/// First keys that are told apart by hints: 16 KiB, for more prompts than are hot at a time.
const HINTS: usize = 4096;

/// What lookups read.
#[derive(Clone)]
pub(super) struct Snapshot {
    groups: [Arc<[Shard; FAN]>; FAN],
    /// Words in a shard's sets: 1, 2, 4, 8 or 16.
    set_words: usize,
    /// The node of each number; none where it is free.
    pub(super) nodes: Arc<[Option<Arc<Shown>>]>,
    /// Where chains that begin with a key last lost a node; written by lookups. Keys share hints.
    hints: Arc<[AtomicU32]>,
}

/// A node as lookups see it.
pub(super) struct Shown {
    pub(super) id: NodeId,
    pub(super) block_tokens: AtomicUsize,
}

impl Snapshot {
    /// The shard of a key.
    pub(super) fn shard(&self, key: u64) -> &Shard {
        let at = shard_of(key);
        &self.groups[at / FAN][at % FAN]
    }

    /// Where chains that begin with this key tend to lose nodes; 0 where nothing is known.
    pub(super) fn hint(&self, key: u64) -> usize {
        self.hints[hint_of(key)].load(Ordering::Relaxed) as usize
    }

    pub(super) fn set_hint(&self, key: u64, place: usize) {
        let place = u32::try_from(place).unwrap_or(0);
        self.hints[hint_of(key)].store(place, Ordering::Relaxed);
    }

    pub(super) fn set_words(&self) -> usize {
        self.set_words
    }
}

/// The writer's side.
pub(super) struct Table {
    published: Arc<ArcSwap<Snapshot>>,
    /// The shards that are published.
    shards: Vec<Shard>,
    usage: Vec<Usage>,
    set_words: usize,
    /// Keys with a holder.
    live: usize,
}

impl Table {
    /// A table without keys, with room for the first 64 nodes.
    pub(super) fn new() -> Self {
        let empty = Shard::empty(1);
        let group = Arc::new(std::array::from_fn(|_| empty.clone()));
        let snapshot = Snapshot {
            groups: std::array::from_fn(|_| Arc::clone(&group)),
            set_words: 1,
            nodes: Arc::from([]),
            hints: (0..HINTS).map(|_| AtomicU32::new(0)).collect(),
        };
        Self {
            published: Arc::new(ArcSwap::from_pointee(snapshot)),
            shards: vec![empty; SHARDS],
            usage: vec![Usage::default(); SHARDS],
            set_words: 1,
            live: 0,
        }
    }

    /// Where lookups find the snapshot.
    pub(super) fn published(&self) -> Arc<ArcSwap<Snapshot>> {
        Arc::clone(&self.published)
    }

    /// Keys with a holder.
    pub(super) fn live(&self) -> usize {
        self.live
    }

    /// Makes a node a holder of a key.
    pub(super) fn add(&mut self, key: u64, node: usize) -> Write {
        let at = shard_of(key);
        let mut write = self.shards[at].add(key, node, &mut self.usage[at]);
        if write == Write::NoRoom {
            self.rebuild(at);
            write = self.shards[at].add(key, node, &mut self.usage[at]);
        }
        self.live += usize::from(write == Write::First);
        write
    }

    /// Some of the memory where a key is looked for first.
    pub(super) fn peek(&self, key: u64) -> u64 {
        self.shards[shard_of(key)].peek(key)
    }

    /// Makes a node no holder of a key.
    pub(super) fn remove(&mut self, key: u64, node: usize) {
        let at = shard_of(key);
        if self.shards[at].remove(key, node, &mut self.usage[at]) == Write::Last {
            self.live -= 1;
            if self.shards[at].is_oversized(self.usage[at]) {
                self.rebuild(at);
            }
        }
    }

    /// Shows lookups other nodes; all of them must have room ([`Table::widen`]).
    pub(super) fn show(&self, nodes: Vec<Option<Arc<Shown>>>) {
        let before = self.published.load_full();
        self.published.store(Arc::new(Snapshot {
            nodes: nodes.into(),
            ..(*before).clone()
        }));
    }

    /// Sees to it that sets have a bit for so many nodes.
    pub(super) fn widen(&mut self, nodes: usize) {
        assert!(nodes <= NODES_MAX, "{nodes} nodes");
        let wanted = nodes.div_ceil(64).next_power_of_two();
        if wanted <= self.set_words {
            return;
        }
        self.set_words = wanted;
        for at in 0..SHARDS {
            (self.shards[at], self.usage[at]) = self.shards[at].rebuilt(self.usage[at], wanted);
        }
        let group = |group: usize| {
            Arc::new(std::array::from_fn(|at| {
                self.shards[group * FAN + at].clone()
            }))
        };
        let before = self.published.load_full();
        self.published.store(Arc::new(Snapshot {
            groups: std::array::from_fn(group),
            set_words: wanted,
            ..(*before).clone()
        }));
    }

    /// Exchanges a shard for one with the right room.
    fn rebuild(&mut self, at: usize) {
        (self.shards[at], self.usage[at]) = self.shards[at].rebuilt(self.usage[at], self.set_words);
        let mut snapshot = (*self.published.load_full()).clone();
        let mut group = (*snapshot.groups[at / FAN]).clone();
        group[at % FAN] = self.shards[at].clone();
        snapshot.groups[at / FAN] = Arc::new(group);
        self.published.store(Arc::new(snapshot));
    }

    /// All keys of each node as far as they are kept, by looking at every word; panics where the
    /// counts are off. For integrity checks.
    pub(super) fn recount(&self) -> Vec<Vec<(usize, Tag)>> {
        let mut held = vec![Vec::new(); NODES_MAX];
        let mut live = 0;
        let snapshot = self.published.load();
        for (at, (shard, usage)) in self.shards.iter().zip(&self.usage).enumerate() {
            let mut last = None;
            let mut keys = 0;
            shard.for_each(|tag, node| {
                keys += usize::from(last != Some(tag));
                last = Some(tag);
                held[node].push((at, tag));
            });
            assert_eq!(keys, usage.live, "keys of shard {at}");
            live += keys;
            let seen = &snapshot.groups[at / FAN][at % FAN];
            assert!(
                seen.is_same(shard),
                "shard {at} is not the one that is published"
            );
        }
        assert_eq!(live, self.live, "keys in all");
        held
    }

    /// What [`Table::recount`] says of a key.
    pub(super) fn kept(key: u64) -> (usize, Tag) {
        (shard_of(key), Tag::of(key))
    }
}

/// The top bits of a key.
fn shard_of(key: u64) -> usize {
    usize::try_from(key >> (64 - 2 * FAN_BITS)).expect("ten bits")
}

/// Which hint is a key's.
fn hint_of(key: u64) -> usize {
    usize::try_from(key % HINTS as u64).expect("below the number of hints")
}
