//! Nodes come and go, are loaded and fail; scripted ones over real sockets.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::time::Duration;

use bytes::Bytes;
use cache_index::block::{Namespace, hash_chain};
use cache_index::event::GroupKind;
use cache_index::event::{EngineHash, EventBatch, ExtraKeys, KvEvent};
use cache_index::wire::encode_batch;
use policies::pick::Fetched;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use zeromq::{PubSocket, RouterSocket, Socket as _, SocketRecv as _, SocketSend as _, ZmqMessage};

use super::*;
use crate::tasks::Phase;

mod knowledge;

const MODEL: &str = "m";
const SALT: &str = "0123456789abcdef";

fn config(addr: SocketAddr, events: Option<String>, replay: Option<String>) -> NodeConfig {
    NodeConfig {
        id: NodeId::new("n"),
        addr,
        host: addr.to_string(),
        events,
        replay,
        region: "local".to_owned(),
        duty: crate::config::Duty::default(),
        fetch_ms_per_block: policies::view::FetchCosts::default(),
    }
}

fn idle_node() -> (Arc<Fleet>, Arc<Node>) {
    let fleet = Fleet::new(&[config(([127, 0, 0, 1], 9).into(), None, None)]);
    let node = Arc::clone(&fleet.nodes()[0]);
    (fleet, node)
}

/// A prompt that no cache has.
fn sent(prompt_tokens: u64, output_tokens: u64, chain: &[BlockHash]) -> Dispatch<'_> {
    Dispatch {
        prompt_tokens,
        cached_tokens: 0,
        fetched: Fetched::default(),
        output_tokens,
        chain,
        session: policies::view::SessionKey(1),
        part: Part::Whole,
    }
}

/// Would catch load that is not given back, or given back twice, however a request ends.
#[test]
fn a_guard_gives_back_what_it_took() {
    let (fleet, node) = idle_node();
    let load = |node: &Node| {
        let view = node.view(Tiers::default());
        (
            node.requests_in_flight(),
            view.inflight_prefill_tokens,
            view.inflight_decode_tokens,
        )
    };
    let mut first = fleet.dispatch(&node, &sent(1000, 50, &[]));
    let second = fleet.dispatch(&node, &sent(10, 5, &[]));
    // A little more than its tokens: they attend to each other.
    let (requests, prefill, decode) = load(&node);
    assert_eq!((requests, decode), (2, 55));
    assert!((1010..1030).contains(&prefill), "{prefill}");
    first.first_token();
    first.first_token();
    let (requests, prefill, decode) = load(&node);
    assert_eq!((requests, decode), (2, 55));
    assert!((1..=10).contains(&prefill), "{prefill}");
    first.decoded(20);
    assert_eq!(load(&node).2, 35);
    first.decoded(1000);
    assert_eq!(load(&node).2, 5);
    drop(first);
    drop(second);
    assert_eq!(load(&node), (0, 0, 0));
    let rate = node.view(Tiers::default()).prefill_tokens_per_s;
    assert!(rate > 0.0);
    // What fails at once says nothing of how fast the node is.
    drop(fleet.dispatch(&node, &sent(100_000, 1, &[])));
    assert_eq!(load(&node), (0, 0, 0));
    let after = node.view(Tiers::default()).prefill_tokens_per_s;
    assert!((after - rate).abs() < 1e-9, "{after} after {rate}");
}

/// Would catch a session that counts on two nodes, or one that is promised a prefix which its node's
/// pool has no room for.
#[test]
fn a_pool_keeps_what_its_last_sessions_used() {
    /// What the index says, which nothing limits while the pool keeps all that a session used.
    const HELD: usize = 1000;
    let (fleet, node) = idle_node();
    node.set_facts(|facts| facts.pool_blocks = 100);
    let of = |session: u128, prompt_tokens| Dispatch {
        session: policies::view::SessionKey(session),
        ..sent(prompt_tokens, 1, &[])
    };
    let seen = |session: u128, blocks| {
        let session = policies::view::SessionKey(session);
        node.view_for(Tiers::on_device(HELD), session, blocks)
    };
    drop(fleet.dispatch(&node, &of(1, 80 * 16)));
    assert_eq!(seen(1, 80).overlap_blocks, HELD);
    assert!(seen(2, 20).kept_ms.is_infinite() && seen(2, 30).kept_ms.is_finite());
    drop(fleet.dispatch(&node, &of(2, 40 * 16)));
    // The end of the older prompt is pushed out.
    assert_eq!(
        (seen(2, 40).overlap_blocks, seen(1, 80).overlap_blocks),
        (HELD, 60)
    );
    node.left_by(policies::view::SessionKey(2));
    assert_eq!(seen(1, 80).overlap_blocks, HELD);
}

