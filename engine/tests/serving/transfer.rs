//! Prefill on one node, decode on another, over both ways that blocks can take. Catches an answer that
//! depends on where its prompt was computed, a transfer that somebody else can take or use twice, and
//! blocks that stay pinned, requests that hang or answers that are lost when a node, a client or the
//! connection goes away in the middle.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::common::{Node, Reply, TOKEN, cached, chat_body, content, user};

const CHAT: &str = "/v1/chat/completions";
const HELD: &str = "homing:kv_blocks_held";
const RECEIVED: &str = "homing:kv_transfers_received_total";
const FAILED: &str = "homing:kv_transfers_failed_total";

/// Two nodes that know each other.
struct Pair {
    prefill: Node,
    decode: Node,
    prefill_id: String,
    decode_id: String,
    endpoints: Vec<String>,
}

/// A way for blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Shared,
    Tcp,
}

impl Way {
    fn scheme(self) -> &'static str {
        match self {
            Way::Shared => "unix:",
            Way::Tcp => "tcp://",
        }
    }

    fn sent(self) -> String {
        let medium = match self {
            Way::Shared => "shared",
            Way::Tcp => "tcp",
        };
        let labels = format!("{{medium=\"{medium}\",model_name=\"smol\"}}");
        format!("homing:kv_transfer_sent_bytes_total{labels}")
    }
}

fn text(value: &Value) -> String {
    value.as_str().expect("a text").to_owned()
}

fn info(node: &Node) -> Value {
    let reply = node.get("/v1/kv/info");
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()
}

impl Pair {
    fn start(prefill: &[&str], decode: &[&str]) -> Pair {
        let start = |role, args: &[&str]| {
            Node::start_with(&[&["--role", role], args].concat(), Some(TOKEN))
        };
        Pair::of(start("prefill", prefill), start("decode", decode))
    }

    fn of(prefill: Node, decode: Node) -> Pair {
        let (theirs, ours) = (info(&prefill), info(&decode));
        let endpoints = theirs["endpoints"].as_array().expect("a list");
        Pair {
            prefill_id: text(&theirs["engine_id"]),
            decode_id: text(&ours["engine_id"]),
            endpoints: endpoints.iter().map(text).collect(),
            prefill,
            decode,
        }
    }

    fn endpoint(&self, way: Way) -> String {
        let found = self.endpoints.iter().find(|e| e.starts_with(way.scheme()));
        found.expect("both ways are open").clone()
    }

    /// What the node that computes the prompt is sent.
    fn first_leg(&self, id: &str, body: &Value) -> Value {
        let mut body = body.clone();
        body["stream"] = json!(false);
        body["max_tokens"] = json!(1);
        body["kv_transfer_params"] = json!({
            "do_remote_decode": true, "transfer_id": id, "remote_engine_id": self.decode_id,
        });
        body
    }

    /// What the node that decodes is sent; `params` are set or replaced.
    fn second_leg(&self, id: &str, body: &Value, params: &Value) -> Value {
        let mut body = body.clone();
        body["kv_transfer_params"] = json!({
            "do_remote_prefill": true, "transfer_id": id, "remote_engine_id": self.prefill_id,
            "remote_endpoints": self.endpoints,
        });
        for (name, value) in params.as_object().expect("params are an object") {
            body["kv_transfer_params"][name] = value.clone();
        }
        body
    }

    /// Both legs at once.
    fn both(&self, body: &Value, params: &Value) -> (Reply, Reply) {
        let id = fresh_id();
        let first = self.first_leg(&id, body);
        let second = self.second_leg(&id, body, params);
        thread::scope(|scope| {
            let prefill = scope.spawn(|| self.prefill.post(CHAT, &first));
            let decode = self.decode.post(CHAT, &second);
            (prefill.join().expect("it answers"), decode)
        })
    }

