//! How do a node's blocks get in?
//!
//! A stored event is resolved to a place (after a block that is held, or at the beginning of a
//! chain), and its blocks are stored from there on: those of our size in runs, others one by one.
//! A name that is held already either stands for the same tokens, and nothing changes, or the
//! engine gave it to another block: the removal was lost on the way.

use std::collections::BTreeSet;
use std::hint::black_box;
use std::ops::BitXor;
use std::sync::atomic::Ordering;

use super::{Node, ODD, Shared};
use crate::block::{BLOCK_TOKENS, BlockHash};
use crate::event::{EngineHash, ExtraKeys};
use crate::index::chains::{Hold, RECORDS_MAX};
use crate::index::odd::{Arrival, Odd, Place, name_of};
use crate::index::records::{Before, Record};
use crate::index::spaces::SpaceId;

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

/// What became of one node block.
enum One {
    /// It is held, as it was before or from now on.
    Stored,
    Orphan,
    OverLimit,
}

impl Node {
    /// Stores consecutive blocks.
    pub(in crate::index) fn store(&mut self, event: &Stored<'_>, shared: &mut Shared<'_>) {
        let count = event.block_hashes.len();
        if count.checked_mul(event.block_size) != Some(event.token_ids.len()) {
            shared.applied.malformed += 1;
            return;
        }
        // Before its blocks are, so that a lookup rounds what it sees of them.
        let own = event.block_size.max(1);
        self.shown.block_tokens.store(own, Ordering::Relaxed);
        let Some(mut place) = self.first_place(event, shared) else {
            return;
        };
        let keys = |at: &usize| event.extra_keys.of(*at);
        let continues = |at: &usize| {
            shared
                .spaces
                .continues(place.space, event.adapter, keys(at))
        };
        let fit = count.min(1) + (1..count).take_while(continues).count();
        let done = if event.block_size == BLOCK_TOKENS && place.tail.is_empty() {
            self.store_run(event, fit, &mut place, shared)
        } else {
            let blocks = event.token_ids.chunks_exact(event.block_size.max(1));
            let mut blocks = event.block_hashes.iter().zip(blocks).take(fit);
            blocks.try_fold(0, |done, (hash, tokens)| {
                match self.store_odd(name_of(hash), &mut place, tokens, shared) {
                    One::Stored => Ok(done + 1),
                    stop => Err((done, stop)),
                }
            })
        };
        let applied = &mut *shared.applied;
        match done {
            Ok(_) => applied.uncreditable += count - fit,
            Err((done, One::Orphan)) => applied.orphans += count - done,
            Err((done, _)) => applied.over_limit += count - done,
        }
    }

    /// Stores consecutive node blocks of our size. The memory that they will be kept in is read
    /// ahead, for many of them at once: one by one, waiting for it took three times as long as all
    /// the rest but hashing.
    fn store_run(
        &mut self,
        event: &Stored<'_>,
        fit: usize,
        place: &mut Place,
        shared: &mut Shared<'_>,
    ) -> Result<usize, (usize, One)> {
        let (blocks, _) = event.token_ids.as_chunks::<BLOCK_TOKENS>();
        let mut ahead = Vec::with_capacity(fit.min(AHEAD));
        let mut done = 0;
        for (names, blocks) in event.block_hashes[..fit]
            .chunks(AHEAD)
            .zip(blocks.chunks(AHEAD))
        {
            let namespace = shared.spaces.namespace(place.space);
            let mut last = place.last;
            ahead.clear();
            for (name, tokens) in names.iter().zip(blocks) {
                last = namespace.hash(last, tokens);
                ahead.push((name_of(name), last));
            }
            let names = ahead.iter().map(|(name, _)| self.names.peek(*name));
            let table = ahead
                .iter()
                .map(|(_, hash)| shared.table.peek(hash.short()));
            black_box((names.fold(0, BitXor::bitxor), table.fold(0, BitXor::bitxor)));
            for (name, hash) in &ahead {
                match self.store_plain(*name, *hash, place, shared) {
                    One::Stored => done += 1,
                    stop => return Err((done, stop)),
                }
            }
        }
        Ok(done)
    }

