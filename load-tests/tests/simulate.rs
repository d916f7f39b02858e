//! Does our simulator agree with an independent one, and does its command line keep its word?
//!
//! The independent one and the public traces are not part of the repository; without them those
//! tests say so and pass.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use load_tests::simulate::read_trace;
use simulate::compare::{Case, ci95};
use simulate::engine::tiers::TierParams;
use simulate::policy::Spec;
use simulate::scenario::{Load, Slice};
use simulate::scenarios::Setup;
use simulate::trace::Trace;

/// Enough that a confidence interval means something.
const SEEDS: std::ops::RangeInclusive<u64> = 1..=20;

/// What both simulators play.
struct Both {
    trace: &'static str,
    /// As the other one wants it.
    keys: &'static str,
    setup: Setup,
    /// Memory of each node below its pool, and a store that all share.
    tiers: [Option<TierParams>; 2],
    /// The other one's names and ours.
    policies: &'static [(&'static str, &'static str)],
}

/// One policy's hit ratio and mean TTFT in one run.
#[derive(Clone, Copy, Debug)]
struct Point {
    hit_ratio: f64,
    ttft_ms: f64,
}

fn shared(path: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../shared")
        .join(path);
    if path.exists() {
        return Some(path);
    }
    eprintln!("skipped: there is no {}", path.display());
    None
}

fn both() -> Vec<Both> {
    const LOAD_AND_SESSION: &[(&str, &str)] =
        &[("lor", "least-outstanding"), ("sess", "session:bound=1e9")];
    let agents = |capacity, users| Setup::new(8, capacity, Load::Users(users));
    let weka = |keys, setup| Both {
        trace: "weka",
        keys,
        setup,
        tiers: [None; 2],
        policies: LOAD_AND_SESSION,
    };
    let copies = Load::Copies {
        copies: 2,
        speed: 1.25,
    };
    vec![
        weka("nodes=8 cap=12000 users=450", agents(12_000, 450)),
        weka("nodes=8 cap=3000 users=170", agents(3000, 170)),
        weka("nodes=8 cap=3000 users=220", agents(3000, 220)),
        Both {
            trace: "mooncake_conversation",
            keys: "nodes=8 cap=3000 copies=2 speed=1.25",
            setup: Setup::new(8, 3000, copies),
            tiers: [None; 2],
            policies: &LOAD_AND_SESSION[..1],
        },
        Both {
            tiers: [
                Some(TierParams {
                    blocks: 6000,
                    gb_per_s: 25.0,
                }),
                Some(TierParams {
                    blocks: 50_000,
                    gb_per_s: 4.0,
                }),
            ],
            ..weka(
                "nodes=8 cap=3000 users=220 host=6000 hostbw=25 glob=50000 globbw=4",
                agents(3000, 220),
            )
        },
    ]
}

