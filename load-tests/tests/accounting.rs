//! Is every token counted once, by gateway and engine alike, whatever is killed?
//!
//! The truth is what the client read: the usage of each acknowledged request, by request id. The
//! ledger must say the same, after a clean run and after a SIGKILL of the gateway under load.

#![expect(clippy::panic, reason = "a helper fails its test with what it saw")]

mod support;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use hmac::{Hmac, Mac};
use load_tests::agent::{self, Record};
use load_tests::chat::{self, FailureKind, Usage};
use load_tests::http::{Connection, Target};
use load_tests::process::{signal_process, wait_until};
use load_tests::workload;
use rustix::process::Signal;
use serde_json::Value;
use sha2::Sha256;
use support::{MODEL, Stack, good, message, report, send, turn};

/// A run that keeps both nodes busy for some seconds.
fn load(stack: &Stack, key: &str, seed: u64) -> agent::Args {
    agent::Args {
        url: stack.ready.url.clone(),
        key: Some(key.to_owned()),
        model: MODEL.into(),
        sessions: 8,
        turns: 5,
        rate: 8.0,
        seed,
        system_prompts: 3,
        system_tokens: 200,
        message_tokens: 30,
        think_ms: 50,
        subagents: 0,
        max_tokens: 16,
        stream: true,
        debug: true,
        timeout_s: 120,
        json: None,
        records: None,
    }
}

/// The ledger's rows by request id; two rows with one id would be a request billed twice.
fn ledger(rows: Vec<Value>) -> BTreeMap<String, Value> {
    let mut by_id = BTreeMap::new();
    for row in rows {
        let id = row["request_id"].as_str().expect("a request id").to_owned();
        let twice = by_id.insert(id.clone(), row);
        assert!(twice.is_none(), "{id} is billed twice: {twice:?}");
    }
    by_id
}

fn billed(row: &Value) -> Usage {
    let count = |name: &str| {
        row[name]
            .as_u64()
            .unwrap_or_else(|| panic!("{name} in {row}"))
    };
    Usage {
        prompt_tokens: count("input_tokens"),
        cached_tokens: count("cached_tokens"),
        completion_tokens: count("output_tokens"),
    }
}

/// Every acknowledged request stands in the ledger with what its client read.
fn assert_settled(records: &[Record], rows: &BTreeMap<String, Value>) -> usize {
    let acknowledged: Vec<&Record> = records
        .iter()
        .filter(|r| r.acknowledged && r.usage.is_some())
        .collect();
    for record in &acknowledged {
        let id = record.request_id.as_deref().expect("an id");
        let row = rows
            .get(id)
            .unwrap_or_else(|| panic!("{id} is not in the ledger: {record:?}"));
        assert_eq!(Some(billed(row)), record.usage, "{row}");
        assert_eq!(row["status"], "complete", "{row}");
        assert_eq!(row["node"].as_str(), record.node.as_deref(), "{row}");
        assert!(
            row["cost_nano_usd"].as_i64().is_some_and(|cost| cost >= 0),
            "{row}"
        );
    }
    acknowledged.len()
}

#[tokio::test]
async fn gateway_and_engine_count_alike_and_the_ledger_with_them() {
    // Catches a tokenizer, template, hash or salt that differs between gateway and engine for any
    // request of a load run, and a ledger that differs from what clients were told.
    let stack = Stack::start(2);
    let args = load(&stack, &stack.ready.api_key, 21);
    let run = agent::run(&args).await.expect("runs");
    assert!(
        run.records.iter().all(|r| r.failure.is_none()),
        "{:#?}",
        first_failure(&run.records)
    );
    assert_eq!(run.records.len(), 40);
    for record in &run.records {
        let usage = record.usage.expect("a usage");
        assert_eq!(
            record.gateway_prompt_tokens,
            Some(usage.prompt_tokens),
            "{record:?}"
        );
        assert!(
            record
                .expected_cached
                .is_some_and(|n| n <= usage.cached_tokens),
            "{record:?}"
        );
    }
    assert_eq!(stack.metric("homing_prompt_mismatch_total"), 0.0);
    assert_engines_agree(&stack, &args, &run.records).await;
    let rows = ledger(stack.report("request"));
    assert_eq!(assert_settled(&run.records, &rows), run.records.len());
    assert_eq!(rows.len(), run.records.len(), "rows of no request");
    // The sum by tenant is the sum of its requests.
    let totals = stack.report("tenant");
    let sum = |name: &str| -> u64 { rows.values().filter_map(|r| r[name].as_u64()).sum() };
    assert_eq!(totals.len(), 1, "{totals:?}");
    for name in [
        "input_tokens",
        "cached_tokens",
        "output_tokens",
        "cost_nano_usd",
    ] {
        assert_eq!(totals[0][name].as_u64(), Some(sum(name)), "{name}");
    }
    assert_eq!(totals[0]["requests"].as_u64(), Some(rows.len() as u64));
    stack.stop(Signal::INT);
}

