//! The product's router in a simulation: how do the real policies and the real index fare?
//!
//! [`Homing`] is what the gateway is made of, without the gateway: `policies::pick` decides on a
//! view that the real `cache_index::index` and the real load accounting fill; session bindings are
//! kept here as the gateway keeps them. The index learns from KV events where the simulated nodes
//! have them, and else from what the nodes report of cached tokens ([`Knowledge`]).
//! A trace block stands for as many index blocks as it has tokens, which come and go together: the
//! index is fed one block of 16 tokens for each ([`paths`]), and overlaps are counted in blocks of
//! 16 when they reach the policies.
//! [`ext`] lets an outside simulator score the same router.

mod approximate;
pub mod ext;
mod paths;

use std::collections::{HashMap, VecDeque};

use cache_index::block::BLOCK_TOKENS;
use cache_index::event::EventBatch;
use cache_index::ids::NodeId;
use cache_index::index::{Index, Limits};
use policies::load::NodeLoad;
use policies::pick::{Decision, Params, decide};
use policies::view::{NodeState, NodeView, RequestView, SessionKey};

use self::approximate::Approximate;
use self::paths::Paths;
use crate::engine::Node;
use crate::router::{Answer, Ask, Change, Router};

/// Where a node stands and how much it holds.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Its region's number.
    pub region: usize,
    /// Trace blocks in its pool.
    pub capacity_blocks: u64,
}

/// The nodes of a simulation.
#[derive(Clone, Debug)]
pub struct Fleet {
    /// Each node.
    pub nodes: Vec<Place>,
    /// Tokens in a trace block.
    pub block_tokens: u64,
    /// Round trips between regions, by `(a + b - 1) % len` for regions a and b.
    pub round_trip_ms: Vec<f64>,
}

impl Fleet {
    fn round_trip_ms(&self, a: usize, b: usize) -> f64 {
        if a == b || self.round_trip_ms.is_empty() {
            return 0.0;
        }
        self.round_trip_ms[(a + b - 1) % self.round_trip_ms.len()]
    }
}

/// What the index learns from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Knowledge {
    /// KV events: the index is exact.
    Events,
    /// Dispatches and reported usage: the index is a guess.
    Usage,
}

/// What a router is made with.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The policies' parameters.
    pub params: Params,
    /// What the index learns from.
    pub knowledge: Knowledge,
    /// A session that was silent for so long is not counted on any more.
    pub live_ms: f64,
}

impl Default for Settings {
    /// What the product does. An index that has not heard of any event learns from usage.
    fn default() -> Self {
        Self {
            params: Params::default(),
            knowledge: Knowledge::Usage,
            live_ms: 900_000.0,
        }
    }
}

/// A request that a node has and has not finished.
#[derive(Debug)]
struct Flight {
    node: usize,
    path: Vec<u32>,
    has_begun: bool,
}

/// A session's last turn.
#[derive(Clone, Copy, Debug)]
struct Binding {
    node: usize,
    blocks: u64,
    last_ms: f64,
}

/// What is known of one node.
#[derive(Debug)]
struct Known {
    id: NodeId,
    load: NodeLoad,
    /// Requests in flight that use each block.
    active: HashMap<u32, u32>,
    approximate: Approximate,
    live_blocks: u64,
    sessions: u64,
}

/// The router.
pub struct Homing {
    fleet: Fleet,
    settings: Settings,
    nodes: Vec<Known>,
    index: Index,
    paths: Paths,
    bindings: HashMap<u64, Binding>,
    flights: HashMap<u32, Flight>,
    idle: VecDeque<(f64, u64)>,
}

impl std::fmt::Debug for Homing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Homing")
            .field("nodes", &self.nodes.len())
            .finish_non_exhaustive()
    }
}

const MODEL: &str = "simulated";

impl Homing {
    /// A router that knows nothing yet but the fleet.
    pub fn new(fleet: Fleet, settings: Settings) -> Self {
        let nodes = fleet.nodes.iter().enumerate().map(|(number, place)| Known {
            id: NodeId::new(&format!("n{number}")),
            load: NodeLoad::default(),
            active: HashMap::new(),
            live_blocks: 0,
            sessions: 0,
            approximate: Approximate::new(
                usize::try_from(place.capacity_blocks).unwrap_or(usize::MAX),
            ),
        });
        Self {
            nodes: nodes.collect(),
            index: Index::new(MODEL, Limits::default()),
            paths: Paths::new(MODEL),
            bindings: HashMap::new(),
            flights: HashMap::new(),
            idle: VecDeque::new(),
            fleet,
            settings,
        }
    }

