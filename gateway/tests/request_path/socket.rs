//! Responses over a WebSocket: catches a turn that differs from a POST's, a chain that only a store
//! could remember, a client that leaves without paying, and a connection that outlives its gateway
//! or breaks by a frame that is none.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tungstenite::protocol::frame::coding::CloseCode;
use tungstenite::protocol::{CloseFrame, Message, Role, WebSocket};

use crate::support::client::Connection;
use crate::support::node::{
    Act, MODEL, Node, chunk, delta, json as answer_of, stream_head, stream_of,
};
use crate::support::{Gateway, eventually};

/// The key and its answer from RFC 6455.
const KEY: &str = "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==";
const ACCEPT: &str = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=";

struct Client(WebSocket<TcpStream>);

impl Client {
    fn open(gateway: &Gateway) -> Self {
        let authorization = format!("authorization: Bearer {}", gateway.key);
        let mut connection = Connection::open(gateway.addr);
        let head = format!(
            "GET /v1/responses HTTP/1.1\r\nhost: g\r\nconnection: keep-alive, Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n{KEY}\r\n{authorization}\r\n\r\n"
        );
        let (status, head) = connection.send(head.as_bytes()).head();
        assert_eq!(status, 101, "{head}");
        assert!(head.contains(ACCEPT), "{head}");
        let stream = connection.stream.try_clone().unwrap();
        Self(WebSocket::from_raw_socket(stream, Role::Client, None))
    }

    fn ask(&mut self, fields: Value) -> &mut Self {
        let mut request = json!({"type": "response.create", "model": MODEL});
        if let (Value::Object(request), Value::Object(fields)) = (&mut request, fields) {
            request.extend(fields);
        }
        self.0.send(Message::text(request.to_string())).unwrap();
        self
    }

    fn event(&mut self) -> Value {
        match self.0.read().unwrap() {
            Message::Text(text) => serde_json::from_str(&text).unwrap(),
            other => panic!("no event: {other:?}"),
        }
    }

    /// The events up to the last of a response, or an error.
    fn events(&mut self) -> Vec<Value> {
        let mut all = Vec::new();
        loop {
            all.push(self.event());
            let kind = all.last().unwrap()["type"].as_str().unwrap();
            let ends = [
                "response.completed",
                "response.incomplete",
                "response.failed",
            ];
            if ends.contains(&kind) || (kind == "error" && all.len() == 1) {
                return all;
            }
        }
    }

    /// The code with which the gateway closes.
    fn closed(&mut self) -> CloseCode {
        loop {
            match self.0.read() {
                Ok(Message::Close(Some(frame))) => return frame.code,
                Ok(_) => {}
                Err(error) => panic!("no close frame: {error}"),
            }
        }
    }
}

fn id(events: &[Value]) -> String {
    let last = &events.last().unwrap()["response"];
    assert_eq!(last["status"], "completed", "{events:?}");
    last["id"].as_str().unwrap().to_owned()
}

fn kinds(events: &[Value]) -> Vec<String> {
    events
        .iter()
        .map(|event| event["type"].to_string())
        .collect()
}

fn contents(node: &Node) -> Vec<String> {
    let received = node.received();
    let messages = received.last().unwrap().body["messages"]
        .as_array()
        .unwrap()
        .clone();
    messages
        .iter()
        .map(|message| message["content"].as_str().unwrap_or_default().to_owned())
        .collect()
}

#[test]
fn turns_of_one_connection_continue_each_other_unstored() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let mut client = Client::open(&gateway);
    node.script(stream_of(&["o", "ne"]));
    let first = client.ask(json!({"input": "hi", "store": false})).events();
    node.script(stream_of(&["two"]));
    let more = json!({"input": "and", "store": false, "previous_response_id": id(&first)});
    let second = client.ask(more).events();
    assert_eq!(contents(&node), ["hi", "one", "and"]);
    assert_eq!(first[0]["sequence_number"], 0);
    assert_eq!(second[0]["sequence_number"], 0);
    // The very events that a POST has.
    node.script(stream_of(&["o", "ne"]));
    let body = json!({"model": MODEL, "input": "hi", "stream": true}).to_string();
    let posted = gateway.post("/v1/responses", &[], body.as_bytes()).text();
    let posted: Vec<Value> = posted
        .lines()
        .filter_map(|line| serde_json::from_str(line.strip_prefix("data: ")?).ok())
        .collect();
    assert_eq!(kinds(&first), kinds(&posted));
    // The chain is the connection's own, and its end may be stored.
    let mut other = Client::open(&gateway);
    let more = json!({"input": "x", "previous_response_id": id(&second)});
    let refused = other.ask(more.clone()).events();
    assert_eq!(refused[0]["status"], 400);
    assert_eq!(refused[0]["error"]["code"], "previous_response_not_found");
    let third = client.ask(more).events();
    assert_eq!(contents(&node), ["hi", "one", "and", "two", "x"]);
    let path = format!("/v1/responses/{}", id(&third));
    let authorization = format!("authorization: Bearer {}", gateway.key);
    let stored = Connection::open(gateway.addr)
        .request("GET", &path, &[&authorization], b"")
        .answer();
    assert_eq!(stored.status, 200);
    eventually("a record a turn", || gateway.rows().len() == 4);
    let rows = gateway.rows();
    assert!(
        rows.iter()
            .all(|row| row["status"] == "complete" && row["output_tokens"] == 20)
    );
    drop((client, other));
    gateway.assert_idle();
}

