//! Where does the key lie that an engine has this name for?
//!
//! Open addressing over entries of 16 bytes and a tag of one byte each, 26 to 51 bytes a name. A
//! search reads tags, which lie close together, and an entry only where its tag is right: a new
//! name's entry is written and never read, so nothing waits for its memory. Removal moves later
//! entries up, so there is nothing to sweep. One writer, no readers beside it.

use std::hash::{BuildHasher, RandomState};

use super::runs::Loc;

/// The value of a name whose block is not one block of ours; it is kept elsewhere.
pub(super) const ODD: Loc = Loc {
    run: u32::MAX,
    at: u32::MAX,
};
/// The tag of an entry that is not taken.
const FREE: u8 = 0;
/// A bit of all other tags.
const TAKEN: u8 = 0x80;
const CAPACITY_MIN: usize = 8;
/// An odd number without a pattern: the golden ratio's first 64 bits.
const MIX: u64 = 0x9e37_79b9_7f4a_7c15;

/// Names (64 bits each) and where their keys lie.
pub(super) struct Names {
    tags: Vec<u8>,
    /// Name and value.
    entries: Vec<[u64; 2]>,
    len: usize,
    /// Spreads names that an engine may have chosen so that they meet.
    seed: u64,
}

impl Names {
    pub(super) fn new() -> Self {
        Self {
            tags: Vec::new(),
            entries: Vec::new(),
            len: 0,
            seed: RandomState::new().hash_one(0),
        }
    }

    pub(super) fn get(&self, name: u64) -> Option<Loc> {
        let at = self.find(name).ok()?;
        Some(unpacked(self.entries[at][1]))
    }

    /// Reads the memory where names will be looked for first, for all of them together, so that the
    /// machine waits for all of it at the same time. In loops of few instructions each: it looks only
    /// so many instructions ahead. The value says nothing.
    pub(super) fn warm(&self, names: impl Iterator<Item = u64>, places: &mut Vec<usize>) -> u64 {
        places.clear();
        places.extend(names.map(|name| self.place(self.mixed(name))));
        let entry = |at: &usize| self.entries.get(*at).map_or(0, |entry| entry[1]);
        let tag = |at: &usize| self.tags.get(*at).map_or(FREE, |tag| *tag);
        let entries = places.iter().fold(0, |all, at| all ^ entry(at));
        places
            .iter()
            .fold(entries, |all, at| all ^ u64::from(tag(at)))
    }

    /// Makes room for so many more names.
    pub(super) fn reserve(&mut self, more: usize) {
        // Two of three may be taken; after a move one of three is.
        if (self.len + more) * 3 > self.tags.len() * 2 {
            self.resize(self.len + more);
        }
    }

    /// Adds names for consecutive keys from `first` on, up to one that is there already; returns how
    /// many. There must be room.
    pub(super) fn insert_run(&mut self, names: impl Iterator<Item = u64>, first: Loc) -> usize {
        let mut added = 0;
        for (at, name) in (first.at..).zip(names) {
            let mixed = self.mixed(name);
            let Err(free) = self.find_mixed(name, mixed) else {
                break;
            };
            self.tags[free] = tag(mixed);
            self.entries[free] = [name, packed(Loc { at, ..first })];
            added += 1;
        }
        self.len += added;
        added
    }

    /// Adds a name that is not there.
    pub(super) fn insert(&mut self, name: u64, value: Loc) {
        self.reserve(1);
        let added = self.insert_run(std::iter::once(name), value);
        assert_eq!(added, 1, "names are added once");
    }

    pub(super) fn remove(&mut self, name: u64) -> Option<Loc> {
        let mut hole = self.find(name).ok()?;
        let value = unpacked(self.entries[hole][1]);
        let mut at = hole;
        loop {
            at = self.next(at);
            if self.tags[at] == FREE {
                break;
            }
            // An entry moves up unless its home lies behind the hole.
            let home = self.place(self.mixed(self.entries[at][0]));
            if self.distance(home, at) >= self.distance(hole, at) {
                self.tags[hole] = self.tags[at];
                self.entries[hole] = self.entries[at];
                hole = at;
            }
        }
        self.tags[hole] = FREE;
        self.len -= 1;
        if self.len * 6 < self.tags.len() && self.tags.len() > CAPACITY_MIN {
            self.resize(self.len);
        }
        Some(value)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, Loc)> {
        let taken = self.tags.iter().zip(&self.entries);
        taken
            .filter(|(tag, _)| **tag != FREE)
            .map(|(_, [name, value])| (*name, unpacked(*value)))
    }