/// Sends the text of every request of the run to its node, without the gateway: the node's own
/// count and hash must be those that the gateway told.
async fn assert_engines_agree(stack: &Stack, args: &agent::Args, records: &[Record]) {
    let token = node_token(stack).expect("nodes have a token");
    let salt = salt(stack, "demo");
    let mut compared = 0;
    for session in workload::plan(&args.shape().expect("checked")) {
        let mut messages = vec![message("system", &session.system)];
        for (number, planned) in session.turns.iter().enumerate() {
            messages.push(message("user", &planned.message));
            let told = records
                .iter()
                .find(|r| r.session == session.id && r.turn == number)
                .unwrap_or_else(|| panic!("turn {number} of {} is missing", session.id));
            let node = stack.node(told.node.as_deref().expect("a node"));
            let mut request = turn(&session.id, &messages, 1);
            request.body["cache_salt"] = Value::from(salt.as_str());
            let target = Target::parse(&node.url).expect("its address");
            let mut connection = Connection::new(&target);
            let own = good(chat::send(&mut connection, &target, Some(&token), &request).await);
            let tokens = own
                .header("x-node-prompt-tokens")
                .and_then(|v| v.parse().ok());
            assert_eq!(told.gateway_prompt_tokens, tokens, "{told:?}");
            let block = told.gateway_last_block.as_deref().expect("a hash");
            assert_eq!(block.len(), 32, "{told:?}");
            assert_eq!(own.header("x-node-last-block"), Some(block), "{told:?}");
            messages.push(message("assistant", &told.answer));
            compared += 1;
        }
    }
    assert_eq!(compared, records.len());
}

/// What separates a tenant's blocks from all others: HMAC-SHA256 of its scope by the fleet secret.
fn salt(stack: &Stack, scope: &str) -> String {
    let secret = std::fs::read_to_string(stack.data.join("secrets/fleet")).expect("a secret");
    let mut mac = Hmac::<Sha256>::new_from_slice(secret.trim().as_bytes()).expect("any length");
    mac.update(scope.as_bytes());
    mac.finalize()
        .into_bytes()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

fn first_failure(records: &[Record]) -> Option<&Record> {
    records.iter().find(|r| r.failure.is_some())
}

/// What a killed gateway may have relayed since its last checkpoint (docs/OPERATING.md).
const CHECKPOINT_TOKENS: u64 = 16;

#[test]
fn a_killed_gateway_forgets_no_acknowledged_request() {
    // Catches a record that is only in memory when the client has read its usage, and a stream that
    // is forgotten, or billed as whole, because nobody was left to see its end.
    let folder = tempfile::tempdir().expect("a temporary folder");
    let data = folder.path().join("data");
    let mut stack = Stack::start_on(&data, 2);
    // Answers long enough that most of a session's time is spent in a stream.
    let args = agent::Args {
        max_tokens: 96,
        ..load(&stack, &stack.ready.api_key, 22)
    };
    let runner = std::thread::spawn(move || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime")
            .block_on(agent::run(&args))
    });
    // In the middle: some answered, some running, some to come.
    let middle = wait_until(Duration::from_secs(120), || {
        stack.metric("homing_requests_total") >= 10.0
            && stack.metric("homing_requests_in_flight") >= 4.0
    });
    assert!(middle, "{}", stack.logs());
    stack.kill();
    let run = runner.join().expect("no panic").expect("runs");

    // What the kill left is told without a gateway, and again after a restart.
    let rows = ledger(report(&data, "request"));
    let settled = assert_settled(&run.records, &rows);
    assert!(settled >= 10, "{settled}");
    let stack = Stack::start_on(&data, 2);
    let rows = ledger(stack.report("request"));
    assert_eq!(assert_settled(&run.records, &rows), settled);
    // Streams that were cut are listed apart, with the tokens relayed.
    let cut: Vec<&Record> = run
        .records
        .iter()
        .filter(|r| !r.acknowledged && r.pieces > 0)
        .collect();
    assert!(
        !cut.is_empty(),
        "no stream was cut: {:#?}",
        first_failure(&run.records)
    );
    for record in cut {
        let id = record.request_id.as_deref().expect("an id");
        let row = rows
            .get(id)
            .unwrap_or_else(|| panic!("{id} is not in the ledger"));
        assert_eq!(row["status"], "cut", "{row}");
        let (billed, read) = (billed(row), record.pieces as u64);
        assert_eq!(
            Some(billed.prompt_tokens),
            record.gateway_prompt_tokens,
            "{row}"
        );
        // A chunk may have been on its way when the gateway died.
        assert!(billed.completion_tokens <= read + 2, "{read} read: {row}");
        assert!(
            billed.completion_tokens + CHECKPOINT_TOKENS >= read,
            "{read} read: {row}"
        );
    }
    stack.stop(Signal::INT);
}