    /// Nothing is held at either node, well before any deadline.
    fn at_rest(&self) {
        let since = Instant::now();
        for node in [&self.prefill, &self.decode] {
            node.wait_for_metric(HELD, |held| held == 0.0);
            node.wait_for_metric("homing:kv_tickets{", |open| open == 0.0);
            node.wait_for_metric("homing:kv_handovers", |open| open == 0.0);
        }
        assert!(
            since.elapsed() < Duration::from_secs(25),
            "only a deadline let go"
        );
    }
}

fn fresh_id() -> String {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(1);
    format!("{:032x}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// About `words` tokens that are no other test's.
fn prompt(name: &str, words: usize) -> Value {
    user(&format!(
        "{name}: {}",
        "rivers run to the sea and on ".repeat(words / 7)
    ))
}

fn asked(messages: Value, fields: Value) -> Value {
    let mut body = chat_body(json!({
        "messages": messages, "max_tokens": 12, "logprobs": true, "top_logprobs": 3,
        "return_token_ids": true, "ignore_eos": true,
    }));
    for (name, value) in fields.as_object().expect("fields are an object") {
        body[name] = value.clone();
    }
    body
}

/// Would catch a block in the wrong place, a position that was not computed, and a first token that is
/// counted, told or continued wrongly: numbers in JSON are told to their last bit.
#[test]
fn an_answer_does_not_depend_on_where_its_prompt_was_computed() {
    let pair = Pair::start(&[], &[]);
    let mixed = Node::start_with(&[], Some(TOKEN));
    let mut rows = vec![
        ("long", prompt("long", 600), json!({})),
        ("short", user("Hi"), json!({})),
        ("one token", prompt("one", 100), json!({"max_tokens": 1})),
        (
            "seeded",
            prompt("seeded", 100),
            json!({"temperature": 0.9, "seed": 7}),
        ),
        (
            "scoped",
            prompt("scoped", 100),
            json!({"cache_salt": "tenant-a"}),
        ),
        (
            "a form",
            prompt("form", 100),
            json!({"response_format": {"type": "json_object"}, "max_tokens": 60, "ignore_eos": false}),
        ),
        (
            "stopped",
            prompt("stopped", 60),
            json!({"stop": ["e"], "min_tokens": 3}),
        ),
        (
            "several",
            prompt("several", 60),
            json!({"n": 2, "temperature": 0.5, "seed": 3}),
        ),
    ];
    // At a block's border, and beside it.
    for count in 31..=33 {
        let ids: Vec<u32> = (0..count).map(|at| 1_000 + 7 * at).collect();
        rows.push(("ids", json!([]), json!({"prompt_token_ids": ids})));
    }
    for way in [Way::Tcp, Way::Shared] {
        for (name, messages, fields) in &rows {
            let mut body = asked(messages.clone(), fields.clone());
            if *name != "scoped" {
                // Nothing of the other way's run may be in a cache.
                body["cache_salt"] = json!(format!("{way:?}-{name}"));
            }
            let expected = mixed.post(CHAT, &body);
            assert_eq!(expected.status, 200, "{}", expected.text());
            let only = json!({"remote_endpoints": [pair.endpoint(way)], "on_failure": "error"});
            let before = pair.decode.metric("homing:computed_tokens_total");
            let (first, second) = pair.both(&body, &only);
            assert_eq!(
                (first.status, second.status),
                (200, 200),
                "{name}: {}",
                second.text()
            );
            let (first, second, expected) = (first.json(), second.json(), expected.json());
            assert_eq!(second["choices"], expected["choices"], "{way:?} {name}");
            assert_eq!(second["usage"], expected["usage"], "{way:?} {name}");
            if *name == "long" {
                let tokens = &first["choices"][0]["token_ids"];
                assert_eq!(tokens[0], second["choices"][0]["token_ids"][0]);
                assert_eq!(
                    cached(&second),
                    0,
                    "what the prefill had, and it had nothing"
                );
                let computed = pair.decode.metric("homing:computed_tokens_total") - before;
                assert!(computed < 30.0, "{computed} tokens were computed again");
            }
        }
        assert!(pair.prefill.metric(&way.sent()) > 0.0, "{way:?} was taken");
    }
    assert_eq!(pair.decode.metric(RECEIVED), 2.0 * rows.len() as f64);
    pair.at_rest();
}

#[test]
fn a_stream_begins_with_the_token_that_was_handed_over_and_turns_reuse_what_is_here() {
    let pair = Pair::start(&[], &[]);
    let body = asked(prompt("turns", 300), json!({"stream": true}));
    let mixed = Node::start_with(&[], Some(TOKEN));
    for _turn in 0..2 {
        let id = fresh_id();
        let second = pair.second_leg(&id, &body, &json!({"on_failure": "error"}));
        // This one waits for the other, which comes later.
        let decode = pair.decode.stream(CHAT, &second);
        let first = pair.prefill.post(CHAT, &pair.first_leg(&id, &body));
        assert_eq!(first.status, 200, "{}", first.text());
        let ids = |chunks: &[Value]| -> Vec<Value> {
            let ids = chunks
                .iter()
                .filter_map(|c| c["choices"][0]["token_ids"].as_array());
            ids.flatten().cloned().collect()
        };
        let streamed = ids(&decode.chunks());
        assert_eq!(streamed, ids(&mixed.stream(CHAT, &body).chunks()));
        assert_eq!(streamed[0], first.json()["choices"][0]["token_ids"][0]);
        pair.at_rest();
    }
    let sent = pair.prefill.metric(&Way::Shared.sent());
    let held = pair
        .decode
        .metric("homing:kv_transfer_received_bytes_total");
    assert_eq!(sent, held);
    let blocks = held / 368_640.0;
    assert!(
        (15.0..30.0).contains(&blocks),
        "{blocks} blocks, each sent once"
    );
}

/// Who is refused, and that nothing is lost by it: the prompt is computed where it is needed.
#[test]
fn a_transfer_is_for_one_node_one_scope_and_one_prompt_and_for_once() {
    let pair = Pair::start(&[], &[]);
    let other = Node::start_with(&[], Some(TOKEN));
    let body = asked(prompt("tickets", 120), json!({"cache_salt": "tenant-a"}));
    let id = fresh_id();
    let answer = pair.prefill.post(CHAT, &pair.first_leg(&id, &body));
    assert_eq!(
        answer.json()["kv_transfer_params"]["transfer_id"],
        json!(id)
    );
    let fails = json!({"on_failure": "error", "timeout_ms": 300});
    let refused = |node: &Node, body: &Value| {
        let (status, code, _) = node.post(CHAT, &pair.second_leg(&id, body, &fails)).error();
        assert_eq!((status, &*code), (503, "kv_transfer_failed"), "{body}");
    };
    let with = |name: &str, value: Value| {
        let mut body = body.clone();
        body[name] = value;
        body
    };
    refused(&other, &body);
    refused(&pair.decode, &with("cache_salt", json!("tenant-b")));
    refused(&pair.decode, &with("messages", prompt("another", 120)));
    let forged = pair.second_leg(&fresh_id(), &body, &fails);
    assert_eq!(
        pair.decode.post(CHAT, &forged).error().0,
        503,
        "nobody prefills that"
    );
    let wrong = json!({"remote_engine_id": "somebody else", "on_failure": "error"});
    let wrong = pair.second_leg(&id, &body, &wrong);
    assert_eq!(pair.decode.post(CHAT, &wrong).error().0, 503);

    let whole = json!({"on_failure": "error"});
    let good = pair.decode.post(CHAT, &pair.second_leg(&id, &body, &whole));
    assert_eq!(good.status, 200, "and it still works: {}", good.text());
    refused(&pair.decode, &with("cache_salt", json!("tenant-a")));
    let again = pair.prefill.post(CHAT, &pair.first_leg(&id, &body)).error();
    let param = Some("kv_transfer_params.transfer_id".to_owned());
    assert_eq!(again, (400, "invalid_value".into(), param));

    let replayed = pair.second_leg(&id, &body, &json!({"timeout_ms": 300}));
    let replayed = pair.decode.post(CHAT, &replayed).json();
    assert_eq!(
        replayed["choices"],
        good.json()["choices"],
        "computed here instead"
    );
    assert!(pair.decode.metric(FAILED) >= 5.0);
    pair.at_rest();
}

#[test]
fn a_ticket_that_nobody_fetches_lets_go_and_is_late_from_then_on() {
    let pair = Pair::start(&[], &[]);
    let body = asked(prompt("late", 200), json!({}));
    let id = fresh_id();
    let mut first = pair.first_leg(&id, &body);
    first["kv_transfer_params"]["timeout_ms"] = json!(200);
    assert_eq!(pair.prefill.post(CHAT, &first).status, 200);
    pair.at_rest();
    let fails = json!({"on_failure": "error", "timeout_ms": 200});
    let late = pair.decode.post(CHAT, &pair.second_leg(&id, &body, &fails));
    assert_eq!(late.error().0, 503);
    let body = pair.second_leg(&id, &body, &json!({"timeout_ms": 200}));
    assert_eq!(pair.decode.post(CHAT, &body).status, 200);
}

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
                decode.wait_for_metric("homing:kv_transfer_received_bytes_total", |b| b > 1e6);
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
    let second = pair.second_leg(&id, &body, &json!({"timeout_ms": 1_000}));
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

/// A session that moves: what the node before has of it is fetched, and the rest computed.
#[test]
fn a_moved_session_fetches_what_its_node_has() {
    let [old, new] = [(); 2].map(|()| Node::start_with(&[], Some(TOKEN)));
    let pair = Pair::of(old, new);
    let ask = |node: &Node, messages: &Value, params: Value| {
        let mut body = asked(messages.clone(), json!({"cache_salt": "tenant-a"}));
        body["kv_transfer_params"] = params;
        let reply = node.post(CHAT, &body);
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()
    };
    for way in [Way::Tcp, Way::Shared] {
        let mut messages = prompt(&format!("moves {way:?}"), 400);
        let history = content(&ask(&pair.prefill, &messages, Value::Null));
        let turns = messages.as_array_mut().expect("a list");
        turns.push(json!({"role": "assistant", "content": history}));
        turns.push(json!({"role": "user", "content": "And then?"}));
        let before = pair.decode.metric("homing:computed_tokens_total");
        let from = json!({
            "fetch_from": [pair.endpoint(way)], "remote_engine_id": pair.prefill_id,
            "on_failure": "error",
        });
        let moved = ask(&pair.decode, &messages, from);
        let computed = pair.decode.metric("homing:computed_tokens_total") - before;
        assert!(computed < 80.0, "{computed} tokens computed");
        assert!(cached(&moved) > 390, "{moved}");
        let stayed = ask(&pair.prefill, &messages, Value::Null);
        assert_eq!(moved["choices"], stayed["choices"], "{way:?}");
    }
    // A tenant whose prompt it is not has nothing there.
    let received = pair
        .decode
        .metric("homing:kv_transfer_received_bytes_total");
    let mut body = asked(prompt("moves Tcp", 400), json!({"cache_salt": "tenant-b"}));
    body["kv_transfer_params"] =
        json!({"fetch_from": pair.endpoints, "remote_engine_id": pair.prefill_id});
    assert_eq!(cached(&pair.decode.post(CHAT, &body).json()), 0);
    assert_eq!(
        pair.decode
            .metric("homing:kv_transfer_received_bytes_total"),
        received
    );
    pair.at_rest();
}

#[test]
fn what_cannot_be_served_is_refused_by_name() {
    let pair = Pair::start(&[], &[]);
    let refused = |node: &Node, params: Value| {
        let body = chat_body(json!({"kv_transfer_params": params, "max_tokens": 1}));
        let (status, code, param) = node.post(CHAT, &body).error();
        (status, code, param.unwrap_or_default())
    };
    let id = fresh_id();
    let whole = json!({
        "do_remote_prefill": true, "transfer_id": id, "remote_engine_id": "x",
        "remote_endpoints": ["tcp://127.0.0.1:1"],
    });
    let with = |name: &str, value: Value| {
        let mut params = whole.clone();
        params[name] = value;
        params
    };
    let rows = [
        (with("transfer_id", json!("xyz")), "transfer_id"),
        (with("transfer_id", Value::Null), "transfer_id"),
        (with("remote_engine_id", Value::Null), "remote_engine_id"),
        (with("remote_endpoints", json!([])), "remote_endpoints"),
        (
            with("remote_endpoints", json!(["http://a"])),
            "remote_endpoints[0]",
        ),
        (with("on_failure", json!("panic")), "on_failure"),
        (with("timeout_ms", json!(0)), "timeout_ms"),
        (with("do_remote_decode", json!(true)), "do_remote_prefill"),
    ];
    for (params, field) in rows {
        let found = refused(&pair.decode, params);
        assert_eq!(
            (found.0, found.2),
            (400, format!("kv_transfer_params.{field}"))
        );
    }
    let (status, code, _) = refused(&pair.prefill, whole.clone());
    assert_eq!((status, &*code), (400, "wrong_role"));
    let (status, code, _) = refused(&pair.decode, json!({"do_remote_decode": true}));
    assert_eq!((status, &*code), (400, "wrong_role"));
    let anonymous = Node::start(&[]);
    let (status, code, _) = refused(&anonymous, whole);
    assert_eq!((status, &*code), (403, "node_token_required"));
    assert_eq!(anonymous.get("/v1/kv/info").status, 403);
    assert_eq!(
        pair.prefill
            .send("GET", "/v1/kv/info", "authorization: x\r\n", b"")
            .status,
        401
    );
}

/// What a proxy does to the bytes of one connection that come from the node behind it.
#[derive(Clone, Copy, Debug)]
enum Harm {
    None,
    /// One bit of the byte at this offset is turned.
    Damage(usize),
    /// The connection ends there.
    Cut(usize),
}

/// Stands before an endpoint; the `n`th connection is harmed as `harm(n)` says.
fn proxy(endpoint: &str, harm: impl Fn(usize) -> Harm + Send + 'static) -> String {
    let target = endpoint
        .strip_prefix("tcp://")
        .expect("a TCP endpoint")
        .to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    thread::spawn(move || {
        for (number, near) in listener.incoming().enumerate() {
            let near = near.expect("a connection");
            let far = TcpStream::connect(&target).expect("the node listens");
            let (near_too, far_too) = (near.try_clone(), far.try_clone());
            let (near_too, far_too) = (near_too.expect("a copy"), far_too.expect("a copy"));
            thread::spawn(move || carry(near_too, far_too, Harm::None));
            let harm = harm(number);
            thread::spawn(move || carry(far, near, harm));
        }
    });
    format!("tcp://{address}")
}

fn carry(mut from: TcpStream, mut to: TcpStream, harm: Harm) {
    let mut bytes = vec![0; 64 << 10];
    let mut done = 0;
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        let mut passed = &mut bytes[..count];
        match harm {
            Harm::Damage(at) if (done..done + count).contains(&at) => passed[at - done] ^= 4,
            Harm::Cut(at) if at < done + count => passed = &mut passed[..at.saturating_sub(done)],
            Harm::None | Harm::Damage(_) | Harm::Cut(_) => {}
        }
        let whole = passed.len() == count;
        if to.write_all(passed).is_err() || !whole {
            break;
        }
        done += count;
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}

/// Would catch a damaged block that is taken for a whole one, and a transfer that begins again from the
/// start where it could go on.
#[test]
fn damage_is_found_and_a_connection_that_breaks_is_taken_up_again() {
    let pair = Pair::start(&[], &[]);
    let mixed = Node::start_with(&[], Some(TOKEN));
    type Harms = fn(usize) -> Harm;
    let rows: [(&str, Harms, bool); 5] = [
        ("nothing", |_| Harm::None, true),
        (
            "damaged once",
            |n| {
                if n == 0 {
                    Harm::Damage(3_000_000)
                } else {
                    Harm::None
                }
            },
            true,
        ),
        (
            "damaged in a head",
            |n| {
                if n == 0 {
                    Harm::Damage(1_200)
                } else {
                    Harm::None
                }
            },
            true,
        ),
        (
            "cut twice",
            |n| {
                if n < 4 {
                    Harm::Cut(2_000_000)
                } else {
                    Harm::None
                }
            },
            true,
        ),
        ("damaged always", |_| Harm::Damage(700_000), false),
    ];
    for (name, harm, comes) in rows {
        let received = pair.decode.metric(RECEIVED);
        let sent = pair.prefill.metric(&Way::Tcp.sent());
        let body = asked(prompt(name, 600), json!({}));
        let through = proxy(&pair.endpoint(Way::Tcp), harm);
        let (first, second) = pair.both(&body, &json!({"remote_endpoints": [through]}));
        assert_eq!(
            (first.status, second.status),
            (200, 200),
            "{name}: {}",
            second.text()
        );
        let expected = mixed.post(CHAT, &body).json();
        assert_eq!(second.json()["choices"], expected["choices"], "{name}");
        let came = pair.decode.metric(RECEIVED) - received;
        assert_eq!(came, f64::from(u8::from(comes)), "{name}");
        let sent = pair.prefill.metric(&Way::Tcp.sent()) - sent;
        let whole = 38.0 * 368_640.0;
        // At most a window of blocks is on its way when a connection breaks, twice.
        assert!(
            sent < 2.3 * whole,
            "{name}: {} of what there was",
            sent / whole
        );
    }
    pair.decode.wait_for_metric(HELD, |held| held == 0.0);
}

/// Whoever does not hold the token gets nothing, says what it likes, and costs nothing that lasts.
#[test]
fn hostile_bytes_do_no_harm() {
    let pair = Pair::start(&[], &[]);
    let stranger = Node::start_with(&["--kv-listen", "tcp://127.0.0.1:0"], Some("another token"));
    let address = pair.endpoint(Way::Tcp);
    let address = address.strip_prefix("tcp://").expect("a TCP endpoint");
    let mut noise = 12345_u64;
    for round in 0..60 {
        let mut stream = TcpStream::connect(address).expect("it listens");
        let mut bytes: Vec<u8> = (0..round * 37)
            .map(|_| {
                noise = noise
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                (noise >> 56) as u8
            })
            .collect();
        if round % 3 == 0 {
            // A message of four gigabytes.
            bytes.splice(..0, [1, 255, 255, 255, 255]);
        } else if round % 3 == 1 {
            bytes.splice(
                ..0,
                *b"\x01\x20\x00\x00\x00{\"type\":\"hello\",\"protocol\":\"x\"}",
            );
        }
        // It may close before it has read everything.
        let _ = stream.write_all(&bytes);
        let _ = stream.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.len() < 4096, "{} bytes for nothing", answer.len());
    }
    let body = asked(prompt("hostile", 100), json!({}));
    let id = fresh_id();
    let mut first = pair.first_leg(&id, &body);
    first["kv_transfer_params"]["remote_engine_id"] = info(&stranger)["engine_id"].clone();
    assert_eq!(pair.prefill.post(CHAT, &first).status, 200);
    let fails = json!({"on_failure": "error"});
    let refused = stranger
        .post(CHAT, &pair.second_leg(&id, &body, &fails))
        .error();
    assert_eq!(
        (refused.0, &*refused.1),
        (503, "kv_transfer_failed"),
        "another token"
    );
    let (_, second) = pair.both(&body, &fails);
    assert_eq!(second.status, 200, "{}", second.text());
}
