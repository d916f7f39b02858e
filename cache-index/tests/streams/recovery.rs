//! Catches credit for what a node no longer holds, after any mixture of lost, repeated and late
//! messages, restarts, and replays from a buffer that is too short; and a node that stays without
//! credit although its stream is whole again.
//!
//! A publishing engine, a lossy wire and a replay server, against tracker and index. The truth is
//! the slow twin, which hears every event at once and loses none.

use std::collections::VecDeque;

use cache_index::event::{EventBatch, KvEvent};
use cache_index::ids::NodeId;
use cache_index::index::{Index, Limits};
use cache_index::reference::Reference;
use cache_index::trust::{Replay, Step, Tracker, Trust};

use crate::differential::{MODEL, SALTS, chain};
use crate::engine::{Engine, Random};

/// How an engine answers replays.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// The last batches only, no boot id: vLLM.
    Buffer(usize),
    /// A snapshot where the batches are gone, and a boot id: ours.
    Snapshot(usize),
}

/// An engine with its publisher.
struct Publisher {
    engine: Engine,
    kind: Kind,
    boot: u64,
    next: u64,
    log: VecDeque<(u64, EventBatch)>,
    clock: f64,
}

impl Publisher {
    fn batch(&mut self, events: Vec<KvEvent>) -> EventBatch {
        self.clock += 0.25;
        let boot_id = matches!(self.kind, Kind::Snapshot(_)).then(|| format!("boot {}", self.boot));
        EventBatch {
            timestamp: self.clock,
            events,
            dp_rank: None,
            boot_id,
        }
    }

    fn publish(&mut self, events: Vec<KvEvent>) -> (u64, EventBatch) {
        let message = (self.next, self.batch(events));
        self.next += 1;
        self.log.push_back(message.clone());
        let (Kind::Buffer(max) | Kind::Snapshot(max)) = self.kind;
        while self.log.len() > max {
            self.log.pop_front();
        }
        message
    }

    fn replay(&mut self, from: u64) -> VecDeque<(u64, EventBatch)> {
        let first = self.log.front().map_or(self.next, |(seq, _)| *seq);
        if matches!(self.kind, Kind::Snapshot(_)) && from < first {
            let stored = self.engine.stored();
            let boot = format!("boot {}", self.boot);
            return VecDeque::from([(
                self.next - 1,
                EventBatch::snapshot(self.clock, &boot, stored),
            )]);
        }
        self.log
            .iter()
            .filter(|(seq, _)| *seq >= from)
            .cloned()
            .collect()
    }

    fn restart(&mut self, random: &mut Random) {
        self.engine = new_engine(self.kind, self.engine.block_size, random);
        self.boot += 1;
        self.next = 0;
        self.log.clear();
    }
}

/// The consumer: tracker, index, and the replay in progress.
struct Consumer {
    id: NodeId,
    index: Index,
    tracker: Tracker,
    /// Replies that have not arrived yet; none where no replay runs.
    replay: Option<VecDeque<(u64, EventBatch)>>,
    replays: usize,
}

impl Consumer {
    fn carry_out(&mut self, steps: Vec<Step>, publisher: &mut Publisher) {
        for step in steps {
            match step {
                Step::Apply(batch) => drop(self.index.apply(&self.id, &batch)),
                Step::Forget => self.index.forget(&self.id),
                Step::Replay { from } => {
                    self.replays += 1;
                    self.replay = Some(publisher.replay(from));
                }
            }
        }
    }

    /// Delivers one reply of the replay, or its end.
    fn deliver_replay(&mut self, publisher: &mut Publisher, random: &mut Random) {
        let Some(replies) = &mut self.replay else {
            return;
        };
        let steps = match replies.pop_front() {
            _ if random.one_in(60) => {
                self.replay = None;
                self.tracker.on_replay_failed()
            }
            Some((seq, batch)) => self.tracker.on_replayed(seq, batch),
            None => {
                self.replay = None;
                self.tracker.on_replay_end()
            }
        };
        self.carry_out(steps, publisher);
    }
}

fn new_engine(kind: Kind, block_size: usize, random: &mut Random) -> Engine {
    match kind {
        Kind::Buffer(_) => Engine::new(block_size, random),
        // A snapshot cannot tell of blocks behind a hole; our engine makes none.
        Kind::Snapshot(_) => Engine::leaf_first(block_size, random),
    }
}

struct Counts {
    exact: usize,
    partial: usize,
    restarts: usize,
}

