//! Catches a guess that ignores the session's own past, or a memory without bound.

use super::{OutputLengths, SESSIONS_MAX};

#[test]
fn a_session_is_judged_by_its_own_past_and_a_new_one_by_everybodys() {
    let mut lengths = OutputLengths::default();
    assert_eq!(lengths.expected(1), 256);
    lengths.learn(1, 1000);
    assert_eq!(lengths.expected(1), 1000);
    lengths.learn(1, 0);
    assert_eq!(lengths.expected(1), 700);
    // One long answer of somebody else changes little, many do.
    assert!((250..270).contains(&lengths.expected(2)));
    for session in 10..1000 {
        lengths.learn(session, 50);
    }
    assert!((50..60).contains(&lengths.expected(2)));
    assert_eq!(lengths.expected(1), 700);
    lengths.learn(3, 0);
    assert_eq!(lengths.expected(3), 1, "no answer is empty");
}

#[test]
fn sessions_are_bounded() {
    let mut lengths = OutputLengths::default();
    for session in 0..SESSIONS_MAX as u64 + 10 {
        lengths.learn(session, 40);
    }
    assert!(lengths.sessions.len() <= SESSIONS_MAX);
    assert_eq!(lengths.expected(SESSIONS_MAX as u64 + 9), 40);
}