    fn resize(&mut self, wanted: usize) {
        let capacity = ((wanted + 1) * 3).max(CAPACITY_MIN);
        // Zeroes come from the machine where the memory is new.
        let tags = std::mem::replace(&mut self.tags, vec![FREE; capacity]);
        let entries = std::mem::replace(&mut self.entries, vec![[0; 2]; capacity]);
        // Eight tags at a time: whether the next one is taken cannot be foreseen.
        for (tags, entries) in tags.chunks(8).zip(entries.chunks(8)) {
            let mut bytes = [FREE; 8];
            bytes[..tags.len()].copy_from_slice(tags);
            let mut taken = u64::from_le_bytes(bytes) & u64::from_le_bytes([TAKEN; 8]);
            while taken != 0 {
                let entry = entries[taken.trailing_zeros() as usize / 8];
                taken &= taken - 1;
                let mixed = self.mixed(entry[0]);
                let mut at = self.place(mixed);
                while self.tags[at] != FREE {
                    at = self.next(at);
                }
                self.tags[at] = tag(mixed);
                self.entries[at] = entry;
            }
        }
    }

    /// The place of a name, or the place where it would go. There is always a free entry, except
    /// before the first name.
    fn find(&self, name: u64) -> Result<usize, usize> {
        self.find_mixed(name, self.mixed(name))
    }

    fn find_mixed(&self, name: u64, mixed: u64) -> Result<usize, usize> {
        if self.tags.is_empty() {
            return Err(0);
        }
        let wanted = tag(mixed);
        let mut at = self.place(mixed);
        loop {
            let tag = self.tags[at];
            if tag == FREE {
                return Err(at);
            }
            if tag == wanted && self.entries[at][0] == name {
                return Ok(at);
            }
            at = self.next(at);
        }
    }

    fn mixed(&self, name: u64) -> u64 {
        let mixed = u128::from(name ^ self.seed) * u128::from(MIX);
        #[expect(clippy::cast_possible_truncation, reason = "the halves of a product")]
        let (low, high) = (mixed as u64, (mixed >> 64) as u64);
        low ^ high
    }

    /// Where a search begins. The order is kept as entries become more or fewer: a move reads and
    /// writes from front to back.
    fn place(&self, mixed: u64) -> usize {
        let product = u128::from(mixed) * self.tags.len() as u128;
        usize::try_from(product >> 64).expect("below the number of entries")
    }

    fn next(&self, at: usize) -> usize {
        if at + 1 == self.tags.len() { 0 } else { at + 1 }
    }

    /// Steps from one place on to another.
    fn distance(&self, from: usize, to: usize) -> usize {
        if to >= from {
            to - from
        } else {
            to + self.tags.len() - from
        }
    }
}

/// Bits that say little about the place.
fn tag(mixed: u64) -> u8 {
    mixed.to_le_bytes()[0] | TAKEN
}

fn packed(loc: Loc) -> u64 {
    u64::from(loc.run) << 32 | u64::from(loc.at)
}

#[expect(clippy::cast_possible_truncation, reason = "the halves of a word")]
fn unpacked(word: u64) -> Loc {
    Loc {
        run: (word >> 32) as u32,
        at: word as u32,
    }
}

#[cfg(test)]
mod tests {
    //! Catches a name that is lost, or found though it is gone, while entries move.
    use std::collections::HashMap;

    use super::{Loc, Names};

    #[test]
    fn names_answer_like_a_map() {
        let (mut names, mut twin) = (Names::new(), HashMap::new());
        let mut state = 7_u64;
        for step in 0..60_000_u32 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            // Few names, so that they meet; a growing and a shrinking half.
            let name = (state >> 40) % 3000;
            let is_growing = step / 10_000 % 2 == 0;
            if (state >> 33) % 4 < if is_growing { 3 } else { 1 } {
                match names.get(name) {
                    Some(value) => assert_eq!(twin.get(&name), Some(&value)),
                    None => {
                        let value = Loc { run: step, at: 7 };
                        names.insert(name, value);
                        assert_eq!(twin.insert(name, value), None);
                    }
                }
            } else {
                assert_eq!(names.remove(name), twin.remove(&name), "step {step}");
            }
            assert_eq!(names.get(name), twin.get(&name).copied());
        }
        assert!(twin.len() > 100);
        let all: HashMap<u64, Loc> = names.iter().collect();
        assert_eq!(all, twin);
    }
}
