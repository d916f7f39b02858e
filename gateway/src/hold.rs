//! Which turns wait in the gateway before a node is asked?
//!
//! `policies::hold` decides, one gate for each model, since each has pools of its own: a newcomer
//! waits while turns queue up at the nodes and the contexts of the sessions that are served fill the
//! pools, and any turn waits whose node has far too much ahead. Here the turns wait: who is let go
//! is told by a channel, and chooses its node anew. What a turn holds is a guard, so that a client
//! that leaves, a failure and an orderly end all give it back.

use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use cache_index::ids::NodeId;
use cache_index::tiers::Tiers;
use policies::hold::served::BLOCK_TOKENS;
use policies::hold::{Footprint, Gate, Params, Room, Start, Turn, Verdict};
use policies::pick::Candidate;
use policies::view::Role;
use prometheus::{IntCounter, IntGauge};
use tokio::sync::oneshot;

use crate::fleet::{Fleet, Node};
use crate::metrics::GaugeGuard;
use crate::route::Chosen;
use crate::tasks::{Drain, Phase};
use crate::turn::Job;
use dialects::error::{ApiError, ErrorKind};

/// Blocks of 16 tokens in a block of the gate.
const BLOCKS_PER_BLOCK: u64 = BLOCK_TOKENS / cache_index::block::BLOCK_TOKENS as u64;
/// How often gates with waiting turns are asked although nothing has ended.
const ASK_EVERY: Duration = Duration::from_millis(100);

/// A node with so many times less ahead than another is worth choosing anew for.
const MUCH_LESS: f64 = 4.0;

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
    /// Nodes by the numbers that the gate knows.
    nodes: Vec<NodeId>,
    /// What the pools hold, and when that was looked up.
    capacity: Option<(f64, u64)>,
}

struct Waiter {
    node: NodeId,
    tell: oneshot::Sender<Verdict>,
}

/// A turn that was let go; dropping it says that it has ended.
pub(crate) struct Going {
    gate: Arc<ModelGate>,
    fleet: Arc<Fleet>,
    id: u64,
}

/// A turn that waits; dropping it gives its place up.
struct Place<'a> {
    gate: &'a ModelGate,
    id: u64,
    /// A [`Going`] stands for it now.
    taken: bool,
    _waiting: GaugeGuard,
}

impl Drop for Place<'_> {
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
    ) -> Result<(Going, Waited), ApiError> {
        let gate = self.gate(&job.model);
        let (id, told) = {
            let now_ms = gate.now_ms();
            let mut inner = gate.lock();
            let room = Room {
                capacity_blocks: inner.capacity(now_ms, fleet, &job.model),
                queue_ms: mean_queue_ms(first),
            };
            let id = inner.next_id;
            inner.next_id += 1;
            let queue_ms = queue_ms(first);
            let node = inner.number(first.decision.prefill_node());
            let is_open = inner.gate.is_open(queue_ms);
            let turn = turn(id, job, first, returns);
            let verdict = inner.gate.arrive(now_ms, room, turn, || {
                if is_open {
                    Start::Sent(node)
                } else {
                    Start::Full(node)
                }
            });
            match verdict {
                Verdict::Go => (id, None),
                Verdict::Refuse { retry_after_ms } => return Err(self.refusal(retry_after_ms)),
                Verdict::Hold => {
                    let (tell, told) = oneshot::channel();
                    let node = first.decision.prefill_node().clone();
                    inner.waiting.insert(id, Waiter { node, tell });
                    (id, Some(told))
                }
            }
        };
        let going = |gate: Arc<ModelGate>| Going {
            gate,
            fleet: Arc::clone(fleet),
            id,
        };
        let Some(told) = told else {
            return Ok((going(gate), Waited::No));
        };
        let mut place = Place {
            gate: &gate,
            id,
            taken: false,
            _waiting: GaugeGuard::new(&self.waiting),
        };
        match told.await {
            Ok(Verdict::Go) => {
                place.taken = true;
                Ok((going(Arc::clone(&gate)), Waited::Yes))
            }
            Ok(Verdict::Refuse { retry_after_ms }) => Err(self.refusal(retry_after_ms)),
            Ok(Verdict::Hold) | Err(_) => Err(self.refusal(1000.0)),
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
                    nodes: Vec::new(),
                    capacity: None,
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

/// Whether a turn had to wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Waited {
    /// It did: what it was told of the nodes is old.
    Yes,
    /// It did not.
    No,
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
        let nodes_f64 = f64::from(u32::try_from(queues.len().max(1)).unwrap_or(u32::MAX));
        let room = Room {
            capacity_blocks: capacity_blocks(fleet, &self.model),
            queue_ms: queues.values().sum::<f64>() / nodes_f64,
        };
        let now_ms = self.now_ms();
        let inner = &mut *self.lock();
        let Inner {
            gate,
            waiting,
            nodes,
            ..
        } = inner;
        let node_queue_ms = gate.params().node_queue_ms;
        let by_queue = |a: &(&NodeId, &f64), b: &(&NodeId, &f64)| a.1.total_cmp(b.1);
        let idlest = queues.iter().min_by(by_queue);
        let idlest = idlest.map(|(node, queue_ms)| (node.clone(), *queue_ms));
        // What is let go now is not counted at its node yet: one for each.
        let mut given = HashSet::new();
        let done = gate.release(now_ms, room, |id| {
            let Some(waiter) = waiting.get(&id) else {
                return Start::Nowhere;
            };
            let number = number(nodes, &waiter.node);
            // A node that has gone has no queue: the turn chooses another.
            let queue_ms = queues.get(&waiter.node).copied().unwrap_or(0.0);
            if queue_ms <= node_queue_ms && given.insert(number) {
                return Start::Sent(number);
            }
            // Another node may have time by now: the turn chooses anew, and its cache counts there.
            match &idlest {
                Some((node, least_ms)) if *least_ms * MUCH_LESS < queue_ms => {
                    let other = self::number(nodes, node);
                    if given.insert(other) {
                        Start::Sent(other)
                    } else {
                        Start::Full(number)
                    }
                }
                _ => Start::Full(number),
            }
        });
        for (id, verdict) in done {
            if let Some(waiter) = waiting.remove(&id)
                && waiter.tell.send(verdict).is_err()
                && verdict == Verdict::Go
            {
                // It has just gone away.
                gate.ended(now_ms, id);
            }
        }
    }
}

