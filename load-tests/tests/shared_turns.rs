//! What does the real gateway do before simulated nodes that share turns, and before nodes with slower
//! tiers?
//!
//! Real HTTP and KV events. Right is: prompts are computed on one node and answered by another, what the
//! first had cached is what the client is told, what a node has below its pool is expected and found
//! there, and a node that dies in between costs time and nothing else.

#![expect(clippy::panic, reason = "a helper fails its test with what it saw")]

#[path = "support/simulated.rs"]
mod simulated;
mod support;

use load_tests::chat::Turn;
use serde_json::{Value, json};
use simulated::{Answer, Gateway, Nodes, is_whole, prompt, turn};
use support::report;
use tempfile::TempDir;

const ANSWER_TOKENS: u32 = 4;
/// A link as fast as the nodes', which run at 20 times the time.
const LINK: &str = "[disaggregation]\ntransfer_bytes_per_s = 200000000000\n";

/// Nodes and a gateway.
struct World {
    gateway: Gateway,
    nodes: Nodes,
    _folder: TempDir,
}

impl World {
    fn start(nodes: usize, flags: &[&str], config: (&str, &str)) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let nodes = Nodes::start(folder.path(), nodes, flags);
        let gateway = Gateway::start_with(folder.path(), &nodes.places, config);
        Self {
            gateway,
            nodes,
            _folder: folder,
        }
    }

    /// So many nodes, of which the first ones compute prompts.
    /// What a prompt takes is long beside the way to the nodes, or one of them would do all of it.
    fn apart(nodes: usize, prefill_nodes: usize) -> Self {
        let prefill = prefill_nodes.to_string();
        let flags = ["--prefill-nodes", &prefill, "--prefill-rate", "1000"];
        Self::start(nodes, &flags, ("", LINK))
    }

    /// What the nodes have counted, together.
    fn sum(&self, figure: &str) -> u64 {
        let places = self.nodes.places.iter();
        places
            .map(|place| count(&self.nodes.report(&place.id), figure))
            .sum()
    }

    /// Waits until the gateway knows of all that a node holds.
    fn until_known(&self, node: &str) {
        let held = self.nodes.report(node)["cached_blocks"].clone();
        let known = |row: &Value| row["trust"] == "exact" && row["index_blocks"] == held;
        self.gateway
            .until(node, &format!("{held} blocks are known"), known);
    }
}

fn count(report: &Value, figure: &str) -> u64 {
    let value = report[figure].as_u64();
    value.unwrap_or_else(|| panic!("no {figure} in {report}"))
}

/// A turn of some 2,000 tokens.
fn long(session: &str, name: &str) -> Turn {
    turn(session, &prompt(name, 160), ANSWER_TOKENS)
}

/// The next turn of a conversation.
fn go_on(turn: &mut Turn, answer: &str) {
    let messages = turn.body["messages"].as_array_mut().expect("messages");
    messages.push(json!({"role": "assistant", "content": answer}));
    messages.push(json!({"role": "user", "content": prompt("what follows", 160)}));
}

/// Catches turns that are not shared, cached tokens that are not those of the node which computed, blocks
/// that stay pinned, and events of either half that are missing.
#[test]
fn turns_are_shared_and_tell_what_the_first_node_had_cached() {
    let world = World::apart(4, 2);
    let mut turn = long("shared", "anna");
    let mut before: Option<Answer> = None;
    for round in 0..3 {
        let outcome = world.gateway.client.send_all(std::slice::from_ref(&turn));
        let outcome = outcome.first().expect("one");
        let answer = Answer::of(outcome);
        let prefill = answer.prefill_node.clone().expect("two nodes share it");
        assert!(
            ["node-0", "node-1"].contains(&prefill.as_str()),
            "{answer:?}"
        );
        assert!(
            ["node-2", "node-3"].contains(&answer.node.as_str()),
            "{answer:?}"
        );
        assert_eq!(answer.expected, answer.cached, "{answer:?}");
        if let Some(before) = &before {
            // The prompt before, which the first node has computed; the answer is the other one's.
            assert_eq!(
                answer.prefill_node, before.prefill_node,
                "{answer:?} after {before:?}"
            );
            assert_eq!(answer.node, before.node, "{answer:?} after {before:?}");
            assert_eq!(answer.cached, before.prompt / 16 * 16, "{answer:?}");
        }
        world.until_known(&prefill);
        world.until_known(&answer.node);
        let decode = world.nodes.report(&answer.node);
        assert_eq!(count(&decode, "transfers_received"), round + 1, "{decode}");
        assert_eq!(count(&decode, "cached_tokens"), 0, "{decode}");
        go_on(&mut turn, &outcome.text());
        before = Some(answer);
    }
    assert_eq!(
        (world.sum("transfers_sent"), world.sum("transfers_failed")),
        (3, 0)
    );
    assert_eq!(
        world.sum("held_blocks"),
        0,
        "what was handed over is let go"
    );
    assert_eq!(report(&world.gateway.data, "request").len(), 3);
}

