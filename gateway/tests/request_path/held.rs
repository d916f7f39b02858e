//! Catches a turn that is sent to a node which has too much ahead, one that stays held when the
//! node has time again or when its client has left, one that leaves its context past the working-set
//! cliff, and a refusal that says nothing.

use std::time::Duration;

use serde_json::Value;

use crate::support::client::Connection;
use crate::support::node::{Act, Node};
use crate::support::{Gateway, Stream, chat, eventually};

/// A gateway whose only node is full as soon as it has any prompt to compute.
fn gateway(node: &Node, hold_wait_s: f64) -> Gateway {
    let models = "[[models]]\nid = \"scripted\"\n";
    let policy = format!("[policy]\nnode_queue_s = 0.001\nhold_wait_s = {hold_wait_s}\n");
    Gateway::with_models(&[node], &format!("{models}{policy}"))
}

/// A turn that the node computes for as long as its client stays.
fn long_turn(gateway: &Gateway, node: &Node) -> Connection {
    node.script(vec![Act::AwaitClose(Duration::from_secs(60))]);
    let before = node.received().len();
    let text = "a prompt that takes its time. ".repeat(100);
    let connection = gateway.begin_chat(&["x-session-affinity: long"], &chat(Stream::No, &text));
    eventually("the long turn is at the node", || {
        node.received().len() > before
    });
    connection
}

fn held(gateway: &Gateway) -> f64 {
    gateway.metric("homing_turns_held")
}

#[test]
fn a_turn_waits_until_the_node_has_time() {
    let node = Node::start();
    let gateway = gateway(&node, 600.0);
    let long = long_turn(&gateway, &node);
    let at_node = node.received().len();
    let body = chat(Stream::No, "hi");
    let mut waits = gateway.begin_chat(&["x-session-affinity: one"], &body);
    let leaves = gateway.begin_chat(&["x-session-affinity: two"], &body);
    eventually("both are held", || held(&gateway) == 2.0);
    assert_eq!(node.received().len(), at_node, "the node was asked");
    // Who leaves gives its place up.
    drop(leaves);
    eventually("one is held", || held(&gateway) == 1.0);
    // The node has time again.
    drop(long);
    let answer = waits.answer();
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(node.received().len(), at_node + 1);
    assert_eq!(held(&gateway), 0.0);
    assert_eq!(gateway.metric("homing_hold_refusals_total"), 0.0);
    gateway.assert_idle();
}

#[test]
fn who_waits_too_long_is_told_when_to_come_again() {
    let node = Node::start();
    let gateway = gateway(&node, 0.2);
    let long = long_turn(&gateway, &node);
    let answer = gateway.chat(&chat(Stream::No, "hi"));
    assert_eq!(answer.status, 503, "{answer:?}");
    let seconds: u64 = answer.header("retry-after").unwrap().parse().unwrap();
    assert!((1..=60).contains(&seconds));
    let message = answer.json()["error"]["message"].to_string();
    assert!(message.contains("Try again in"), "{message}");
    assert_eq!(gateway.metric("homing_hold_refusals_total"), 1.0);
    // Nothing was computed and nothing is billed.
    assert!(gateway.rows().iter().all(|row| row["output_tokens"] == 0));
    drop(long);
    gateway.assert_idle();
    assert_eq!(gateway.chat(&chat(Stream::No, "hi")).status, 200);
}

