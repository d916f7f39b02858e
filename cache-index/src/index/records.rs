//! Where does a node keep what it knows of each key?
//!
//! A record is a hash and a link: 20 bytes, in chunks that never move, so that neither growth nor
//! a long chain copies anything. A link says what the record follows. In the common case that is
//! the record right before it, and the link has room for the namespace then; else (a first block,
//! a branch) it names a [`Head`]. Which record follows another can be asked in either direction:
//! by the links, and by the ordered set of those that do not stand next to what they follow.

use std::collections::BTreeSet;

use super::spaces::SpaceId;
use crate::block::BlockHash;

/// Records in a chunk: 5 KB.
const CHUNK: usize = 256;

/// A record by its number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct Record(u32);

impl Record {
    pub(super) const MAX: Self = Self(u32::MAX);
    const MIN: Self = Self(0);

    /// The number, which is below [`super::chains::RECORDS_MAX`].
    pub(super) fn number(self) -> u32 {
        self.0
    }

    pub(super) fn from_number(number: u32) -> Self {
        Self(number)
    }

    fn place(self) -> (usize, usize) {
        (self.0 as usize / CHUNK, self.0 as usize % CHUNK)
    }
}

/// What comes before a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Before {
    /// Nothing: it begins a chain.
    Nothing,
    /// A key that the node holds.
    Held(Record),
    /// A key that the node does not hold (any more).
    Gone(u64),
}

/// A record that does not stand next to what it follows.
#[derive(Clone, Copy)]
struct Head {
    before: Before,
    space: SpaceId,
}

/// A link: flags, and a namespace or the number of a head.
const FREE: u32 = u32::MAX;
const IS_HEAD: u32 = 1 << 31;
/// The record's key is held, but some key before it is not.
const CUT_OFF: u32 = 1 << 30;
/// Heads follow this record.
const HAS_BRANCHES: u32 = 1 << 29;
const NUMBER: u32 = HAS_BRANCHES - 1;

/// A node's records.
#[derive(Default)]
pub(super) struct Records {
    hashes: Vec<Vec<BlockHash>>,
    links: Vec<Vec<u32>>,
    heads: Vec<Head>,
    free_heads: Vec<u32>,
    /// Heads by what they follow: a record that is held, or a key that is not.
    branches: BTreeSet<(Record, Record)>,
    waiting: BTreeSet<(u64, Record)>,
    len: usize,
    free: usize,
    /// Where the search for a free record goes on.
    cursor: usize,
}

impl Records {
    pub(super) fn hash(&self, record: Record) -> BlockHash {
        let (chunk, at) = record.place();
        self.hashes[chunk][at]
    }

    pub(super) fn space(&self, record: Record) -> SpaceId {
        let link = self.link(record);
        match link & IS_HEAD {
            0 => SpaceId(link & NUMBER),
            _ => self.heads[(link & NUMBER) as usize].space,
        }
    }

    pub(super) fn is_cut_off(&self, record: Record) -> bool {
        self.link(record) & CUT_OFF != 0
    }

    pub(super) fn set_cut_off(&mut self, record: Record) {
        *self.link_mut(record) |= CUT_OFF;
    }

    pub(super) fn set_reached(&mut self, record: Record) {
        *self.link_mut(record) &= !CUT_OFF;
    }

    /// Takes a record for a key.
    pub(super) fn take(&mut self, before: Before, hash: BlockHash, space: SpaceId) -> Record {
        if let Before::Held(Record(number)) = before {
            let next = Record(number + 1);
            if next.0 as usize == self.len {
                return self.push(hash, space.0);
            }
            if self.link(next) == FREE {
                return self.reuse(next, hash, space.0);
            }
        }
        let head = self.take_head(Head { before, space });
        let record = match self.find_free() {
            Some(record) => self.reuse(record, hash, IS_HEAD | head),
            None => self.push(hash, IS_HEAD | head),
        };
        self.enter(before, record);
        record
    }

    /// Gives a record back that nothing follows.
    pub(super) fn give_back(&mut self, record: Record) {
        let link = self.link(record);
        if link & IS_HEAD != 0 {
            let head = link & NUMBER;
            self.leave(self.heads[head as usize].before, record);
            self.free_heads.push(head);
        }
        *self.link_mut(record) = FREE;
        self.free += 1;
    }

    /// The records that follow this one.
    pub(super) fn following(&self, record: Record, found: &mut Vec<Record>) {
        found.extend(self.neighbour(record));
        if self.link(record) & HAS_BRANCHES != 0 {
            let range = (record, Record::MIN)..=(record, Record::MAX);
            found.extend(self.branches.range(range).map(|(_, head)| *head));
        }
    }

    /// Makes all that follow this record wait for its key, and returns them.
    pub(super) fn orphan(&mut self, record: Record) -> Vec<Record> {
        let mut orphans = Vec::new();
        self.following(record, &mut orphans);
        let gone = Before::Gone(self.hash(record).short());
        for orphan in &orphans {
            let link = self.link(*orphan);
            if link & IS_HEAD == 0 {
                let space = SpaceId(link & NUMBER);
                let head = self.take_head(Head {
                    before: gone,
                    space,
                });
                *self.link_mut(*orphan) = link & !NUMBER | IS_HEAD | head;
                self.enter(gone, *orphan);
            } else {
                self.follow(*orphan, gone);
            }
        }
        orphans
    }

