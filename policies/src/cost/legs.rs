//! What do the two halves of a turn cost, where one node computes the prompt and another answers?
//!
//! The same terms as for a node that does both, each where it arises: prefill, its queue and those
//! behind it on the node that computes; room in the pool, steps shared with other streams and the
//! session's bonus on the node that answers, and the time that KV takes to get there. Left out:
//! which two go together, and what of the transfer is hidden behind the prefill (`pick::pair`).

use super::{Candidate, Params, Terms, candidate, displaced_live, pool_wait_ms, prefill_rate};
use super::{cached_tokens, to_f64};
use crate::transfer::{BYTES_PER_S, BYTES_PER_TOKEN, known};
use crate::view::{FleetView, NodeView, RequestView, Splits};

/// The cost of computing the prompt on `node` for another one. It answers nothing, so that nobody's
/// steps wait, and keeps its blocks only until they have been read.
pub(crate) fn prefill_leg(
    request: &RequestView,
    node: &NodeView,
    fleet: &FleetView,
    p: &Params,
) -> Candidate {
    let prompt_only = RequestView {
        output_tokens_expected: 0,
        // The session's turns are answered elsewhere, and bound there.
        bound: None,
        excluded: Vec::new(),
        ..*request
    };
    let alone = FleetView {
        splits: Splits::No,
        ..*fleet
    };
    candidate(&prompt_only, node, &alone, p)
}

/// The cost of answering on `node` from a prompt that another one computes.
pub(crate) fn decode_leg(
    request: &RequestView,
    node: &NodeView,
    fleet: &FleetView,
    p: &Params,
) -> Candidate {
    let rate = prefill_rate(node, fleet, p);
    let ms = |tokens: f64| tokens * 1000.0 / rate;
    let cached = cached_tokens(request, node);
    let moved = moved_tokens(request, node);
    let bound = request.bound.as_ref() == Some(&node.id);
    let bonus = p.affinity.bonus_ms(ms(to_f64(cached)));
    let terms = Terms {
        round_trip_ms: node.round_trip_ms.max(0.0),
        pool_ms: pool_wait_ms(request, node, p),
        live_ms: ms(p.live * displaced_live(request, node, moved, p)),
        decode_ms: ms(p.decode_interference * to_f64(node.inflight_decode_tokens)),
        transfer_ms: transfer_ms(request, node),
        session_ms: if bound { -bonus } else { 0.0 },
        ..Terms::default()
    };
    Candidate {
        node: node.id.clone(),
        cached_tokens: cached,
        fetched_tokens: 0,
        fetched_ms: 0.0,
        terms,
        cost_ms: terms.total_ms(),
    }
}

/// Prompt tokens whose KV the node lacks.
pub(crate) fn moved_tokens(request: &RequestView, node: &NodeView) -> u64 {
    request.prompt_tokens - cached_tokens(request, node).min(request.prompt_tokens)
}

/// The size of that KV.
pub(crate) fn moved_bytes(request: &RequestView, node: &NodeView) -> f64 {
    let told = node.handover.map(|handover| handover.bytes_per_token);
    to_f64(moved_tokens(request, node)) * known(told, BYTES_PER_TOKEN)
}

/// How long that takes to get there, in milliseconds.
fn transfer_ms(request: &RequestView, node: &NodeView) -> f64 {
    let rate = node.handover.map(|handover| handover.bytes_per_s);
    moved_bytes(request, node) * 1000.0 / known(rate, BYTES_PER_S)
}
