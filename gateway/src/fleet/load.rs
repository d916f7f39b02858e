//! How much has this gateway in flight on a node, and how fast does the node prefill?
//!
//! Load is counted in tokens at dispatch, before the node has seen the request, and corrected as
//! the answer streams. The guard gives back exactly what it still holds, so that a request that
//! ends in any way leaves nothing behind.
//!
//! The rate is learnt at each first token: what the node finished since that request was sent, by
//! the time it took. A node may serve prompts in order or share its steps between them; then the
//! first of several that ends has waited for work that nobody has seen finished yet. So the more is
//! unfinished at that moment, the less the measurement counts.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::knowledge::Lent;
use super::node::Node;

/// A shorter prefill says more about latencies than about the rate.
const RATE_TOKENS_MIN: u64 = 64;

/// A request's share of its node's load; dropping it gives the share back.
#[must_use = "dropping it gives the share back"]
pub struct InFlight {
    node: Arc<Node>,
    prefill_tokens: u64,
    decode_tokens: u64,
    /// Prefill tokens that the node had finished when this request joined.
    done_before: u64,
    since: Instant,
    lent: Lent,
}

/// What one first token says of a node's prefill rate.
#[derive(Clone, Copy, Debug)]
pub(super) struct Measured {
    /// Prefill tokens that the node finished meanwhile.
    pub(super) done: u64,
    /// Those in flight there that it has not finished.
    pub(super) unfinished: u64,
    /// How long it took.
    pub(super) seconds: f64,
}

/// Weight of a measurement with nothing unfinished: about ten requests outweigh all before them.
const RATE_WEIGHT: f64 = 0.2;
/// A first measurement must have seen this share of the work finished.
const FIRST_SHARE_MIN: f64 = 0.5;

impl Measured {
    /// The rate after this measurement, in tokens per second; 0.0 before the first.
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52 tokens")]
    pub(super) fn learnt(self, before: f64) -> f64 {
        let Self {
            done,
            unfinished,
            seconds,
        } = self;
        if seconds <= 0.0 || done == 0 {
            return before;
        }
        let rate = done as f64 / seconds;
        let share = done as f64 / done.saturating_add(unfinished) as f64;
        match before > 0.0 {
            true => before + RATE_WEIGHT * share * (rate - before),
            false if share >= FIRST_SHARE_MIN => rate,
            false => before,
        }
    }
}

impl InFlight {
    pub(super) fn new(
        node: &Arc<Node>,
        prefill_tokens: u64,
        decode_tokens: u64,
        lent: Lent,
    ) -> Self {
        node.load
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
            done_before: node.load.prefill_done.load(Ordering::Relaxed),
            since: Instant::now(),
            lent,
        }
    }

    /// The node that carries the request.
    pub fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// The first token arrived: prefill is over, and its rate is learnt from it. Later calls do
    /// nothing.
    pub fn first_token(&mut self) {
        self.lent.first_token();
        let own = std::mem::take(&mut self.prefill_tokens);
        if own == 0 {
            return;
        }
        let load = &self.node.load;
        let before = load.prefill_tokens.fetch_sub(own, Ordering::Relaxed);
        let done = load.prefill_done.fetch_add(own, Ordering::Relaxed) + own;
        if own >= RATE_TOKENS_MIN {
            load.learn_prefill_rate(Measured {
                done: done - self.done_before,
                unfinished: before.saturating_sub(own),
                seconds: self.since.elapsed().as_secs_f64(),
            });
        }
    }

    /// The node has said how many of the prompt's tokens it read from cache.
    pub fn reported(&self, cached_tokens: u64) {
        self.lent.reported(cached_tokens);
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

#[cfg(test)]
mod tests {
    //! Catches a rate that falls to a fraction because a node shares its steps between prompts.
    use super::Measured;

    /// What is learnt when so many prompts of 100 tokens are sent at once to a node that does 1,000
    /// a second; `finished` are the moments at which they end.
    fn learnt(finished: &[f64]) -> Vec<f64> {
        let mut rate = 0.0;
        let rates = finished.iter().zip(1..).map(|(seconds, count)| {
            let all = finished.len() as u64;
            rate = Measured {
                done: 100 * count,
                unfinished: 100 * (all - count),
                seconds: *seconds,
            }
            .learnt(rate);
            rate
        });
        rates.collect()
    }

    #[test]
    fn prompts_in_order_and_side_by_side_give_the_same_rate() {
        let in_order = learnt(&[0.1, 0.2, 0.3, 0.4, 0.5]);
        assert_eq!(in_order[..2], [0.0, 0.0]);
        assert!(
            in_order[2..]
                .iter()
                .all(|rate| (rate - 1000.0).abs() < 1e-6)
        );
        let side_by_side = learnt(&[0.5; 5]);
        assert!(
            side_by_side[2..].iter().all(|rate| *rate >= 600.0),
            "{side_by_side:?}"
        );
        // Once known, it hardly moves.
        let mut rate = 1000.0;
        for count in (1..=5).cycle().take(50) {
            let measured = Measured {
                done: 100 * count,
                unfinished: 500 - 100 * count,
                seconds: 0.5,
            };
            rate = measured.learnt(rate);
            assert!(rate > 650.0, "{rate}");
        }
    }
}
