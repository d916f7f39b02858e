//! Does the bench of nodes apart measure what it says? Real nodes and gateway, in a few seconds;
//! what the figures are is not looked at.

mod support;

use std::process::{Command, Output};

use serde_json::Value;
use support::{binary, model_path};

fn bench(flags: &[&str]) -> Output {
    let mut command = Command::new(binary("homing-load"));
    command.arg("disaggregation-bench");
    command.arg("--homing").arg(binary("homing"));
    command.arg("--engine").arg(binary("homing-engine"));
    command.arg("--model").arg(model_path());
    // So many turns that some come in the measured time, however fast the machine is.
    command.args(["--rounds", "1", "--streams", "2", "--stream-tokens", "16"]);
    command.args(["--agents", "2", "--turns", "2", "--load", "4"]);
    command.args(["--seconds", "2", "--warm-s", "1", "--json", "-"]);
    command.args(flags).output().expect("it runs")
}

/// Catches a bench whose arrangements are not what they are called, and one that loses requests.
#[test]
fn prompts_are_handed_over_where_nodes_are_apart_and_nowhere_else() {
    let done = bench(&[
        "--arrangements=apart,whole",
        "--first-tokens=400",
        "--more-tokens=300",
    ]);
    let stderr = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{stderr}");
    let told: Value = serde_json::from_slice(&done.stdout).expect("JSON");
    let figure = |row: usize, name: &str| told["rows"][row]["median"][name].as_f64();
    for row in [0, 1] {
        assert_eq!(figure(row, "failed"), Some(0.0), "{stderr}");
        assert!(figure(row, "turns") > Some(0.0), "{stderr}");
    }
    assert!(figure(0, "transfers received") > Some(0.0), "{told}");
    assert_eq!(figure(0, "transfers failed"), Some(0.0), "{told}");
    assert_eq!(figure(1, "shared turns"), Some(0.0), "{told}");
    assert_eq!(figure(0, "turns"), figure(1, "turns"), "the same is asked");
}

/// Catches a bench that reports figures of nodes apart although no prompt was handed over: here
/// none is long enough for it to be worth while.
#[test]
fn a_run_without_handovers_is_refused() {
    let done = bench(&[
        "--arrangements=apart",
        "--first-tokens=60",
        "--more-tokens=40",
    ]);
    let stderr = String::from_utf8_lossy(&done.stderr);
    assert_eq!(done.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("no turn was shared"), "{stderr}");
}
