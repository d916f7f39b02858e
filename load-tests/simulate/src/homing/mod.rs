//! The product's router in a simulation: how do the real policies and the real index fare?
//!
//! [`Homing`] is what the gateway is made of, without the gateway: `policies::pick` decides on a
//! view that the real `cache_index` and the real load accounting fill; session bindings are kept
//! here as the gateway keeps them (`sessions`). The index learns from KV events where the
//! simulated nodes have them, and else from what the nodes report of cached tokens
//! ([`Knowledge`]).
//! A trace block stands for as many index blocks as it has tokens, which come and go together: the
//! index is fed one block of 16 tokens for each (`paths`), and overlaps are counted in blocks of
//! 16 when they reach the policies.
//! [`ext`] lets an outside simulator score the same router.

pub mod ext;
mod flights;
pub mod gate;
mod paths;
mod sessions;

use std::collections::HashMap;
use std::sync::Arc;

use cache_index::approximate::{self, Approximate};
use cache_index::block::{BLOCK_TOKENS, BlockHash};
use cache_index::event::{EventBatch, KvEvent};
use cache_index::expected::{self, Expected};
use cache_index::ids::NodeId;
use cache_index::index::{Index, Limits};
use cache_index::tiers::Tiers;
use policies::hold::SlowTier;
use policies::load::NodeLoad;
use policies::output::OutputLengths;
use policies::pick::{Decision, Params, decide};
use policies::view::{
    FetchCosts, Handover, NodeState, NodeView, RequestView, Role, SessionKey, Splits,
};

use self::flights::Flight;
use self::paths::Paths;
use self::sessions::Sessions;
use crate::engine::Node;
use crate::engine::tiers::Tier;
use crate::router::{Answer, Ask, Change, Router};
use crate::scenario;

/// Where a node stands and how much it holds.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Its region's number.
    pub region: usize,
    /// Trace blocks in its pool.
    pub capacity_blocks: u64,
    /// What it does for a request.
    pub role: Role,
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
    /// What fetching a block of 16 tokens from a slower tier costs; nothing where nodes have none.
    pub fetch: FetchCosts,
    /// Each node's slower tiers, as the gate counts them.
    pub tiers: Vec<SlowTier>,
    /// How nodes of other roles than mixed hand KV over.
    pub handover: Option<Handover>,
}

impl From<&scenario::Fleet> for Fleet {
    /// A scenario's nodes as the product knows them.
    fn from(fleet: &scenario::Fleet) -> Self {
        let place = |node: usize| Place {
            region: fleet.region_of(node),
            capacity_blocks: fleet.capacity as u64,
            role: fleet.role_of(node),
        };
        Self {
            nodes: (0..fleet.nodes).map(place).collect(),
            block_tokens: u64::from(fleet.params.block_tokens),
            round_trip_ms: fleet.round_trips_ms.clone(),
            fetch: fleet.fetch_costs(),
            tiers: fleet.slow_tiers(),
            handover: fleet.handover(),
        }
    }
}

impl Fleet {
    fn round_trip_ms(&self, a: usize, b: usize) -> f64 {
        if a == b || self.round_trip_ms.is_empty() {
            return 0.0;
        }
        self.round_trip_ms[(a + b - 1) % self.round_trip_ms.len()]
    }

