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
/// How long all of it may take, in those.
const WHOLE: f64 = 2.0;

/// A node that holds the beginning of a prompt, and would give it.
pub(crate) struct Giver {
    node: Arc<Node>,
    kv: Arc<KvInfo>,
    /// Leading blocks of 16 tokens.
    blocks: usize,
}

/// One that drains gives what it holds to those that take its sessions over.
fn gives(state: &NodeState) -> bool {
    match state {
        NodeState::Up | NodeState::Draining => true,
        NodeState::Down { .. } | NodeState::BreakerOpen => false,
    }
}

impl Giver {
    /// A node that holds so many leading blocks of the prompt, if it would give them.
    pub(crate) fn of(node: &Arc<Node>, blocks: usize) -> Option<Self> {
        let would = node.is_ours_to_ask() && gives(&node.state());
        let kv = node.facts().kv.clone().filter(|_| would)?;
        let node = Arc::clone(node);
        Some(Self { node, kv, blocks })
    }

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
            "total_timeout_ms": (WHOLE * timeout_ms).round() as u64,
        });
        Some(format!(r#","kv_transfer_params":{params}"#))
    }

    /// Its name.
    pub(crate) fn id(&self) -> &NodeId {
        &self.node.id
    }
}

impl Node {
    /// How many blocks of a prompt another node must hold for this one, which holds these, to fetch them;
    /// none if it does not fetch.
    pub(crate) fn worth_fetching(&self, own: Tiers) -> Option<usize> {
        let fetches = self.duty.role == Role::Mixed && self.is_ours_to_ask();
        fetches.then(|| own.disk.max(own.shared) + BLOCKS_MIN)
    }

    /// Whether it is our engine with a node token: only that one gives blocks out as we ask.
    pub(super) fn is_ours_to_ask(&self) -> bool {
        self.duty.connector == ConnectorKind::Homing && self.facts().token_ids
    }
}
