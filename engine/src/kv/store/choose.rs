//! Is a block worth a place below the pool, and is it worth fetching back?
//!
//! Values in, values out: what was measured comes as numbers.

use cache_index::block::BLOCK_TOKENS;

/// A chain of fewer blocks is not kept unless somebody came back to it: computing 48 tokens takes
/// one small step, and one-shot prompts of that size would push out what is dear.
pub const DEPTH_MIN: u32 = 4;

/// What a new measurement weighs in a running mean.
const WEIGHT: f64 = 0.2;
/// An estimate that keeps blocks from being fetched shrinks by this factor each time it does, so
/// that fetching is tried again some time: a rate that nobody measures would stay for ever.
const FORGIVEN: f64 = 0.9;

/// Whether an evicted block goes to the next tier. `depth` counts the blocks of its chain up to
/// it; `found` says that a request found it computed; `carries` that blocks hang on it there.
pub fn worth_keeping(depth: u32, found: bool, carries: bool) -> bool {
    // Without it, what hangs on it could not be reached any more.
    carries || found || depth >= DEPTH_MIN
}

/// What it costs to have a block again, one way and the other: running means.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    /// Milliseconds to copy one block back.
    fetch_ms: Option<f64>,
    /// Milliseconds to compute one token of a prompt.
    compute_ms: Option<f64>,
}

impl Rates {
    /// Takes a measured copy of so many blocks.
    pub fn fetched(&mut self, blocks: usize, ms: f64) {
        note(&mut self.fetch_ms, ms / blocks as f64);
    }

    /// Takes a measured pass over so many tokens of prompts.
    pub fn computed(&mut self, tokens: usize, ms: f64) {
        note(&mut self.compute_ms, ms / tokens as f64);
    }

    /// Whether to fetch blocks rather than compute them. What has not been measured is tried.
    pub fn fetch_pays(&self) -> bool {
        let (Some(fetch_ms), Some(compute_ms)) = (self.fetch_ms, self.compute_ms) else {
            return true;
        };
        fetch_ms <= compute_ms * BLOCK_TOKENS as f64
    }

    /// Notes that blocks were computed because fetching seemed dearer.
    pub fn forgive(&mut self) {
        if let Some(fetch_ms) = &mut self.fetch_ms {
            *fetch_ms *= FORGIVEN;
        }
    }
}

fn note(mean: &mut Option<f64>, measured: f64) {
    if measured.is_finite() {
        let before = mean.unwrap_or(measured);
        *mean = Some(before + WEIGHT * (measured - before));
    }
}

#[cfg(test)]
mod tests {
    //! Catches a tier that fills with one-shot prompts or tears chains apart, and a choice that is
    //! made once and for all.
    use super::*;

    #[test]
    fn what_is_kept() {
        let rows = [
            ("a short prompt, once", (1, false, false), false),
            ("its last short block", (DEPTH_MIN - 1, false, false), false),
            ("a short prompt, again", (1, true, false), true),
            ("the start of a long one", (1, false, true), true),
            ("deep enough", (DEPTH_MIN, false, false), true),
        ];
        for (name, (depth, found, carries), expected) in rows {
            assert_eq!(worth_keeping(depth, found, carries), expected, "{name}");
        }
    }

    #[test]
    fn fetch_or_compute() {
        let mut rates = Rates::default();
        assert!(rates.fetch_pays(), "tried, to learn what it costs");
        rates.fetched(10, 100.0);
        assert!(rates.fetch_pays(), "computing has no price yet");
        rates.computed(100, 100.0);
        assert!(rates.fetch_pays(), "10 ms against 16");
        for _ in 0..50 {
            rates.fetched(1, 17.0);
        }
        assert!(!rates.fetch_pays(), "17 ms against 16");
        rates.forgive();
        assert!(rates.fetch_pays(), "tried again");
        rates.fetched(0, 0.0);
        assert!(rates.fetch_pays(), "nothing measured changes nothing");
    }
}
