//! Which node could give another the KV that a prompt needs?
//!
//! A session moves: its node drains, is full, or others are quicker. What that node holds can be
//! fetched by the next one, if both are our engine and share the node token. For the node that a
//! turn goes to anyway that is one more slow tier: blocks that it would have to fetch, at the speed
//! of its transfers. Nodes whose part of turns is a half get their KV by handover instead.

use std::sync::Arc;

use cache_index::ids::NodeId;
use cache_index::tiers::Tiers;
use policies::view::{NodeState, NodeView, Role};
use serde_json::json;
use serde_json::value::RawValue;

use super::node::Node;
use super::partner::KvInfo;
use crate::config::ConnectorKind;

/// Fewer blocks than these are not worth a connection: 256 tokens.
const BLOCKS_MIN: usize = 16;
/// How long nothing may come, for each millisecond that the whole is expected to take; then the
/// receiver computes.
const PATIENCE: f64 = 10.0;
const PATIENCE_MS: (f64, f64) = (1_000.0, 10_000.0);

/// A node that holds the beginning of a prompt, and would give it.
#[derive(Clone)]
pub(crate) struct Giver {
    pub(crate) node: Arc<Node>,
    kv: Arc<KvInfo>,
    /// Leading blocks of 16 tokens.
    blocks: usize,
}

/// The two that hold most: a node needs none for what it holds itself.
#[derive(Default)]
pub(crate) struct Givers {
    most: Vec<Giver>,
}

impl Givers {
    /// Takes note of a node that holds these blocks of the prompt.
    pub(crate) fn consider(&mut self, node: &Arc<Node>, held: Tiers) {
        // Its drive is read for others as well, later than its memory.
        let blocks = held.disk;
        if blocks < BLOCKS_MIN || !node.is_ours_to_ask() || !gives(&node.state()) {
            return;
        }
        let Some(kv) = node.facts().kv.clone() else {
            return;
        };
        let node = Arc::clone(node);
        self.most.push(Giver { node, kv, blocks });
        self.most
            .sort_by_key(|giver| std::cmp::Reverse(giver.blocks));
        self.most.truncate(2);
    }

    /// Who holds enough more than this node itself, which could fetch it.
    pub(crate) fn offer(&self, to: &Node, held: Tiers) -> Option<&Giver> {
        let receives = to.duty.role == Role::Mixed && to.facts().kv.is_some();
        let other = self.most.iter().find(|giver| giver.node.id != to.id)?;
        let own = held.disk.max(held.shared);
        (receives && to.is_ours_to_ask() && other.blocks >= own + BLOCKS_MIN).then_some(other)
    }
}

/// One that drains gives what it holds to those that take its sessions over.
fn gives(state: &NodeState) -> bool {
    match state {
        NodeState::Up | NodeState::Draining => true,
        NodeState::Down { .. } | NodeState::BreakerOpen => false,
    }
}

impl Giver {
    /// Lets a decision know of it: a tier behind the node's own.
    pub(crate) fn show(&self, view: &mut NodeView, to: &Node) {
        let more = self.blocks.saturating_sub(view.overlap_blocks);
        view.overlap_tiers.shared = self.blocks;
        view.fetch_ms_per_block.shared_ms = to.fetch_block_ms(&self.kv, more);
    }

    /// The member of a request that has its node fetch; `expected_ms` is what that should take.
    pub(crate) fn fetch(&self, expected_ms: f64) -> Option<String> {
        let endpoints: &RawValue = serde_json::from_str(&self.kv.endpoints).ok()?;
        let timeout_ms = (PATIENCE * expected_ms).clamp(PATIENCE_MS.0, PATIENCE_MS.1);
        let params = json!({
            "fetch_from": endpoints,
            "remote_engine_id": self.kv.engine_id,
            "timeout_ms": timeout_ms.round() as u64,
        });
        Some(format!(r#","kv_transfer_params":{params}"#))
    }

    /// Whether a decision for this node counts on more than the node's own tiers have.
    pub(crate) fn is_needed(&self, expected_cached_tokens: u64, own: Tiers) -> bool {
        let own = own.disk.max(own.shared) as u64 * cache_index::block::BLOCK_TOKENS as u64;
        expected_cached_tokens > own
    }

    /// Its name.
    pub(crate) fn id(&self) -> &NodeId {
        &self.node.id
    }
}

impl Node {
    /// Whether it is our engine with a node token: only that one gives blocks out as we ask.
    pub(super) fn is_ours_to_ask(&self) -> bool {
        self.duty.connector == ConnectorKind::Homing && self.facts().token_ids
    }
}
