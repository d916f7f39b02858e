//! Which of the waiting turns goes next, which still waits, and which is told to come again?
//!
//! Two reasons to wait in the gateway rather than at a node. A node that has prompts ahead for a
//! while takes them in the order in which they came: what waits here can be ordered, the shortest
//! uncached work first. And past the working-set cliff ([`served`]) more sessions at once serve
//! fewer turns: a newcomer waits until there is room for its context. Whoever waits gains on the
//! others by waiting, a tenant with much in flight goes behind one with little, and who has waited
//! too long is told when to come again; its place is kept meanwhile.
//!
//! Nothing is measured here and nothing sleeps: the caller asks with its clock after every change,
//! and at [`Gate::wake_ms`].

mod queue;
pub mod served;

use std::collections::{HashMap, HashSet};

use crate::cost::to_f64;
use crate::view::SessionKey;
use queue::{Queue, Waiting};
pub use served::Footprint;
use served::Served;

/// How turns are held.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Params {
    /// A node with more prefill ahead than this takes no further turn from here.
    pub node_queue_ms: f64,
    /// Milliseconds of work that a millisecond of waiting outweighs.
    pub ageing: f64,
    /// Above this much prefill ahead of a turn, on average over the nodes, the set shrinks.
    pub distress_ms: f64,
    /// Below this, it grows while newcomers wait.
    pub calm_ms: f64,
    /// By this share of the pools a second.
    pub growth_per_s: f64,
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
            node_queue_ms: 20_000.0,
            ageing: 0.2,
            distress_ms: 3000.0,
            calm_ms: 500.0,
            growth_per_s: 0.003,
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
    /// Whether the conversation has had a turn before. Many never come back: the context of one
    /// that has not yet keeps nobody out.
    pub returns: bool,
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

/// What the fleet has for newcomers.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Room {
    /// What all pools hold, in blocks of 512 tokens; 0 where it is not known: then everybody fits.
    pub capacity_blocks: u64,
    /// The prefill ahead of a turn, on average over the nodes.
    pub queue_ms: f64,
}

/// What became of an attempt to send a turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Start {
    /// It is on its way to this node (the caller's number of it).
    Sent(u64),
    /// It would go to this node, which has too much ahead ([`Gate::is_open`]).
    Full(u64),
    /// It can go nowhere now.
    Nowhere,
}

/// The turns that wait, and the sessions that are served.
#[derive(Debug)]
pub struct Gate {
    params: Params,
    queue: Queue,
    served: Served,
    /// Sessions that were refused, and since when they have waited.
    refused: HashMap<SessionKey, Refused>,
    /// Work of each tenant that was sent and has no first token yet.
    in_flight_ms: HashMap<u64, f64>,
    started: HashMap<u64, Started>,
    /// The share of the pools that the set may take now.
    share: f64,
    adapted_ms: f64,
    /// When the waiting turns were last asked.
    asked_ms: f64,
    /// When all of them were.
    asked_all_ms: f64,
    /// Nodes that got something done since.
    changed: HashSet<u64>,
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
    node: u64,
    /// Until its first token.
    work_ms: f64,
}

