//! Faults H04 and H05: catches a client that leaves without paying, and a node that works on for
//! nobody.

use std::time::{Duration, Instant};

use crate::support::client::Connection;
use crate::support::node::{Act, Node, chunk, delta, stream_head, usage_chunk};
use crate::support::{Gateway, Stream, chat, eventually};

#[test]
fn h04_a_stream_cancelled_by_the_client_is_billed() {
    let node = Node::start();
    let gateway = Gateway::exact(&[&node]);
    let body = chat(Stream::Yes, &"word ".repeat(970));
    let mut script = vec![Act::Send(stream_head())];
    for _ in 0..400 {
        script.push(Act::Send(chunk(
            format!("data: {}\n\n", delta("x")).as_bytes(),
        )));
        script.push(Act::Pause(Duration::from_millis(50)));
    }
    node.script(script);
    let mut client = gateway.begin_chat(&["x-homing-debug: 1"], &body);
    let (status, head) = client.head();
    assert_eq!(status, 200);
    for _ in 0..10 {
        assert!(client.chunk().is_some());
    }
    drop(client);
    let left = Instant::now();
    eventually("the node's connection is closed", || {
        !node.hang_ups().is_empty()
    });
    assert!(
        left.elapsed() < Duration::from_secs(1),
        "{:?}",
        left.elapsed()
    );
    let header = |name: &str| {
        let line = head
            .lines()
            .find(|line| line.to_ascii_lowercase().starts_with(name))
            .unwrap();
        line.split_once(": ").unwrap().1.trim().to_owned()
    };
    let row = gateway.row(&header("x-request-id"));
    assert_eq!(row["status"], "cancelled");
    let prompt: u64 = header("x-homing-prompt-tokens").parse().unwrap();
    assert!(prompt > 970, "{prompt}");
    assert_eq!(row["input_tokens"], prompt);
    let output = row["output_tokens"].as_u64().unwrap();
    assert!((10..=30).contains(&output), "{output}");
    assert!(row["cost_nano_usd"].as_i64().unwrap() > 0);
    gateway.assert_idle();
}

#[test]
fn h04_closing_after_the_terminator_is_no_cancellation() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let mut script = vec![Act::Send(stream_head())];
    for event in [delta("x"), usage_chunk(5, 0, 1), "[DONE]".to_owned()] {
        script.push(Act::Send(chunk(format!("data: {event}\n\n").as_bytes())));
    }
    // The framing's end never comes; the answer is complete all the same.
    script.push(Act::AwaitClose(Duration::from_secs(10)));
    node.script(script);
    let mut client = gateway.begin_chat(&[], &chat(Stream::Yes, "hi"));
    let (_, head) = client.head();
    while let Some(chunk) = client.chunk() {
        if String::from_utf8_lossy(&chunk).contains("[DONE]") {
            break;
        }
    }
    drop(client);
    let id = head
        .lines()
        .find_map(|line| {
            line.strip_prefix("x-request-id: ")
                .or(line.strip_prefix("X-Request-Id: "))
        })
        .unwrap();
    assert_eq!(gateway.row(id.trim())["status"], "complete");
    gateway.assert_idle();
}

#[test]
fn h05_a_waiting_client_that_leaves_frees_the_node() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    for stream in [Stream::No, Stream::Yes] {
        let before = node.hang_ups().len();
        node.script(vec![Act::AwaitClose(Duration::from_secs(30))]);
        let client = gateway.begin_chat(&["x-request-id: h05"], &chat(stream, "hi"));
        let requests = node.received().len();
        eventually("the node has the request", || {
            node.received().len() > before.min(requests)
        });
        eventually("it is in flight", || {
            gateway.metric("homing_requests_in_flight") == 1.0
        });
        drop(client);
        let left = Instant::now();
        eventually("the node's connection is closed", || {
            node.hang_ups().len() > before
        });
        assert!(
            left.elapsed() < Duration::from_secs(1),
            "{:?}",
            left.elapsed()
        );
        gateway.assert_idle();
        let started = Instant::now();
        assert_eq!(gateway.chat(&chat(Stream::No, "next")).status, 200);
        assert!(started.elapsed() < Duration::from_secs(1));
    }
    let rows = gateway.rows();
    let cancelled = rows
        .iter()
        .filter(|row| row["status"] == "cancelled")
        .count();
    assert_eq!(cancelled, 2, "{rows:?}");
}

#[test]
fn a_client_that_leaves_the_queue_gives_its_place_back() {
    let node = Node::start();
    let gateway = Gateway::limited(
        &[&node],
        "concurrency_per_tenant = 1\nqueue_per_tenant = 1\n",
    );
    node.script(vec![Act::AwaitClose(Duration::from_secs(30))]);
    let running = gateway.begin_chat(&[], &chat(Stream::No, "one"));
    eventually("the first runs", || node.received().len() == 1);
    let waiting = gateway.begin_chat(&[], &chat(Stream::No, "two"));
    eventually("the second waits", || {
        gateway.metric("homing_requests_waiting") == 1.0
    });
    let refused = gateway.chat(&chat(Stream::No, "three"));
    assert_eq!(refused.status, 429);
    assert_eq!(refused.json()["error"]["code"], "rate_limit_exceeded");
    assert!(
        refused
            .header("retry-after")
            .unwrap()
            .parse::<u64>()
            .unwrap()
            >= 1
    );
    drop(waiting);
    eventually("the second left", || {
        gateway.metric("homing_requests_waiting") == 0.0
    });
    drop(running);
    gateway.assert_idle();
    assert_eq!(gateway.chat(&chat(Stream::No, "four")).status, 200);
}

/// A blank line after the body, as some clients send it, or the next request hides the end of the
/// connection behind it: the node would work for nobody.
#[test]
fn h05_bytes_after_the_request_do_not_hide_that_the_client_left() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    for (at, more) in ["\r\n", "POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\n"]
        .iter()
        .enumerate()
    {
        let body = chat(Stream::No, "hi").to_string();
        node.script(vec![Act::AwaitClose(Duration::from_secs(30))]);
        let mut client = Connection::open(gateway.addr);
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {}\r\n\
             content-length: {}\r\n\r\n",
            gateway.key,
            body.len()
        );
        client.send(head.as_bytes()).send(body.as_bytes());
        eventually("it is at the node", || node.received().len() == at + 1);
        client.send(more.as_bytes());
        drop(client);
        eventually("the node's connection is closed", || {
            node.hang_ups().len() == at + 1
        });
        eventually("it is on record", || gateway.rows().len() == at + 1);
        assert_eq!(gateway.rows()[at]["status"], "cancelled");
        gateway.assert_idle();
    }
}
