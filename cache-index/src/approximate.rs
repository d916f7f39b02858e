//! What does a node hold that says nothing about its cache?
//!
//! Nodes without KV events (llama.cpp, or events switched off), and nodes whose events carry no
//! salt (SGLang), are judged by what was sent there: a prompt that was answered is in the node's
//! cache until it is pushed out. Each node is modelled as a cache of its own size in which the
//! least recently used end of a chain goes first, as engines do it. A chain is known only under the
//! hashes of the scope that sent it, so nobody else is credited with it.
//!
//! The model is corrected by the usage that nodes report. Fewer cached tokens than predicted: the
//! first missing block has been pushed out, and so has all that was used less recently; the node
//! holds less than was thought (others use it too), and its size is taken down. More, or just as
//! many: the size comes back up, to what the node said of its pool at most.
//!
//! A tree of runs for each node: a run is blocks that were last used together, and costs 8 bytes a
//! block and some 100 bytes; a prompt of 6,250 blocks that extends a known one costs what its new
//! blocks do. Left out: which of two gateways sent a prompt; each learns from its own dispatches and
//! from reports alone.

mod tree;

use std::collections::HashMap;

use self::tree::Tree;
use crate::block::BlockHash;
use crate::ids::NodeId;

/// Bounds of what is modelled. At `node_blocks_max` a node's least recently used blocks go; at
/// `total_blocks_max` a node whose turn it is makes room among its own; nodes past `nodes_max` go
/// without credit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Blocks of a node that does not say how large its pool is.
    pub node_blocks_default: usize,
    /// Blocks of one node, whatever it says.
    pub node_blocks_max: usize,
    /// Blocks of all nodes together.
    pub total_blocks_max: usize,
    /// Nodes.
    pub nodes_max: usize,
}

impl Default for Limits {
    /// Half a million tokens for a node of unknown size: too large costs little, too small hits.
    fn default() -> Self {
        Self {
            node_blocks_default: 32_768,
            node_blocks_max: 4_000_000,
            total_blocks_max: 16_000_000,
            nodes_max: 1024,
        }
    }
}

/// A report this much below the prediction corrects nothing: nodes round down to blocks of their
/// own, of up to 128 tokens, and compute at least the last token.
const SLACK_BLOCKS: usize = 8;

/// Of a node's size, what a confirmed prediction gives back.
const REGROWTH: usize = 64;

/// Models of all nodes that do not tell.
pub struct Approximate {
    limits: Limits,
    nodes: HashMap<NodeId, Node>,
    total: usize,
}

struct Node {
    tree: Tree,
    /// What the node's pool holds at most, as far as known.
    pool_blocks: usize,
    /// What it seems to hold of ours.
    size_blocks: usize,
    now: u64,
}

/// What was thought of a node when a request was sent there.
#[must_use = "a report is compared with it"]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sent {
    /// Leading blocks that it was thought to hold.
    pub predicted_blocks: usize,
    at: u64,
}

