//! Catches: sessions that pile up on one of two idle nodes, that leave a warm node for nothing or
//! stay on a hot one for ever, and decisions that do not say why.

mod crowd;

use cache_index::ids::NodeId;

use super::{Decision, Params, Reason, decide};
use crate::eligible::Ineligible;
use crate::test_views::{id, node, request};
use crate::view::{NodeState, NodeView, RequestView, SessionKey};

fn choose(request: &RequestView, nodes: &[NodeView]) -> Decision {
    decide(request, nodes, &Params::default()).expect("a node can take it")
}

fn check(request: &RequestView, nodes: &[NodeView], node: &str, reason: Reason) {
    let decision = choose(request, nodes);
    assert_eq!(
        (decision.node.as_str(), decision.reason),
        (node, reason),
        "{decision:?}"
    );
    let chosen = decision
        .candidates
        .iter()
        .find(|candidate| candidate.node == decision.node);
    let cached = chosen.map(|candidate| candidate.cached_tokens);
    assert_eq!(cached, Some(decision.expected_cached_tokens));
    assert_eq!(
        decision.candidates.len() + decision.refused.len(),
        nodes.len()
    );
}

fn holding(name: &str, overlap_blocks: usize) -> NodeView {
    NodeView {
        overlap_blocks,
        ..node(name)
    }
}

fn bound_to(name: &str) -> RequestView {
    RequestView {
        bound: Some(id(name)),
        ..request()
    }
}

#[test]
fn the_reason_says_what_decided() {
    check(&request(), &[node("a")], "a", Reason::Only);
    check(
        &request(),
        &[node("a"), holding("b", 50)],
        "b",
        Reason::Prefix,
    );
    check(
        &bound_to("a"),
        &[holding("a", 90), holding("b", 90)],
        "a",
        Reason::Session,
    );
    check(
        &bound_to("b"),
        &[holding("a", 90), holding("b", 90)],
        "b",
        Reason::Session,
    );
    let busy = NodeView {
        inflight_prefill_tokens: 1000,
        ..node("a")
    };
    check(
        &request(),
        &[busy.clone(), node("b")],
        "b",
        Reason::LeastLoaded,
    );
    let decoding = NodeView {
        inflight_decode_tokens: 20_000,
        ..node("b")
    };
    check(&request(), &[node("a"), decoding], "a", Reason::LeastLoaded);
    let retry = RequestView {
        excluded: vec![id("b")],
        ..bound_to("b")
    };
    check(&retry, &[busy, node("b")], "a", Reason::Retry);
    let popular = NodeView {
        bound_sessions: 3,
        ..node("a")
    };
    // The bound node is down: least loaded again, or whoever holds the prefix.
    let down = NodeView {
        state: NodeState::Draining,
        ..holding("b", 90)
    };
    check(
        &bound_to("b"),
        &[popular, down.clone(), node("c")],
        "c",
        Reason::LeastLoaded,
    );
    check(
        &bound_to("b"),
        &[holding("a", 80), down.clone(), node("c")],
        "a",
        Reason::Prefix,
    );
    check(&bound_to("b"), &[node("a"), down], "a", Reason::Only);
}

#[test]
fn a_trace_of_overlap_does_not_make_a_session_warm() {
    // 20 blocks of 100 are a fifth: still cold, so the idle node wins although it holds nothing.
    let busy = |overlap| NodeView {
        inflight_prefill_tokens: 100,
        ..holding("a", overlap)
    };
    check(&request(), &[busy(20), node("b")], "b", Reason::LeastLoaded);
    check(&request(), &[busy(21), node("b")], "a", Reason::Prefix);
}

#[test]
fn the_beginning_that_all_prompts_share_gathers_no_traffic() {
    // 16 of 40 tokens are the template's own: a share above the threshold, and still a trifle.
    let short = RequestView {
        prompt_tokens: 40,
        ..request()
    };
    let decoding = NodeView {
        inflight_decode_tokens: 1,
        ..holding("a", 1)
    };
    check(&short, &[decoding, node("b")], "b", Reason::LeastLoaded);
    // 64 tokens are worth something, until the decodes beside them cost more than they save.
    let longer = RequestView {
        prompt_tokens: 100,
        ..request()
    };
    let decoding = |inflight_decode_tokens| NodeView {
        inflight_decode_tokens,
        ..holding("a", 4)
    };
    check(&longer, &[decoding(100), node("b")], "a", Reason::Prefix);
    check(
        &longer,
        &[decoding(10_000), node("b")],
        "b",
        Reason::LeastLoaded,
    );
}

#[test]
fn an_open_breaker_is_never_the_only_reason_for_a_refusal() {
    let suspected = |name| NodeView {
        state: NodeState::BreakerOpen,
        ..node(name)
    };
    let down = NodeView {
        state: NodeState::Down {
            why: "gone".to_owned(),
        },
        ..node("b")
    };
    check(
        &request(),
        &[suspected("a"), down.clone()],
        "a",
        Reason::Only,
    );
    // Beside a node in good standing it stays out.
    check(&request(), &[suspected("a"), node("b")], "b", Reason::Only);
    // Where the request has failed already it is not sent again.
    let retry = RequestView {
        excluded: vec![id("a")],
        ..request()
    };
    decide(&retry, &[suspected("a"), down], &Params::default()).expect_err("nobody is left");
}

