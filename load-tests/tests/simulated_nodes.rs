//! What does the real gateway do when the nodes behind it lose what it believes they hold?
//!
//! Simulated nodes over real HTTP and KV events. In each test a node holds a prompt, the gateway
//! knows it, and something happens to the node. Right is: no answer is ever expected to be read from
//! what is gone, the node serves on or again without a restart of the gateway, and is credited with
//! what it holds then.

#[path = "support/simulated.rs"]
mod simulated;
mod support;

use load_tests::chat::Turn;
use rustix::process::Signal;
use serde_json::json;
use simulated::{Answer, Gateway, Nodes, SOON, is_whole, prompt, turn};
use tempfile::TempDir;

const ANSWER_TOKENS: u32 = 4;

/// Nodes and a gateway.
struct World {
    gateway: Gateway,
    nodes: Nodes,
    folder: TempDir,
}

impl World {
    fn start(nodes: usize, flags: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let nodes = Nodes::start(folder.path(), nodes, flags);
        let gateway = Gateway::start(folder.path(), &nodes.places);
        Self {
            gateway,
            nodes,
            folder,
        }
    }

    /// Sends a prompt in a session of its own, and waits until the gateway knows that the node which
    /// answered holds all of it. Says which, and how many tokens that are.
    fn warm(&self, name: &str) -> (String, u64) {
        let first = self.gateway.ask(&story("warm", name));
        let blocks = (first.prompt - 1) / 16;
        self.gateway
            .until(&first.node, "its blocks are known", |node| {
                node["index_blocks"].as_u64() >= Some(blocks)
            });
        let again = self.gateway.ask(&story("again", name));
        assert_eq!(
            (&again.node, again.expected),
            (&first.node, blocks * 16),
            "{again:?}"
        );
        assert_eq!(again.cached, again.expected, "{again:?}");
        (first.node, again.cached)
    }

    /// Sends a prompt until a node is expected to have it and has it.
    fn warm_again(&self, node: &str, name: &str) {
        let known = load_tests::process::wait_until(SOON, || {
            let answer = self.gateway.ask(&story(&format!("{name} again"), name));
            assert!(answer.expected <= answer.cached, "{answer:?}");
            answer.node == node && answer.expected > 0
        });
        let trouble = self.gateway.program.trouble("nothing is expected any more");
        assert!(known, "{trouble}: {}", self.gateway.node(node));
    }

    fn expect_nothing(&self, name: &str) -> Answer {
        let answer = self.gateway.ask(&story("after", name));
        assert_eq!(answer.expected, 0, "{answer:?}");
        answer
    }
}

/// A turn with the story of a name, some 500 tokens, in a session of its own.
fn story(session: &str, name: &str) -> Turn {
    let session = format!("{session} {name}");
    turn(&session, &prompt(name, 40), ANSWER_TOKENS)
}

/// Fault H09. Catches credit for what another process at the same address held.
#[test]
fn h09_a_node_restarted_in_place_is_credited_with_nothing() {
    let world = World::start(2, &[]);
    let (node, _) = world.warm("anna");
    let resyncs = world.gateway.metric("homing_index_resyncs_total", &node);
    world.nodes.suffer(&node, "restart");
    world
        .gateway
        .until(&node, "what it held is forgotten", |row| {
            row["index_blocks"] == 0
        });
    let answer = world.expect_nothing("anna");
    assert_eq!(answer.cached, 0, "{answer:?}");
    assert!(world.gateway.metric("homing_index_resyncs_total", &node) > resyncs);
    world.gateway.until(&node, "it is believed again", is_whole);
    world.warm_again(&answer.node, "anna");
}

/// Fault H09 with a process that is killed and one that starts where it was.
#[test]
fn h09_a_killed_node_comes_back_with_an_empty_cache() {
    let mut world = World::start(1, &[]);
    let (node, _) = world.warm("berta");
    let place = world.nodes.places[0].clone();
    world.nodes.program.signal(Signal::KILL);
    let _ = world.nodes.program.wait(SOON).expect("it ends");
    world
        .gateway
        .until(&node, "what it held is forgotten", |row| {
            row["index_blocks"] == 0
        });
    world.nodes = Nodes::start_again(world.folder.path(), &place, &[]);
    world.gateway.until(&node, "it is believed again", is_whole);
    let answer = world.expect_nothing("berta");
    assert_eq!(answer.cached, 0, "{answer:?}");
    world.warm_again(&node, "berta");
}