/// Would a change of the model, of the load or of a reader go unseen? Mean hit ratio and mean TTFT
/// over 20 seeds must lie in the other simulator's 95 % confidence interval of the mean, or within
/// 0.01 and 5 % of its mean.
#[test]
fn the_means_agree_with_an_independent_simulator() {
    let (Some(source), Some(traces)) = (shared("routing/routesim.rs"), shared("traces")) else {
        return;
    };
    let scratch = tempfile::tempdir().expect("a temporary directory");
    let program = scratch.path().join("other");
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned());
    let built = Command::new(rustc)
        .args(["-O", "--cap-lints", "allow", "-o"])
        .args([&program, &source])
        .output()
        .expect("rustc runs");
    assert!(
        built.status.success(),
        "{}",
        String::from_utf8_lossy(&built.stderr)
    );
    let mut failures = Vec::new();
    for both in both() {
        let packed = traces.join(format!("{}.trie.zst", both.trace));
        let unpacked = scratch.path().join(format!("{}.trie", both.trace));
        unpack(&packed, &unpacked);
        let trace = read_trace(&packed).expect("a trace");
        for (theirs, ours) in both.policies {
            let points = play(&both, theirs, ours, &trace, (&program, &unpacked));
            let line = compare(&points);
            eprintln!("{} {} {ours}: {}", both.trace, both.keys, line.text);
            if !line.agrees {
                failures.push(format!("{} {ours}: {}", both.keys, line.text));
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

fn unpack(packed: &Path, unpacked: &Path) {
    let input = fs::File::open(packed).expect("a packed trace");
    let mut input = zstd::stream::read::Decoder::new(input).expect("zstd");
    let mut output = fs::File::create(unpacked).expect("a file");
    io::copy(&mut input, &mut output).expect("unpacks");
}

/// Every seed in both simulators, theirs and ours.
fn play(
    both: &Both,
    theirs: &str,
    ours: &str,
    trace: &Trace,
    (program, unpacked): (&Path, &Path),
) -> Vec<(Point, Point)> {
    let seeds = Mutex::new(SEEDS);
    let points = Mutex::new(Vec::new());
    let next = || seeds.lock().expect("no test thread panics").next();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(seed) = next() {
                    let theirs = their_point(both, theirs, seed, program, unpacked);
                    let mut scenario = both.setup.scenario(trace, Slice::Dev, seed);
                    [scenario.fleet.host, scenario.fleet.store] = both.tiers;
                    let spec = Spec::parse(ours).expect("a policy");
                    let figures = Case { spec, seed }
                        .play(trace, &scenario)
                        .expect("plays")
                        .figures;
                    let ours = Point {
                        hit_ratio: figures.hit_ratio,
                        ttft_ms: figures.ttft_mean_ms,
                    };
                    points
                        .lock()
                        .expect("no test thread panics")
                        .push((theirs, ours));
                }
            });
        }
    });
    points.into_inner().expect("no test thread panics")
}

fn their_point(both: &Both, policy: &str, seed: u64, program: &Path, trace: &Path) -> Point {
    let output = Command::new(program)
        .arg(trace)
        .args(both.keys.split(' '))
        .args([
            "slice=dev",
            &format!("seed={seed}"),
            &format!("policy={policy}"),
        ])
        .output()
        .expect("the other simulator runs");
    let text = String::from_utf8(output.stdout).expect("text");
    let mut lines = text
        .lines()
        .map(|line| line.split('\t').collect::<Vec<_>>());
    let (names, values) = (
        lines.next().expect("a header"),
        lines.next().expect("a row"),
    );
    let value = |name: &str| -> f64 {
        let column = names
            .iter()
            .position(|n| *n == name)
            .expect("a known column");
        values[column].parse().expect("a number")
    };
    Point {
        // It counts apart what comes from slower tiers.
        hit_ratio: value("hit") + value("tier"),
        ttft_ms: value("ttft_mean"),
    }
}

struct Line {
    text: String,
    agrees: bool,
}

fn compare(points: &[(Point, Point)]) -> Line {
    assert!(points.len() >= 20, "only {} runs", points.len());
    let mean = |of: &dyn Fn(&(Point, Point)) -> f64| {
        points.iter().map(of).sum::<f64>() / points.len() as f64
    };
    let their_hits = mean(&|p| p.0.hit_ratio);
    let our_hits = mean(&|p| p.1.hit_ratio);
    let their_ttft = mean(&|p| p.0.ttft_ms);
    let our_ttft = mean(&|p| p.1.ttft_ms);
    let hits_ci = ci95(points.iter().map(|p| p.0.hit_ratio));
    let ttft_ci = ci95(points.iter().map(|p| p.0.ttft_ms));
    let hits_off = (our_hits - their_hits).abs();
    let ttft_off = (our_ttft - their_ttft).abs();
    Line {
        text: format!(
            "hit ratio {our_hits:.4}, theirs {their_hits:.4} ± {hits_ci:.4}; mean TTFT \
             {our_ttft:.0} ms, theirs {their_ttft:.0} ± {ttft_ci:.0} ms"
        ),
        agrees: hits_off <= hits_ci.max(0.01) && ttft_off <= ttft_ci.max(0.05 * their_ttft),
    }
}

