//! Catches a term that is missing, in the wrong unit or of the wrong sign, and inputs that make
//! a cost infinite or not a number.

use super::{Params, Terms, cached_tokens, candidate};
use crate::test_views::{id, node, request};
use crate::view::{FetchCosts, FleetView, NodeView, RequestView};
use cache_index::tiers::Tiers;

#[test]
fn cached_tokens_are_whole_blocks_and_never_the_last_token() {
    let check = |prompt_tokens, overlap_blocks, node_block_tokens, expected| {
        let request = RequestView {
            prompt_tokens,
            ..request()
        };
        let node = NodeView {
            overlap_blocks,
            node_block_tokens,
            ..node("a")
        };
        assert_eq!(
            cached_tokens(&request, &node),
            expected,
            "{overlap_blocks} blocks of {prompt_tokens} tokens at {node_block_tokens}"
        );
    };
    check(0, 0, 16, 0);
    check(1600, 0, 16, 0);
    check(1600, 50, 16, 800);
    // All 100 blocks are held, but the last token must be computed, and its block with it.
    check(1600, 100, 16, 1584);
    check(1601, 100, 16, 1600);
    check(1601, 10_000, 16, 1600);
    check(1601, usize::MAX, 16, 1600);
    check(16, 1, 16, 0);
    check(17, 1, 16, 16);
    // A node with blocks of 32 gives back one block less where ours end in the middle of its own.
    check(1600, 99, 32, 1568);
    check(64, 4, 32, 32);
    check(65, 4, 32, 64);
    check(1600, 50, 0, 800);
}

/// Every term of one candidate.
fn check(request: &RequestView, node: &NodeView, p: &Params, expected: Terms) {
    let candidate = candidate(request, node, &FleetView::default(), p);
    assert_eq!(candidate.terms, expected);
    assert_eq!(candidate.cost_ms.to_bits(), expected.total_ms().to_bits());
}

/// Weights that show which term is which.
fn weighted() -> Params {
    Params {
        b: 6.0,
        behind: 1.0,
        live: 1.0,
        pool_share: 1.0,
        decode_interference: 1.0,
        ..Params::default()
    }
}

#[test]
fn each_term_in_milliseconds() {
    let p = weighted();
    let plain = Terms {
        round_trip_ms: 1.0,
        prefill_ms: 9600.0,
        ..Terms::default()
    };
    check(&request(), &node("a"), &p, plain);
    // Half of it cached, at twice the speed.
    let half = NodeView {
        overlap_blocks: 50,
        prefill_tokens_per_s: 2000.0,
        ..node("a")
    };
    check(
        &request(),
        &half,
        &p,
        Terms {
            prefill_ms: 2400.0,
            ..plain
        },
    );
    let busy = NodeView {
        inflight_prefill_tokens: 500,
        round_trip_ms: 80.0,
        ..node("a")
    };
    check(
        &request(),
        &busy,
        &p,
        Terms {
            queue_ms: 500.0,
            round_trip_ms: 80.0,
            ..plain
        },
    );
    // The session's bonus: a quarter of the 0.8 s that are cached, and none where nothing is.
    let bound = RequestView {
        bound: Some(id("a")),
        ..request()
    };
    check(&bound, &node("a"), &p, plain);
    let held = NodeView {
        overlap_blocks: 50,
        ..node("a")
    };
    let terms = Terms {
        prefill_ms: 4800.0,
        session_ms: -200.0,
        ..plain
    };
    check(&bound, &held, &p, terms);
    let elsewhere = RequestView {
        bound: Some(id("b")),
        ..request()
    };
    check(&elsewhere, &node("a"), &p, plain);
}

#[test]
fn terms_have_bounds_and_thresholds() {
    let p = weighted();
    let plain = Terms {
        round_trip_ms: 1.0,
        prefill_ms: 9600.0,
        ..Terms::default()
    };
    let bound = RequestView {
        bound: Some(id("a")),
        ..request()
    };
    let long = RequestView {
        prompt_tokens: 90_000,
        ..bound
    };
    let held = NodeView {
        overlap_blocks: 5000,
        ..node("a")
    };
    let terms = Terms {
        prefill_ms: 60_000.0,
        session_ms: -2000.0,
        ..plain
    };
    check(&long, &held, &p, terms);
    // 1700 tokens are 107 blocks; 100 of 300 are free: the missing 7 are a share of 20 s.
    let full = NodeView {
        pool_blocks: 300,
        pool_used_blocks: 200,
        ..node("a")
    };
    let terms = Terms {
        pool_ms: 20_000.0 * (7.0 / 300.0),
        ..plain
    };
    check(&request(), &full, &p, terms);
    let roomy = NodeView {
        pool_blocks: 307,
        pool_used_blocks: 200,
        ..node("a")
    };
    check(&request(), &roomy, &p, plain);
    let decoding = NodeView {
        inflight_decode_tokens: 300,
        ..node("a")
    };
    check(
        &request(),
        &decoding,
        &p,
        Terms {
            decode_ms: 300.0,
            ..plain
        },
    );
    let heavy = Params {
        decode_interference: 0.5,
        ..p
    };
    check(
        &request(),
        &decoding,
        &heavy,
        Terms {
            decode_ms: 150.0,
            ..plain
        },
    );
}

