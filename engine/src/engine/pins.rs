//! Which blocks are kept for somebody who will fetch them?
//!
//! A prompt that was only prefilled keeps its full blocks pinned under a ticket, until the ticket is
//! released or its deadline passes. Tickets cannot starve the node: each lives for at most
//! [`HOLD_MAX`], all of them together hold at most a half of the pool (a request that would pin
//! more is refused), and when a running sequence cannot go on otherwise, tickets are broken, the one
//! that would end soonest first. Whoever comes for a broken ticket finds no such ticket and computes
//! the prompt again.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::job::{Held, HeldInfo, TicketId};
use crate::kv::pool::Pool;
use crate::kv::table::BlockTable;

/// How long blocks may be held: a transfer of any prompt over any network takes less.
pub const HOLD_MAX: Duration = Duration::from_secs(120);
/// Of the pool, the part that tickets may hold: one in so many blocks.
const POOL_PART: usize = 2;

/// Pinned blocks by ticket.
#[derive(Debug, Default)]
pub(super) struct Pins {
    pins: HashMap<TicketId, Pin>,
}

#[derive(Debug)]
struct Pin {
    table: BlockTable,
    deadline: Instant,
}

impl Pins {
    /// Blocks pinned; one that two tickets hold counts twice.
    pub(super) fn blocks(&self) -> usize {
        self.pins.values().map(|pin| pin.table.blocks().len()).sum()
    }

    /// How many tickets there are.
    pub(super) fn len(&self) -> usize {
        self.pins.len()
    }

    /// Blocks that may be pinned at most.
    pub(super) fn most(pool: &Pool) -> usize {
        pool.capacity() / POOL_PART
    }

    /// Whether so many more blocks may be pinned beside those `expected` by running requests.
    pub(super) fn may_pin(&self, blocks: usize, expected: usize, pool: &Pool) -> bool {
        self.blocks() + expected + blocks <= Self::most(pool)
    }

    /// Pins the full blocks of a table.
    pub(super) fn pin(
        &mut self,
        mut table: BlockTable,
        hold: Duration,
        pool: &mut Pool,
        now: Instant,
    ) -> Held {
        table.truncate(pool, table.published_tokens());
        let held = Held {
            ticket: TicketId(uuid::Uuid::new_v4()),
            deadline: now + hold.min(HOLD_MAX),
            blocks: table.blocks().len(),
        };
        let deadline = held.deadline;
        self.pins.insert(held.ticket, Pin { table, deadline });
        held
    }

    /// What a ticket holds.
    pub(super) fn info(&self, ticket: TicketId) -> Option<HeldInfo> {
        let pin = self.pins.get(&ticket)?;
        Some(HeldInfo {
            deadline: pin.deadline,
            chain: pin.table.hashes().to_vec(),
            blocks: pin.table.blocks().to_vec(),
        })
    }

    /// Whether there is such a ticket (still).
    pub(super) fn has(&self, ticket: TicketId) -> bool {
        self.pins.contains_key(&ticket)
    }

    /// The blocks of a ticket.
    pub(super) fn table(&self, ticket: TicketId) -> Option<&BlockTable> {
        self.pins.get(&ticket).map(|pin| &pin.table)
    }

    /// Gives a ticket's blocks back; false if there is no such ticket.
    pub(super) fn release(&mut self, ticket: TicketId, pool: &mut Pool) -> bool {
        let pin = self.pins.remove(&ticket);
        pin.map(|pin| pin.table.release(pool)).is_some()
    }

    /// Gives back what is past its deadline; says how many tickets that were.
    pub(super) fn expire(&mut self, pool: &mut Pool, now: Instant) -> usize {
        let over: Vec<_> = self.pins.extract_if(|_, pin| pin.deadline <= now).collect();
        let count = over.len();
        over.into_iter()
            .for_each(|(_, pin)| pin.table.release(pool));
        count
    }

    /// Breaks the ticket that would end soonest; false if there is none.
    pub(super) fn break_soonest(&mut self, pool: &mut Pool) -> bool {
        let soonest = self.pins.iter().min_by_key(|(_, pin)| pin.deadline);
        let Some(ticket) = soonest.map(|(ticket, _)| *ticket) else {
            return false;
        };
        self.release(ticket, pool)
    }

    /// The next deadline.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.pins.values().map(|pin| pin.deadline).min()
    }

    /// Every pinned block, for tests.
    #[cfg(test)]
    pub(super) fn all_blocks(&self) -> Vec<crate::model::BlockId> {
        let blocks = |pin: &Pin| pin.table.blocks().to_vec();
        self.pins.values().flat_map(blocks).collect()
    }
}
