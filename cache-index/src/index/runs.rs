//! Which keys are there, in which order, and who holds them?
//!
//! The writer's side of what [`super::view`] shows to lookups. A run begins with a key that is found
//! in [`super::heads`], and ends where nobody has stored more yet. A key that follows one in the
//! middle of a run begins a run that branches off there. So a chain is a few runs, and a place in
//! it is a run's number and a position ([`Loc`]), which stands for as long as the key does.
//! A key stays while anybody holds it or a key behind it in the same run, and while a run branches
//! off at it or behind it: there is never a run whose beginning is unknown, and no key lies at two
//! places. Keys that nobody holds are kept for that reason alone; `keys_max` bounds them.
//! Whether a holder holds all keys before one is nobody's business here: lookups go from the
//! beginning, so a removal in the middle of a chain costs no more than one at its end.
//!
//! Changes are collected and shown by [`Runs::publish`], once for each run that changed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::heads::Heads;
use super::spaces::SpaceId;
use super::spans::{Holder, Spans};
use super::view::{Keys, Published, RUNS_MAX, Shown, Snapshot, View};
use crate::block::BlockHash;

mod check;

/// Where a key lies.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct Loc {
    pub(super) run: u32,
    pub(super) at: u32,
}

/// Consecutive places.
#[derive(Clone, Copy)]
pub(super) struct Stretch {
    pub(super) first: Loc,
    pub(super) count: usize,
    /// Nobody can hold any of them yet.
    pub(super) is_new: bool,
}

impl Stretch {
    /// The place so many places behind the first.
    pub(super) fn after(&self, places: usize) -> Loc {
        Loc {
            at: self.first.at + u32::try_from(places).expect("a run's places have 32 bits"),
            ..self.first
        }
    }
}

struct Run {
    keys: Arc<Keys>,
    length: usize,
    /// Keys that some view may have shown: the room up to here is not written again.
    shown: usize,
    spans: Spans,
    space: SpaceId,
    /// Where it branches off.
    before: Option<Loc>,
    /// Runs that branch off, and blocks that end behind a key, by place.
    branches: BTreeMap<u32, u32>,
    is_dirty: bool,
}

/// All runs of an index.
pub(super) struct Runs {
    published: Arc<Published>,
    heads: Heads,
    runs: Vec<Run>,
    free: Vec<u32>,
    dirty: Vec<u32>,
    keys: usize,
    keys_max: usize,
}

impl Runs {
    /// No keys, and room for so many.
    pub(super) fn new(keys_max: usize) -> Self {
        let heads = Heads::new();
        let snapshot = Snapshot {
            tables: heads.tables(),
            nodes: Arc::from([]),
        };
        Self {
            published: Arc::new(Published::new(snapshot)),
            heads,
            runs: Vec::new(),
            free: Vec::new(),
            dirty: Vec::new(),
            keys: 0,
            keys_max,
        }
    }

    /// What lookups read.
    pub(super) fn published(&self) -> Arc<Published> {
        Arc::clone(&self.published)
    }

    /// Shows lookups other nodes.
    pub(super) fn show(&self, nodes: Vec<Shown>) {
        self.published.snapshot.store(Arc::new(Snapshot {
            tables: self.heads.tables(),
            nodes: nodes.into(),
        }));
    }

    /// Tells lookups how many tokens a node's blocks have.
    pub(super) fn show_block_tokens(&self, node: usize, tokens: usize) {
        if let Some(shown) = self.published.snapshot.load().nodes.get(node) {
            shown.block_tokens.store(tokens, Ordering::Relaxed);
        }
    }

    pub(super) fn hash(&self, loc: Loc) -> BlockHash {
        self.runs[loc.run as usize].keys.get(loc.at as usize)
    }

    pub(super) fn space(&self, loc: Loc) -> SpaceId {
        self.runs[loc.run as usize].space
    }