/// Would catch a tier that is counted on though nobody knows its speed, or at another one than it has.
#[test]
fn what_a_fetch_costs_is_told_by_the_node_or_else_configured() {
    let configured = policies::view::FetchCosts {
        host_ms: 5.0,
        disk_ms: 0.0,
        shared_ms: 7.0,
    };
    let fleet = Fleet::new(&[NodeConfig {
        fetch_ms_per_block: configured,
        ..config(([127, 0, 0, 1], 9).into(), None, None)
    }]);
    let node = Arc::clone(&fleet.nodes()[0]);
    assert_eq!(node.view(Tiers::default()).fetch_ms_per_block, configured);
    let tier = |blocks, block_ms| NodeTier { blocks, block_ms };
    node.set_facts(|facts| {
        facts.tiers = NodeTiers {
            host: tier(6400, 0.5),
            disk: tier(64_000, 3.0),
        };
    });
    let told = node.view(Tiers::default()).fetch_ms_per_block;
    assert_eq!(
        (told.host_ms, told.disk_ms, told.shared_ms),
        (0.5, 3.0, 7.0)
    );
    let gate = node.facts().tiers.for_gate(told, 32);
    assert_eq!((gate[0].blocks, gate[1].blocks), (200, 2000));
    assert!((gate[0].fetch_ms_per_token * 16.0 - 0.5).abs() < 1e-12);
    // Not measured yet, or nonsense.
    for block_ms in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        node.set_facts(|facts| facts.tiers.host = tier(6400, block_ms));
        assert_eq!(node.view(Tiers::default()).fetch_ms_per_block.host_ms, 5.0);
    }
}

/// Would catch a node that is tried again and again after it has failed, or never again.
#[test]
fn failures_take_a_node_out() {
    let (fleet, node) = idle_node();
    node.set_facts(|facts| facts.state = NodeState::Up);
    fleet.failed(&node, Failure::Broken);
    fleet.succeeded(&node);
    for _ in 0..3 {
        assert_eq!(node.state(), NodeState::Up);
        fleet.failed(&node, Failure::Status(500));
    }
    assert_eq!(node.state(), NodeState::BreakerOpen);
    let (fleet, node) = idle_node();
    node.set_facts(|facts| facts.state = NodeState::Up);
    fleet.failed(&node, Failure::Connect);
    assert!(matches!(node.state(), NodeState::Down { .. }));
}

async fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let reached = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let limit = Duration::from_secs(20);
    tokio::time::timeout(limit, reached)
        .await
        .unwrap_or_else(|_| panic!("never happened: {what}"));
}

/// A scripted node: its side routes, and the status that `/health` answers.
struct Side {
    addr: SocketAddr,
    health: Arc<AtomicU16>,
    /// When its process says it started: another value is another process.
    started_s: Arc<AtomicU16>,
    stop: Arc<AtomicBool>,
}

impl Side {
    async fn start(tasks: &Tasks, addr: SocketAddr) -> Self {
        let listener = TcpListener::bind(addr).await.unwrap();
        let addr = listener.local_addr().unwrap();
        let health = Arc::new(AtomicU16::new(503));
        let stop = Arc::new(AtomicBool::new(false));
        let started_s = Arc::new(AtomicU16::new(5));
        let (answer, stopped) = (Arc::clone(&health), Arc::clone(&stop));
        let started = Arc::clone(&started_s);
        tasks.spawn("scripted-node", async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                if stopped.load(Ordering::Relaxed) {
                    return;
                }
                let mut head = vec![0; 4096];
                let length = stream.read(&mut head).await.unwrap_or(0);
                let head = String::from_utf8_lossy(&head[..length]).into_owned();
                let metrics = format!(
                    "process_start_time_seconds {}\n",
                    started.load(Ordering::Relaxed)
                );
                let (status, body) = match head.split(' ').nth(1) {
                    Some("/health") => (answer.load(Ordering::Relaxed), ""),
                    Some("/v1/models") => (200, r#"{"data":[{"id":"m","max_model_len":512}]}"#),
                    Some("/metrics") => (200, metrics.as_str()),
                    _ => (404, ""),
                };
                let length = body.len();
                let text = format!(
                    "HTTP/1.1 {status} X\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
                );
                let _ = stream.write_all(text.as_bytes()).await;
            }
        });
        Self {
            addr,
            health,
            started_s,
            stop,
        }
    }

    /// Stops accepting.
    async fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = tokio::net::TcpStream::connect(self.addr).await;
    }
}