/// Catches credit that outlives a cache which its node has cleared.
#[test]
fn a_cache_that_is_cleared_is_credited_with_nothing() {
    let world = World::start(1, &[]);
    let (node, _) = world.warm("clara");
    world.nodes.suffer(&node, "wipe");
    world
        .gateway
        .until(&node, "its blocks are gone", |row| row["index_blocks"] == 0);
    let answer = world.expect_nothing("clara");
    assert_eq!(answer.cached, 0, "{answer:?}");
    world.warm_again(&node, "clara");
    assert_eq!(world.gateway.node(&node)["state"], "up");
}

/// Catches a cache that was emptied without a word being believed for ever: today each prompt that it
/// held is expected there once more, and never again after the answer.
#[test]
fn a_cache_that_is_emptied_silently_misleads_once_a_prompt() {
    let world = World::start(1, &[]);
    let (node, held) = world.warm("paula");
    world.nodes.suffer(&node, "wipe:silent");
    let misled = world.gateway.ask(&story("misled", "paula"));
    assert_eq!((misled.expected, misled.cached), (held, 0), "{misled:?}");
    let answer = world.gateway.ask(&story("after", "paula"));
    assert_eq!((answer.expected, answer.cached), (held, held), "{answer:?}");
}

/// Catches credit for blocks whose removal got lost on the way, and a gap that is never closed.
#[test]
fn lost_events_take_credit_away_until_they_are_replayed() {
    // So small that the second prompt pushes the first out.
    let world = World::start(1, &["--capacity", "48"]);
    let (node, _) = world.warm("dora");
    world.nodes.suffer(&node, "drop-events:1");
    // What this one pushed out is lost on the way; the batch of the next one shows the gap.
    world.gateway.ask(&story("other", "emil"));
    world.gateway.ask(&story("third", "fritz"));
    let batches = world.nodes.report(&node)["event_batches"].clone();
    world.gateway.until(&node, "the gap is closed", is_whole);
    let held = world.nodes.report(&node)["cached_blocks"].clone();
    world.gateway.until(
        &node,
        &format!("{held} blocks after {batches} batches"),
        |row| row["index_blocks"] == held,
    );
    let back = world.gateway.ask(&story("back", "dora"));
    assert!(back.expected <= back.cached, "{back:?}");
    assert!(back.cached < back.prompt / 2, "{back:?}");
}

/// Catches a node that is avoided for ever because it was full once.
#[test]
fn a_node_that_was_full_serves_again() {
    let world = World::start(2, &[]);
    let (node, _) = world.warm("gustav");
    world.nodes.suffer(&node, "full");
    world.gateway.until(&node, "its pool is full", |row| {
        row["pool_used_blocks"] == row["pool_blocks"]
    });
    world.nodes.suffer(&node, "free");
    world.gateway.until(&node, "its pool is idle", |row| {
        row["pool_used_blocks"] == 0
    });
    let answer = world.gateway.ask(&story("later", "gustav"));
    assert_eq!(answer.node, node, "{answer:?}");
    assert!(
        answer.expected > 0 && answer.expected == answer.cached,
        "{answer:?}"
    );
}

/// Catches requests that go with a node which dies under them, and one that is not asked again.
#[test]
fn a_node_that_dies_before_its_first_token_loses_no_request() {
    let world = World::start(2, &[]);
    let (node, _) = world.warm("hanna");
    // The gateway may try again where it was: an idle connection can break for no reason.
    world.nodes.suffer(&node, "die-before-first-token:10");
    let answer = world.gateway.ask(&story("dies", "hanna"));
    assert_ne!(answer.node, node, "{answer:?}");
    assert_eq!(answer.cached, 0, "{answer:?}");
    world
        .gateway
        .until(&node, "it takes requests", |row| row["state"] == "up");
}

