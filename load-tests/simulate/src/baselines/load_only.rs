//! Routers that do not look at the prompt: round robin and least outstanding requests.
//!
//! nginx's default and its `least_conn`, Envoy's `ROUND_ROBIN`; the latter without Envoy's sampling
//! of two, which only a very large fleet needs.

use super::accounts::Accounts;
use super::choice::Ties;
use crate::engine::Node;
use crate::router::{Answer, Ask, Router};
use crate::scenario::Fleet;

/// One node after another.
pub struct RoundRobin {
    last: usize,
}

impl RoundRobin {
    /// Starts with the second node.
    pub fn new() -> Self {
        Self { last: 0 }
    }
}

impl Default for RoundRobin {
    fn default() -> Self {
        Self::new()
    }
}

impl Router for RoundRobin {
    fn route(&mut self, _now_ms: f64, _ask: &Ask<'_>, nodes: &[Node]) -> Answer {
        self.last = (self.last + 1) % nodes.len();
        Answer::Send(self.last)
    }
}

/// The node with the fewest requests under way.
pub struct LeastOutstanding {
    accounts: Accounts,
    ties: Ties,
}

impl LeastOutstanding {
    /// For this fleet.
    pub fn new(fleet: &Fleet) -> Self {
        Self {
            accounts: Accounts::new(fleet.nodes),
            ties: Ties::new(fleet.seed),
        }
    }
}

impl Router for LeastOutstanding {
    fn route(&mut self, _now_ms: f64, ask: &Ask<'_>, nodes: &[Node]) -> Answer {
        let accounts = &self.accounts;
        let node = self
            .ties
            .least(0..nodes.len(), |n| accounts.node(n).requests as f64);
        self.accounts
            .sent(ask.id, node, ask.prompt_tokens, 0.0, &[]);
        Answer::Send(node)
    }

    fn finished(&mut self, _now_ms: f64, id: u32, _node: usize, _output_tokens: u32) {
        self.accounts.finished(id);
    }
}
