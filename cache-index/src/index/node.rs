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

mod store;

use std::collections::HashMap;
use std::sync::Arc;

pub(super) use self::store::Stored;
use super::chains::Chains;
use super::names::Names;
use super::odd::{Odd, name_of};
use super::records::Record;
use super::shard::Tag;
use super::spaces::{Salts, Spaces};
use super::table::{Shown, Table};
use super::{Applied, Limits};
use crate::block::BLOCK_TOKENS;
use crate::event::{EngineHash, GroupKind, Medium};

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
