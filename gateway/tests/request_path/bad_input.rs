//! Catches a malformed request that reaches a node, an error that no OpenAI client can read, and
//! anything that is held afterwards: a permit, a record, a request in flight.

use std::io::Write;
use std::net::Shutdown;
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::client::{Answer, Connection};
use crate::support::node::{
    Act, CONTEXT, MODEL, Node, chunk, delta, stream_head, stream_of, whole_of,
};
use crate::support::{Gateway, Stream, chat, eventually};

const CHAT: &str = "/v1/chat/completions";

/// Checks an answer's status and the whole shape of its error.
fn check(answer: &Answer, status: u16, code: &str, param: Option<&str>) {
    assert_eq!(answer.status, status, "{answer:?}");
    assert_eq!(answer.header("content-type"), Some("application/json"));
    assert!(answer.header("x-request-id").is_some());
    let body = answer.json();
    let error = body["error"].as_object().expect("an error object");
    let mut names: Vec<_> = error.keys().map(String::as_str).collect();
    names.sort_unstable();
    assert_eq!(names, ["code", "message", "param", "type"]);
    assert_eq!(error["code"], code, "{body}");
    assert_eq!(
        error["param"],
        param.map_or(Value::Null, Value::from),
        "{body}"
    );
    assert!(error["message"].as_str().unwrap().len() > 10, "{body}");
    let kind = if status < 500 {
        "invalid_request_error"
    } else {
        "server_error"
    };
    assert_eq!(error["type"], kind);
}

/// A valid chat body but for one field.
fn with(field: &str, value: Value) -> Vec<u8> {
    let mut body = json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]});
    body[field] = value;
    body.to_string().into_bytes()
}

fn message_of(answer: &Answer) -> String {
    answer.json()["error"]["message"]
        .as_str()
        .unwrap()
        .to_owned()
}

#[test]
fn malformed_bodies_are_refused_by_name() {
    let node = Node::start();
    let gateway = Gateway::exact(&[&node]);
    let messages =
        |role: &str, content: Value| with("messages", json!([{"role": role, "content": content}]));
    let value =
        |body: Vec<u8>, param: &'static str| (CHAT, body, 400, "invalid_value", Some(param));
    let long = messages("user", "word ".repeat(9000).into());
    let too_long = |body: Vec<u8>| (CHAT, body, 400, "context_length_exceeded", Some("messages"));
    let invalid = |body: &[u8]| (CHAT, body.to_vec(), 400, "invalid_json", None);
    for (path, body, status, code, param) in [
        invalid(b"{\"model\":"),
        invalid(b"[]"),
        invalid(b""),
        invalid(b"{\"model\":\"\xff\xfe\"}"),
        (
            CHAT,
            b"{}".to_vec(),
            400,
            "missing_required_parameter",
            Some("model"),
        ),
        (
            CHAT,
            with("model", json!("gpt-nope")),
            404,
            "model_not_found",
            Some("model"),
        ),
        value(with("model", json!(7)), "model"),
        value(with("messages", json!([])), "messages"),
        value(with("messages", json!("hi")), "messages"),
        value(messages("user", 7.into()), "messages[0].content"),
        value(messages("wizard", "x".into()), "messages[0].role"),
        value(with("stream", json!("yes")), "stream"),
        value(with("temperature", json!(9)), "temperature"),
        value(with("max_tokens", json!(0)), "max_tokens"),
        too_long(with("max_tokens", json!(CONTEXT))),
        too_long(long),
        (
            "/v1/completions",
            with("prompt", json!(["a", "b"])),
            400,
            "invalid_value",
            Some("prompt"),
        ),
        ("/v1/nope", with("x", json!(1)), 404, "unknown_url", None),
        (
            "/v1/models",
            with("x", json!(1)),
            405,
            "method_not_allowed",
            None,
        ),
    ] {
        check(&gateway.post(path, &[], &body), status, code, param);
    }
    let message = |body: &[u8]| message_of(&gateway.post(CHAT, &[], body));
    assert!(message(b"{\"model\":\n 1,}").contains("line 2 column 4"));
    assert!(message(&with("model", json!("gpt-nope"))).contains(MODEL));
    assert!(message(&with("max_tokens", json!(CONTEXT))).contains(&CONTEXT.to_string()));
    assert_eq!(
        node.received().len(),
        0,
        "a malformed request reached the node"
    );
    assert_eq!(gateway.rows().len(), 0, "a malformed request was billed");
    gateway.assert_idle();
}

