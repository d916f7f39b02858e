//! Views for the tests: a plain request and a plain node, from which a test changes what it is
//! about.

use cache_index::ids::NodeId;
use cache_index::tiers::Tiers;

use crate::view::{FetchCosts, NodeState, NodeView, RequestView, Role, SessionKey, Splits};

pub(crate) fn id(name: &str) -> NodeId {
    NodeId::new(name)
}

/// An idle node without any of the prompt: 1000 tokens/s, 1 ms away.
pub(crate) fn node(name: &str) -> NodeView {
    NodeView {
        id: id(name),
        region: "here".to_owned(),
        state: NodeState::Up,
        round_trip_ms: 1.0,
        inflight_prefill_tokens: 0,
        inflight_decode_tokens: 0,
        prefill_tokens_per_s: 1000.0,
        context_doubles_tokens: 0.0,
        pool_blocks: 0,
        pool_used_blocks: 0,
        overlap_blocks: 0,
        overlap_tiers: Tiers::default(),
        fetch_ms_per_block: FetchCosts::default(),
        node_block_tokens: 16,
        context_max: 100_000,
        bound_sessions: 0,
        arrivals_per_s: 0.0,
        busy_share: 0.0,
        kept_ms: f64::INFINITY,
        role: Role::Mixed,
        handover: None,
        needs_partner: false,
        decoding_requests: 0,
    }
}

/// A first turn of 1600 tokens.
pub(crate) fn request() -> RequestView {
    RequestView {
        prompt_tokens: 1600,
        output_tokens_expected: 100,
        session: SessionKey(1),
        bound: None,
        excluded: Vec::new(),
        splits: Splits::Yes,
    }
}
