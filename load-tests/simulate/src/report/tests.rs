//! Would a report name the wrong peer, or a page load something?

use super::*;
use crate::compare::{Case, rows};
use crate::figures::Summary;
use crate::policy::Spec;
use crate::scenario::Slice;
use crate::scenarios::Setup;

fn report() -> Report {
    let text = "{\"name\":\"a<b\",\"block\":512,\"mode\":\"open\"}\n[0,0,1000,11,-1,0,-1,0,1]\n";
    let trace = Trace::read("t", text.as_bytes()).expect("a valid trace");
    let load = Load::Copies {
        copies: 1,
        speed: 1.0,
    };
    let scenario = Setup::new(2, 100, load).scenario(&trace, Slice::All, 1);
    // Mean TTFT and hit ratio of two seeds each.
    let table = [
        ("homing", [(110.0, 0.8), (90.0, 0.9)]),
        ("session", [(200.0, 0.9), (200.0, 0.9)]),
        ("session:bound=1.5", [(150.0, 0.5), (170.0, 0.7)]),
        ("oracle:b=4", [(80.0, 0.6), (80.0, 0.6)]),
        ("oracle:b=1", [(10.0, 1.0), (10.0, 1.0)]),
        ("cost:b=8", [(95.0, 0.7), (95.0, 0.7)]),
    ];
    let mut results = Vec::new();
    for (policy, seeds) in table {
        for (seed, (ttft_mean_ms, hit_ratio)) in seeds.into_iter().enumerate() {
            let figures = Figures {
                ttft_mean_ms,
                hit_ratio,
                floor_mean_ms: 50.0,
                ..Figures::default()
            };
            let summary = Summary {
                figures,
                ttft_percentiles_ms: vec![10.0, 100.0],
            };
            let spec = Spec::parse(policy).expect("known");
            results.push((
                Case {
                    spec,
                    seed: seed as u64,
                },
                summary,
            ));
        }
    }
    Report::new("a<b", &trace, &scenario, rows(&results))
}

#[test]
fn distances_are_to_the_best_of_each_kind() {
    let report = report();
    let distance = |figure: &str| {
        let found = report.distances.iter().find(|d| d.figure == figure);
        found.expect("measured").clone()
    };
    let ttft = distance("ttft_mean_ms");
    assert_eq!(ttft.homing, 100.0);
    assert_eq!(ttft.floor, Some(50.0));
    // Not oracle:b=1, which is no reference.
    let reference = ttft.reference.expect("one took part");
    assert_eq!(
        (reference.label.as_str(), reference.ratio),
        ("oracle:b=4", 1.25)
    );
    let baseline = ttft.baseline.expect("one took part");
    assert_eq!(
        (baseline.label.as_str(), baseline.ratio),
        ("session:bound=1.5", 0.625)
    );
    let hits = distance("hit_ratio");
    assert_eq!(hits.reference.expect("one took part").label, "cost:b=8");
    assert_eq!(hits.baseline.expect("one took part").label, "session");
    let best: Vec<&str> = report
        .best_rows()
        .iter()
        .map(|r| r.label.as_str())
        .collect();
    assert_eq!(
        best,
        ["homing", "session:bound=1.5", "oracle:b=1", "cost:b=8"]
    );
}

/// Student's t by hand: 2 values, 1 degree of freedom.
#[test]
fn confidence_intervals_are_students() {
    let report = report();
    let homing = &report.rows[0];
    assert!((homing.ttft_mean_ci95_ms - 12.706 * 10.0).abs() < 1e-9);
    assert_eq!(homing.seeds, [0, 1]);
    assert_eq!(homing.by_seed[1].ttft_mean_ms, 90.0);
}

#[test]
fn a_page_is_complete_in_itself_and_escapes_names() {
    let html = page(&[report()]);
    assert!(html.contains("a&lt;b") && !html.contains("a<b"));
    for outside in ["http:", "https:", "src=", "href=", "@import", "<script"] {
        assert!(!html.contains(outside), "{outside}");
    }
    assert_eq!(html.matches("<svg").count(), html.matches("</svg>").count());
    assert!(!html.contains("NaN") && !html.contains("inf"));
}

#[test]
fn the_table_shows_each_policy_at_its_best_and_the_distances() {
    let text = table(&report());
    for expected in [
        "session:bound=1.5",
        "= 1.250 x reference 80.0000 (oracle:b=4)",
        "floor 50.0",
    ] {
        assert!(text.contains(expected), "{expected} is not in\n{text}");
    }
    assert!(
        !text.contains("  session "),
        "only the best parameters of a policy"
    );
}
