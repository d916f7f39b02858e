//! What can be seen of a node between events? Nothing here changes it.

use super::Params;
use super::node::Node;

impl Node {
    /// How fast it is.
    pub fn params(&self) -> &Params {
        &self.params
    }

    /// Where it stands.
    pub fn region(&self) -> usize {
        self.region
    }

    /// Blocks in its pool.
    pub fn capacity(&self) -> usize {
        self.pool.capacity()
    }

    /// Leading blocks of this path that it holds.
    pub fn overlap(&self, path: &[u32]) -> usize {
        self.pool.overlap(path)
    }

    /// Requests in its queue.
    pub fn waiting(&self) -> usize {
        self.waiting.len() + self.arrived.len()
    }

    /// Answers under way.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Requests that are here: in the queue, in prefill, in decode.
    pub fn in_flight(&self) -> usize {
        self.waiting() + usize::from(self.prefill.is_some()) + self.running.len()
    }

    /// The share of the pool that running requests hold.
    pub fn pool_used(&self) -> f64 {
        self.pool.in_use() as f64 / self.pool.capacity() as f64
    }

    /// Blocks that could be had by evicting all that is not in use.
    pub fn pool_available(&self) -> i64 {
        self.pool.available()
    }

    /// Tokens of an answer under way that have left so far.
    pub fn answered_tokens(&self, id: u32) -> Option<u32> {
        let decode = self.running.iter().find(|d| d.id == id)?;
        let left = (decode.ends_at_step - self.steps).max(0.0).ceil() as u32;
        Some(decode.output_tokens.saturating_sub(left))
    }

    /// Milliseconds in which a prompt was being computed since the start.
    pub fn prefill_busy_ms(&self) -> f64 {
        self.prefill_busy_ms
    }

    /// What the queued prompts would take on an idle node, as things stood when they came.
    pub fn waiting_prefill_ms(&self) -> f64 {
        self.waiting_ms
    }

    /// Until the prompt under way is computed.
    pub fn prefill_left_ms(&self) -> f64 {
        self.prefill.as_ref().map_or(0.0, |p| {
            let step_share = self.decode_step_ms() / self.params.chunk_tokens;
            p.transfer_ms.max(0.0) + p.left_tokens.max(0.0) * (step_share + p.token_ms)
        })
    }

    /// How many times longer a prefill takes because of the answers under way.
    pub fn slowdown(&self) -> f64 {
        let chunk_ms = self.params.chunk_tokens * 1000.0 / self.params.prefill_tokens_per_s;
        (self.decode_step_ms() + chunk_ms) / chunk_ms
    }

    /// A guess of the time until `blocks` can be had: answers under way give theirs back as they
    /// end, and each queued prompt will want a quarter of its own.
    pub fn pool_wait_ms(&self, blocks: i64) -> f64 {
        /// Where even the end of all answers would not make room.
        const NEVER_MS: f64 = 20_000.0;
        let queued = self.waiting.iter().map(|w| (w.job.blocks.len() / 4) as i64);
        let mut short = blocks - self.pool.available() + queued.sum::<i64>();
        if short <= 0 {
            return 0.0;
        }
        let mut ends: Vec<(f64, i64)> = self
            .running
            .iter()
            .map(|d| (d.ends_at_step, d.prompt_blocks as i64))
            .collect();
        ends.sort_by(|a, b| a.0.total_cmp(&b.0));
        for (ends_at_step, blocks) in ends {
            short -= blocks;
            if short <= 0 {
                return (ends_at_step - self.steps) * self.step_ms();
            }
        }
        NEVER_MS
    }
}
