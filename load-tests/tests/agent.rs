//! Does the load generator tell the truth about what it sent and what came back?
//!
//! It runs against the scripted node, whose answers are known, so every figure of the report can be
//! said beforehand.

use std::net::SocketAddr;
use std::process::{Command, Output};

use load_tests::agent::{self, Record};
use load_tests::echo_node::{self, EchoNode};
use load_tests::report::Report;
use load_tests::workload;
use serde_json::Value;

/// Starts a scripted node on a thread of its own; it lives as long as the test process.
fn node(args: echo_node::Args) -> SocketAddr {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let node = EchoNode::bind(&args).await.expect("a port");
            sender
                .send(node.address().expect("bound"))
                .expect("the test waits");
            node.serve().await.expect("serves");
        });
    });
    receiver.recv().expect("the node is up")
}

fn echo(tokens: usize) -> echo_node::Args {
    echo_node::Args {
        listen: SocketAddr::from(([127, 0, 0, 1], 0)),
        model: "echo".into(),
        tokens,
        first_ms: 0,
        token_ms: 0,
        exit_with_stdin: false,
    }
}

/// Five overlapping sessions with sub-agents.
fn args(url: String) -> agent::Args {
    agent::Args {
        url,
        key: Some("sk-test".into()),
        model: "echo".into(),
        sessions: 5,
        turns: 4,
        rate: 200.0,
        seed: 3,
        system_prompts: 2,
        system_tokens: 200,
        message_tokens: 20,
        think_ms: 5,
        subagents: 2,
        max_tokens: 48,
        stream: true,
        debug: false,
        timeout_s: 60,
        json: None,
        records: None,
    }
}

fn load(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_homing-load"))
        .args(arguments)
        .output()
        .expect("it starts")
}

#[tokio::test]
async fn the_report_adds_up() {
    // Catches turns that are lost, counted twice, or sent without their session's header.
    let address = node(echo(7));
    let args = args(format!("http://{address}/v1"));
    let run = agent::run(&args).await.expect("runs");
    let turns = 5 * (4 + 2);
    assert_eq!((run.records.len(), run.not_sent), (turns, 0));
    assert!(
        run.records
            .iter()
            .all(|r| r.acknowledged && r.failure.is_none()),
        "{run:#?}"
    );
    assert!(
        run.records
            .iter()
            .all(|r| r.sent_ms >= r.intended_ms && r.ttft_ms.is_some())
    );
    assert!(run.records.iter().all(|r| r.pieces == 7));
    let report = Report::of(&run);
    assert_eq!((report.ok, report.output_tokens), (turns, 7 * turns as u64));
    assert_eq!((report.cached_tokens, report.hit_ratio), (0, 0.0));
    // A turn's prompt holds the turns before it.
    let prompts: Vec<u64> = run
        .records
        .iter()
        .filter(|r| r.session == "agent-3-0")
        .map(|r| r.usage.expect("a usage").prompt_tokens)
        .collect();
    assert_eq!(prompts.len(), 4);
    assert!(prompts.windows(2).all(|w| w[0] < w[1]), "{prompts:?}");
    // The same seed sends the same thing at the same planned times.
    let again = agent::run(&args).await.expect("runs");
    let sent = |records: &[Record]| {
        let mut sent: Vec<_> = records
            .iter()
            .map(|r| {
                (
                    r.session.clone(),
                    r.turn,
                    r.usage.expect("a usage").prompt_tokens,
                )
            })
            .collect();
        sent.sort();
        sent
    };
    assert_eq!(sent(&run.records), sent(&again.records));
}

#[tokio::test]
async fn a_slow_server_does_not_slow_the_load_down() {
    // Catches a closed loop: sessions that begin late, or times counted from a late sending, hide
    // what a slow server does to those who do not wait for each other.
    let address = node(echo_node::Args {
        first_ms: 40,
        token_ms: 40,
        ..echo(8)
    });
    let args = args(format!("http://{address}/v1"));
    let run = agent::run(&args).await.expect("runs");
    for (number, session) in workload::plan(&args.shape().expect("valid"))
        .iter()
        .enumerate()
    {
        let first = run
            .records
            .iter()
            .find(|r| r.session == session.id && r.turn == 0)
            .unwrap_or_else(|| panic!("session {number} never began"));
        let due_ms = session.arrival.as_secs_f64() * 1e3;
        assert!(
            (first.intended_ms - due_ms).abs() < 1e-3,
            "{} {due_ms}",
            first.intended_ms
        );
        let late_ms = first.sent_ms - first.intended_ms;
        // Each answer takes 8 × 40 ms; the times contain all of it and the lateness too.
        assert!(first.latency_ms >= 320.0 + late_ms, "{first:?}");
        assert!(
            first.ttft_ms.is_some_and(|ms| ms >= 40.0 + late_ms),
            "{first:?}"
        );
        assert!(first.tpot_ms.is_some_and(|ms| ms >= 10.0), "{first:?}");
    }
}

