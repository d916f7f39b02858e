//! Nodes and clients that go away, and a node that says nothing more. Catches a request that hangs, an answer
//! that is lost where it could be computed, and blocks that stay pinned.

use std::io::Write;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{CHAT, FAILED, HELD, Pair, Way, asked, fresh_id, prompt};
use crate::common::{Node, Reply, TOKEN};

/// The node that computes is killed before it is asked, while it computes, and with its blocks pinned.
#[test]
fn a_prefill_node_that_dies_costs_time_and_no_answer() {
    let body = asked(prompt("dies", 1500), json!({}));
    let expected = Node::start_with(&[], Some(TOKEN)).post(CHAT, &body).json();
    for way in [Way::Tcp, Way::Shared] {
        let pair = Pair::start(&["--step-tokens", "64"], &[]);
        let Pair {
            prefill, decode, ..
        } = &pair;
        let only = json!({"remote_endpoints": [pair.endpoint(way)], "timeout_ms": 20_000});
        let id = fresh_id();
        let second = pair.second_leg(&id, &body, &only);
        let first = pair.first_leg(&id, &body);
        thread::scope(|scope| {
            let answer = scope.spawn(|| decode.post(CHAT, &second));
            scope.spawn(|| {
                let mut stream = prefill.connect();
                let text = first.to_string();
                let head = prefill.head("POST", CHAT, "", text.len());
                // Its answer never comes.
                let _ = stream.write_all((head + &text).as_bytes());
                // A step's four blocks have 1.5 MB.
                decode.wait_for_metric("homing:kv_transfer_received_bytes_total", |b| b > 3e6);
                prefill.signal("-KILL");
            });
            let answer = answer.join().expect("it answers");
            assert_eq!(answer.status, 200, "{}", answer.text());
            assert_eq!(answer.json()["choices"], expected["choices"], "{way:?}");
        });
        assert_eq!(decode.metric(FAILED), 1.0);
        let computed = decode.metric("homing:computed_tokens_total");
        assert!(computed < 1_500.0, "what had come was used: {computed}");
        // And once it is dead: refused at once, not waited for.
        let other = asked(prompt("dead", 60), json!({}));
        let since = Instant::now();
        let answer = decode.post(CHAT, &pair.second_leg(&fresh_id(), &other, &only));
        assert_eq!(answer.status, 200);
        assert!(
            since.elapsed() < Duration::from_secs(15),
            "{:?}",
            since.elapsed()
        );
        decode.wait_for_metric(HELD, |held| held == 0.0);
    }
}

/// A node that is stopped, not dead: its connections stay open and say nothing.
#[test]
fn a_transfer_that_stalls_is_given_up_at_its_deadline() {
    let pair = Pair::start(&["--step-tokens", "64"], &[]);
    let Pair {
        prefill, decode, ..
    } = &pair;
    let body = asked(prompt("stalls", 1500), json!({}));
    let id = fresh_id();
    // Longer than a step takes on a busy machine.
    let second = pair.second_leg(&id, &body, &json!({"timeout_ms": 5_000}));
    let first = pair.first_leg(&id, &body);
    thread::scope(|scope| {
        let prefilled = scope.spawn(|| prefill.post(CHAT, &first));
        let answer = scope.spawn(|| decode.post(CHAT, &second));
        decode.wait_for_metric("homing:kv_transfer_received_bytes_total", |b| b > 1e6);
        prefill.signal("-STOP");
        let answer = answer.join().expect("it answers");
        assert_eq!(answer.status, 200, "{}", answer.text());
        prefill.signal("-CONT");
        assert_eq!(prefilled.join().expect("it answers").status, 200);
    });
    assert_eq!(decode.metric(FAILED), 1.0);
    decode.wait_for_metric(HELD, |held| held == 0.0);
    // Nobody fetches it any more: its deadline of 30 s lets go.
    prefill.wait_for_metric(HELD, |held| held == 0.0);
}

