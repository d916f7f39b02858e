//! Catches load that is never given back, a node that looks idle while it works, and a rate that is
//! far from what the node takes.

use super::{NodeLoad, Sent, weighted_tokens};

fn sent(cached_tokens: u64, prompt_tokens: u64) -> Sent {
    Sent {
        fetch_ms: 0.0,
        cached_tokens,
        prompt_tokens,
        output_tokens: 100,
        pool_blocks: prompt_tokens / 16,
    }
}

/// Milliseconds that a node with this rate takes for one prefill.
fn takes_ms(cached: u64, prompt: u64, tokens_per_s: f64, doubles: f64) -> f64 {
    // One token after the other, each with the context before it.
    let token = |at: u64| 1000.0 / tokens_per_s * (1.0 + at as f64 / doubles);
    (cached..prompt).map(token).sum()
}

#[test]
fn a_weight_equals_the_sum_over_its_tokens() {
    for (cached, prompt) in [(0, 1), (0, 5000), (3000, 5000), (90_000, 90_500)] {
        let slow = takes_ms(cached, prompt, 1000.0, 50_000.0);
        let fast = weighted_tokens(cached, prompt, 50_000.0);
        assert!((slow - fast).abs() < 1.0, "{cached} of {prompt}: {fast}");
    }
    // Context that is not known to cost anything costs nothing.
    for doubles in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert_eq!(weighted_tokens(300, 1000, doubles), 700.0);
    }
    assert_eq!(weighted_tokens(1000, 300, 50_000.0), 0.0);
}

#[test]
fn what_a_node_takes_is_learnt_from_its_first_tokens() {
    for (tokens_per_s, doubles) in [(20_000.0, 100_000.0), (500.0, 20_000.0), (3000.0, 1e7)] {
        let mut load = NodeLoad::default();
        assert_eq!(load.tokens_per_s(), 0.0);
        let mut state = 3_u64;
        let mut random = |below: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) % below
        };
        // Bursts of three, computed in order.
        let mut now_ms = 0.0;
        for burst in 0..300 {
            let asked: Vec<(u64, u64, u64)> = (0..3)
                .map(|which| {
                    let cached = random(60_000);
                    (burst * 3 + which, cached, cached + 100 + random(8000))
                })
                .collect();
            for (id, cached, prompt) in &asked {
                load.dispatched(now_ms, *id, sent(*cached, *prompt));
            }
            for (id, cached, prompt) in asked {
                now_ms += takes_ms(cached, prompt, tokens_per_s, doubles);
                load.first_token(now_ms, id);
                load.ended(now_ms + 1.0, id);
            }
            now_ms += 500.0;
        }
        let rate = load.tokens_per_s();
        assert!((rate / tokens_per_s - 1.0).abs() < 0.1, "{rate}");
        // What counts is what a prefill is thought to take, also where the two figures trade.
        for (cached, prompt) in [(0, 4000), (60_000, 64_000)] {
            let weighted = weighted_tokens(cached, prompt, load.context_doubles_tokens());
            let slow = takes_ms(cached, prompt, tokens_per_s, doubles);
            let ratio = weighted * 1000.0 / rate / slow;
            assert!((ratio - 1.0).abs() < 0.15, "{cached} of {prompt}: {ratio}");
        }
    }
}

/// A node that is known to do 1000 tokens a second.
fn known() -> NodeLoad {
    let mut load = NodeLoad::default();
    for id in 0..200 {
        let now_ms = 10_000.0 * id as f64;
        load.dispatched(now_ms, id, sent(0, 1000));
        load.first_token(now_ms + 1000.0, id);
        load.ended(now_ms + 1000.0, id);
    }
    load
}

#[test]
fn the_oldest_prefill_shrinks_as_time_goes_by_and_never_to_nothing() {
    let mut load = known();
    let left = |load: &NodeLoad, now_ms| load.prefill_tokens(now_ms);
    assert_eq!(left(&load, 3e6), 0);
    load.dispatched(3e6, 1000, sent(0, 10_000));
    load.dispatched(3e6, 1001, sent(0, 10_000));
    let all = left(&load, 3e6);
    let after = left(&load, 3e6 + 5000.0);
    assert!((4000..=6000).contains(&(all - after)), "{all} {after}");
    // However late it is, a part of the first one and the second are still to come.
    let late = left(&load, 3e6 + 1e6);
    assert!(late > all / 2 && late < all * 7 / 10, "{late} of {all}");
    // The second begins when the first is over.
    load.first_token(3e6 + 1e6, 1000);
    let second = left(&load, 3e6 + 1e6);
    assert!(second.abs_diff(all / 2) < all / 20, "{second} of {all}");
}

#[test]
fn all_is_given_back_however_a_request_ends() {
    let mut load = known();
    for id in 1000..1010 {
        load.dispatched(3e6, id, sent(160, 1760));
        // Named twice by a caller's mistake, it counts once.
        load.dispatched(3e6, id, sent(160, 1760));
    }
    assert_eq!((load.decode_tokens(), load.pool_blocks()), (1000, 1100));
    assert!(load.arrivals_per_s(3e6) > 0.1 && load.busy_share(3e6) > 0.1);
    for id in 1000..1005 {
        load.first_token(3e6 + 5.0, id);
    }
    for id in 1000..1012 {
        load.ended(3e6 + 10.0, id);
        load.ended(3e6 + 11.0, id);
        load.first_token(3e6 + 12.0, id);
    }
    assert_eq!((load.decode_tokens(), load.pool_blocks()), (0, 0));
    assert_eq!(load.prefill_tokens(3e6 + 12.0), 0);
    // What was lately asked for fades.
    assert!(load.arrivals_per_s(4e6) < 1e-3 && load.busy_share(4e6) < 1e-3);
}

/// Would a node that fetches look idle, or like one that computes slowly?
#[test]
fn a_fetch_is_work_and_no_prefill() {
    let mut load = known();
    let rate = load.tokens_per_s();
    let fetched = Sent {
        fetch_ms: 500.0,
        ..sent(9000, 10_000)
    };
    load.dispatched(3e6, 1000, sent(9000, 10_000));
    let alone = load.prefill_tokens(3e6);
    load.dispatched(3e6, 1001, fetched);
    let both = load.prefill_tokens(3e6);
    let expected = 2.0 * alone as f64 + 0.5 * rate;
    assert!(
        (both as f64 - expected).abs() < 2.0,
        "{both}, not {expected}"
    );
    load.first_token(3e6 + alone as f64 / rate * 1000.0, 1000);
    let rate = load.tokens_per_s();
    // It takes as long as it should, the fetch included; then as long as the fetch alone.
    let takes_ms = alone as f64 / rate * 1000.0 + 500.0;
    load.first_token(3e6 + alone as f64 / rate * 1000.0 + takes_ms, 1001);
    let after = load.tokens_per_s();
    assert!((after / rate - 1.0).abs() < 0.001, "{after}, not {rate}");
    load.dispatched(4e6, 1002, fetched);
    load.first_token(4e6 + 500.0, 1002);
    assert_eq!(load.tokens_per_s(), after);
    // What makes no sense is no time.
    load.dispatched(
        5e6,
        1003,
        Sent {
            fetch_ms: f64::NAN,
            ..fetched
        },
    );
    load.dispatched(
        5e6,
        1004,
        Sent {
            fetch_ms: -1e9,
            ..fetched
        },
    );
    let left = load.prefill_tokens(5e6);
    assert!(
        left.abs_diff(2 * alone) <= 2 + alone / 50,
        "{left}, not twice {alone}"
    );
}