#[test]
fn who_comes_later_waits_for_the_work_and_its_queue() {
    let p = weighted();
    // 1.6 s of own work behind 2 s of queue; two requests come in a second, and the node catches up
    // half of the time.
    let busy = NodeView {
        inflight_prefill_tokens: 2000,
        arrivals_per_s: 2.0,
        busy_share: 0.5,
        ..node("a")
    };
    let behind = |node: &NodeView, fleet: f64, p: &Params| {
        let fleet = FleetView {
            arrivals_per_s: fleet,
            ..FleetView::default()
        };
        candidate(&request(), node, &fleet, p).terms.behind_ms
    };
    let expected = 1600.0 * (2.0 + 0.8) * 4.0;
    assert!((behind(&busy, 0.0, &p) - expected).abs() < 1e-6);
    // A node that sees fewer requests than the others is not a quiet place.
    let slow = NodeView {
        arrivals_per_s: 0.1,
        ..busy.clone()
    };
    assert!((behind(&slow, 2.0, &p) - expected).abs() < 1e-6);
    // However busy, it has a bound.
    let flooded = NodeView {
        arrivals_per_s: 1e9,
        busy_share: f64::NAN,
        ..busy
    };
    let bound = 1600.0 * (2.0 + 0.8) * p.behind_per_s_max;
    assert!((behind(&flooded, 0.0, &p) - bound).abs() < 1e-6);
    // The slow twin: those who come one after the other to a queue that nobody joins otherwise.
    let (queue_s, own_s, per_s) = (2.0, 1.6, 50.0);
    let waits = |work: f64, at: f64| (work - at).max(0.0);
    let late: f64 = (0..1000)
        .map(|arrival| f64::from(arrival) / per_s)
        .map(|at| waits(queue_s + own_s, at) - waits(queue_s, at))
        .sum();
    let idle = NodeView {
        arrivals_per_s: per_s,
        busy_share: 0.0,
        ..slow
    };
    let unbounded = Params {
        behind_per_s_max: f64::INFINITY,
        ..p
    };
    let ratio = behind(&idle, 0.0, &unbounded) / (late * 1000.0);
    assert!((ratio - 1.0).abs() < 0.02, "{ratio}");
}

#[test]
fn what_is_pushed_out_counts_the_more_the_sooner_it_was_used() {
    let live = |kept_ms| {
        let node = NodeView {
            kept_ms,
            ..node("a")
        };
        let fleet = FleetView::default();
        candidate(&request(), &node, &fleet, &weighted())
            .terms
            .live_ms
    };
    assert_eq!(live(f64::INFINITY), 0.0);
    assert_eq!(live(0.0), 1700.0);
    assert_eq!(live(-5.0), 1700.0);
    assert!((live(weighted().live_fade_ms) - 1700.0 / 1_f64.exp()).abs() < 1e-6);
}

#[test]
fn a_tier_is_read_where_that_is_quicker_than_computing() {
    let p = weighted();
    let check = |device, tiers: [usize; 3], ms: [f64; 3], cached, fetched, fetch_ms: f64| {
        let [host, disk, shared] = tiers;
        let [host_ms, disk_ms, shared_ms] = ms;
        let node = NodeView {
            overlap_blocks: device,
            overlap_tiers: Tiers {
                device,
                host,
                disk,
                shared,
            },
            fetch_ms_per_block: FetchCosts {
                host_ms,
                disk_ms,
                shared_ms,
            },
            ..node("a")
        };
        let candidate = candidate(&request(), &node, &FleetView::default(), &p);
        let found = (candidate.cached_tokens, candidate.fetched_tokens);
        assert_eq!(found, (cached, fetched), "{tiers:?} at {ms:?}");
        assert!((candidate.fetched_ms - fetch_ms).abs() < 1e-9);
        assert!((candidate.terms.fetch_ms - p.b * fetch_ms).abs() < 1e-9);
    };
    // A block is 16 ms of prefill.
    check(
        10,
        [40, 60, 90],
        [1.0, 2.0, 4.0],
        1440,
        1280,
        30.0 + 40.0 + 120.0,
    );
    check(10, [40, 60, 90], [1.0, 2.0, 200.0], 960, 800, 70.0);
    // A slow tier is read through where a fast one behind it makes up for it.
    check(10, [20, 90, 90], [50.0, 1.0, 0.0], 1440, 1280, 500.0 + 70.0);
    check(10, [20, 22, 22], [200.0, 1.0, 0.0], 160, 0, 0.0);
    // A speed that is not known is not counted on, nor what lies behind it.
    check(10, [40, 60, 90], [0.0, 2.0, 4.0], 160, 0, 0.0);
    check(10, [40, 60, 90], [1.0, f64::NAN, 4.0], 640, 480, 30.0);
    // Tiers that hold no more than the device say nothing.
    check(50, [0, 0, 0], [1.0, 1.0, 1.0], 800, 0, 0.0);
    // The last token is computed wherever its block lies.
    check(10, [100, 100, 100], [1.0, 1.0, 1.0], 1584, 1424, 90.0);
}

#[test]
fn absurd_views_cost_something_finite() {
    let p = weighted();
    for rate in [
        0.0,
        -5.0,
        f64::NAN,
        f64::INFINITY,
        f64::NEG_INFINITY,
        1e-300,
    ] {
        let view = NodeView {
            prefill_tokens_per_s: rate,
            ..node("a")
        };
        // An unknown rate is the default one.
        assert_eq!(
            candidate(&request(), &view, &FleetView::default(), &p)
                .terms
                .prefill_ms,
            9600.0,
            "at {rate}"
        );
    }
    let view = NodeView {
        inflight_prefill_tokens: u64::MAX,
        inflight_decode_tokens: u64::MAX,
        pool_blocks: 1,
        pool_used_blocks: u64::MAX,
        overlap_blocks: usize::MAX,
        round_trip_ms: -3.0,
        ..node("a")
    };
    let huge = RequestView {
        prompt_tokens: u64::MAX - 1,
        output_tokens_expected: u64::MAX,
        ..request()
    };
    assert!(
        candidate(&huge, &view, &FleetView::default(), &p)
            .cost_ms
            .is_finite()
    );
}