#[test]
fn a_turn_that_only_prepares_asks_no_node() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let mut client = Client::open(&gateway);
    let fields = json!({"input": "hi", "store": false, "generate": false});
    let prepared = client.ask(fields).events();
    assert_eq!(prepared.last().unwrap()["response"]["output"], json!([]));
    assert!(node.received().is_empty());
    let more = json!({"input": "and", "store": false, "previous_response_id": id(&prepared)});
    let answered = client.ask(more).events();
    assert_eq!(id(&answered), answered[0]["response"]["id"]);
    assert_eq!(contents(&node), ["hi", "and"]);
    eventually("a record", || !gateway.rows().is_empty());
    assert_eq!(gateway.rows().len(), 1, "preparing was billed");
    drop(client);
    gateway.assert_idle();
}

#[test]
fn errors_are_events_and_the_connection_goes_on() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let mut client = Client::open(&gateway);
    let refusal =
        r#"{"error":{"message":"No.","type":"invalid_request_error","param":null,"code":"odd"}}"#;
    node.script(vec![Act::Send(answer_of(400, &[], refusal))]);
    let refused = client.ask(json!({"input": "hi"})).events();
    assert_eq!(
        (&refused[0]["status"], &refused[0]["error"]["code"]),
        (&400.into(), &"odd".into())
    );
    for (text, param) in [
        ("{", Value::Null),
        ("[]", Value::Null),
        (r#"{"type":"response.cancel"}"#, "type".into()),
        (r#"{"model":"m","input":"x"}"#, "type".into()),
        (
            r#"{"type":"response.create","model":"scripted","input":7}"#,
            "input".into(),
        ),
        (r#"{"type":"response.create","input":"x"}"#, "model".into()),
    ] {
        client.0.send(Message::text(text)).unwrap();
        let event = client.event();
        assert_eq!(
            (&event["type"], &event["error"]["param"]),
            (&"error".into(), &param),
            "{text}"
        );
        assert_eq!(event["status"], 400, "{text}");
    }
    client
        .0
        .send(Message::text(
            r#"{"type":"response.create","model":"none","input":"x"}"#,
        ))
        .unwrap();
    assert_eq!(client.event()["error"]["code"], "model_not_found");
    client.0.send(Message::binary(vec![1, 2])).unwrap();
    assert_eq!(client.event()["type"], "error");
    client.0.send(Message::Ping(vec![7].into())).unwrap();
    assert_eq!(client.0.read().unwrap(), Message::Pong(vec![7].into()));
    // Two at once are served one after the other.
    node.script(stream_of(&["one"]));
    node.script(stream_of(&["two"]));
    client
        .ask(json!({"input": "hi"}))
        .ask(json!({"input": "ho"}));
    for expected in ["one", "two"] {
        let last = client.events().pop().unwrap();
        assert_eq!(
            last["response"]["output"][0]["content"][0]["text"],
            expected
        );
    }
    let (code, reason) = (CloseCode::Normal, "".into());
    client.0.close(Some(CloseFrame { code, reason })).unwrap();
    assert_eq!(client.closed(), CloseCode::Normal);
    gateway.assert_idle();
}

#[test]
fn a_handshake_that_is_none() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let key = format!("authorization: Bearer {}", gateway.key);
    let upgrade = ["connection: Upgrade", "upgrade: websocket"];
    let version = "sec-websocket-version: 13";
    for (headers, expected) in [
        (vec![key.as_str()], 405),
        (vec![upgrade[0], upgrade[1], version, KEY], 401),
        (vec![&key, upgrade[0], upgrade[1], version], 400),
        (
            vec![
                &key,
                upgrade[0],
                upgrade[1],
                "sec-websocket-version: 8",
                KEY,
            ],
            400,
        ),
        (
            vec![
                &key,
                upgrade[0],
                upgrade[1],
                version,
                "sec-websocket-key: short",
            ],
            400,
        ),
        (vec![&key, upgrade[0], "upgrade: h2c", version, KEY], 405),
    ] {
        let answer = Connection::open(gateway.addr)
            .request("GET", "/v1/responses", &headers, b"")
            .answer();
        assert_eq!(answer.status, expected, "{headers:?}");
        assert!(answer.json()["error"]["message"].is_string());
    }
    gateway.assert_idle();
}

#[test]
fn frames_that_break_the_rules_close_the_connection() {
    let node = Node::start();
    let gateway = Gateway::limited(&[&node], "body_bytes_max = 4096\n");
    let mut large = vec![0x81, 0x80 | 126, 0x20, 0x00];
    large.extend([0; 4]);
    for (bytes, code) in [
        // Not masked.
        (vec![0x81, 0x01, b'x'], CloseCode::Protocol),
        // A kind of frame that does not exist.
        (vec![0x83, 0x80, 0, 0, 0, 0], CloseCode::Protocol),
        (large, CloseCode::Size),
        // A text that is not UTF-8.
        (vec![0x81, 0x81, 0, 0, 0, 0, 0xff], CloseCode::Invalid),
    ] {
        let mut client = Client::open(&gateway);
        client.0.get_mut().write_all(&bytes).unwrap();
        assert_eq!(client.closed(), code, "{bytes:?}");
        let end = client.0.get_mut().read(&mut [0]);
        assert!(matches!(end, Ok(0) | Err(_)), "{end:?}");
    }
    gateway.assert_idle();
}

#[test]
fn a_client_that_leaves_in_a_turn_pays_for_what_it_had() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    for ends in ["close", "drop"] {
        let before = node.hang_ups().len();
        let mut script = vec![Act::Send(stream_head())];
        for _ in 0..3 {
            script.push(Act::Send(chunk(
                format!("data: {}\n\n", delta("x")).as_bytes(),
            )));
        }
        script.push(Act::AwaitClose(Duration::from_secs(20)));
        node.script(script);
        let mut client = Client::open(&gateway);
        client.ask(json!({"input": "hi"}));
        let mut deltas = 0;
        while deltas < 3 {
            deltas += u32::from(client.event()["type"] == "response.output_text.delta");
        }
        if ends == "close" {
            client.0.close(None).unwrap();
            let _ = client.0.flush();
        } else {
            drop(client);
        }
        let left = Instant::now();
        eventually("the node's connection is closed", || {
            node.hang_ups().len() > before
        });
        assert!(
            left.elapsed() < Duration::from_secs(1),
            "{:?}",
            left.elapsed()
        );
    }
    eventually("two records", || gateway.rows().len() == 2);
    for row in gateway.rows() {
        assert_eq!(
            (&row["status"], &row["output_tokens"]),
            (&"cancelled".into(), &3.into())
        );
    }
    gateway.assert_idle();
}