    /// From now on the index learns from this; what it knew from something else is forgotten.
    pub fn learn_from(&mut self, knowledge: Knowledge) {
        if self.settings.knowledge != knowledge {
            self.settings.knowledge = knowledge;
            for node in &self.nodes {
                self.index.forget(&node.id);
            }
        }
    }

    /// Chooses among the nodes offered and counts the request as sent there; none where none is
    /// offered.
    pub fn choose(&mut self, now_ms: f64, ask: &Ask<'_>, offered: &[usize]) -> Option<usize> {
        let (request, decision) = self.decide(now_ms, ask, offered)?;
        let node = self
            .nodes
            .iter()
            .position(|node| node.id == decision.node)?;
        self.dispatch(now_ms, ask, node, &request, &decision);

        Some(node)
    }

    fn decide(
        &mut self,
        now_ms: f64,
        ask: &Ask<'_>,
        offered: &[usize],
    ) -> Option<(RequestView, Decision)> {
        self.expire(now_ms);
        let chain = self.paths.chain(ask.blocks);
        let mut overlaps = vec![0; self.nodes.len()];
        for (id, held) in self.index.overlap(&chain) {
            if let Some(node) = self.nodes.iter().position(|node| node.id == id) {
                overlaps[node] = held;
            }
        }
        let views: Vec<NodeView> = offered
            .iter()
            .filter(|node| **node < self.nodes.len())
            .map(|node| self.view(now_ms, ask, *node, overlaps[*node]))
            .collect();
        let bound = self
            .bindings
            .get(&ask.session)
            .map(|binding| self.nodes[binding.node].id.clone());
        let request = RequestView {
            prompt_tokens: u64::from(ask.prompt_tokens),
            output_tokens_expected: 512,
            session: SessionKey(u128::from(ask.session)),
            bound,
            excluded: Vec::new(),
        };
        let decision = decide(&request, &views, &self.settings.params).ok()?;
        Some((request, decision))
    }

    fn view(&self, now_ms: f64, ask: &Ask<'_>, number: usize, held: usize) -> NodeView {
        let node = &self.nodes[number];
        let place = self.fleet.nodes[number];
        let per = self.per_block();
        // What requests in flight there are about to compute counts as held: siblings of one
        // burst go together.
        let expected = ask.blocks[held..]
            .iter()
            .take_while(|block| node.active.contains_key(block))
            .count();
        let own = self
            .bindings
            .get(&ask.session)
            .filter(|binding| binding.node == number)
            .map_or(0, |binding| binding.blocks);
        NodeView {
            id: node.id.clone(),
            region: place.region.to_string(),
            state: NodeState::Up,
            round_trip_ms: self.fleet.round_trip_ms(ask.region, place.region),
            inflight_prefill_tokens: node.load.prefill_tokens(now_ms),
            inflight_decode_tokens: node.load.decode_tokens(),
            prefill_tokens_per_s: node.load.tokens_per_s(),
            pool_blocks: place.capacity_blocks * per,
            pool_used_blocks: node.active.len() as u64 * per,
            overlap_blocks: (held + expected) * per as usize,
            node_block_tokens: 16,
            context_max: 0,
            bound_sessions: node.sessions,
            arrivals_per_s: node.load.arrivals_per_s(now_ms),
            busy_share: node.load.busy_share(now_ms),
            live_blocks: (node.live_blocks - own) * per,
        }
    }

    /// Index blocks that a trace block stands for.
    fn per_block(&self) -> u64 {
        self.fleet.block_tokens / BLOCK_TOKENS as u64
    }

    fn expire(&mut self, now_ms: f64) {
        while let Some((at, session)) = self.idle.front().copied().filter(|(at, _)| *at <= now_ms) {
            self.idle.pop_front();
            let Some(binding) = self.bindings.get(&session) else {
                continue;
            };
            if binding.last_ms + self.settings.live_ms > at {
                continue;
            }
            let gone = self.bindings.remove(&session).unwrap();
            let node = &mut self.nodes[gone.node];
            node.live_blocks -= gone.blocks;
            node.sessions -= 1;
        }
    }

