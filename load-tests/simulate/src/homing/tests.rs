//! Catches a router that does not see what the nodes tell it, or sees what they never told.

use std::collections::HashSet;

use super::ext::Session;
use policies::view::{FetchCosts, Handover, Role};

use super::{Fleet, Homing, Knowledge, Place, Settings};
use crate::engine::tiers::Tier;
use crate::router::Ask;

fn fleet(nodes: usize) -> Fleet {
    let place = Place {
        region: 0,
        capacity_blocks: 3000,
        role: Role::Mixed,
    };
    Fleet {
        nodes: vec![place; nodes],
        block_tokens: 512,
        round_trip_ms: Vec::new(),
        fetch: FetchCosts::default(),
        tiers: Vec::new(),
        handover: None,
    }
}

fn homing(nodes: usize, knowledge: Knowledge) -> Homing {
    let settings = Settings {
        knowledge,
        ..Settings::default()
    };
    Homing::new(fleet(nodes), settings)
}

fn ask(id: u32, session: u64, blocks: &[u32]) -> Ask<'_> {
    Ask {
        id,
        session,
        region: 0,
        prompt_tokens: 512 * u32::try_from(blocks.len()).expect("few blocks") + 1,
        output_tokens: 0,
        blocks,
    }
}

/// What each node would be expected to read from cache, in trace blocks.
fn cached(homing: &mut Homing, blocks: &[u32]) -> Vec<u64> {
    let offered: Vec<usize> = (0..homing.nodes.len()).collect();
    let decided = homing
        .decide(0.0, &ask(u32::MAX, u64::MAX, blocks), &offered)
        .expect("nodes are offered");
    let candidates = decided.decision.candidates.iter();
    candidates.map(|found| found.cached_tokens / 512).collect()
}

#[test]
fn overlaps_equal_what_nodes_told() {
    // Paths of a tree: path p begins with the blocks of its first half, then its own.
    let paths: Vec<Vec<u32>> = (0..8)
        .map(|path: u32| {
            let shared = (0..10).map(|at| 1000 * (path / 4) + at);
            shared
                .chain((0..20).map(|at| 10_000 + 100 * path + at))
                .collect()
        })
        .collect();
    let mut homing = homing(3, Knowledge::Events);
    for path in &paths {
        cached(&mut homing, path);
    }
    // The slow twin: a set of blocks for each node.
    let mut held: Vec<HashSet<u32>> = vec![HashSet::new(); 3];
    let mut state = 5_u64;
    let mut random = |below: usize| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        usize::try_from(state >> 33).expect("31 bits") % below
    };
    for _ in 0..400 {
        let (node, path) = (random(3), &paths[random(8)]);
        let from = path
            .iter()
            .take_while(|block| held[node].contains(block))
            .count();
        if random(3) == 0 && from > 0 {
            // The end of what is held goes, as engines evict; others' ends with it.
            let first = path[random(from)];
            let ends = paths
                .iter()
                .flat_map(|path| path.iter().skip_while(|block| **block != first));
            let mut gone: Vec<u32> = ends
                .copied()
                .filter(|block| held[node].contains(block))
                .collect();
            // What paths share goes once: a block that is told to end twice had two copies.
            gone.sort_unstable();
            gone.dedup();
            homing.on_removed(node, Tier::Device, &gone);
            held[node].retain(|block| !gone.contains(block));
        } else if from < path.len() {
            let to = from + 1 + random(path.len() - from);
            homing.on_stored(node, Tier::Device, &path[from..to]);
            held[node].extend(&path[from..to]);
        }
        let path = &paths[random(8)];
        let slow: Vec<u64> = held
            .iter()
            .map(|held| path.iter().take_while(|block| held.contains(block)).count() as u64)
            .collect();
        assert_eq!(cached(&mut homing, path), slow);
    }
}

#[test]
fn a_burst_of_siblings_goes_together_and_all_is_given_back() {
    let mut homing = homing(4, Knowledge::Events);
    let shared: Vec<u32> = (0..100).collect();
    let sibling = |id: u32| -> Vec<u32> { shared.iter().copied().chain([1000 + id]).collect() };
    let chosen: Vec<usize> = (0..4)
        .map(|id| {
            let blocks = sibling(id);
            let ask = ask(id, u64::from(id), &blocks);
            let chosen = homing.choose(0.0, &ask, &[0, 1, 2, 3]);
            chosen.expect("four nodes").node
        })
        .collect();
    assert_eq!(chosen, [chosen[0]; 4], "nobody has told of any block yet");
    assert_eq!(cached(&mut homing, &sibling(9))[chosen[0]], 100);
    // Without any event nothing is believed once they have ended.
    for id in 0..4 {
        homing.on_first_token(1000.0, id, 0);
        homing.on_finished(2000.0, id, 50);
    }
    assert_eq!(cached(&mut homing, &sibling(9)), [0; 4]);
    assert_eq!(homing.nodes[chosen[0]].load.pool_blocks(), 0);
    assert_eq!(homing.expected.tickets(), 0);
}

#[test]
fn without_events_usage_is_learnt_from() {
    let mut homing = homing(2, Knowledge::Usage);
    let blocks: Vec<u32> = (0..50).collect();
    let turn = |homing: &mut Homing, id: u32, cached_tokens| {
        let ask = ask(id, 1, &blocks);
        let node = homing.choose(0.0, &ask, &[0, 1]).expect("two nodes").node;
        homing.on_first_token(1000.0, id, cached_tokens);
        homing.on_finished(2000.0, id, 50);
        node
    };
    let node = turn(&mut homing, 0, 0);
    assert_eq!(cached(&mut homing, &blocks)[node], 50);
    assert_eq!(turn(&mut homing, 1, 512 * 50), node);
    // The node says that it had lost the prefix, and now has it again.
    turn(&mut homing, 2, 0);
    assert_eq!(cached(&mut homing, &blocks)[node], 50);
}

