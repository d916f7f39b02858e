//! Catches a breaker that never opens, never closes again, lets a crowd through while half-open, or
//! is moved by outcomes of requests from before it opened.

use super::{Breaker, BreakerParams, Gate};

#[derive(Clone, Copy)]
enum Happens {
    Sent,
    Good,
    Bad,
    Neutral,
}
use Happens::{Bad, Good, Neutral, Sent};

const CLOSED: Gate = Gate::Closed;

fn open(until_ms: u64) -> Gate {
    Gate::Open { until_ms }
}

fn half(trials_left: u32) -> Gate {
    Gate::HalfOpen { trials_left }
}

/// Opens after 2 failures, for 100, 200, 400, at most 300 ms; one trial at a time.
fn check(happens: &[(u64, Happens)], at_ms: u64, expected: Gate) {
    let params = BreakerParams {
        failures_to_open: 2,
        open_ms: 100,
        open_ms_max: 300,
        trials_max: 1,
    };
    let mut breaker = Breaker::new(params);
    for (now_ms, what) in happens {
        match what {
            Sent => breaker.on_dispatch(*now_ms),
            Good => breaker.on_success(*now_ms),
            Bad => breaker.on_failure(*now_ms),
            Neutral => breaker.on_neutral(*now_ms),
        }
    }
    let gate = breaker.gate(at_ms);
    assert_eq!(gate, expected);
    assert_eq!(
        gate.passes(),
        matches!(gate, Gate::Closed | Gate::HalfOpen { trials_left: 1.. })
    );
}

#[test]
fn failures_in_a_row_open_it() {
    check(&[], 0, CLOSED);
    check(&[(0, Bad)], 1, CLOSED);
    check(&[(0, Bad), (1, Bad)], 1, open(101));
    check(&[(0, Bad), (1, Good), (2, Bad)], 2, CLOSED);
    check(&[(0, Bad), (1, Neutral), (2, Bad)], 2, open(102));
}

#[test]
fn one_trial_passes_and_decides() {
    let opened = [(0, Bad), (0, Bad)];
    let then = |more: &[(u64, Happens)], at_ms, expected| {
        check(&[&opened[..], more].concat(), at_ms, expected);
    };
    then(&[], 99, open(100));
    then(&[], 100, half(1));
    then(&[(100, Sent)], 101, half(0));
    then(&[(100, Sent), (110, Good)], 110, CLOSED);
    // Closed for good: it takes two failures again.
    then(&[(100, Sent), (110, Good), (111, Bad)], 111, CLOSED);
    then(&[(100, Sent), (110, Bad)], 110, open(310));
    // A trial whose client went away makes room for another.
    then(&[(100, Sent), (110, Neutral)], 110, half(1));
    // The wait doubles up to its bound.
    then(
        &[(100, Sent), (110, Bad), (310, Sent), (320, Bad)],
        320,
        open(620),
    );
}

#[test]
fn outcomes_from_before_the_opening_do_not_count() {
    let opened = [(0, Bad), (0, Bad)];
    for late in [Good, Bad, Neutral, Sent] {
        check(&[&opened[..], &[(50, late)]].concat(), 50, open(100));
        check(&[&opened[..], &[(50, late)]].concat(), 100, half(1));
    }
}

#[test]
fn extreme_parameters_do_not_overflow() {
    let params = BreakerParams {
        failures_to_open: 0,
        open_ms: u64::MAX,
        open_ms_max: u64::MAX,
        trials_max: 0,
    };
    let mut breaker = Breaker::new(params);
    breaker.on_failure(u64::MAX - 1);
    assert_eq!(breaker.gate(0), open(u64::MAX));
    assert_eq!(breaker.gate(u64::MAX), half(1));
    for _ in 0..100 {
        breaker.on_failure(u64::MAX);
    }
    assert!(!matches!(breaker.gate(u64::MAX), Gate::Closed));
}
