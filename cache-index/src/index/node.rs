//! What does one node hold, in its own names and in ours?
//!
//! The engine's names resolve parents and removals; our chained hash of the tokens is what gets
//! credited. A node block of any size works: one of 32 tokens completes two of our blocks, one of
//! 4 completes ours with every fourth, and what is left over (the tail) waits for the next block.
//! A node block of exactly our size, the common case, is a name and a place, nothing else.
//! Each tier has its own names, since an engine calls a block the same wherever it lies. A parent
//! may lie in any tier.
//! Two node blocks may complete the same block of ours (an engine can compute a prefix twice), so
//! each key is counted. They may even have the same name: vLLM keeps every copy that it computes, and
//! tells of each one that comes and each one that goes, so names are counted too.
//! A node block that begins inside one of our blocks goes when the node block before it goes:
//! without it, it cannot be used either. Blocks further on are kept, and count once all before them
//! do again.
//! Left out: media that we do not know, and all attention groups but one, the first that serves full
//! attention; events about them are counted and ignored.

mod other;
mod store;

use std::collections::{HashMap, HashSet};

pub(super) use self::store::Stored;
use super::names::{Names, ODD};
use super::odd::{Odd, name_of};
use super::runs::{Loc, Runs};
use super::spaces::{Salts, Spaces};
use super::spans::{Holder, TIERS};
use super::{Applied, Limits};
use crate::block::BLOCK_TOKENS;
use crate::event::{EngineHash, GroupKind, Medium};

/// What all nodes share while one of them changes.
pub(super) struct Shared<'a> {
    pub(super) runs: &'a mut Runs,
    pub(super) spaces: &'a mut Spaces,
    pub(super) salts: &'a Salts,
    pub(super) limits: &'a Limits,
    /// Weight of all nodes together.
    pub(super) total: &'a mut usize,
    pub(super) applied: &'a mut Applied,
}

/// One node's blocks.
pub(super) struct Node {
    /// Its number among all nodes.
    number: usize,
    /// Tokens in its blocks, by its last event.
    block_tokens: usize,
    /// By tier; most nodes tell of one.
    sides: [Option<Box<Side>>; TIERS],
    weight: usize,
    /// The attention group that is believed.
    group: Option<u32>,
}

/// What a node holds in one tier.
struct Side {
    names: Names,
    odd: HashMap<u64, Odd>,
    /// Names for a key beyond the first.
    more: HashMap<Loc, u32>,
    /// Copies of a name's block beyond the first.
    copies: HashMap<u64, u32>,
    held: usize,
}

impl Side {
    fn new() -> Self {
        Self {
            names: Names::new(),
            odd: HashMap::new(),
            more: HashMap::new(),
            copies: HashMap::new(),
            held: 0,
        }
    }

    /// The engine holds one more copy of the block of this name.
    fn add_copy(&mut self, name: u64) {
        let copies = self.copies.entry(name).or_default();
        *copies = copies.saturating_add(1);
    }

    /// One of several copies goes; false where there is only one.
    fn take_copy(&mut self, name: u64) -> bool {
        let Some(copies) = self.copies.get_mut(&name) else {
            return false;
        };
        *copies -= 1;
        if *copies == 0 {
            self.copies.remove(&name);
        }
        true
    }
}

/// The tier of a medium; none where we do not know it.
pub(super) fn tier_of(medium: Option<&Medium>) -> Option<usize> {
    match medium {
        None | Some(Medium::Device) => Some(0),
        Some(Medium::Host) => Some(1),
        Some(Medium::Disk) => Some(2),
        Some(Medium::Shared) => Some(3),
        Some(Medium::Other(_)) => None,
    }
}

impl Node {
    pub(super) fn new(number: usize) -> Self {
        Self {
            number,
            block_tokens: BLOCK_TOKENS,
            sides: [const { None }; TIERS],
            weight: 0,
            group: None,
        }
    }

    pub(super) fn number(&self) -> usize {
        self.number
    }

    /// Blocks of 16 tokens in each tier.
    pub(super) fn held(&self) -> [usize; TIERS] {
        let held = |side: &Option<Box<Side>>| side.as_ref().map_or(0, |side| side.held);
        std::array::from_fn(|tier| held(&self.sides[tier]))
    }

    pub(super) fn weight(&self) -> usize {
        self.weight
    }

    /// Whether a stored event is about blocks that prefill can reuse.
    pub(super) fn believes_stored(&mut self, group_idx: Option<u32>, kind: GroupKind) -> bool {
        let index = group_idx.unwrap_or(0);
        let is_full = kind == GroupKind::Full || kind == GroupKind::Unsaid && index == 0;
        is_full && *self.group.get_or_insert(index) == index
    }

    /// The same for a removal, which carries only the group's number.
    pub(super) fn believes_removed(&self, group_idx: Option<u32>) -> bool {
        self.group
            .is_none_or(|group| group == group_idx.unwrap_or(0))
    }

    /// Removes blocks of a tier by their names.
    pub(super) fn remove_all(
        &mut self,
        tier: usize,
        hashes: &[EngineHash],
        shared: &mut Shared<'_>,
    ) {
        for hash in hashes {
            let name = name_of(hash);
            let side = self.sides[tier].as_mut();
            if side.is_some_and(|side| side.take_copy(name)) {
                continue;
            }
            if !self.remove(tier, name, shared) {
                shared.applied.unknown_removals += 1;
            }
        }
    }