impl Inner {
    /// Blocks of 512 tokens in all pools, 0 where one is not known; looked up once a second.
    fn capacity(&mut self, now_ms: f64, fleet: &Fleet, model: &str) -> u64 {
        const LOOKED_UP_EVERY_MS: f64 = 1000.0;
        if let Some((at_ms, blocks)) = self.capacity
            && now_ms - at_ms < LOOKED_UP_EVERY_MS
        {
            return blocks;
        }
        let blocks = capacity_blocks(fleet, model);
        self.capacity = Some((now_ms, blocks));
        blocks
    }

    fn number(&mut self, node: &NodeId) -> u64 {
        number(&mut self.nodes, node)
    }
}

fn number(nodes: &mut Vec<NodeId>, node: &NodeId) -> u64 {
    let at = nodes.iter().position(|known| known == node);
    let at = at.unwrap_or_else(|| {
        nodes.push(node.clone());
        nodes.len() - 1
    });
    at as u64
}

fn turn(id: u64, job: &Job<'_>, first: &Chosen, returns: bool) -> Turn {
    let mut hasher = DefaultHasher::new();
    job.identity.tenant.id.as_str().hash(&mut hasher);
    let candidate = computing(first);
    Turn {
        id,
        tenant: hasher.finish(),
        session: job.session.id.key,
        work_ms: candidate.map_or(0.0, |candidate| candidate.terms.prefill_ms),
        returns,
        footprint: Footprint {
            blocks: job.log_blocks.clone(),
            tokens: job.prompt.tokens,
        },
    }
}

/// The node that is to compute the prompt, with its costs.
fn computing(first: &Chosen) -> Option<&Candidate> {
    let node = first.decision.prefill_node();
    let mut candidates = first.decision.prefill_candidates().iter();
    candidates.find(|candidate| candidate.node == *node)
}

/// The prefill ahead at the node that was chosen.
fn queue_ms(first: &Chosen) -> f64 {
    computing(first).map_or(0.0, |candidate| candidate.terms.queue_ms)
}

/// The prefill ahead of a turn, on average over those that could take it.
fn mean_queue_ms(first: &Chosen) -> f64 {
    let candidates = first.decision.prefill_candidates();
    let sum: f64 = candidates
        .iter()
        .map(|candidate| candidate.terms.queue_ms)
        .sum();
    sum / f64::from(u32::try_from(candidates.len().max(1)).unwrap_or(u32::MAX))
}

/// The prefill ahead at each node that computes prompts of a model; those that only answer do so
/// where there is no other.
fn queues(fleet: &Fleet, model: &str) -> HashMap<NodeId, f64> {
    let nodes = fleet.nodes();
    let of_model = |node: &&Arc<Node>| node.model().is_some_and(|served| *served == *model);
    let has_others = nodes
        .iter()
        .filter(of_model)
        .any(|node| node.duty.role != Role::Decode);
    let serves =
        |node: &&Arc<Node>| of_model(node) && !(has_others && node.duty.role == Role::Decode);
    let queue = |node: &Arc<Node>| {
        let view = node.view(Tiers::default());
        let measured = view.prefill_tokens_per_s;
        let rate = if measured >= 1.0 {
            measured
        } else {
            policies::pick::Params::default().prefill_tokens_per_s_default
        };
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53 tokens")]
        let tokens = view.inflight_prefill_tokens as f64;
        (node.id.clone(), tokens * 1000.0 / rate)
    };
    nodes.iter().filter(serves).map(queue).collect()
}

/// Blocks of 512 tokens in all pools that keep sessions; 0 where one is not known, since the sum
/// says nothing then.
fn capacity_blocks(fleet: &Fleet, model: &str) -> u64 {
    let nodes = fleet.nodes();
    let serves = |node: &&Arc<Node>| node.model().is_some_and(|served| *served == *model);
    let keeps = |node: &&Arc<Node>| serves(node) && node.duty.role != Role::Prefill;
    let pools: Vec<u64> = nodes
        .iter()
        .filter(keeps)
        .map(|node| node.facts().pool_blocks)
        .collect();
    if pools.contains(&0) {
        return 0;
    }
    pools.iter().sum::<u64>() / BLOCKS_PER_BLOCK
}
