//! Which node is a session bound to, and what do the live sessions of a node hold there?
//!
//! The bindings as the gateway keeps them, and the real `policies::working_set` of each node.

use std::collections::HashMap;

use policies::view::SessionKey;
use policies::working_set::WorkingSet;

use crate::router::Ask;

/// All bindings.
#[derive(Debug)]
pub(super) struct Sessions {
    bindings: HashMap<u64, usize>,
    nodes: Vec<WorkingSet>,
}

impl Sessions {
    pub(super) fn new(nodes: usize) -> Self {
        Self {
            bindings: HashMap::new(),
            nodes: vec![WorkingSet::default(); nodes],
        }
    }

    /// The node of a session's last turn.
    pub(super) fn node(&self, session: u64) -> Option<usize> {
        self.bindings.get(&session).copied()
    }

    /// Live sessions bound to a node.
    pub(super) fn bound_to(&self, node: usize) -> u64 {
        self.nodes[node].sessions() as u64
    }

    /// For how long what this request would push out has not been used.
    pub(super) fn kept_ms(&self, now_ms: f64, node: usize, ask: &Ask<'_>, pool_blocks: u64) -> f64 {
        let wanted = u64::from(ask.prompt_tokens / 16);
        self.nodes[node].kept_ms(whole_ms(now_ms), pool_blocks, wanted, key(ask.session))
    }

    /// How many of the leading blocks that a node holds now a session's turn will find there, where
    /// requests in flight may still bring so many.
    pub(super) fn found_blocks(
        &self,
        node: usize,
        session: u64,
        pool_blocks: u64,
        (held, coming): (u64, u64),
    ) -> u64 {
        self.nodes[node].found_blocks(key(session), pool_blocks, held, coming)
    }

    /// A turn goes to this node: a prompt of so many blocks of 16 tokens, of which it has so many.
    pub(super) fn bind(&mut self, now_ms: f64, session: u64, node: usize, blocks: (u64, u64)) {
        if let Some(before) = self.bindings.insert(session, node)
            && before != node
        {
            self.nodes[before].left(key(session));
        }
        let (prompt, overlap) = blocks;
        self.nodes[node].used(whole_ms(now_ms), key(session), prompt, overlap);
    }
}

fn key(session: u64) -> SessionKey {
    SessionKey(u128::from(session))
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the cast saturates, and virtual time begins at 0"
)]
fn whole_ms(now_ms: f64) -> u64 {
    now_ms as u64
}
