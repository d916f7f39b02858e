//! Catches a prompt that is computed where everybody decodes although another node could, two nodes
//! that do not understand each other, a turn that nobody takes although a pool is there, and a pair
//! that is not the cheapest.

use super::super::decide;
use super::*;
use crate::cost::to_f64;
use crate::test_views::{id, node, request};
use crate::view::{Handover, NodeState};

fn of_role(name: &str, role: Role) -> NodeView {
    NodeView {
        role,
        handover: Some(Handover {
            protocol: "homing",
            bytes_per_token: 100_000.0,
            bytes_per_s: 1e9,
            overlaps_prefill: true,
        }),
        ..node(name)
    }
}

fn prefill(name: &str) -> NodeView {
    of_role(name, Role::Prefill)
}

fn decode(name: &str) -> NodeView {
    of_role(name, Role::Decode)
}

/// One that cannot answer by itself.
fn dependent(view: NodeView) -> NodeView {
    NodeView {
        needs_partner: true,
        ..view
    }
}

fn down(view: NodeView) -> NodeView {
    NodeView {
        state: NodeState::Draining,
        ..view
    }
}

fn holding(view: NodeView, overlap_blocks: usize) -> NodeView {
    NodeView {
        overlap_blocks,
        ..view
    }
}

/// `expected` is the node that does all of it, or `the one that computes>the one that answers`.
fn check(what: &str, request: &RequestView, nodes: &[NodeView], expected: &str) -> Decision {
    let decision = decide(request, nodes, &Params::default());
    let decision = decision.unwrap_or_else(|none| panic!("{what}: {none}"));
    let found = match decision.pair() {
        Some(pair) => format!("{}>{}", pair.prefill, pair.decode),
        None => decision.node.to_string(),
    };
    assert_eq!(found, expected, "{what}: {decision:#?}");
    decision
}

#[test]
fn a_long_prompt_goes_to_two_nodes_and_a_short_one_to_the_one_that_answers() {
    let long = request();
    let short = RequestView {
        prompt_tokens: 200,
        ..request()
    };
    let pools = [prefill("p"), decode("d")];
    let decision = check("a long one", &long, &pools, "p>d");
    assert_eq!(
        (decision.node.as_str(), decision.reason),
        ("d", Reason::LeastLoaded)
    );
    check("a short one", &short, &pools, "d");
    // Of a long prompt, 1500 of 1600 tokens are there: little is missing.
    let warm = [prefill("p"), holding(decode("d"), 94)];
    check("a next turn", &long, &warm, "d");
    // The half that it lacks is computed sooner there than all of it elsewhere, as long as few wait.
    let half = |decoding_requests| NodeView {
        decoding_requests,
        ..holding(decode("d"), 50)
    };
    check("held in part", &long, &[prefill("p"), half(0)], "d");
    check("others wait for it", &long, &[prefill("p"), half(6)], "p>d");
    let dependent = [prefill("p"), decode("d")].map(dependent);
    check("short, and no other way", &short, &dependent, "p>d");
    let whole = RequestView {
        splits: Splits::No,
        ..request()
    };
    check("it cannot be split", &whole, &pools, "d");
}