/// Where a turn goes whose node has 12 s of prefill ahead while the other one is idle. Three sessions
/// have contexts of 6,000 tokens, which pools of 8,192 tokens cannot all keep.
fn goes_to_its_own_node(pool_blocks: usize) -> bool {
    let nodes = [Node::with_pool(pool_blocks), Node::with_pool(pool_blocks)];
    let gateway = Gateway::start(&[&nodes[0], &nodes[1]]);
    eventually("both have told of their pools", || {
        let all: Value = gateway.admin_get("/admin/nodes").json();
        let told = format!("\"pool_blocks\":{pool_blocks}");
        all.to_string().matches(&told).count() == 2
    });
    let counts = || [0, 1].map(|at: usize| nodes[at].received().len());
    let at_node = |before: [usize; 2]| {
        counts()
            .iter()
            .zip(before)
            .position(|(now, old)| *now > old)
    };
    let context = chat(Stream::No, &"context ".repeat(3000)).to_string();
    let turn = |session: &str| {
        let before = counts();
        let header = format!("x-session-affinity: {session}");
        let answer = gateway.post("/v1/chat/completions", &[&header], context.as_bytes());
        assert_eq!(answer.status, 200, "{answer:?}");
        at_node(before).unwrap()
    };
    let sessions = ["one", "two", "three"];
    // Two turns each: whoever comes once may never come again, and does not count.
    for session in sessions {
        turn(session);
    }
    let homes = sessions.map(turn);
    // Somebody else's prompt, which its node computes for as long as its client stays.
    for node in &nodes {
        node.script(vec![Act::AwaitClose(Duration::from_secs(60))]);
    }
    let before = counts();
    let long = gateway.begin_chat(
        &["x-session-affinity: long"],
        &chat(Stream::No, &"a long prompt ".repeat(3500)),
    );
    eventually("the long turn is at a node", || counts() != before);
    let busy = at_node(before).unwrap();
    nodes.iter().for_each(Node::unscript);
    // The last of those that live there: the pool keeps the newest.
    let last = homes.iter().rposition(|home| *home == busy).unwrap();
    let is_at_home = turn(sessions[last]) == busy;
    drop(long);
    gateway.assert_idle();
    is_at_home
}

#[test]
fn past_the_cliff_a_session_stays_where_its_context_is() {
    assert!(goes_to_its_own_node(512));
    // Where all contexts fit, the idle node may as well compute it again.
    assert!(!goes_to_its_own_node(1 << 20));
}

#[test]
fn a_client_waits_here_no_longer_than_it_says() {
    let node = Node::start();
    let gateway = gateway(&node, 600.0);
    let long = long_turn(&gateway, &node);
    let at_node = node.received().len();
    let body = chat(Stream::No, "hi").to_string();
    let limited = ["x-request-timeout-ms: 300"];
    let answer = gateway.post("/v1/chat/completions", &limited, body.as_bytes());
    assert_eq!(answer.status, 408, "{answer:?}");
    let message = answer.json()["error"]["message"].to_string();
    assert!(message.contains("within the 300 ms"), "{message}");
    assert_eq!(held(&gateway), 0.0);
    assert_eq!(node.received().len(), at_node);
    // What it waited here is not given to the node again.
    let limited = ["x-request-timeout-ms: 60000"];
    let mut waits = gateway.begin_chat(&limited, &chat(Stream::No, "hi"));
    eventually("it is held", || held(&gateway) == 1.0);
    drop(long);
    assert_eq!(waits.answer().status, 200);
    let left: u64 = node.received()[at_node]
        .header("x-request-timeout-ms")
        .and_then(|ms| ms.parse().ok())
        .unwrap();
    assert!((1..60_000).contains(&left), "{left} ms");
    gateway.assert_idle();
}

/// Would catch a node that is gone and looks idle: turns would leave the gate for it, and meet the one
/// that is full.
#[test]
fn a_node_that_is_gone_has_room_for_nobody() {
    let nodes = [Node::start(), Node::start()];
    let gateway = Gateway::with_models(
        &[&nodes[0], &nodes[1]],
        "[[models]]\nid = \"scripted\"\n[policy]\nnode_queue_s = 0.001\nhold_wait_s = 3\n",
    );
    nodes[1].kill();
    eventually("it is known to be gone", || {
        let all: Value = gateway.admin_get("/admin/nodes").json();
        all.to_string().contains("down")
    });
    let long = long_turn(&gateway, &nodes[0]);
    let at_node = nodes[0].received().len();
    nodes[0].unscript();
    let answer = gateway.chat(&chat(Stream::No, "hi"));
    assert_eq!(answer.status, 503, "{answer:?}");
    assert_eq!(nodes[0].received().len(), at_node, "it was full");
    drop(long);
    gateway.assert_idle();
}
