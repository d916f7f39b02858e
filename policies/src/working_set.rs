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

use std::collections::{BTreeMap, HashMap};

use crate::cost::to_f64;
use crate::view::SessionKey;

/// A session that was silent for so long is not counted on any more: nineteen of twenty pauses in
/// recorded agent sessions are shorter.
pub const SILENT_MS_MAX: u64 = 900_000;
/// Sessions remembered for a node; at the limit the longest silent one is forgotten.
const SESSIONS_MAX: usize = 100_000;

/// What one session has on a node.
#[derive(Clone, Copy, Debug)]
struct Own {
    last_ms: u64,
    /// Leading blocks that were there before it came.
    shared: u64,
    /// The blocks of its prompt behind these.
    private: u64,
}

/// The live sessions bound to one node.
#[derive(Clone, Debug, Default)]
pub struct WorkingSet {
    sessions: HashMap<SessionKey, Own>,
    /// Private blocks by last use, oldest first.
    order: BTreeMap<(u64, SessionKey), u64>,
    private: u64,
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
        let shared = before.min(overlap).min(prompt);
        let own = Own {
            last_ms: now_ms,
            shared,
            private: prompt - shared,
        };
        self.sessions.insert(session, own);
        self.order.insert((now_ms, session), own.private);
        self.private += own.private;
        while let Some(((last_ms, oldest), _)) = self.order.first_key_value()
            && (last_ms.saturating_add(SILENT_MS_MAX) <= now_ms
                || self.sessions.len() > SESSIONS_MAX)
        {
            let oldest = *oldest;
            self.left(oldest);
        }
    }

    /// The session goes elsewhere from now on.
    pub fn left(&mut self, session: SessionKey) {
        if let Some(own) = self.sessions.remove(&session) {
            self.order.remove(&(own.last_ms, session));
            self.private -= own.private;
        }
    }

    /// Sessions.
    pub fn sessions(&self) -> usize {
        self.sessions.len()
    }

    /// Blocks of 16 tokens that they would like to find again, what they share aside.
    pub fn private_blocks(&self) -> u64 {
        self.private
    }

    /// Leading blocks of its last prompt that a session bound here can expect to find again in a
    /// pool of so many blocks; none where nothing limits it: it is not bound here, or all that it
    /// used is kept, the answer included, which nobody has counted here.
    pub fn kept_blocks(&self, session: SessionKey, pool_blocks: u64) -> Option<u64> {
        let own = self.sessions.get(&session)?;
        let mut room = pool_blocks;
        for ((_, other), private) in self.order.iter().rev() {
            if *other == session {
                break;
            }
            room = room.saturating_sub(*private);
        }
        // The end of a prompt is pushed out before its beginning.
        (own.private > room).then_some(own.shared + room)
    }

    /// Time since the last use of what a pool of so many blocks pushes out to make room for
    /// `wanted` more, as far as another session than `own` would miss it. Infinite where there is
    /// room.
    pub fn kept_ms(&self, now_ms: u64, pool_blocks: u64, wanted: u64, own: SessionKey) -> f64 {
        let own_blocks = self.sessions.get(&own).map_or(0, |own| own.private);
        let mut over = (self.private - own_blocks)
            .saturating_add(wanted)
            .saturating_sub(pool_blocks);
        let mut newest_gone_ms = None;
        for ((last_ms, session), private) in &self.order {
            if over == 0 {
                break;
            }
            if *session != own {
                over = over.saturating_sub(*private);
                newest_gone_ms = Some(*last_ms);
            }
        }
        newest_gone_ms.map_or(f64::INFINITY, |last_ms| {
            to_f64(now_ms.saturating_sub(last_ms))
        })
    }
}

#[cfg(test)]
mod tests;
