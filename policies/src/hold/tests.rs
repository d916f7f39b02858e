//! Catches a turn that is lost, let go twice or starved, an order in which a long one holds up
//! short ones, and a working set that outgrows the pools.

use std::collections::{BTreeMap, HashMap, HashSet};

mod limits;

use super::placing::ROOM_FOR_ALL_MS;
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

/// The node that turns go to where a test needs but one.
const NODE: u64 = 7;

/// A node whose pool has so many blocks, and so much ahead.
fn node(node: u64, capacity_blocks: u64, queue_ms: f64) -> NodeRoom {
    NodeRoom {
        node,
        capacity_blocks,
        queue_ms,
    }
}

/// One node of which nobody knows what it holds.
const ANY: Room<'static> = Room {
    nodes: &[NodeRoom {
        node: NODE,
        capacity_blocks: 0,
        queue_ms: 1000.0,
    }],
};

fn sent(_: &Place) -> Start {
    Start::Sent(NODE)
}

fn full(_: &Place) -> Start {
    Start::Full(NODE)
}

fn no_room(place: &Place) -> Start {
    panic!("there is no room: {place:?}")
}

/// A gate of a fleet that is past the cliff: each session has its place.
fn bounded(params: Params) -> Gate {
    Gate {
        is_bounded: true,
        short_ms: f64::MAX,
        ..Gate::new(params)
    }
}

fn names(done: &[(u64, Verdict)]) -> Vec<u64> {
    assert!(done.iter().all(|(_, verdict)| *verdict == Verdict::Go));
    done.iter().map(|(id, _)| *id).collect()
}

