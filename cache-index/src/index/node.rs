//! What does one node hold, in its own names and in ours?
//!
//! The engine's names resolve parents and removals; our chained hash of the tokens is what gets
//! credited. A node block of any size works: one of 32 tokens completes two of our blocks, one of
//! 4 completes ours with every fourth, and what is left over (the tail) waits for the next block.
//! A node block of exactly our size, the common case, is a name and a record, nothing else.
//! Two node blocks may complete the same block of ours (an engine can compute a prefix twice), so
//! each key is counted.
//! A node block that begins inside one of our blocks goes when the node block before it goes:
//! without it, it cannot be used either. Blocks further on are kept without credit; see
//! [`super::chains`].
//! Left out: media other than the device (an event about them is counted and ignored), and all
//! attention groups but one, the first that serves full attention.

use std::collections::{BTreeSet, HashMap};
use std::hint::black_box;
use std::ops::BitXor;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::chains::{Chains, Hold, RECORDS_MAX};
use super::names::Names;
use super::odd::{Arrival, Odd, Place, name_of};
use super::records::{Before, Record};
use super::shard::Tag;
use super::spaces::{Salts, SpaceId, Spaces};
use super::table::{Shown, Table};
use super::{Applied, Limits};
use crate::block::{BLOCK_TOKENS, BlockHash};
use crate::event::{EngineHash, ExtraKeys, GroupKind, Medium};

/// A `BlockStored` event, as the index reads it.
pub(super) struct Stored<'a> {
    pub(super) block_hashes: &'a [EngineHash],
    pub(super) parent: Option<&'a EngineHash>,
    pub(super) token_ids: &'a [u32],
    pub(super) block_size: usize,
    pub(super) adapter: Option<&'a str>,
    pub(super) extra_keys: &'a ExtraKeys,
}

/// What all nodes share while one of them changes.
pub(super) struct Shared<'a> {
    pub(super) table: &'a mut Table,
    pub(super) spaces: &'a mut Spaces,
    pub(super) salts: &'a Salts,
    pub(super) limits: &'a Limits,
    /// Weight of all nodes together.
    pub(super) total: &'a mut usize,
    pub(super) applied: &'a mut Applied,
}

/// A name's value where the block is not one block of ours; else it is the number of its record.
const ODD: u32 = u32::MAX - 1;

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

/// One node's blocks.
pub(super) struct Node {
    /// Its number in the table.
    number: usize,
    /// What lookups see of it; it holds the tokens in its blocks, by its last event.
    shown: Arc<Shown>,
    chains: Chains,
    names: Names,
    odd: HashMap<u64, Odd>,
    weight: usize,
    /// The attention group that is believed.
    group: Option<u32>,
}

impl Node {
    pub(super) fn new(number: usize, shown: Arc<Shown>) -> Self {
        Self {
            number,
            shown,
            chains: Chains::new(number),
            names: Names::new(),
            odd: HashMap::new(),
            weight: 0,
            group: None,
        }
    }

    pub(super) fn number(&self) -> usize {
        self.number
    }

    pub(super) fn held(&self) -> usize {
        self.chains.held()
    }

    pub(super) fn weight(&self) -> usize {
        self.weight
    }

    /// Whether a stored event is about blocks that prefill can reuse.
    pub(super) fn believes_stored(
        &mut self,
        medium: Option<&Medium>,
        group_idx: Option<u32>,
        kind: GroupKind,
    ) -> bool {
        if !is_device(medium) {
            return false;
        }
        let index = group_idx.unwrap_or(0);
        let is_full = kind == GroupKind::Full || kind == GroupKind::Unsaid && index == 0;
        is_full && *self.group.get_or_insert(index) == index
    }

    /// The same for a removal, which carries only the group's number.
    pub(super) fn believes_removed(&self, medium: Option<&Medium>, group_idx: Option<u32>) -> bool {
        is_device(medium)
            && self
                .group
                .is_none_or(|group| group == group_idx.unwrap_or(0))
    }

