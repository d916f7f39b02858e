//! How many leading blocks of a chain does each node hold?
//!
//! `&self` everywhere and no lock for the caller to add: wrap it in an `Arc`, apply events from one
//! task, look up from anywhere.
use crate::block::BlockHash;
use crate::event::EventBatch;
use crate::ids::NodeId;

/// Bounds of an index's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Blocks of 16 tokens that are indexed of one node.
    pub node_blocks_max: usize,
    /// Blocks of 16 tokens that are indexed of all nodes together.
    pub total_blocks_max: usize,
    /// Cache salts that may be issued.
    pub salts_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            node_blocks_max: 4_000_000,
            total_blocks_max: 16_000_000,
            salts_max: 65_536,
        }
    }
}

/// What became of a batch, in blocks of the node's own size (`stored`, `removed`: of ours).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Applied {
    /// Blocks of 16 tokens that are held now and were not before.
    pub stored: usize,
    /// Blocks of 16 tokens that were held before and are not now.
    pub removed: usize,
    /// Node blocks that were stored again.
    pub repeated: usize,
    /// Node blocks without credit because their parent is not known.
    pub orphans: usize,
    /// Node blocks without credit because of a salt that was never issued or of other extra keys.
    pub uncreditable: usize,
    /// Node blocks left out because a limit was reached.
    pub over_limit: usize,
    /// Removed node blocks that were not known.
    pub unknown_removals: usize,
    /// Events ignored: another attention group, another medium than the device.
    pub ignored: usize,
    /// Events whose lengths contradict each other.
    pub malformed: usize,
}

/// The index of one model.
pub struct Index;

impl Index {
    /// An empty index of the model that nodes serve under this id.
    pub fn new(model: &str, limits: Limits) -> Self {
        let _ = (model, limits);
        Self
    }
    /// Takes a salt into the set of those that an extra key may be taken for. False where the
    /// limit of salts is reached: chains under this one then go without credit.
    pub fn issue_salt(&self, salt: &str) -> bool {
        let _ = salt;
        false
    }
    /// Applies one batch of a node's events.
    pub fn apply(&self, node: &NodeId, batch: &EventBatch) -> Applied {
        let _ = (node, batch);
        Applied::default()
    }
    /// Leading blocks of `chain` that each node holds; nodes that hold none are left out.
    pub fn overlap(&self, chain: &[BlockHash]) -> Vec<(NodeId, usize)> {
        let _ = chain;
        Vec::new()
    }
    /// Blocks of 16 tokens that a node holds.
    pub fn held(&self, node: &NodeId) -> usize {
        let _ = node;
        0
    }
    /// Drops all that is known of a node.
    pub fn forget(&self, node: &NodeId) {
        let _ = node;
    }
}