#[test]
fn a_full_nodes_turns_wait_and_the_shortest_goes_first() {
    let mut gate = Gate::new(Params::default());
    let go = gate.arrive(0.0, ANY, turn(0, 0, 900.0, 0..1), sent);
    assert_eq!(go, Verdict::Go);
    for (id, work_ms) in [(1, 500.0), (2, 100.0), (3, 300.0)] {
        let came = turn(id, id.into(), work_ms, 0..1);
        let held = gate.arrive(1.0, ANY, came, full);
        assert_eq!(held, Verdict::Hold);
    }
    // Nothing has happened at the node: nobody is asked.
    assert_eq!(gate.release(2.0, ANY, |id, _| panic!("{id} was asked")), []);
    gate.first_token(0);
    let mut asked = 0;
    let done = gate.release(3.0, ANY, |_, _| {
        asked += 1;
        if asked == 1 {
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
    let done = gate.release(again_ms, ANY, |_, _| Start::Sent(8));
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
    gate.arrive(0.0, ANY, turn(1, 1, 1000.0, 0..1), full);
    // 1,000 ms of work against 100: outweighed after 1,800 ms.
    for (now_ms, first) in [(1700.0, 2), (1900.0, 1)] {
        let mut gate = Gate {
            params,
            queue: Queue::default(),
            ..Gate::new(params)
        };
        gate.arrive(0.0, ANY, turn(1, 1, 1000.0, 0..1), full);
        gate.arrive(now_ms, ANY, turn(2, 2, 100.0, 0..1), full);
        let done = gate.release(now_ms, ANY, |_, _| Start::Sent(0));
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
    gate.arrive(0.0, ANY, of(1, 0, 5000.0), sent);
    gate.arrive(0.0, ANY, of(1, 1, 10.0), full);
    gate.arrive(0.0, ANY, of(2, 2, 2000.0), full);
    let done = gate.release(1000.0, ANY, |_, _| Start::Sent(0));
    assert_eq!(names(&done), [2, 1]);
}

#[test]
fn a_newcomer_waits_for_room_and_the_silent_make_it() {
    let pools = [node(NODE, 10, 600.0)];
    let room = Room { nodes: &pools };
    let mut gate = bounded(Params {
        wait_ms_max: f64::MAX,
        ..Params::default()
    });
    assert_eq!(
        gate.arrive(0.0, room, turn(1, 1, 1.0, 0..6), sent),
        Verdict::Go
    );
    // What it shares with the first counts once: 0..4, then 100..102.
    let mut sibling = turn(2, 2, 1.0, 0..4);
    sibling.footprint.blocks.extend(100..102);
    assert_eq!(gate.arrive(0.0, room, sibling, sent), Verdict::Go);
    assert_eq!(gate.served().blocks(), 8);
    let third = turn(3, 3, 1.0, 200..203);
    assert_eq!(gate.arrive(0.0, room, third, no_room), Verdict::Hold);
    // A member's next turn does not wait.
    gate.first_token(1);
    gate.ended(1000.0, 1);
    assert_eq!(
        gate.arrive(2000.0, room, turn(4, 1, 1.0, 0..6), sent),
        Verdict::Go
    );
    gate.ended(3000.0, 4);
    let leaves_ms = 3000.0 + gate.params().patience_ms;
    let early = gate.release(leaves_ms - 1.0, room, |_, place| no_room(place));
    assert_eq!(early, []);
    let done = gate.release(leaves_ms, room, |_, place| sent(place));
    assert_eq!(names(&done), [3]);
    assert_eq!(gate.served().node_of(SessionKey(1)), None);
}

#[test]
fn a_member_stays_with_its_node_and_a_newcomer_goes_where_there_is_room_and_time() {
    let pools = [node(0, 10, 0.0), node(1, 10, 0.0), node(2, 10, 5000.0)];
    let room = Room { nodes: &pools };
    let mut gate = bounded(Params::default());
    let at = |node| move |_: &Place| Start::Sent(node);
    gate.arrive(0.0, room, turn(1, 1, 1.0, 0..8), at(0));
    gate.ended(0.0, 1);
    // Node 0 has no room, node 2 much ahead.
    let entered = gate.arrive(0.0, room, turn(2, 2, 1.0, 10..18), |place| {
        assert_eq!(*place, Place::Among(vec![1]));
        Start::Sent(1)
    });
    assert_eq!(entered, Verdict::Go);
    let stayed = gate.arrive(0.0, room, turn(3, 1, 1.0, 0..9), |place| {
        assert_eq!(*place, Place::Among(vec![0]));
        Start::Sent(0)
    });
    assert_eq!(stayed, Verdict::Go);
    gate.ended(1.0, 3);
    // Its node goes away: it enters anew, and its context leaves the old place.
    let grown = [node(1, 100, 0.0)];
    let moved = gate.arrive(2.0, Room { nodes: &grown }, turn(4, 1, 1.0, 0..9), at(1));
    assert_eq!(moved, Verdict::Go);
    assert_eq!(gate.served().blocks_on(0), 0);
    assert_eq!(gate.served().blocks_on(1), 17);
}

#[test]
fn one_newcomer_at_a_time_enters_at_a_node() {
    let pools = [node(0, 100, 0.0), node(1, 100, 0.0)];
    let busy = [node(0, 100, 9000.0), node(1, 100, 9000.0)];
    let mut gate = bounded(Params::default());
    for id in 0..3 {
        let new = turn(id, id.into(), 100.0, id * 10..id * 10 + 5);
        gate.arrive(0.0, Room { nodes: &busy }, new, no_room);
    }
    let mut asked = Vec::new();
    let done = gate.release(1.0, Room { nodes: &pools }, |_, place| {
        asked.push(place.clone());
        let Place::Among(nodes) = place else {
            return Start::Nowhere;
        };
        Start::Sent(nodes[0])
    });
    assert_eq!(names(&done), [0, 1]);
    assert_eq!(
        asked,
        [Place::Among(vec![0, 1]), Place::Among(vec![1])],
        "each node once"
    );
}

#[test]
fn members_that_outgrow_a_pool_push_out_the_longest_silent() {
    let pools = [node(NODE, 10, 0.0)];
    let room = Room { nodes: &pools };
    let mut gate = bounded(Params::default());
    for (id, blocks) in [(1, 0..4), (2, 10..14)] {
        gate.arrive(id as f64, room, turn(id, id.into(), 1.0, blocks), sent);
        gate.ended(id as f64, id);
    }
    gate.arrive(3.0, room, turn(3, 2, 1.0, 10..18), sent);
    assert_eq!(gate.served().node_of(SessionKey(1)), None);
    assert_eq!(gate.served().blocks(), 8);
}

#[test]
fn who_waited_too_long_comes_again_and_keeps_its_place() {
    let of = |blocks| [node(NODE, blocks, 0.0)];
    let (small, large) = (of(4), of(8));
    let (small, large) = (Room { nodes: &small }, Room { nodes: &large });
    let mut gate = bounded(Params {
        wait_ms_max: 5000.0,
        ageing: 0.2,
        ..Params::default()
    });
    gate.arrive(0.0, small, turn(1, 1, 1.0, 0..4), sent);
    let held = gate.arrive(0.0, small, turn(2, 2, 9000.0, 10..14), no_room);
    assert_eq!(held, Verdict::Hold);
    let done = gate.release(5000.0, small, |_, place| no_room(place));
    let Some((2, Verdict::Refuse { retry_after_ms })) = done.first().copied() else {
        panic!("{done:?}")
    };
    assert!((1000.0..=60_000.0).contains(&retry_after_ms));
    // A shorter one has come meanwhile; the first has waited for longer, earlier tries included.
    let again_ms = 5000.0 + retry_after_ms;
    let shorter = turn(3, 3, 8500.0, 20..24);
    gate.arrive(again_ms - 1.0, small, shorter, no_room);
    gate.arrive(again_ms, small, turn(4, 2, 9000.0, 10..14), no_room);
    let later_ms = again_ms + 4000.0;
    let done = gate.release(later_ms, large, |_, place| sent(place));
    assert_eq!(names(&done), [4]);
}

#[test]
fn a_full_queue_refuses() {
    let mut gate = Gate::new(Params {
        waiting_max: 1,
        ..Params::default()
    });
    assert_eq!(
        gate.arrive(0.0, ANY, turn(1, 1, 1.0, 0..1), full),
        Verdict::Hold
    );
    let refused = gate.arrive(0.0, ANY, turn(2, 2, 1.0, 0..1), full);
    assert!(matches!(refused, Verdict::Refuse { .. }), "{refused:?}");
    // Who was never sent has no place.
    assert!(gate.served().is_empty());
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

impl Start {
    /// The same at a node where the turn may go.
    fn at(self, place: &Place) -> Self {
        let other = match place {
            Place::Among(nodes) => nodes[0],
            Place::Anywhere => panic!("all have their places"),
        };
        match self {
            Self::Sent(node) if !place.allows(node) => Self::Sent(other),
            Self::Full(node) if !place.allows(node) => Self::Full(other),
            start => start,
        }
    }
}

/// Random turns, ends and departures; the twin knows only which turns are where.
fn check(seed: u64) {
    let pools = [0, 1, 2, 3].map(|number| node(number, 12, 500.0));
    let room = Room { nodes: &pools };
    let mut random = Random(seed);
    let mut gate = bounded(Params {
        wait_ms_max: 3000.0,
        patience_ms: 2000.0,
        waiting_max: 12,
        ..Params::default()
    });
    let (mut waiting, mut running) = (HashSet::new(), BTreeMap::new());
    let mut now_ms = 0.0;
    for id in 0..600 {
        now_ms += random.below(400) as f64;
        let (session, new, start) = random.turn(id);
        match gate.arrive(now_ms, room, new, |place| start.at(place)) {
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
        let done = gate.release(now_ms, room, |id, place| {
            let start = match random.below(3) {
                0 => Start::Full(sessions[&id] % 4),
                _ => Start::Sent(sessions[&id] % 4),
            };
            start.at(place)
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
            let session = SessionKey((*session).into());
            assert!(gate.served().node_of(session).is_some());
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
fn sessions_are_bound_to_places_only_past_the_cliff() {
    let calm = [node(NODE, 10, 100.0)];
    let distress = [node(NODE, 10, 9000.0)];
    let (calm, distress) = (Room { nodes: &calm }, Room { nodes: &distress });
    let big = |id: u64| turn(id, id.into(), 1.0, id * 100..id * 100 + 8);
    let anywhere = |place: &Place| {
        assert_eq!(*place, Place::Anywhere);
        Start::Sent(NODE)
    };
    let mut gate = Gate::new(Params {
        wait_ms_max: f64::MAX,
        ..Params::default()
    });
    // Turns queue up, but all that is live fits: nothing would be gained by holding any.
    assert_eq!(gate.arrive(0.0, distress, big(0), anywhere), Verdict::Go);
    gate.ended(0.0, 0);
    // Nothing queues up: three times what the pool holds.
    for id in 1..4 {
        let now_ms = id as f64;
        assert_eq!(gate.arrive(now_ms, calm, big(id), anywhere), Verdict::Go);
        gate.ended(now_ms, id);
    }
    assert_eq!(gate.served().blocks(), 32);
    // Both: those that were silent for longest leave, and newcomers wait.
    let held = gate.arrive(1000.0, distress, big(4), no_room);
    assert_eq!(held, Verdict::Hold);
    assert_eq!(gate.served().blocks(), 8);
    // There is room again, and nobody has lacked it for a while.
    let left_ms = 3.0 + gate.params().patience_ms;
    let done = gate.release(left_ms, calm, |_, place| sent(place));
    assert_eq!(names(&done), [4]);
    gate.ended(left_ms, 4);
    let late_ms = left_ms + ROOM_FOR_ALL_MS + 1.0;
    assert_eq!(gate.arrive(late_ms, calm, big(5), anywhere), Verdict::Go);
}
