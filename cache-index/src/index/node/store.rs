//! How do a node's blocks get in?
//!
//! A stored event is resolved to a place (after a block that is held, or at the beginning of a
//! chain), and its blocks are stored from there on: those of our size in stretches that lie together,
//! others one by one. A name that is held already either stands for the same tokens, and nothing
//! changes, or the engine gave it to another block: the removal was lost on the way.
//! Left to [`super::other`]: blocks of another size than ours, and those told of without tokens.

use std::hint::black_box;

use super::{Node, ODD, Shared};
use crate::block::{BLOCK_TOKENS, BlockHash};
use crate::event::{EngineHash, ExtraKeys};
use crate::index::odd::{Place, name_of};
use crate::index::runs::{Loc, Stretch};
use crate::index::spans::Holder;

/// A `BlockStored` event, as the index reads it.
pub(in crate::index) struct Stored<'a> {
    pub(in crate::index) block_hashes: &'a [EngineHash],
    pub(in crate::index) parent: Option<&'a EngineHash>,
    pub(in crate::index) token_ids: &'a [u32],
    pub(in crate::index) block_size: usize,
    pub(in crate::index) adapter: Option<&'a str>,
    pub(in crate::index) extra_keys: &'a ExtraKeys,
}

/// Node blocks whose memory is fetched before the first of them is stored: what is fetched fits
/// in the fastest cache.
const AHEAD: usize = 128;

/// Why a node block was not stored.
pub(super) enum Stop {
    Orphan,
    OverLimit,
}

impl Node {
    /// Stores consecutive blocks in a tier.
    pub(in crate::index) fn store(
        &mut self,
        tier: usize,
        event: &Stored<'_>,
        shared: &mut Shared<'_>,
    ) {
        let count = event.block_hashes.len();
        if tier > 0 && event.token_ids.is_empty() && count > 0 {
            self.store_by_name(tier, event.block_hashes, shared);
            return;
        }
        let tokens = count.checked_mul(event.block_size);
        if event.block_size == 0 || tokens != Some(event.token_ids.len()) {
            shared.applied.malformed += 1;
            return;
        }
        // Before its blocks are, so that a lookup rounds what it sees of them.
        if self.block_tokens != event.block_size {
            self.block_tokens = event.block_size;
            shared.runs.show_block_tokens(self.number, event.block_size);
        }
        let Some(mut place) = self.first_place(tier, event, shared) else {
            return;
        };
        let fit = fitting(event, &place, shared);
        let done = if event.block_size == BLOCK_TOKENS && place.tail.is_empty() {
            self.store_run(tier, event, fit, &mut place, shared)
        } else {
            let blocks = event.token_ids.chunks_exact(event.block_size);
            let mut blocks = event.block_hashes.iter().zip(blocks).take(fit);
            blocks.try_fold(0, |done, (hash, tokens)| {
                match self.store_odd(tier, name_of(hash), &mut place, tokens, shared) {
                    Ok(()) => Ok(done + 1),
                    Err(stop) => Err((done, stop)),
                }
            })
        };
        let applied = &mut *shared.applied;
        match done {
            Ok(_) => applied.uncreditable += count - fit,
            Err((done, Stop::Orphan)) => applied.orphans += count - done,
            Err((done, Stop::OverLimit)) => applied.over_limit += count - done,
        }
    }

    /// Where the event's first block goes, if that can be known.
    fn first_place(
        &self,
        tier: usize,
        event: &Stored<'_>,
        shared: &mut Shared<'_>,
    ) -> Option<Place> {
        let count = event.block_hashes.len();
        let keys = event.extra_keys.of(0);
        let Some(parent) = event.parent.map(name_of) else {
            let space = shared.spaces.of_chain(event.adapter, keys, shared.salts);
            if space.is_none() {
                shared.applied.uncreditable += count;
            }
            return Some(Place {
                space: space?,
                parent: None,
                last: BlockHash::ROOT,
                at: None,
                tail: Vec::new(),
            });
        };
        let place = self
            .find(tier, parent)
            .map(|(found, value)| self.place_after(found, parent, value, shared));
        // A block of ours whose parts lie in two tiers would come and go with either.
        let is_split = |place: &Place| {
            !place.tail.is_empty() && place.parent.is_some_and(|(found, _)| found != tier)
        };
        let Some(place) = place.filter(|place| !is_split(place)) else {
            shared.applied.orphans += count;
            return None;
        };
        if !shared.spaces.continues(place.space, event.adapter, keys) {
            shared.applied.uncreditable += count;
            return None;
        }
        Some(place)
    }

