//! Catches a term that is missing, in the wrong unit or of the wrong sign, and inputs that make
//! a cost infinite or not a number.

use super::{Params, Terms, cached_tokens, candidate};
use crate::test_views::{id, node, request};
use crate::view::{FleetView, NodeView, RequestView};

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

#[test]
fn each_term_in_milliseconds() {
    let p = Params::default();
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
    // The session's bonus: a quarter of 1.6 s, and never more than its bound.
    let bound = RequestView {
        bound: Some(id("a")),
        ..request()
    };
    check(
        &bound,
        &node("a"),
        &p,
        Terms {
            session_ms: -400.0,
            ..plain
        },
    );
    let elsewhere = RequestView {
        bound: Some(id("b")),
        ..request()
    };
    check(&elsewhere, &node("a"), &p, plain);
}

#[test]
fn terms_have_bounds_and_thresholds() {
    let p = Params::default();
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
    let terms = Terms {
        prefill_ms: 540_000.0,
        session_ms: -2000.0,
        ..plain
    };
    check(&long, &node("a"), &p, terms);
    // 1700 tokens are 107 blocks; 100 are free, so 7 × 16 tokens are displaced.
    let full = NodeView {
        pool_blocks: 300,
        pool_used_blocks: 200,
        ..node("a")
    };
    check(
        &request(),
        &full,
        &p,
        Terms {
            pool_ms: 112.0,
            ..plain
        },
    );
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
fn absurd_views_cost_something_finite() {
    let p = Params::default();
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
