//! What have the nodes for newcomers, and which of them may a turn go to?

use crate::cost::to_f64;

/// One node as the gate sees it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct NodeRoom {
    /// The caller's number of it.
    pub node: u64,
    /// What its pool holds, in blocks of 512 tokens; 0 where it is not known: then everybody fits.
    pub capacity_blocks: u64,
    /// The prefill ahead of a turn there.
    pub queue_ms: f64,
}

/// What the fleet has for newcomers.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Room<'a> {
    /// Each node that serves the model.
    pub nodes: &'a [NodeRoom],
}

impl Room<'_> {
    /// The prefill ahead of a turn, on average over the nodes.
    pub(super) fn queue_ms(&self) -> f64 {
        let sum: f64 = self.nodes.iter().map(|node| node.queue_ms).sum();
        sum / to_f64(self.nodes.len().max(1) as u64)
    }

    /// What all pools hold; none where one of them is not known, since the sum says nothing then.
    pub(super) fn capacity_blocks(&self) -> Option<u64> {
        let mut all = 0;
        for node in self.nodes {
            if node.capacity_blocks == 0 {
                return None;
            }
            all += node.capacity_blocks;
        }
        (all > 0).then_some(all)
    }

    pub(super) fn node(&self, node: u64) -> Option<&NodeRoom> {
        self.nodes.iter().find(|room| room.node == node)
    }
}

/// Where a turn may go.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Place {
    /// To any node.
    Anywhere,
    /// To one of these, by the caller's numbers.
    Among(Vec<u64>),
}

impl Place {
    /// Whether it may go there.
    pub fn allows(&self, node: u64) -> bool {
        match self {
            Self::Anywhere => true,
            Self::Among(nodes) => nodes.contains(&node),
        }
    }
}
