//! What of a node's event stream may be believed, and what must be asked again?
//!
//! Feed a [`Tracker`] what the sockets deliver, carry out the returned steps in order, and credit
//! the node by [`Tracker::trust`]. Messages carry a sequence number that grows by one, and from our
//! engine a boot id. States:
//! - lost: not connected. Nothing is known; the index has been told to forget.
//! - replaying: a replay was asked for, and live messages wait for its end. Either from 0, with
//!   nothing applied before, or from a gap on.
//! - live: messages are applied as they come, on top of a complete history (exact) or of one whose
//!   beginning is missing (partial).
//!
//! Four rules keep credit from being too high. What cannot be replayed is not bridged: everything
//! is forgotten, and what comes after it is a beginning (a removal may have been among it). A
//! message from the past that is no repetition means a restart, and so does another boot id. A
//! replay that fills a gap with timestamps before it is another life's, and is never joined to this
//! one. A batch that opens by clearing the cache (our engine's snapshot, vLLM's reset) makes
//! whatever came before it irrelevant, and so makes the node exact.
//!
//! Left out: time. The caller bounds how long a replay may take, delays replays of a node that
//! asks for them again and again, and watches the connection and the process start time, since a
//! restart that has passed the last number shows only there.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use crate::event::{EventBatch, KvEvent};

/// Live messages that wait for the end of a replay; as many as vLLM's replay buffer holds. At the
/// limit (or the next one) all of them are dropped, and asked for once more after the replay.
pub const WAITING_BATCHES_MAX: usize = 10_000;

/// Tokens in the waiting messages: 64 MiB.
pub const WAITING_TOKENS_MAX: usize = 16 * 1024 * 1024;

/// Applied messages that are remembered, to tell a repetition from a restart: as many as can wait
/// while a replay brings the same ones.
const RECENT_MAX: usize = WAITING_BATCHES_MAX;

/// How far the index may be believed about the node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trust {
    /// Disconnected, restarted or catching up: do not credit.
    Unknown,
    /// History is missing: credit may be too low, never too high.
    Partial,
    /// Everything is known.
    Exact,
}

/// Whether the node has a replay endpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Replay {
    /// It has one.
    Available,
    /// It has none: a gap cannot be filled.
    Absent,
}

/// What the caller must do, in the order given.
#[derive(Clone, PartialEq, Debug)]
pub enum Step {
    /// Apply this batch to the index.
    Apply(EventBatch),
    /// Drop all that the index knows of the node.
    Forget,
    /// Ask for a replay from this sequence number. A replay that is still running is abandoned:
    /// none of its remaining replies may be reported.
    Replay {
        /// The first sequence number wanted.
        from: u64,
    },
}

/// How complete the history is on which live messages are applied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum History {
    Complete,
    BeginningMissing,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Lost,
    Replaying {
        /// What the history will be, if the replay ends without a gap.
        then: History,
        /// Whether it continues what was applied before it.
        fills_gap: bool,
        /// Whether it brought anything: without that, asking again is pointless.
        has_progressed: bool,
    },
    Live(History),
}

/// One node's event stream.
#[derive(Debug)]
pub struct Tracker {
    replay: Replay,
    state: State,
    /// The next sequence number; none where any would do.
    next: Option<u64>,
    /// The life that the applied and waiting messages are of.
    boot_id: Option<String>,
    /// The life of the last live message; it moves forward only, but can lag behind a replay.
    live_boot_id: Option<String>,
    last_timestamp: f64,
    /// Number and timestamp of the last applied messages.
    recent: VecDeque<(u64, f64)>,
    /// Live messages that came during a replay, in order.
    waiting: VecDeque<(u64, EventBatch)>,
    /// At least the tokens in `waiting`, counted since it was last empty.
    waiting_tokens: usize,
}

impl Tracker {
    /// A stream that is not connected yet.
    pub fn new(replay: Replay) -> Self {
        Self {
            replay,
            state: State::Lost,
            next: None,
            boot_id: None,
            live_boot_id: None,
            last_timestamp: f64::NEG_INFINITY,
            recent: VecDeque::new(),
            waiting: VecDeque::new(),
            waiting_tokens: 0,
        }
    }

    /// How far the index may be believed about the node now.
    pub fn trust(&self) -> Trust {
        match self.state {
            State::Lost | State::Replaying { .. } => Trust::Unknown,
            State::Live(History::BeginningMissing) => Trust::Partial,
            State::Live(History::Complete) => Trust::Exact,
        }
    }

