//! Does an agent's conversation find its cache, and only its own?
//!
//! Against the real stack: gateway, two nodes, the real model. What must be cached is computed by
//! the test itself ([`held`]).

#[path = "support/model.rs"]
mod held;
mod support;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use held::{Held, Model};
use load_tests::chat;
use load_tests::http::Connection;
use load_tests::process::{is_alive, signal_process, wait_until};
use load_tests::workload::{self, Shape};
use rustix::process::Signal;
use serde_json::Value;
use support::{Stack, get, good, message, send, turn};

/// Different system prompts of about so many tokens, and messages to go on with.
fn workload(sessions: usize, system_tokens: usize, seed: u64) -> Vec<workload::Session> {
    workload::plan(&Shape {
        sessions,
        turns: 20,
        rate: 1.0,
        system_prompts: sessions,
        system_tokens,
        message_tokens: 24,
        think: Duration::ZERO,
        subagents: 0,
        seed,
    })
}

/// Held alone by a test whose sessions must have no reason to leave a node: another stack on the same cores is one.
static MACHINE: tokio::sync::RwLock<()> = tokio::sync::RwLock::const_new(());

#[tokio::test]
async fn twenty_turns_are_cached_to_the_block_on_one_node() {
    let _beside_others = MACHINE.read().await;
    // Catches a block too few (KV of the answer not kept, tail block lost) or too many (credit for
    // what was never computed), and a session that wanders.
    let stack = Stack::start(2);
    let model = Model::load();
    let session = &workload(1, 1550, 11)[0];
    let mut messages = vec![message("system", &session.system)];
    assert!(
        model.prompt(&messages).len() > 1500,
        "{}",
        model.prompt(&messages).len()
    );
    let mut held = Held::default();
    let mut nodes = BTreeSet::new();
    let target = stack.target();
    let mut connection = Connection::new(&target);
    for (number, planned) in session.turns.iter().enumerate() {
        messages.push(message("user", &planned.message));
        let request = turn("twenty", &messages, 20);
        let key = Some(stack.ready.api_key.as_str());
        let outcome = good(chat::send(&mut connection, &target, key, &request).await);
        let usage = outcome.usage.expect("checked");
        let node = outcome
            .header("x-homing-node")
            .expect("the node's name")
            .to_owned();
        let prompt = model.prompt(&messages);
        assert_eq!(usage.prompt_tokens, prompt.len() as u64, "turn {number}");
        let expected = held.cached(&node, "demo", &prompt);
        assert_eq!(
            usage.cached_tokens,
            expected,
            "turn {number} of {}",
            prompt.len()
        );
        if number > 0 {
            assert!(
                usage.cached_tokens * 10 > usage.prompt_tokens * 8,
                "turn {number}: {usage:?}"
            );
        }
        let promised: u64 = outcome
            .header("x-homing-expected-cached")
            .and_then(|v| v.parse().ok())
            .expect("a number");
        assert!(
            promised <= usage.cached_tokens,
            "turn {number}: promised {promised}, {usage:?}"
        );
        model.heard(&messages, &prompt, &outcome);
        held.add(&node, "demo", [prompt, model.fed_back(&outcome)].concat());
        messages.push(message("assistant", &outcome.text()));
        nodes.insert(node);
    }
    assert_eq!(nodes.len(), 1, "one session on several nodes: {nodes:?}");
    stack.stop(Signal::INT);
}

#[tokio::test]
async fn sessions_spread_over_the_nodes_and_each_stays() {
    let _alone = MACHINE.write().await;
    // Catches a router that sends everything to one node, or a session to both.
    let stack = Stack::start(2);
    let sessions = workload(10, 200, 12);
    let talks = sessions.iter().map(|session| {
        let stack = &stack;
        async move {
            let mut messages = vec![message("system", &session.system)];
            let mut nodes = BTreeSet::new();
            for planned in &session.turns[..3] {
                messages.push(message("user", &planned.message));
                let outcome = good(
                    send(
                        stack,
                        &stack.ready.api_key,
                        &turn(&session.id, &messages, 8),
                    )
                    .await,
                );
                nodes.insert(outcome.header("x-homing-node").expect("a node").to_owned());
                messages.push(message("assistant", &outcome.text()));
            }
            assert_eq!(nodes.len(), 1, "{} wandered: {nodes:?}", session.id);
            nodes.into_iter().next().expect("one")
        }
    });
    let used: Vec<String> = futures_util::future::join_all(talks).await;
    let distinct: BTreeSet<&String> = used.iter().collect();
    assert_eq!(distinct.len(), 2, "{used:?}");
    stack.stop(Signal::TERM);
}

#[tokio::test]
async fn tenants_share_nothing() {
    let _beside_others = MACHINE.read().await;
    // Catches a cache that answers one tenant from another's blocks, also when the client forges
    // the salt that separates them.
    let stack = Stack::start(1);
    let other = stack.tenant("other", &[]);
    let session = &workload(1, 300, 13)[0];
    let messages = [
        message("system", &session.system),
        message("user", &session.turns[0].message),
    ];
    let cached = async |key: &str, salt: Option<&str>| {
        let mut request = turn("same", &messages, 4);
        if let Some(salt) = salt {
            request.body["cache_salt"] = Value::from(salt);
        }
        good(send(&stack, key, &request).await)
            .usage
            .expect("checked")
            .cached_tokens
    };
    let demo = stack.ready.api_key.as_str();
    assert_eq!(cached(demo, None).await, 0);
    let warm = cached(demo, None).await;
    assert!(warm > 200, "{warm}");
    assert_eq!(cached(&other, None).await, 0);
    assert_eq!(cached(&other, None).await, warm);
    // A salt of the client's own changes nothing: the gateway's stands.
    assert_eq!(cached(demo, Some("forged")).await, warm);
    assert_eq!(cached(&other, Some("")).await, warm);
}

