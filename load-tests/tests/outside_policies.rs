//! Does a simulation with a policy in a process of its own give that policy's figures, and does a
//! broken one end it with a reason and leave nothing behind?

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use load_tests::process::wait_gone;
use load_tests::simulate::outside;
use simulate::compare::{Case, Row, rows};
use simulate::policy::Spec;
use simulate::scenario::{Load, Scenario, Slice};
use simulate::scenarios::Setup;
use simulate::trace::Trace;

const BINARY: &str = env!("CARGO_BIN_EXE_homing-load");
/// Far above what a start takes on a busy machine.
const LONG: Duration = Duration::from_secs(60);

/// Sessions of four turns behind one system prompt, more of them than caches of 60 blocks hold.
fn trace() -> String {
    let mut text = "{\"name\":\"small\",\"block\":512,\"mode\":\"closed\"}\n".to_owned();
    for session in 0..30 {
        let first = session * 4;
        let (from, keep, new) = if session == 0 { (-1, 0, 4) } else { (0, 2, 2) };
        text += &format!("[0,{session},2100,40,-1,0,{from},{keep},{new}]\n");
        for turn in 1..4 {
            let (before, keep) = (first + turn - 1, 3 + turn);
            let tokens = 2100 + 600 * turn;
            text += &format!("[0,{session},{tokens},40,{before},3000,{before},{keep},1]\n");
        }
    }
    text
}

fn scenario(trace: &Trace) -> Scenario {
    let setup = Setup {
        horizon_s: Some(400.0),
        warm_s: Some(60.0),
        ..Setup::new(3, 60, Load::Users(24))
    };
    setup.scenario(trace, Slice::All, 1)
}

/// One policy's row, its process started where it has one.
fn row(policy: &str) -> Row {
    let trace = Trace::read("small", trace().as_bytes()).expect("a valid trace");
    let scenario = scenario(&trace);
    let case = |seed| Case {
        spec: Spec::parse(policy).expect("a policy"),
        seed,
    };
    let played = (1..=5).map(case).map(|case| {
        let summary = match case.spec.command() {
            Some(command) => outside::play(command, &case, (&trace, &scenario), LONG),
            None => Ok(case.play(&trace, &scenario).expect("a policy in here")),
        };
        (case, summary.expect("plays"))
    });
    let played: Vec<_> = played.collect();
    rows(&played).remove(0)
}

/// Would `homing-load policy` be told less than the product's policy in here, or later? They differ
/// in who breaks a tie (sessions have names there and numbers here), and a policy that knows
/// nothing of caches is far from both.
#[test]
fn the_product_in_a_process_of_its_own_has_the_products_figures() {
    let here = row("homing");
    let outside = row(&format!("ext:{BINARY} policy"));
    let blind = row("round-robin");
    assert_eq!(outside.policy, format!("ext:{BINARY} policy"));
    assert!(here.mean.requests > 200.0, "{:?}", here.mean);
    let apart = |row: &Row| {
        (
            (row.mean.hit_ratio - here.mean.hit_ratio).abs(),
            (row.mean.ttft_mean_ms / here.mean.ttft_mean_ms - 1.0).abs(),
        )
    };
    let (hits, ttft) = apart(&outside);
    assert!(hits < 0.02 && ttft < 0.05, "{hits} {ttft}");
    let (hits, ttft) = apart(&blind);
    assert!(hits > 0.1 && ttft > 0.2, "{hits} {ttft}");
}

fn simulate(folder: &Path, policies: &[&str]) -> Output {
    let trace = folder.join("t.trie");
    fs::write(&trace, self::trace()).expect("written");
    let mut command = Command::new(BINARY);
    command.args([
        "simulate",
        "--users",
        "4",
        "--horizon",
        "100",
        "--warm",
        "10",
    ]);
    command.arg("--trace").arg(&trace);
    policies.iter().for_each(|policy| {
        command.args(["--policy", policy]);
    });
    command.output().expect("homing-load runs")
}

/// Would a command be cut at its comma, its parameters be swept, or two of them share a line?
#[test]
fn a_command_is_taken_whole_and_stands_beside_other_policies() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let first = "while read -r line; do case $line in *request*) echo '{\"node\":0}';; esac; done";
    let commas = format!("session:bound=2,ext:true a,b; {first}");
    let last = format!("ext:{}", first.replace(":0", ":1"));
    let output = simulate(folder.path(), &[&commas, &last]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    let table = String::from_utf8(output.stdout).expect("text");
    for label in ["session:bound=2", &commas[16..], &last] {
        assert!(table.contains(label), "{label} is not in\n{table}");
    }
}

/// Every way in which a policy can break ends the run with its name, a reason and its own words.
#[test]
fn broken_policies_end_the_run_with_a_reason() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let check = |command: &str, expected: &[&str]| {
        let output = simulate(folder.path(), &[&format!("ext:{command}")]);
        let error = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(1), "{command}: {error}");
        assert!(output.stdout.is_empty(), "{command}");
        for expected in expected {
            assert!(error.contains(expected), "{command}: {error}");
        }
    };
    check(
        "echo no such model >&2; exit 3",
        &["ext:echo no", "exit code 3", "no such model"],
    );
    check("no-such-program-anywhere", &["exit code 127"]);
    check("read line; kill -9 $$", &["ended early, by a signal"]);
    check("exec 1>&-; cat >&2", &["closed its input or its output"]);
    check(
        "yes '{\"node\":8}'",
        &["answered \"{\\\"node\\\":8}\"", "0 to 7"],
    );
    check("yes hello", &["answered \"hello\"", "not {\"node\":N}"]);
}

/// Silence is noticed, and neither the shell nor what it started is left.
#[test]
fn a_silent_policy_is_ended_with_what_it_started() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let pids = folder.path().join("pids");
    let command = format!(
        "sleep 1000 & echo $$ $! > {}; wait; cat > /dev/null",
        pids.display()
    );
    let trace = Trace::read("small", trace().as_bytes()).expect("a valid trace");
    let case = Case {
        spec: Spec::parse(&format!("ext:{command}")).expect("a policy"),
        seed: 1,
    };
    let played = (&trace, &scenario(&trace));
    let patience = Duration::from_millis(300);
    let error = outside::play(&command, &case, played, patience).expect_err("silence");
    assert!(
        error.to_string().contains("did not answer within 300ms"),
        "{error}"
    );
    let pids = fs::read_to_string(&pids).expect("it had started");
    let pids: Vec<u32> = pids
        .split_whitespace()
        .map(|pid| pid.parse().expect("a pid"))
        .collect();
    assert_eq!(pids.len(), 2);
    assert!(pids.iter().all(|pid| wait_gone(*pid, LONG)), "{pids:?}");
}