/// Would catch a turn that runs on because its node never pauses long enough to look around.
#[test]
fn a_client_that_leaves_a_node_in_full_flow_pays_for_what_it_had() {
    let node = Node::start();
    let gateway = Gateway::start(&[&node]);
    let mut script = vec![Act::Send(stream_head())];
    for _ in 0..2000 {
        script.push(Act::Send(chunk(
            format!("data: {}\n\n", delta("x")).as_bytes(),
        )));
        script.push(Act::Pause(Duration::from_millis(5)));
    }
    node.script(script);
    let mut client = Client::open(&gateway);
    client.ask(json!({"input": "hi"}));
    while client.event()["type"] != "response.output_text.delta" {}
    drop(client);
    let left = Instant::now();
    eventually("the node's connection is closed", || {
        !node.hang_ups().is_empty()
    });
    let took = left.elapsed();
    assert!(took < Duration::from_secs(2), "{took:?}");
    eventually("a record", || gateway.rows().len() == 1);
    let row = &gateway.rows()[0];
    assert_eq!(row["status"], "cancelled");
    assert!(row["output_tokens"].as_u64().unwrap() < 600, "{row}");
    gateway.assert_idle();
}

#[test]
fn a_gateway_that_stops_closes_its_connections() {
    let node = Node::start();
    let mut gateway = Gateway::start(&[&node]);
    let mut idle = Client::open(&gateway);
    let mut busy = Client::open(&gateway);
    let mut script = vec![Act::Send(stream_head())];
    script.push(Act::Send(chunk(
        format!("data: {}\n\n", delta("x")).as_bytes(),
    )));
    script.push(Act::Pause(Duration::from_millis(300)));
    script.extend(stream_of(&["y"]).into_iter().map(|act| match act {
        // Its head went out already.
        Act::Send(bytes) => Act::Send(bytes[stream_head().len()..].to_vec()),
        other => other,
    }));
    node.script(script);
    busy.ask(json!({"input": "hi"}));
    while busy.event()["type"] != "response.output_text.delta" {}
    gateway.signal("TERM");
    assert_eq!(idle.closed(), CloseCode::Restart);
    let last = busy.events().pop().unwrap();
    assert_eq!(last["response"]["output"][0]["content"][0]["text"], "xy");
    assert_eq!(busy.closed(), CloseCode::Restart);
    assert!(gateway.wait().success());
}
