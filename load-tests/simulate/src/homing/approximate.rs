//! What does a node without events probably hold?
//!
//! What was sent there, newest use last, up to its capacity; corrected by what the node reports: a
//! request that read fewer cached tokens than it was credited with says that the rest is gone.
//! The same changes go to the real index as events would.

use std::collections::{BTreeMap, HashMap};

/// The blocks believed to be on one node, in order of use.
#[derive(Debug)]
pub(super) struct Approximate {
    capacity: usize,
    clock: u64,
    used: HashMap<u32, u64>,
    order: BTreeMap<u64, u32>,
}

impl Approximate {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            capacity,
            clock: 0,
            used: HashMap::new(),
            order: BTreeMap::new(),
        }
    }

    /// A prompt was computed there. Returns the blocks that are new, as a place in the path, and
    /// those that had to go.
    pub(super) fn touch(&mut self, path: &[u32]) -> (usize, Vec<u32>) {
        let path = &path[..path.len().min(self.capacity)];
        let from = path.partition_point(|block| self.used.contains_key(block));
        // From the end, so that the beginning is the last to go.
        for block in path.iter().rev() {
            self.clock += 1;
            if let Some(before) = self.used.insert(*block, self.clock) {
                self.order.remove(&before);
            }
            self.order.insert(self.clock, *block);
        }
        let mut gone = Vec::new();
        while self.used.len() > self.capacity {
            let Some((_, oldest)) = self.order.pop_first() else {
                break;
            };
            self.used.remove(&oldest);
            gone.push(oldest);
        }
        (from, gone)
    }

    /// Blocks of a path that are not there after all. Returns those that were believed to be.
    pub(super) fn forget(&mut self, blocks: &[u32]) -> Vec<u32> {
        let mut gone = Vec::new();
        for block in blocks {
            if let Some(at) = self.used.remove(block) {
                self.order.remove(&at);
                gone.push(*block);
            }
        }
        gone
    }
}