/// Catches a request that goes with the node that computes its prompt, one that is told twice, and work
/// that is left behind. Once the connection breaks, once the whole node goes in the middle of it.
#[test]
fn a_node_that_dies_while_it_computes_costs_no_answer() {
    let world = World::apart(2, 1);
    // An idle connection can break for no reason, so the gateway may ask once more.
    world.nodes.suffer("node-0", "die-before-first-token:2");
    let answer = world.gateway.ask(&long("dies", "berta"));
    assert_eq!(
        (answer.node.as_str(), &answer.prefill_node),
        ("node-1", &None),
        "{answer:?}"
    );
    world.nodes.suffer("node-0", "die-before-first-token:0");
    assert_eq!(report(&world.gateway.data, "request").len(), 1);

    world.gateway.until("node-0", "it takes requests", is_whole);
    world.nodes.suffer("node-0", "slow:100000");
    let client = world.gateway.client.clone();
    let asked = std::thread::spawn(move || client.ask(&long("dies again", "clara")));
    world.gateway.until("node-0", "it computes", |row| {
        row["requests_in_flight"] == 1
    });
    world.nodes.suffer("node-0", "restart");
    let answer = asked.join().expect("an answer");
    assert_eq!(
        (answer.node.as_str(), &answer.prefill_node),
        ("node-1", &None),
        "{answer:?}"
    );
    let rows = report(&world.gateway.data, "request");
    assert_eq!(rows.len(), 2, "{rows:?}");
    let last = rows
        .iter()
        .find(|row| row["request_id"] == answer.request_id.as_str());
    assert_eq!(last.expect("its record")["status"], "complete", "{rows:?}");

    // The one that stands there now has another name, and shares turns like the one before.
    world
        .gateway
        .until("node-0", "it is believed again", is_whole);
    let shares = load_tests::process::wait_until(simulated::SOON, || {
        let answer = world.gateway.ask(&long("after", "dora"));
        answer.prefill_node.as_deref() == Some("node-0")
    });
    assert!(
        shares,
        "{}",
        world
            .gateway
            .program
            .trouble("turns are not shared any more")
    );
    let idle = load_tests::process::wait_until(simulated::SOON, || {
        ["waiting", "running", "held_blocks"]
            .iter()
            .all(|figure| world.sum(figure) == 0)
    });
    assert!(idle, "something is left behind");
}

/// A prompt of a conversation is pushed out of the pool by others and comes back from host memory. Catches
/// a tier that is not told of, not counted on, or counted on in vain.
#[test]
fn what_lies_in_host_memory_is_expected_and_found_there() {
    let flags = ["--capacity", "300", "--host-capacity", "4000"];
    let world = World::start(1, &flags, ("", ""));
    let first = world.gateway.ask(&long("emil", "emil"));
    for name in ["fritz", "gustav", "hanna"] {
        world.gateway.ask(&long(name, name));
    }
    until_tiers_are_known(&world, &first.node, "host_blocks");
    let again = world.gateway.ask(&long("emil", "emil"));
    assert_eq!(again.cached, (again.prompt - 1) / 16 * 16, "{again:?}");
    assert_eq!(again.expected, again.cached, "{again:?}");
    assert!(count(&world.nodes.report(&first.node), "fetched_tokens") > 0);
    let decision = world.gateway.decision(&again.request_id);
    let attempt = &decision["attempts"][0];
    assert_eq!(
        attempt["expected_cached_tokens"], again.cached,
        "{decision}"
    );
    let fetch_ms = attempt["candidates"][0]["terms"]["fetch_ms"].as_f64();
    assert!(fetch_ms.is_some_and(|ms| ms > 0.0), "{decision}");
}

