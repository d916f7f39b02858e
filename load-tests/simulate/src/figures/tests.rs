//! Would a figure count the wrong requests, or the right ones wrongly?

use super::*;
use crate::scenario::{Load, Slice};
use crate::scenarios::Setup;
use crate::trace::Trace;

fn outcome(came_ms: f64, first_token_ms: Option<f64>, done_ms: Option<f64>) -> Outcome {
    Outcome {
        came_ms,
        session: 0,
        prompt_tokens: 1000,
        output_tokens: 11,
        ideal_tokens: 900,
        cached_tokens: if first_token_ms.is_some() { 500 } else { 0 },
        fetched_tokens: 0,
        node: Some(0),
        prefill_node: None,
        first_token_ms,
        done_ms,
        refusals: 1,
        is_far: false,
    }
}

/// By hand: one request in the warm-up, one answered, one begun, one that never began.
#[test]
fn figures_are_what_one_counts_by_hand() {
    let text = "{\"name\":\"t\",\"block\":512,\"mode\":\"open\"}\n[0,0,1000,11,-1,0,-1,0,1]\n";
    let trace = Trace::read("t", text.as_bytes()).expect("a valid trace");
    let load = Load::Copies {
        copies: 1,
        speed: 1.0,
    };
    let setup = Setup {
        horizon_s: Some(30.0),
        warm_s: Some(10.0),
        ..Setup::new(2, 100, load)
    };
    let scenario = setup.scenario(&trace, Slice::All, 1);
    let run = Run {
        outcomes: vec![
            outcome(9_999.0, Some(29_000.0), None),
            outcome(10_000.0, Some(11_000.0), Some(11_200.0)),
            outcome(15_000.0, Some(20_000.0), None),
            outcome(17_000.0, None, None),
        ],
        busy_ms: vec![3_000.0, 9_000.0],
    };
    let figures = Figures::of(&scenario, &run);
    let close = |value: f64, expected: f64| {
        assert!((value - expected).abs() < 1e-9, "{value}, not {expected}");
    };
    close(figures.requests, 3.0);
    close(figures.completions_per_s, 1.0 / 20.0);
    close(figures.hit_ratio, 0.5);
    close(figures.hit_ratio_ideal, 0.9);
    close(figures.ttft_mean_ms, (1_000.0 + 5_000.0 + 13_000.0) / 3.0);
    close(figures.ttft_p50_ms, 5_000.0);
    // The lower one where a percentile falls between two.
    close(figures.ttft_p99_ms, 5_000.0);
    close(figures.tpot_p90_ms, 20.0);
    close(figures.balance, 1.5);
    close(figures.busy, 0.2);
    close(figures.within_2s, 1.0 / 3.0);
    close(figures.within_10s, 2.0 / 3.0);
    close(figures.within_10s_per_s, 2.0 / 20.0);
    close(figures.unanswered, 1.0);
    close(figures.refusals, 1.0);
    let floor = scenario.fleet.params.floor_ms(1000, 900);
    close(figures.floor_mean_ms, floor);
    let summary = Summary::of(&scenario, &run);
    assert_eq!(summary.ttft_percentiles_ms.len(), 101);
    close(summary.ttft_percentiles_ms[100], 13_000.0);
}