    fn place_after(&self, tier: usize, parent: u64, value: Loc, shared: &Shared<'_>) -> Place {
        let odd = self.sides[tier]
            .as_ref()
            .and_then(|side| side.odd.get(&parent));
        match odd.filter(|_| value == ODD) {
            Some(odd) => Place {
                space: odd.space,
                parent: Some((tier, parent)),
                last: odd.last,
                at: odd.at,
                tail: odd.tail.clone(),
            },
            None => Place {
                space: shared.runs.space(value),
                parent: Some((tier, parent)),
                last: shared.runs.hash(value),
                at: Some(value),
                tail: Vec::new(),
            },
        }
    }

    /// Stores consecutive node blocks of our size. The memory that their names will be kept in is
    /// read ahead, for many of them at once: one by one, waiting for it took most of the time.
    fn store_run(
        &mut self,
        tier: usize,
        event: &Stored<'_>,
        fit: usize,
        place: &mut Place,
        shared: &mut Shared<'_>,
    ) -> Result<usize, (usize, Stop)> {
        let (blocks, _) = event.token_ids.as_chunks::<BLOCK_TOKENS>();
        let mut hashes = Vec::with_capacity(fit.min(AHEAD));
        let mut places = Vec::with_capacity(fit.min(AHEAD));
        let mut done = 0;
        for (names, blocks) in event.block_hashes[..fit]
            .chunks(AHEAD)
            .zip(blocks[..fit].chunks(AHEAD))
        {
            let own = &mut self.side(tier).names;
            own.reserve(names.len());
            black_box(own.warm(names.iter().map(name_of), &mut places));
            let namespace = shared.spaces.namespace(place.space);
            hashes.clear();
            for tokens in blocks {
                place.last = namespace.hash(place.last, tokens);
                hashes.push(place.last);
            }
            let mut rest = (names, &hashes[..]);
            while !rest.1.is_empty() {
                let Some(stretch) = shared.runs.place(place.at, rest.1, place.space) else {
                    return Err((done, Stop::OverLimit));
                };
                let (names, more) = rest.0.split_at(stretch.count);
                rest = (more, &rest.1[stretch.count..]);
                match self.store_stretch(tier, names, stretch, place, shared) {
                    Ok(()) => done += stretch.count,
                    Err((more, stop)) => return Err((done + more, stop)),
                }
            }
        }
        Ok(done)
    }

    /// Stores node blocks of our size whose keys lie together, and moves the place behind them.
    fn store_stretch(
        &mut self,
        tier: usize,
        names: &[EngineHash],
        stretch: Stretch,
        place: &mut Place,
        shared: &mut Shared<'_>,
    ) -> Result<(), (usize, Stop)> {
        let holder = Holder::new(self.number, tier);
        let mut fresh = Fresh {
            holder,
            first: stretch.first,
            count: 0,
        };
        let is_fresh =
            stretch.is_new || !shared.runs.holds_any(holder, stretch.first, stretch.count);
        let mut done = 0;
        while done < names.len() {
            if is_fresh {
                done += self.store_fresh(tier, &names[done..], stretch.after(done), shared);
                fresh.count = done - (fresh.first.at - stretch.first.at) as usize;
            }
            let Some(hash) = names.get(done) else { break };
            let before = done.checked_sub(1).map(|at| (tier, name_of(&names[at])));
            let parent = before.or(place.parent);
            fresh.give(shared);
            self.store_one(tier, name_of(hash), stretch.after(done), parent, shared)
                .map_err(|stop| (done, stop))?;
            done += 1;
            fresh.first = stretch.after(done);
        }
        fresh.give(shared);
        place.at = Some(stretch.after(names.len() - 1));
        place.parent = names.last().map(|name| (tier, name_of(name)));
        Ok(())
    }

