//! Which turns wait in the gateway before a node is asked?
//!
//! `policies::hold` decides, one gate for each model, since each has pools of its own: a newcomer
//! waits while turns queue up at the nodes and the contexts of the sessions that are served fill the
//! pools, and any turn waits whose node has far too much ahead. Here the turns wait: who is let go
//! is told by a channel, and goes where its session has its place or chooses its node anew. What a
//! turn holds is a guard, so that a client that leaves, a failure and an orderly end all give it
//! back.

mod rooms;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use cache_index::ids::NodeId;
use policies::hold::{Gate, NodeRoom, Params, Place, Room, Start, Verdict};
use policies::view::Role;
use prometheus::{IntCounter, IntGauge};
use tokio::sync::oneshot;

use rooms::{Numbered, idlest, kept_blocks, own_or_idler, queues, serves, turn};

use crate::fleet::{Fleet, Node};
use crate::metrics::GaugeGuard;
use crate::route::Chosen;
use crate::tasks::{Drain, Phase};
use crate::turn::Job;
use dialects::error::{ApiError, ErrorKind};

/// How often gates with waiting turns are asked although nothing has ended.
const ASK_EVERY: Duration = Duration::from_millis(100);

/// The gates of all models.
pub(crate) struct Holds {
    models: RwLock<HashMap<Arc<str>, Arc<ModelGate>>>,
    params: Params,
    born: Instant,
    waiting: IntGauge,
    refused: IntCounter,
}

struct ModelGate {
    model: Arc<str>,
    inner: Mutex<Inner>,
    born: Instant,
}

struct Inner {
    gate: Gate,
    next_id: u64,
    /// Those who wait, and the node that each would go to.
    waiting: HashMap<u64, Waiter>,
    nodes: Numbered,
    looked_up_ms: f64,
}

struct Waiter {
    node: u64,
    tell: oneshot::Sender<Told>,
}

/// What a turn that waited is told.
struct Told {
    verdict: Verdict,
    goes: Goes,
}

/// A turn that was let go; dropping it says that it has ended.
pub(crate) struct Going {
    gate: Arc<ModelGate>,
    fleet: Arc<Fleet>,
    id: u64,
}

/// Where a turn waits; dropping it gives that up.
struct Seat<'a> {
    gate: &'a ModelGate,
    id: u64,
    /// A [`Going`] stands for it now.
    taken: bool,
    _waiting: GaugeGuard,
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        let now_ms = self.gate.now_ms();
        let mut inner = self.gate.lock();
        if inner.waiting.remove(&self.id).is_some() {
            inner.gate.leave(now_ms, self.id);
        } else if !self.taken {
            // Let go in the very moment in which it went away.
            inner.gate.ended(now_ms, self.id);
        }
    }
}

impl Holds {
    pub(crate) fn new(params: Params, waiting: IntGauge, refused: IntCounter) -> Self {
        Self {
            models: RwLock::default(),
            params,
            born: Instant::now(),
            waiting,
            refused,
        }
    }