fn run(seed: u64, kind: Kind, replay: Replay, counts: &mut Counts) {
    let random = &mut Random(seed);
    let block_size = *random.pick(&[16, 16, 8, 32]);
    let engine = new_engine(kind, block_size, random);
    let mut publisher = Publisher {
        engine,
        kind,
        boot: 0,
        next: 0,
        log: VecDeque::new(),
        clock: 0.0,
    };
    let index = Index::new(MODEL, Limits::default());
    let mut truth = Reference::new(MODEL, Limits::default());
    for salt in SALTS {
        index.issue_salt(salt);
        truth.issue_salt(salt);
    }
    let id = NodeId::new("node");
    let tracker = Tracker::new(replay);
    let mut consumer = Consumer {
        id: id.clone(),
        index,
        tracker,
        replay: None,
        replays: 0,
    };
    // Some history before anybody listens.
    for _ in 0..random.below(30) {
        let events = work(&mut publisher.engine, random);
        let (_, batch) = publisher.publish(events);
        truth.apply(&id, &batch);
    }
    let steps = consumer.tracker.on_connected();
    consumer.carry_out(steps, &mut publisher);
    let mut wire: VecDeque<(u64, EventBatch)> = VecDeque::new();
    for at in 0..400 {
        match random.below(100) {
            0 => {
                publisher.restart(random);
                truth.forget(&id);
                counts.restarts += 1;
                // Without a boot id a restart is only sure to show in the connection.
                if matches!(kind, Kind::Buffer(_)) {
                    wire.clear();
                    let mut steps = consumer.tracker.on_lost();
                    steps.extend(consumer.tracker.on_connected());
                    consumer.carry_out(steps, &mut publisher);
                }
            }
            1..=50 => {
                let events = work(&mut publisher.engine, random);
                let message = publisher.publish(events);
                truth.apply(&id, &message.1);
                match random.below(30) {
                    0 => {}
                    1 => wire.extend([message.clone(), message]),
                    _ => wire.push_back(message),
                }
            }
            51..=75 => consumer.deliver_replay(&mut publisher, random),
            _ => {
                if let Some((seq, batch)) = wire.pop_front() {
                    let steps = consumer.tracker.on_live(seq, batch);
                    consumer.carry_out(steps, &mut publisher);
                }
            }
        }
        if at % 20 == 19 {
            settle(&mut consumer, &mut publisher, &mut truth, &mut wire, random);
            judge(&consumer, &truth, &publisher.engine, random, counts);
        }
    }
    assert!(
        consumer.replays < 200,
        "{} replays in 400 steps",
        consumer.replays
    );
}

/// One batch of an engine's work.
fn work(engine: &mut Engine, random: &mut Random) -> Vec<KvEvent> {
    let mut events = Vec::new();
    for _ in 0..=random.below(2) {
        let full = engine.held.len() > 25;
        let event = if full || random.one_in(3) {
            engine.evict(random)
        } else {
            None
        };
        events.push(event.unwrap_or_else(|| engine.store(3, random)));
        if random.one_in(150) {
            events.push(engine.clear());
        }
    }
    events
}

/// Delivers all that is on its way, and one last message that nobody loses: it shows a gap that
/// nothing has followed so far.
fn settle(
    consumer: &mut Consumer,
    publisher: &mut Publisher,
    truth: &mut Reference,
    wire: &mut VecDeque<(u64, EventBatch)>,
    random: &mut Random,
) {
    let events = vec![publisher.engine.store(1, random)];
    let message = publisher.publish(events);
    truth.apply(&consumer.id, &message.1);
    wire.push_back(message);
    while !wire.is_empty() || consumer.replay.is_some() {
        if let Some((seq, batch)) = wire.pop_front() {
            let steps = consumer.tracker.on_live(seq, batch);
            consumer.carry_out(steps, publisher);
        }
        consumer.deliver_replay(publisher, random);
    }
}

fn judge(
    consumer: &Consumer,
    truth: &Reference,
    engine: &Engine,
    random: &mut Random,
    counts: &mut Counts,
) {
    consumer.index.check_integrity();
    for _ in 0..10 {
        let chain = chain(std::slice::from_ref(engine), random);
        let blocks = |found: Vec<(NodeId, usize)>| found.first().map_or(0, |(_, blocks)| *blocks);
        let (got, held) = (
            blocks(consumer.index.overlap(&chain)),
            blocks(truth.overlap(&chain)),
        );
        assert_ne!(
            consumer.tracker.trust(),
            Trust::Unknown,
            "with nothing on its way"
        );
        match consumer.tracker.trust() {
            Trust::Unknown => {}
            Trust::Partial => assert!(got <= held, "credits {got} blocks of {held}"),
            Trust::Exact => assert_eq!(got, held),
        }
    }
    match consumer.tracker.trust() {
        Trust::Exact => counts.exact += 1,
        _ => counts.partial += 1,
    }
}

#[test]
fn credit_is_never_too_high_and_exact_where_it_says_so() {
    let mut all = Counts {
        exact: 0,
        partial: 0,
        restarts: 0,
    };
    for seed in 0..40 {
        run(seed, Kind::Buffer(10_000), Replay::Available, &mut all);
        run(seed, Kind::Buffer(6), Replay::Available, &mut all);
        run(seed, Kind::Buffer(6), Replay::Absent, &mut all);
        run(seed, Kind::Snapshot(6), Replay::Available, &mut all);
    }
    let Counts {
        exact,
        partial,
        restarts,
    } = all;
    assert!(
        exact > 500 && partial > 500 && restarts > 100,
        "{exact} {partial} {restarts}"
    );
}
