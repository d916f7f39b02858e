//! Which of the waiting turns goes next, which still waits, and which is told to come again?
//!
//! Two reasons to wait in the gateway rather than at a node. A node that has prompts ahead for a
//! while takes them in the order in which they came: what waits here can be ordered, the shortest
//! uncached work first. And past the working-set cliff ([`working_set`]) more sessions at once serve
//! fewer turns: a newcomer waits until there is room for its context. Whoever waits gains on the
//! others by waiting, a tenant with much in flight goes behind one with little, and who has waited
//! too long is told when to come again; its place is kept meanwhile.
//!
//! Nothing is measured here and nothing sleeps: the caller asks with its clock after every change,
//! and at [`Gate::wake_ms`].

mod queue;
pub mod working_set;

use std::collections::HashMap;

use crate::view::SessionKey;
use queue::{Queue, Waiting};
pub use working_set::Footprint;
use working_set::WorkingSet;

/// How turns are held.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Params {
    /// A node with more prefill ahead than this takes no further turn from here.
    pub node_queue_ms: f64,
    /// Milliseconds of work that a millisecond of waiting outweighs.
    pub ageing: f64,
    /// The share of the pools that the working set may take.
    pub set_share: f64,
    /// A member that is silent for longer than this share of all pauses makes room.
    pub pause_quantile: f64,
    /// Nobody waits longer at a time.
    pub wait_ms_max: f64,
    /// Turns that may wait.
    pub waiting_max: usize,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            node_queue_ms: 500.0,
            ageing: 0.2,
            set_share: 0.9,
            pause_quantile: 0.95,
            wait_ms_max: 30_000.0,
            waiting_max: 4096,
        }
    }
}

/// A turn that wants to go on.
#[derive(Clone, Debug)]
pub struct Turn {
    /// The caller's name for it.
    pub id: u64,
    /// Who pays.
    pub tenant: u64,
    /// Its conversation.
    pub session: SessionKey,
    /// What its uncached tokens take on the node that it would go to.
    pub work_ms: f64,
    /// What its prompt takes.
    pub footprint: Footprint,
}

/// What becomes of a turn.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Verdict {
    /// It goes now; the caller has dispatched it.
    Go,
    /// It waits.
    Hold,
    /// It is refused.
    Refuse {
        /// When to come again.
        retry_after_ms: f64,
    },
}

/// The turns that wait, and the sessions that are served.
#[derive(Debug)]
pub struct Gate {
    params: Params,
    queue: Queue,
    set: WorkingSet,
    /// Sessions that were refused, and since when they have waited.
    refused: HashMap<SessionKey, Refused>,
    /// Work of each tenant that was sent and has no first token yet.
    in_flight_ms: HashMap<u64, f64>,
    started: HashMap<u64, Started>,
}

#[derive(Clone, Copy, Debug)]
struct Refused {
    since_ms: f64,
    until_ms: f64,
}

/// A turn that was let go.
#[derive(Clone, Copy, Debug)]
struct Started {
    session: SessionKey,
    tenant: u64,
    /// Until its first token.
    work_ms: f64,
}

/// How many turns are tried before the rest has to wait for the next change: those behind them
/// would hardly find another node.
const TRIED_MAX: usize = 16;
/// A refused session keeps its place for so long after it should have come again.
const PLACE_KEPT_MS: f64 = 60_000.0;
/// The longest time that a refused client is told to stay away: what is behind it nobody can say.
const RETRY_MS_MAX: f64 = 60_000.0;
/// Refused sessions that are remembered.
const REFUSED_MAX: usize = 65_536;

impl Gate {
    /// A gate with nobody at it.
    pub fn new(params: Params) -> Self {
        Self {
            params,
            queue: Queue::default(),
            set: WorkingSet::default(),
            refused: HashMap::new(),
            in_flight_ms: HashMap::new(),
            started: HashMap::new(),
        }
    }

    /// Turns that wait.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// The sessions that are served.
    pub fn set(&self) -> &WorkingSet {
        &self.set
    }

    /// Whether a node with so much prefill ahead takes a turn.
    pub fn is_open(&self, queue_ms: f64) -> bool {
        queue_ms <= self.params.node_queue_ms
    }

    /// A turn has come. `capacity_blocks` is what the pools hold, in blocks of 512 tokens (0: not
    /// known, then everybody fits); `start` sends it if the node it would go to is open, and says
    /// whether it did.
    pub fn arrive(
        &mut self,
        now_ms: f64,
        capacity_blocks: u64,
        turn: Turn,
        start: impl FnOnce() -> bool,
    ) -> Verdict {
        // Whoever waits was asked after the last change: the node or the room that this one finds
        // is not what they wait for.
        let is_member = self.enter(now_ms, capacity_blocks, &turn);
        if is_member && start() {
            self.go(&turn);
            return Verdict::Go;
        }
        if self.queue.len() >= self.params.waiting_max {
            if is_member {
                self.set.end(now_ms, turn.session);
            }
            return self.refuse(now_ms, turn.session, now_ms);
        }
        let refused = self.refused.remove(&turn.session);
        self.queue.put(Waiting {
            turn,
            is_member,
            since_ms: refused.map_or(now_ms, |refused| refused.since_ms),
            came_ms: now_ms,
        });
        Verdict::Hold
    }

