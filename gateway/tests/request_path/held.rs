//! Catches a turn that is sent to a node which has too much ahead, one that stays held when the
//! node has time again or when its client has left, and a refusal that says nothing.

use std::time::Duration;

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
