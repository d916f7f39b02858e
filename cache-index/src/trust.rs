//! What of a node's event stream may be believed, and what must be asked again?
//!
//! Feed it what the sockets deliver; carry out the returned steps in order.
use crate::event::EventBatch;

/// How far the index may be believed about a node.
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

/// One node's event stream.
#[derive(Debug)]
pub struct Tracker;

impl Tracker {
    /// A stream that is not connected yet.
    pub fn new(replay: Replay) -> Self {
        let _ = replay;
        Self
    }
    /// How far the index may be believed about the node now.
    pub fn trust(&self) -> Trust {
        Trust::Unknown
    }
    /// The subscription is connected (again).
    pub fn on_connected(&mut self) -> Vec<Step> {
        Vec::new()
    }
    /// The connection broke, or the node's process start time changed.
    pub fn on_lost(&mut self) -> Vec<Step> {
        Vec::new()
    }
    /// A live message arrived.
    pub fn on_live(&mut self, seq: u64, batch: EventBatch) -> Vec<Step> {
        let _ = (seq, batch);
        Vec::new()
    }
    /// A live message arrived that could not be decoded: what it said is missing.
    pub fn on_undecodable(&mut self, seq: u64) -> Vec<Step> {
        let _ = seq;
        Vec::new()
    }
    /// A reply of the replay that was asked for last.
    pub fn on_replayed(&mut self, seq: u64, batch: EventBatch) -> Vec<Step> {
        let _ = (seq, batch);
        Vec::new()
    }
    /// The replay's end marker.
    pub fn on_replay_end(&mut self) -> Vec<Step> {
        Vec::new()
    }
    /// The replay broke or took too long.
    pub fn on_replay_failed(&mut self) -> Vec<Step> {
        Vec::new()
    }
}
