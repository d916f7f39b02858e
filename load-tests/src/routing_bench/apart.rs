//! Which nodes compute prompts for which, and which turns are good?

use crate::error::LoadError;
use crate::node::positive;

/// Who computes prompts and who answers.
#[derive(Clone, Debug, clap::Args)]
pub struct Apart {
    /// Nodes that compute prompts for the others, one number a cell; 0: all do everything
    #[arg(long, value_delimiter = ',', value_name = "NODES", default_values_t = [0])]
    pub prefill_nodes: Vec<u16>,
    /// How fast KV travels from one node to another, GB a second
    #[arg(long, value_name = "GB", default_value_t = 10.0)]
    pub handover_gb_per_s: f64,
    /// Prompt tokens that one step computes at most
    #[arg(long, value_name = "TOKENS", default_value_t = 2048.0)]
    pub chunk: f64,
}

impl Apart {
    pub(super) fn check(&self, nodes: u16) -> Result<(), LoadError> {
        if self.prefill_nodes.iter().any(|prefill| *prefill >= nodes) {
            let reason = format!("fewer than the {nodes} nodes: somebody has to answer");
            let flag = "--prefill-nodes";
            return Err(LoadError::Flag { flag, reason });
        }
        positive("--handover-gb-per-s", self.handover_gb_per_s)?;
        positive("--chunk", self.chunk)
    }
}

/// When a turn is good.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Bounds {
    /// Its first token comes by then, in milliseconds of model time, …
    #[arg(long, value_name = "MS", default_value_t = 5000.0)]
    pub ttft_bound: f64,
    /// … and later ones take no longer each, on average
    #[arg(long, value_name = "MS", default_value_t = 50.0)]
    pub tpot_bound: f64,
}

impl Bounds {
    pub(super) fn check(&self) -> Result<(), LoadError> {
        positive("--ttft-bound", self.ttft_bound)?;
        positive("--tpot-bound", self.tpot_bound)
    }

    /// Times in model time; a turn of one token has no later ones.
    fn are_kept(&self, turn: &Timed) -> bool {
        let in_time = turn.ttft_ms.is_some_and(|ms| ms <= self.ttft_bound);
        in_time && turn.tpot_ms.is_none_or(|ms| ms <= self.tpot_bound)
    }
}

/// A turn's times, in ms of model time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timed {
    pub(super) due_ms: f64,
    pub(super) done_ms: f64,
    pub(super) ttft_ms: Option<f64>,
    pub(super) tpot_ms: Option<f64>,
}

/// Good turns in a second, from the first one due to the last one done.
pub(super) fn good_per_s(turns: &[Timed], bounds: &Bounds) -> f64 {
    let begin = turns.iter().map(|turn| turn.due_ms).reduce(f64::min);
    let end = turns.iter().map(|turn| turn.done_ms).reduce(f64::max);
    let good = turns.iter().filter(|turn| bounds.are_kept(turn)).count();
    match (begin, end) {
        (Some(begin), Some(end)) if end > begin => good as f64 * 1000.0 / (end - begin),
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Catches a bound that is not kept, and a rate in another unit.
    #[test]
    fn a_turn_is_good_within_both_bounds() {
        let bounds = Bounds {
            ttft_bound: 1000.0,
            tpot_bound: 40.0,
        };
        let turn = |due_ms, ttft_ms, tpot_ms| Timed {
            due_ms,
            done_ms: due_ms + 2000.0,
            ttft_ms,
            tpot_ms,
        };
        let turns = [
            turn(0.0, Some(1000.0), Some(40.0)),
            turn(500.0, Some(1001.0), Some(10.0)),
            turn(500.0, Some(10.0), Some(41.0)),
            turn(600.0, Some(10.0), None),
            turn(2000.0, None, None),
        ];
        let good = good_per_s(&turns, &bounds);
        assert!((good - 0.5).abs() < 1e-9, "{good}");
        assert!(good_per_s(&[], &bounds).abs() < 1e-9);
    }
}
