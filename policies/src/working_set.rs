//! What would the live sessions of a node like to find there again, and how much of it is kept?
//!
//! A node's cache keeps what was used last. So the sessions bound to a node, newest use first, are
//! what it holds, up to the size of its pool. Two things follow before any event tells of them.
//! A session behind so many others that the pool does not reach it will find its prefix gone, at
//! the latest when the requests that are queued before it have been computed. And the first session
//! that the pool does not reach was last used as long ago as a prefix is kept: where that is
//! minutes, what is pushed out will hardly be missed; where it is seconds, a turn that is about to
//! come must compute everything again.
//! One set for each node. A session counts with what of its prompt was not there when it came; what
//! sessions share counts for none of them. One that was silent for long is forgotten.
//!
//! Both questions are asked of every node for every turn, so neither may walk over the sessions:
//! each use takes the next place in a row, and a binary indexed tree (Fenwick, 1994) over the places
//! sums the blocks on either side of one. With n sessions a use and a question cost O(log n).

use std::collections::HashMap;

use crate::cost::to_f64;
use crate::view::SessionKey;

mod places;

use places::Places;

/// A session that was silent for so long is not counted on any more: nineteen of twenty pauses in
/// recorded agent sessions are shorter.
pub const SILENT_MS_MAX: u64 = 900_000;
/// Sessions remembered for a node; at the limit the longest silent one is forgotten.
const SESSIONS_MAX: usize = 100_000;

/// What one session has on a node.
#[derive(Clone, Copy, Debug)]
struct Own {
    /// Its place in the order of last use.
    place: usize,
    /// Leading blocks that were there before it came.
    shared: u64,
    /// The blocks of its prompt behind these.
    private: u64,
}

/// A place in the order of last use.
#[derive(Clone, Copy, Debug)]
struct Use {
    session: SessionKey,
    last_ms: u64,
}

/// The live sessions bound to one node.
#[derive(Clone, Debug, Default)]
pub struct WorkingSet {
    sessions: HashMap<SessionKey, Own>,
    /// Private blocks by last use, oldest first.
    order: Places<Use>,
}

impl WorkingSet {
    /// A turn of a session went to the node: a prompt of so many blocks, of which so many were
    /// there.
    pub fn used(&mut self, now_ms: u64, session: SessionKey, prompt: u64, overlap: u64) {
        let before = self
            .sessions
            .get(&session)
            .map_or(u64::MAX, |own| own.shared);
        self.left(session);
        if self.order.is_full() {
            let sessions = &mut self.sessions;
            self.order.close_ranks(|place, used| {
                if let Some(own) = sessions.get_mut(&used.session) {
                    own.place = place;
                }
            });
        }
        let shared = before.min(overlap).min(prompt);
        let private = prompt - shared;
        let last_ms = now_ms;
        let own = Own {
            place: self.order.push(Use { session, last_ms }, private),
            shared,
            private,
        };
        self.sessions.insert(session, own);
        while let Some(oldest) = self.order.first()
            && (oldest.last_ms.saturating_add(SILENT_MS_MAX) <= now_ms
                || self.sessions.len() > SESSIONS_MAX)
        {
            let oldest = oldest.session;
            self.left(oldest);
        }
    }

    /// A session is bound elsewhere from now on.
    pub fn left(&mut self, session: SessionKey) {
        if let Some(own) = self.sessions.remove(&session) {
            self.order.remove(own.place, own.private);
        }
    }

    /// Sessions that count.
    pub fn sessions(&self) -> usize {
        self.sessions.len()
    }

    /// Blocks of all of them, without what they share.
    pub fn private_blocks(&self) -> u64 {
        self.order.sum()
    }

    /// Leading blocks that a session can count on where the pool has so many; none where nothing is
    /// known to limit them.
    pub fn kept_blocks(&self, session: SessionKey, pool_blocks: u64) -> Option<u64> {
        let own = self.sessions.get(&session)?;
        let newer = self.order.sum() - self.order.sum_to(own.place);
        let room = pool_blocks.saturating_sub(newer);
        // The end of a prompt is pushed out before its beginning.
        (own.private > room).then_some(own.shared + room)
    }

    /// How many of the leading blocks that a node holds now a turn of a session will find. What is
    /// there goes only for blocks that others bring before it begins: `coming` of them at most.
    pub fn found_blocks(
        &self,
        session: SessionKey,
        pool_blocks: u64,
        held: u64,
        coming: u64,
    ) -> u64 {
        let stays = held.saturating_sub(coming);
        let kept = self.kept_blocks(session, pool_blocks);
        kept.map_or(held, |kept| held.min(kept.max(stays)))
    }

    /// How long ago, in milliseconds, the newest of those sessions was used whose blocks have to go
    /// for `wanted` more of this session; infinite where there is room.
    pub fn kept_ms(&self, now_ms: u64, pool_blocks: u64, wanted: u64, own: SessionKey) -> f64 {
        let own = self.sessions.get(&own);
        let own_blocks = own.map_or(0, |own| own.private);
        let others = self.order.sum() - own_blocks;
        let over = others.saturating_add(wanted).saturating_sub(pool_blocks);
        let gone = self.newest_gone(over.min(others), own);
        gone.map_or(f64::INFINITY, |used| {
            to_f64(now_ms.saturating_sub(used.last_ms))
        })
    }

    /// The last to go of others' sessions, oldest first, where so many of their blocks have to.
    fn newest_gone(&self, over: u64, own: Option<&Own>) -> Option<&Use> {
        if over == 0 {
            return None;
        }
        let last = self.order.reach(over)?;
        match own {
            // Its own blocks lie between, and stay.
            Some(own) if own.place <= last => {
                self.order.at(self.order.reach(over + own.private)?)
            }
            _ => self.order.at(last),
        }
    }
}

#[cfg(test)]
mod tests;