/// Fault H12. Catches short cold prompts that are sent behind the work of a busy node because that
/// node holds less.
#[test]
fn h12_cold_prompts_go_to_the_idle_node() {
    let world = World::start(2, &[]);
    let (busy, idle) = ("node-0", "node-1");
    let only = |node: &str, other: &str| {
        world.nodes.suffer(other, "draining");
        world.nodes.suffer(node, "ready");
        world
            .gateway
            .until(other, "it drains", |row| row["state"] == "draining");
        world
            .gateway
            .until(node, "it is up", |row| row["state"] == "up");
    };
    only(idle, busy);
    for number in 0..10 {
        world.gateway.ask(&story("fills", &format!("ida {number}")));
    }
    only(busy, idle);
    world.nodes.suffer(busy, "slow:100000");
    let client = world.gateway.client.clone();
    let long = std::thread::spawn(move || {
        let long = (0..20).map(|number| {
            let text = prompt(&format!("jakob {number}"), 100);
            turn(&format!("long {number}"), &text, ANSWER_TOKENS)
        });
        client.ask_all(&long.collect::<Vec<_>>())
    });
    world.gateway.until(busy, "it has them all", |row| {
        row["requests_in_flight"] == 20
    });
    world.nodes.suffer(idle, "ready");
    world
        .gateway
        .until(idle, "it is up", |row| row["state"] == "up");
    assert!(
        world.gateway.node(idle)["index_blocks"].as_u64()
            > world.gateway.node(busy)["index_blocks"].as_u64()
    );
    for number in 0..10 {
        let answer = world.gateway.ask(&turn(
            &format!("short {number}"),
            &prompt(&format!("karl {number}"), 2),
            ANSWER_TOKENS,
        ));
        assert_eq!(answer.node, idle, "{answer:?}");
    }
    world.nodes.suffer(busy, "slow:1");
    let long = long.join().expect("all of them are answered");
    assert!(long.iter().all(|answer| answer.node == busy), "{long:?}");
}

/// Catches a fleet of many nodes of which few are used, sessions that wander without need, and
/// predictions that are wrong once the events have come.
#[test]
fn sixty_four_nodes_share_the_sessions() {
    const NODES: usize = 64;
    let world = World::start(NODES, &[]);
    // All of them share a thread with each other's health checks: until each has been asked often
    // enough, some look farther away than they are, and far nodes get no cold sessions.
    let alike = load_tests::process::wait_until(SOON, || world.gateway.distances_differ_ms() < 5.0);
    assert!(
        alike,
        "the nodes' distances differ by {} ms",
        world.gateway.distances_differ_ms()
    );
    let mut turns: Vec<Turn> = (0..NODES)
        .map(|number| story("first", &format!("lara {number}")))
        .collect();
    let mut last: Vec<Answer> = Vec::new();
    for round in 0..3 {
        let outcomes = world.gateway.client.send_all(&turns);
        let answers: Vec<Answer> = outcomes.iter().map(Answer::of).collect();
        if round > 0 {
            for (answer, before) in answers.iter().zip(&last) {
                assert_eq!(answer.node, before.node, "{answer:?} after {before:?}");
                // The last block's event may come behind the next turn.
                let missing = answer.cached.checked_sub(answer.expected);
                assert!(missing.is_some_and(|tokens| tokens <= 16), "{answer:?}");
                // The prompt before, and its answer but for the last token.
                let computed = before.prompt + u64::from(ANSWER_TOKENS) - 1;
                assert_eq!(
                    answer.cached,
                    computed / 16 * 16,
                    "{answer:?} after {before:?}"
                );
            }
        }
        for (turn, outcome) in turns.iter_mut().zip(&outcomes) {
            let messages = turn.body["messages"].as_array_mut().expect("messages");
            messages.push(json!({"role": "assistant", "content": outcome.text()}));
            messages.push(json!({"role": "user", "content": prompt("what follows", 5)}));
        }
        let mut used: Vec<&str> = answers.iter().map(|answer| answer.node.as_str()).collect();
        used.sort_unstable();
        used.dedup();
        assert!(used.len() >= NODES / 2, "{} nodes are used", used.len());
        for node in used {
            let held = world.nodes.report(node)["cached_blocks"].clone();
            world
                .gateway
                .until(node, &format!("{held} blocks are known"), |row| {
                    row["index_blocks"] == held
                });
        }
        last = answers;
    }
}
