//! Routers that hash: a session, or the beginning of the prompt, always goes to the same node.
//!
//! Consistent hashing as in nginx (`hash $http_x_session_id consistent`), Envoy (`RING_HASH`) and
//! SMG's `consistent_hashing`. With a load bound `c`, a key moves on along the ring past nodes that
//! hold more than `c` times their share (Mirrokni, Thorup, Zadimoghaddam: Consistent hashing with
//! bounded loads, 2018; the vLLM production stack and KubeAI offer it as `CHWBL`).

use super::accounts::Accounts;
use super::choice::Ring;
use crate::engine::Node;
use crate::random::mix;
use crate::router::{Answer, Ask, Router};
use crate::scenario::Fleet;

/// What is hashed.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Key {
    /// The session.
    Session,
    /// So many leading blocks of the prompt; the session where there are none.
    Prefix {
        /// How many.
        blocks: usize,
    },
}

/// A router that hashes.
pub struct Sticky {
    key: Key,
    bound: Option<f64>,
    ring: Ring,
    accounts: Accounts,
}

impl Sticky {
    /// With no bound on a node's load, or with this multiple of the mean.
    pub fn new(fleet: &Fleet, key: Key, bound: Option<f64>) -> Self {
        Self {
            key,
            bound,
            ring: Ring::new(fleet.nodes),
            accounts: Accounts::new(fleet.nodes),
        }
    }

    fn hash(&self, ask: &Ask<'_>) -> u64 {
        /// Sets the two kinds of keys apart.
        const SESSION: u64 = 0xABCD;
        const BLOCK: u64 = 991;
        let by_session = mix(SESSION ^ ask.session);
        match self.key {
            Key::Session => by_session,
            Key::Prefix { blocks } => match ask.blocks.get(..blocks.min(ask.blocks.len())) {
                Some([.., last]) => mix(u64::from(*last) + BLOCK),
                _ => by_session,
            },
        }
    }

    fn pick(&self, hash: u64, nodes: usize) -> usize {
        let Some(bound) = self.bound else {
            return self.ring.node(hash);
        };
        let requests = |node: usize| self.accounts.node(node).requests;
        let all: usize = (0..nodes).map(requests).sum();
        let most = ((all + 1) as f64 / nodes as f64 * bound).ceil();
        let has_room = |node: &usize| (requests(*node) + 1) as f64 <= most;
        self.ring.from(hash).find(has_room).unwrap_or(0)
    }
}

impl Router for Sticky {
    fn route(&mut self, _now_ms: f64, ask: &Ask<'_>, nodes: &[Node]) -> Answer {
        let node = self.pick(self.hash(ask), nodes.len());
        self.accounts
            .sent(ask.id, node, ask.prompt_tokens, 0.0, &[]);
        Answer::Send(node)
    }

    fn finished(&mut self, _now_ms: f64, id: u32, _node: usize, _output_tokens: u32) {
        self.accounts.finished(id);
    }
}