/// A turn whose node was full is asked again after this time even if the node has told nothing.
const ASK_ALL_EVERY_MS: f64 = 1000.0;
/// So many times what the pools hold is no bound at all.
const SHARE_MAX: f64 = 8.0;
/// In distress the set shrinks by this much a second.
const SHRINK_PER_S: f64 = 0.05;

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
            served: Served::default(),
            refused: HashMap::new(),
            in_flight_ms: HashMap::new(),
            started: HashMap::new(),
            share: SHARE_MAX,
            adapted_ms: 0.0,
            asked_ms: 0.0,
            asked_all_ms: 0.0,
            changed: HashSet::new(),
        }
    }

    /// How turns are held.
    pub fn params(&self) -> &Params {
        &self.params
    }

    /// Turns that wait.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// The sessions that are served.
    pub fn served(&self) -> &Served {
        &self.served
    }

    /// Whether a node with so much prefill ahead takes a turn.
    pub fn is_open(&self, queue_ms: f64) -> bool {
        queue_ms <= self.params.node_queue_ms
    }

    /// A turn has come. `start` sends it if the node it would go to is open, and says
    /// whether it did.
    pub fn arrive(
        &mut self,
        now_ms: f64,
        room: Room,
        turn: Turn,
        start: impl FnOnce() -> Start,
    ) -> Verdict {
        self.adapt(now_ms, room);
        // Whoever waits was asked after the last change: the node or the room that this one finds
        // is not what they wait for.
        let is_member = self.enter(now_ms, room, &turn);
        let started = if is_member { start() } else { Start::Nowhere };
        if let Start::Sent(node) = started {
            self.go(&turn, node);
            return Verdict::Go;
        }
        if self.queue.len() >= self.params.waiting_max {
            if is_member {
                self.served.end(now_ms, turn.session);
            }
            return self.refuse(now_ms, turn.session, now_ms);
        }
        let refused = self.refused.remove(&turn.session);
        self.queue.put(Waiting {
            turn,
            is_member,
            full: full_node(started),
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
        room: Room,
        mut start: impl FnMut(u64) -> Start,
    ) -> Vec<(u64, Verdict)> {
        self.adapt(now_ms, room);
        self.asked_ms = now_ms;
        let mut done = Vec::new();
        for late in self.queue.take_late(now_ms - self.params.wait_ms_max) {
            if late.is_member {
                self.served.end(now_ms, late.turn.session);
            }
            let verdict = self.refuse(now_ms, late.turn.session, late.since_ms);
            done.push((late.turn.id, verdict));
        }
        let mut changed = std::mem::take(&mut self.changed);
        // Time passes at the nodes, too, and a turn may have found another one meanwhile.
        let all = now_ms - self.asked_all_ms >= ASK_ALL_EVERY_MS;
        if all {
            self.asked_all_ms = now_ms;
        }
        let order = self.queue.order(|waiting| self.score(now_ms, waiting));
        let mut full = HashSet::new();
        for id in order {
            let may_try = |waiting: &Waiting| match waiting.full {
                Some(node) => !full.contains(&node) && (all || changed.contains(&node)),
                None => true,
            };
            let Some(mut waiting) = self.queue.remove_if(id, may_try) else {
                continue;
            };
            waiting.is_member = waiting.is_member || self.enter(now_ms, room, &waiting.turn);
            let started = match waiting.is_member {
                true => start(id),
                false => Start::Nowhere,
            };
            if let Start::Sent(node) = started {
                self.go(&waiting.turn, node);
                done.push((id, Verdict::Go));
                continue;
            }
            waiting.full = full_node(started);
            if let Some(node) = waiting.full {
                full.insert(node);
                changed.remove(&node);
            }
            let is_newcomer = !waiting.is_member;
            self.queue.put(waiting);
            if is_newcomer {
                // Room is given in order: a small context must not pass a large one for ever.
                break;
            }
        }
        done
    }

    /// Who waits goes away.
    pub fn leave(&mut self, now_ms: f64, id: u64) {
        if let Some(gone) = self.queue.remove(id)
            && gone.is_member
        {
            self.served.end(now_ms, gone.turn.session);
        }
    }

    /// The first token of a turn that was let go.
    pub fn first_token(&mut self, id: u64) {
        if let Some(started) = self.started.get_mut(&id) {
            self.changed.insert(started.node);
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
            self.changed.insert(started.node);
            self.served.end(now_ms, started.session);
            self.in_flight_ms.retain(|_, sum| *sum > 1e-6);
        }
    }

    /// When to ask [`Gate::release`] even if nothing happens; none while nobody waits.
    pub fn wake_ms(&self) -> Option<f64> {
        let late_ms = self.queue.oldest_ms()? + self.params.wait_ms_max;
        let patience_ms = self.served.patience_ms(self.params.pause_quantile);
        let leaves = self
            .served
            .longest_silent()
            .map(|since| since + patience_ms);
        // A member that should have left has nobody to make room for.
        let leaves_ms = leaves.filter(|at| *at > self.asked_ms && self.queue.has_newcomers());
        let again_ms = self.asked_all_ms + ASK_ALL_EVERY_MS;
        let again_ms = Some(again_ms).filter(|_| self.queue.has_members());
        let all = [Some(late_ms), leaves_ms, again_ms];
        all.into_iter().flatten().min_by(f64::total_cmp)
    }

    /// The lower, the sooner.
    fn score(&self, now_ms: f64, waiting: &Waiting) -> f64 {
        let turn = &waiting.turn;
        let tenant_ms = self.in_flight_ms.get(&turn.tenant).copied().unwrap_or(0.0);
        turn.work_ms + tenant_ms - self.params.ageing * (now_ms - waiting.since_ms)
    }

    /// Makes a turn's session one of those that are served, if its context fits beside theirs; who
    /// makes room for it leaves.
    fn enter(&mut self, now_ms: f64, room: Room, turn: &Turn) -> bool {
        let fits = room.capacity_blocks == 0 || self.makes_room(now_ms, room, turn);
        if fits {
            self.refused.remove(&turn.session);
            let counted = if turn.returns {
                turn.footprint.clone()
            } else {
                Footprint::default()
            };
            let who = (turn.session, turn.tenant);
            self.served.begin(now_ms, who, counted);
        }
        fits
    }

    /// Lets the set follow how busy the fleet is. Where everybody is served in time it has no bound,
    /// whatever the pools hold; where turns queue up it shrinks to what the pools do hold.
    fn adapt(&mut self, now_ms: f64, room: Room) {
        let seconds = ((now_ms - self.adapted_ms) / 1000.0).clamp(0.0, 10.0);
        self.adapted_ms = now_ms;
        let capacity = to_f64(room.capacity_blocks).max(1.0);
        if room.queue_ms > self.params.distress_ms {
            let taken = to_f64(self.served.blocks()) / capacity;
            let from = self.share.min(taken.max(self.params.set_share));
            self.share = (from * (1.0 - SHRINK_PER_S * seconds)).max(self.params.set_share);
        } else if room.queue_ms < self.params.calm_ms && self.queue.has_newcomers() {
            self.share = (self.share + self.params.growth_per_s * seconds).min(SHARE_MAX);
        }
    }

    fn makes_room(&mut self, now_ms: f64, room: Room, turn: &Turn) -> bool {
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a share of a number of blocks"
        )]
        let most = (self.share * room.capacity_blocks as f64) as u64;
        while self.served.blocks() > most && self.served.expel_one() {}
        if self.served.holds(turn.session) {
            return true;
        }
        let patience_ms = self.served.patience_ms(self.params.pause_quantile);
        loop {
            let added = self.served.added(&turn.footprint);
            // A context that fits nowhere is served alone: nobody could ever make room for it.
            if self.served.blocks() + added <= most || self.served.is_empty() {
                return true;
            }
            if !self.served.expel_silent(now_ms, patience_ms) {
                return false;
            }
        }
    }

    fn go(&mut self, turn: &Turn, node: u64) {
        *self.in_flight_ms.entry(turn.tenant).or_default() += turn.work_ms;
        let started = Started {
            session: turn.session,
            tenant: turn.tenant,
            node,
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
            self.refused.insert(session, Refused { since_ms, until_ms });
        }
        Verdict::Refuse { retry_after_ms }
    }
}

fn full_node(started: Start) -> Option<u64> {
    match started {
        Start::Full(node) => Some(node),
        Start::Sent(_) | Start::Nowhere => None,
    }
}

#[cfg(test)]
mod tests;