    /// Lets go whoever may: `start` sends a turn if the node it would go to is open, and says
    /// whether it did. Answers for every turn that waits no longer.
    pub fn release(
        &mut self,
        now_ms: f64,
        capacity_blocks: u64,
        mut start: impl FnMut(u64) -> bool,
    ) -> Vec<(u64, Verdict)> {
        let mut done = Vec::new();
        for late in self.queue.take_late(now_ms - self.params.wait_ms_max) {
            if late.is_member {
                self.set.end(now_ms, late.turn.session);
            }
            let verdict = self.refuse(now_ms, late.turn.session, late.since_ms);
            done.push((late.turn.id, verdict));
        }
        let order = self.queue.order(|waiting| self.score(now_ms, waiting));
        let mut tried = 0;
        for id in order {
            if tried == TRIED_MAX {
                break;
            }
            let Some(mut waiting) = self.queue.remove(id) else {
                continue;
            };
            waiting.is_member =
                waiting.is_member || self.enter(now_ms, capacity_blocks, &waiting.turn);
            if waiting.is_member && start(id) {
                self.go(&waiting.turn);
                done.push((id, Verdict::Go));
            } else {
                tried += 1;
                self.queue.put(waiting);
            }
        }
        done
    }

    /// Who waits goes away.
    pub fn leave(&mut self, now_ms: f64, id: u64) {
        if let Some(gone) = self.queue.remove(id)
            && gone.is_member
        {
            self.set.end(now_ms, gone.turn.session);
        }
    }

    /// The first token of a turn that was let go.
    pub fn first_token(&mut self, id: u64) {
        if let Some(started) = self.started.get_mut(&id) {
            let work_ms = std::mem::take(&mut started.work_ms);
            if let Some(sum) = self.in_flight_ms.get_mut(&started.tenant) {
                *sum -= work_ms;
            }
        }
    }

    /// A turn that was let go has ended, in whatever way.
    pub fn ended(&mut self, now_ms: f64, id: u64) {
        self.first_token(id);
        if let Some(started) = self.started.remove(&id) {
            self.set.end(now_ms, started.session);
            self.in_flight_ms.retain(|_, sum| *sum > 1e-6);
        }
    }

    /// When to ask [`Gate::release`] even if nothing happens; none while nobody waits.
    pub fn wake_ms(&self) -> Option<f64> {
        let late_ms = self.queue.oldest_ms()? + self.params.wait_ms_max;
        let patience_ms = self.set.patience_ms(self.params.pause_quantile);
        let silent_ms = self.set.longest_silent().map(|since| since + patience_ms);
        Some(silent_ms.map_or(late_ms, |silent| late_ms.min(silent)))
    }

    /// The lower, the sooner.
    fn score(&self, now_ms: f64, waiting: &Waiting) -> f64 {
        let turn = &waiting.turn;
        let tenant_ms = self.in_flight_ms.get(&turn.tenant).copied().unwrap_or(0.0);
        turn.work_ms + tenant_ms - self.params.ageing * (now_ms - waiting.since_ms)
    }

    /// Makes a turn's session one of those that are served, if its context fits beside theirs; who
    /// makes room for it leaves.
    fn enter(&mut self, now_ms: f64, capacity_blocks: u64, turn: &Turn) -> bool {
        let fits = capacity_blocks == 0 || self.makes_room(now_ms, capacity_blocks, turn);
        if fits {
            let Turn {
                tenant,
                session,
                ref footprint,
                ..
            } = *turn;
            self.refused.remove(&session);
            self.set.begin(now_ms, session, tenant, footprint.clone());
        }
        fits
    }

    fn makes_room(&mut self, now_ms: f64, capacity_blocks: u64, turn: &Turn) -> bool {
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a share of a number of blocks"
        )]
        let most = (self.params.set_share * capacity_blocks as f64) as u64;
        while self.set.blocks() > most && self.set.expel_one() {}
        if self.set.holds(turn.session) {
            return true;
        }
        let patience_ms = self.set.patience_ms(self.params.pause_quantile);
        loop {
            let added = self.set.added(&turn.footprint);
            // A context that fits nowhere is served alone: nobody could ever make room for it.
            if self.set.blocks() + added <= most || self.set.is_empty() {
                return true;
            }
            if !self.set.expel_silent(now_ms, patience_ms) {
                return false;
            }
        }
    }

    fn go(&mut self, turn: &Turn) {
        *self.in_flight_ms.entry(turn.tenant).or_default() += turn.work_ms;
        let started = Started {
            session: turn.session,
            tenant: turn.tenant,
            work_ms: turn.work_ms,
        };
        self.started.insert(turn.id, started);
    }

    fn refuse(&mut self, now_ms: f64, session: SessionKey, since_ms: f64) -> Verdict {
        let retry_after_ms = self.params.wait_ms_max.clamp(1000.0, RETRY_MS_MAX);
        if self.refused.len() >= REFUSED_MAX {
            self.refused.retain(|_, refused| refused.until_ms > now_ms);
        }
        if self.refused.len() < REFUSED_MAX {
            let since_ms = self
                .refused
                .get(&session)
                .map_or(since_ms, |refused| refused.since_ms.min(since_ms));
            let until_ms = now_ms + retry_after_ms + PLACE_KEPT_MS;
            self.refused
                .insert(session, Refused { since_ms, until_ms });
        }
        Verdict::Refuse { retry_after_ms }
    }
}

#[cfg(test)]
mod tests;
