//! Which of the waiting turns goes next and where to, which still waits, and which is told to come
//! again?
//!
//! Two reasons to wait in the gateway rather than at a node. A node that has prompts ahead for a
//! while takes them in the order in which they came: what waits here can be ordered, the shortest
//! uncached work first. And past the working-set cliff ([`served`]) more sessions at once serve
//! fewer turns. The gate takes the fleet to be past it while turns queue up and the contexts of those
//! who came lately exceed the pools. Then each session has its place on one node: a member's turns
//! go there and nowhere else, and a newcomer, whose whole context must be computed, enters where
//! there is room for it and hardly any prefill ahead, so that members wait behind one newcomer at
//! most. Whoever waits gains on the others by waiting, a tenant with much in flight goes behind one
//! with little, and who has waited too long is told when to come again; its place in the order is
//! kept meanwhile.
//!
//! Nothing is measured here and nothing sleeps: the caller asks with its clock after every change,
//! and at [`Gate::wake_ms`].

mod placing;
mod queue;
mod room;
pub mod served;

use std::collections::{HashMap, HashSet};

use crate::view::SessionKey;
use queue::{Queue, Waiting};
pub use room::{NodeRoom, Place, Room, SlowTier, capacity_blocks};
pub use served::Footprint;
use served::Served;