#[test]
fn each_half_goes_where_it_costs_least() {
    let busy = |mut view: NodeView| {
        view.inflight_prefill_tokens = 2000;
        view
    };
    let nodes = [busy(prefill("p1")), prefill("p2"), decode("d")];
    check("a queue of prefill", &request(), &nodes, "p2>d");
    let nodes = [holding(prefill("p1"), 60), prefill("p2"), decode("d")];
    let decision = check("a prefix", &request(), &nodes, "p1>d");
    assert_eq!(decision.expected_cached_tokens, 960);
    assert_eq!(decision.reason, Reason::Prefix);
    let mut decoding = decode("d1");
    decoding.inflight_decode_tokens = 20_000;
    check(
        "tokens to produce",
        &request(),
        &[prefill("p"), decoding, decode("d2")],
        "p>d2",
    );
    let mut full = decode("d1");
    (full.pool_blocks, full.pool_used_blocks) = (1000, 900);
    let mut roomy = decode("d2");
    roomy.pool_blocks = 1000;
    check(
        "a full pool",
        &request(),
        &[prefill("p"), full, roomy],
        "p>d2",
    );
    // 5 s of transfer, of which 1.6 s are hidden.
    let mut slow = decode("d1");
    if let Some(handover) = &mut slow.handover {
        handover.bytes_per_s = 32e6;
    }
    check(
        "a slow way",
        &request(),
        &[prefill("p"), slow.clone(), decode("d2")],
        "p>d2",
    );
    // Computing takes 1.6 s there, three times with its weight.
    check(
        "a slow way, and no other",
        &request(),
        &[prefill("p"), slow],
        "d1",
    );
    let held = holding(prefill("p"), 50);
    let nodes = [held, decode("d1"), holding(decode("d2"), 50)];
    let decision = check("less to move", &request(), &nodes, "p>d2");
    assert_eq!(decision.pair().map(|pair| pair.moved_tokens), Some(800));
}

#[test]
fn a_decode_node_helps_out_where_the_prefill_nodes_are_far_behind() {
    let mut behind = prefill("p");
    behind.inflight_prefill_tokens = 60_000;
    let streams = |decoding_requests| NodeView {
        decoding_requests,
        ..decode("d")
    };
    let decision = check(
        "few streams",
        &request(),
        &[behind.clone(), streams(4)],
        "d",
    );
    let stall = decision.candidates[0].terms.stall_ms;
    assert!((stall - 5.0 * 1600.0).abs() < 1e-6, "{stall}");
    check(
        "many streams",
        &request(),
        &[behind.clone(), streams(80)],
        "p>d",
    );
    // An operator to whom streams matter more.
    let params = Params {
        stall: 20.0,
        ..Params::default()
    };
    let decision = decide(&request(), &[behind, streams(4)], &params).expect("a node");
    assert!(decision.pair().is_some(), "{decision:#?}");
}

#[test]
fn a_pool_that_is_away_is_done_without() {
    let mixed = node("m");
    for (what, nodes, expected) in [
        (
            "no prefill node",
            vec![down(prefill("p")), decode("d")],
            "d",
        ),
        (
            "no decode node",
            vec![prefill("p"), down(decode("d")), mixed.clone()],
            "m",
        ),
        (
            "only prefill nodes",
            vec![prefill("p"), down(decode("d"))],
            "p",
        ),
        (
            "nobody answers by himself",
            vec![dependent(prefill("p")), down(decode("d")), mixed.clone()],
            "m",
        ),
        (
            "their addresses are not known yet",
            vec![
                NodeView {
                    handover: None,
                    ..prefill("p")
                },
                decode("d"),
            ],
            "d",
        ),
        (
            "only its breaker keeps a node out",
            vec![
                dependent(prefill("p")),
                NodeView {
                    state: NodeState::BreakerOpen,
                    ..dependent(decode("d"))
                },
            ],
            "p>d",
        ),
    ] {
        check(what, &request(), &nodes, expected);
    }
    let none = decide(
        &request(),
        &[dependent(prefill("p")), down(dependent(decode("d")))],
        &Params::default(),
    );
    let none = none.expect_err("nobody can take it").to_string();
    assert!(
        none.contains("p: it computes prompts, and no node"),
        "{none}"
    );
    let mut other = decode("d");
    if let Some(handover) = &mut other.handover {
        handover.protocol = "nixl";
    }
    check("another protocol", &request(), &[prefill("p"), other], "d");
}