const HELLO: &str = r#"{"type":"hello","nodes":3,"regions":1,"block_tokens":512,"capacity_blocks":100,"rtt_ms":[60.0],"prefill_tokens_per_s":20000}"#;
const NODES: &str = r#""nodes":[{"id":0,"region":0,"waiting":0,"kv_used":0.0,"capacity_blocks":100},{"id":2,"region":0,"waiting":0,"kv_used":0.0,"capacity_blocks":100}]"#;

fn request(id: u32, session: &str, blocks: &str) -> String {
    format!(
        r#"{{"type":"request","id":{id},"t_ms":5.0,"session":"{session}","region":0,"input_tokens":2100,"blocks":[{blocks}],{NODES}}}"#
    )
}

#[test]
fn the_protocol_is_answered_line_by_line() {
    let mut session = Session::new(Settings::default());
    let mut take = |line: &str| session.take(line);
    take(&request(0, "s0", "1,2,3,4")).expect_err("nobody has said hello");
    assert_eq!(take(HELLO).expect("a hello"), None);
    let answer = take(&request(0, "s0", "1,2,3,4"))
        .expect("a request")
        .expect("an answer");
    let node = answer
        .strip_prefix("{\"node\":")
        .and_then(|rest| rest.strip_suffix('}'))
        .and_then(|number| number.parse::<usize>().ok())
        .expect("a node");
    assert!(node == 0 || node == 2, "only what is offered: {answer}");
    let told = [
        format!(
            r#"{{"type":"first_token","id":0,"t_ms":9.0,"node":{node},"cached_tokens":0,"ttft_ms":4.0}}"#
        ),
        format!(r#"{{"type":"kv","t_ms":9.0,"node":{node},"stored":[1,2,3,4],"removed":[]}}"#),
        format!(r#"{{"type":"finish","id":0,"t_ms":10.0,"node":{node},"output_tokens":7}}"#),
        r#"{"type":"something_new","x":1}"#.to_owned(),
    ];
    for line in &told {
        assert_eq!(take(line).expect("a notice"), None);
    }
    // The session comes back, and so does another one with the same prompt.
    for (id, name) in [(1, "s0"), (2, "s1")] {
        let again = take(&request(id, name, "1,2,3,4")).expect("a request");
        assert_eq!(again.as_ref(), Some(&answer));
    }
    for line in ["", "{", "[]", r#"{"type":"request"}"#, r#"{"type":5}"#] {
        take(line).expect_err("not a message");
    }
    let nowhere = r#"{"type":"request","id":3,"t_ms":5.0,"session":"s","input_tokens":9,"blocks":[],"nodes":[]}"#;
    take(nowhere).expect_err("no node to choose");
}

#[test]
fn every_parameter_has_a_name_for_tuning() {
    let mut settings = Settings::default();
    assert!(settings.set("b", 7.0) && settings.set("live_fade_ms", 1.0));
    assert_eq!(
        (settings.params.b, settings.params.live_fade_ms),
        (7.0, 1.0)
    );
    assert!(!settings.set("c", 1.0));
}

#[test]
fn what_two_nodes_share_counts_at_both_until_it_is_done() {
    let place = |role| Place {
        region: 0,
        capacity_blocks: 3000,
        role,
    };
    let fleet = Fleet {
        nodes: vec![place(Role::Prefill), place(Role::Decode)],
        handover: Some(Handover {
            protocol: "simulated",
            bytes_per_token: 160_000.0,
            bytes_per_s: 1e10,
            overlaps_prefill: true,
        }),
        ..fleet(0)
    };
    let mut homing = Homing::new(
        fleet,
        Settings {
            knowledge: Knowledge::Events,
            ..Settings::default()
        },
    );
    let blocks: Vec<u32> = (0..50).collect();
    let in_flight = |homing: &Homing| {
        [0, 1].map(|at: usize| {
            let load = &homing.nodes[at].load;
            (load.prefill_tokens(0.0) > 0, load.requests())
        })
    };
    let chosen = homing.choose(0.0, &ask(0, 1, &blocks), &[0, 1]);
    let pair = super::Chosen {
        node: 1,
        prefill: Some(0),
    };
    assert_eq!(chosen, Some(pair));
    assert_eq!(in_flight(&homing), [(true, 1), (false, 1)]);
    homing.on_computed(500.0, 0);
    homing.on_computed(500.0, 0);
    assert_eq!(in_flight(&homing), [(false, 0), (false, 1)]);
    homing.on_first_token(600.0, 0, 0);
    homing.on_finished(900.0, 0, 20);
    assert_eq!(in_flight(&homing), [(false, 0), (false, 0)]);
    assert_eq!(
        homing.sessions.node(1),
        Some(1),
        "it is bound to the node that answers"
    );
    assert!(
        homing
            .expected
            .overlap(&homing.paths.chain(&blocks))
            .is_empty()
    );
    // What the node that answers has already is not worth two requests.
    homing.on_stored(1, Tier::Device, &blocks);
    let chosen = homing.choose(1000.0, &ask(1, 1, &blocks), &[0, 1]);
    assert_eq!(
        chosen.map(|chosen| (chosen.node, chosen.prefill)),
        Some((1, None))
    );
}