    /// Asks the gates of waiting turns again and again, until the gateway stops.
    pub(crate) async fn watch(self: Arc<Self>, fleet: Arc<Fleet>, drain: Drain) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(ASK_EVERY) => {}
                () = drain.reached(Phase::Stopping) => return,
            }
            if self.waiting.get() == 0 {
                continue;
            }
            self.all().iter().for_each(|gate| gate.release(&fleet));
        }
    }

    /// Waits until a turn may go. `first` is where it would go now; where it had to wait, the
    /// caller chooses again.
    pub(crate) async fn pass(
        &self,
        fleet: &Arc<Fleet>,
        job: &Job<'_>,
        first: &Chosen,
        returns: bool,
    ) -> Result<(Going, Goes), ApiError> {
        let gate = self.gate(&job.model);
        let (id, verdict, goes, told) = {
            let now_ms = gate.now_ms();
            let mut inner = gate.lock();
            inner.arrive(now_ms, fleet, job, (first, returns))
        };
        let going = |gate: Arc<ModelGate>| Going {
            gate,
            fleet: Arc::clone(fleet),
            id,
        };
        let told = match (verdict, told) {
            (Verdict::Hold, Some(told)) => told,
            (Verdict::Refuse { retry_after_ms }, _) => return Err(self.refusal(retry_after_ms)),
            (Verdict::Go | Verdict::Hold, _) => return Ok((going(gate), goes)),
        };
        let mut seat = Seat {
            gate: &gate,
            id,
            taken: false,
            _waiting: GaugeGuard::new(&self.waiting),
        };
        match told.await {
            Ok(Told {
                verdict: Verdict::Go,
                goes,
            }) => {
                seat.taken = true;
                Ok((going(Arc::clone(&gate)), goes))
            }
            Ok(Told {
                verdict: Verdict::Refuse { retry_after_ms },
                ..
            }) => Err(self.refusal(retry_after_ms)),
            Ok(_) | Err(_) => Err(self.refusal(1000.0)),
        }
    }

    fn all(&self) -> Vec<Arc<ModelGate>> {
        let models = self.models.read().unwrap_or_else(PoisonError::into_inner);
        models.values().cloned().collect()
    }

    fn gate(&self, model: &Arc<str>) -> Arc<ModelGate> {
        let models = self.models.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(gate) = models.get(model) {
            return Arc::clone(gate);
        }
        drop(models);
        let mut models = self.models.write().unwrap_or_else(PoisonError::into_inner);
        let gate = models.entry(Arc::clone(model)).or_insert_with(|| {
            Arc::new(ModelGate {
                model: Arc::clone(model),
                inner: Mutex::new(Inner {
                    gate: Gate::new(self.params),
                    next_id: 0,
                    waiting: HashMap::new(),
                    nodes: Numbered::default(),
                    looked_up_ms: f64::NEG_INFINITY,
                }),
                born: self.born,
            })
        });
        Arc::clone(gate)
    }

    fn refusal(&self, retry_after_ms: f64) -> ApiError {
        self.refused.inc();
        let seconds = Duration::from_secs_f64(retry_after_ms.max(1000.0) / 1000.0);
        let seconds = seconds.as_secs().max(1);
        let message = format!(
            "All nodes are busy with conversations that came before. Try again in {seconds} s; this one keeps its place."
        );
        ApiError {
            retry_after_s: Some(seconds),
            ..ApiError::new(ErrorKind::NoNode, message)
        }
    }
}

/// Where a turn goes that may go.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Goes {
    /// To the node that was chosen before it came here.
    AsChosen,
    /// To any node: it had to wait, and what it was told of them is old.
    Anywhere,
    /// To the node where its session has its place.
    To(NodeId),
}

impl Going {
    /// Its answer has begun.
    pub(crate) fn first_token(&self) {
        self.gate.lock().gate.first_token(self.id);
        self.gate.release(&self.fleet);
    }
}

impl Drop for Going {
    fn drop(&mut self) {
        let now_ms = self.gate.now_ms();
        self.gate.lock().gate.ended(now_ms, self.id);
        self.gate.release(&self.fleet);
    }
}

