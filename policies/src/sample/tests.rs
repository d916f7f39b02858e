//! Catches a subset that leaves out the node that would have been chosen.

use super::sample;
use crate::cost::{Params, SampleParams};
use crate::pick::decide;
use crate::test_views::{id, node, request};
use crate::view::{NodeView, RequestView, SessionKey};

#[test]
fn few_nodes_are_all_looked_at() {
    let nodes: Vec<NodeView> = (0..32).map(|at| node(&at.to_string())).collect();
    let views: Vec<&NodeView> = nodes.iter().collect();
    let all: Vec<usize> = (0..32).collect();
    assert_eq!(sample(&request(), &views, &SampleParams::default()), all);
}

#[test]
fn the_holders_the_idle_and_the_bound_node_are_looked_at() {
    let mut nodes: Vec<NodeView> = (0..64).map(|at| node(&at.to_string())).collect();
    for (at, node) in nodes.iter_mut().enumerate() {
        node.inflight_prefill_tokens = 1000 + at as u64;
    }
    nodes[63].overlap_blocks = 50;
    nodes[62].inflight_prefill_tokens = 0;
    let request = RequestView {
        bound: Some(id("61")),
        ..request()
    };
    let views: Vec<&NodeView> = nodes.iter().collect();
    let p = SampleParams::default();
    let sampled = sample(&request, &views, &p);
    assert!(
        [61, 62, 63].iter().all(|at| sampled.contains(at)),
        "{sampled:?}"
    );
    assert!(sampled.len() <= p.holders + p.idle + p.rendezvous + 1);
    assert!(sampled.is_sorted());
}

/// Idle nodes always differ by some fraction of a millisecond; the same few of them must not get
/// every session.
#[test]
fn all_idle_nodes_are_looked_at_in_turn() {
    let mut nodes: Vec<NodeView> = (0..64).map(|at| node(&at.to_string())).collect();
    for (at, node) in nodes.iter_mut().enumerate() {
        node.round_trip_ms = 0.2 + at as f64 / 1000.0;
    }
    for session in 0..64 {
        let request = RequestView {
            session: SessionKey(session),
            ..request()
        };
        let chosen = decide(&request, &nodes, &Params::default()).expect("a node");
        let at = nodes.iter().position(|node| node.id == chosen.node);
        nodes[at.expect("one of them")].bound_sessions += 1;
    }
    let bound: Vec<u64> = nodes.iter().map(|node| node.bound_sessions).collect();
    assert!(bound.iter().all(|bound| *bound == 1), "{bound:?}");
}

#[test]
fn sampled_decisions_cost_about_what_full_ones_do() {
    // The slow twin looks at everybody.
    let sampled = Params::default();
    let full = Params {
        sample: SampleParams {
            nodes_max: usize::MAX,
            ..SampleParams::default()
        },
        ..sampled
    };
    let mut state = 11_u64;
    let mut random = |below: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 33) % below
    };
    let (mut cost, mut cost_full, mut passed_over) = (0.0, 0.0, 0);
    for session in 0..500 {
        let nodes: Vec<NodeView> = (0..64)
            .map(|at| NodeView {
                inflight_prefill_tokens: random(4) * random(5000),
                overlap_blocks: if random(5) == 0 {
                    random(100) as usize
                } else {
                    0
                },
                arrivals_per_s: 0.5,
                ..node(&at.to_string())
            })
            .collect();
        let request = RequestView {
            session: SessionKey(session),
            bound: Some(id(&random(64).to_string())),
            ..request()
        };
        let of_chosen = |params| {
            let decision = decide(&request, &nodes, params).expect("nodes are up");
            let chosen = decision.candidates.iter().find(|c| c.node == decision.node);
            (
                chosen.expect("it was looked at").cost_ms,
                decision.passed_over,
            )
        };
        let (own, over) = of_chosen(&sampled);
        cost += own;
        passed_over += over;
        cost_full += of_chosen(&full).0;
    }
    assert!(passed_over > 500 * 40, "{passed_over}");
    assert!(cost <= cost_full * 1.02, "{cost} {cost_full}");
}
