//! Which blocks will nodes hold once the requests that are under way there have been computed?
//!
//! Between the moment a request is sent and the moment its node's events tell of its blocks, the
//! index knows nothing of them: a burst of siblings (an agent's parallel calls on one prompt) would
//! spread over the fleet and compute the same prefix everywhere. So each request in flight lends
//! its chain of hashes to this list, and a lookup takes the longer of what is held and what is
//! expected.
//!
//! A prompt of 100,000 tokens has 6,250 blocks, so nothing is done for each block: chains are kept
//! whole, shared with the request that owns them, and in lexicographic order. Each hash covers all
//! blocks before it, so two chains agree up to some place and nowhere behind it: a binary search
//! finds that place, and of two neighbours' agreements the shorter one is that of the outer pair. A
//! lookup finds its place in the order and walks outwards until every node has been met.
//!
//! Left out: time, and whether what was expected came. A ticket is given back when its request
//! ends, or earlier, when the index shows the node to hold the chain.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::sync::Arc;

use crate::block::BlockHash;
use crate::ids::NodeId;

/// Bounds of what is expected. At each of them a request goes without a ticket: its siblings do not
/// know of it, and nothing else happens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Tickets that are out at the same time.
    pub tickets_max: usize,
    /// Blocks in their chains together, 16 bytes each.
    pub blocks_max: usize,
}

impl Default for Limits {
    /// A thousand requests for each of 64 nodes, 64 million tokens: 64 MB, which the requests have
    /// in memory already.
    fn default() -> Self {
        Self {
            tickets_max: 65_536,
            blocks_max: 4_000_000,
        }
    }
}

/// The chains of requests in flight.
#[derive(Default)]
pub struct Expected {
    limits: Limits,
    /// By chain, then by number.
    entries: Vec<Entry>,
    seats: Vec<Seat>,
    seat_of: HashMap<NodeId, usize>,
    /// Seats with tickets.
    taken: usize,
    blocks: usize,
    next: u64,
}

/// What a request has lent; to be given back with [`Expected::end`].
#[must_use = "a ticket that is not given back counts for ever"]
#[derive(Debug)]
pub struct Ticket {
    chain: Arc<[BlockHash]>,
    number: u64,
}

impl Ticket {
    /// The chain that its node is expected to hold.
    pub fn chain(&self) -> &Arc<[BlockHash]> {
        &self.chain
    }
}

struct Entry {
    chain: Arc<[BlockHash]>,
    number: u64,
    seat: usize,
    /// Leading blocks in common with the entry after this one.
    common: usize,
}

/// A node and how many tickets name it.
struct Seat {
    id: NodeId,
    tickets: usize,
}