/// What a node has written to the store is expected of that node until the store lets it go, also where
/// another node was the reason. Catches credit for what the store has no more.
#[test]
fn what_the_store_lets_go_is_expected_no_more() {
    let flags = ["--capacity", "300", "--store-capacity", "500"];
    let price = "kv_fetch_ms_per_block = { shared = 0.0128 }";
    let world = World::start(2, &flags, (price, ""));
    let first = world.gateway.ask(&long("ida", "ida"));
    let node = first.node.as_str();
    // Two of its own push it out of the pool, and not out of the store.
    for name in ["jakob", "karl"] {
        ask_only(&world, node, name);
    }
    until_tiers_are_known(&world, node, "store_blocks");
    let again = ask_only(&world, node, "ida");
    assert_eq!(again.cached, (again.prompt - 1) / 16 * 16, "{again:?}");
    assert_eq!(again.expected, again.cached, "{again:?}");

    let other = if node == "node-0" { "node-1" } else { "node-0" };
    for name in ["lara", "moritz", "nora", "otto"] {
        ask_only(&world, other, name);
    }
    let node_report = world.nodes.report(node);
    // All prompts begin with the template's own words.
    assert!(count(&node_report, "store_blocks") < 4, "{node_report}");
    until_tiers_are_known(&world, node, "store_blocks");
    let gone = ask_only(&world, node, "jakob");
    assert_eq!(
        (gone.expected, gone.cached),
        (gone.cached, gone.expected),
        "{gone:?}"
    );
    assert!(gone.cached < gone.prompt / 4, "{gone:?}");
}

/// One node alone is asked.
fn ask_only(world: &World, node: &str, name: &str) -> Answer {
    for place in &world.nodes.places {
        let (fault, state) = match place.id == node {
            true => ("ready", "up"),
            false => ("draining", "draining"),
        };
        world.nodes.suffer(&place.id, fault);
        world
            .gateway
            .until(&place.id, state, |row| row["state"] == state);
    }
    let answer = world.gateway.ask(&long(name, name));
    assert_eq!(answer.node, node, "{answer:?}");
    answer
}

/// Waits until the gateway knows of all that a node has told of its tiers.
fn until_tiers_are_known(world: &World, node: &str, figure: &str) {
    world.until_known(node);
    let known = load_tests::process::wait_until(simulated::SOON, || {
        let told = count(&world.nodes.report(node), figure) as f64;
        let known = world.gateway.metric("homing_index_store_blocks", node);
        (known - told).abs() < 0.5
    });
    let report = world.nodes.report(node);
    assert!(
        known,
        "{}",
        world.gateway.program.trouble(&report.to_string())
    );
}

/// A node that computes and one that answers, asked without a gateway.
struct Halves {
    nodes: Nodes,
    prefill: Value,
    decode: Value,
    _folder: TempDir,
}

impl Halves {
    fn start() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let nodes = Nodes::start(folder.path(), 2, &["--prefill-nodes", "1"]);
        Self {
            prefill: nodes.kv_info("node-0"),
            decode: nodes.kv_info("node-1"),
            nodes,
            _folder: folder,
        }
    }

    /// What the first is told.
    fn give(&self, number: u32, timeout_ms: u64) -> Value {
        json!({"do_remote_decode": true, "transfer_id": name(number), "timeout_ms": timeout_ms,
               "remote_engine_id": self.decode["engine_id"]})
    }

    /// What the second is told.
    fn take(&self, number: u32, on_failure: &str) -> Value {
        json!({"do_remote_prefill": true, "transfer_id": name(number), "timeout_ms": 200,
               "on_failure": on_failure, "remote_engine_id": self.prefill["engine_id"],
               "remote_endpoints": self.prefill["endpoints"]})
    }

    fn ask(&self, node: &str, text: &str, params: &Value) -> (u16, Value) {
        let body = json!({"messages": [{"role": "user", "content": text}], "max_tokens": 3,
                          "kv_transfer_params": params});
        self.nodes.post(node, &body)
    }

    fn report(&self, node: &str, figure: &str) -> u64 {
        count(&self.nodes.report(node), figure)
    }
}

fn name(number: u32) -> String {
    format!("{number:032x}")
}