/// How turns are held.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Params {
    /// A node with more prefill ahead than this takes no further turn from here.
    pub node_queue_ms: f64,
    /// Milliseconds of work that a millisecond of waiting outweighs.
    pub ageing: f64,
    /// With more prefill ahead of a turn than this, on average over the nodes, and contexts that
    /// exceed the pools, each session is given its place.
    pub distress_ms: f64,
    /// With less than this, and room for everybody, they may go where they like again.
    pub calm_ms: f64,
    /// The share of its node's pool that a working set may take.
    pub set_share: f64,
    /// A member that is silent for so long makes room for a newcomer. Shorter: fewer pools' blocks
    /// lie idle. Longer: fewer contexts are computed again.
    pub patience_ms: f64,
    /// A newcomer enters at a node with at most so much prefill ahead.
    pub entry_queue_ms: f64,
    /// Nobody waits longer at a time.
    pub wait_ms_max: f64,
    /// Turns that may wait, half of them of one tenant.
    pub waiting_max: usize,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            node_queue_ms: 20_000.0,
            ageing: 0.01,
            distress_ms: 3000.0,
            calm_ms: 500.0,
            set_share: 1.0,
            patience_ms: 120_000.0,
            entry_queue_ms: 1000.0,
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
    /// Whether each session has its place.
    is_bounded: bool,
    /// When a newcomer last found no room.
    short_ms: f64,
    /// When all waiting turns were last asked.
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
/// A refused session keeps its place for so long after it should have come again.
const PLACE_KEPT_MS: f64 = 60_000.0;
/// The longest time that a refused client is told to stay away: what is behind it nobody can say.
const RETRY_MS_MAX: f64 = 60_000.0;
/// One tenant's turns take at most this part of the places to wait: another one must find some.
const TENANT_PART: usize = 2;
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
            is_bounded: false,
            short_ms: 0.0,
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

    /// A turn has come. `start` sends it to a node where it may go, if that is open, and says
    /// whether it did.
    pub fn arrive(
        &mut self,
        now_ms: f64,
        room: Room<'_>,
        turn: Turn,
        start: impl FnOnce(&Place) -> Start,
    ) -> Verdict {
        self.adapt(now_ms, room);
        // While it waits for its node, nobody takes its session's place.
        let own = self.served.node_of(turn.session);
        if let Some(node) = own {
            self.begin(now_ms, &turn, node);
        }
        // Newcomers go in their order.
        let must_queue = self.is_bounded && own.is_none() && self.queue.has_newcomers();
        let place = match must_queue {
            true => None,
            false => self.place(now_ms, room, &turn),
        };
        let is_member = own.is_some();
        let started = place.map_or(Start::Nowhere, |place| start(&place));
        if let Start::Sent(node) = started {
            self.go(now_ms, room, (&turn, is_member), node);
            return Verdict::Go;
        }
        let waiting_max = self.params.waiting_max;
        let own_max = waiting_max.div_ceil(TENANT_PART);
        if self.queue.len() >= waiting_max || self.queue.len_of(turn.tenant) >= own_max {
            if is_member {
                self.served.end(now_ms, turn.session);
            }
            return self.refuse(now_ms, turn.session, now_ms);
        }
        let refused = self.refused.remove(&turn.session);
        let refused = refused.filter(|refused| now_ms <= refused.until_ms);
        self.queue.put(Waiting {
            turn,
            is_member,
            full: full_node(started),
            since_ms: refused.map_or(now_ms, |refused| refused.since_ms),
            came_ms: now_ms,
        });
        Verdict::Hold
    }

    /// Lets go whoever may: `start` sends a turn to a node where it may go, if that is open, and
    /// says whether it did. Answers for every turn that waits no longer.
    pub fn release(
        &mut self,
        now_ms: f64,
        room: Room<'_>,
        mut start: impl FnMut(u64, &Place) -> Start,
    ) -> Vec<(u64, Verdict)> {
        self.adapt(now_ms, room);
        let mut done = self.refuse_late(now_ms);
        let mut changed = std::mem::take(&mut self.changed);
        // Time passes at the nodes, too, and a turn may have found another one meanwhile.
        let all = now_ms - self.asked_all_ms >= ASK_ALL_EVERY_MS;
        if all {
            self.asked_all_ms = now_ms;
        }
        let order = self.queue.order(|waiting| self.score(now_ms, waiting));
        let (mut full, mut entered) = (HashSet::new(), HashSet::new());
        let mut has_room = true;
        for id in order {
            let may_try = |waiting: &Waiting| match waiting.full {
                _ if !waiting.is_member && !has_room => false,
                Some(node) => !full.contains(&node) && (all || changed.contains(&node)),
                None => true,
            };
            let Some(mut waiting) = self.queue.remove_if(id, may_try) else {
                continue;
            };
            let place = self.place_beside(now_ms, room, &waiting.turn, &entered);
            let started = match &place {
                Some(place) => start(id, place),
                None => Start::Nowhere,
            };
            if let Start::Sent(node) = started {
                if !waiting.is_member {
                    entered.insert(node);
                }
                self.go(now_ms, room, (&waiting.turn, waiting.is_member), node);
                done.push((id, Verdict::Go));
                continue;
            }
            // Room is given in order: a small context must not pass a large one for ever.
            has_room &= place.is_some();
            waiting.full = full_node(started);
            if let Some(node) = waiting.full {
                full.insert(node);
                changed.remove(&node);
            }
            self.queue.put(waiting);
        }
        done
    }

    fn refuse_late(&mut self, now_ms: f64) -> Vec<(u64, Verdict)> {
        let late = self.queue.take_late(now_ms - self.params.wait_ms_max);
        let refused = late.into_iter().map(|late| {
            if late.is_member {
                self.served.end(now_ms, late.turn.session);
            }
            let verdict = self.refuse(now_ms, late.turn.session, late.since_ms);
            (late.turn.id, verdict)
        });
        refused.collect()
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
        Some(late_ms.min(self.asked_all_ms + ASK_ALL_EVERY_MS))
    }

    /// The lower, the sooner.
    fn score(&self, now_ms: f64, waiting: &Waiting) -> f64 {
        let turn = &waiting.turn;
        let tenant_ms = self.in_flight_ms.get(&turn.tenant).copied().unwrap_or(0.0);
        turn.work_ms + tenant_ms - self.params.ageing * (now_ms - waiting.since_ms)
    }

    fn begin(&mut self, now_ms: f64, turn: &Turn, node: u64) {
        self.refused.remove(&turn.session);
        let counted = if turn.returns {
            turn.footprint.clone()
        } else {
            Footprint::default()
        };
        self.served.begin(now_ms, turn.session, node, counted);
    }

    fn go(&mut self, now_ms: f64, room: Room<'_>, (turn, has_begun): (&Turn, bool), node: u64) {
        if has_begun {
            self.served.move_to(turn.session, node);
        } else {
            self.begin(now_ms, turn, node);
        }
        if self.is_bounded
            && let Some(node) = room.node(node)
        {
            self.served.shrink(node.node, self.blocks_max(node));
        }
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