    /// The subscription is connected (again). To be reported once messages flow, so that none
    /// falls between the replay and the live stream.
    pub fn on_connected(&mut self) -> Vec<Step> {
        self.live_boot_id = None;
        self.start_over()
    }

    /// The connection broke, or the node's process start time changed. If the subscription is
    /// still there in the latter case, [`Tracker::on_connected`] follows at once.
    pub fn on_lost(&mut self) -> Vec<Step> {
        self.reset();
        self.state = State::Lost;
        vec![Step::Forget]
    }

    /// A live message arrived.
    pub fn on_live(&mut self, seq: u64, batch: EventBatch) -> Vec<Step> {
        let has_moved = batch.boot_id.is_some() && batch.boot_id != self.live_boot_id;
        if has_moved {
            self.live_boot_id.clone_from(&batch.boot_id);
        }
        match self.state {
            State::Lost => Vec::new(),
            _ if self.is_other_boot(&batch) && has_moved => self.restarted(seq, batch),
            // The live stream is behind a replay that has told of a later life.
            _ if self.is_other_boot(&batch) => Vec::new(),
            State::Replaying { .. } => {
                self.wait(seq, batch);
                Vec::new()
            }
            State::Live(history) => self.live(seq, batch, history),
        }
    }

    /// A message arrived, live or replayed, that could not be decoded. What it said is missing,
    /// and a replay would only say it again.
    pub fn on_undecodable(&mut self, seq: u64) -> Vec<Step> {
        if self.state == State::Lost {
            return Vec::new();
        }
        self.reset();
        self.next = seq.checked_add(1);
        self.state = State::Live(History::BeginningMissing);
        vec![Step::Forget]
    }

    /// A reply of the replay that was asked for last.
    pub fn on_replayed(&mut self, seq: u64, batch: EventBatch) -> Vec<Step> {
        let State::Replaying {
            then, fills_gap, ..
        } = self.state
        else {
            return Vec::new();
        };
        if self.is_other_boot(&batch) || fills_gap && batch.timestamp < self.last_timestamp {
            return self.start_over();
        }
        let next = self.next.unwrap_or(0);
        if seq < next {
            return Vec::new();
        }
        let mut steps = Vec::new();
        let then = if batch.is_snapshot() {
            History::Complete
        } else if seq == next {
            then
        } else {
            steps.push(Step::Forget);
            History::BeginningMissing
        };
        self.state = State::Replaying {
            then,
            fills_gap,
            has_progressed: true,
        };
        self.apply(seq, batch, &mut steps);
        steps
    }

    /// The replay's end marker.
    pub fn on_replay_end(&mut self) -> Vec<Step> {
        let mut steps = Vec::new();
        let State::Replaying {
            mut then,
            has_progressed,
            ..
        } = self.state
        else {
            return steps;
        };
        while let Some((seq, batch)) = self.waiting.pop_front() {
            // Replayed already, or left over from an earlier life of the engine.
            if batch.timestamp < self.last_timestamp {
                continue;
            }
            let next = self.next.unwrap_or(0);
            if seq < next && self.is_repetition(seq, &batch) {
                continue;
            } else if seq < next {
                let later = std::mem::take(&mut self.waiting);
                steps.extend(self.restarted(seq, batch));
                steps.extend(
                    later
                        .into_iter()
                        .flat_map(|(seq, batch)| self.on_live(seq, batch)),
                );
                return steps;
            }
            if batch.is_snapshot() {
                then = History::Complete;
            } else if seq > next && has_progressed {
                self.waiting.push_front((seq, batch));
                self.state = State::Replaying {
                    then,
                    fills_gap: true,
                    has_progressed: false,
                };
                steps.push(Step::Replay { from: next });
                return steps;
            } else if seq > next {
                then = History::BeginningMissing;
                steps.push(Step::Forget);
            }
            self.apply(seq, batch, &mut steps);
        }
        self.next = self.next.or(Some(0));
        self.state = State::Live(then);
        steps
    }

    /// The replay broke or took too long: what it would have brought is missing.
    pub fn on_replay_failed(&mut self) -> Vec<Step> {
        if !matches!(self.state, State::Replaying { .. }) {
            return Vec::new();
        }
        let waiting = std::mem::take(&mut self.waiting);
        self.reset();
        self.state = State::Live(History::BeginningMissing);
        let mut steps = vec![Step::Forget];
        for (seq, batch) in waiting {
            steps.extend(self.on_live(seq, batch));
        }
        steps
    }