    /// Index blocks that a trace block stands for.
    fn per_block(&self) -> usize {
        usize::try_from(self.block_tokens).unwrap_or(usize::MAX) / BLOCK_TOKENS
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
    /// Whether decisions count what lies in slower tiers.
    pub reads_tiers: bool,
}

impl Default for Settings {
    /// What the product does. An index that has not heard of any event learns from usage.
    fn default() -> Self {
        Self {
            params: Params::default(),
            knowledge: Knowledge::Usage,
            reads_tiers: true,
        }
    }
}

impl Settings {
    /// Changes one parameter by name, for tuning; false where there is none of that name.
    pub fn set(&mut self, key: &str, value: f64) -> bool {
        if key == "tiers" {
            self.reads_tiers = value > 0.0;
            return true;
        }
        let params = &mut self.params;
        let field = match key {
            "b" => &mut params.b,
            "behind" => &mut params.behind,
            "behind_per_s_max" => &mut params.behind_per_s_max,
            "pool_share" => &mut params.pool_share,
            "pool_wait_ms" => &mut params.pool_wait_ms,
            "live" => &mut params.live,
            "live_fade_ms" => &mut params.live_fade_ms,
            "decode_interference" => &mut params.decode_interference,
            "cold_overlap_share" => &mut params.cold_overlap_share,
            "cold_round_trip_slack_ms" => &mut params.cold_round_trip_slack_ms,
            "bonus_share" => &mut params.affinity.bonus_share,
            "bonus_ms_max" => &mut params.affinity.bonus_ms_max,
            "hysteresis_share" => &mut params.affinity.hysteresis_share,
            "hysteresis_ms_min" => &mut params.affinity.hysteresis_ms_min,
            _ => return false,
        };
        *field = value;
        true
    }
}

/// Where a request goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Chosen {
    /// The node that answers.
    pub node: usize,
    /// The node that computes the prompt for it, if that is another one.
    pub prefill: Option<usize>,
}

/// What is known of one node.
#[derive(Debug)]
struct Known {
    id: NodeId,
    load: NodeLoad,
}

/// The router.
pub struct Homing {
    fleet: Fleet,
    settings: Settings,
    nodes: Vec<Known>,
    numbers: HashMap<NodeId, usize>,
    /// The store that nodes share, as an entry of the index: what it holds is there for each of them.
    store: NodeId,
    index: Index,
    guess: Approximate,
    expected: Expected,
    paths: Paths,
    sessions: Sessions,
    outputs: OutputLengths,
    flights: HashMap<u32, Flight>,
}

impl std::fmt::Debug for Homing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Homing")
            .field("nodes", &self.nodes.len())
            .finish_non_exhaustive()
    }
}

/// The model that all simulated nodes serve.
const MODEL: &str = "simulated";

/// What a decision was about and how it came out.
struct Decided {
    chain: Arc<[BlockHash]>,
    /// Leading trace blocks that requests in flight on each node will have computed.
    expected: Vec<usize>,
    request: RequestView,
    decision: Decision,
}

impl Homing {
    /// A router that knows nothing yet but the fleet.
    pub fn new(fleet: Fleet, settings: Settings) -> Self {
        let known = |number| Known {
            id: NodeId::new(&format!("n{number}")),
            load: NodeLoad::default(),
        };
        let nodes: Vec<Known> = (0..fleet.nodes.len()).map(known).collect();
        let mut guess = Approximate::new(approximate::Limits::default());
        for (node, place) in nodes.iter().zip(&fleet.nodes) {
            let capacity = usize::try_from(place.capacity_blocks).unwrap_or(usize::MAX);
            guess.set_pool(&node.id, capacity);
        }
        let numbers = nodes.iter().enumerate();
        Self {
            numbers: numbers.map(|(at, node)| (node.id.clone(), at)).collect(),
            sessions: Sessions::new(nodes.len()),
            nodes,
            store: NodeId::new("store"),
            index: Index::new(MODEL, Limits::default()),
            guess,
            expected: Expected::new(expected::Limits::default()),
            paths: Paths::new(MODEL),
            outputs: OutputLengths::default(),
            flights: HashMap::new(),
            fleet,
            settings,
        }
    }

    /// From now on the index learns from this.
    pub fn learn_from(&mut self, knowledge: Knowledge) {
        self.settings.knowledge = knowledge;
    }

    /// Chooses among the nodes offered and counts the request as sent there; none where none is
    /// offered.
    pub fn choose(&mut self, now_ms: f64, ask: &Ask<'_>, offered: &[usize]) -> Option<Chosen> {
        let decided = self.decide(now_ms, ask, offered)?;
        let node = *self.numbers.get(&decided.decision.node)?;
        self.dispatch(now_ms, ask, node, &decided);
        let prefill = self.flights.get(&ask.id)?.prefill.as_ref();
        let prefill = prefill.map(|computes| computes.node);
        Some(Chosen { node, prefill })
    }