#[test]
fn a_session_stays_where_it_is_answered() {
    let bound = RequestView {
        bound: Some(id("d1")),
        ..request()
    };
    let mut busier = holding(decode("d1"), 40);
    busier.inflight_decode_tokens = 2000;
    let warm = holding(prefill("p"), 40);
    let nodes = [warm.clone(), busier, decode("d2")];
    let decision = check("a little busier", &bound, &nodes, "p>d1");
    assert_eq!(decision.reason, Reason::Session);
    check(
        "another session",
        &request(),
        &[
            prefill("p"),
            {
                let mut busier = decode("d1");
                busier.inflight_decode_tokens = 20_000;
                busier
            },
            decode("d2"),
        ],
        "p>d2",
    );
    let mut hot = holding(decode("d1"), 40);
    hot.inflight_decode_tokens = 200_000;
    check("far busier", &bound, &[warm, hot, decode("d2")], "p>d2");
    let retry = RequestView {
        excluded: vec![id("p1")],
        ..bound
    };
    let nodes = [prefill("p1"), prefill("p2"), decode("d1")];
    let decision = check("a prefill node failed", &retry, &nodes, "p2>d1");
    assert_eq!(decision.reason, Reason::Retry);
    check(
        "the only one failed",
        &retry,
        &[prefill("p1"), decode("d1")],
        "d1",
    );
}

#[test]
fn new_sessions_spread_over_idle_pairs() {
    let mut nodes = [prefill("p1"), prefill("p2"), decode("d1"), decode("d2")];
    let mut computed = std::collections::BTreeMap::new();
    for session in 0..64 {
        let request = RequestView {
            session: crate::view::SessionKey(session),
            ..request()
        };
        let decision = decide(&request, &nodes, &Params::default()).expect("a pair");
        *computed.entry(decision.prefill_node().clone()).or_insert(0) += 1;
        let node = nodes.iter_mut().find(|node| node.id == decision.node);
        node.expect("one of them").bound_sessions += 1;
    }
    assert_eq!(nodes.map(|node| node.bound_sessions), [0, 0, 32, 32]);
    assert!(
        computed.len() == 2 && computed.values().all(|of| *of >= 16),
        "{computed:?}"
    );
}

/// Small numbers from a seed.
fn numbers(mut seed: u64) -> impl FnMut(u64) -> u64 {
    move |below| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed % below
    }
}

fn some_node(name: &str, random: &mut impl FnMut(u64) -> u64) -> NodeView {
    let role = [Role::Mixed, Role::Prefill, Role::Decode][random(3) as usize];
    let mut view = of_role(name, role);
    if random(6) == 0 || role == Role::Mixed {
        view.handover = None;
    }
    if let Some(handover) = &mut view.handover {
        handover.protocol = ["homing", "nixl"][random(2) as usize];
        handover.bytes_per_s = 1e7 * to_f64(random(200));
        handover.overlaps_prefill = random(2) == 0;
    }
    view.needs_partner = role != Role::Mixed && random(4) == 0;
    view.state = match random(6) {
        0 => NodeState::Draining,
        1 => NodeState::BreakerOpen,
        _ => NodeState::Up,
    };
    view.inflight_prefill_tokens = random(3) * random(5000);
    view.inflight_decode_tokens = random(3) * random(5000);
    view.decoding_requests = random(8);
    view.overlap_blocks = (random(2) * random(120)) as usize;
    view.prefill_tokens_per_s = to_f64(random(3) * random(3000));
    (view.pool_blocks, view.pool_used_blocks) = (1000, random(1000));
    view.bound_sessions = random(4);
    view
}

/// What a pair costs by the definition, from the views alone, and the prefill's part of it.
fn priced_alone(
    req: &RequestView,
    all: &[&NodeView],
    pair: [&NodeView; 2],
    p: &Params,
) -> (f64, f64) {
    let of_role = |role| -> Vec<&NodeView> {
        let partner = |view: &&NodeView| {
            let mut others = all.iter().filter(|other| other.role != view.role);
            others.any(|other| other.role != Role::Mixed && understand(view, other))
        };
        let nodes = all.iter().copied().filter(|view| view.role == role);
        nodes.filter(partner).collect()
    };
    let fleet = |role| {
        let mut fleet = fleet_view(&of_role(role));
        fleet.splits = Splits::Yes;
        if fleet.prefill_tokens_per_s == 0.0 {
            fleet.prefill_tokens_per_s = fleet_view(all).prefill_tokens_per_s;
        }
        fleet
    };
    let [computes, answers] = pair;
    let first = prefill_leg(req, computes, &fleet(Role::Prefill), p);
    let second = decode_leg(req, answers, &fleet(Role::Decode), p);
    let travels_along = pair.iter().all(|view| {
        view.handover
            .is_some_and(|handover| handover.overlaps_prefill)
    });
    let hidden = if travels_along {
        second.terms.transfer_ms.min(first.terms.prefill_ms / p.b)
    } else {
        0.0
    };
    let cost_ms = first.cost_ms + second.cost_ms - hidden;
    (cost_ms, first.terms.prefill_ms)
}