    fn live(&mut self, seq: u64, batch: EventBatch, history: History) -> Vec<Step> {
        let mut steps = Vec::new();
        let next = self.next.unwrap_or(seq);
        if seq < next {
            return if self.is_repetition(seq, &batch) {
                steps
            } else {
                self.restarted(seq, batch)
            };
        }
        let is_first = self.next.is_none() && seq == 0;
        if batch.is_snapshot() || is_first {
            self.state = State::Live(History::Complete);
        } else if seq > next && self.replay == Replay::Available {
            self.state = State::Replaying {
                then: history,
                fills_gap: true,
                has_progressed: false,
            };
            self.wait(seq, batch);
            return vec![Step::Replay { from: next }];
        } else if seq > next {
            self.state = State::Live(History::BeginningMissing);
            steps.push(Step::Forget);
        }
        self.apply(seq, batch, &mut steps);
        steps
    }

    /// A message of another life of the engine: nothing of the old one holds.
    fn restarted(&mut self, seq: u64, batch: EventBatch) -> Vec<Step> {
        if self.replay == Replay::Available && seq != 0 && !batch.is_snapshot() {
            let steps = self.start_over();
            self.wait(seq, batch);
            return steps;
        }
        self.reset();
        self.state = State::Live(History::BeginningMissing);
        let mut steps = vec![Step::Forget];
        steps.extend(self.live(seq, batch, History::BeginningMissing));
        steps
    }

    /// Forgets everything and asks for all of it again.
    fn start_over(&mut self) -> Vec<Step> {
        self.reset();
        match self.replay {
            Replay::Available => {
                self.state = State::Replaying {
                    then: History::Complete,
                    fills_gap: false,
                    has_progressed: false,
                };
                vec![Step::Forget, Step::Replay { from: 0 }]
            }
            Replay::Absent => {
                self.state = State::Live(History::BeginningMissing);
                vec![Step::Forget]
            }
        }
    }

    fn reset(&mut self) {
        *self = Self {
            state: self.state,
            live_boot_id: self.live_boot_id.take(),
            ..Self::new(self.replay)
        };
    }

    /// Whether a message with a number from the past has been applied, itself or as part of a
    /// snapshot. Within one boot it must have been; without boot ids exactly this message must be
    /// known. Numbers in `recent` only grow.
    fn is_repetition(&self, seq: u64, batch: &EventBatch) -> bool {
        if batch.boot_id.is_some() && batch.boot_id == self.boot_id {
            return true;
        }
        let found = self.recent.binary_search_by_key(&seq, |(seq, _)| *seq);
        let applied = found.ok().and_then(|at| self.recent.get(at));
        applied.is_some_and(|(_, timestamp)| timestamp.total_cmp(&batch.timestamp).is_eq())
    }

    fn is_other_boot(&self, batch: &EventBatch) -> bool {
        matches!((&self.boot_id, &batch.boot_id), (Some(known), Some(said)) if known != said)
    }

    fn apply(&mut self, seq: u64, batch: EventBatch, steps: &mut Vec<Step>) {
        self.note_boot(&batch);
        self.next = Some(seq.saturating_add(1));
        self.last_timestamp = batch.timestamp;
        if self.recent.len() == RECENT_MAX {
            self.recent.pop_front();
        }
        self.recent.push_back((seq, batch.timestamp));
        steps.push(Step::Apply(batch));
    }

    fn wait(&mut self, seq: u64, batch: EventBatch) {
        self.note_boot(&batch);
        let more: usize = batch.events.iter().map(tokens).sum();
        let is_empty = self.waiting.is_empty();
        self.waiting_tokens = if is_empty {
            more
        } else {
            self.waiting_tokens + more
        };
        self.waiting.push_back((seq, batch));
        if self.waiting.len() > WAITING_BATCHES_MAX || self.waiting_tokens > WAITING_TOKENS_MAX {
            self.waiting.clear();
        }
    }

    fn note_boot(&mut self, batch: &EventBatch) {
        if batch.boot_id.is_some() {
            self.boot_id.clone_from(&batch.boot_id);
        }
    }
}

fn tokens(event: &KvEvent) -> usize {
    match event {
        KvEvent::Stored { token_ids, .. } => token_ids.len(),
        KvEvent::Removed { block_hashes, .. } => block_hashes.len(),
        KvEvent::Cleared => 0,
    }
}
