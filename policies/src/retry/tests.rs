//! Catches a second answer after the first byte, a client's mistake tried on every node, and
//! retries that finish a fleet off.

use super::{Attempts, Budget, Outcome, RetryParams, Stop, Verdict, after_failure};

const PLENTY: Attempts = Attempts {
    made: 1,
    left_ms: 60_000,
};

fn check(outcome: Outcome, attempts: Attempts, expected: Verdict) {
    let verdict = after_failure(
        outcome,
        attempts,
        &RetryParams::default(),
        &mut Budget::default(),
        7,
    );
    assert_eq!(verdict, expected, "{outcome:?} {attempts:?}");
}

const AT_ONCE: Verdict = Verdict::Again { after_ms: 0 };

fn stop(why: Stop) -> Verdict {
    Verdict::Stop(why)
}

#[test]
fn what_another_node_may_do_better_is_tried_there() {
    use Outcome::{
        AfterFirstByte, BadAnswer, BrokenBeforeFirstByte, ClientGone, ConnectFailed, Status,
        TimeoutBeforeFirstByte,
    };
    for outcome in [
        ConnectFailed,
        BrokenBeforeFirstByte,
        TimeoutBeforeFirstByte,
        BadAnswer,
    ] {
        check(outcome, PLENTY, AT_ONCE);
        assert!(outcome.is_node_fault());
    }
    for status in [401, 403, 404, 429, 500, 502, 503, 504] {
        check(Status(status), PLENTY, AT_ONCE);
    }
    for status in [200, 400, 408, 413, 415, 422, 501] {
        check(Status(status), PLENTY, stop(Stop::NotRetryable));
        assert!(!Status(status).is_node_fault());
    }
    for outcome in [AfterFirstByte, ClientGone] {
        check(outcome, PLENTY, stop(Stop::NotRetryable));
    }
    // An overloaded node is not a sick one, and neither is one that a client has left.
    for outcome in [Status(429), Status(503), ClientGone] {
        assert!(!outcome.is_node_fault());
    }
    assert!(AfterFirstByte.is_node_fault());
}

#[test]
fn attempts_and_time_are_bounded() {
    let failed = Outcome::ConnectFailed;
    let at = |made, left_ms| Attempts { made, left_ms };
    check(failed, at(1, 1), AT_ONCE);
    check(failed, at(1, 0), stop(Stop::Deadline));
    // The second pause is 25 to 50 ms: 25 + 7 with this random number.
    check(failed, at(2, 1000), Verdict::Again { after_ms: 32 });
    check(failed, at(2, 32), stop(Stop::Deadline));
    check(failed, at(3, 60_000), stop(Stop::Attempts));
}

#[test]
fn pauses_double_up_to_their_bound_and_are_spread() {
    let params = RetryParams {
        attempts_max: 100,
        backoff_ms: 100,
        backoff_ms_max: 1000,
    };
    for (made, full) in [(2, 100), (3, 200), (5, 800), (6, 1000), (99, 1000)] {
        let mut seen = Vec::new();
        for random in [0, u64::MAX, 12_345_678] {
            let attempts = Attempts {
                made,
                left_ms: u64::MAX,
            };
            let mut budget = Budget::default();
            let outcome = Outcome::BadAnswer;
            let Verdict::Again { after_ms } =
                after_failure(outcome, attempts, &params, &mut budget, random)
            else {
                panic!("not tried again after attempt {made}")
            };
            assert!(
                (full / 2..=full).contains(&after_ms),
                "{after_ms} ms after {made}"
            );
            seen.push(after_ms);
        }
        seen.dedup();
        assert!(seen.len() > 1, "every request waits {seen:?}");
    }
}

#[test]
fn the_budget_lets_a_burst_through_and_then_a_share() {
    let mut budget = Budget::new(20, 3);
    let retry = |budget: &mut Budget| {
        after_failure(
            Outcome::ConnectFailed,
            PLENTY,
            &RetryParams::default(),
            budget,
            0,
        )
    };
    for _ in 0..3 {
        assert_eq!(retry(&mut budget), AT_ONCE);
    }
    assert_eq!(retry(&mut budget), stop(Stop::Budget));
    // 100 requests that all fail: one in five is tried again.
    let again = (0..100).filter(|_| {
        budget.on_request();
        retry(&mut budget) == AT_ONCE
    });
    assert_eq!(again.count(), 20);
    // The reserve fills up again, and not beyond.
    (0..1000).for_each(|_| budget.on_request());
    assert_eq!((0..10).filter(|_| retry(&mut budget) == AT_ONCE).count(), 3);
    // What is refused for another reason takes nothing from it.
    (0..1000).for_each(|_| budget.on_request());
    after_failure(
        Outcome::ClientGone,
        PLENTY,
        &RetryParams::default(),
        &mut budget,
        0,
    );
    assert_eq!((0..10).filter(|_| budget.withdraw()).count(), 3);
}