    pub(super) fn holds(&self, holder: Holder, loc: Loc) -> bool {
        self.runs[loc.run as usize].spans.holds(holder, loc.at)
    }

    /// Whether a holder holds any of these places.
    pub(super) fn holds_any(&self, holder: Holder, first: Loc, count: usize) -> bool {
        let spans = &self.runs[first.run as usize].spans;
        spans.holds_any(holder, first.at, first.at as usize + count)
    }

    /// Places for the first of these keys, which follow the one at `before`, or begin a chain: as
    /// many as lie together, and at least one. None where there is no room for more keys.
    pub(super) fn place(
        &mut self,
        before: Option<Loc>,
        hashes: &[BlockHash],
        space: SpaceId,
    ) -> Option<Stretch> {
        if let Some(known) = self.known(before, hashes) {
            return Some(known);
        }
        if self.keys + hashes.len() > self.keys_max {
            return None;
        }
        // Nothing follows a key that is not there, so all of these are new.
        self.keys += hashes.len();
        let first = match before {
            Some(last) if last.at as usize + 1 == self.runs[last.run as usize].length => {
                self.append(last.run, hashes);
                Loc {
                    run: last.run,
                    at: last.at + 1,
                }
            }
            _ => self.begin(before, hashes, space)?,
        };
        Some(Stretch {
            first,
            count: hashes.len(),
            is_new: true,
        })
    }

    fn known(&self, before: Option<Loc>, hashes: &[BlockHash]) -> Option<Stretch> {
        let stretch = |run: u32, at: u32| {
            let own = &self.runs[run as usize];
            let count = own.keys.common(at as usize, own.length, hashes);
            (count > 0).then_some(Stretch {
                first: Loc { run, at },
                count,
                is_new: false,
            })
        };
        let next = before.and_then(|before| stretch(before.run, before.at + 1));
        next.or_else(|| {
            let mut found = self.heads.find(hashes.first()?.short());
            found.find_map(|run| stretch(run, 0))
        })
    }

    fn append(&mut self, run: u32, hashes: &[BlockHash]) {
        let own = &mut self.runs[run as usize];
        let length = own.length + hashes.len();
        // Never over keys that a reader may still see as part of an older view.
        if own.keys.room() < length || own.shown > own.length {
            let spare = if own.length == 0 { 0 } else { length / 8 };
            let keys = Keys::with_room(length + spare);
            for at in 0..own.length {
                keys.set(at, own.keys.get(at));
            }
            own.keys = Arc::new(keys);
            own.shown = own.length;
        }
        for (at, hash) in (own.length..).zip(hashes) {
            own.keys.set(at, *hash);
        }
        own.length = length;
        self.soil(run);
    }

    fn begin(&mut self, before: Option<Loc>, hashes: &[BlockHash], space: SpaceId) -> Option<Loc> {
        let run = Run {
            keys: Arc::new(Keys::with_room(hashes.len())),
            length: 0,
            shown: 0,
            spans: Spans::default(),
            space,
            before,
            branches: BTreeMap::new(),
            is_dirty: false,
        };
        let number = match self.free.pop() {
            Some(free) => {
                self.runs[free as usize] = run;
                free
            }
            None if self.runs.len() >= RUNS_MAX => return None,
            None => {
                self.runs.push(run);
                u32::try_from(self.runs.len() - 1).expect("limited by RUNS_MAX")
            }
        };
        if let Some(before) = before {
            self.pin(before);
        }
        let is_exchanged = self.heads.insert(hashes[0].short(), number);
        if is_exchanged {
            let nodes = Arc::clone(&self.published.snapshot.load().nodes);
            let tables = self.heads.tables();
            let snapshot = Snapshot { tables, nodes };
            self.published.snapshot.store(Arc::new(snapshot));
        }
        self.append(number, hashes);
        Some(Loc { run: number, at: 0 })
    }

