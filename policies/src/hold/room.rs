//! What have the nodes for newcomers, and which of them may a turn go to?

use crate::cost::to_f64;

/// One node as the gate sees it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct NodeRoom {
    /// The caller's number of it.
    pub node: u64,
    /// What it keeps ([`capacity_blocks`]), in blocks of 512 tokens; 0 where that is not known: then
    /// everybody fits.
    pub capacity_blocks: u64,
    /// The prefill ahead of a turn there.
    pub queue_ms: f64,
}

/// A tier below a node's pool.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SlowTier {
    /// What it holds, in blocks of 512 tokens.
    pub blocks: u64,
    /// How long a token takes from there to the pool; 0 where that is not known.
    pub fetch_ms_per_token: f64,
}

/// Contexts count as served from a tier where fetching them is at least so many times quicker than
/// computing them. Replays past the cliff: a store five times as quick serves everybody at once, and
/// keeping sessions out costs four times the mean wait; one that is hardly quicker than computing
/// leaves a cliff where it was.
const QUICKER: f64 = 2.0;

/// What a node keeps of the sessions that it serves: its pool's blocks of 512 tokens, and those of
/// the tiers from which a context comes quickly beside computing it, at so many milliseconds a token.
/// 0 where the pool is not known.
pub fn capacity_blocks(pool_blocks: u64, tiers: &[SlowTier], prefill_ms_per_token: f64) -> u64 {
    if pool_blocks == 0 {
        return 0;
    }
    let is_quick = |tier: &&SlowTier| {
        tier.fetch_ms_per_token > 0.0 && tier.fetch_ms_per_token * QUICKER <= prefill_ms_per_token
    };
    let quick = tiers.iter().filter(is_quick).map(|tier| tier.blocks);
    quick.fold(pool_blocks, u64::saturating_add)
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
            all = node.capacity_blocks.saturating_add(all);
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