    fn dispatch(
        &mut self,
        now_ms: f64,
        ask: &Ask<'_>,
        node: usize,
        request: &RequestView,
        decision: &Decision,
    ) {
        let uncached = request.prompt_tokens - decision.expected_cached_tokens;
        let known = &mut self.nodes[node];
        known.load.dispatched(
            now_ms,
            u64::from(ask.id),
            uncached,
            request.output_tokens_expected,
        );
        for block in ask.blocks {
            *known.active.entry(*block).or_default() += 1;
        }
        let blocks = ask.blocks.len() as u64;
        known.live_blocks += blocks;
        known.sessions += 1;
        if let Some(before) = self.bindings.insert(
            ask.session,
            Binding {
                node,
                blocks,
                last_ms: now_ms,
            },
        ) {
            self.nodes[before.node].live_blocks -= before.blocks;
            self.nodes[before.node].sessions -= 1;
        }
        self.idle
            .push_back((now_ms + self.settings.live_ms, ask.session));
        self.flights.insert(
            ask.id,
            Flight {
                node,
                path: ask.blocks.to_vec(),
                has_begun: false,
            },
        );
    }

    /// A request's first token has come, and with it the tokens that its node read from cache.
    pub fn on_first_token(&mut self, now_ms: f64, id: u32, _node: usize, cached_tokens: u32) {
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        flight.has_begun = true;
        let known = &mut self.nodes[flight.node];
        known.load.first_token(now_ms, u64::from(id));
        if self.settings.knowledge == Knowledge::Usage {
            let cached = (u64::from(cached_tokens).div_ceil(self.fleet.block_tokens) as usize)
                .min(flight.path.len());
            let gone = known.approximate.forget(&flight.path[cached..]);
            let (from, evicted) = known.approximate.touch(&flight.path);
            let events = [
                Some(Paths::removed(&gone)),
                Some(Paths::removed(&evicted)),
                self.paths.stored(&flight.path[from..]),
            ];
            let batch = EventBatch {
                events: events.into_iter().flatten().collect(),
                ..EventBatch::default()
            };
            self.index.apply(&known.id, &batch);
        }
    }

    /// A request has ended.
    pub fn on_finished(&mut self, now_ms: f64, id: u32, _node: usize, _output_tokens: u32) {
        let Some(flight) = self.flights.remove(&id) else {
            return;
        };
        let known = &mut self.nodes[flight.node];
        known.load.ended(now_ms, u64::from(id));
        for block in &flight.path {
            if let Some(count) = known.active.get_mut(block) {
                *count -= 1;
                if *count == 0 {
                    known.active.remove(block);
                }
            }
        }
    }

    /// A node holds these consecutive blocks of one path now.
    pub fn on_stored(&mut self, _now_ms: f64, node: usize, blocks: &[u32]) {
        if let (Some(known), Some(event)) = (self.nodes.get(node), self.paths.stored(blocks)) {
            self.index.apply(
                &known.id,
                &EventBatch {
                    events: vec![event],
                    ..EventBatch::default()
                },
            );
        }
    }

    /// A node holds these blocks no longer.
    pub fn on_removed(&mut self, _now_ms: f64, node: usize, blocks: &[u32]) {
        if let Some(known) = self.nodes.get(node) {
            self.index.apply(
                &known.id,
                &EventBatch {
                    events: vec![Paths::removed(blocks)],
                    ..EventBatch::default()
                },
            );
        }
    }
}

impl Router for Homing {
    fn route(&mut self, now_ms: f64, ask: &Ask<'_>, nodes: &[Node]) -> Answer {
        let offered: Vec<usize> = (0..nodes.len()).collect();
        match self.choose(now_ms, ask, &offered) {
            Some(node) => Answer::Send(node),
            None => Answer::Refuse {
                retry_after_ms: 1000.0,
            },
        }
    }

    fn changed(&mut self, now_ms: f64, node: usize, change: &Change<'_>) {
        match change {
            Change::Stored { path, from } => self.on_stored(now_ms, node, &path[*from..]),
            Change::Removed(blocks) => self.on_removed(now_ms, node, blocks),
        }
    }

    fn first_token(&mut self, now_ms: f64, id: u32, node: usize, cached_tokens: u32) {
        self.on_first_token(now_ms, id, node, cached_tokens);
    }

    fn finished(&mut self, now_ms: f64, id: u32, node: usize, output_tokens: u32) {
        self.on_finished(now_ms, id, node, output_tokens);
    }
}
