//! Greedy with all the knowledge there is, and the same cost from what a gateway can know.
//!
//! Both send a request where it costs least, in milliseconds: its own uncached work, weighed `b`
//! times (work that one request wastes is work that all others wait for), the work before it, the
//! time until the pool has room, the way there. [`Oracle`] reads caches, queues and progress from
//! the nodes; [`Cost`] keeps its own accounts and knows only which blocks each node holds. Neither
//! is an upper bound: a policy that looks beyond the next request can beat them. The weights are
//! those of the scenarios' references.

use super::accounts::Accounts;
use super::choice::Ties;
use crate::engine::Node;
use crate::router::{Answer, Ask, Router};
use crate::scenario::Fleet;

/// Sees everything.
pub struct Oracle {
    fleet: Fleet,
    own_weight: f64,
    ties: Ties,
}

impl Oracle {
    /// Weighs a request's own uncached work so many times.
    pub fn new(fleet: &Fleet, own_weight: f64) -> Self {
        Self {
            fleet: fleet.clone(),
            own_weight,
            ties: Ties::new(fleet.seed),
        }
    }

    fn cost_ms(&self, ask: &Ask<'_>, node: &Node) -> f64 {
        /// Between equals, the one with fewer requests.
        const MS_PER_REQUEST: f64 = 1e-3;
        let params = node.params();
        let overlap = node.overlap(ask.blocks);
        let cached = params.cached_tokens(overlap, ask.prompt_tokens);
        let own_ms = params.prefill_ms(f64::from(ask.prompt_tokens), f64::from(cached));
        let slowdown = node.slowdown();
        let blocks = ask.blocks.len() - overlap + params.answer_blocks(ask.output_tokens);
        self.own_weight * own_ms
            + node.prefill_left_ms()
            + node.waiting_prefill_ms() * slowdown
            + node.pool_wait_ms(blocks as i64)
            + self.fleet.round_trip_ms(ask.region, node.region())
            + MS_PER_REQUEST * node.in_flight() as f64
    }
}

impl Router for Oracle {
    fn route(&mut self, _now_ms: f64, ask: &Ask<'_>, nodes: &[Node]) -> Answer {
        let costs: Vec<f64> = nodes.iter().map(|node| self.cost_ms(ask, node)).collect();
        Answer::Send(self.ties.least(0..nodes.len(), |n| costs[n]))
    }
}

/// Knows what a gateway knows.
pub struct Cost {
    fleet: Fleet,
    own_weight: f64,
    accounts: Accounts,
    ties: Ties,
}

impl Cost {
    /// Weighs a request's own uncached work so many times.
    pub fn new(fleet: &Fleet, own_weight: f64) -> Self {
        Self {
            fleet: fleet.clone(),
            own_weight,
            accounts: Accounts::new(fleet.nodes),
            ties: Ties::new(fleet.seed),
        }
    }

    fn uncached_tokens(&self, ask: &Ask<'_>, node: &Node) -> f64 {
        let params = &self.fleet.params;
        let cached = params.cached_tokens(node.overlap(ask.blocks), ask.prompt_tokens);
        f64::from(ask.prompt_tokens) - f64::from(cached)
    }

    fn cost_ms(&self, ask: &Ask<'_>, number: usize, node: &Node, uncached: f64) -> f64 {
        /// Long contexts and answers under way take a quarter of the nominal rate.
        const RATE_SHARE: f64 = 0.75;
        /// Blocks of requests under way may fill this share of the pool before it costs.
        const POOL_FREE_SHARE: f64 = 0.9;
        /// What a pool's worth of blocks beyond that costs.
        const POOL_MS: f64 = 20_000.0;
        /// An answer and what it rounds up to.
        const ANSWER_BLOCKS: usize = 4;
        let account = self.accounts.node(number);
        let tokens_per_ms = self.fleet.params.prefill_tokens_per_s / 1000.0 * RATE_SHARE;
        let blocks = account.active_blocks() + ask.blocks.len() - node.overlap(ask.blocks);
        let pool = (blocks + ANSWER_BLOCKS) as f64 / node.capacity() as f64;
        (account.uncached_tokens + self.own_weight * uncached) / tokens_per_ms
            + POOL_MS * (pool - POOL_FREE_SHARE).max(0.0)
            + self.fleet.round_trip_ms(ask.region, node.region())
    }
}

impl Router for Cost {
    fn route(&mut self, _now_ms: f64, ask: &Ask<'_>, nodes: &[Node]) -> Answer {
        let uncached: Vec<f64> = nodes.iter().map(|n| self.uncached_tokens(ask, n)).collect();
        let cost = |n: usize| self.cost_ms(ask, n, &nodes[n], uncached[n]);
        let costs: Vec<f64> = (0..nodes.len()).map(cost).collect();
        let node = self.ties.least(0..nodes.len(), |n| costs[n]);
        self.accounts
            .sent(ask.id, node, ask.prompt_tokens, uncached[node], ask.blocks);
        Answer::Send(node)
    }

    fn first_token(&mut self, _now_ms: f64, id: u32, _node: usize, _cached_tokens: u32) {
        self.accounts.first_token(id);
    }

    fn finished(&mut self, _now_ms: f64, id: u32, _node: usize, _output_tokens: u32) {
        self.accounts.finished(id);
    }
}
