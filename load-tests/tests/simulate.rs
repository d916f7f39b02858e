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
            policies: &LOAD_AND_SESSION[..1],
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
                    let scenario = both.setup.scenario(trace, Slice::Dev, seed);
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
        hit_ratio: value("hit"),
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