/// Would catch a dead node that stays in, a living one that stays out, or a loading one that is used.
#[tokio::test(flavor = "multi_thread")]
async fn health_takes_a_node_out_and_back_in() {
    let tasks = Tasks::new(tokio::runtime::Handle::current());
    let side = Side::start(&tasks, ([127, 0, 0, 1], 0).into()).await;
    let fleet = Fleet::new(&[config(side.addr, None, None)]);
    let node = Arc::clone(&fleet.nodes()[0]);
    fleet.start("token", &tasks);
    eventually(
        "it is loading",
        || matches!(node.state(), NodeState::Down { why } if why.contains("loading")),
    )
    .await;
    side.health.store(200, Ordering::Relaxed);
    eventually("it is up", || node.state() == NodeState::Up).await;
    assert_eq!(
        (
            node.model().as_deref(),
            node.view(Tiers::default()).context_max
        ),
        (Some(MODEL), 512)
    );
    side.health.store(503, Ordering::Relaxed);
    eventually("it is draining", || node.state() == NodeState::Draining).await;
    side.health.store(200, Ordering::Relaxed);
    eventually("it is up again", || node.state() == NodeState::Up).await;
    side.stop().await;
    eventually("it is down", || {
        matches!(node.state(), NodeState::Down { .. })
    })
    .await;
    let again = Side::start(&tasks, side.addr).await;
    again.health.store(200, Ordering::Relaxed);
    eventually("it is back", || node.state() == NodeState::Up).await;
    tasks.advance(Phase::Stopping);
}

/// Would catch a restarted node that is kept at one request by the failures of its last process.
#[tokio::test(flavor = "multi_thread")]
async fn another_process_starts_without_the_failures_of_the_last() {
    let tasks = Tasks::new(tokio::runtime::Handle::current());
    let side = Side::start(&tasks, ([127, 0, 0, 1], 0).into()).await;
    side.health.store(200, Ordering::Relaxed);
    let fleet = Fleet::new(&[config(side.addr, None, None)]);
    let node = Arc::clone(&fleet.nodes()[0]);
    fleet.start("token", &tasks);
    eventually("it is up", || node.state() == NodeState::Up).await;
    for _ in 0..3 {
        fleet.failed(&node, Failure::Status(500));
    }
    assert_eq!(node.state(), NodeState::BreakerOpen);
    eventually("a trial is allowed", || node.state() == NodeState::Up).await;
    // The trial goes on for as long as its answer does, and nothing else may run meanwhile.
    let trial = fleet.dispatch(&node, &sent(1, 1, &[]));
    assert_eq!(node.state(), NodeState::BreakerOpen);
    side.started_s.store(6, Ordering::Relaxed);
    eventually("the new process takes all it can", || {
        node.state() == NodeState::Up
    })
    .await;
    drop(trial);
    tasks.advance(Phase::Stopping);
}

fn stored(tokens: &[u32], boot: &str) -> EventBatch {
    // An engine's own hashes: one for each block, whatever they are.
    let hash = |at: usize| {
        let token = tokens[at * 16].to_be_bytes();
        EngineHash::Bytes(Box::from(&token.repeat(4)[..]))
    };
    EventBatch {
        timestamp: 1.0,
        events: vec![KvEvent::Stored {
            block_hashes: (0..tokens.len() / 16).map(hash).collect(),
            parent: None,
            token_ids: tokens.to_vec(),
            block_size: 16,
            medium: None,
            lora_name: None,
            extra_keys: ExtraKeys::salt(SALT),
            group_idx: None,
            group_kind: GroupKind::default(),
        }],
        dp_rank: None,
        boot_id: Some(boot.to_owned()),
    }
}