impl Expected {
    /// Nothing is expected yet.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            ..Self::default()
        }
    }

    /// Expects a node to hold this chain soon; none where a limit is reached, or the chain is empty.
    pub fn add(&mut self, node: &NodeId, chain: &Arc<[BlockHash]>) -> Option<Ticket> {
        let blocks = self.blocks.saturating_add(chain.len());
        let is_full = self.entries.len() >= self.limits.tickets_max;
        if chain.is_empty() || is_full || blocks > self.limits.blocks_max {
            return None;
        }
        self.blocks = blocks;
        let number = self.next;
        self.next += 1;
        let seat = self.sit(node);
        // Equal chains lie in the order of their numbers: the newest comes last.
        let at = self
            .entries
            .partition_point(|entry| compare(&entry.chain, chain) != Ordering::Greater);
        let after = self.entries.get(at).map_or(0, |e| common(&e.chain, chain));
        if let Some(before) = at.checked_sub(1) {
            self.entries[before].common = common(&self.entries[before].chain, chain);
        }
        let entry = Entry {
            chain: Arc::clone(chain),
            number,
            seat,
            common: after,
        };
        self.entries.insert(at, entry);
        Some(Ticket {
            chain: Arc::clone(chain),
            number,
        })
    }

    /// Expects it no longer: the request has ended, or the node's events have told of the chain.
    pub fn end(&mut self, ticket: Ticket) {
        let Ticket { chain, number } = ticket;
        let at = self.entries.partition_point(|entry| {
            let order = compare(&entry.chain, &chain);
            order.then(entry.number.cmp(&number)) == Ordering::Less
        });
        // A ticket of a node that was forgotten is gone already.
        if self.entries.get(at).is_some_and(|e| e.number == number) {
            self.take_out(at);
        }
    }

    /// Drops all tickets of a node: its process is gone, and its requests with it.
    pub fn forget(&mut self, node: &NodeId) {
        let Some(seat) = self.seat_of.get(node).copied() else {
            return;
        };
        for at in (0..self.entries.len()).rev() {
            if self.entries[at].seat == seat {
                self.take_out(at);
            }
        }
    }

    /// Leading blocks of `chain` that each node is expected to hold; nodes without any are left out.
    /// In no particular order.
    pub fn overlap(&self, chain: &[BlockHash]) -> Vec<(NodeId, usize)> {
        let mut longest = vec![0; self.seats.len()];
        let at = self
            .entries
            .partition_point(|entry| compare(&entry.chain, chain) == Ordering::Less);
        let before = self.entries[..at].iter().rev();
        let first = self.entries[..at].last();
        self.walk(&mut longest, first, before.skip(1), chain, |_, entry| {
            entry.common
        });
        let after = self.entries[at..].iter();
        let first = self.entries.get(at);
        self.walk(&mut longest, first, after.skip(1), chain, |last, _| {
            last.common
        });
        let seats = self.seats.iter().zip(longest);
        seats
            .filter(|(_, blocks)| *blocks > 0)
            .map(|(seat, blocks)| (seat.id.clone(), blocks))
            .collect()
    }

    /// The longer of what each node holds, as the index says, and what it is expected to hold.
    pub fn held_or_expected(
        &self,
        chain: &[BlockHash],
        held: Vec<(NodeId, usize)>,
    ) -> Vec<(NodeId, usize)> {
        let mut all = held;
        for (node, blocks) in self.overlap(chain) {
            match all.iter_mut().find(|(id, _)| *id == node) {
                Some((_, held)) => *held = blocks.max(*held),
                None => all.push((node, blocks)),
            }
        }
        all
    }

    /// Tickets that are out.
    pub fn tickets(&self) -> usize {
        self.entries.len()
    }

    /// Notes for each node the first entry on the way, which agrees with the chain longest.
    /// `between` names what two neighbours on the way have in common.
    fn walk<'a>(
        &self,
        longest: &mut [usize],
        first: Option<&'a Entry>,
        rest: impl Iterator<Item = &'a Entry>,
        chain: &[BlockHash],
        between: impl Fn(&Entry, &Entry) -> usize,
    ) {
        let Some(mut last) = first else { return };
        let mut run = common(&last.chain, chain);
        let mut met = vec![false; self.seats.len()];
        let mut left = self.taken;
        let mut rest = rest;
        while run > 0 {
            if !std::mem::replace(&mut met[last.seat], true) {
                longest[last.seat] = run.max(longest[last.seat]);
                left -= 1;
            }
            let Some(next) = rest.next().filter(|_| left > 0) else {
                return;
            };
            run = run.min(between(last, next));
            last = next;
        }
    }

    fn sit(&mut self, node: &NodeId) -> usize {
        let seat = match self.seat_of.get(node) {
            Some(seat) => *seat,
            None => {
                let seat = Seat {
                    id: node.clone(),
                    tickets: 0,
                };
                let free = self.seats.iter().position(|seat| seat.tickets == 0);
                let at = free.unwrap_or(self.seats.len());
                match self.seats.get_mut(at) {
                    Some(old) => *old = seat,
                    None => self.seats.push(seat),
                }
                self.seat_of.insert(node.clone(), at);
                at
            }
        };
        self.taken += usize::from(self.seats[seat].tickets == 0);
        self.seats[seat].tickets += 1;
        seat
    }

    fn take_out(&mut self, at: usize) {
        let gone = self.entries.remove(at);
        if let Some(before) = at.checked_sub(1) {
            let entry = &mut self.entries[before];
            entry.common = entry.common.min(gone.common);
        }
        self.blocks -= gone.chain.len();
        let seat = &mut self.seats[gone.seat];
        seat.tickets -= 1;
        if seat.tickets == 0 {
            self.taken -= 1;
            self.seat_of.remove(&seat.id);
        }
    }
}

/// Leading blocks that two chains have in common.
pub(crate) fn common(a: &[BlockHash], b: &[BlockHash]) -> usize {
    let shorter = a.len().min(b.len());
    match shorter.checked_sub(1) {
        None => 0,
        Some(last) if a[last] == b[last] => shorter,
        Some(_) => {
            let (mut same, mut differs) = (0, shorter);
            while same < differs {
                let middle = usize::midpoint(same, differs);
                if a[middle] == b[middle] {
                    same = middle + 1;
                } else {
                    differs = middle;
                }
            }
            same
        }
    }
}

fn compare(a: &[BlockHash], b: &[BlockHash]) -> Ordering {
    let common = common(a, b);
    match (a.get(common), b.get(common)) {
        (Some(a), Some(b)) => a.cmp(b),
        (a, b) => a.is_some().cmp(&b.is_some()),
    }
}

#[cfg(test)]
mod tests;
