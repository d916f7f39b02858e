//! How much is a session's binding worth, and which node is a session's by nature?
//!
//! The binding is a prior inside the cost, never a rule above it: a bonus in milliseconds on the
//! node that served the last turn. What that node holds is already in the overlap; the bonus
//! stands for what the index cannot know yet (the last answer's blocks still on their way, the
//! turns to come). It is a share of the prompt's prefill time, with an upper bound, so that a hot
//! node loses sessions before its queue grows past that bound. Hysteresis comes on top: a session
//! moves only where that gains clearly, so that two nodes of about equal cost do not trade it.

use cache_index::ids::NodeId;

use crate::view::SessionKey;

/// How strongly sessions stay.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AffinityParams {
    /// The bonus as a share of the time that the whole prompt's prefill would take.
    pub bonus_share: f64,
    /// The bonus is never more than this.
    pub bonus_ms_max: f64,
    /// A move must gain at least this share of what staying costs.
    pub hysteresis_share: f64,
    /// A move must gain at least this.
    pub hysteresis_ms_min: f64,
}

impl Default for AffinityParams {
    /// A quarter of the prefill is what a turn adds in agent sessions of about four turns to a
    /// context doubling; two seconds bound what one user waits for another's affinity.
    fn default() -> Self {
        Self {
            bonus_share: 0.25,
            bonus_ms_max: 2000.0,
            hysteresis_share: 0.1,
            hysteresis_ms_min: 5.0,
        }
    }
}

impl AffinityParams {
    /// The bonus of the bound node, in milliseconds (0 or more).
    pub fn bonus_ms(&self, whole_prefill_ms: f64) -> f64 {
        (self.bonus_share * whole_prefill_ms).clamp(0.0, self.bonus_ms_max)
    }

    /// Whether leaving a node that costs `stay_ms` for one that costs `move_ms` is worth it.
    pub fn worth_moving(&self, stay_ms: f64, move_ms: f64) -> bool {
        let margin = (self.hysteresis_share * stay_ms).max(self.hysteresis_ms_min);
        stay_ms - move_ms > margin
    }
}

/// The rendezvous weight of a session on a node: every gateway computes the same order of nodes
/// for a session, and a node that comes or goes moves only the sessions it wins or loses.
pub fn rendezvous(session: SessionKey, node: &NodeId) -> u64 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&session.0.to_le_bytes());
    hasher.update(node.as_str().as_bytes());
    let [a, b, c, d, e, f, g, h, ..] = *hasher.finalize().as_bytes();
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}