    /// Where the event's first block goes, if that can be known.
    fn first_place(&self, event: &Stored<'_>, shared: &mut Shared<'_>) -> Option<Place> {
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
                record: None,
                tail: Vec::new(),
            });
        };
        let Some(value) = self.names.get(parent) else {
            shared.applied.orphans += count;
            return None;
        };
        let place = self.place_after(parent, value);
        if !shared.spaces.continues(place.space, event.adapter, keys) {
            shared.applied.uncreditable += count;
            return None;
        }
        Some(place)
    }

    fn place_after(&self, parent: u64, value: u32) -> Place {
        if value == ODD {
            let odd = &self.odd[&parent];
            return Place {
                space: odd.space,
                parent: Some(parent),
                last: odd.last,
                record: odd.keys.last().copied(),
                tail: odd.tail.clone(),
            };
        }
        let record = Record::from_number(value);
        Place {
            space: self.chains.space(record),
            parent: Some(parent),
            last: self.chains.hash(record),
            record: Some(record),
            tail: Vec::new(),
        }
    }

    /// Stores a node block that is one block of ours, and moves the place behind it.
    fn store_plain(
        &mut self,
        name: u64,
        hash: BlockHash,
        place: &mut Place,
        shared: &mut Shared<'_>,
    ) -> One {
        let before = self.before(place.record.take(), place.last);
        let parent = place.parent.replace(name);
        place.last = hash;
        let gap = match self.names.get_or_gap(name) {
            Err(gap) => Some(gap),
            Ok(value) => {
                if self.is_same(name, value, place, &[hash]) {
                    place.record = self.place_after(name, value).record;
                    shared.applied.repeated += 1;
                    return One::Stored;
                }
                if !self.make_way(name, parent, shared) {
                    return One::Orphan;
                }
                None
            }
        };
        if !self.take_weight(1, shared) {
            return One::OverLimit;
        }
        let record = self.hold(before, hash, place.space, shared);
        self.names.insert(name, record.number(), gap);
        place.record = Some(record);
        One::Stored
    }

    /// Stores any other node block, and moves the place behind it.
    fn store_odd(
        &mut self,
        name: u64,
        place: &mut Place,
        tokens: &[u32],
        shared: &mut Shared<'_>,
    ) -> One {
        let arrival = Arrival::at(place, shared.spaces.namespace(place.space), tokens);
        let parent = place.parent.replace(name);
        let (last, record) = (place.last, place.record.take());
        place.last = arrival.last;
        place.tail.clone_from(&arrival.tail);
        if let Some(value) = self.names.get(name) {
            if self.is_same(name, value, place, &arrival.hashes) {
                place.record = self.place_after(name, value).record;
                shared.applied.repeated += 1;
                return One::Stored;
            }
            if !self.make_way(name, parent, shared) {
                return One::Orphan;
            }
        }
        if !self.take_weight(arrival.weight(), shared) {
            return One::OverLimit;
        }
        let mut before = self.before(record, last);
        let mut keys = Vec::with_capacity(arrival.hashes.len());
        for hash in &arrival.hashes {
            let record = self.hold(before, *hash, place.space, shared);
            before = Before::Held(record);
            keys.push(record);
        }
        place.record = keys.last().copied();
        if let Some(before) = arrival.before.and_then(|before| self.odd.get_mut(&before)) {
            before.after.insert(name);
        }
        let odd = Odd {
            space: place.space,
            last: arrival.last,
            keys,
            tail: arrival.tail,
            before: arrival.before,
            after: BTreeSet::new(),
        };
        self.odd.insert(name, odd);
        self.names.insert(name, ODD, None);
        One::Stored
    }

    fn before(&mut self, record: Option<Record>, last: BlockHash) -> Before {
        match record {
            Some(record) => Before::Held(record),
            None => self.chains.before(last),
        }
    }

    /// Whether the name stands for the tokens up to `place` already, of which these keys end in
    /// the block. A hash covers all that came before it.
    fn is_same(&self, name: u64, value: u32, place: &Place, hashes: &[BlockHash]) -> bool {
        if value != ODD {
            let own = self.chains.hash(Record::from_number(value));
            return place.tail.is_empty() && hashes == [own];
        }
        let odd = &self.odd[&name];
        let own = odd.keys.iter().map(|record| self.chains.hash(*record));
        odd.space == place.space
            && odd.last == place.last
            && odd.tail == place.tail
            && own.eq(hashes.iter().copied())
    }

    /// The engine gave the name to another block: the removal was lost on the way. False where
    /// the parent goes with the old block.
    fn make_way(&mut self, name: u64, parent: Option<u64>, shared: &mut Shared<'_>) -> bool {
        self.remove(name, shared);
        parent.is_none_or(|parent| self.names.get(parent).is_some())
    }

    /// False where a limit is reached: what does not fit gets no credit, and what is held already
    /// stays, since it is what requests are being routed by.
    fn take_weight(&mut self, weight: usize, shared: &mut Shared<'_>) -> bool {
        let fits = |used: usize, max: usize| used.saturating_add(weight) <= max;
        if !fits(self.weight, shared.limits.node_blocks_max.min(RECORDS_MAX))
            || !fits(*shared.total, shared.limits.total_blocks_max)
        {
            return false;
        }
        self.weight += weight;
        *shared.total += weight;
        true
    }

    fn hold(
        &mut self,
        before: Before,
        hash: BlockHash,
        space: SpaceId,
        shared: &mut Shared<'_>,
    ) -> Record {
        let hold = self.chains.hold(before, hash, space, shared.table);
        shared.applied.stored += usize::from(matches!(hold, Hold::New(_)));
        hold.record()
    }
}