/// Random fleets against every pair, priced by itself: nothing that was chosen may be impossible,
/// and nothing clearly cheaper may have been left.
#[test]
fn no_pair_that_was_left_is_clearly_cheaper() {
    let p = Params::default();
    let mut chosen = [0, 0];
    for seed in 1..8000_u64 {
        let mut random = numbers(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let names: Vec<String> = (0..=random(7)).map(|at| format!("n{at}")).collect();
        let nodes = names.iter().map(|name| some_node(name, &mut random));
        let nodes: Vec<NodeView> = nodes.collect();
        let req = RequestView {
            prompt_tokens: 1 + random(3000),
            bound: (random(2) == 0).then(|| id("n0")),
            ..request()
        };
        let Ok(decision) = decide(&req, &nodes, &p) else {
            continue;
        };
        chosen[usize::from(decision.pair().is_some())] += 1;
        is_possible(&req, &nodes, &decision, &p);
        is_cheapest(&req, &nodes, &decision, &p);
    }
    assert!(chosen.iter().all(|times| *times > 500), "{chosen:?}");
}

fn find<'a>(nodes: &'a [NodeView], name: &NodeId) -> &'a NodeView {
    let node = nodes.iter().find(|node| node.id == *name);
    node.expect("one of the nodes")
}

fn can_pair(req: &RequestView, [a, b]: [&NodeView; 2], p: &Params) -> bool {
    let roles = (a.role, b.role) == (Role::Prefill, Role::Decode);
    let much = b.needs_partner || moved_tokens(req, b) >= p.split_tokens_min;
    roles && understand(a, b) && much
}

fn is_possible(req: &RequestView, nodes: &[NodeView], decision: &Decision, p: &Params) {
    match decision.pair() {
        Some(pair) => {
            let both = [find(nodes, &pair.prefill), find(nodes, &pair.decode)];
            assert!(can_pair(req, both, p), "{decision:#?}");
        }
        None => assert!(!find(nodes, &decision.node).needs_partner, "{decision:#?}"),
    }
}

fn is_cheapest(req: &RequestView, nodes: &[NodeView], decision: &Decision, p: &Params) {
    // With a breaker open everywhere, suspects take part as well, and the costs are others.
    let involved = [&decision.node, decision.prefill_node()];
    if involved
        .iter()
        .any(|name| find(nodes, name).state != NodeState::Up)
    {
        return;
    }
    let up: Vec<&NodeView> = nodes.iter().filter(|n| n.state == NodeState::Up).collect();
    let all = up.iter().flat_map(|a| up.iter().map(|b| [*a, *b]));
    let costs = all
        .filter(|pair| can_pair(req, *pair, p))
        .map(|pair| priced_alone(req, &up, pair, p));
    let least = costs.min_by(|a, b| a.0.total_cmp(&b.0));
    let legs = decision.legs.as_ref();
    let cheapest = legs.and_then(|legs| legs.cheapest.as_ref());
    let found = cheapest.map(|pair| pair.cost_ms);
    assert_eq!(least.is_some(), found.is_some(), "{decision:#?}");
    let (Some((least, prefill_ms)), Some(found)) = (least, found) else {
        return;
    };
    let slack = if req.bound.is_some() {
        0.0
    } else {
        0.03 * prefill_ms
    };
    let as_good = least - 1e-6..=least + slack + 1e-6;
    assert!(as_good.contains(&found), "{least} {found}: {decision:#?}");
    // Among several, a new session goes to the least loaded, not to the cheapest.
    if let ([only], Some(pair), None) = (&decision.candidates[..], decision.pair(), &req.bound) {
        assert!(pair.cost_ms <= only.cost_ms, "{decision:#?}");
    }
}
