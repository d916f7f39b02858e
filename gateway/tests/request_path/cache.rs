//! Fault H11: catches cache credit that crosses a tenant's border, and a turn pinned to a busy
//! node for a hit that cannot happen.

use std::time::Duration;

use cache_index::block::{Namespace, creditable_blocks, hash_chain};
use cache_index::event::{EngineHash, EventBatch, ExtraKeys, GroupKind, KvEvent, Medium};
use cache_index::wire::encode_batch;
use prompt::gguf::Header;
use prompt::{ChatInput, PromptBuilder, SegmentCache};
use serde_json::Value;
use tokio::runtime::Runtime;
use zeromq::{PubSocket, Socket, SocketSend, ZmqMessage};

use crate::support::client::{Answer, Connection};
use crate::support::node::{Act, MODEL, Node};
use crate::support::{Gateway, Stream, chat, eventually, model_file};

/// A node's event stream, published by hand.
struct Events {
    runtime: Runtime,
    socket: PubSocket,
    seq: u64,
}

impl Events {
    fn bind() -> (Self, String) {
        let runtime = Runtime::new().expect("a runtime");
        let (socket, endpoint) = runtime.block_on(async {
            let mut socket = PubSocket::new();
            let endpoint = socket.bind("tcp://127.0.0.1:0").await.expect("a free port");
            (socket, endpoint)
        });
        (
            Self {
                runtime,
                socket,
                seq: 0,
            },
            endpoint.to_string(),
        )
    }

    /// Says that the node holds all full blocks of `tokens` under `salt`.
    fn stored(&mut self, tokens: &[u32], salt: &str) {
        self.stored_in(None, tokens, salt);
    }

    fn stored_in(&mut self, medium: Option<Medium>, tokens: &[u32], salt: &str) {
        let hashes = hash_chain(&Namespace::new(MODEL, None, Some(salt)), tokens);
        let event = KvEvent::Stored {
            block_hashes: hashes
                .iter()
                .map(|hash| EngineHash::Bytes(hash.0.into()))
                .collect(),
            parent: None,
            token_ids: tokens[..hashes.len() * 16].to_vec(),
            block_size: 16,
            medium,
            lora_name: None,
            extra_keys: ExtraKeys::salt(salt),
            group_idx: None,
            group_kind: GroupKind::default(),
        };
        let batch = EventBatch {
            timestamp: 1.0,
            events: vec![event],
            dp_rank: None,
            boot_id: None,
        };
        let mut message = ZmqMessage::from(format!("kv@{MODEL}"));
        message.push_back(self.seq.to_be_bytes().to_vec().into());
        message.push_back(encode_batch(&batch).into());
        self.seq += 1;
        self.runtime
            .block_on(self.socket.send(message))
            .expect("a subscriber or none");
    }
}

fn tokens_of(body: &Value) -> Vec<u32> {
    let file = std::fs::read(model_file()).expect("the model");
    let builder = PromptBuilder::from_gguf(&Header::parse(&file).unwrap()).unwrap();
    let messages = body["messages"].as_array().unwrap();
    let input = ChatInput {
        messages,
        tools: None,
        template_kwargs: None,
        unix_seconds: 0,
    };
    builder.chat(&input, &SegmentCache::new(1 << 20)).unwrap()
}

fn ask(gateway: &Gateway, key: &str, body: &Value) -> Answer {
    let authorization = format!("authorization: Bearer {key}");
    Connection::open(gateway.addr)
        .request(
            "POST",
            "/v1/chat/completions",
            &[&authorization],
            body.to_string().as_bytes(),
        )
        .answer()
}

fn expected_cached(answer: &Answer) -> usize {
    assert_eq!(answer.status, 200, "{answer:?}");
    answer
        .header("x-homing-expected-cached")
        .unwrap()
        .parse()
        .unwrap()
}