    fn decide(&mut self, now_ms: f64, ask: &Ask<'_>, offered: &[usize]) -> Option<Decided> {
        let chain = self.paths.chain(ask.blocks);
        self.decide_on(now_ms, ask, chain, offered)
    }

    /// The same, of a request whose chain is known.
    fn decide_on(
        &mut self,
        now_ms: f64,
        ask: &Ask<'_>,
        chain: Arc<[BlockHash]>,
        offered: &[usize],
    ) -> Option<Decided> {
        let held = self.held(&chain);
        let expected = self.by_number(self.expected.overlap(&chain));
        let view = |node: &usize| {
            let overlap = held
                .get(*node)?
                .longest(Tiers::on_device(*expected.get(*node)?));
            Some(self.view(now_ms, ask, *node, overlap))
        };
        let views: Vec<NodeView> = offered.iter().filter_map(view).collect();
        let bound = self.sessions.node(ask.session);
        let request = RequestView {
            prompt_tokens: u64::from(ask.prompt_tokens),
            output_tokens_expected: self.outputs.expected(ask.session),
            session: SessionKey(u128::from(ask.session)),
            bound: bound.map(|node| self.nodes[node].id.clone()),
            excluded: Vec::new(),
            splits: match self.fleet.handover {
                Some(_) => Splits::Yes,
                None => Splits::No,
            },
        };
        let decision = decide(&request, &views, &self.settings.params).ok()?;
        Some(Decided {
            chain,
            expected,
            request,
            decision,
        })
    }

    /// Leading blocks that each node could serve, in trace blocks.
    fn held(&self, chain: &[BlockHash]) -> Vec<Tiers> {
        let mut by_number = vec![Tiers::default(); self.nodes.len()];
        match self.settings.knowledge {
            Knowledge::Usage => {
                let guessed = self.by_number(self.guess.overlap(chain));
                for (tiers, blocks) in by_number.iter_mut().zip(guessed) {
                    *tiers = Tiers::on_device(blocks);
                }
            }
            Knowledge::Events => {
                let mut shared = 0;
                self.index.visit(chain, |id, tiers| {
                    if let Some(number) = self.numbers.get(id) {
                        by_number[*number] = tiers;
                    } else if *id == self.store {
                        shared = tiers.device;
                    }
                });
                for tiers in &mut by_number {
                    tiers.shared = tiers.shared.max(shared);
                }
            }
        }
        if !self.settings.reads_tiers {
            for tiers in &mut by_number {
                *tiers = Tiers::on_device(tiers.device);
            }
        }
        by_number
    }

    fn by_number(&self, overlaps: Vec<(NodeId, usize)>) -> Vec<usize> {
        let mut by_number = vec![0; self.nodes.len()];
        for (id, blocks) in overlaps {
            if let Some(number) = self.numbers.get(&id) {
                by_number[*number] = blocks;
            }
        }
        by_number
    }

