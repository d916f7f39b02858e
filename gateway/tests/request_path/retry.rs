//! Catches a node failure that the client sees although another node was there, one that is hidden
//! although the answer had begun, and a bill for either.

use std::time::Duration;

use crate::support::node::{Act, Node, chunk, delta, json, stream_head, stream_of, whole_of};
use crate::support::{Gateway, Stream, chat, eventually};

#[test]
fn a_failure_before_the_first_byte_goes_to_the_other_node() {
    let torn = json(200, &[], "{\"a\":1}");
    for (name, failing) in [
        ("closed at once", vec![Act::Close]),
        (
            "closed within the head",
            vec![Act::Send(b"HTTP/1.1 200 OK\r\ncont".to_vec()), Act::Close],
        ),
        (
            "closed within the body",
            vec![Act::Send(torn[..torn.len() - 2].to_vec()), Act::Close],
        ),
        (
            "not HTTP",
            vec![Act::Send(b"SSH-2.0-x\r\n\r\n".to_vec()), Act::Close],
        ),
        (
            "500",
            vec![Act::Send(json(
                500,
                &[],
                "{\"error\":{\"message\":\"boom\"}}",
            ))],
        ),
        (
            "503 while draining",
            vec![Act::Send(json(503, &["retry-after: 1"], "{}"))],
        ),
        (
            "429 overloaded",
            vec![Act::Send(json(429, &["retry-after: 1"], "{}"))],
        ),
    ] {
        let (one, two) = (Node::start(), Node::start());
        let gateway = Gateway::start(&[&one, &two]);
        let body = chat(Stream::No, "hi").to_string();
        let ask = || {
            gateway.post(
                "/v1/chat/completions",
                &["x-session-affinity: s"],
                body.as_bytes(),
            )
        };
        let first = ask();
        let bound = if first.header("x-homing-node") == Some("node-0") {
            &one
        } else {
            &two
        };
        // Twice: a pooled connection that breaks is taken for a stale one, and the node asked again.
        bound.script(failing.clone());
        bound.script(failing);
        let second = ask();
        assert_eq!(second.status, 200, "{name}: {second:?}");
        assert_eq!(second.header("x-homing-route"), Some("retry"), "{name}");
        assert_eq!(
            gateway.row(second.header("x-request-id").unwrap())["status"],
            "complete",
            "{name}"
        );
        gateway.assert_idle();
    }
}

#[test]
fn a_retry_is_one_request_with_one_record() {
    let (one, two) = (Node::start(), Node::start());
    let gateway = Gateway::start(&[&one, &two]);
    // Bind a session to a node, then let that node fail.
    let session = ["x-session-affinity: s1", "x-request-id: first"];
    let body = chat(Stream::Yes, "hi").to_string();
    let first = gateway.post("/v1/chat/completions", &session, body.as_bytes());
    let (bound, other) = if first.header("x-homing-node") == Some("node-0") {
        (&one, &two)
    } else {
        (&two, &one)
    };
    // Twice: a pooled connection that breaks is taken for a stale one, and the node asked again.
    bound.script(vec![Act::Close]);
    bound.script(vec![Act::Close]);
    other.script(stream_of(&["saved"]));
    let session = ["x-session-affinity: s1", "x-request-id: second"];
    let second = gateway.post("/v1/chat/completions", &session, body.as_bytes());
    assert_eq!((second.status, second.content().as_str()), (200, "saved"));
    assert_eq!(second.header("x-homing-route"), Some("retry"));
    assert_ne!(
        second.header("x-homing-node"),
        first.header("x-homing-node")
    );
    let row = gateway.row("second");
    assert_eq!(row["status"], "complete");
    assert_eq!(row["node"], second.header("x-homing-node").unwrap());
    assert_eq!(gateway.metric("homing_retries_total"), 1.0);
    for node in [bound, other] {
        assert_eq!(
            node.received().last().unwrap().header("x-request-id"),
            Some("second")
        );
    }
    gateway.assert_idle();
}

#[test]
fn a_node_that_is_gone_is_not_a_client_error() {
    let (one, two) = (Node::start(), Node::start());
    let gateway = Gateway::start(&[&one, &two]);
    one.kill();
    for at in 0..5 {
        assert_eq!(
            gateway.chat(&chat(Stream::No, &format!("hi {at}"))).status,
            200
        );
    }
    two.kill();
    eventually("no node is left", || {
        let answer = gateway.chat(&chat(Stream::No, "hi"));
        assert!(matches!(answer.status, 502 | 503), "{answer:?}");
        assert_eq!(answer.json()["error"]["type"], "server_error");
        answer.status == 503
    });
    let last = gateway.chat(&chat(Stream::No, "hi"));
    assert_eq!(last.json()["error"]["code"], "no_node_available");
    assert!(last.header("retry-after").is_some());
    gateway.assert_idle();
}