    /// The common case, as far as it goes: new names for keys that this tier does not hold. Returns
    /// how many; the keys are still to be held.
    fn store_fresh(
        &mut self,
        tier: usize,
        names: &[EngineHash],
        first: Loc,
        shared: &mut Shared<'_>,
    ) -> usize {
        let own = shared.limits.node_blocks_max.saturating_sub(self.weight);
        let all = shared.limits.total_blocks_max.saturating_sub(*shared.total);
        let names = &names[..names.len().min(own).min(all)];
        let side = self.side(tier);
        side.names.reserve(names.len());
        let added = side.names.insert_run(names.iter().map(name_of), first);
        side.held += added;
        self.weight += added;
        *shared.total += added;
        shared.applied.stored += added;
        added
    }

    /// Any other case of a node block of our size.
    fn store_one(
        &mut self,
        tier: usize,
        name: u64,
        loc: Loc,
        parent: Option<(usize, u64)>,
        shared: &mut Shared<'_>,
    ) -> Result<(), Stop> {
        if let Some(value) = self.side(tier).names.get(name) {
            if self.is_same(tier, name, value, loc) {
                self.side(tier).add_copy(name);
                shared.applied.repeated += 1;
                return Ok(());
            }
            if !self.make_way(tier, name, parent, shared) {
                return Err(Stop::Orphan);
            }
        }
        if !self.take_weight(1, shared) {
            return Err(Stop::OverLimit);
        }
        self.side(tier).names.insert(name, loc);
        self.hold(tier, loc, shared);
        Ok(())
    }

    pub(super) fn hold(&mut self, tier: usize, loc: Loc, shared: &mut Shared<'_>) {
        let holder = Holder::new(self.number, tier);
        let side = self.side(tier);
        if shared.runs.holds(holder, loc) {
            *side.more.entry(loc).or_default() += 1;
            return;
        }
        side.held += 1;
        shared.applied.stored += 1;
        shared.runs.hold(holder, loc, 1);
    }

    /// Whether the name stands for exactly the block that ends in this key already.
    fn is_same(&self, tier: usize, name: u64, value: Loc, loc: Loc) -> bool {
        if value != ODD {
            return value == loc;
        }
        let side = self.sides[tier].as_ref();
        let odd = side.and_then(|side| side.odd.get(&name));
        odd.is_some_and(|odd| odd.keys == [loc] && odd.tail.is_empty())
    }

    /// The engine gave the name to another block: the removal was lost on the way. False where
    /// the parent goes with the old block.
    pub(super) fn make_way(
        &mut self,
        tier: usize,
        name: u64,
        parent: Option<(usize, u64)>,
        shared: &mut Shared<'_>,
    ) -> bool {
        self.remove(tier, name, shared);
        parent.is_none_or(|(tier, parent)| {
            let side = self.sides[tier].as_ref();
            side.is_some_and(|side| side.names.get(parent).is_some())
        })
    }

    /// False where a limit is reached: what does not fit gets no credit, and what is held already
    /// stays, since it is what requests are being routed by.
    pub(super) fn take_weight(&mut self, weight: usize, shared: &mut Shared<'_>) -> bool {
        let fits = |used: usize, max: usize| used.saturating_add(weight) <= max;
        if !fits(self.weight, shared.limits.node_blocks_max)
            || !fits(*shared.total, shared.limits.total_blocks_max)
        {
            return false;
        }
        self.weight += weight;
        *shared.total += weight;
        true
    }
}

/// Keys that lie together and are held from now on; given to the runs at once.
struct Fresh {
    holder: Holder,
    first: Loc,
    count: usize,
}

impl Fresh {
    fn give(&mut self, shared: &mut Shared<'_>) {
        if self.count > 0 {
            shared.runs.hold(self.holder, self.first, self.count);
            self.count = 0;
        }
    }
}

/// Leading blocks of an event that belong to one chain: its adapter's, with no keys of their own.
fn fitting(event: &Stored<'_>, place: &Place, shared: &Shared<'_>) -> usize {
    let count = event.block_hashes.len();
    // The first block has been looked at, and the adapter with it.
    if event.extra_keys.0.len() <= 1 {
        return count;
    }
    let continues = |at: &usize| {
        let keys = event.extra_keys.of(*at);
        shared.spaces.continues(place.space, event.adapter, keys)
    };
    count.min(1) + (1..count).take_while(continues).count()
}
