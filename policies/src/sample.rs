//! Which nodes are worth looking at where there are many?
//!
//! Those that hold most of the prompt, the one that the session is bound to, those with the least
//! work before them, and the first few in the session's rendezvous order, so that sessions without
//! any difference still spread. A node outside of these has less of the prompt than some holder and
//! more work than some idle node, so it is hardly ever the cheapest; leaving it out bounds what a
//! decision costs and how long its explanation is.

use crate::affinity::rendezvous;
use crate::cost::SampleParams;
use crate::view::{NodeView, RequestView};

/// Nodes whose work before them differs by less are as idle as each other.
const NEAR_STEP_MS: f64 = 10.0;

/// Places in `nodes` of those to look at, in the order given; all of them where they are few.
pub fn sample(request: &RequestView, nodes: &[&NodeView], p: &SampleParams) -> Vec<usize> {
    let all = 0..nodes.len();
    if nodes.len() <= p.nodes_max {
        return all.collect();
    }
    let mut chosen = vec![false; nodes.len()];
    let mut take = |count: usize, among: Vec<usize>, key: &dyn Fn(&NodeView) -> [u64; 3]| {
        let mut order: Vec<([u64; 3], usize)> =
            among.into_iter().map(|at| (key(nodes[at]), at)).collect();
        if count < order.len() {
            order.select_nth_unstable(count);
            order.truncate(count);
        }
        for (_, at) in order {
            chosen[at] = true;
        }
    };
    let reach = |node: &NodeView| node.overlap_blocks.max(node.overlap_tiers.shared);
    let holders = all.clone().filter(|at| reach(nodes[*at]) > 0).collect();
    take(p.holders, holders, &|node| {
        [u64::MAX - reach(node) as u64, 0, 0]
    });
    let own = |node: &NodeView| u64::MAX - rendezvous(request.session, &node.id);
    let near = |node: &NodeView| {
        // A queue is compared by time: nodes differ in speed and distance. Not to the last fraction
        // of a millisecond, by which idle nodes always differ in the same order.
        let rate = node.prefill_tokens_per_s.max(1.0);
        let queue_ms = crate::cost::to_f64(node.inflight_prefill_tokens) * 1000.0 / rate;
        let steps = (queue_ms + node.round_trip_ms.max(0.0)) / NEAR_STEP_MS;
        [
            crate::cost::to_tokens(steps),
            node.bound_sessions,
            own(node),
        ]
    };
    take(p.idle, all.clone().collect(), &near);
    take(p.rendezvous, all.clone().collect(), &|node| {
        [own(node), 0, 0]
    });
    all.filter(|at| chosen[*at] || request.bound.as_ref() == Some(&nodes[*at].id))
        .collect()
}

#[cfg(test)]
mod tests;
