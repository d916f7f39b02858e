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

/// The shortest and the longest wait for a disk or a store, in milliseconds: a drive's slowest ordinary read,
/// and what a client would take for a failure.
const PATIENCE_MS: (f64, f64) = (20.0, 2_000.0);

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
    /// Milliseconds to copy one block out: about the same, and known before anybody comes back.
    copied_ms: Option<f64>,
    /// Milliseconds to read one block from the disk.
    read_ms: Option<f64>,
    /// Milliseconds to bring one block from the shared store.
    bring_ms: Option<f64>,
    /// Milliseconds to compute one token of a prompt.
    compute_ms: Option<f64>,
    /// Nothing is learnt any more.
    frozen: bool,
}

impl Rates {
    /// For tests whose passes and copies take no time: fetching and reading always pay.
    #[cfg(test)]
    pub(crate) fn frozen() -> Self {
        Self {
            fetch_ms: Some(0.0),
            copied_ms: None,
            read_ms: Some(0.0),
            bring_ms: Some(0.0),
            compute_ms: Some(1.0),
            frozen: true,
        }
    }

    /// Takes a measured copy of so many blocks.
    pub fn fetched(&mut self, blocks: usize, ms: f64) {
        self.note(|rates| &mut rates.fetch_ms, ms / blocks as f64);
    }

    /// Takes a measured copy of one block out of the pool.
    pub fn copied(&mut self, ms: f64) {
        self.note(|rates| &mut rates.copied_ms, ms);
    }

    /// Takes a measured read of one block from the disk.
    pub fn read(&mut self, ms: f64) {
        self.note(|rates| &mut rates.read_ms, ms);
    }

    /// Takes a measured way of one block from the shared store.
    pub fn brought(&mut self, ms: f64) {
        self.note(|rates| &mut rates.bring_ms, ms);
    }

    /// Takes a measured pass over so many tokens of prompts.
    pub fn computed(&mut self, tokens: usize, ms: f64) {
        self.note(|rates| &mut rates.compute_ms, ms / tokens as f64);
    }

    /// Seconds until a block from host memory is in the pool; 0 where that has not been measured.
    pub fn host_block_s(&self) -> f64 {
        self.fetch_ms.or(self.copied_ms).unwrap_or(0.0) / 1e3
    }

    /// Seconds until a block from the disk is in the pool; 0 where that has not been measured.
    pub fn disk_block_s(&self) -> f64 {
        self.by_host_s(self.read_ms)
    }

    /// Seconds until a block from the shared store is in the pool; 0 where that has not been measured.
    pub fn shared_block_s(&self) -> f64 {
        self.by_host_s(self.bring_ms)
    }

    /// Seconds for a block that takes so many milliseconds to host memory.
    fn by_host_s(&self, ms: Option<f64>) -> f64 {
        let ms = ms.filter(|ms| *ms > 0.0);
        ms.map_or(0.0, |ms| (ms + self.fetch_ms.unwrap_or(0.0)) / 1e3)
    }

    /// Whether to fetch blocks rather than compute them. What has not been measured is tried.
    pub fn fetch_pays(&self) -> bool {
        let (Some(fetch_ms), Some(compute_ms)) = (self.fetch_ms, self.compute_ms) else {
            return true;
        };
        fetch_ms <= compute_ms * BLOCK_TOKENS as f64
    }

    /// Whether to read blocks from the disk, and copy them, rather than compute them.
    pub fn read_pays(&self) -> bool {
        self.by_host_pays(self.read_ms)
    }

    /// Whether to bring blocks from the shared store, and copy them, rather than compute them.
    pub fn bring_pays(&self) -> bool {
        self.by_host_pays(self.bring_ms)
    }

    fn by_host_pays(&self, ms: Option<f64>) -> bool {
        let (Some(ms), Some(compute_ms)) = (ms, self.compute_ms) else {
            return true;
        };
        ms + self.fetch_ms.unwrap_or(0.0) <= compute_ms * BLOCK_TOKENS as f64
    }

    /// How long to wait for so many blocks from the disk or the shared store before they are computed after all: as
    /// long as that takes. Waiting in vain then costs at most as much again.
    pub fn patience_ms(&self, blocks: usize) -> f64 {
        let compute_ms = self
            .compute_ms
            .map(|ms| ms * (blocks * BLOCK_TOKENS) as f64);
        compute_ms.map_or(PATIENCE_MS.1, |ms| ms.clamp(PATIENCE_MS.0, PATIENCE_MS.1))
    }

    /// Notes that blocks were computed because reading seemed dearer.
    pub fn forgive_reading(&mut self) {
        if let Some(read_ms) = &mut self.read_ms {
            *read_ms *= FORGIVEN;
        }
    }

    /// Notes that blocks were computed because bringing them from the shared store seemed dearer.
    pub fn forgive_bringing(&mut self) {
        if let Some(bring_ms) = &mut self.bring_ms {
            *bring_ms *= FORGIVEN;
        }
    }

    /// Notes that blocks were computed because fetching seemed dearer.
    pub fn forgive(&mut self) {
        if let Some(fetch_ms) = &mut self.fetch_ms {
            *fetch_ms *= FORGIVEN;
        }
    }

    fn note(&mut self, mean: fn(&mut Self) -> &mut Option<f64>, measured: f64) {
        if measured.is_finite() && !self.frozen {
            let mean = mean(self);
            let before = mean.unwrap_or(measured);
            *mean = Some(before + WEIGHT * (measured - before));
        }
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
        assert_eq!(rates.host_block_s(), 0.0);
        rates.copied(5.0);
        assert_eq!(rates.host_block_s(), 0.005, "until one has come back");
        assert!(rates.fetch_pays(), "tried, to learn what it costs");
        rates.fetched(10, 100.0);
        assert_eq!(rates.host_block_s(), 0.01);
        assert_eq!(rates.disk_block_s(), 0.0, "nothing was read");
        assert!(rates.fetch_pays(), "computing has no price yet");
        rates.computed(100, 100.0);
        assert!(rates.fetch_pays(), "10 ms against 16");
        for _ in 0..50 {
            rates.fetched(1, 17.0);
        }
        assert!(!rates.fetch_pays(), "17 ms against 16");
        rates.forgive();
        assert!(rates.fetch_pays(), "tried again");
        for _ in 0..50 {
            rates.read(15.0);
        }
        assert!(!rates.read_pays(), "15 ms from the disk and 15 to copy");
        rates.forgive_reading();
        for _ in 0..50 {
            rates.fetched(1, 1.0);
        }
        assert!(rates.read_pays(), "13.5 ms and 1 against 16");
        assert_eq!(rates.patience_ms(10), 160.0);
        assert_eq!(rates.patience_ms(1), 20.0);
        assert_eq!(rates.patience_ms(1_000), 2_000.0);
        assert!(rates.bring_pays(), "never tried");
        assert_eq!(rates.shared_block_s(), 0.0, "nothing was brought");
        rates.brought(20.0);
        assert!(!rates.bring_pays(), "20 ms and 1 against 16");
        let shared_s = rates.shared_block_s();
        assert!(shared_s > 0.0209 && shared_s < 0.0211, "{shared_s}");
        (0..3).for_each(|_| rates.forgive_bringing());
        assert!(rates.bring_pays(), "tried again");
        rates.fetched(0, 0.0);
        assert!(rates.fetch_pays(), "nothing measured changes nothing");
    }
}
