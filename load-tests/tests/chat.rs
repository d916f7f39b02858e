//! Does the client tell every way in which an answer can go wrong apart?
//!
//! A socket answers with canned bytes, so each fault is exactly the one that a row names.

use std::time::Duration;

use load_tests::chat::{self, FailureKind, Outcome, Turn, Usage};
use load_tests::http::{Connection, Target};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

/// One request against a server that answers each connection with these bytes and closes it, or
/// keeps it open and says nothing more.
async fn against(answer: &'static str, then: Then) -> Outcome {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("a client");
        let mut request = vec![0; 1 << 16];
        let read = stream.read(&mut request).await.expect("a request");
        assert!(read > 0);
        stream
            .write_all(answer.as_bytes())
            .await
            .expect("the client reads");
        if then == Then::StayOpen {
            std::future::pending::<()>().await;
        }
    });
    let target = Target::parse(&format!("http://{address}")).expect("an address");
    let turn = Turn {
        endpoint: "chat/completions",
        body: json!({"model": "m", "messages": []}),
        headers: Vec::new(),
        timeout: Duration::from_millis(if then == Then::StayOpen { 200 } else { 10_000 }),
    };
    let outcome = chat::send(&mut Connection::new(&target), &target, None, &turn).await;
    server.abort();
    outcome
}

#[derive(Clone, Copy, PartialEq)]
enum Then {
    Close,
    StayOpen,
}

const STREAM: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n";

/// A stream of events, as a whole answer.
macro_rules! stream {
    ($($event:literal)*) => {
        concat!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n",
                $("data: ", $event, "\n\n",)*)
    };
}

#[tokio::test]
async fn faults_are_told_apart() {
    // Catches a cut stream that counts as an answer, and a server's words that get lost.
    let check = async |answer, then, expected: Option<(FailureKind, &str)>| {
        let outcome = against(answer, then).await;
        match (&outcome.failure, expected) {
            (None, None) => {}
            (Some(failure), Some((kind, words))) => {
                assert_eq!(failure.kind, kind, "{answer:?}: {failure:?}");
                assert!(failure.message.contains(words), "{words:?} in {failure:?}");
            }
            (found, expected) => panic!("{answer:?}: {found:?}, expected {expected:?}"),
        }
        outcome
    };
    use FailureKind::*;
    use Then::{Close, StayOpen};
    check("", Close, Some((Broken, ""))).await;
    check("", StayOpen, Some((Timeout, "200ms"))).await;
    check("nonsense\r\n\r\n", Close, Some((Broken, ""))).await;
    check(STREAM, Close, Some((Cut, "[DONE]"))).await;
    check(
        stream!(r#"{"choices":[{"delta":{"content":"Hel"}}]}"#),
        Close,
        Some((Cut, "[DONE]")),
    )
    .await;
    check(
        stream!(r#"{"choices":[{"delta":{"content":"Hel"}}]}"#),
        StayOpen,
        Some((Timeout, "")),
    )
    .await;
    check(
        stream!(r#"{"error":{"message":"node died"}}"#),
        Close,
        Some((StreamError, "node died")),
    )
    .await;
    check(stream!("{broken"), Close, Some((Malformed, ""))).await;
    check(
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
        Close,
        Some((Malformed, "choices")),
    )
    .await;
    check(
        "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}",
        Close,
        Some((Cut, "")),
    )
    .await;
    check(
        "HTTP/1.1 429 Too Many\r\ncontent-length: 30\r\n\r\n{\"error\":{\"message\":\"slower\"}} ",
        Close,
        Some((Status(429), "slower")),
    )
    .await;
    check(
        "HTTP/1.1 502 Bad\r\ncontent-length: 4\r\n\r\noops",
        Close,
        Some((Status(502), "oops")),
    )
    .await;
}

#[tokio::test]
async fn a_whole_stream_is_read_to_its_usage() {
    // Catches usage that is missed, text that counts twice, an acknowledgement that is not one.
    let outcome = against(
        stream!(
            r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#
            r#"{"choices":[{"delta":{"content":"Hel"}}],"usage":null}"#
            r#"{"choices":[{"delta":{"content":"lo"},"finish_reason":"stop"}]}"#
            r#"{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4}}}"#
            "[DONE]"
        ),
        Then::Close,
    )
    .await;
    assert_eq!(outcome.failure, None);
    assert_eq!(
        (outcome.text().as_str(), outcome.pieces.len()),
        ("Hello", 2)
    );
    assert_eq!(outcome.finish_reason.as_deref(), Some("stop"));
    let usage = Usage {
        prompt_tokens: 9,
        cached_tokens: 4,
        completion_tokens: 3,
    };
    assert_eq!(outcome.usage, Some(usage));
    assert!(outcome.acknowledged && outcome.tpot_ms().is_some());

    // A cut after the usage: the client knows its bill, so the request counts as acknowledged.
    let cut = against(
        stream!(r#"{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3}}"#),
        Then::Close,
    )
    .await;
    assert!(cut.acknowledged);
    // A cut before it: not.
    let cut = against(
        stream!(r#"{"choices":[{"delta":{"content":"Hel"}}]}"#),
        Then::Close,
    )
    .await;
    assert!(!cut.acknowledged && cut.usage.is_none());
}
