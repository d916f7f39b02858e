//! What has this gateway in flight on a node, and how fast does the node work?
//!
//! Work is counted at dispatch, before the node has seen the request, and corrected as the answer
//! comes. Nodes prefill about in the order of arrival, so what is left of the oldest prefill
//! shrinks as time goes by: without that, a prompt of 100,000 tokens would count in full until its
//! first token. The prefill rate is learnt at each first token, from the time between it and the
//! one before (or the dispatch, if that came later): what the node spent on this prompt alone.

use std::collections::HashMap;
use std::collections::VecDeque;

/// A shorter prefill says more about latencies than about the rate.
const RATE_TOKENS_MIN: u64 = 256;
/// Weight of a new measurement's tokens and time against all before it.
const RATE_KEEP: f64 = 0.95;

#[derive(Clone, Copy, Debug)]
struct Prefill {
    id: u64,
    tokens: u64,
    since_ms: f64,
}

/// How long what has been counted takes to fade, in milliseconds.
const FADE_MS: f64 = 60_000.0;

/// A sum whose parts fade.
#[derive(Clone, Copy, Debug, Default)]
struct Fading {
    sum: f64,
    at_ms: f64,
}

impl Fading {
    fn at(&self, now_ms: f64) -> f64 {
        self.sum * (-(now_ms - self.at_ms).max(0.0) / FADE_MS).exp()
    }

    fn add(&mut self, now_ms: f64, amount: f64) {
        self.sum = self.at(now_ms) + amount;
        self.at_ms = now_ms;
    }
}

/// One node's load, as one gateway knows it.
#[derive(Debug, Default)]
pub struct NodeLoad {
    /// In order of dispatch.
    prefills: VecDeque<Prefill>,
    prefill_tokens: u64,
    decodes: HashMap<u64, u64>,
    decode_tokens: u64,
    last_first_token_ms: f64,
    arrivals: Fading,
    work_ms: Fading,
    /// Tokens and milliseconds of recent prefills, older ones fading.
    measured: (f64, f64),
}

impl NodeLoad {
    /// A request was sent there.
    pub fn dispatched(&mut self, now_ms: f64, id: u64, prefill_tokens: u64, decode_tokens: u64) {
        self.prefills.push_back(Prefill {
            id,
            tokens: prefill_tokens,
            since_ms: now_ms,
        });
        self.prefill_tokens += prefill_tokens;
        self.arrivals.add(now_ms, 1.0);
        let rate = self.tokens_per_s();
        if rate > 0.0 {
            self.work_ms.add(now_ms, prefill_tokens as f64 * 1000.0 / rate);
        }
        self.decodes.insert(id, decode_tokens);
        self.decode_tokens += decode_tokens;
    }

    /// Its first token came.
    pub fn first_token(&mut self, now_ms: f64, id: u64) {
        let Some(at) = self.prefills.iter().position(|prefill| prefill.id == id) else {
            return;
        };
        let Some(prefill) = self.prefills.remove(at) else {
            return;
        };
        self.prefill_tokens -= prefill.tokens;
        let began_ms = prefill.since_ms.max(self.last_first_token_ms);
        self.last_first_token_ms = now_ms;
        if prefill.tokens >= RATE_TOKENS_MIN && now_ms > began_ms {
            let (tokens, ms) = self.measured;
            self.measured = (
                tokens * RATE_KEEP + prefill.tokens as f64,
                ms * RATE_KEEP + now_ms - began_ms,
            );
        }
    }

    /// It is over, in whatever way.
    pub fn ended(&mut self, now_ms: f64, id: u64) {
        self.first_token(now_ms, id);
        if let Some(tokens) = self.decodes.remove(&id) {
            self.decode_tokens -= tokens;
        }
    }

    /// Prefill tokens that are left now.
    pub fn prefill_tokens(&self, now_ms: f64) -> u64 {
        let Some(oldest) = self.prefills.front() else {
            return 0;
        };
        let began_ms = oldest.since_ms.max(self.last_first_token_ms);
        let done = (now_ms - began_ms).max(0.0) * self.tokens_per_s() / 1000.0;
        let done = (done as u64).min(oldest.tokens);
        self.prefill_tokens - done
    }

    /// Requests lately sent there, in a second.
    pub fn arrivals_per_s(&self, now_ms: f64) -> f64 {
        self.arrivals.at(now_ms) * 1000.0 / FADE_MS
    }

    /// Share of its time that was lately asked for.
    pub fn busy_share(&self, now_ms: f64) -> f64 {
        self.work_ms.at(now_ms) / FADE_MS
    }

    /// Output tokens still expected.
    pub fn decode_tokens(&self) -> u64 {
        self.decode_tokens
    }

    /// Prefill rate; 0 before the first measurement.
    pub fn tokens_per_s(&self) -> f64 {
        let (tokens, ms) = self.measured;
        if ms > 0.0 { tokens * 1000.0 / ms } else { 0.0 }
    }
}
