//! Catches a turn that is lost, let go twice or starved, an order in which a long one holds up
//! short ones, and a working set that outgrows the pools.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::*;

fn turn(id: u64, session: u128, work_ms: f64, blocks: std::ops::Range<u64>) -> Turn {
    Turn {
        id,
        tenant: 0,
        session: SessionKey(session),
        work_ms,
        returns: true,
        footprint: Footprint {
            tokens: (blocks.end - blocks.start) * served::BLOCK_TOKENS,
            blocks: blocks.collect(),
        },
    }
}

/// Pools of so many blocks, and nothing queued.
fn room(capacity_blocks: u64) -> Room {
    Room {
        capacity_blocks,
        queue_ms: 1000.0,
    }
}

/// A gate of a fleet that has been in distress: the set may take what the pools hold, no more.
fn strict(params: Params) -> Gate {
    let mut gate = Gate::new(params);
    let distress = Room {
        capacity_blocks: 10,
        queue_ms: 1e6,
    };
    gate.release(0.0, distress, |_| Start::Nowhere);
    gate
}

fn names(done: &[(u64, Verdict)]) -> Vec<u64> {
    assert!(done.iter().all(|(_, verdict)| *verdict == Verdict::Go));
    done.iter().map(|(id, _)| *id).collect()
}

#[test]
fn a_full_nodes_turns_wait_and_the_shortest_goes_first() {
    let mut gate = Gate::new(Params::default());
    let go = gate.arrive(0.0, room(0), turn(0, 0, 900.0, 0..1), || Start::Sent(7));
    assert_eq!(go, Verdict::Go);
    for (id, work_ms) in [(1, 500.0), (2, 100.0), (3, 300.0)] {
        let came = turn(id, id.into(), work_ms, 0..1);
        let held = gate.arrive(1.0, room(0), came, || Start::Full(7));
        assert_eq!(held, Verdict::Hold);
    }
    // Nothing has happened at the node: nobody is asked.
    assert_eq!(
        gate.release(2.0, room(0), |id| panic!("{id} was asked")),
        []
    );
    gate.first_token(0);
    let mut sent = 0;
    let done = gate.release(3.0, room(0), |_| {
        sent += 1;
        if sent == 1 {
            Start::Sent(7)
        } else {
            Start::Full(7)
        }
    });
    assert_eq!(names(&done), [2]);
    assert_eq!(gate.waiting(), 2);
    // A node that tells nothing is asked again after a while.
    let again_ms = gate.wake_ms().expect("two wait");
    assert!(again_ms <= 3.0 + ASK_ALL_EVERY_MS, "{again_ms}");
    let done = gate.release(again_ms, room(0), |_| Start::Sent(8));
    assert_eq!(names(&done), [3, 1]);
    assert_eq!(gate.wake_ms(), None);
}

#[test]
fn whoever_waits_long_enough_goes_before_shorter_ones() {
    let params = Params {
        ageing: 0.5,
        ..Params::default()
    };
    let mut gate = Gate::new(params);
    gate.arrive(0.0, room(0), turn(1, 1, 1000.0, 0..1), || Start::Full(0));
    // 1,000 ms of work against 100: outweighed after 1,800 ms.
    for (now_ms, first) in [(1700.0, 2), (1900.0, 1)] {
        let mut gate = Gate {
            params,
            queue: Queue::default(),
            ..Gate::new(params)
        };
        gate.arrive(0.0, room(0), turn(1, 1, 1000.0, 0..1), || Start::Full(0));
        gate.arrive(now_ms, room(0), turn(2, 2, 100.0, 0..1), || Start::Full(0));
        let done = gate.release(now_ms, room(0), |_| Start::Sent(0));
        assert_eq!(done[0].0, first, "at {now_ms}");
    }
}

#[test]
fn a_tenant_with_much_in_flight_goes_behind() {
    let mut gate = Gate::new(Params::default());
    let of = |tenant, id: u64, work_ms| Turn {
        tenant,
        ..turn(id, id.into(), work_ms, 0..1)
    };
    gate.arrive(0.0, room(0), of(1, 0, 5000.0), || Start::Sent(0));
    gate.arrive(0.0, room(0), of(1, 1, 10.0), || Start::Full(0));
    gate.arrive(0.0, room(0), of(2, 2, 2000.0), || Start::Full(0));
    let done = gate.release(1000.0, room(0), |_| Start::Sent(0));
    assert_eq!(names(&done), [2, 1]);
}

