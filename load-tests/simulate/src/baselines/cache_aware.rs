//! SGLang's router and SMG: the longest match while loads are even, else the least loaded.
//!
//! Loads are requests under way. They are uneven if the greatest is both more than `abs` above and
//! more than `rel` times the least; then the least loaded worker gets the request. Else the worker
//! with the longest match does, if it matches more than the share `threshold` of the prompt, and
//! the least loaded one otherwise. After SMG's docs/concepts/routing/cache-aware.md (defaults .3,
//! 64, 1.5; SGLang's router: .5, 32, 1.1). Where several match equally, the least loaded of them
//! is taken: theirs is whichever used the prefix last.
//!
//! What a worker holds is learnt from dispatches, in a tree of `tree` blocks for each worker, least
//! recently used out first (`events` 0), or known from its KV events (`events` 1, SMG with workers
//! that have them). SMG's own trees are in the crate `kv-index`, which has no rule to choose by. Its
//! rule is in the crate of its whole gateway (`smg` 1.13.0: a thousand packages, Rust 1.98), and is
//! another one by now than its documentation's: a worker is judged by the mean of requests and not by
//! the least, by itself and not all together, and where events tell what it holds there is no threshold.
//! Trees of the crate with either rule play through `homing-peers policy smg-tree` and `smg-events`
//! (load-tests/peers); docs/MEASUREMENTS.md has both.

use super::accounts::Accounts;
use super::choice::Ties;
use crate::engine::Node;
use crate::engine::pool::Pool;
use crate::router::{Answer, Ask, Router};
use crate::scenario::Fleet;

/// Its thresholds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Thresholds {
    /// The least share of a prompt that counts as a match.
    pub threshold: f64,
    /// Requests by which loads may differ.
    pub abs: f64,
    /// Times by which loads may differ.
    pub rel: f64,
}

/// How it knows what a worker holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Knowledge {
    /// From its events.
    Events,
    /// From what was sent there, so many blocks of it.
    Dispatches {
        /// Blocks in each worker's tree.
        blocks: usize,
    },
}

/// SMG's `cache_aware` policy.
pub struct CacheAware {
    fleet: Fleet,
    thresholds: Thresholds,
    trees: Option<Vec<Pool>>,
    accounts: Accounts,
    ties: Ties,
}

impl CacheAware {
    /// With these thresholds.
    pub fn new(fleet: &Fleet, thresholds: Thresholds, knowledge: Knowledge) -> Self {
        let trees = match knowledge {
            Knowledge::Events => None,
            Knowledge::Dispatches { blocks } => Some(vec![Pool::new(blocks); fleet.nodes]),
        };
        Self {
            fleet: fleet.clone(),
            thresholds,
            trees,
            accounts: Accounts::new(fleet.nodes),
            ties: Ties::new(fleet.seed),
        }
    }

    fn pick(&mut self, ask: &Ask<'_>, nodes: &[Node]) -> usize {
        let loads: Vec<f64> = (0..nodes.len())
            .map(|n| self.accounts.node(n).requests as f64)
            .collect();
        let least = loads.iter().copied().fold(f64::INFINITY, f64::min);
        let most = loads.iter().copied().fold(0.0, f64::max);
        let Thresholds {
            threshold,
            abs,
            rel,
        } = self.thresholds;
        let is_uneven = most - least > abs && most > rel * least;
        if is_uneven {
            return self.ties.least(0..nodes.len(), |n| loads[n]);
        }
        let overlap = |n: usize| match &self.trees {
            Some(trees) => trees[n].overlap(ask.blocks),
            None => nodes[n].overlap(ask.blocks),
        };
        let overlaps: Vec<usize> = (0..nodes.len()).map(overlap).collect();
        let best = overlaps.iter().copied().max().unwrap_or(0);
        let matched = self.fleet.params.cached_tokens(best, ask.prompt_tokens);
        if f64::from(matched) > threshold * f64::from(ask.prompt_tokens) {
            let matching = (0..nodes.len()).filter(|n| overlaps[*n] == best);
            return self.ties.least(matching, |n| loads[n]);
        }
        self.ties.least(0..nodes.len(), |n| loads[n])
    }
}

impl Router for CacheAware {
    fn route(&mut self, _now_ms: f64, ask: &Ask<'_>, nodes: &[Node]) -> Answer {
        let node = self.pick(ask, nodes);
        if let Some(trees) = &mut self.trees {
            trees[node].touch(ask.blocks);
        }
        self.accounts
            .sent(ask.id, node, ask.prompt_tokens, 0.0, &[]);
        Answer::Send(node)
    }

    fn finished(&mut self, _now_ms: f64, id: u32, _node: usize, _output_tokens: u32) {
        self.accounts.finished(id);
    }
}