/// The decode node is killed while blocks come, and another time after its first token.
#[test]
fn a_decode_node_that_dies_leaves_nothing_pinned() {
    let decode_dies = |after_first_token: bool| {
        let pair = Pair::start(&["--step-tokens", "64"], &[]);
        let Pair {
            prefill, decode, ..
        } = &pair;
        let fields = json!({"stream": true, "max_tokens": 4000});
        let body = asked(prompt("receiver", 1500), fields);
        let id = fresh_id();
        let mut first = pair.first_leg(&id, &body);
        first["kv_transfer_params"]["timeout_ms"] = json!(1_000);
        let second = pair.second_leg(&id, &body, &json!({}));
        thread::scope(|scope| {
            let prefilled = scope.spawn(|| prefill.post(CHAT, &first));
            if after_first_token {
                let mut events = decode.stream(CHAT, &second);
                drop(events.next().expect("a first token"));
                decode.signal("-KILL");
            } else {
                let mut stream = decode.connect();
                let text = second.to_string();
                let head = decode.head("POST", CHAT, "", text.len());
                let _ = stream.write_all((head + &text).as_bytes());
                prefill.wait_for_metric(&Way::Shared.sent(), |bytes| bytes > 1e6);
                decode.signal("-KILL");
            }
            let prefilled = prefilled.join().expect("it answers");
            assert_eq!(prefilled.status, 200, "{}", prefilled.text());
        });
        prefill.wait_for_metric(HELD, |held| held == 0.0);
        prefill.wait_for_metric("homing:kv_handovers", |open| open == 0.0);
    };
    decode_dies(false);
    decode_dies(true);
}

/// A client that leaves either leg, at each stage.
#[test]
fn clients_that_leave_give_everything_back() {
    let pair = Pair::start(&["--step-tokens", "64"], &[]);
    let Pair {
        prefill, decode, ..
    } = &pair;
    let send = |node: &Node, body: &Value| {
        let mut stream = node.connect();
        let text = body.to_string();
        let head = node.head("POST", CHAT, "", text.len());
        stream
            .write_all((head + &text).as_bytes())
            .expect("it reads");
        stream
    };
    let waiting = "vllm:num_requests_waiting";
    // Before the other leg has come.
    let body = asked(prompt("leaves", 200), json!({}));
    let lone = send(decode, &pair.second_leg(&fresh_id(), &body, &json!({})));
    decode.wait_for_metric(waiting, |count| count == 1.0);
    drop(lone);
    decode.wait_for_metric(waiting, |count| count == 0.0);
    // While blocks come: the prefill goes on to its end, and its ticket to its deadline.
    let body = asked(prompt("leaves later", 1500), json!({}));
    let id = fresh_id();
    let mut first = pair.first_leg(&id, &body);
    first["kv_transfer_params"]["timeout_ms"] = json!(500);
    let leaving = send(decode, &pair.second_leg(&id, &body, &json!({})));
    let computing = send(prefill, &first);
    decode.wait_for_metric("homing:kv_transfer_received_bytes_total", |b| b > 1e6);
    drop(leaving);
    decode.wait_for_metric(HELD, |held| held == 0.0);
    assert_eq!(Reply::read(computing).status, 200);
    // The leg that computes: the other one computes what has not come.
    let body = asked(prompt("leaves the first", 1500), json!({}));
    let id = fresh_id();
    let received = decode.metric("homing:kv_transfer_received_bytes_total");
    let second = pair.second_leg(&id, &body, &json!({}));
    let computing = send(prefill, &pair.first_leg(&id, &body));
    let decoding = send(decode, &second);
    decode.wait_for_metric("homing:kv_transfer_received_bytes_total", |b| {
        b > received + 1e6
    });
    drop(computing);
    let answer = Reply::read(decoding);
    assert_eq!(answer.status, 200, "{}", answer.text());
    pair.at_rest();
}
