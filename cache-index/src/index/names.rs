//! Which record has an engine's name for a block?
//!
//! Open addressing over entries of twelve bytes, 16 to 24 a name: the standard map would take up to
//! 37, which is more than everything else about a block. Removal moves later entries up,
//! so there is nothing to sweep. One writer, no readers beside it.

use std::hash::{BuildHasher, RandomState};

/// An entry's value where there is none.
const FREE: u32 = u32::MAX;
const CAPACITY_MIN: usize = 8;
/// Entries after which a search has come to the next line of the cache.
const LINE_ENTRIES: usize = 5;
/// An odd number without a pattern: the golden ratio's first 64 bits.
const MIX: u64 = 0x9e37_79b9_7f4a_7c15;

/// Names (64 bits each) to values below `u32::MAX`.
pub(super) struct Names {
    /// Low and high half of the name, and the value.
    entries: Vec<[u32; 3]>,
    len: usize,
    /// Spreads names that an engine may have chosen so that they meet.
    seed: u64,
}

/// The place where a name was not found. It stands until the next change.
#[derive(Clone, Copy)]
pub(super) struct Gap(usize);

impl Names {
    pub(super) fn new() -> Self {
        Self {
            entries: Vec::new(),
            len: 0,
            seed: RandomState::new().hash_one(0),
        }
    }

    pub(super) fn get(&self, name: u64) -> Option<u32> {
        self.get_or_gap(name).ok()
    }

    /// A name's value, or where it would go.
    pub(super) fn get_or_gap(&self, name: u64) -> Result<u32, Gap> {
        match self.find(name) {
            Ok(at) => Ok(self.entries[at][2]),
            Err(at) => Err(Gap(at)),
        }
    }

    /// Some of the memory where a name is looked for first.
    pub(super) fn peek(&self, name: u64) -> u32 {
        let home = self.home(name);
        let value = |at: usize| self.entries.get(at).map_or(FREE, |entry| entry[2]);
        value(home) ^ value(home + LINE_ENTRIES)
    }

    /// Adds a name that is not there, at the place where it was not found; none where the place
    /// is not known any more.
    pub(super) fn insert(&mut self, name: u64, value: u32, gap: Option<Gap>) {
        // Three of four may be taken; after a move half of them are.
        if (self.len + 1) * 4 > self.entries.len() * 3 {
            self.resize();
        } else if let Some(Gap(at)) = gap {
            self.entries[at] = entry(name, value);
            self.len += 1;
            return;
        }
        let at = self.find(name).expect_err("names are added once");
        self.entries[at] = entry(name, value);
        self.len += 1;
    }

    pub(super) fn remove(&mut self, name: u64) -> Option<u32> {
        let mut hole = self.find(name).ok()?;
        let value = self.entries[hole][2];
        let mut at = hole;
        loop {
            at = self.next(at);
            if self.entries[at][2] == FREE {
                break;
            }
            // An entry moves up unless its home lies behind the hole.
            let home = self.home(name_of(self.entries[at]));
            let from_home = self.distance(home, at);
            if from_home >= self.distance(hole, at) {
                self.entries[hole] = self.entries[at];
                hole = at;
            }
        }
        self.entries[hole] = entry(0, FREE);
        self.len -= 1;
        if self.len * 5 < self.entries.len() && self.entries.len() > CAPACITY_MIN {
            self.resize();
        }
        Some(value)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, u32)> {
        let taken = self.entries.iter().filter(|entry| entry[2] != FREE);
        taken.map(|entry| (name_of(*entry), entry[2]))
    }

    fn resize(&mut self) {
        let capacity = ((self.len + 1) * 2).max(CAPACITY_MIN);
        let before = std::mem::replace(&mut self.entries, vec![entry(0, FREE); capacity]);
        for kept in before.into_iter().filter(|entry| entry[2] != FREE) {
            let at = self.find(name_of(kept)).expect_err("names are there once");
            self.entries[at] = kept;
        }
    }

    /// The place of a name, or the place where it would go. There is always a free entry, except
    /// before the first name.
    fn find(&self, name: u64) -> Result<usize, usize> {
        if self.entries.is_empty() {
            return Err(0);
        }
        let mut at = self.home(name);
        loop {
            let found = self.entries[at];
            if found[2] == FREE {
                return Err(at);
            }
            if name_of(found) == name {
                return Ok(at);
            }
            at = self.next(at);
        }
    }

    fn home(&self, name: u64) -> usize {
        let mixed = u128::from(name ^ self.seed) * u128::from(MIX);
        let folded = (mixed >> 64) ^ (mixed & u128::from(u64::MAX));
        let product = folded * self.entries.len() as u128;
        usize::try_from(product >> 64).expect("below the number of entries")
    }

    fn next(&self, at: usize) -> usize {
        if at + 1 == self.entries.len() {
            0
        } else {
            at + 1
        }
    }

    /// Steps from one place on to another.
    fn distance(&self, from: usize, to: usize) -> usize {
        if to >= from {
            to - from
        } else {
            to + self.entries.len() - from
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the halves of a word")]
fn entry(name: u64, value: u32) -> [u32; 3] {
    [name as u32, (name >> 32) as u32, value]
}

fn name_of(entry: [u32; 3]) -> u64 {
    u64::from(entry[1]) << 32 | u64::from(entry[0])
}

#[cfg(test)]
mod tests {
    //! Catches a name that is lost, or found though it is gone, while entries move.
    use std::collections::HashMap;

    use super::Names;

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
                match names.get_or_gap(name) {
                    Ok(value) => assert_eq!(twin.get(&name), Some(&value)),
                    Err(gap) => {
                        names.insert(name, step, Some(gap).filter(|_| step % 2 == 0));
                        assert_eq!(twin.insert(name, step), None);
                    }
                }
            } else {
                assert_eq!(names.remove(name), twin.remove(&name), "step {step}");
            }
            assert_eq!(names.get(name), twin.get(&name).copied());
        }
        assert!(twin.len() > 100);
        let all: HashMap<u64, u32> = names.iter().collect();
        assert_eq!(all, twin);
    }
}