impl ModelGate {
    fn now_ms(&self) -> f64 {
        self.born.elapsed().as_secs_f64() * 1000.0
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets go whoever may.
    fn release(&self, fleet: &Fleet) {
        if self.lock().waiting.is_empty() {
            return;
        }
        let queues = queues(fleet, &self.model);
        let now_ms = self.now_ms();
        let inner = &mut *self.lock();
        inner.look_up(now_ms, fleet, &self.model);
        let rooms: Vec<NodeRoom> = queues
            .iter()
            .map(|(node, queue_ms)| inner.room(node, *queue_ms))
            .collect();
        let Inner {
            gate,
            waiting,
            nodes,
            ..
        } = inner;
        let node_queue_ms = gate.params().node_queue_ms;
        // What is let go now is not counted at its node yet: one for each.
        let mut given = HashMap::new();
        let done = gate.release(now_ms, Room { nodes: &rooms }, |id, place| {
            let Some(waiter) = waiting.get(&id) else {
                return Start::Nowhere;
            };
            let own = waiter.node;
            let target = match place {
                Place::Anywhere => own_or_idler(&rooms, own),
                Place::Among(_) if place.allows(own) => own,
                Place::Among(_) => match idlest(&rooms, place) {
                    Some(room) => room.node,
                    None => return Start::Nowhere,
                },
            };
            // A node that has gone has no queue: the turn chooses another.
            let queue_ms = rooms.iter().find(|room| room.node == target);
            let is_open = queue_ms.is_none_or(|room| room.queue_ms <= node_queue_ms);
            if !is_open || given.values().any(|(at, _)| *at == target) {
                return Start::Full(target);
            }
            given.insert(id, (target, place.clone()));
            Start::Sent(target)
        });
        for (id, verdict) in done {
            let goes = match given.remove(&id) {
                Some((target, Place::Among(_))) => Goes::To(nodes.named(target).clone()),
                _ => Goes::Anywhere,
            };
            if let Some(waiter) = waiting.remove(&id)
                && waiter.tell.send(Told { verdict, goes }).is_err()
                && verdict == Verdict::Go
            {
                // It has just gone away.
                gate.ended(now_ms, id);
            }
        }
    }
}

impl Inner {
    /// A turn has come that would go to `first`.
    fn arrive(
        &mut self,
        now_ms: f64,
        fleet: &Fleet,
        job: &Job<'_>,
        (first, returns): (&Chosen, bool),
    ) -> (u64, Verdict, Goes, Option<oneshot::Receiver<Told>>) {
        self.look_up(now_ms, fleet, &job.model);
        let (candidates, chosen) = (
            first.decision.prefill_candidates(),
            first.decision.prefill_node(),
        );
        let rooms: Vec<NodeRoom> = candidates
            .iter()
            .map(|candidate| self.room(&candidate.node, candidate.terms.queue_ms))
            .collect();
        let node_queue_ms = self.gate.params().node_queue_ms;
        let id = self.next_id;
        self.next_id += 1;
        let mut goes = Goes::AsChosen;
        let turn = turn(id, job, first, returns);
        let verdict = self
            .gate
            .arrive(now_ms, Room { nodes: &rooms }, turn, |place| {
                let allowed = candidates.iter().zip(&rooms);
                let allowed = allowed.filter(|(_, room)| place.allows(room.node));
                // The chosen one where it may go there, else the cheapest of those.
                let rank = |candidate: &policies::pick::Candidate| {
                    (candidate.node != *chosen, candidate.cost_ms)
                };
                let best = allowed.min_by(|(a, _), (b, _)| {
                    let ((a, a_ms), (b, b_ms)) = (rank(a), rank(b));
                    a.cmp(&b).then(a_ms.total_cmp(&b_ms))
                });
                let Some((candidate, room)) = best else {
                    return Start::Nowhere;
                };
                if room.queue_ms > node_queue_ms {
                    return Start::Full(room.node);
                }
                if candidate.node != *chosen {
                    goes = Goes::To(candidate.node.clone());
                }
                Start::Sent(room.node)
            });
        let told = (verdict == Verdict::Hold).then(|| {
            let (tell, told) = oneshot::channel();
            let node = self.nodes.number(chosen);
            self.waiting.insert(id, Waiter { node, tell });
            told
        });
        (id, verdict, goes, told)
    }

    /// Looks up what nodes keep, once a second. Where prompts and answers are computed apart a
    /// session has no one place, and what its prompt fills on either side is not followed: nothing is
    /// known of the nodes then, so that nobody waits for room.
    fn look_up(&mut self, now_ms: f64, fleet: &Fleet, model: &str) {
        const LOOKED_UP_EVERY_MS: f64 = 1000.0;
        if now_ms - self.looked_up_ms < LOOKED_UP_EVERY_MS {
            return;
        }
        self.looked_up_ms = now_ms;
        let nodes = fleet.nodes();
        let serving = nodes.iter().filter(|node| serves(node, model));
        let is_apart = serving.clone().any(|node| node.duty.role != Role::Mixed);
        let capacity = |node: &Arc<Node>| {
            let blocks = if is_apart { 0 } else { kept_blocks(node) };
            (node.id.clone(), blocks)
        };
        self.nodes.set_capacities(serving.map(capacity));
    }

    fn room(&mut self, node: &NodeId, queue_ms: f64) -> NodeRoom {
        self.nodes.room(node, queue_ms)
    }
}
