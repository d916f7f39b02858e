//! What is simulated? A fleet, who asks it, and which part of the time counts.

use cache_index::block::BLOCK_TOKENS;
use policies::hold::{SlowTier, served};
use policies::view::{FetchCosts, Handover, Role};

use crate::engine::tiers::{Store, TierParams};
use crate::engine::{Node, Params};

/// The nodes of a run; what a router is built from.
#[derive(Clone, PartialEq, Debug)]
pub struct Fleet {
    /// How fast each node is.
    pub params: Params,
    /// How many there are.
    pub nodes: usize,
    /// Blocks in each pool.
    pub capacity: usize,
    /// Memory of each node below its pool.
    pub host: Option<TierParams>,
    /// A store that all nodes share.
    pub store: Option<TierParams>,
    /// So many nodes, the first ones, compute prompts for the others; 0: all do everything.
    pub prefill_nodes: usize,
    /// How fast KV travels from one node to another, GB a second.
    pub handover_gb_per_s: f64,
    /// Regions; the nodes are dealt out in order, evenly.
    pub regions: usize,
    /// Round trips between different regions, ms, see [`Fleet::round_trip_ms`].
    pub round_trips_ms: Vec<f64>,
    /// For what a router draws by chance.
    pub seed: u64,
}

impl Fleet {
    /// So many nodes that do everything, in one region, each with a pool of so many blocks and nothing
    /// below it.
    pub fn alike(params: Params, nodes: usize, capacity: usize) -> Self {
        /// Several TCP streams on a link of 100 Gbit/s.
        const HANDOVER_GB_PER_S: f64 = 10.0;
        Self {
            params,
            nodes,
            capacity,
            host: None,
            store: None,
            prefill_nodes: 0,
            handover_gb_per_s: HANDOVER_GB_PER_S,
            regions: 1,
            round_trips_ms: Vec::new(),
            seed: 1,
        }
    }

    /// What a node does for a request.
    pub fn role_of(&self, node: usize) -> Role {
        match self.prefill_nodes {
            0 => Role::Mixed,
            first if node < first => Role::Prefill,
            _ => Role::Decode,
        }
    }

    /// How nodes of other roles than mixed hand KV over; none where all do everything.
    pub fn handover(&self) -> Option<Handover> {
        (self.prefill_nodes > 0).then_some(Handover {
            protocol: "simulated",
            bytes_per_token: self.params.kv_bytes_per_token,
            bytes_per_s: self.handover_gb_per_s * 1e9,
            overlaps_prefill: true,
        })
    }

    /// How long the KV of so many tokens travels, ms.
    pub fn handover_ms(&self, tokens: f64) -> f64 {
        self.params.handover_ms(tokens, self.handover_gb_per_s)
    }

    /// The region of a node.
    pub fn region_of(&self, node: usize) -> usize {
        node * self.regions / self.nodes
    }

    /// From a client's region to a node's and back, ms. With three round trips: between 0 and 1,
    /// 0 and 2, 1 and 2.
    pub fn round_trip_ms(&self, from: usize, to: usize) -> f64 {
        if from == to || self.round_trips_ms.is_empty() {
            return 0.0;
        }
        self.round_trips_ms[(from + to - 1) % self.round_trips_ms.len()]
    }

    /// What fetching a block of 16 tokens costs, by tier.
    pub fn fetch_costs(&self) -> FetchCosts {
        let per_block = f64::from(self.params.block_tokens) / BLOCK_TOKENS as f64;
        let cost = |tier: Option<TierParams>| {
            tier.map_or(0.0, |tier| tier.block_ms(&self.params) / per_block)
        };
        FetchCosts {
            host_ms: cost(self.host),
            disk_ms: 0.0,
            shared_ms: cost(self.store),
        }
    }

    /// Each node's slower tiers as the product's gate counts them: its part of the store is as much as
    /// there is for each node.
    pub fn slow_tiers(&self) -> Vec<SlowTier> {
        let tier = |tier: TierParams, sharers: usize| SlowTier {
            blocks: (tier.blocks / sharers) as u64 * u64::from(self.params.block_tokens)
                / served::BLOCK_TOKENS,
            fetch_ms_per_token: tier.block_ms(&self.params) / f64::from(self.params.block_tokens),
        };
        let host = self.host.map(|host| tier(host, 1));
        let store = self.store.map(|store| tier(store, self.nodes));
        host.into_iter().chain(store).collect()
    }

    /// The nodes themselves, idle.
    pub fn build(&self) -> Vec<Node> {
        let store = self.store.map(Store::new);
        let node = |number: usize| {
            let mut node = Node::new(self.params, self.capacity).in_region(self.region_of(number));
            if let Some(host) = self.host {
                node = node.with_host(host);
            }
            if let Some(store) = &store {
                node = node.with_store(store.clone());
            }
            node
        };
        (0..self.nodes).map(node).collect()
    }
}

/// Who asks.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Load {
    /// Closed loop: so many users, each with one session at a time; a user comes back with another
    /// one after its end.
    Users(usize),
    /// Open loop: the trace's own times.
    Copies {
        /// So many copies of it side by side, with private prefixes of their own.
        copies: usize,
        /// So many times faster.
        speed: f64,
    },
}

/// Which part of a trace is played: a policy is tuned on one and reported on another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Slice {
    /// Four fifths of the sessions (closed loop) or the first two thirds of the time (open loop).
    Dev,
    /// The rest.
    Held,
    /// Everything.
    All,
}

/// One run, apart from its trace and its policy.
#[derive(Clone, PartialEq, Debug)]
pub struct Scenario {
    /// The nodes.
    pub fleet: Fleet,
    /// Who asks.
    pub load: Load,
    /// Which part of the trace.
    pub slice: Slice,
    /// The seed of users and arrivals.
    pub seed: u64,
    /// The end, ms. A request without a first token then counts with the time it has waited.
    pub horizon_ms: f64,
    /// Requests that come before this do not count, ms.
    pub warm_ms: f64,
    /// How the users spread over the regions.
    pub region_weights: Vec<f64>,
    /// The share of sessions that roam: three requests in ten come from another region.
    pub roam: f64,
    /// A request is good whose first token comes by then, ms, …
    pub ttft_bound_ms: f64,
    /// … and whose later ones take no longer each, on average, ms.
    pub tpot_bound_ms: f64,
    /// Longer pauses of a user are cut to this, ms.
    pub think_ms_max: f64,
    /// Open loop: each session starts up to so much later, ms.
    pub jitter_ms: f64,
}

impl Scenario {
    /// The same with other users and arrivals, and with other luck of the router.
    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self.fleet.seed = seed;
        self
    }
}