#[tokio::test]
async fn a_killed_node_costs_the_cache_and_nothing_else() {
    let _beside_others = MACHINE.read().await;
    // Catches an error for the client when a node dies between turns, a node that is never
    // restarted, and a cache credited to the restarted node.
    let stack = Stack::start(2);
    let key = &stack.ready.api_key;
    let model = Model::load();
    let session = &workload(1, 400, 14)[0];
    let mut messages = vec![
        message("system", &session.system),
        message("user", &session.turns[0].message),
    ];
    let first = good(send(&stack, key, &turn("killed", &messages, 8)).await);
    let before = first.header("x-homing-node").expect("a node").to_owned();
    messages.push(message("assistant", &first.text()));
    messages.push(message("user", &session.turns[1].message));

    let node = stack.node(&before).clone();
    signal_process(node.pid, Signal::KILL);
    let second = good(send(&stack, key, &turn("killed", &messages, 8)).await);
    let after = second.header("x-homing-node").expect("a node").to_owned();
    assert_ne!(before, after, "route {:?}", second.header("x-homing-route"));
    let usage = second.usage.expect("checked");
    assert_eq!(
        usage.cached_tokens, 0,
        "the other node held nothing: {usage:?}"
    );
    assert_eq!(usage.prompt_tokens, model.prompt(&messages).len() as u64);

    // Restarted at the same address, and taken in again.
    let back = wait_until(Duration::from_secs(60), || {
        get(&format!("{}/health", node.url), None).0 == 200
    });
    assert!(
        back,
        "{} does not come back at {}; {}",
        node.id,
        node.url,
        stack.logs()
    );
    assert!(!is_alive(node.pid));
    // The session stays where its cache now is.
    messages.push(message("assistant", &second.text()));
    messages.push(message("user", &session.turns[2].message));
    let third = good(send(&stack, key, &turn("killed", &messages, 8)).await);
    assert_eq!(third.header("x-homing-node"), Some(after.as_str()));
    assert!(third.usage.expect("checked").cached_tokens > 0);
    // And the restarted one serves new sessions, with nothing credited of what it lost.
    let deadline = Instant::now() + Duration::from_secs(60);
    for number in 0.. {
        assert!(Instant::now() < deadline, "{before} is not taken in again");
        let fresh = [
            message("system", &format!("Number {number}. {}", session.system)),
            message("user", "Go on."),
        ];
        let outcome = good(send(&stack, key, &turn(&format!("f{number}"), &fresh, 2)).await);
        if outcome.header("x-homing-node") == Some(before.as_str()) {
            break;
        }
    }
    // The turn after the kill had been promised nothing.
    let expected = second
        .header("x-homing-expected-cached")
        .and_then(|v| v.parse::<u64>().ok());
    assert_eq!(
        expected,
        Some(0),
        "credit promised on a node that never held it"
    );
}

#[tokio::test]
async fn a_session_whose_node_drains_takes_its_cache_along() {
    let _beside_others = MACHINE.read().await;
    // Catches a session that is computed again where its cache could be fetched, and KV that is
    // fetched and not billed as cached.
    let stack = Stack::start(2);
    let key = &stack.ready.api_key;
    let model = Model::load();
    let sessions = workload(1, 900, 17);
    let session = &sessions[0];
    let mut messages = vec![
        message("system", &session.system),
        message("user", &session.turns[0].message),
    ];
    let first = good(send(&stack, key, &turn("moves", &messages, 8)).await);
    let before = first.header("x-homing-node").expect("a node").to_owned();
    let held = model.prompt(&messages).len() as u64;
    messages.push(message("assistant", &first.text()));
    messages.push(message("user", &session.turns[1].message));

    // A long answer keeps the node alive while it drains.
    let long = {
        let mut long = turn("moves", &messages, 700);
        long.body["ignore_eos"] = Value::from(true);
        long
    };
    let at_node = |name: &str| {
        let (_, text) = get(&format!("{}/metrics", stack.ready.admin), None);
        let of_node = format!("{name}{{node=\"{before}\"}}");
        let lines: Vec<_> = text.lines().filter(|l| l.starts_with(&of_node)).collect();
        support::metric(&lines.join("\n"), name)
    };
    let moves = async {
        until(|| at_node("homing_node_requests_in_flight") == 1.0).await;
        signal_process(stack.node(&before).pid, Signal::TERM);
        until(|| at_node("homing_node_up") == 0.0).await;
        good(send(&stack, key, &turn("moves", &messages, 8)).await)
    };
    let (kept, moved) = futures_util::future::join(send(&stack, key, &long), moves).await;
    assert_eq!(good(kept).header("x-homing-node"), Some(before.as_str()));
    assert_ne!(moved.header("x-homing-node"), Some(before.as_str()));
    let usage = moved.usage.expect("checked");
    assert!(usage.cached_tokens + 16 > held, "{usage:?} of {held}");
    assert_eq!(stack.metric("homing_kv_fetches_total"), 1.0);
    stack.stop(Signal::TERM);
}

/// Polls beside what else is under way.
async fn until(holds: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < deadline, "it never comes");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
