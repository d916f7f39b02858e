//! Does one command start everything, and is everything gone when it ends?
//!
//! Processes are watched by their ids from outside; ends are waited for with a deadline.

mod support;

use std::time::{Duration, Instant};

use load_tests::process::{is_alive, signal_process, wait_gone, wait_until};
use rustix::process::Signal;
use support::{Stack, get, good, message, send, turn};

#[tokio::test]
async fn a_killed_gateway_takes_its_nodes_along_and_the_next_start_is_clean() {
    // Catches orphaned nodes that hold memory and ports, and data that a crash has spoilt.
    let folder = tempfile::tempdir().expect("a temporary folder");
    let data = folder.path().join("data");
    let mut stack = Stack::start_on(&data, 2);
    let talk = [message("user", "Say something.")];
    let outcome = good(send(&stack, &stack.ready.api_key, &turn("s", &talk, 4)).await);
    let first = outcome.header("x-request-id").expect("an id").to_owned();
    let nodes: Vec<u32> = stack.ready.nodes.iter().map(|n| n.pid).collect();
    assert!(nodes.iter().all(|pid| is_alive(*pid)));
    stack.kill();
    let killed = Instant::now();
    for pid in nodes {
        let left = Duration::from_secs(2).saturating_sub(killed.elapsed());
        assert!(
            wait_gone(pid, left),
            "node {pid} outlives its gateway by 2 s"
        );
    }
    let again = Stack::start_on(&data, 2);
    // The first start's key still opens it, and the bill of before is there.
    let outcome = good(send(&again, &stack.ready.api_key, &turn("s", &talk, 4)).await);
    let second = outcome.header("x-request-id").expect("an id").to_owned();
    let ids: Vec<String> = again
        .report("request")
        .iter()
        .map(|row| row["request_id"].as_str().expect("an id").to_owned())
        .collect();
    assert_eq!(ids.len(), 2, "{ids:?}");
    assert!(ids.contains(&first) && ids.contains(&second), "{ids:?}");
    again.stop(Signal::INT);
}

#[test]
fn a_node_is_restarted_at_its_address_every_time_it_dies() {
    // Catches a supervisor that gives up after one death, and a new address that no one knows.
    let stack = Stack::start(1);
    let node = stack.ready.nodes[0].clone();
    for round in 0..2 {
        // A node's process is found from outside by its command line, as `ps` would.
        let pid = *support_nodes(&stack).first().expect("a running node");
        signal_process(pid, Signal::KILL);
        let back = wait_until(Duration::from_secs(60), || {
            support_nodes(&stack).first().is_some_and(|now| *now != pid)
                && get(&format!("{}/health", node.url), None).0 == 200
        });
        assert!(back, "round {round}: {}", stack.logs());
    }
    stack.stop(Signal::TERM);
}

/// Running nodes of this stack.
fn support_nodes(stack: &Stack) -> Vec<u32> {
    let is_node = |pid: &u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains("homing-engine") && is_alive(*pid)
    };
    load_tests::process::family(stack.ready.pid)
        .into_iter()
        .filter(is_node)
        .collect()
}

#[tokio::test]
async fn a_signal_lets_answers_finish_and_leaves_nothing() {
    // Catches a Ctrl-C that cuts a running answer, ends with an error, or leaves a process.
    for signal in [Signal::INT, Signal::TERM] {
        let stack = Stack::start(2);
        let key = stack.ready.api_key.clone();
        let pid = stack.program.pid();
        let talk = [message("user", "Tell a long story.")];
        let request = turn("drain", &talk, 40);
        let answer = send(&stack, &key, &request);
        let killer = async {
            let deadline = Instant::now() + Duration::from_secs(60);
            while stack.metric("homing_requests_in_flight") < 1.0 {
                assert!(Instant::now() < deadline, "no request begins");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            signal_process(pid, signal);
        };
        let (outcome, ()) = tokio::join!(answer, killer);
        good(outcome);
        // The second signal of the same kind finds it ending or gone; neither is an error.
        stack.stop(signal);
    }
}

#[test]
fn what_it_prints_is_for_scripts_and_tells_no_secret() {
    // Catches a key or a node token in the log, and a second start on data that is in use.
    let stack = Stack::start(1);
    assert_eq!(stack.ready.pid, stack.program.pid());
    assert!(stack.ready.url.ends_with("/v1"), "{:?}", stack.ready);
    let log = stack.logs();
    assert!(!log.is_empty());
    let token = std::fs::read_to_string(stack.data.join("secrets/node")).expect("a node token");
    for secret in [stack.ready.api_key.as_str(), token.trim()] {
        assert!(
            !secret.is_empty() && !log.contains(secret),
            "a secret in the log: {log}"
        );
    }
    let (status, body) = get(&format!("{}/models", stack.ready.url), None);
    assert_eq!(status, 401, "{body}");
    assert!(body.contains("\"error\""), "{body}");
    let second = std::process::Command::new(support::binary("homing"))
        .args([
            "up",
            "--listen",
            "127.0.0.1:0",
            "--admin",
            "127.0.0.1:0",
            "--nodes",
            "1",
        ])
        .arg("--model")
        .arg(support::model_path())
        .arg("--data")
        .arg(&stack.data)
        .stdin(std::process::Stdio::null())
        .output()
        .expect("it runs");
    assert!(!second.status.success(), "two on the same data: {second:?}");
    stack.stop(Signal::INT);
}