#[test]
fn the_command_writes_table_json_and_records() {
    // Catches an interface that scripts depend on changing its names.
    let address = node(echo(3));
    let folder = tempfile::tempdir().expect("a temporary folder");
    let [report, records] = ["report.json", "records.jsonl"].map(|f| folder.path().join(f));
    let url = format!("http://{address}/v1");
    let output = load(&[
        "agent",
        "--url",
        &url,
        "--key",
        "k",
        "--model",
        "echo",
        "--sessions",
        "3",
        "--turns",
        "2",
        "--rate",
        "100",
        "--seed",
        "1",
        "--think-ms",
        "1",
        "--stream",
        "false",
        "--json",
        report.to_str().expect("UTF-8"),
        "--records",
        records.to_str().expect("UTF-8"),
    ]);
    assert!(output.status.success(), "{output:?}");
    let table = String::from_utf8(output.stdout).expect("UTF-8");
    for word in ["hit ratio", "TTFT", "TPOT", "output tokens", "6 ok"] {
        assert!(table.contains(word), "{word} in {table}");
    }
    let report: Value =
        serde_json::from_str(&std::fs::read_to_string(report).expect("written")).expect("JSON");
    assert_eq!(report["requests"], 6);
    for name in [
        "hit_ratio",
        "ttft_ms",
        "tpot_ms",
        "errors",
        "output_tokens_per_s",
        "nodes",
    ] {
        assert!(report.get(name).is_some(), "{name} in {report}");
    }
    let lines = std::fs::read_to_string(records).expect("written");
    let records: Vec<Record> = lines
        .lines()
        .map(|l| serde_json::from_str(l).expect("a record"))
        .collect();
    assert_eq!(records.len(), 6);
}

#[test]
fn exit_codes_say_what_happened() {
    // Catches a load test in CI that passes although nothing worked.
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = nobody.local_addr().expect("bound");
    drop(nobody);
    let check = |url: &str, more: &[&str], code: i32, words: &str| {
        let mut arguments = vec!["agent", "--url", url, "--model", "echo", "--sessions", "2"];
        arguments.extend(["--turns", "2", "--think-ms", "1", "--rate", "100"]);
        arguments.retain(|a| !more.contains(a) || !a.starts_with("--"));
        arguments.extend(more);
        let output = load(&arguments);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{url} {more:?}: {stderr}");
        assert!(stderr.contains(words), "{words:?} in {stderr}");
    };
    check(
        &format!("http://{address}/v1"),
        &[],
        1,
        "all 2 requests failed; the first with connect",
    );
    check("https://127.0.0.1/v1", &[], 2, "https is not spoken");
    check("nonsense", &[], 2, "http://HOST:PORT/v1");
    let up = node(echo(1));
    check(&format!("http://{up}/v2"), &[], 1, "http_404: no such path");
    check(&format!("http://{up}/v1"), &[], 0, "");
}

#[test]
fn http_bench_measures_every_request() {
    // Catches a bench that counts failures as fast requests.
    let address = node(echo(2));
    let output = load(&[
        "http-bench",
        "--url",
        &format!("http://{address}"),
        "--model",
        "echo",
        "--requests",
        "64",
        "--warmup",
        "8",
        "--concurrency",
        "4",
        "--body-bytes",
        "5000",
    ]);
    let figures: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(
        (figures["requests"].as_u64(), figures["failed"].as_u64()),
        (Some(64), Some(0))
    );
    assert!(figures["latency_us"]["p50"].as_f64().expect("a number") > 0.0);
    let broken = load(&[
        "http-bench",
        "--url",
        &format!("http://{address}/x"),
        "--model",
        "echo",
    ]);
    assert_eq!(broken.status.code(), Some(1), "{broken:?}");
}