#[test]
fn keys_are_demanded() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let body = chat(Stream::No, "hi").to_string();
    for header in [
        "x-other: 1".to_owned(),
        "authorization: Bearer sk-homing-nope".to_owned(),
        format!("authorization: Basic {}", gateway.key),
        format!("authorization: Bearer {}x", gateway.key),
    ] {
        let answer = Connection::open(gateway.addr)
            .request("POST", CHAT, &[&header], body.as_bytes())
            .answer();
        check(&answer, 401, "invalid_api_key", None);
    }
    assert_eq!(node.received().len(), 0);
    gateway.assert_idle();
}

#[test]
fn large_bodies_and_headers_are_refused_by_their_size() {
    let node = Node::start();
    let gateway = Gateway::limited(&[&node], "body_bytes_max = 10000\n");
    let authorization = format!("authorization: Bearer {}", gateway.key);
    let open = || Connection::open(gateway.addr);
    let large = vec![b' '; 10_001];

    let declared = open()
        .request("POST", CHAT, &[&authorization], &large)
        .answer();
    check(&declared, 413, "body_too_large", None);

    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: g\r\n{authorization}\r\ntransfer-encoding: chunked\r\n\r\n"
    );
    let mut chunked = open();
    chunked
        .send(head.as_bytes())
        .send(b"2711\r\n")
        .send(&large)
        .send(b"\r\n0\r\n\r\n");
    check(&chunked.answer(), 413, "body_too_large", None);

    let bomb = gzip(&vec![b' '; 1_000_000]);
    assert!(bomb.len() < 10_000);
    let headers = [authorization.as_str(), "content-encoding: gzip"];
    check(
        &open().request("POST", CHAT, &headers, &bomb).answer(),
        413,
        "body_too_large",
        None,
    );

    let header = format!("x-large: {}", "x".repeat(100_000));
    let answer = open()
        .request("POST", CHAT, &[&authorization, &header], b"{}")
        .answer();
    check(&answer, 431, "headers_too_large", None);
    assert_eq!(node.received().len(), 0);
    gateway.assert_idle();
}

#[test]
fn bodies_come_in_any_framing_and_encoding() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let authorization = format!("authorization: Bearer {}", gateway.key);
    let body = chat(Stream::No, &"hi ".repeat(5000)).to_string();
    let post = |encoding: &str, bytes: &[u8]| {
        gateway.post(CHAT, &[&format!("content-encoding: {encoding}")], bytes)
    };
    assert_eq!(post("gzip", &gzip(body.as_bytes())).status, 200);
    let zstd = zstd::encode_all(body.as_bytes(), 3).unwrap();
    assert_eq!(post("zstd", &zstd).status, 200);
    assert_eq!(post("identity", body.as_bytes()).status, 200);
    check(&post("br", b"x"), 415, "unsupported_content_encoding", None);
    check(&post("gzip", body.as_bytes()), 400, "invalid_json", None);
    check(
        &post("zstd", &zstd[..zstd.len() - 9]),
        400,
        "invalid_json",
        None,
    );

    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: g\r\n{authorization}\r\n");
    let mut chunked = Connection::open(gateway.addr);
    chunked
        .send(head.as_bytes())
        .send(b"transfer-encoding: chunked\r\n\r\n");
    for piece in body.as_bytes().chunks(100) {
        chunked
            .send(format!("{:x}\r\n", piece.len()).as_bytes())
            .send(piece)
            .send(b"\r\n");
    }
    assert_eq!(chunked.send(b"0\r\n\r\n").answer().status, 200);

    let mut expecting = Connection::open(gateway.addr);
    let length = format!(
        "expect: 100-continue\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    expecting.send(head.as_bytes()).send(length.as_bytes());
    assert_eq!(expecting.head().0, 100);
    assert_eq!(expecting.send(body.as_bytes()).answer().status, 200);

    // Two requests in one write: the second must not look like a client that left.
    let length = format!("content-length: {}\r\n\r\n", body.len());
    let one = [head.as_bytes(), length.as_bytes(), body.as_bytes()].concat();
    let mut pipelined = Connection::open(gateway.addr);
    pipelined.send(&[one.clone(), one].concat());
    assert_eq!(pipelined.answer().status, 200);
    assert_eq!(pipelined.answer().status, 200);
    for received in node.received() {
        assert_eq!(received.body["messages"][0]["content"], "hi ".repeat(5000));
    }
    gateway.assert_idle();
}

