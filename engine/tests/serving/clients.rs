//! Clients that are slow, half gone or gone. Catches an answer that is lost, blocks that stay held,
//! and a refusal that the client cannot read.

use std::io::{Read, Write};
use std::net::Shutdown;

use serde_json::json;

use crate::common::{Node, Reply, chat_body, shared, until, user};

const CHAT: &str = "/v1/chat/completions";
const HELD: &str = "homing:kv_blocks_held";
const RUNNING: &str = "vllm:num_requests_running";
const WAITING: &str = "vllm:num_requests_waiting";
const ABORTED: &str = "vllm:request_success_total{finished_reason=\"abort\"";

/// A request that runs for long unless it is cancelled.
fn long(stream: bool) -> serde_json::Value {
    chat_body(json!({
        "messages": user("Tell a very long story."), "ignore_eos": true, "stream": stream,
        "max_tokens": 2000,
    }))
}

#[test]
fn a_client_that_goes_away_frees_its_blocks() {
    // A pool of 2,500 tokens: while anything runs, a prompt of 2,000 waits.
    let node = Node::start(&["--kv-memory", "56MiB", "--step-tokens", "16"]);
    let mut aborted = 0.0;
    let mut check_gone = |what: &str| {
        aborted += 1.0;
        node.wait_for_metric(HELD, |held| held == 0.0);
        until(what, || node.metric(ABORTED) == aborted);
        assert_eq!(
            (node.metric(RUNNING), node.metric(WAITING)),
            (0.0, 0.0),
            "{what}"
        );
    };

    let mut events = node.stream(CHAT, &long(true));
    (0..5).for_each(|_| drop(events.next()));
    node.wait_for_metric(HELD, |held| held > 0.0);
    drop(events);
    check_gone("streaming");

    let post = |body: &serde_json::Value| {
        let mut stream = node.connect();
        let body = body.to_string();
        let head = node.head("POST", CHAT, "", body.len());
        stream
            .write_all((head + &body).as_bytes())
            .expect("the node reads");
        stream
    };
    let stream = post(&long(false));
    node.wait_for_metric(HELD, |held| held > 0.0);
    drop(stream);
    check_gone("not streaming");

    // Its prompt takes over a hundred steps.
    let prompt = "Rivers run to the sea. ".repeat(330);
    let wide = chat_body(json!({"messages": user(&prompt), "max_tokens": 200}));
    let stream = post(&wide);
    node.wait_for_metric(HELD, |held| held > 0.0);
    drop(stream);
    check_gone("in prefill");

    let first = post(&long(false));
    node.wait_for_metric(RUNNING, |running| running == 1.0);
    let second = post(&wide);
    node.wait_for_metric(WAITING, |waiting| waiting == 1.0);
    drop(second);
    node.wait_for_metric(WAITING, |waiting| waiting == 0.0);
    assert_eq!(node.metric(RUNNING), 1.0, "the first one goes on");
    drop(first);
    node.wait_for_metric(HELD, |held| held == 0.0);
}

#[test]
fn a_half_closed_client_gets_its_answer() {
    let node = shared();
    for stream in [false, true] {
        let body = chat_body(json!({"max_tokens": 30, "stream": stream})).to_string();
        let mut socket = node.connect();
        let head = node.head("POST", CHAT, "", body.len());
        socket
            .write_all((head + &body).as_bytes())
            .expect("the node reads");
        socket.shutdown(Shutdown::Write).expect("half-closed");
        let reply = Reply::read(socket);
        assert_eq!(reply.status, 200, "{}", reply.text());
        if stream {
            assert!(
                reply.text().ends_with("data: [DONE]\n\n"),
                "{}",
                reply.text()
            );
        } else {
            assert_eq!(reply.json()["usage"]["completion_tokens"], 30);
        }
    }
}

#[test]
fn a_slow_client_is_told_so() {
    let node = Node::start(&["--read-timeout-s", "0.3"]);
    let partial_head = "POST /v1/chat/completions HTTP/1.1\r\nhost: no";
    let partial_body = node.head("POST", CHAT, "", 100) + "{\"model\"";
    for sent in [partial_head, &partial_body] {
        let mut socket = node.connect();
        socket.write_all(sent.as_bytes()).expect("the node reads");
        let reply = Reply::read(socket);
        assert_eq!(
            reply.error(),
            (408, "request_timeout".into(), None),
            "{sent}"
        );
    }
    // A connection that sends nothing at all is closed without a word.
    let mut idle = node.connect();
    let mut nothing = Vec::new();
    assert_eq!(idle.read_to_end(&mut nothing).expect("closed in order"), 0);
    node.wait_for_metric("homing:connections", |open| open == 1.0);
}