/// Would a decision that counts what lies in slower tiers serve worse than one that does not? Where
/// a link is quick, much better; where it is as slow as computing, about the same.
#[test]
fn reading_the_tiers_is_never_worse_than_ignoring_them() {
    let Some(traces) = shared("traces") else {
        return;
    };
    let trace = read_trace(&traces.join("weka.trie.zst")).expect("a trace");
    let tier = |gb_per_s: f64| {
        Some(TierParams {
            blocks: 50_000,
            gb_per_s,
        })
    };
    for (host, store, at_most) in [
        (None, tier(10.0), 0.7),
        (None, tier(2.0), 1.1),
        (tier(25.0), None, 0.7),
        (tier(25.0), tier(4.0), 0.7),
    ] {
        let mean_ms = |policy: &str| {
            let setup = Setup::new(8, 3000, Load::Users(220));
            let mut scenario = setup.scenario(&trace, Slice::Dev, 21);
            (scenario.fleet.host, scenario.fleet.store) = (host, store);
            let runs = (21..24).map(|seed| {
                let spec = Spec::parse(policy).expect("a policy");
                let summary = Case { spec, seed }.play(&trace, &scenario);
                summary.expect("plays").figures.ttft_mean_ms
            });
            runs.sum::<f64>() / 3.0
        };
        let (reads, ignores) = (mean_ms("homing-gate"), mean_ms("homing-gate:tiers=0"));
        eprintln!("{host:?} {store:?}: {reads:.0} ms, {ignores:.0} ms without");
        assert!(
            reads <= at_most * ignores,
            "{host:?} {store:?}: {reads} ms, {ignores} without"
        );
    }
}

/// Would the reader of Mooncake's own files and the one of the re-coded ones differ on what they
/// say of the same requests?
#[test]
fn mooncakes_file_and_its_re_coding_give_the_same_requests() {
    for name in ["mooncake_conversation", "mooncake_synthetic"] {
        let original = shared(&format!("traces/{name}_trace.jsonl.zst"));
        let recoded = shared(&format!("traces/{name}.trie.zst"));
        let (Some(original), Some(recoded)) = (original, recoded) else {
            return;
        };
        let original = read_trace(&original).expect("Mooncake's JSONL");
        let recoded = read_trace(&recoded).expect("a trie");
        assert_eq!(original.requests.len(), recoded.requests.len());
        for (i, (a, b)) in original.requests.iter().zip(&recoded.requests).enumerate() {
            assert_eq!(a.at_ms, b.at_ms, "{name} request {i}");
            assert_eq!(a.prompt_tokens, b.prompt_tokens, "{name} request {i}");
            assert_eq!(a.output_tokens, b.output_tokens, "{name} request {i}");
            assert_eq!(
                original.path(i as u32),
                recoded.path(i as u32),
                "{name} request {i}"
            );
            assert_eq!(a.after, b.after, "{name} request {i}");
        }
    }
}

/// Sessions of three turns behind one system prompt.
fn small_trace() -> String {
    let mut text = "{\"name\":\"small\",\"block\":512,\"mode\":\"closed\"}\n".to_owned();
    for session in 0..20 {
        let first = session * 3;
        let (from, keep, new) = if session == 0 { (-1, 0, 4) } else { (0, 2, 2) };
        text += &format!("[0,{session},2100,40,-1,0,{from},{keep},{new}]\n");
        for turn in 1..3 {
            let before = first + turn - 1;
            let keep = 3 + turn;
            text += &format!("[0,{session},2700,40,{before},3000,{before},{keep},1]\n");
        }
    }
    text
}

fn simulate(arguments: &[&str]) -> std::process::Output {
    Command::new(env!("CARGO_BIN_EXE_homing-load"))
        .arg("simulate")
        .args(arguments)
        .output()
        .expect("homing-load runs")
}

