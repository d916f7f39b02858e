//! KV events as a consumer sees them. Catches a hash that another process cannot recompute, an
//! event that is missing or out of order, a replay that differs from what was live, a snapshot
//! that does not stand for all history, and a cached prefix that the events did not announce.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use bytes::Bytes;
use cache_index::block::{BLOCK_TOKENS, BlockHash, Namespace, extend_chain, hash_chain};
use cache_index::event::{EngineHash, EventBatch, ExtraKey, KvEvent};
use cache_index::wire::decode_batch;
use prompt::{ChatInput, PromptBuilder, SegmentCache};
use serde_json::{Value, json};
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

use crate::common::{MODEL, Node, cached, content, model_path, user};

const PATIENCE: Duration = Duration::from_secs(60);

/// What the events say is held, with every hash recomputed from tokens and salt alone.
#[derive(Default, Clone, PartialEq, Debug)]
struct Held {
    /// Block → its parent and the salt of its chain.
    blocks: HashMap<BlockHash, (BlockHash, Option<String>)>,
}

impl Held {
    fn apply(&mut self, batch: &EventBatch) {
        batch
            .events
            .iter()
            .for_each(|event| self.apply_event(event));
    }

    fn apply_event(&mut self, event: &KvEvent) {
        match event {
            KvEvent::Stored {
                block_hashes,
                parent,
                token_ids,
                block_size,
                extra_keys,
                ..
            } => {
                assert_eq!(*block_size, BLOCK_TOKENS);
                let (parent, salt) = match parent.as_ref().map(ours) {
                    None => (BlockHash::ROOT, salt(extra_keys.of(0))),
                    Some(parent) => {
                        let known = self.blocks.get(&parent).expect("a parent is held");
                        (parent, known.1.clone())
                    }
                };
                let namespace = Namespace::new(MODEL, None, salt.as_deref());
                let recomputed = extend_chain(&namespace, parent, token_ids);
                assert_eq!(
                    recomputed,
                    block_hashes.iter().map(ours).collect::<Vec<_>>()
                );
                let mut before = parent;
                for hash in recomputed {
                    let replaced = self.blocks.insert(hash, (before, salt.clone()));
                    assert!(replaced.is_none(), "stored twice");
                    before = hash;
                }
            }
            KvEvent::Removed { block_hashes, .. } => {
                for hash in block_hashes.iter().map(ours) {
                    assert!(
                        self.blocks.remove(&hash).is_some(),
                        "removed what was not held"
                    );
                    let orphan = self.blocks.values().any(|(parent, _)| *parent == hash);
                    assert!(!orphan, "a parent went before its child");
                }
            }
            KvEvent::Cleared => self.blocks.clear(),
        }
    }

    fn overlap(&self, chain: &[BlockHash]) -> usize {
        chain
            .iter()
            .take_while(|hash| self.blocks.contains_key(hash))
            .count()
    }
}

fn ours(hash: &EngineHash) -> BlockHash {
    let EngineHash::Bytes(bytes) = hash else {
        panic!("our hashes are bytes: {hash:?}")
    };
    BlockHash(bytes[..].try_into().expect("16 bytes"))
}

fn salt(keys: &[ExtraKey]) -> Option<String> {
    match keys {
        [] => None,
        [ExtraKey::Text(salt)] => Some(salt.to_string()),
        other => panic!("one salt at most: {other:?}"),
    }
}

fn seq(frame: &Bytes) -> u64 {
    u64::from_be_bytes(frame[..].try_into().expect("8 bytes"))
}

/// A subscriber that keeps what it got by number.
struct Consumer {
    subscriber: SubSocket,
    replay: String,
    live: BTreeMap<u64, Bytes>,
}

impl Consumer {
    async fn new(node: &Node) -> Consumer {
        let endpoint = |name: &str| node.ready[name].as_str().expect("an endpoint").to_owned();
        let mut subscriber = SubSocket::new();
        subscriber
            .connect(&endpoint("events"))
            .await
            .expect("the node publishes");
        subscriber.subscribe("kv@").await.expect("a subscription");
        Consumer {
            subscriber,
            replay: endpoint("replay"),
            live: BTreeMap::new(),
        }
    }

