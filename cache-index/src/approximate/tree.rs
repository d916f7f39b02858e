//! Which chains has one node been sent, by when they were last used?
//!
//! A tree of runs: blocks that follow one another and were last used by the same request. A run is
//! found by its first key, since a key covers all blocks before it. What was used later never
//! follows what was used earlier, so the least recently used end of a chain is the end of a run that
//! nothing follows.

use std::collections::{BTreeSet, HashMap};

use crate::block::BlockHash;

const NOTHING: usize = usize::MAX;

struct Run {
    keys: Vec<u64>,
    /// The run before it, or `NOTHING`.
    before: usize,
    /// Runs after it.
    after: usize,
    used: u64,
}

/// What a node was sent.
#[derive(Default)]
pub(super) struct Tree {
    runs: Vec<Run>,
    free: Vec<usize>,
    /// Runs by their first key.
    heads: HashMap<u64, usize>,
    /// Runs that nothing follows, by when they were used.
    ends: BTreeSet<(u64, usize)>,
    blocks: usize,
}

impl Tree {
    /// Blocks in all runs.
    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Leading blocks of a chain that are known.
    pub(super) fn overlap(&self, chain: &[BlockHash]) -> usize {
        let mut known = 0;
        while let Some((_, common)) = self.next(&chain[known..]) {
            known += common.0;
            if !common.1 {
                break;
            }
        }
        known
    }

    /// When the block at this place of a chain was last used; none where it is not known.
    pub(super) fn used(&self, chain: &[BlockHash], place: usize) -> Option<u64> {
        let mut known = 0;
        while let Some((run, common)) = self.next(&chain[known..]) {
            known += common.0;
            if known > place {
                return Some(self.runs[run].used);
            }
            if !common.1 {
                break;
            }
        }
        None
    }

    /// Takes a chain in as used now, which is later than ever before; returns how many blocks of it
    /// are new.
    pub(super) fn insert(&mut self, chain: &[BlockHash], now: u64) -> usize {
        let mut known = 0;
        let mut last = NOTHING;
        while let Some((run, (common, is_whole))) = self.next(&chain[known..]) {
            last = if is_whole {
                run
            } else {
                self.split(run, common)
            };
            self.touch(last, now);
            known += common;
        }
        let rest = &chain[known..];
        if let Some(first) = rest.first() {
            let run = Run {
                keys: rest.iter().map(|block| block.short()).collect(),
                before: last,
                after: 0,
                used: now,
            };
            let at = self.place(run);
            self.heads.insert(first.short(), at);
            self.ends.insert((now, at));
            self.grow(last);
            self.blocks += rest.len();
        }
        rest.len()
    }

    /// Drops so many of the least recently used blocks, as far as there are as many; returns how
    /// many.
    pub(super) fn evict(&mut self, wanted: usize) -> usize {
        let mut left = wanted.min(self.blocks);
        let dropped = left;
        while left > 0 {
            let Some((_, oldest)) = self.ends.first().copied() else {
                break;
            };
            let length = self.runs[oldest].keys.len();
            if length > left {
                let keys = &mut self.runs[oldest].keys;
                keys.truncate(length - left);
                keys.shrink_to_fit();
                self.blocks -= left;
                left = 0;
            } else {
                self.drop_end(oldest);
                left -= length;
            }
        }
        dropped
    }

    /// Drops what was last used then or before; returns how many blocks.
    pub(super) fn drop_older(&mut self, used: u64) -> usize {
        let before = self.blocks;
        while let Some((at, oldest)) = self.ends.first().copied()
            && at <= used
        {
            self.drop_end(oldest);
        }
        before - self.blocks
    }

    /// The run that begins with a chain's first key, how many keys they have in common, and whether
    /// that is the whole run.
    fn next(&self, chain: &[BlockHash]) -> Option<(usize, (usize, bool))> {
        let run = *self.heads.get(&chain.first()?.short())?;
        let keys = &self.runs[run].keys;
        let length = keys.len().min(chain.len());
        // Where two chains agree they agree on everything before: the first place that differs.
        let (mut same, mut differs) = (1, length);
        if keys[length - 1] == chain[length - 1].short() {
            same = length;
        }
        while same < differs {
            let middle = usize::midpoint(same, differs);
            if keys[middle] == chain[middle].short() {
                same = middle + 1;
            } else {
                differs = middle;
            }
        }
        Some((run, (same, same == keys.len())))
    }

    /// Cuts a run in two, and returns the front part. The rear part keeps the number, since what
    /// follows it knows it by that.
    fn split(&mut self, rear: usize, length: usize) -> usize {
        let run = &mut self.runs[rear];
        let keys = run.keys.split_off(length);
        let front = Run {
            keys: std::mem::replace(&mut run.keys, keys),
            before: run.before,
            after: 1,
            used: run.used,
        };
        let first = (front.keys[0], run.keys[0]);
        let at = self.place(front);
        self.runs[at].keys.shrink_to_fit();
        self.runs[rear].before = at;
        self.heads.insert(first.0, at);
        self.heads.insert(first.1, rear);
        at
    }

    fn touch(&mut self, run: usize, now: u64) {
        let used = std::mem::replace(&mut self.runs[run].used, now);
        if self.runs[run].after == 0 {
            self.ends.remove(&(used, run));
            self.ends.insert((now, run));
        }
    }

    /// A run has one more after it.
    fn grow(&mut self, run: usize) {
        if let Some(before) = self.runs.get_mut(run) {
            before.after += 1;
            self.ends.remove(&(before.used, run));
        }
    }

    fn drop_end(&mut self, run: usize) {
        let gone = &mut self.runs[run];
        let keys = std::mem::take(&mut gone.keys);
        let (used, before) = (gone.used, gone.before);
        self.ends.remove(&(used, run));
        self.heads.remove(&keys[0]);
        self.free.push(run);
        self.blocks -= keys.len();
        if let Some(parent) = self.runs.get_mut(before) {
            parent.after -= 1;
            if parent.after == 0 {
                self.ends.insert((parent.used, before));
            }
        }
    }

    fn place(&mut self, run: Run) -> usize {
        match self.free.pop() {
            Some(free) => {
                self.runs[free] = run;
                free
            }
            None => {
                self.runs.push(run);
                self.runs.len() - 1
            }
        }
    }

    /// Panics where something does not add up. For tests.
    pub(super) fn check_integrity(&self) {
        let mut blocks = 0;
        let mut after = HashMap::new();
        for (first, run) in &self.heads {
            let run = &self.runs[*run];
            assert_eq!(run.keys.first(), Some(first), "a run by its first key");
            blocks += run.keys.len();
            *after.entry(run.before).or_insert(0) += 1;
            if let Some(before) = self.runs.get(run.before) {
                assert!(before.used >= run.used, "used after what it follows");
                assert!(!before.keys.is_empty(), "after a run that is gone");
            }
        }
        assert_eq!(blocks, self.blocks, "blocks in all runs");
        for run in self.heads.values() {
            let counted = after.get(run).copied().unwrap_or(0);
            assert_eq!(self.runs[*run].after, counted, "runs after a run");
            let is_end = self.ends.contains(&(self.runs[*run].used, *run));
            assert_eq!(is_end, counted == 0, "runs that nothing follows");
        }
        assert_eq!(
            self.heads.len() + self.free.len(),
            self.runs.len(),
            "every run has a place"
        );
    }
}