/// Sends first turns of `count` sessions one after the other, each finished before the next comes,
/// so that nothing is ever in flight. Returns how many each node got.
fn place_one_by_one(count: u128, nodes: &mut [NodeView]) -> Vec<u64> {
    for session in 0..count {
        let request = RequestView {
            session: SessionKey(session),
            ..request()
        };
        let chosen = choose(&request, nodes).node;
        let node = nodes
            .iter_mut()
            .find(|node| node.id == chosen)
            .expect("a known node");
        node.bound_sessions += 1;
    }
    nodes.iter().map(|node| node.bound_sessions).collect()
}

#[test]
fn fresh_sessions_use_all_idle_nodes() {
    assert_eq!(place_one_by_one(10, &mut [node("a"), node("b")]), [5, 5]);
    assert_eq!(
        place_one_by_one(10, &mut [node("a"), node("b"), node("c")])
            .iter()
            .max(),
        Some(&4)
    );
    // All at once: what is in flight counts from dispatch on.
    let mut nodes = [node("a"), node("b")];
    for session in 0..10 {
        let request = RequestView {
            session: SessionKey(session),
            ..request()
        };
        let chosen = choose(&request, &nodes).node;
        let node = nodes
            .iter_mut()
            .find(|node| node.id == chosen)
            .expect("a known node");
        node.inflight_prefill_tokens += 1600;
    }
    assert!(
        nodes
            .iter()
            .all(|node| node.inflight_prefill_tokens == 8000)
    );
}

#[test]
fn without_any_difference_the_session_itself_decides_alike_everywhere() {
    let nodes: Vec<NodeView> = ["a", "b", "c", "d"].map(node).into();
    let reversed: Vec<NodeView> = nodes.iter().rev().cloned().collect();
    let mut counts = [0; 4];
    let pick = |session, nodes: &[NodeView]| -> NodeId {
        choose(
            &RequestView {
                session: SessionKey(session),
                ..request()
            },
            nodes,
        )
        .node
    };
    for session in 0..4000 {
        let chosen = pick(session, &nodes);
        assert_eq!(
            chosen,
            pick(session, &reversed),
            "the order of nodes matters"
        );
        // A node that goes moves only its own sessions.
        let without_d = pick(session, &nodes[..3]);
        assert!(chosen == without_d || chosen == id("d"));
        let at = nodes
            .iter()
            .position(|node| node.id == chosen)
            .expect("a known node");
        counts[at] += 1;
    }
    assert!(
        counts.iter().all(|count| (900..1100).contains(count)),
        "{counts:?}"
    );
}

#[test]
fn a_session_moves_for_a_clear_gain_only() {
    let at = |inflight_prefill_tokens| NodeView {
        inflight_prefill_tokens,
        ..holding("a", 90)
    };
    // On "a" 160 tokens are left to compute, and 360 ms are the bonus for the 1440 that are not.
    // "b" holds three blocks more, which is worth 48 tokens, b times.
    let better = holding("b", 93);
    check(
        &bound_to("a"),
        &[at(0), better.clone()],
        "a",
        Reason::Session,
    );
    check(&bound_to("a"), &[at(1000), better], "b", Reason::Prefix);
    // Equal nodes do not trade sessions, in whatever order they come.
    let equal = |name| NodeView {
        inflight_prefill_tokens: 300,
        ..holding(name, 90)
    };
    check(
        &bound_to("a"),
        &[equal("b"), equal("a")],
        "a",
        Reason::Session,
    );
    // 20 tokens more in flight, the bonus aside, are 20 ms: within a tenth of the cost.
    let slightly = NodeView {
        inflight_prefill_tokens: 300 + 360 + 20,
        ..holding("a", 90)
    };
    check(
        &bound_to("a"),
        &[slightly, equal("b")],
        "a",
        Reason::Session,
    );
    // A binding to a node that has lost the session's prefix holds nobody back.
    let empty = NodeView {
        inflight_prefill_tokens: 600,
        ..node("a")
    };
    check(
        &bound_to("a"),
        &[empty, node("b")],
        "b",
        Reason::LeastLoaded,
    );
}

#[test]
fn a_long_session_stays_where_its_prefix_is_under_load() {
    // 90,000 tokens, all but the last turn held; 100 tokens/s of load would have to be 540,000.
    let request = RequestView {
        prompt_tokens: 90_000,
        ..bound_to("a")
    };
    let warm = NodeView {
        inflight_prefill_tokens: 50_000,
        ..holding("a", 5600)
    };
    check(&request, &[warm, node("b")], "a", Reason::Session);
}