    /// Takes live batches until there is one with this number.
    async fn wait_for(&mut self, wanted: u64) {
        while self
            .live
            .last_key_value()
            .is_none_or(|(last, _)| *last < wanted)
        {
            let message = tokio::time::timeout(PATIENCE, self.subscriber.recv()).await;
            let frames = message.expect("in time").expect("a message").into_vec();
            let [topic, number, payload] = &frames[..] else {
                panic!("three frames")
            };
            assert_eq!(topic, format!("kv@{MODEL}").as_bytes());
            let replaced = self.live.insert(seq(number), payload.clone());
            assert!(replaced.is_none(), "a number used twice");
        }
    }

    /// Asks for everything from a number on.
    async fn replay(&self, start: u64) -> Vec<(u64, Bytes)> {
        let mut dealer = DealerSocket::new();
        dealer
            .connect(&self.replay)
            .await
            .expect("the node replays");
        let mut request = ZmqMessage::from(Bytes::new());
        request.push_back(Bytes::copy_from_slice(&start.to_be_bytes()));
        dealer.send(request).await.expect("sent");
        let mut batches = Vec::new();
        loop {
            let message = tokio::time::timeout(PATIENCE, dealer.recv()).await;
            let frames = message.expect("in time").expect("a message").into_vec();
            let [empty, topic, number, payload] = &frames[..] else {
                panic!("four frames")
            };
            assert!(empty.is_empty());
            if *number == (-1_i64).to_be_bytes()[..] {
                assert!(topic.is_empty() && payload.is_empty());
                return batches;
            }
            assert_eq!(topic, format!("kv@{MODEL}").as_bytes());
            batches.push((seq(number), payload.clone()));
        }
    }
}

fn batch(payload: &Bytes) -> EventBatch {
    decode_batch(payload).expect("a batch")
}

fn held(batches: &[(u64, Bytes)]) -> Held {
    let mut held = Held::default();
    batches
        .iter()
        .for_each(|(_, payload)| held.apply(&batch(payload)));
    held
}

struct Prompts {
    builder: PromptBuilder,
    segments: SegmentCache,
}

impl Prompts {
    fn load() -> Prompts {
        let file = std::fs::read(model_path()).expect("the model can be read");
        let header = prompt::gguf::Header::parse(&file).expect("a GGUF file");
        let builder = PromptBuilder::from_gguf(&header).expect("a known tokenizer");
        Prompts {
            builder,
            segments: SegmentCache::new(1 << 20),
        }
    }