#[test]
fn h11_no_credit_crosses_a_tenants_border() {
    let (mut events, endpoint) = Events::bind();
    let (mut warm, idle) = (Node::start(), Node::start());
    warm.events = Some(endpoint);
    let gateway = Gateway::exact(&[&warm, &idle]);
    let body = chat(
        Stream::No,
        &"every tenant sends this very prompt. ".repeat(40),
    );
    let tokens = tokens_of(&body);
    assert_eq!(expected_cached(&ask(&gateway, &gateway.key, &body)), 0);
    let sent = [&warm, &idle]
        .into_iter()
        .find_map(|node| node.received().pop())
        .unwrap();
    let salt = sent.body["cache_salt"].as_str().unwrap().to_owned();

    // The first tenant's prompt is credited, exactly, once the node says that it holds it.
    let credited = 16 * creditable_blocks(tokens.len());
    eventually("the node's blocks are known", || {
        events.stored(&tokens, &salt);
        let answer = ask(&gateway, &gateway.key, &body);
        let cached = expected_cached(&answer);
        assert!(cached == 0 || cached == credited, "{cached} of {credited}");
        cached == credited && answer.header("x-homing-node") == Some("node-0")
    });

    // Three of its requests keep that node busy.
    for _ in 0..3 {
        warm.script(vec![Act::AwaitClose(Duration::from_secs(30))]);
    }
    let before = warm.received().len();
    let busy: Vec<_> = (0..3).map(|_| gateway.begin_chat(&[], &body)).collect();
    eventually("all three are at the node", || {
        warm.received().len() == before + 3
    });

    // The other tenant gets no credit for them, whatever salt it claims, and goes by load.
    let mut forged = body.clone();
    forged["cache_salt"] = salt.as_str().into();
    for body in [&body, &forged] {
        let answer = ask(&gateway, &gateway.other_key, body);
        assert_eq!(answer.header("x-homing-node"), Some("node-1"));
        let id = answer.header("x-request-id").unwrap();
        let path = format!("/admin/decisions/{id}");
        eventually("the decision is told", || {
            gateway.admin_get(&path).status == 200
        });
        let told = gateway.admin_get(&path).json();
        let candidates = told["decisions"][0]["attempts"][0]["candidates"].clone();
        let at_warm = candidates
            .as_array()
            .unwrap()
            .iter()
            .find(|candidate| candidate["node"] == "node-0");
        assert_eq!(at_warm.unwrap()["cached_tokens"], 0, "{told}");
        assert_ne!(
            idle.received().pop().unwrap().body["cache_salt"],
            salt.as_str()
        );
    }
    drop(busy);
    gateway.assert_idle();
}

#[test]
fn blocks_under_a_foreign_salt_are_nobodys() {
    let (mut events, endpoint) = Events::bind();
    let mut node = Node::start();
    node.events = Some(endpoint);
    let gateway = Gateway::exact(&[&node]);
    let body = chat(Stream::No, &"a prompt under a salt of ours. ".repeat(40));
    let tokens = tokens_of(&body);
    // A salt that the gateway never issued makes a chain that no request can ask for.
    for _ in 0..20 {
        events.stored(&tokens, "a-foreign-salt");
        assert_eq!(expected_cached(&ask(&gateway, &gateway.key, &body)), 0);
    }
    gateway.assert_idle();
}

#[test]
fn a_node_is_told_what_its_slower_tiers_are_expected_to_hold() {
    let (mut events, endpoint) = Events::bind();
    let mut node = Node::start();
    node.events = Some(endpoint);
    node.disk_ms = Some(0.01);
    let gateway = Gateway::exact(&[&node]);
    let body = chat(Stream::No, &"this prompt lies on a disk. ".repeat(40));
    let tokens = tokens_of(&body);
    assert_eq!(expected_cached(&ask(&gateway, &gateway.key, &body)), 0);
    let sent = node.received().pop().unwrap();
    assert_eq!(sent.header("x-kv-prefetch-tokens"), None);
    let salt = sent.body["cache_salt"].as_str().unwrap().to_owned();
    let credited = 16 * creditable_blocks(tokens.len());
    eventually("the disk's blocks are known", || {
        events.stored_in(Some(Medium::Disk), &tokens, &salt);
        expected_cached(&ask(&gateway, &gateway.key, &body)) == credited
    });
    let sent = node.received().pop().unwrap();
    let told = sent.header("x-kv-prefetch-tokens");
    assert_eq!(told, Some(&*credited.to_string()));
    gateway.assert_idle();
}
