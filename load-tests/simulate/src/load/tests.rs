//! Would users share what is private, or slices share requests?

use super::*;
use crate::scenarios::Setup;

/// Five sessions of three turns; the first block is common to all.
fn trace(mode: &str) -> Trace {
    let mut text = format!("{{\"name\":\"t\",\"block\":512,\"mode\":\"{mode}\"}}\n");
    for session in 0..50 {
        let first = session * 3;
        let (from, keep, new) = if session == 0 { (-1, 0, 2) } else { (0, 1, 1) };
        let at = session * 1000;
        text += &format!("[{at},{session},1100,5,-1,0,{from},{keep},{new}]\n");
        for turn in 1..3 {
            let before = first + turn - 1;
            let keep = turn + 1;
            let at = at + turn * 10;
            text += &format!("[{at},{session},1600,5,{before},1000,{before},{keep},1]\n");
        }
    }
    Trace::read("t", text.as_bytes()).expect("a valid trace")
}

fn scenario(trace: &Trace, load: Load, slice: Slice, seed: u64) -> Scenario {
    Setup::new(2, 100, load).scenario(trace, slice, seed)
}

const COPIES: Load = Load::Copies {
    copies: 3,
    speed: 2.0,
};

#[test]
fn copies_share_system_prompts_and_nothing_else() {
    let trace = trace("open");
    let scenario = scenario(&trace, COPIES, Slice::All, 1);
    let (arrivals, coming) = Arrivals::new(&trace, &scenario);
    assert_eq!(coming.len(), 3 * 150);
    let mut owner: HashMap<u32, u32> = HashMap::new();
    for coming in &coming {
        let path = arrivals.path(coming.request, coming.play);
        assert_eq!(path[0], 0, "the system prompt");
        for block in &path[1..] {
            assert!(*block < arrivals.blocks_end());
            assert_eq!(*owner.entry(*block).or_insert(coming.play), coming.play);
        }
    }
    // A session's turns come in order, at double speed and with one delay.
    let of_one: Vec<&Coming> = coming.iter().filter(|c| c.play == coming[0].play).collect();
    assert!((of_one[2].at_ms - of_one[0].at_ms - 10.0).abs() < 1e-9);
}

#[test]
fn users_play_sessions_of_their_slice_with_blocks_of_their_own() {
    let trace = trace("closed");
    let mut sessions = [HashMap::new(), HashMap::new()];
    for (i, slice) in [Slice::Dev, Slice::Held].into_iter().enumerate() {
        let scenario = scenario(&trace, Load::Users(20), slice, 3);
        assert!(has_requests(&trace, &scenario));
        let (mut arrivals, mut coming) = Arrivals::new(&trace, &scenario);
        assert_eq!(coming.len(), 20);
        let mut owner: HashMap<u32, u32> = HashMap::new();
        for _ in 0..3000 {
            let Coming {
                at_ms,
                request,
                play,
            } = coming.remove(0);
            for block in &arrivals.path(request, play)[1..] {
                assert_eq!(*owner.entry(*block).or_insert(play), play);
            }
            *sessions[i]
                .entry(trace.requests[request as usize].session)
                .or_insert(0) += 1;
            let next = arrivals.ended(request, play, at_ms);
            assert_eq!(next.len(), 1, "one turn at a time");
            assert!(next[0].at_ms >= at_ms + 1000.0);
            coming.extend(next);
        }
    }
    let [dev, held] = sessions;
    assert!(dev.keys().all(|session| !held.contains_key(session)));
    assert_eq!(
        dev.len() + held.len(),
        50,
        "every session is in one of them"
    );
    assert!(dev.len() > 2 * held.len());
}

/// Would two runs with one seed differ, or two seeds give the same run?
#[test]
fn the_seed_decides_everything() {
    let trace = trace("closed");
    let start = |seed| {
        let scenario = scenario(&trace, Load::Users(20), Slice::All, seed);
        Arrivals::new(&trace, &scenario).1
    };
    assert_eq!(start(1), start(1));
    assert_ne!(start(1), start(2));
}