    fn tokens(&self, messages: &Value) -> Vec<u32> {
        let messages = messages.as_array().expect("messages");
        let input = ChatInput {
            messages,
            tools: None,
            template_kwargs: None,
            unix_seconds: 0,
        };
        self.builder
            .chat(&input, &self.segments)
            .expect("a valid conversation")
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("rt")
}

const ENDPOINTS: [&str; 4] = [
    "--events",
    "tcp://127.0.0.1:0",
    "--replay",
    "tcp://127.0.0.1:0",
];

#[test]
fn events_say_what_is_held_and_replay_says_the_same() {
    let node = Node::start(&ENDPOINTS);
    let prompts = Prompts::load();
    runtime().block_on(async {
        let mut consumer = Consumer::new(&node).await;
        let mut messages = user(&"Rivers run to the sea. ".repeat(20));
        for turn in 0..6 {
            let salt = ["tenant a", "tenant b"][turn % 2];
            let before = held(&consumer.replay(0).await);
            let prompt = prompts.tokens(&messages);
            let chain = hash_chain(&Namespace::new(MODEL, None, Some(salt)), &prompt);
            let expected = 16 * before.overlap(&chain).min((prompt.len() - 1) / 16);
            let fields = json!({"messages": messages, "max_tokens": 40, "cache_salt": salt});
            let answer = node.chat(fields);
            assert_eq!(
                cached(&answer),
                expected as u64,
                "turn {turn}: as the events announced"
            );
            assert!(turn < 2 || expected > 0, "the cache is used");
            let list = messages.as_array_mut().expect("messages");
            list.push(json!({"role": "assistant", "content": content(&answer)}));
            list.push(json!({"role": "user", "content": format!("And then, {turn}?")}));
        }
        let all = consumer.replay(0).await;
        let numbers: Vec<u64> = all.iter().map(|(number, _)| *number).collect();
        assert_eq!(numbers, (0..all.len() as u64).collect::<Vec<_>>(), "no gap");
        consumer.wait_for(all.len() as u64 - 1).await;
        for (number, payload) in &consumer.live {
            assert_eq!(
                *payload, all[*number as usize].1,
                "live equals replayed, {number}"
            );
        }
        let published = node.metric("homing:kv_blocks_published");
        assert_eq!(held(&all).blocks.len() as f64, published);
        let boots: Vec<_> = all
            .iter()
            .map(|(_, payload)| batch(payload).boot_id)
            .collect();
        assert!(
            boots[0].is_some() && boots.iter().all(|boot| *boot == boots[0]),
            "one life"
        );
        let times = all.iter().map(|(_, payload)| batch(payload).timestamp);
        assert!(times.is_sorted(), "time does not run backwards");
        assert_eq!(consumer.replay(3).await, all[3..], "from the middle");
        assert_eq!(consumer.replay(1 << 40).await, [], "from the future");
    });
}

#[test]
fn a_late_joiner_gets_a_snapshot_and_evictions_are_told() {
    // 40 blocks and a log of 4 batches: both overflow.
    let small = ["--kv-memory", "15MiB", "--replay-batches", "4"];
    let node = Node::start(&[&ENDPOINTS[..], &small[..]].concat());
    runtime().block_on(async {
        let mut consumer = Consumer::new(&node).await;
        let ask = |which: usize| {
            let text = format!("{which} {}", "Rivers run to the sea. ".repeat(30));
            node.chat(json!({"messages": user(&text), "max_tokens": 20, "cache_salt": "s"}));
        };
        (0..8).for_each(ask);
        let early = consumer.replay(0).await;
        assert!(batch(&early[0].1).is_snapshot(), "history before the log is replaced");
        (8..12).for_each(ask);
        let joined = consumer.replay(0).await;
        let last = joined.last().expect("a batch").0;
        consumer.wait_for(last).await;
        assert_eq!(held(&joined).blocks.len() as f64, node.metric("homing:kv_blocks_published"));
        // The snapshot's number is the last that it includes: live batches go on from there.
        let mut grown = held(&early);
        let since = early.last().expect("a batch").0 + 1;
        consumer.live.range(since..=last).for_each(|(_, payload)| grown.apply(&batch(payload)));
        assert_eq!(grown, held(&joined), "early snapshot and live batches, or late snapshot");
        // Whoever heard everything from the start knows the same. The subscription may have come
        // after the first batches; then there is nothing to compare.
        if consumer.live.first_key_value().is_some_and(|(number, _)| *number == 0) {
            let live: Vec<_> = consumer.live.clone().into_iter().collect();
            assert_eq!(held(&live), held(&joined));
            let removals = |event: &KvEvent| matches!(event, KvEvent::Removed { .. });
            assert!(live.iter().any(|(_, payload)| batch(payload).events.iter().any(removals)));
        }
        // A joiner that asks for what the log still has gets no snapshot.
        let recent = consumer.replay(last).await;
        assert!(matches!(&recent[..], [(seq, payload)] if *seq == last && *payload == consumer.live[seq]));
    });
}

#[test]
fn nobody_needs_to_listen() {
    // Connects, subscribes, and never reads: the node must not care.
    let node = Node::start(&ENDPOINTS);
    let runtime = runtime();
    let deaf = runtime.block_on(Consumer::new(&node));
    for which in 0..20 {
        let text = format!("{which} {}", "Rivers run to the sea. ".repeat(10));
        node.chat(json!({"messages": user(&text), "max_tokens": 2}));
    }
    drop(deaf);
    node.wait_for_metric("homing:kv_blocks_held", |held| held == 0.0);
}