#[test]
fn a_huge_header_is_refused_in_words() {
    let node = shared();
    let header = format!("x-filler: {}\r\n", "a".repeat(100 << 10));
    for (method, path) in [("GET", "/health"), ("POST", CHAT)] {
        let reply = node.send(method, path, &header, b"{}");
        assert_eq!(reply.error(), (431, "header_too_large".into(), None));
    }
    // Past what is read at all, the status alone must do.
    let endless = format!("x-filler: {}\r\n", "a".repeat(1 << 20));
    assert_eq!(node.send("GET", "/health", &endless, b"").status, 431);
}

#[test]
fn a_large_body_is_refused_before_it_is_sent() {
    let node = shared();
    let mut socket = node.connect();
    let head = node.head("POST", CHAT, "expect: 100-continue\r\n", 2 << 20);
    socket.write_all(head.as_bytes()).expect("the node reads");
    let mut start = [0; 12];
    socket.read_exact(&mut start).expect("an answer");
    assert_eq!(&start, b"HTTP/1.1 413");

    let body = chat_body(json!({"max_tokens": 2})).to_string();
    let mut socket = node.connect();
    let head = node.head("POST", CHAT, "expect: 100-continue\r\n", body.len());
    socket.write_all(head.as_bytes()).expect("the node reads");
    let mut interim = [0; 25];
    socket.read_exact(&mut interim).expect("an interim answer");
    assert_eq!(&interim, b"HTTP/1.1 100 Continue\r\n\r\n");
    socket
        .write_all(body.as_bytes())
        .expect("the node reads on");
    assert_eq!(Reply::read(socket).status, 200);
}

#[test]
fn an_encoded_body_is_refused_whatever_it_holds() {
    let node = shared();
    let body = chat_body(json!({"max_tokens": 2})).to_string();
    for (encoding, status) in [("gzip", 415), ("br", 415), ("identity", 200)] {
        let header = format!("content-encoding: {encoding}\r\n");
        let reply = node.send("POST", CHAT, &header, body.as_bytes());
        assert_eq!(reply.status, status, "{encoding}");
    }
}

#[test]
fn a_body_that_ends_early_is_refused() {
    let node = shared();
    let mut socket = node.connect();
    let head = node.head("POST", CHAT, "", 100);
    socket
        .write_all((head + "{\"model\":").as_bytes())
        .expect("the node reads");
    socket.shutdown(Shutdown::Write).expect("half-closed");
    let mut answer = Vec::new();
    // hyper may close without an answer here; what counts is that it ends at once.
    let _ = socket.read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer);
    assert!(
        answer.is_empty() || answer.starts_with("HTTP/1.1 400"),
        "{answer}"
    );
}

#[test]
fn connections_are_kept_alive() {
    let node = shared();
    let mut socket = node.connect();
    for _ in 0..3 {
        let head = node
            .head("GET", "/v1/models", "", 0)
            .replace("connection: close\r\n", "");
        socket.write_all(head.as_bytes()).expect("the node reads");
        let reply = Reply::read(socket.try_clone().expect("the socket can be shared"));
        assert_eq!(reply.status, 200);
    }
}

#[test]
fn a_full_queue_says_when_to_come_back() {
    // A pool of 2,500 tokens: while anything runs, a prompt of 2,000 waits.
    let node = Node::start(&[
        "--kv-memory",
        "56MiB",
        "--step-tokens",
        "16",
        "--queue",
        "2",
    ]);
    let mut running = node.stream(CHAT, &long(true));
    drop(running.next());
    let wide = |salt: &str| {
        let prompt = "Rivers run to the sea. ".repeat(330);
        chat_body(json!({"messages": user(&prompt), "max_tokens": 200, "cache_salt": salt}))
    };
    let post = |body: &serde_json::Value| {
        let mut stream = node.connect();
        let body = body.to_string();
        let head = node.head("POST", CHAT, "", body.len());
        stream
            .write_all((head + &body).as_bytes())
            .expect("the node reads");
        stream
    };
    let running = post(&wide("r"));
    node.wait_for_metric(RUNNING, |running| running == 1.0);
    let first = post(&wide("a"));
    node.wait_for_metric(WAITING, |waiting| waiting == 1.0);
    // The node has two places, and one tenant only a share of them.
    let share_full = node.post(CHAT, &wide("a"));
    assert_eq!(share_full.error(), (429, "queue_share_full".into(), None));
    let second = post(&wide("b"));
    node.wait_for_metric(WAITING, |waiting| waiting == 2.0);
    let full = node.post(CHAT, &wide("c"));
    assert_eq!(full.error(), (503, "queue_full".into(), None));
    for reply in [share_full, full] {
        let seconds: u32 = reply.headers["retry-after"].parse().expect("seconds");
        assert!((1..=60).contains(&seconds), "{seconds}");
    }
    drop((running, first, second));
    node.wait_for_metric(HELD, |held| held == 0.0);
}