#[test]
fn a_hot_shared_prefix_spreads() {
    // 1500 of 1600 tokens are shared and lie on "a"; sessions come faster than they are served.
    let mut nodes = [holding("a", 93), node("b")];
    let mut moved_at = None;
    for session in 0..200 {
        let request = RequestView {
            session: SessionKey(session),
            ..request()
        };
        let decision = choose(&request, &nodes);
        let node = nodes
            .iter_mut()
            .find(|node| node.id == decision.node)
            .expect("a known node");
        node.inflight_prefill_tokens += 1600 - decision.expected_cached_tokens;
        if decision.node == id("b") && moved_at.is_none() {
            moved_at = Some(session);
            // From now on "b" holds it as well.
            node.overlap_blocks = 93;
        }
    }
    // 1488 cached tokens are worth b × 1488 tokens of queue, in requests of 112; the last of them
    // are within what makes nodes equally good for a session that is bound nowhere.
    let worth = Params::default().b * 1488.0 / 112.0;
    let moved_at = moved_at.expect("it spreads") as f64;
    assert!(
        (worth * 0.95..=worth + 1.0).contains(&moved_at),
        "{moved_at} of {worth}"
    );
    let [a, b] = nodes.map(|node| node.inflight_prefill_tokens);
    assert!(a.abs_diff(b) <= 1600, "{a} {b}");
}

#[test]
fn new_sessions_with_a_prompt_that_all_hold_use_all_nodes() {
    // All but the last turn is shared; the nodes differ by what is measured badly.
    let distant = |name, round_trip_ms| NodeView {
        round_trip_ms,
        ..holding(name, 93)
    };
    let mut nodes = [
        distant("a", 0.2),
        distant("b", 3.0),
        NodeView {
            prefill_tokens_per_s: 1010.0,
            ..holding("c", 93)
        },
    ];
    assert_eq!(place_one_by_one(9, &mut nodes), [3, 3, 3]);
}

#[test]
fn a_cold_session_does_not_cross_an_ocean_for_an_idle_node() {
    let near = NodeView {
        inflight_prefill_tokens: 5000,
        ..node("near")
    };
    let far = NodeView {
        round_trip_ms: 90.0,
        ..node("far")
    };
    check(
        &request(),
        &[near.clone(), far],
        "near",
        Reason::LeastLoaded,
    );
    let next_door = NodeView {
        round_trip_ms: 8.0,
        ..node("next")
    };
    check(&request(), &[near, next_door], "next", Reason::LeastLoaded);
}

#[test]
fn no_node_carries_a_reason_for_each() {
    let none = decide(&request(), &[], &Params::default()).expect_err("there are no nodes");
    assert_eq!(
        (none.to_string().as_str(), none.context_max()),
        ("no node serves this model", None)
    );
    let small = |name, context_max| NodeView {
        context_max,
        ..node(name)
    };
    let draining = NodeView {
        state: NodeState::Draining,
        ..node("c")
    };
    let refused = |nodes: &[NodeView]| {
        decide(&request(), nodes, &Params::default()).expect_err("nobody can take it")
    };
    let all = refused(&[small("a", 10), small("b", 1600), draining.clone()]);
    assert_eq!(all.reasons.len(), 3);
    assert_eq!(all.reasons[2], (id("c"), Ineligible::Draining));
    assert!(
        all.to_string()
            .contains("b: needs 1601 tokens of context, it has 1600"),
        "{all}"
    );
    // With the draining node back it might fit: the client is not told that it never will.
    assert_eq!(all.context_max(), None);
    assert_eq!(
        refused(&[small("a", 10), small("b", 1600)]).context_max(),
        Some(1600)
    );
}

#[test]
fn absurd_numbers_still_give_a_decision() {
    let nan = NodeView {
        round_trip_ms: f64::NAN,
        ..node("a")
    };
    let infinite = NodeView {
        round_trip_ms: f64::INFINITY,
        ..node("b")
    };
    assert!(decide(&request(), &[nan, infinite.clone()], &Params::default()).is_ok());
    assert!(decide(&bound_to("b"), &[infinite], &Params::default()).is_ok());
}

/// A node whose rate nobody has measured counts as its neighbours do; a default far below them would
/// keep it from ever being tried, and so from ever being measured.
#[test]
fn an_unmeasured_node_is_tried() {
    let fast = |name: &str, tokens_per_s| NodeView {
        prefill_tokens_per_s: tokens_per_s,
        ..node(name)
    };
    let busy = NodeView {
        inflight_prefill_tokens: 100,
        ..fast("a", 50_000.0)
    };
    check(
        &request(),
        &[busy, fast("b", 0.0)],
        "b",
        Reason::LeastLoaded,
    );
}

/// A tenth of a millisecond of distance must not gather every session on one of two idle nodes.
#[test]
fn among_idle_nodes_nearby_the_one_with_fewest_sessions_is_chosen() {
    let at = |name: &str, round_trip_ms, bound_sessions| NodeView {
        round_trip_ms,
        bound_sessions,
        ..node(name)
    };
    let nodes = [at("a", 0.2, 3), at("b", 0.3, 2)];
    check(&request(), &nodes, "b", Reason::LeastLoaded);
}