    /// Removes a block, however many copies of it there were, and those that continue its tail;
    /// false where it is not held.
    fn remove(&mut self, tier: usize, name: u64, shared: &mut Shared<'_>) -> bool {
        let Some(side) = self.sides[tier].as_mut() else {
            return false;
        };
        let Some(value) = side.names.remove(name) else {
            return false;
        };
        side.copies.remove(&name);
        if value != ODD {
            self.give_back(tier, 1, [value], shared);
            return true;
        }
        let mut gone: Vec<Odd> = side.odd.remove(&name).into_iter().collect();
        let before = gone.first().and_then(|odd| odd.before);
        if let Some(before) = before.and_then(|before| side.odd.get_mut(&before)) {
            before.after.remove(&name);
        }
        let mut at = 0;
        while at < gone.len() {
            for after in std::mem::take(&mut gone[at].after) {
                side.names.remove(after);
                side.copies.remove(&after);
                gone.extend(side.odd.remove(&after));
            }
            at += 1;
        }
        for odd in gone {
            if let Some(pinned) = odd.at {
                shared.runs.unpin(pinned);
            }
            self.give_back(tier, odd.weight(), odd.keys, shared);
        }
        true
    }

    /// Gives back the weight and the keys of a block.
    fn give_back(
        &mut self,
        tier: usize,
        weight: usize,
        keys: impl IntoIterator<Item = Loc>,
        shared: &mut Shared<'_>,
    ) {
        self.weight -= weight;
        *shared.total -= weight;
        let holder = Holder::new(self.number, tier);
        let Some(side) = self.sides[tier].as_mut() else {
            return;
        };
        for loc in keys {
            match side.more.get_mut(&loc) {
                Some(1) => drop(side.more.remove(&loc)),
                Some(more) => *more -= 1,
                None => {
                    shared.runs.release(holder, loc);
                    side.held -= 1;
                    shared.applied.removed += 1;
                }
            }
        }
    }

    /// Drops everything, and gives its memory back.
    pub(super) fn clear(&mut self, shared: &mut Shared<'_>) {
        *shared.total -= self.weight;
        self.weight = 0;
        for (tier, side) in self.sides.iter_mut().enumerate() {
            let Some(side) = side.take() else { continue };
            shared.applied.removed += side.held;
            let holder = Holder::new(self.number, tier);
            let odd = side.odd.values().flat_map(|odd| odd.keys.iter().copied());
            let plain = side.names.iter().map(|(_, loc)| loc);
            let keys = plain.filter(|loc| *loc != ODD).chain(odd);
            let runs: HashSet<u32> = keys.map(|loc| loc.run).collect();
            for run in runs {
                shared.runs.release_all(holder, run);
            }
            for pinned in side.odd.values().filter_map(|odd| odd.at) {
                shared.runs.unpin(pinned);
            }
        }
    }

    /// Where the key of a name lies, and in which tier; this tier's before others'.
    fn find(&self, tier: usize, name: u64) -> Option<(usize, Loc)> {
        let own = std::iter::once(tier);
        let mut tiers = own.chain((0..TIERS).filter(|other| *other != tier));
        tiers.find_map(|tier| {
            let loc = self.sides[tier].as_ref()?.names.get(name)?;
            Some((tier, loc))
        })
    }

    fn side(&mut self, tier: usize) -> &mut Side {
        self.sides[tier].get_or_insert_with(|| Box::new(Side::new()))
    }

    /// Recounts everything from the names; panics where something does not add up. Adds what is
    /// pinned to `pins`.
    pub(super) fn check_integrity(&self, in_runs: &HashMap<Holder, HashSet<Loc>>) {
        let mut weight = 0;
        for (tier, side) in self.sides.iter().enumerate() {
            let Some(side) = side else { continue };
            let mut holders: HashMap<Loc, u32> = HashMap::new();
            let mut odd_names = 0;
            for (name, value) in side.names.iter() {
                if value != ODD {
                    weight += 1;
                    *holders.entry(value).or_default() += 1;
                    continue;
                }
                odd_names += 1;
                let odd = &side.odd[&name];
                weight += odd.weight();
                for loc in &odd.keys {
                    *holders.entry(*loc).or_default() += 1;
                }
                side.check_odd(name, odd);
            }
            assert_eq!(odd_names, side.odd.len(), "names of odd blocks");
            assert_eq!(holders.len(), side.held, "keys of node {}", self.number);
            for (name, copies) in &side.copies {
                let is_held = side.names.get(*name).is_some();
                assert!(is_held && *copies > 0, "{copies} copies of {name}");
            }
            let empty = HashSet::new();
            let held = in_runs
                .get(&Holder::new(self.number, tier))
                .unwrap_or(&empty);
            assert_eq!(held.len(), side.held, "keys in runs, node {}", self.number);
            for (loc, count) in holders {
                assert!(held.contains(&loc), "{loc:?} has a name and is not held");
                let more = side.more.get(&loc).copied().unwrap_or_default();
                assert_eq!(more + 1, count, "names of {loc:?}");
            }
        }
        assert_eq!(weight, self.weight, "weight of node {}", self.number);
    }

    /// Places that blocks of other sizes than ours keep.
    pub(super) fn pins(&self) -> impl Iterator<Item = Loc> {
        let sides = self.sides.iter().flatten();
        sides.flat_map(|side| side.odd.values().filter_map(|odd| odd.at))
    }
}

impl Side {
    fn check_odd(&self, name: u64, odd: &Odd) {
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
}