fn assert_answered(answer: &(u16, Value), tokens: u32) {
    let (status, body) = answer;
    let found = (*status, &body["usage"]["completion_tokens"]);
    assert_eq!(found, (200, &json!(tokens)), "{body}");
}

fn assert_refused(answer: &(u16, Value), param: &str) {
    let (status, body) = answer;
    let expected = format!("kv_transfer_params.{param}");
    let found = (*status, &body["error"]["param"]);
    assert_eq!(found, (400, &json!(expected)), "{body}");
}

/// Catches a half that waits for ever, and one that does not do as it was told then.
#[test]
fn a_half_without_the_other_ends_as_it_says() {
    let halves = Halves::start();
    assert_eq!(halves.prefill["role"], "prefill");
    assert_eq!(halves.decode["role"], "decode");
    let text = prompt("paula", 60);
    let (status, body) = halves.ask("node-1", &text, &halves.take(1, "error"));
    let code = &body["error"]["code"];
    assert_eq!(
        (status, code),
        (503, &json!("kv_transfer_failed")),
        "{body}"
    );
    assert_answered(
        &halves.ask("node-1", &text, &halves.take(1, "recompute")),
        3,
    );
    assert_eq!(halves.report("node-1", "transfers_failed"), 2);

    // What nobody takes is let go.
    assert_answered(&halves.ask("node-0", &text, &halves.give(2, 20)), 1);
    let let_go = load_tests::process::wait_until(simulated::SOON, || {
        halves.report("node-0", "tickets_expired") == 1
            && halves.report("node-0", "held_blocks") == 0
    });
    assert!(let_go, "{}", halves.nodes.report("node-0"));
}

/// Catches KV that is used twice, or for another prompt.
#[test]
fn a_transfer_is_good_once() {
    let halves = Halves::start();
    let text = prompt("rosa", 60);
    let given = halves.ask("node-0", &text, &halves.give(1, 30_000));
    assert_answered(&given, 1);
    assert_eq!(given.1["kv_transfer_params"]["transfer_id"], name(1));
    assert!(halves.report("node-0", "held_blocks") > 0);
    let take = halves.take(1, "error");
    let foreign = halves.ask("node-1", &prompt("sven", 60), &take);
    assert_eq!(foreign.0, 503, "{foreign:?}");
    assert_answered(&halves.ask("node-1", &text, &take), 3);
    let again = halves.ask("node-1", &text, &take);
    assert_eq!(again.0, 503, "{again:?}");
    assert_refused(
        &halves.ask("node-0", &text, &halves.give(1, 20)),
        "transfer_id",
    );
    assert_eq!(halves.report("node-1", "transfers_received"), 1);

    // The answer tells what the first node had cached: by now all of the prompt's whole blocks.
    let given = halves.ask("node-0", &text, &halves.give(2, 30_000));
    let taken = halves.ask("node-1", &text, &halves.take(2, "error"));
    let [given, taken] = [given, taken]
        .map(|(_, body)| body["usage"]["prompt_tokens_details"]["cached_tokens"].clone());
    assert!(given.as_u64() > Some(0), "{given}");
    assert_eq!(taken, given);
}

/// Catches a node that takes what it cannot serve.
#[test]
fn what_is_not_for_a_node_is_refused() {
    let halves = Halves::start();
    let changed = |mut params: Value, name: &str, value: Value| {
        params[name] = value;
        params
    };
    let take = || halves.take(1, "recompute");
    let elsewhere = json!(["simulated:1-00000000"]);
    for (node, params, param) in [
        ("node-1", halves.give(1, 20), "do_remote_decode"),
        ("node-0", take(), "do_remote_prefill"),
        ("node-1", halves.take(1, "perhaps"), "on_failure"),
        ("node-0", halves.give(1, 0), "timeout_ms"),
        ("node-0", json!({"fetch_from": []}), "fetch_from"),
        (
            "node-1",
            changed(take(), "remote_endpoints", elsewhere),
            "remote_endpoints",
        ),
        (
            "node-1",
            changed(take(), "transfer_id", json!("4")),
            "transfer_id",
        ),
        (
            "node-1",
            changed(take(), "remote_engine_id", Value::Null),
            "remote_engine_id",
        ),
    ] {
        let answer = halves.ask(node, &prompt("tina", 20), &params);
        assert_refused(&answer, param);
    }
}
