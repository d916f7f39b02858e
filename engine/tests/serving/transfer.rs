//! Prefill on one node, decode on another, over both ways that blocks can take. Catches an answer that
//! depends on where its prompt was computed, a transfer that somebody else can take or use twice, and
//! blocks that stay pinned, requests that hang or answers that are lost when a node, a client or the
//! connection goes away in the middle.

mod elsewhere;
mod faults;
mod harm;
mod refusals;

use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::common::{Node, Reply, TOKEN, cached, chat_body, content, user};

const CHAT: &str = "/v1/chat/completions";
const HELD: &str = "homing:kv_blocks_held";
const RECEIVED: &str = "homing:kv_transfers_received_total";
const COMPUTED: &str = "homing:computed_tokens_total";
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

/// Prompts of every kind: name, messages, other fields.
fn every_kind() -> Vec<(&'static str, Value, Value)> {
    let form = json!({
        "response_format": {"type": "json_object"}, "max_tokens": 60, "ignore_eos": false,
    });
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
        ("a form", prompt("form", 100), form),
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
    rows
}

/// Would catch a block in the wrong place, a position that was not computed, and a first token that is
/// counted, told or continued wrongly: numbers in JSON are told to their last bit.
#[test]
fn an_answer_does_not_depend_on_where_its_prompt_was_computed() {
    let pair = Pair::start(&[], &[]);
    let mixed = Node::start_with(&[], Some(TOKEN));
    let rows = every_kind();
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
            let before = pair.decode.metric(COMPUTED);
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
                let computed = pair.decode.metric(COMPUTED) - before;
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
        let (decode, first) = thread::scope(|scope| {
            let decode = scope.spawn(|| pair.decode.stream(CHAT, &second));
            // It waits for the other half, which comes later.
            pair.decode
                .wait_for_metric("vllm:num_requests_waiting", |count| count == 1.0);
            let first = pair.prefill.post(CHAT, &pair.first_leg(&id, &body));
            (decode.join().expect("it begins"), first)
        });
        assert_eq!(
            (decode.status, first.status),
            (200, 200),
            "{}",
            first.text()
        );
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
    let streamed = pair
        .prefill
        .metric("homing:kv_transfer_streamed_bytes_total");
    assert!(streamed > 0.0, "layers left while others were computed");
    let blocks = held / 368_640.0;
    assert!(
        (15.0..30.0).contains(&blocks),
        "{blocks} blocks, each sent once"
    );
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