    fn view(&self, now_ms: f64, ask: &Ask<'_>, number: usize, overlap: Tiers) -> NodeView {
        let Known { id, load } = &self.nodes[number];
        let place = self.fleet.nodes[number];
        let per = self.fleet.per_block();
        let pool_blocks = place.capacity_blocks * per as u64;
        let held = (overlap.device * per) as u64;
        let coming = self.coming_blocks(now_ms, load);
        let sessions = &self.sessions;
        let found = sessions.found_blocks(number, ask.session, pool_blocks, (held, coming));
        NodeView {
            id: id.clone(),
            region: place.region.to_string(),
            state: NodeState::Up,
            round_trip_ms: self.fleet.round_trip_ms(ask.region, place.region),
            inflight_prefill_tokens: load.prefill_tokens(now_ms),
            inflight_decode_tokens: load.decode_tokens(),
            prefill_tokens_per_s: load.tokens_per_s(),
            context_doubles_tokens: load.context_doubles_tokens(),
            pool_blocks,
            pool_used_blocks: load.pool_blocks(),
            overlap_blocks: usize::try_from(found).unwrap_or(usize::MAX),
            overlap_tiers: Tiers {
                device: overlap.device * per,
                host: overlap.host * per,
                disk: overlap.disk * per,
                shared: overlap.shared * per,
            },
            fetch_ms_per_block: self.fleet.fetch,
            node_block_tokens: BLOCK_TOKENS as u64,
            context_max: 0,
            bound_sessions: self.sessions.bound_to(number),
            arrivals_per_s: load.arrivals_per_s(now_ms),
            busy_share: load.busy_share(now_ms),
            kept_ms: self.sessions.kept_ms(now_ms, number, ask, pool_blocks),
            role: place.role,
            handover: self.fleet.handover.filter(|_| place.role != Role::Mixed),
            needs_partner: false,
            decoding_requests: load.decoding(),
        }
    }

    /// Blocks of 16 tokens that requests in flight may still bring, as the gateway counts them.
    fn coming_blocks(&self, now_ms: f64, load: &NodeLoad) -> u64 {
        if self.settings.knowledge == Knowledge::Usage {
            return u64::MAX;
        }
        let last = load.requests() * self.fleet.block_tokens;
        let tokens = load.prefill_tokens(now_ms) + load.decode_tokens() + last;
        tokens.div_ceil(BLOCK_TOKENS as u64)
    }

    /// A node holds these consecutive blocks of one path now.
    pub fn on_stored(&mut self, node: usize, tier: Tier, blocks: &[u32]) {
        if let Some(event) = self.paths.stored(tier, blocks) {
            self.apply(node, tier, event);
        }
    }

    /// A node holds these blocks no longer.
    pub fn on_removed(&mut self, node: usize, tier: Tier, blocks: &[u32]) {
        self.apply(node, tier, Paths::removed(tier, blocks));
    }

    fn apply(&mut self, node: usize, tier: Tier, event: KvEvent) {
        let Some(known) = self.nodes.get(node) else {
            return;
        };
        let id = match tier {
            Tier::Device | Tier::Host => &known.id,
            Tier::Shared => &self.store,
        };
        let batch = EventBatch {
            events: vec![event],
            ..EventBatch::default()
        };
        self.index.apply(id, &batch);
    }
}

impl Router for Homing {
    fn route(&mut self, now_ms: f64, ask: &Ask<'_>, nodes: &[Node]) -> Answer {
        let offered: Vec<usize> = (0..nodes.len()).collect();
        match self.choose(now_ms, ask, &offered) {
            Some(Chosen {
                node: decode,
                prefill: Some(prefill),
            }) => Answer::Pair { prefill, decode },
            Some(Chosen { node, .. }) => Answer::Send(node),
            None => Answer::Refuse {
                retry_after_ms: 1000.0,
            },
        }
    }

    fn changed(&mut self, _now_ms: f64, node: usize, change: &Change<'_>) {
        match change {
            Change::Stored { tier, path, from } => {
                // An answer's blocks are in no prompt yet.
                self.paths.learn(path, *from);
                self.on_stored(node, *tier, &path[*from..]);
            }
            Change::Removed { tier, blocks } => self.on_removed(node, *tier, blocks),
        }
    }

    fn computed(&mut self, now_ms: f64, id: u32, _node: usize) {
        self.on_computed(now_ms, id);
    }

    fn first_token(&mut self, now_ms: f64, id: u32, _node: usize, cached_tokens: u32) {
        self.on_first_token(now_ms, id, cached_tokens);
    }

    fn finished(&mut self, now_ms: f64, id: u32, _node: usize, output_tokens: u32) {
        self.on_finished(now_ms, id, output_tokens);
    }
}

#[cfg(test)]
mod tests;
