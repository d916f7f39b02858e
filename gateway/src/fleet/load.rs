//! How much has this gateway in flight on a node, and how fast does the node prefill?
//!
//! Load is counted in tokens at dispatch, before the node has seen the request, and corrected as
//! the answer streams. The guard gives back exactly what it still holds, so that a request that
//! ends in any way leaves nothing behind.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::node::Node;

/// A shorter prefill says more about latencies than about the rate.
const RATE_TOKENS_MIN: u64 = 64;

/// A request's share of its node's load; dropping it gives the share back.
#[must_use = "dropping it gives the share back"]
pub struct InFlight {
    node: Arc<Node>,
    prefill_tokens: u64,
    decode_tokens: u64,
    /// Prefill tokens on the node when this request joined them, its own included.
    queue_tokens: u64,
    since: Instant,
}

impl InFlight {
    pub(super) fn new(node: &Arc<Node>, prefill_tokens: u64, decode_tokens: u64) -> Self {
        let ahead = node
            .load
            .prefill_tokens
            .fetch_add(prefill_tokens, Ordering::Relaxed);
        node.load
            .decode_tokens
            .fetch_add(decode_tokens, Ordering::Relaxed);
        node.load.requests.fetch_add(1, Ordering::Relaxed);
        node.with_breaker(|breaker, now_ms| breaker.on_dispatch(now_ms));
        Self {
            node: Arc::clone(node),
            prefill_tokens,
            decode_tokens,
            queue_tokens: ahead.saturating_add(prefill_tokens),
            since: Instant::now(),
        }
    }

    /// The node that carries the request.
    pub fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// The first token arrived: prefill is over, and its rate is learnt from it. Later calls do
    /// nothing.
    pub fn first_token(&mut self) {
        let own = std::mem::take(&mut self.prefill_tokens);
        self.node
            .load
            .prefill_tokens
            .fetch_sub(own, Ordering::Relaxed);
        let seconds = self.since.elapsed().as_secs_f64();
        if own >= RATE_TOKENS_MIN && seconds > 0.0 {
            // A node prefills roughly in order: in this time it did what was ahead, and this.
            #[expect(clippy::cast_precision_loss, reason = "far below 2^52 tokens")]
            self.node
                .load
                .learn_prefill_rate(self.queue_tokens as f64 / seconds);
        }
    }

    /// `tokens` more tokens were generated.
    pub fn decoded(&mut self, tokens: u64) {
        let given_back = tokens.min(self.decode_tokens);
        self.decode_tokens -= given_back;
        self.node
            .load
            .decode_tokens
            .fetch_sub(given_back, Ordering::Relaxed);
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let load = &self.node.load;
        load.prefill_tokens
            .fetch_sub(self.prefill_tokens, Ordering::Relaxed);
        load.decode_tokens
            .fetch_sub(self.decode_tokens, Ordering::Relaxed);
        load.requests.fetch_sub(1, Ordering::Relaxed);
        // Where an outcome was reported before, this changes nothing.
        self.node
            .with_breaker(|breaker, now_ms| breaker.on_neutral(now_ms));
    }
}
