//! NVIDIA Dynamo's KV router: prefill blocks and active blocks, added up.
//!
//! `scale · max(0, prefill − credit · overlap) + active + requests · r`, in blocks, where `prefill`
//! is the prompt tokens under way on the worker that are not cached, plus all of this prompt's;
//! `overlap` the leading blocks that it holds; `active` the different blocks of requests under way
//! once this one is there; `r` the requests under way. The least is chosen (temperature 0). With
//! `decay`, the credit shrinks on a worker that has more prompt tokens under way than the least
//! loaded one: by 1 / (1 + decay · excess / this prompt). After the crate `dynamo-kv-router` 1.6.1,
//! `scheduling/selector/reference.rs`; its defaults are scale 1, credit 1, decay 0, requests 0
//! (`overlap_score_weight` in older releases is `scale`). The router hears of KV events at once.
//!
//! The crate's own code, from its index to its selector, plays through `homing-peers policy dynamo`
//! (load-tests/peers) and decides alike: docs/MEASUREMENTS.md has both. It is not called here, since the
//! product's simulator should not depend on a hundred crates for one sum.

use super::accounts::Accounts;
use super::choice::Ties;
use crate::engine::Node;
use crate::router::{Answer, Ask, Router};
use crate::scenario::Fleet;

/// Its weights.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Weights {
    /// Of prefill blocks against active ones.
    pub scale: f64,
    /// Of a block that the worker holds.
    pub credit: f64,
    /// How fast credit shrinks with a worker's backlog.
    pub decay: f64,
    /// Of a request under way, in blocks.
    pub requests: f64,
}

/// Dynamo's KV router.
pub struct Dynamo {
    fleet: Fleet,
    weights: Weights,
    accounts: Accounts,
    ties: Ties,
}

impl Dynamo {
    /// With these weights.
    pub fn new(fleet: &Fleet, weights: Weights) -> Self {
        Self {
            fleet: fleet.clone(),
            weights,
            accounts: Accounts::new(fleet.nodes),
            ties: Ties::new(fleet.seed),
        }
    }

    fn blocks(&self, ask: &Ask<'_>, number: usize, node: &Node, least_tokens: f64) -> f64 {
        let block_tokens = f64::from(self.fleet.params.block_tokens);
        let account = self.accounts.node(number);
        let overlap = node.overlap(ask.blocks) as f64;
        let prompt_tokens = f64::from(ask.prompt_tokens);
        let excess = (account.uncached_tokens - least_tokens) / prompt_tokens.max(block_tokens);
        let credit = self.weights.credit / (1.0 + self.weights.decay * excess);
        let prefill = (account.uncached_tokens + prompt_tokens) / block_tokens;
        self.weights.scale * (prefill - credit * overlap).max(0.0)
            + (account.active_blocks() + account.inactive_of(ask.blocks)) as f64
            + self.weights.requests * account.requests as f64
    }
}

impl Router for Dynamo {
    fn route(&mut self, _now_ms: f64, ask: &Ask<'_>, nodes: &[Node]) -> Answer {
        let least_tokens = (0..nodes.len())
            .map(|n| self.accounts.node(n).uncached_tokens)
            .fold(f64::INFINITY, f64::min);
        let cost = |n: usize| self.blocks(ask, n, &nodes[n], least_tokens);
        let costs: Vec<f64> = (0..nodes.len()).map(cost).collect();
        let node = self.ties.least(0..nodes.len(), |n| costs[n]);
        let overlap = nodes[node].overlap(ask.blocks);
        let cached = self.fleet.params.cached_tokens(overlap, ask.prompt_tokens);
        let uncached = f64::from(ask.prompt_tokens) - f64::from(cached);
        self.accounts
            .sent(ask.id, node, ask.prompt_tokens, uncached, ask.blocks);
        Answer::Send(node)
    }

    fn first_token(&mut self, _now_ms: f64, id: u32, _node: usize, _cached_tokens: u32) {
        self.accounts.first_token(id);
    }

    fn finished(&mut self, _now_ms: f64, id: u32, _node: usize, _output_tokens: u32) {
        self.accounts.finished(id);
    }
}