fn frames(parts: &[&[u8]]) -> ZmqMessage {
    let mut message = ZmqMessage::from(Bytes::copy_from_slice(parts[0]));
    for part in &parts[1..] {
        message.push_back(Bytes::copy_from_slice(part));
    }
    message
}

/// A scripted node's events: publishes live ones, and replays `history` to whoever asks.
struct Events {
    publisher: PubSocket,
    replayer: tokio::task::JoinHandle<()>,
}

impl Events {
    async fn start(
        tasks: &Tasks,
        live: &str,
        replay: &str,
        history: Vec<EventBatch>,
    ) -> (Self, String, String) {
        let mut publisher = PubSocket::new();
        let live = publisher.bind(live).await.unwrap().to_string();
        let mut router = RouterSocket::new();
        let replay = router.bind(replay).await.unwrap().to_string();
        let replayer = tasks.spawn("scripted-replay", async move {
            while let Ok(request) = router.recv().await {
                let asked: Vec<Bytes> = request.iter().cloned().collect();
                let peer = asked[0].clone();
                let from = u64::from_be_bytes(asked.last().unwrap()[..].try_into().unwrap());
                for (seq, batch) in history
                    .iter()
                    .enumerate()
                    .skip(usize::try_from(from).unwrap())
                {
                    let seq = (seq as u64).to_be_bytes();
                    let reply = frames(&[&peer, b"", b"kv@m", &seq, &encode_batch(batch)]);
                    router.send(reply).await.unwrap();
                }
                let end = frames(&[&peer, b"", b"", &u64::MAX.to_be_bytes(), b""]);
                router.send(end).await.unwrap();
            }
        });
        (
            Self {
                publisher,
                replayer,
            },
            live,
            replay,
        )
    }

    async fn publish(&mut self, seq: u64, batch: &EventBatch) {
        let message = frames(&[b"kv@m", &seq.to_be_bytes(), &encode_batch(batch)]);
        self.publisher.send(message).await.unwrap();
    }

    async fn stop(self) {
        self.replayer.abort();
        let _ = self.replayer.await;
        self.publisher.close().await;
    }
}

/// Would catch a late joiner that never learns the past, a live event that is lost, a salt that is
/// not ours being credited, and (H09) a restarted node that keeps the blocks of its last life.
#[tokio::test(flavor = "multi_thread")]
async fn events_are_replayed_followed_and_forgotten() {
    let tasks = Tasks::new(tokio::runtime::Handle::current());
    let side = Side::start(&tasks, ([127, 0, 0, 1], 0).into()).await;
    side.health.store(200, Ordering::Relaxed);
    let first: Vec<u32> = (0..64).collect();
    let second: Vec<u32> = (1000..1032).collect();
    let any = "tcp://127.0.0.1:0";
    let (mut events, live, replay) =
        Events::start(&tasks, any, any, vec![stored(&first, "life 1")]).await;
    let fleet = Fleet::new(&[config(side.addr, Some(live.clone()), Some(replay.clone()))]);
    fleet.issue_salt(SALT);
    let node = Arc::clone(&fleet.nodes()[0]);
    fleet.start("token", &tasks);
    let chain = |tokens: &[u32], salt| hash_chain(&Namespace::new(MODEL, None, salt), tokens);
    let held = |tokens: &[u32], salt| {
        fleet
            .overlaps(MODEL, &chain(tokens, salt))
            .first()
            .map_or(0, |(_, blocks)| *blocks)
    };
    eventually("the past is replayed", || held(&first, Some(SALT)) == 4).await;
    assert_eq!(node.trust(), Trust::Exact);
    assert_eq!((held(&first, None), held(&first, Some("other"))), (0, 0));
    events.publish(1, &stored(&second, "life 1")).await;
    eventually("a live event arrives", || held(&second, Some(SALT)) == 2).await;
    let resyncs = node.resyncs();

    events.stop().await;
    eventually("a lost connection is forgotten", || {
        held(&first, Some(SALT)) == 0
    })
    .await;
    assert_eq!(fleet.held_blocks(&node), 0);
    let (events, _, _) =
        Events::start(&tasks, &live, &replay, vec![stored(&second, "life 2")]).await;
    eventually("the new life is learnt", || held(&second, Some(SALT)) == 2).await;
    assert_eq!(held(&first, Some(SALT)), 0);
    assert!(node.resyncs() > resyncs);
    events.stop().await;
    tasks.advance(Phase::Stopping);
}