#[test]
fn a_stream_cut_by_its_node_ends_with_an_error_event() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let mut script = vec![Act::Send(stream_head())];
    for _ in 0..5 {
        script.push(Act::Send(chunk(
            format!("data: {}\n\n", delta("x")).as_bytes(),
        )));
    }
    // A torn event: its half must not reach the client.
    script.push(Act::Send(
        b"40\r\ndata: {\"choices\":[{\"delta\":{\"content\":\"TORN".to_vec(),
    ));
    script.push(Act::Close);
    node.script(script);
    let answer = gateway.chat(&chat(Stream::WithUsage, "hi"));
    assert_eq!((answer.status, answer.content().as_str()), (200, "xxxxx"));
    assert!(!answer.text().contains("TORN") && !answer.text().contains("[DONE]"));
    let last = answer.chunks().pop().unwrap();
    assert_eq!(last["error"]["code"], "node_failed");
    let row = gateway.row(answer.header("x-request-id").unwrap());
    assert_eq!(
        (&row["status"], &row["output_tokens"]),
        (&"cut".into(), &5.into())
    );
    gateway.assert_idle();
}

#[test]
fn a_stream_that_dies_before_its_first_event_is_retried() {
    let (one, two) = (Node::start(), Node::start());
    let gateway = Gateway::start(&[&one, &two]);
    let body = chat(Stream::Yes, "hi").to_string();
    let first = gateway.post(
        "/v1/chat/completions",
        &["x-session-affinity: s"],
        body.as_bytes(),
    );
    let bound = if first.header("x-homing-node") == Some("node-0") {
        &one
    } else {
        &two
    };
    bound.script(vec![
        Act::Send(stream_head()),
        Act::Pause(Duration::from_millis(20)),
        Act::Close,
    ]);
    let second = gateway.post(
        "/v1/chat/completions",
        &["x-session-affinity: s"],
        body.as_bytes(),
    );
    assert_eq!((second.status, second.content().as_str()), (200, "ok"));
    assert_eq!(second.header("x-homing-route"), Some("retry"));
    // An error as the first event is no beginning of an answer either.
    let bound = if second.header("x-homing-node") == Some("node-0") {
        &one
    } else {
        &two
    };
    let event = b"data: {\"error\":{\"message\":\"out of memory\"}}\n\n";
    bound.script(vec![
        Act::Send(stream_head()),
        Act::Send(chunk(event)),
        Act::Close,
    ]);
    let third = gateway.post(
        "/v1/chat/completions",
        &["x-session-affinity: s"],
        body.as_bytes(),
    );
    assert_eq!((third.status, third.content().as_str()), (200, "ok"));
    assert_eq!(third.header("x-homing-route"), Some("retry"));
    gateway.assert_idle();
}

/// Would catch a client that is told to send again what ended by its own deadline, and a node that
/// loses trust for it.
#[test]
fn an_error_that_a_node_tells_in_its_stream_is_told_once() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    for _ in 0..8 {
        let event = b"data: {\"error\":{\"code\":\"request_timeout\",\"message\":\"late\"}}\n\n";
        node.script(vec![
            Act::Send(stream_head()),
            Act::Send(chunk(format!("data: {}\n\n", delta("x")).as_bytes())),
            Act::Send(chunk(event)),
            Act::Send(b"0\r\n\r\n".to_vec()),
        ]);
        let answer = gateway.chat(&chat(Stream::WithUsage, "hi"));
        let errors: Vec<_> = answer
            .chunks()
            .into_iter()
            .filter_map(|chunk| chunk.get("error").cloned())
            .collect();
        assert_eq!(errors.len(), 1, "{errors:?}");
        assert_eq!(errors[0]["code"], "request_timeout");
        let row = gateway.row(answer.header("x-request-id").unwrap());
        assert_eq!(
            (&row["status"], &row["output_tokens"]),
            (&"cut".into(), &1.into())
        );
    }
    gateway.assert_idle();
}

#[test]
fn h13_the_error_body_of_a_stream_reaches_the_client() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let message = "m".repeat(150);
    let error = serde_json::json!({"error": {"message": message, "type": "requests", "param": null, "code": "overloaded"}}).to_string();
    for status in [429, 400] {
        node.script(vec![Act::Send(json(status, &["retry-after: 7"], &error))]);
        let answer = gateway.chat(&chat(Stream::WithUsage, "hi"));
        assert_eq!(answer.status, status);
        assert_eq!(answer.text(), error);
        assert_eq!(
            answer.header("content-length"),
            Some(error.len().to_string().as_str())
        );
        assert_eq!(answer.header("content-type"), Some("application/json"));
        assert_eq!(answer.header("retry-after"), Some("7"));
        let row = gateway.row(answer.header("x-request-id").unwrap());
        assert_eq!(
            (&row["status"], &row["cost_nano_usd"]),
            (&"failed".into(), &0.into())
        );
    }
    assert_eq!(gateway.metric("homing_tokens_total"), 0.0);
    // The connection is whole: the next request uses it.
    node.script(whole_of("fine"));
    assert_eq!(gateway.chat(&chat(Stream::No, "hi")).status, 200);
    assert_eq!(node.connections(), 1);
    gateway.assert_idle();
}

#[test]
fn a_pooled_connection_that_went_stale_costs_nothing() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    // The answer is complete, and the connection is closed right behind it.
    let mut script = whole_of("one");
    script.push(Act::Close);
    node.script(script);
    assert_eq!(gateway.chat(&chat(Stream::No, "hi")).status, 200);
    for _ in 0..20 {
        assert_eq!(gateway.chat(&chat(Stream::No, "hi")).status, 200);
    }
    gateway.assert_idle();
}