#[tokio::test]
async fn a_stream_cut_by_its_node_is_billed_as_cut_with_what_was_relayed() {
    // Catches a cut stream that is free, billed in full, or shown as complete.
    let stack = Stack::start(1);
    let key = stack.ready.api_key.clone();
    let long = [
        message("system", "You count."),
        message("user", "Count from one to a thousand."),
    ];
    let request = turn("cut", &long, 2000);
    let talk = send(&stack, &key, &request);
    let killer = async {
        let deadline = Instant::now() + Duration::from_secs(60);
        let node = &stack.ready.nodes[0];
        while support::metric(
            &support::get(
                &format!("{}/metrics", node.url),
                node_token(&stack).as_deref(),
            )
            .1,
            "vllm:generation_tokens_total",
        ) < 5.0
        {
            assert!(Instant::now() < deadline, "no stream begins");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        signal_process(node.pid, Signal::KILL);
    };
    let (outcome, ()) = tokio::join!(talk, killer);
    let kind = outcome.failure.as_ref().map(|f| f.kind);
    assert!(
        matches!(kind, Some(FailureKind::StreamError | FailureKind::Cut)),
        "{:?} after {} pieces",
        outcome.failure,
        outcome.pieces.len()
    );
    let id = outcome.header("x-request-id").expect("an id").to_owned();
    let mut row = Value::Null;
    let settled = wait_until(Duration::from_secs(10), || {
        row = ledger(stack.report("request"))
            .remove(&id)
            .unwrap_or_default();
        row["status"] == "cut"
    });
    assert!(settled, "{row}");
    let usage = billed(&row);
    assert!(
        usage.prompt_tokens > 10 && usage.completion_tokens > 0,
        "{row}"
    );
    // Every piece that the client has read was relayed, and a piece is at least one token.
    let read = outcome.pieces.len() as u64;
    assert!(usage.completion_tokens >= read, "read {read}: {row}");
    // The next request is served by the restarted node, and billed as complete.
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let again = send(&stack, &key, &turn("again", &long, 4)).await;
        if again.failure.is_none() {
            let id = good(again)
                .header("x-request-id")
                .expect("an id")
                .to_owned();
            assert_eq!(ledger(stack.report("request"))[&id]["status"], "complete");
            break;
        }
        assert!(
            Instant::now() < deadline,
            "{:?}; {}",
            again.failure,
            stack.logs()
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// What the gateway's nodes demand on every route but `/health`.
fn node_token(stack: &Stack) -> Option<String> {
    std::fs::read_to_string(stack.data.join("secrets/node"))
        .ok()
        .map(|t| t.trim().to_owned())
}
