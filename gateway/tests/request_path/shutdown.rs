//! Catches a gateway that drops a running answer when it is asked to stop, and one that never
//! stops or leaves an answer without a record when it has to.

use std::time::Duration;

use crate::support::client::Connection;
use crate::support::node::{Act, CHUNKS_END, Node, chunk, delta, stream_head, usage_chunk};
use crate::support::{Gateway, Stream, chat, eventually};

fn event(data: &str) -> Act {
    Act::Send(chunk(format!("data: {data}\n\n").as_bytes()))
}

#[test]
fn a_running_answer_may_end_while_the_gateway_drains() {
    let node = Node::start();
    let mut gateway = Gateway::start(&[&node]);
    node.script(vec![
        Act::Send(stream_head()),
        event(&delta("a")),
        Act::Pause(Duration::from_millis(300)),
        event(&delta("b")),
        event(&usage_chunk(5, 0, 2)),
        event("[DONE]"),
        Act::Send(CHUNKS_END.to_vec()),
    ]);
    let mut client = gateway.begin_chat(&["x-request-id: d1"], &chat(Stream::Yes, "hi"));
    assert_eq!(client.head().0, 200);
    assert!(client.chunk().is_some());
    gateway.signal("TERM");
    let mut rest = Vec::new();
    while let Some(chunk) = client.chunk() {
        rest.extend(chunk);
    }
    assert!(
        String::from_utf8(rest)
            .unwrap()
            .ends_with("data: [DONE]\n\n")
    );
    assert!(gateway.wait().success());
    assert_eq!(gateway.row("d1")["status"], "complete");
}

#[test]
fn a_second_signal_cuts_and_says_so() {
    let node = Node::start();
    let mut gateway = Gateway::start(&[&node]);
    node.script(vec![
        Act::Send(stream_head()),
        event(&delta("a")),
        Act::AwaitClose(Duration::from_secs(30)),
    ]);
    node.script(vec![Act::AwaitClose(Duration::from_secs(30))]);
    let mut streaming = gateway.begin_chat(&["x-request-id: d2"], &chat(Stream::Yes, "hi"));
    assert_eq!(streaming.head().0, 200);
    assert!(streaming.chunk().is_some());
    let mut waiting = gateway.begin_chat(&["x-request-id: d3"], &chat(Stream::No, "hi"));
    eventually("both are at the node", || node.received().len() == 2);
    gateway.signal("TERM");
    eventually("it drains", || gateway.log().contains("draining"));
    gateway.signal("TERM");
    let last = String::from_utf8(streaming.chunk().expect("an error event")).unwrap();
    assert!(last.contains("gateway_stopping"), "{last}");
    let refused = waiting.answer();
    assert_eq!(
        (refused.status, &refused.json()["error"]["code"]),
        (503, &"gateway_stopping".into())
    );
    assert!(gateway.wait().success());
    let row = gateway.row("d2");
    assert_eq!(
        (&row["status"], &row["output_tokens"]),
        (&"cut".into(), &1.into())
    );
    assert_eq!(gateway.row("d3")["status"], "failed");
}

#[test]
fn a_killed_gateway_leaves_no_answer_without_a_record() {
    let node = Node::start();
    let mut gateway = Gateway::start(&[&node]);
    let whole = gateway.chat(&chat(Stream::No, "hi"));
    node.script(vec![
        Act::Send(stream_head()),
        event(&delta("a")),
        Act::AwaitClose(Duration::from_secs(30)),
    ]);
    let mut streaming: Connection =
        gateway.begin_chat(&["x-request-id: d4"], &chat(Stream::Yes, "hi"));
    assert_eq!(streaming.head().0, 200);
    assert!(streaming.chunk().is_some());
    gateway.signal("KILL");
    assert!(!gateway.wait().success());
    // What was acknowledged is there, also without the process that wrote it.
    assert_eq!(
        gateway.row(whole.header("x-request-id").unwrap())["output_tokens"],
        20
    );
    let row = gateway.row("d4");
    assert_eq!(
        (&row["status"], &row["output_tokens"]),
        (&"cut".into(), &1.into())
    );
}