#[test]
fn a_newcomer_waits_for_room_and_the_silent_make_it() {
    let mut gate = strict(Params {
        set_share: 1.0,
        ..Params::default()
    });
    let (sent, nobody) = (|| Start::Sent(0), || panic!("there is no room"));
    assert_eq!(
        gate.arrive(0.0, room(10), turn(1, 1, 1.0, 0..6), sent),
        Verdict::Go
    );
    // What it shares with the first counts once: 0..4, then 100..102.
    let mut sibling = turn(2, 2, 1.0, 0..4);
    sibling.footprint.blocks.extend(100..102);
    assert_eq!(gate.arrive(0.0, room(10), sibling, sent), Verdict::Go);
    assert_eq!(gate.served().blocks(), 8);
    let third = turn(3, 3, 1.0, 200..203);
    assert_eq!(gate.arrive(0.0, room(10), third, nobody), Verdict::Hold);
    // A member's next turn does not wait, nor does who fits.
    gate.first_token(1);
    gate.ended(1000.0, 1);
    assert_eq!(
        gate.arrive(2000.0, room(10), turn(4, 1, 1.0, 0..6), sent),
        Verdict::Go
    );
    gate.ended(3000.0, 4);
    assert_eq!(
        gate.release(3000.0, room(10), |_| panic!("no room yet")),
        []
    );
    // Two minutes of silence: the default while few pauses are known.
    let leaves_ms = 3000.0 + 120_000.0;
    let gate_wakes = gate.wake_ms().expect("one waits");
    assert!(gate_wakes <= leaves_ms);
    let mut patient = Gate {
        params: Params {
            wait_ms_max: f64::MAX,
            ..gate.params
        },
        ..gate
    };
    assert_eq!(patient.wake_ms(), Some(leaves_ms));
    let done = patient.release(leaves_ms, room(10), |_| Start::Sent(0));
    assert_eq!(names(&done), [3]);
    assert!(!patient.served().holds(SessionKey(1)));
}

#[test]
fn who_waited_too_long_comes_again_and_keeps_its_place() {
    let params = Params {
        wait_ms_max: 5000.0,
        set_share: 1.0,
        ..Params::default()
    };
    let mut gate = strict(params);
    gate.arrive(0.0, room(4), turn(1, 1, 1.0, 0..4), || Start::Sent(0));
    let held = gate.arrive(0.0, room(4), turn(2, 2, 9000.0, 10..14), || Start::Sent(0));
    assert_eq!(held, Verdict::Hold);
    assert_eq!(gate.wake_ms(), Some(5000.0));
    let done = gate.release(5000.0, room(4), |_| panic!("there is no room"));
    let Some((2, Verdict::Refuse { retry_after_ms })) = done.first().copied() else {
        panic!("{done:?}")
    };
    assert!((1000.0..=60_000.0).contains(&retry_after_ms));
    // A shorter one has come meanwhile; the first has waited for longer, earlier tries included.
    let again_ms = 5000.0 + retry_after_ms;
    gate.arrive(again_ms - 1.0, room(4), turn(3, 3, 8500.0, 20..24), || {
        Start::Sent(0)
    });
    gate.arrive(again_ms, room(4), turn(4, 2, 9000.0, 10..14), || {
        Start::Sent(0)
    });
    gate.ended(again_ms, 1);
    let later_ms = again_ms + 4000.0;
    let none = gate.release(later_ms, room(5), |_| Start::Sent(0));
    assert_eq!(none, [], "its own context is the pool");
    let done = gate.release(later_ms, room(8), |_| Start::Sent(0));
    assert_eq!(names(&done), [4]);
}

#[test]
fn a_full_queue_refuses() {
    let mut gate = Gate::new(Params {
        waiting_max: 1,
        ..Params::default()
    });
    let full = || Start::Full(0);
    assert_eq!(
        gate.arrive(0.0, room(0), turn(1, 1, 1.0, 0..1), full),
        Verdict::Hold
    );
    let refused = gate.arrive(0.0, room(0), turn(2, 2, 1.0, 0..1), full);
    assert!(matches!(refused, Verdict::Refuse { .. }), "{refused:?}");
    // Not one of those that run: its context leaves with it.
    assert_eq!(gate.served().longest_silent(), Some(0.0));
}

/// A tiny generator: tests must not depend on a crate's stream of random numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963);
        (self.0 >> 33) % bound
    }
}

impl Random {
    /// A turn of one of twelve sessions, and what its node says. Two sessions share a beginning.
    fn turn(&mut self, id: u64) -> (u64, Turn, Start) {
        let session = self.below(12);
        let length = 1 + self.below(8);
        let name = |at| match at {
            0 | 1 => session / 2 * 100 + at,
            _ => session * 1000 + at,
        };
        let mut turn = turn(id, session.into(), (1 + self.below(2000)) as f64, 0..0);
        turn.footprint.blocks = (0..length).map(name).collect();
        turn.footprint.tokens = length * served::BLOCK_TOKENS;
        turn.tenant = session % 3;
        let start = match self.below(3) {
            0 => Start::Full(session % 4),
            _ => Start::Sent(session % 4),
        };
        (session, turn, start)
    }
}