    /// A holder holds places that it did not hold.
    pub(super) fn hold(&mut self, holder: Holder, first: Loc, count: usize) {
        let count = u32::try_from(count).expect("a run's places have 32 bits");
        let spans = &mut self.runs[first.run as usize].spans;
        spans.add(holder, first.at, first.at + count);
        self.soil(first.run);
    }

    /// A holder holds a place no longer.
    pub(super) fn release(&mut self, holder: Holder, loc: Loc) {
        let was_held = self.runs[loc.run as usize].spans.remove(holder, loc.at);
        assert!(was_held, "{loc:?} is given back and not held");
        self.soil(loc.run);
    }

    /// A holder holds nothing of a run any more; returns how many places it held.
    pub(super) fn release_all(&mut self, holder: Holder, run: u32) -> usize {
        self.soil(run);
        self.runs[run as usize].spans.remove_all(holder)
    }

    /// Keeps a key though nobody may hold it.
    pub(super) fn pin(&mut self, loc: Loc) {
        let branches = &mut self.runs[loc.run as usize].branches;
        *branches.entry(loc.at).or_default() += 1;
    }

    /// Takes a pin back.
    pub(super) fn unpin(&mut self, loc: Loc) {
        let branches = &mut self.runs[loc.run as usize].branches;
        if let Some(pins) = branches.get_mut(&loc.at) {
            *pins -= 1;
            if *pins == 0 {
                branches.remove(&loc.at);
            }
        }
        self.soil(loc.run);
    }

    /// Drops what nobody needs any more, and shows lookups all that changed since the last time, in
    /// the order in which it did: what was removed first is gone before what came after is seen.
    pub(super) fn publish(&mut self) {
        let mut next = 0;
        while let Some(run) = self.dirty.get(next).copied() {
            next += 1;
            self.trim(run);
            let own = &mut self.runs[run as usize];
            own.is_dirty = false;
            if own.length == 0 {
                self.published.show(run, None);
                self.free.push(run);
                continue;
            }
            own.shown = own.shown.max(own.length);
            let view = View::new(&own.keys, own.length, own.spans.as_slice());
            self.published.show(run, Some(view));
        }
        self.dirty.clear();
    }

    /// Drops the keys at a run's end that nobody needs, or all of the run.
    fn trim(&mut self, run: u32) {
        let own = &mut self.runs[run as usize];
        let branch = own.branches.last_key_value().map_or(0, |(at, _)| at + 1);
        let needed = own.spans.end().max(branch) as usize;
        self.keys -= own.length - needed;
        if needed == 0 && own.length > 0 {
            let first = own.keys.get(0).short();
            let before = own.before.take();
            own.length = 0;
            own.keys = Arc::new(Keys::with_room(0));
            self.heads.remove(first, run);
            if let Some(before) = before {
                self.unpin(before);
            }
            return;
        }
        if needed * 2 < own.keys.room() {
            let keys = Keys::with_room(needed);
            for at in 0..needed {
                keys.set(at, own.keys.get(at));
            }
            own.keys = Arc::new(keys);
            own.shown = needed;
        }
        own.length = needed;
    }

    fn soil(&mut self, run: u32) {
        let own = &mut self.runs[run as usize];
        if !std::mem::replace(&mut own.is_dirty, true) {
            self.dirty.push(run);
        }
    }

    /// Different keys that anybody holds.
    pub(super) fn held(&self) -> usize {
        let held = self.runs.iter().map(|run| {
            let mut spans: Vec<(u32, u32)> = run
                .spans
                .as_slice()
                .iter()
                .map(|span| (span.from, span.to))
                .collect();
            spans.sort_unstable();
            let mut end = 0;
            let fresh = spans.into_iter().map(|(from, to)| {
                let fresh = to.saturating_sub(from.max(end));
                end = end.max(to);
                fresh as usize
            });
            fresh.sum::<usize>()
        });
        held.sum()
    }

    /// Keys, held or not.
    pub(super) fn keys(&self) -> usize {
        self.keys
    }
}
