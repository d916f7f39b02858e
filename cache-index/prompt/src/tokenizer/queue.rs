//! Which merge comes next? Two queues of possible merges, each the index of a left symbol under the
//! rank of its merge with the next. An index is stale once its symbol's merge has another rank;
//! whoever takes it looks.
//!
//! Byte-level vocabularies give each pair a rank of its own, so that many symbols wait under one
//! rank and nothing new comes to it while they are visited: a list per rank. A heap of all of them
//! would touch memory at random for each. SentencePiece ranks tokens by a score that several may
//! share, down to all of them in some converted files: there it takes the heap.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use foldhash::fast::FixedState;
use hashbrown::HashMap;

/// Takes in possible merges.
pub(super) trait Pending {
    /// The symbol at `at` may be merged with its next, at this rank.
    fn push(&mut self, rank: u32, at: u32);
}

/// Only the ranks are in the heap, and the symbols of one rank are visited in order.
#[derive(Debug, Default)]
pub(super) struct ByRank {
    ranks: BinaryHeap<Reverse<u32>>,
    by_rank: HashMap<u32, Vec<u32>, FixedState>,
    /// Emptied lists, kept for their memory.
    spare: Vec<Vec<u32>>,
}

impl Pending for ByRank {
    fn push(&mut self, rank: u32, at: u32) {
        let list = self.by_rank.entry(rank).or_insert_with(|| {
            self.ranks.push(Reverse(rank));
            self.spare.pop().unwrap_or_default()
        });
        list.push(at);
    }
}

impl ByRank {
    /// The lowest rank and its symbols, leftmost first.
    pub(super) fn pop(&mut self) -> Option<(u32, Vec<u32>)> {
        let Reverse(rank) = self.ranks.pop()?;
        let mut list = self.by_rank.remove(&rank)?;
        // Runs in order already: the sort merges them.
        list.sort();
        Some((rank, list))
    }

    pub(super) fn has_below(&self, rank: u32) -> bool {
        self.ranks
            .peek()
            .is_some_and(|Reverse(lowest)| *lowest < rank)
    }

    pub(super) fn recycle(&mut self, mut list: Vec<u32>) {
        list.clear();
        self.spare.push(list);
    }
}

/// By rank, then from left to right.
#[derive(Debug, Default)]
pub(super) struct ByPlace(BinaryHeap<Reverse<(u32, u32)>>);

impl Pending for ByPlace {
    fn push(&mut self, rank: u32, at: u32) {
        self.0.push(Reverse((rank, at)));
    }
}

impl ByPlace {
    /// The lowest rank, leftmost.
    pub(super) fn pop(&mut self) -> Option<(u32, u32)> {
        self.0.pop().map(|Reverse(next)| next)
    }
}
