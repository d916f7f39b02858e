//! Catches a set that lets a session believe in a prefix that is pushed out before it comes, that
//! counts what sessions share for each of them, or that never forgets.

use super::{SILENT_MS_MAX, WorkingSet};
use crate::view::SessionKey;

/// The slow, obvious twin: every turn in a list, looked through each time.
#[derive(Default)]
struct Slow {
    /// Session, last use, shared, private; in order of last use.
    turns: Vec<(u128, u64, u64, u64)>,
}

impl Slow {
    fn used(&mut self, now_ms: u64, session: u128, prompt: u64, overlap: u64) {
        let before = self.turns.iter().find(|turn| turn.0 == session);
        let shared = before
            .map_or(u64::MAX, |turn| turn.2)
            .min(overlap)
            .min(prompt);
        self.turns.retain(|turn| turn.0 != session);
        self.turns.push((session, now_ms, shared, prompt - shared));
        self.turns.retain(|turn| turn.1 + SILENT_MS_MAX > now_ms);
    }

    fn kept_blocks(&self, session: u128, pool: u64) -> Option<u64> {
        let at = self.turns.iter().position(|turn| turn.0 == session)?;
        let newer: u64 = self.turns[at + 1..].iter().map(|turn| turn.3).sum();
        let (_, _, shared, private) = self.turns[at];
        let room = pool.saturating_sub(newer);
        (private > room).then_some(shared + room)
    }

    fn kept_ms(&self, now_ms: u64, pool: u64, wanted: u64, own: u128) -> f64 {
        let others = self.turns.iter().filter(|turn| turn.0 != own);
        let mut left: u64 = others.clone().map(|turn| turn.3).sum::<u64>() + wanted;
        let mut last = None;
        for turn in others {
            if left <= pool {
                break;
            }
            left -= turn.3.min(left);
            if turn.3 > 0 {
                last = Some(turn.1);
            }
        }
        last.map_or(f64::INFINITY, |last: u64| (now_ms - last) as f64)
    }
}

fn key(session: u128) -> SessionKey {
    SessionKey(session)
}

#[test]
fn equals_the_slow_definition_on_random_turns() {
    let (mut fast, mut slow) = (WorkingSet::default(), Slow::default());
    let mut state = 7_u64;
    let mut random = |below: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 33) % below
    };
    let mut now_ms = 0;
    for turn in 0..6000 {
        // Now and then all are silent for so long that most are forgotten.
        now_ms += 1 + random(if turn % 500 == 0 {
            SILENT_MS_MAX
        } else {
            20_000
        });
        let session = u128::from(random(40));
        let prompt = 1 + random(200);
        let overlap = random(prompt + 20);
        fast.used(now_ms, key(session), prompt, overlap);
        slow.used(now_ms, session, prompt, overlap);
        if random(10) == 0 {
            let gone = u128::from(random(40));
            fast.left(key(gone));
            slow.turns.retain(|turn| turn.0 != gone);
        }
        assert_eq!(fast.sessions(), slow.turns.len());
        let private: u64 = slow.turns.iter().map(|turn| turn.3).sum();
        assert_eq!(fast.private_blocks(), private);
        let (asked, pool) = (u128::from(random(45)), random(5000));
        assert_eq!(
            fast.kept_blocks(key(asked), pool),
            slow.kept_blocks(asked, pool),
            "{turn}"
        );
        assert_eq!(
            fast.kept_ms(now_ms, pool, 30, key(asked)),
            slow.kept_ms(now_ms, pool, 30, asked),
            "{turn}"
        );
    }
}

#[test]
fn a_session_behind_too_many_others_loses_the_end_of_its_prefix_first() {
    let mut set = WorkingSet::default();
    // Each of four sessions of 30 blocks found the same 10 there.
    for session in 0..4 {
        set.used(session * 1000, key(u128::from(session)), 30, 10);
    }
    assert_eq!((set.sessions(), set.private_blocks()), (4, 80));
    let kept = |pool| [0, 1, 2, 3].map(|session| set.kept_blocks(key(session), pool));
    assert_eq!(kept(80), [None; 4]);
    assert_eq!(kept(75), [Some(25), None, None, None]);
    assert_eq!(kept(30), [Some(10), Some(10), Some(20), None]);
    assert_eq!(set.kept_blocks(key(9), 80), None);
}

/// Catches a turn that is to find less than its node holds although nothing comes before it: a
/// first session's prefix is kept by those who share it, which its own account does not know.
#[test]
fn what_is_held_goes_only_for_what_comes() {
    let mut set = WorkingSet::default();
    // The first session brings 10 blocks that three others find there.
    set.used(0, key(0), 30, 0);
    for session in 1..4 {
        set.used(session * 1000, key(u128::from(session)), 30, 10);
    }
    assert_eq!(set.kept_blocks(key(0), 65), Some(5));
    for (held, coming, found) in [
        (10, 0, 10),
        (10, 3, 7),
        (10, 5, 5),
        (10, u64::MAX, 5),
        (4, u64::MAX, 4),
        (0, 0, 0),
    ] {
        assert_eq!(set.found_blocks(key(0), 65, held, coming), found);
    }
    assert_eq!(set.found_blocks(key(3), 65, 30, u64::MAX), 30);
}

#[test]
fn what_is_pushed_out_next_was_used_longest_ago() {
    let mut set = WorkingSet::default();
    for session in 0..4 {
        set.used(session * 1000, key(u128::from(session)), 20, 0);
    }
    let now_ms = 10_000;
    // There is room for 20 more.
    assert_eq!(set.kept_ms(now_ms, 100, 20, key(9)), f64::INFINITY);
    assert_eq!(set.kept_ms(now_ms, 100, 21, key(9)), 10_000.0);
    assert_eq!(set.kept_ms(now_ms, 100, 41, key(9)), 9000.0);
    // Its own blocks are not another's.
    assert_eq!(set.kept_ms(now_ms, 100, 40, key(0)), f64::INFINITY);
    assert_eq!(set.kept_ms(now_ms, 100, 41, key(0)), 9000.0);
}
