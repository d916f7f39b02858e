//! How do node blocks get in that are not one block of ours, or that are told of without tokens?
//!
//! A block of another size is kept by the keys that end in it, see [`super::super::odd`]. Events about
//! slower tiers may lack tokens: their blocks are those that the node holds under these names in
//! another tier.

use std::collections::BTreeSet;

use super::store::Stop;
use super::{Node, ODD, Shared};
use crate::event::EngineHash;
use crate::index::odd::{Arrival, Odd, Place, name_of};
use crate::index::runs::Loc;

impl Node {
    /// Stores blocks that the node holds in another tier under the same names.
    pub(super) fn store_by_name(
        &mut self,
        tier: usize,
        names: &[EngineHash],
        shared: &mut Shared<'_>,
    ) {
        for (done, hash) in names.iter().enumerate() {
            let name = name_of(hash);
            let found = self.find(tier, name);
            let keys = match found {
                Some((found, _)) if found == tier => {
                    self.side(tier).add_copy(name);
                    shared.applied.repeated += 1;
                    continue;
                }
                Some((found, ODD)) => {
                    let side = self.sides[found].as_ref();
                    let odd = side.and_then(|side| side.odd.get(&name));
                    // One that shares a block of ours with another cannot be told of alone.
                    let whole = odd.filter(|odd| odd.tail.is_empty() && odd.before.is_none());
                    whole.map(|odd| (odd.keys.clone(), odd.space, odd.last, odd.at))
                }
                Some((_, loc)) => {
                    let hash = shared.runs.hash(loc);
                    Some((vec![loc], shared.runs.space(loc), hash, Some(loc)))
                }
                None => None,
            };
            let Some((keys, space, last, at)) = keys else {
                shared.applied.orphans += 1;
                continue;
            };
            if !self.take_weight(keys.len().max(1), shared) {
                shared.applied.over_limit += names.len() - done;
                return;
            }
            for loc in &keys {
                self.hold(tier, *loc, shared);
            }
            let is_plain = !matches!(found, Some((_, ODD)));
            if is_plain {
                let loc = keys[0];
                self.side(tier).names.insert(name, loc);
            } else {
                let odd = Odd {
                    space,
                    last,
                    at,
                    keys,
                    tail: Vec::new(),
                    before: None,
                    after: BTreeSet::new(),
                };
                self.keep_odd(tier, name, odd, shared);
            }
        }
    }

    /// Stores any other node block, and moves the place behind it.
    pub(super) fn store_odd(
        &mut self,
        tier: usize,
        name: u64,
        place: &mut Place,
        tokens: &[u32],
        shared: &mut Shared<'_>,
    ) -> Result<(), Stop> {
        let arrival = Arrival::at(place, shared.spaces.namespace(place.space), tokens);
        let parent = place.parent.replace((tier, name));
        let mut keys: Vec<Loc> = Vec::with_capacity(arrival.hashes.len());
        let mut rest = &arrival.hashes[..];
        while !rest.is_empty() {
            let placed = shared.runs.place(place.at, rest, place.space);
            let stretch = placed.ok_or(Stop::OverLimit)?;
            let at = (stretch.first.at..).take(stretch.count);
            keys.extend(at.map(|at| Loc {
                at,
                ..stretch.first
            }));
            place.at = keys.last().copied();
            rest = &rest[stretch.count..];
        }
        place.last = arrival.last;
        place.tail.clone_from(&arrival.tail);
        if let Some(value) = self.side(tier).names.get(name) {
            if self.is_same_odd(tier, name, value, place, &keys) {
                self.side(tier).add_copy(name);
                shared.applied.repeated += 1;
                return Ok(());
            }
            if !self.make_way(tier, name, parent, shared) {
                return Err(Stop::Orphan);
            }
        }
        if !self.take_weight(arrival.weight(), shared) {
            return Err(Stop::OverLimit);
        }
        for loc in &keys {
            self.hold(tier, *loc, shared);
        }
        let side = self.side(tier);
        if let Some(before) = arrival.before.and_then(|before| side.odd.get_mut(&before)) {
            before.after.insert(name);
        }
        let odd = Odd {
            space: place.space,
            last: arrival.last,
            at: place.at,
            keys,
            tail: arrival.tail,
            before: arrival.before,
            after: BTreeSet::new(),
        };
        self.keep_odd(tier, name, odd, shared);
        Ok(())
    }

    fn keep_odd(&mut self, tier: usize, name: u64, odd: Odd, shared: &mut Shared<'_>) {
        if let Some(at) = odd.at {
            shared.runs.pin(at);
        }
        let side = self.side(tier);
        side.odd.insert(name, odd);
        side.names.insert(name, ODD);
    }

    /// The same for a block of another size, whose keys these are.
    fn is_same_odd(&self, tier: usize, name: u64, value: Loc, place: &Place, keys: &[Loc]) -> bool {
        if value != ODD {
            return place.tail.is_empty() && keys == [value];
        }
        let side = self.sides[tier].as_ref();
        let odd = side.and_then(|side| side.odd.get(&name));
        odd.is_some_and(|odd| {
            odd.space == place.space
                && odd.at == place.at
                && odd.tail == place.tail
                && odd.keys == keys
        })
    }
}