impl Approximate {
    /// Nothing is known yet.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            nodes: HashMap::new(),
            total: 0,
        }
    }

    /// What the node says of its pool; 0 where it does not.
    pub fn set_pool(&mut self, node: &NodeId, pool_blocks: usize) {
        let wanted = match pool_blocks {
            0 => self.limits.node_blocks_default,
            known => known.min(self.limits.node_blocks_max),
        };
        let Some(node) = self.node(node) else { return };
        if wanted == node.pool_blocks {
            return;
        }
        node.pool_blocks = wanted;
        node.size_blocks = wanted;
        let over = node.tree.blocks().saturating_sub(wanted);
        let gone = node.tree.evict(over);
        self.total -= gone;
    }

    /// Leading blocks of `chain` that each node is thought to hold; nodes without any are left out.
    pub fn overlap(&self, chain: &[BlockHash]) -> Vec<(NodeId, usize)> {
        let runs = self
            .nodes
            .iter()
            .map(|(id, node)| (id.clone(), node.tree.overlap(chain)));
        runs.filter(|(_, blocks)| *blocks > 0).collect()
    }

    /// A request goes to a node.
    pub fn sent(&self, node: &NodeId, chain: &[BlockHash]) -> Sent {
        let known = self.nodes.get(node);
        Sent {
            predicted_blocks: known.map_or(0, |node| node.tree.overlap(chain)),
            at: known.map_or(0, |node| node.now),
        }
    }

    /// The node has computed a prompt, and says of how many blocks it had it, if it says so.
    pub fn served(
        &mut self,
        node: &NodeId,
        chain: &[BlockHash],
        sent: Sent,
        reported_blocks: Option<usize>,
    ) {
        let room = self.limits.total_blocks_max - self.total;
        let Some(node) = self.node(node) else { return };
        let before = node.tree.blocks();
        if let Some(reported) = reported_blocks {
            node.learn(chain, sent, reported);
        }
        // What is known of the chain is used now, and so is the last to go.
        node.now += 1;
        let known = node.tree.overlap(chain);
        node.tree.insert(&chain[..known], node.now);
        let most = node.size_blocks.min(before + room);
        let others = node.tree.blocks() - known;
        let over = (node.tree.blocks() + chain.len() - known).saturating_sub(most);
        node.tree.evict(over.min(others));
        let added = (chain.len() - known).min(most - node.tree.blocks());
        node.tree.insert(&chain[..known + added], node.now);
        let after = node.tree.blocks();
        self.total = self.total - before + after;
    }

    /// The node was restarted, or said that its cache is empty.
    pub fn forget(&mut self, node: &NodeId) {
        if let Some(gone) = self.nodes.remove(node) {
            self.total -= gone.tree.blocks();
        }
    }

    /// Blocks that a node is thought to hold.
    pub fn held(&self, node: &NodeId) -> usize {
        self.nodes.get(node).map_or(0, |node| node.tree.blocks())
    }

    /// Recounts everything; panics where something does not add up. For tests.
    pub fn check_integrity(&self) {
        let held: usize = self.nodes.values().map(|node| node.tree.blocks()).sum();
        assert_eq!(held, self.total, "blocks of all nodes");
        assert!(held <= self.limits.total_blocks_max, "{held} blocks");
        for node in self.nodes.values() {
            node.tree.check_integrity();
            assert!(node.tree.blocks() <= node.size_blocks, "over its size");
        }
    }

    fn node(&mut self, id: &NodeId) -> Option<&mut Node> {
        if !self.nodes.contains_key(id) {
            if self.nodes.len() >= self.limits.nodes_max {
                return None;
            }
            let blocks = self.limits.node_blocks_default;
            let node = Node {
                tree: Tree::default(),
                pool_blocks: blocks,
                size_blocks: blocks,
                now: 0,
            };
            self.nodes.insert(id.clone(), node);
        }
        self.nodes.get_mut(id)
    }
}

impl Node {
    /// Compares a report with what was predicted.
    fn learn(&mut self, chain: &[BlockHash], sent: Sent, reported: usize) {
        let predicted = sent.predicted_blocks;
        if reported + SLACK_BLOCKS >= predicted {
            let more = reported.saturating_sub(predicted) + self.size_blocks / REGROWTH;
            self.size_blocks = (self.size_blocks + more).min(self.pool_blocks);
            return;
        }
        // Used since, by a request that was sent at the same time: nothing follows from it.
        let used = self.tree.used(chain, reported);
        let Some(used) = used.filter(|used| *used <= sent.at) else {
            return;
        };
        self.tree.drop_older(used);
        // A restart looks the same, and says nothing of the size: half of it is kept.
        self.size_blocks = self.tree.blocks().max(self.size_blocks / 2).max(1);
    }
}

#[cfg(test)]
mod tests;