    /// Stores consecutive blocks.
    pub(super) fn store(&mut self, event: &Stored<'_>, shared: &mut Shared<'_>) {
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

    /// Removes blocks by their names.
    pub(super) fn remove_all(&mut self, hashes: &[EngineHash], shared: &mut Shared<'_>) {
        for hash in hashes {
            if !self.remove(name_of(hash), shared) {
                shared.applied.unknown_removals += 1;
            }
        }
    }

    /// Removes a block and those that continue its tail; false where it is not held.
    fn remove(&mut self, name: u64, shared: &mut Shared<'_>) -> bool {
        let Some(value) = self.names.remove(name) else {
            return false;
        };
        if value != ODD {
            self.give_back(1, [Record::from_number(value)], shared);
            return true;
        }
        let mut gone: Vec<Odd> = self.odd.remove(&name).into_iter().collect();
        let before = gone.first().and_then(|odd| odd.before);
        if let Some(before) = before.and_then(|before| self.odd.get_mut(&before)) {
            before.after.remove(&name);
        }
        let mut at = 0;
        while at < gone.len() {
            for after in std::mem::take(&mut gone[at].after) {
                self.names.remove(after);
                gone.extend(self.odd.remove(&after));
            }
            at += 1;
        }
        // From the end: what is behind a key that goes need not be cut off first.
        for odd in gone.into_iter().rev() {
            self.give_back(odd.weight(), odd.keys.into_iter().rev(), shared);
        }
        true
    }

    /// Gives back the weight and the keys of a block.
    fn give_back(
        &mut self,
        weight: usize,
        keys: impl IntoIterator<Item = Record>,
        shared: &mut Shared<'_>,
    ) {
        self.weight -= weight;
        *shared.total -= weight;
        for record in keys {
            let was_last = self.chains.release(record, shared.table);
            shared.applied.removed += usize::from(was_last);
        }
    }

    /// Drops everything, and gives its memory back.
    pub(super) fn clear(&mut self, shared: &mut Shared<'_>) {
        shared.applied.removed += self.chains.held();
        *shared.total -= self.weight;
        self.weight = 0;
        self.chains.clear(shared.table);
        self.names = Names::new();
        self.odd = HashMap::new();
    }

    /// Recounts everything from the names; panics where something does not add up.
    pub(super) fn check_integrity(&self, in_table: &[(usize, Tag)]) {
        let mut holders: HashMap<Record, u32> = HashMap::new();
        let (mut weight, mut odd_names) = (0, 0);
        for (name, value) in self.names.iter() {
            if value != ODD {
                weight += 1;
                *holders.entry(Record::from_number(value)).or_default() += 1;
                continue;
            }
            odd_names += 1;
            let odd = &self.odd[&name];
            weight += odd.weight();
            for record in &odd.keys {
                *holders.entry(*record).or_default() += 1;
            }
            assert!(
                odd.tail.len() < BLOCK_TOKENS,
                "a tail of {}",
                odd.tail.len()
            );
            let linked =
                |other: &u64, back: &dyn Fn(&Odd) -> bool| self.odd.get(other).is_some_and(back);
            let is_after = |before: u64| linked(&before, &|odd| odd.after.contains(&name));
            assert!(
                odd.before.is_none_or(is_after),
                "a block before it that does not know"
            );
            let is_before = |after: &u64| linked(after, &|odd| odd.before == Some(name));
            assert!(
                odd.after.iter().all(is_before),
                "a block after it that does not know"
            );
        }
        assert_eq!(odd_names, self.odd.len(), "names of odd blocks");
        assert_eq!(weight, self.weight, "weight of node {}", self.number);
        self.chains.check_integrity(&holders, in_table);
    }
}

fn is_device(medium: Option<&Medium>) -> bool {
    matches!(medium, None | Some(Medium::Device))
}