#[test]
fn a_body_of_five_megabytes_arrives_whole() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let content = "hello world ".repeat(430_000);
    let body = chat(Stream::Yes, &content).to_string();
    let answer = gateway.post(CHAT, &[], body.as_bytes());
    assert_eq!((answer.status, answer.content().as_str()), (200, "ok"));
    assert!(node.received()[0].body["messages"][0]["content"] == content.as_str());
    gateway.assert_idle();
}

#[test]
fn an_old_client_gets_a_stream_that_ends_with_its_connection() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let body = chat(Stream::Yes, "hi").to_string();
    let mut old = Connection::open(gateway.addr);
    let (key, length) = (&gateway.key, body.len());
    let head = format!(
        "POST {CHAT} HTTP/1.0\r\nauthorization: Bearer {key}\r\ncontent-length: {length}\r\n\r\n"
    );
    let answer = old.send(head.as_bytes()).send(body.as_bytes()).answer();
    assert_eq!(answer.header("transfer-encoding"), None);
    assert_eq!(answer.content(), "ok");
    gateway.assert_idle();
}

#[test]
fn slow_and_half_closed_clients_hold_nothing() {
    let node = Node::start();
    let gateway = Gateway::limited(&[&node], "client_timeout_s = 0.3\n");
    let head = |length: usize| {
        format!(
            "POST {CHAT} HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {}\r\ncontent-length: {length}\r\n\r\n",
            gateway.key
        )
    };
    let mut slow = Connection::open(gateway.addr);
    slow.send(head(100).as_bytes()).send(b"{\"model\":");
    check(&slow.answer(), 408, "request_timeout", None);
    assert!(slow.is_closed());

    let mut half = Connection::open(gateway.addr);
    half.send(head(100).as_bytes()).send(b"{\"model\":");
    half.stream.shutdown(Shutdown::Write).unwrap();
    check(&half.answer(), 400, "invalid_json", None);

    // Whoever sends nothing more may still read: a whole answer and a stream, both late.
    for stream in [Stream::No, Stream::Yes] {
        let late = match stream {
            Stream::No => whole_of("late"),
            _ => stream_of(&["la", "te"]),
        };
        let mut script = vec![Act::Pause(Duration::from_millis(500))];
        script.extend(late);
        node.script(script);
        let body = chat(stream, "hi").to_string();
        let mut whole = Connection::open(gateway.addr);
        whole
            .send(head(body.len()).as_bytes())
            .send(body.as_bytes());
        whole.stream.shutdown(Shutdown::Write).unwrap();
        let answer = whole.answer();
        assert_eq!(answer.status, 200);
        let text = match stream {
            Stream::No => answer.json()["choices"][0]["message"]["content"].to_string(),
            _ => answer.content(),
        };
        assert_eq!(text.trim_matches('"'), "late");
        assert!(whole.is_closed());
    }
    eventually("they are on record", || gateway.rows().len() == 2);
    assert!(gateway.rows().iter().all(|row| row["status"] == "complete"));
    gateway.assert_idle();
}

#[test]
fn a_client_that_left_lets_go_of_the_node_whatever_it_was_waiting_for() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let delta_then = |last: Act| vec![Act::Send(stream_head()), event(&delta("x")), last];
    for (stream, script) in [
        (Stream::No, vec![Act::AwaitClose(Duration::from_secs(10))]),
        (Stream::Yes, vec![Act::AwaitClose(Duration::from_secs(10))]),
        (
            Stream::Yes,
            delta_then(Act::AwaitClose(Duration::from_secs(10))),
        ),
    ] {
        let (asked, gone) = (node.received().len(), node.hang_ups().len());
        let begun = script.len() > 1;
        node.script(script);
        let mut client = gateway.begin_chat(&[], &chat(stream, "hi"));
        eventually("the node has it", || node.received().len() > asked);
        if begun {
            client.head();
            client.chunk();
        }
        drop(client);
        eventually("the node is let go", || node.hang_ups().len() > gone);
    }
    eventually("all is on record", || gateway.rows().len() == 3);
    let cancelled = |row: &Value| row["status"] == "cancelled";
    assert!(gateway.rows().iter().all(cancelled));
    gateway.assert_idle();
}

fn event(data: &str) -> Act {
    Act::Send(chunk(format!("data: {data}\n\n").as_bytes()))
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}
