//! Which keys does one node hold, and which of them can it be credited with?
//!
//! A key counts only while all keys before it are held too: a node is a holder of it in the table
//! then, and is not otherwise. That is what lets a lookup skip most of a chain. When a key in the
//! middle goes (engines evict from the end, but not all of them always), all that is behind it is
//! cut off: taken out of the table, and kept here until the key comes back. Such a removal costs
//! as much as there is behind it.
//! A key that is held twice, under two names, counts until both are gone.

use std::collections::HashMap;

use super::records::{Before, Record, Records};
use super::shard::Write;
use super::spaces::SpaceId;
use super::table::Table;
use crate::block::BlockHash;

/// Records that a node may have: their numbers and those of their heads fit in a link.
pub(super) const RECORDS_MAX: usize = 1 << 28;

/// A node's keys.
pub(super) struct Chains {
    /// The node's number in the table.
    node: usize,
    records: Records,
    held: usize,
    /// Records of keys that are cut off.
    cut_off: HashMap<u64, Record>,
    /// Holders of a key beyond the first.
    more_holders: HashMap<Record, u32>,
    /// The record of each key. Made when it is first asked for, since most nodes never need it:
    /// their engine has one name for a key, and blocks of our size.
    by_key: Option<HashMap<u64, Record>>,
}

/// Whether a key is new to the node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Hold {
    New(Record),
    Again(Record),
}

impl Hold {
    pub(super) fn record(self) -> Record {
        match self {
            Self::New(record) | Self::Again(record) => record,
        }
    }
}

impl Chains {
    pub(super) fn new(node: usize) -> Self {
        Self {
            node,
            records: Records::default(),
            held: 0,
            cut_off: HashMap::new(),
            more_holders: HashMap::new(),
            by_key: None,
        }
    }

    /// Keys that the node holds, those that are cut off included.
    pub(super) fn held(&self) -> usize {
        self.held
    }

    pub(super) fn hash(&self, record: Record) -> BlockHash {
        self.records.hash(record)
    }

    pub(super) fn space(&self, record: Record) -> SpaceId {
        self.records.space(record)
    }

    /// What comes before the key after `last`, where no record is at hand.
    pub(super) fn before(&mut self, last: BlockHash) -> Before {
        if last == BlockHash::ROOT {
            return Before::Nothing;
        }
        let key = last.short();
        self.by_key()
            .get(&key)
            .map_or(Before::Gone(key), |record| Before::Held(*record))
    }

    /// Takes one more holder of a key.
    pub(super) fn hold(
        &mut self,
        before: Before,
        hash: BlockHash,
        space: SpaceId,
        table: &mut Table,
    ) -> Hold {
        let key = hash.short();
        let is_reached = match before {
            Before::Nothing => true,
            Before::Held(record) => !self.records.is_cut_off(record),
            Before::Gone(_) => false,
        };
        let known = if is_reached {
            match table.add(key, self.node) {
                Write::Unchanged => self.by_key().get(&key).copied(),
                _ => None,
            }
        } else {
            self.cut_off.get(&key).copied()
        };
        if let Some(record) = known {
            *self.more_holders.entry(record).or_default() += 1;
            return Hold::Again(record);
        }
        let record = self.records.take(before, hash, space);
        self.held += 1;
        if let Some(by_key) = &mut self.by_key {
            by_key.insert(key, record);
        }
        if !is_reached {
            self.records.set_cut_off(record);
            self.cut_off.insert(key, record);
        }
        for adopted in self.records.adopt(record) {
            if is_reached {
                self.reach(adopted, table);
            }
        }
        Hold::New(record)
    }

    /// Gives one holder of a key back; true where it was the last.
    pub(super) fn release(&mut self, record: Record, table: &mut Table) -> bool {
        match self.more_holders.get_mut(&record) {
            Some(1) => {
                self.more_holders.remove(&record);
                return false;
            }
            Some(more) => {
                *more -= 1;
                return false;
            }
            None => {}
        }
        let key = self.hash(record).short();
        if self.records.is_cut_off(record) {
            self.cut_off.remove(&key);
        } else {
            // From the end, so that a lookup never sees a key without those before it.
            for cut in self.behind(record).into_iter().rev() {
                let key = self.hash(cut).short();
                table.remove(key, self.node);
                self.records.set_cut_off(cut);
                self.cut_off.insert(key, cut);
            }
            table.remove(key, self.node);
        }
        self.records.orphan(record);
        self.records.give_back(record);
        if let Some(by_key) = &mut self.by_key {
            by_key.remove(&key);
        }
        self.held -= 1;
        true
    }

    /// Drops everything.
    pub(super) fn clear(&mut self, table: &mut Table) {
        for record in self.records.iter() {
            if !self.records.is_cut_off(record) {
                table.remove(self.records.hash(record).short(), self.node);
            }
        }
        *self = Self::new(self.node);
    }

    /// Puts a record that was cut off, and all behind it, back into the table.
    fn reach(&mut self, record: Record, table: &mut Table) {
        let mut rest = vec![record];
        while let Some(record) = rest.pop() {
            let key = self.hash(record).short();
            table.add(key, self.node);
            self.records.set_reached(record);
            self.cut_off.remove(&key);
            self.records.following(record, &mut rest);
        }
    }

    /// All records behind one, each after what it follows.
    fn behind(&self, record: Record) -> Vec<Record> {
        let mut found = Vec::new();
        self.records.following(record, &mut found);
        let mut at = 0;
        while at < found.len() {
            self.records.following(found[at], &mut found);
            at += 1;
        }
        found
    }

    fn by_key(&mut self) -> &HashMap<u64, Record> {
        let Self {
            by_key, records, ..
        } = self;
        by_key.get_or_insert_with(|| {
            records
                .iter()
                .map(|record| (records.hash(record).short(), record))
                .collect()
        })
    }

    /// Panics where something does not add up: with the holders of each record as its node knows
    /// them, and with what the table says that the node holds. For tests.
    pub(super) fn check_integrity(
        &self,
        holders: &HashMap<Record, u32>,
        in_table: &[(usize, super::shard::Tag)],
    ) {
        self.records.check_integrity();
        let mut reached = Vec::new();
        let mut held = 0;
        for record in self.records.iter() {
            held += 1;
            let key = self.hash(record).short();
            let more = self.more_holders.get(&record).copied().unwrap_or_default();
            assert_eq!(holders.get(&record), Some(&(more + 1)), "holders of a key");
            let is_cut_off = match self.records.before(record) {
                Before::Nothing => false,
                Before::Held(before) => self.records.is_cut_off(before),
                Before::Gone(_) => true,
            };
            assert_eq!(
                self.records.is_cut_off(record),
                is_cut_off,
                "whether a key counts"
            );
            assert_eq!(self.cut_off.get(&key), is_cut_off.then_some(&record));
            if !is_cut_off {
                reached.push(Table::kept(key));
            }
            if let Some(by_key) = &self.by_key {
                assert_eq!(by_key.get(&key), Some(&record), "the record of a key");
            }
        }
        assert_eq!(held, self.held, "keys of node {}", self.node);
        assert_eq!(holders.len(), self.held, "names for keys that are not held");
        assert!(self.cut_off.len() <= held);
        assert!(
            self.by_key
                .as_ref()
                .is_none_or(|by_key| by_key.len() == held)
        );
        reached.sort_unstable();
        let mut in_table = in_table.to_vec();
        in_table.sort_unstable();
        assert_eq!(
            in_table, reached,
            "what the table says of node {}",
            self.node
        );
    }
}
