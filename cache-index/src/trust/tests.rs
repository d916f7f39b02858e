//! Catches: credit that survives a restart or a gap, a repetition taken for a restart, a replay
//! spliced onto another life, and a stream that never becomes exact again.

use super::{Replay, Step, Tracker, Trust, WAITING_BATCHES_MAX};
use crate::event::{EventBatch, KvEvent};

/// What the sockets deliver.
#[derive(Clone, Copy)]
enum In {
    Connected,
    Lost,
    /// A live message; its timestamp is 10 + its number.
    Live(u64),
    /// A live message with number and timestamp.
    LiveAt(u64, f64),
    /// A live message of this boot.
    Boot(u64, &'static str),
    Replayed(u64),
    ReplayedAt(u64, f64),
    ReplayedBoot(u64, &'static str),
    SnapshotBoot(u64, &'static str),
    Snapshot(u64),
    LiveSnapshot(u64),
    Bad(u64),
    End,
    Failed,
}
use In::*;

fn batch(timestamp: f64, boot_id: Option<&str>, events: Vec<KvEvent>) -> EventBatch {
    EventBatch {
        timestamp,
        events,
        dp_rank: None,
        boot_id: boot_id.map(str::to_owned),
    }
}

#[expect(clippy::cast_precision_loss, reason = "small numbers")]
fn feed(tracker: &mut Tracker, input: In) -> Vec<Step> {
    let at = |seq: u64| 10.0 + seq as f64;
    match input {
        Connected => tracker.on_connected(),
        Lost => tracker.on_lost(),
        Live(seq) => tracker.on_live(seq, batch(at(seq), None, vec![])),
        LiveAt(seq, timestamp) => tracker.on_live(seq, batch(timestamp, None, vec![])),
        Boot(seq, boot) => tracker.on_live(seq, batch(at(seq), Some(boot), vec![])),
        Replayed(seq) => tracker.on_replayed(seq, batch(at(seq), None, vec![])),
        ReplayedAt(seq, timestamp) => tracker.on_replayed(seq, batch(timestamp, None, vec![])),
        ReplayedBoot(seq, boot) => tracker.on_replayed(seq, batch(at(seq), Some(boot), vec![])),
        SnapshotBoot(seq, boot) => {
            tracker.on_replayed(seq, batch(at(seq), Some(boot), vec![KvEvent::Cleared]))
        }
        Snapshot(seq) => tracker.on_replayed(seq, batch(at(seq), None, vec![KvEvent::Cleared])),
        LiveSnapshot(seq) => tracker.on_live(seq, batch(at(seq), None, vec![KvEvent::Cleared])),
        Bad(seq) => tracker.on_undecodable(seq),
        End => tracker.on_replay_end(),
        Failed => tracker.on_replay_failed(),
    }
}

/// Steps in words; an applied batch by its timestamp, less the 10.
fn words(steps: &[Step]) -> String {
    let word = |step: &Step| match step {
        Step::Apply(batch) => format!("{}", batch.timestamp - 10.0),
        Step::Forget => "forget".to_owned(),
        Step::Replay { from } => format!("replay({from})"),
    };
    steps.iter().map(word).collect::<Vec<_>>().join(" ")
}

fn check_with(replay: Replay, inputs: &[In], expected: &str, trust: Trust) {
    let mut tracker = Tracker::new(replay);
    let mut steps = Vec::new();
    for input in inputs {
        steps.extend(feed(&mut tracker, *input));
    }
    assert_eq!(words(&steps), expected);
    assert_eq!(tracker.trust(), trust, "{expected}");
}

fn check(inputs: &[In], expected: &str, trust: Trust) {
    check_with(Replay::Available, inputs, expected, trust);
}

#[test]
fn a_joiner_becomes_exact_by_replay() {
    check(&[], "", Trust::Unknown);
    check(&[Connected], "forget replay(0)", Trust::Unknown);
    check(
        &[Connected, End, Live(0)],
        "forget replay(0) 0",
        Trust::Exact,
    );
    // Live messages wait; those that the replay brought too are dropped.
    let inputs = [
        Connected,
        Live(2),
        Live(3),
        Replayed(0),
        Replayed(1),
        Replayed(2),
        End,
        Live(4),
    ];
    check(&inputs, "forget replay(0) 0 1 2 3 4", Trust::Exact);
    // The replay ended short of the first live message: ask for the rest once.
    let inputs = [
        Connected,
        Live(3),
        Replayed(0),
        End,
        Replayed(1),
        Replayed(2),
        End,
    ];
    check(&inputs, "forget replay(0) 0 replay(1) 1 2 3", Trust::Exact);
}

#[test]
fn a_late_joiner_is_partial_without_a_snapshot_and_exact_with_one() {
    let partial = [Connected, Replayed(7), Replayed(8), End];
    check(&partial, "forget replay(0) forget 7 8", Trust::Partial);
    let snapshot = [Connected, Snapshot(7), Replayed(8), End];
    check(&snapshot, "forget replay(0) 7 8", Trust::Exact);
    // A cleared cache makes a partial node exact.
    let cleared = [Connected, Replayed(7), End, LiveSnapshot(8)];
    check(&cleared, "forget replay(0) forget 7 8", Trust::Exact);
    // Nothing was replayed although the engine is far along.
    let silent = [Connected, Live(5), End, Live(6)];
    check(&silent, "forget replay(0) forget 5 6", Trust::Partial);
}

#[test]
fn a_gap_is_filled_in_order_or_not_bridged() {
    let start = [Connected, Replayed(0), End];
    let run = |rest: &[In], expected: &str, trust| {
        check(
            &[&start[..], rest].concat(),
            &format!("forget replay(0) 0 {expected}"),
            trust,
        );
    };
    run(&[Live(3)], "replay(1)", Trust::Unknown);
    run(
        &[Live(3), Live(4), Replayed(1), Replayed(2), Replayed(3), End],
        "replay(1) 1 2 3 4",
        Trust::Exact,
    );
    // What is lost for good is not bridged: a removal may have been in it.
    run(
        &[Live(3), Replayed(2), End],
        "replay(1) forget 2 3",
        Trust::Partial,
    );
    run(&[Live(3), End], "replay(1) forget 3", Trust::Partial);
    run(
        &[Live(3), Failed, Live(4)],
        "replay(1) forget 3 4",
        Trust::Partial,
    );
    run(
        &[Live(3), Live(5), Failed],
        "replay(1) forget 3 replay(4)",
        Trust::Unknown,
    );
    // Our engine answers with a snapshot.
    run(
        &[Live(3), Snapshot(2), Replayed(3), End],
        "replay(1) 2 3",
        Trust::Exact,
    );
    // Another life's messages, older than what is known: never spliced.
    run(
        &[Live(3), ReplayedAt(1, 5.0)],
        "replay(1) forget replay(0)",
        Trust::Unknown,
    );
    // An event that cannot be read is a loss as well.
    run(&[Bad(1), Live(2)], "forget 2", Trust::Partial);
    run(
        &[Live(3), Bad(1), Replayed(2), End, Live(2)],
        "replay(1) forget 2",
        Trust::Partial,
    );
}

#[test]
fn repetitions_are_dropped_and_restarts_forgotten_at_once() {
    let start = [Connected, Replayed(0), Replayed(1), Replayed(2), End];
    let run = |rest: &[In], expected: &str, trust| {
        check(
            &[&start[..], rest].concat(),
            &format!("forget replay(0) 0 1 2 {expected}"),
            trust,
        );
    };
    run(&[Live(1), Live(2), Live(3)], "3", Trust::Exact);
    // The same number with another timestamp: another life, whichever way its clock went.
    run(&[LiveAt(0, 100.0)], "forget 90", Trust::Exact);
    run(&[LiveAt(0, 1.0)], "forget -9", Trust::Exact);
    run(&[LiveAt(1, 100.0)], "forget replay(0)", Trust::Unknown);
    run(
        &[LiveAt(1, 100.0), ReplayedAt(0, 99.0), End],
        "forget replay(0) 89 90",
        Trust::Exact,
    );
    // Noticed while a gap is being filled.
    run(
        &[Live(5), LiveAt(0, 100.0), End, LiveAt(1, 101.0)],
        "replay(3) forget 5 forget 90 91",
        Trust::Exact,
    );
    // Messages of the old life that waited come after nothing of the new one.
    let inputs = [
        Connected,
        LiveAt(9, 1.0),
        ReplayedAt(0, 50.0),
        End,
        LiveAt(1, 51.0),
    ];
    check(&inputs, "forget replay(0) 40 41", Trust::Exact);
}

#[test]
fn a_boot_id_shows_every_restart() {
    let start = [Connected, ReplayedBoot(0, "a"), ReplayedBoot(1, "a"), End];
    let run = |rest: &[In], expected: &str, trust| {
        check(
            &[&start[..], rest].concat(),
            &format!("forget replay(0) 0 1 {expected}"),
            trust,
        );
    };
    run(&[Boot(2, "a")], "2", Trust::Exact);
    // A message that a snapshot has covered and the socket delivers late is no restart.
    let covered = [
        Connected,
        SnapshotBoot(7, "a"),
        End,
        Boot(6, "a"),
        Boot(7, "a"),
        Boot(8, "a"),
    ];
    check(&covered, "forget replay(0) 7 8", Trust::Exact);
    // It has passed the last number already; numbers alone would show nothing.
    run(&[Boot(2, "b")], "forget replay(0)", Trust::Unknown);
    run(&[Boot(0, "b"), Boot(1, "b")], "forget 0 1", Trust::Exact);
    run(
        &[Boot(3, "a"), ReplayedBoot(2, "b")],
        "replay(2) forget replay(0)",
        Trust::Unknown,
    );
    run(
        &[Boot(3, "a"), Boot(0, "b")],
        "replay(2) forget 0",
        Trust::Exact,
    );
}

#[test]
fn a_live_stream_that_lags_behind_a_replay_does_not_bring_an_old_life_back() {
    let connected = [Connected, Boot(7, "a"), ReplayedBoot(0, "b")];
    // "a" or "b", which is the later one? The replay is asked again, and then it is clear.
    let inputs = [
        &connected[..],
        &[ReplayedBoot(0, "b"), End, Boot(8, "a"), Boot(1, "b")],
    ]
    .concat();
    check(
        &inputs,
        "forget replay(0) forget replay(0) 0 1",
        Trust::Exact,
    );
    // One more replay for each life that the live stream goes through, not for each message.
    let late = [
        Boot(3, "c"),
        ReplayedBoot(0, "d"),
        ReplayedBoot(0, "d"),
        End,
        Boot(4, "c"),
    ];
    let inputs = [&connected[..], &[ReplayedBoot(0, "b"), End], &late].concat();
    let steps = "forget replay(0) forget replay(0) 0 forget replay(0) forget replay(0) 0";
    check(&inputs, steps, Trust::Exact);
}

#[test]
fn a_broken_connection_forgets_and_nothing_is_believed_until_replay_ends() {
    let inputs = [
        Connected,
        Replayed(0),
        End,
        Lost,
        Live(1),
        Bad(2),
        Failed,
        End,
    ];
    check(&inputs, "forget replay(0) 0 forget", Trust::Unknown);
    let inputs = [
        Connected,
        Replayed(0),
        End,
        Lost,
        Connected,
        Replayed(0),
        Replayed(1),
        End,
    ];
    check(
        &inputs,
        "forget replay(0) 0 forget forget replay(0) 0 1",
        Trust::Exact,
    );
}

#[test]
fn without_a_replay_endpoint_a_gap_is_a_new_beginning() {
    let run = |inputs: &[In], expected: &str, trust| {
        check_with(Replay::Absent, inputs, expected, trust);
    };
    run(&[Connected, Live(0), Live(1)], "forget 0 1", Trust::Exact);
    run(&[Connected, Live(5), Live(6)], "forget 5 6", Trust::Partial);
    run(
        &[Connected, Live(0), Live(2)],
        "forget 0 forget 2",
        Trust::Partial,
    );
    run(
        &[Connected, Live(0), Live(2), LiveSnapshot(7)],
        "forget 0 forget 2 7",
        Trust::Exact,
    );
    run(
        &[Connected, Live(5), LiveAt(3, 99.0)],
        "forget 5 forget 89",
        Trust::Partial,
    );
    run(
        &[Connected, Live(5), LiveAt(0, 99.0)],
        "forget 5 forget 89",
        Trust::Exact,
    );
}

#[test]
fn what_waits_is_bounded_and_asked_for_again() {
    let mut tracker = Tracker::new(Replay::Available);
    feed(&mut tracker, Connected);
    let last = WAITING_BATCHES_MAX as u64 + 10;
    for seq in 0..=last {
        assert_eq!(feed(&mut tracker, Live(seq)), vec![]);
    }
    assert!(tracker.waiting.len() <= WAITING_BATCHES_MAX);
    feed(&mut tracker, Replayed(0));
    let steps = feed(&mut tracker, End);
    assert_eq!(words(&steps), "replay(1)");
}