/// Random turns, ends and departures; the twin knows only which turns are where.
fn check(seed: u64) {
    const CAPACITY: u64 = 40;
    let mut random = Random(seed);
    let mut gate = strict(Params {
        wait_ms_max: 3000.0,
        waiting_max: 12,
        set_share: 1.0,
        ..Params::default()
    });
    let (mut waiting, mut running) = (HashSet::new(), BTreeMap::new());
    let mut now_ms = 0.0;
    for id in 0..600 {
        now_ms += random.below(400) as f64;
        let (session, new, start) = random.turn(id);
        match gate.arrive(now_ms, room(CAPACITY), new, || start) {
            Verdict::Go => drop(running.insert(id, session)),
            Verdict::Hold => assert!(waiting.insert((id, session))),
            Verdict::Refuse { retry_after_ms } => assert!(retry_after_ms >= 1000.0),
        }
        if random.below(2) == 0
            && let Some((id, _)) = running.pop_first()
        {
            gate.first_token(id);
            gate.ended(now_ms, id);
        }
        if random.below(8) == 0
            && let Some((id, session)) = waiting.iter().next().copied()
        {
            waiting.remove(&(id, session));
            gate.leave(now_ms, id);
        }
        let sessions: HashMap<u64, u64> = waiting.iter().copied().collect();
        let done = gate.release(now_ms, room(CAPACITY), |id| match random.below(3) {
            0 => Start::Full(sessions[&id] % 4),
            _ => Start::Sent(sessions[&id] % 4),
        });
        for (id, verdict) in done {
            assert!(waiting.remove(&(id, sessions[&id])), "{id} did not wait");
            assert_ne!(verdict, Verdict::Hold);
            if verdict == Verdict::Go {
                running.insert(id, sessions[&id]);
            }
        }
        assert_eq!(gate.waiting(), waiting.len(), "seed {seed}");
        for session in running.values() {
            assert!(gate.served().holds(SessionKey((*session).into())));
        }
    }
    let left: Vec<u64> = waiting.drain().map(|(id, _)| id).collect();
    left.into_iter().for_each(|id| gate.leave(now_ms, id));
    running.keys().for_each(|id| gate.ended(now_ms, *id));
    assert_eq!((gate.waiting(), gate.wake_ms()), (0, None));
    while gate.served.expel_one() {}
    assert_eq!(
        (gate.served().len(), gate.served().blocks()),
        (0, 0),
        "seed {seed}"
    );
    assert!(gate.started.is_empty() && gate.in_flight_ms.is_empty());
}

#[test]
fn nothing_is_lost_and_everything_is_given_back() {
    (0..40).for_each(check);
}

#[test]
fn pauses_are_told_by_their_share() {
    let mut pauses = served::Pauses::default();
    assert!(
        (pauses.quantile_ms(0.9) - 120_000.0).abs() < 1.0,
        "none known"
    );
    for _ in 0..90 {
        pauses.note(1000.0);
    }
    for _ in 0..10 {
        pauses.note(60_000.0);
    }
    let half = pauses.quantile_ms(0.5);
    assert!((1000.0..1500.0).contains(&half), "{half}");
    let most = pauses.quantile_ms(0.97);
    assert!((60_000.0..90_000.0).contains(&most), "{most}");
}

#[test]
fn the_set_is_bounded_only_while_turns_queue_up() {
    let params = Params {
        set_share: 1.0,
        growth_per_s: 0.1,
        wait_ms_max: f64::MAX,
        ..Params::default()
    };
    let mut gate = Gate::new(params);
    let of = |queue_ms| Room {
        capacity_blocks: 10,
        queue_ms,
    };
    let big = |id: u64| turn(id, id.into(), 1.0, id * 100..id * 100 + 8);
    // Nothing queues up: three times what the pools hold.
    for id in 0..4 {
        let went = gate.arrive(0.0, of(100.0), big(id), || Start::Sent(0));
        assert_eq!(went, Verdict::Go);
        gate.ended(0.0, id);
    }
    // Turns queue up: those that were silent for longest leave, and newcomers wait.
    gate.arrive(1000.0, of(9000.0), big(4), || Start::Sent(0));
    gate.arrive(60_000.0, of(9000.0), big(5), || Start::Sent(0));
    for at in 0..100 {
        gate.release(61_000.0 + f64::from(at) * 1000.0, of(9000.0), |_| {
            Start::Sent(0)
        });
    }
    assert!(gate.served().blocks() <= 16, "{}", gate.served().blocks());
    let late_ms = 170_000.0;
    let held = gate.arrive(late_ms, of(9000.0), big(6), || Start::Sent(0));
    assert_eq!(held, Verdict::Hold);
    // All is calm again: they are let in though nobody has left.
    let mut went = Vec::new();
    for at in 1..20 {
        let now_ms = late_ms + f64::from(at) * 1000.0;
        went.extend(gate.release(now_ms, of(100.0), |_| Start::Sent(0)));
    }
    assert_eq!(names(&went), [5, 6]);
}