/// Would a script that reads the JSON find other names, or a packed trace give another result?
#[test]
fn the_command_line_writes_table_json_and_page() {
    let scratch = tempfile::tempdir().expect("a temporary directory");
    let at = |name: &str| scratch.path().join(name).display().to_string();
    let (plain, packed) = (at("t.trie"), at("t.trie.zst"));
    fs::write(&plain, small_trace()).expect("written");
    let bytes = zstd::encode_all(small_trace().as_bytes(), 3).expect("packs");
    fs::write(&packed, bytes).expect("written");
    let common = [
        "--nodes",
        "2",
        "--capacity",
        "60",
        "--users",
        "6",
        "--horizon",
        "300",
        "--warm",
        "60",
        "--seeds",
        "2",
        "--policy",
        "all",
    ];
    let (json, html) = (at("out.json"), at("out.html"));
    let to_files = [
        &common[..],
        &["--trace", &plain, "--json", &json, "--html", &html],
    ]
    .concat();
    let output = simulate(&to_files);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let table = String::from_utf8(output.stdout).expect("text");
    for expected in ["small", "homing", "round-robin", "llm-d", "oracle", "floor"] {
        assert!(table.contains(expected), "{expected} is not in\n{table}");
    }
    let text = fs::read_to_string(&json).expect("written");
    let reports: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let report = &reports[0];
    assert_eq!(report["trace"], "small");
    assert_eq!(report["slice"], "dev");
    let rows = report["rows"].as_array().expect("rows");
    assert!(rows.len() > 60);
    for row in rows {
        assert_eq!(row["seeds"], serde_json::json!([1, 2]));
        let mean = &row["mean"];
        for figure in [
            "requests",
            "hit_ratio",
            "ttft_mean_ms",
            "ttft_p99_ms",
            "balance",
        ] {
            assert!(mean[figure].is_f64(), "{figure} of {}", row["label"]);
        }
        assert!(mean["requests"].as_f64() > Some(20.0));
    }
    assert_eq!(report["distances"][0]["figure"], "ttft_mean_ms");
    assert!(report["distances"][0]["reference"]["ratio"].is_f64());
    let page = fs::read_to_string(&html).expect("written");
    assert!(page.contains("<svg") && !page.contains("http"));
    // The same again, packed, on one thread and to stdout: the seed decides everything.
    let to_stdout = [
        &common[..],
        &["--trace", &packed, "--json", "-", "--jobs", "1"],
    ]
    .concat();
    let output = simulate(&to_stdout);
    assert_eq!(String::from_utf8(output.stdout).expect("text"), text);
}

/// Would a slip be played as something else, or end without saying what to do?
#[test]
fn a_wrong_command_line_is_refused_by_name() {
    let scratch = tempfile::tempdir().expect("a temporary directory");
    let at = |name: &str| scratch.path().join(name).display().to_string();
    let (trace, broken) = (at("t.trie"), at("broken.trie"));
    fs::write(&trace, small_trace()).expect("written");
    fs::write(&broken, small_trace().replace("[0,3,", "[0,x,")).expect("written");
    let check = |arguments: &[&str], code: i32, expected: &str| {
        let output = simulate(arguments);
        let error = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {error}");
        assert!(error.contains(expected), "{arguments:?}: {error}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
    };
    let with = |more: &[&'static str]| -> Vec<String> {
        let start = ["--trace", &trace].map(str::to_owned);
        start
            .into_iter()
            .chain(more.iter().map(|m| (*m).to_owned()))
            .collect()
    };
    let table: &[(&[&'static str], &str)] = &[
        (&[], "--users: needed"),
        (&["--users", "0"], "--users: at least 1"),
        (&["--users", "2", "--copies", "2"], "cannot be used with"),
        (&["--users", "2", "--nodes", "0"], "--nodes: from 1"),
        (
            &["--users", "2", "--capacity", "2"],
            "--capacity: at least 3",
        ),
        (&["--users", "2", "--seeds", "0"], "--seeds: at least 1"),
        (
            &["--users", "2", "--horizon", "0"],
            "--horizon: above 0 seconds",
        ),
        (
            &["--users", "2", "--warm", "5000"],
            "--warm: before the end",
        ),
        (&["--users", "2", "--policy", "best"], "no policy \"best\""),
        (
            &["--users", "2", "--policy", "oracle:q=1"],
            "no parameter \"q\"",
        ),
        (&["--users", "2", "--regions", "9"], "--regions"),
        (
            &["--users", "2", "--weights", "1,2"],
            "--weights: one number for each region",
        ),
        (&["--users", "2", "--roam", "2"], "--roam: from 0 to 1"),
    ];
    for (arguments, expected) in table {
        let arguments = with(arguments);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        check(&arguments, 2, expected);
    }
    check(
        &["--scenario", "none", "--traces", "."],
        2,
        "\"none\" is none of all, agentic-ample",
    );
    check(&["--scenario", "all"], 2, "--traces");
    check(&[], 2, "--trace");
    check(&["--trace", &at("missing"), "--users", "1"], 1, "missing");
    check(&["--trace", &broken, "--users", "1"], 1, "line 11");
}
