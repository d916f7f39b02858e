//! Catches sessions that gather on one node because it held their common prefix first.

use super::{choose, node, request};
use crate::view::{RequestView, SessionKey};

/// A prefix that every new session shares must not gather them all on the node that held it first,
/// which is idle at the moment of each choice.
#[test]
fn sessions_with_a_common_prefix_spread() {
    let mut nodes = ["a", "b", "c", "d"].map(node);
    nodes[0].overlap_blocks = 75;
    for session in 0..40 {
        let request = RequestView {
            session: SessionKey(session),
            ..request()
        };
        let decision = choose(&request, &nodes);
        for candidate in &decision.candidates {
            let total = candidate.terms.total_ms();
            assert!((candidate.cost_ms - total).abs() < 1e-6, "{candidate:?}");
        }
        let chosen = nodes.iter_mut().find(|view| view.id == decision.node);
        let chosen = chosen.expect("one of them");
        chosen.bound_sessions += 1;
        chosen.overlap_blocks = 75;
    }
    let bound = nodes.map(|view| view.bound_sessions);
    assert_eq!(bound, [10; 4], "{bound:?}");
}
