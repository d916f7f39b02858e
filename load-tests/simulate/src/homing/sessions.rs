//! Which node is a session bound to, and how much would the live sessions of a node like to find
//! again?
//!
//! A binding lasts as long as its session is live: until nothing was heard of it for a while.

use std::collections::{HashMap, VecDeque};

/// A session's last turn.
#[derive(Clone, Copy, Debug)]
struct Binding {
    node: usize,
    blocks: u64,
    last_ms: f64,
}

/// The live sessions bound to one node.
#[derive(Clone, Copy, Debug, Default)]
struct Bound {
    sessions: u64,
    blocks: u64,
}

/// All bindings.
#[derive(Debug)]
pub(super) struct Sessions {
    live_ms: f64,
    bindings: HashMap<u64, Binding>,
    nodes: Vec<Bound>,
    /// When to look at a session again, in order.
    looks: VecDeque<(f64, u64)>,
}

impl Sessions {
    pub(super) fn new(nodes: usize, live_ms: f64) -> Self {
        Self {
            live_ms,
            bindings: HashMap::new(),
            nodes: vec![Bound::default(); nodes],
            looks: VecDeque::new(),
        }
    }

    /// The node of a session's last turn.
    pub(super) fn node(&self, session: u64) -> Option<usize> {
        self.bindings.get(&session).map(|binding| binding.node)
    }

    /// Sessions bound to a node.
    pub(super) fn bound_to(&self, node: usize) -> u64 {
        self.nodes[node].sessions
    }

    /// Trace blocks of the sessions bound to a node, without this one.
    pub(super) fn others_blocks(&self, node: usize, session: u64) -> u64 {
        let own = self
            .bindings
            .get(&session)
            .filter(|binding| binding.node == node);
        self.nodes[node].blocks - own.map_or(0, |binding| binding.blocks)
    }

    /// A turn with so many trace blocks goes to this node.
    pub(super) fn bind(&mut self, now_ms: f64, session: u64, node: usize, blocks: u64) {
        let binding = Binding {
            node,
            blocks,
            last_ms: now_ms,
        };
        if let Some(before) = self.bindings.insert(session, binding) {
            self.leave(before);
        }
        self.nodes[node].sessions += 1;
        self.nodes[node].blocks += blocks;
        self.looks.push_back((now_ms + self.live_ms, session));
    }

    /// Forgets the sessions that have been silent for long.
    pub(super) fn expire(&mut self, now_ms: f64) {
        while let Some((_, session)) = self.looks.pop_front_if(|(at_ms, _)| *at_ms <= now_ms) {
            let is_over = |binding: &Binding| binding.last_ms + self.live_ms <= now_ms;
            if self.bindings.get(&session).is_some_and(is_over)
                && let Some(over) = self.bindings.remove(&session)
            {
                self.leave(over);
            }
        }
    }

    fn leave(&mut self, binding: Binding) {
        let bound = &mut self.nodes[binding.node];
        bound.sessions -= 1;
        bound.blocks -= binding.blocks;
    }
}