    /// Makes all that wait for a record's key follow it, and returns them.
    pub(super) fn adopt(&mut self, record: Record) -> Vec<Record> {
        if self.waiting.is_empty() {
            return Vec::new();
        }
        let key = self.hash(record).short();
        let range = (key, Record::MIN)..=(key, Record::MAX);
        let adopted: Vec<Record> = self.waiting.range(range).map(|(_, head)| *head).collect();
        for head in &adopted {
            self.follow(*head, Before::Held(record));
        }
        adopted
    }

    /// All records in use.
    pub(super) fn iter(&self) -> impl Iterator<Item = Record> {
        let all = self.links.iter().flatten().zip(0..);
        all.filter(|(link, _)| **link != FREE)
            .map(|(_, number)| Record(number))
    }

    /// What comes before a record's key.
    pub(super) fn before(&self, record: Record) -> Before {
        let link = self.link(record);
        match link & IS_HEAD {
            0 => Before::Held(Record(record.0 - 1)),
            _ => self.heads[(link & NUMBER) as usize].before,
        }
    }

    /// Panics where links and sets say different things. For tests.
    pub(super) fn check_integrity(&self) {
        let (mut in_use, mut heads) = (0, 0);
        for record in self.iter() {
            in_use += 1;
            heads += usize::from(self.link(record) & IS_HEAD != 0);
            let before = self.before(record);
            if let Before::Held(before) = before {
                assert_ne!(self.link(before), FREE, "a record after one that is free");
                let mut after = Vec::new();
                self.following(before, &mut after);
                assert!(after.contains(&record), "a record that cannot be found");
            }
            if let Before::Gone(key) = before {
                assert!(self.waiting.contains(&(key, record)), "nobody waits");
            }
        }
        assert_eq!(in_use + self.free, self.len, "records");
        assert_eq!(heads + self.free_heads.len(), self.heads.len(), "heads");
        assert!(
            self.branches.len() + self.waiting.len() <= heads,
            "branches"
        );
    }

    /// Makes a head follow something else.
    fn follow(&mut self, record: Record, before: Before) {
        let head = (self.link(record) & NUMBER) as usize;
        let old = std::mem::replace(&mut self.heads[head].before, before);
        self.leave(old, record);
        self.enter(before, record);
    }

    fn enter(&mut self, before: Before, record: Record) {
        match before {
            Before::Nothing => {}
            Before::Held(held) => {
                self.branches.insert((held, record));
                *self.link_mut(held) |= HAS_BRANCHES;
            }
            Before::Gone(key) => {
                self.waiting.insert((key, record));
            }
        }
    }

    fn leave(&mut self, before: Before, record: Record) {
        match before {
            Before::Nothing => {}
            Before::Held(held) => {
                self.branches.remove(&(held, record));
            }
            Before::Gone(key) => {
                self.waiting.remove(&(key, record));
            }
        }
    }

    /// The next record, if it follows this one.
    fn neighbour(&self, record: Record) -> Option<Record> {
        let next = Record(record.0 + 1);
        let is_after = (next.0 as usize) < self.len && self.link(next) & IS_HEAD == 0;
        is_after.then_some(next)
    }

    fn push(&mut self, hash: BlockHash, link: u32) -> Record {
        if self.len.is_multiple_of(CHUNK) {
            self.hashes.push(Vec::with_capacity(CHUNK));
            self.links.push(Vec::with_capacity(CHUNK));
        }
        let record = Record(u32::try_from(self.len).expect("limited by RECORDS_MAX"));
        let (chunk, _) = record.place();
        self.hashes[chunk].push(hash);
        self.links[chunk].push(link);
        self.len += 1;
        record
    }

    fn reuse(&mut self, record: Record, hash: BlockHash, link: u32) -> Record {
        let (chunk, at) = record.place();
        self.hashes[chunk][at] = hash;
        self.links[chunk][at] = link;
        self.free -= 1;
        record
    }

    /// A free record, once an eighth of them are: the search then takes eight steps on average.
    fn find_free(&mut self) -> Option<Record> {
        if self.free == 0 || self.free * 8 < self.len {
            return None;
        }
        loop {
            self.cursor = if self.cursor + 1 < self.len {
                self.cursor + 1
            } else {
                0
            };
            let record = Record(u32::try_from(self.cursor).expect("limited by RECORDS_MAX"));
            if self.link(record) == FREE {
                return Some(record);
            }
        }
    }

    fn take_head(&mut self, head: Head) -> u32 {
        if let Some(free) = self.free_heads.pop() {
            self.heads[free as usize] = head;
            return free;
        }
        self.heads.push(head);
        u32::try_from(self.heads.len() - 1).expect("no more heads than records")
    }

    fn link(&self, record: Record) -> u32 {
        let (chunk, at) = record.place();
        self.links[chunk][at]
    }

    fn link_mut(&mut self, record: Record) -> &mut u32 {
        let (chunk, at) = record.place();
        &mut self.links[chunk][at]
    }
}
