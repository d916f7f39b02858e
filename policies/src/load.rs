//! What has this gateway in flight on a node, and how fast does the node work?
//!
//! Work is counted at dispatch, before the node has seen the request, and corrected as the answer
//! comes. Nodes prefill about in the order of arrival, so what is left of the oldest prefill
//! shrinks as time goes by: without that, a prompt of 100,000 tokens would count in full until its
//! first token. How long a prefill takes is learnt at each first token, from the time between it
//! and the one before (or the dispatch, if that came later): what the node spent on this prompt
//! alone. A token costs more the more context it attends to, so two figures are fitted: the rate
//! without context, and the context at which a token costs twice as much.

use std::collections::{HashMap, VecDeque};

use crate::cost::{to_f64, to_tokens};

/// A shorter prefill says more about latencies than about the rate.
const FIT_TOKENS_MIN: f64 = 64.0;
/// What is left of earlier measurements after a new one: about two hundred count.
const FIT_KEEP: f64 = 0.995;
/// Context at which a token costs twice as much, before anything is known: about what the shapes of
/// models between 8 and 100 billion parameters give.
const CONTEXT_DOUBLES_TOKENS: f64 = 100_000.0;
/// Tokens of measured prefill that outweigh that assumption.
const PRIOR_TOKENS: f64 = 1000.0;
/// A prefill that took longer than so many times what was expected has waited for something else,
/// and counts as if it had taken that long: one stall must not make a node look slow for minutes.
const STALL_MAX: f64 = 2.0;
/// Of the oldest prefill at least this share is left until its first token comes: an estimate that
/// is too short must not make a blocked node look idle.
const LEFT_SHARE_MIN: f64 = 0.2;
/// How long arrivals take to fade, in milliseconds: a minute is some forty arrivals of a busy node.
const FADE_MS: f64 = 60_000.0;

/// The uncached tokens of a prompt, each weighted with what its context makes it cost.
pub fn weighted_tokens(cached_tokens: u64, prompt_tokens: u64, context_doubles_tokens: f64) -> f64 {
    let uncached = to_f64(prompt_tokens.saturating_sub(cached_tokens));
    if context_doubles_tokens < 1.0 || !context_doubles_tokens.is_finite() {
        return uncached;
    }
    let context = to_f64(cached_tokens) + uncached / 2.0;
    uncached * (1.0 + context / context_doubles_tokens)
}

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

/// Least squares of milliseconds over tokens and tokens times context, each measurement weighted
/// with one over its tokens, older ones fading.
#[derive(Clone, Copy, Debug, Default)]
struct Fit {
    tokens: f64,
    tokens_context: f64,
    tokens_context2: f64,
    ms: f64,
    ms_context: f64,
}

impl Fit {
    fn add(&mut self, tokens: f64, context: f64, ms: f64) {
        for (sum, new) in [
            (&mut self.tokens, tokens),
            (&mut self.tokens_context, tokens * context),
            (&mut self.tokens_context2, tokens * context * context),
            (&mut self.ms, ms),
            (&mut self.ms_context, ms * context),
        ] {
            *sum = *sum * FIT_KEEP + new;
        }
    }

    /// Milliseconds of a token without context, and what each token of context adds.
    fn solved(&self) -> Option<(f64, f64)> {
        if self.tokens <= 0.0 {
            return None;
        }
        // The assumption enters as a measurement would: prior x (added x doubles - own)^2.
        let doubles = CONTEXT_DOUBLES_TOKENS;
        let (aa, ab, bb) = (
            self.tokens + PRIOR_TOKENS,
            self.tokens_context - PRIOR_TOKENS * doubles,
            self.tokens_context2 + PRIOR_TOKENS * doubles * doubles,
        );
        let determinant = aa * bb - ab * ab;
        let own = (self.ms * bb - self.ms_context * ab) / determinant;
        let added = (self.ms_context * aa - self.ms * ab) / determinant;
        if own > 0.0 && added >= 0.0 && own.is_finite() {
            return Some((own, added));
        }
        Some((self.ms / self.tokens, 0.0))
    }
}

#[derive(Clone, Copy, Debug)]
struct Prefill {
    id: u64,
    cached_tokens: u64,
    prompt_tokens: u64,
    fetch_ms: f64,
    since_ms: f64,
}

impl Prefill {
    fn weighted(&self, context_doubles_tokens: f64) -> f64 {
        weighted_tokens(
            self.cached_tokens,
            self.prompt_tokens,
            context_doubles_tokens,
        )
    }

    /// The same and its fetch, as the tokens that could be computed meanwhile.
    fn work(&self, load: &NodeLoad) -> f64 {
        let fetched = self.fetch_ms * load.tokens_per_s() / 1000.0;
        self.weighted(load.context_doubles_tokens()) + fetched
    }
}

/// What is sent to a node with one request.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sent {
    /// Prompt tokens that the node is expected to read from cache; all of them where another node
    /// computes the prompt.
    pub cached_tokens: u64,
    /// How long it is expected to fetch some of these from slower tiers, in milliseconds.
    pub fetch_ms: f64,
    /// All tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens that the answer is expected to have.
    pub output_tokens: u64,
    /// Blocks of 16 tokens that it takes in the pool beside those of other requests in flight.
    pub pool_blocks: u64,
}

/// What of a request stays in flight until it ends.
#[derive(Clone, Copy, Debug)]
struct Running {
    output_tokens: u64,
    pool_blocks: u64,
}

/// One node's load, as one gateway knows it.
#[derive(Debug, Default)]
pub struct NodeLoad {
    /// In order of dispatch.
    prefills: VecDeque<Prefill>,
    running: HashMap<u64, Running>,
    decode_tokens: u64,
    pool_blocks: u64,
    last_first_token_ms: f64,
    arrivals: Fading,
    work_ms: Fading,
    fit: Fit,
    solved: Option<(f64, f64)>,
}

impl NodeLoad {
    /// A request was sent there.
    pub fn dispatched(&mut self, now_ms: f64, id: u64, sent: Sent) {
        let prefill = Prefill {
            id,
            cached_tokens: sent.cached_tokens,
            prompt_tokens: sent.prompt_tokens,
            fetch_ms: sent.fetch_ms.max(0.0),
            since_ms: now_ms,
        };
        self.prefills.push_back(prefill);
        let running = Running {
            output_tokens: sent.output_tokens,
            pool_blocks: sent.pool_blocks,
        };
        if self.running.insert(id, running).is_none() {
            self.decode_tokens += running.output_tokens;
            self.pool_blocks += running.pool_blocks;
        }
        self.arrivals.add(now_ms, 1.0);
        if let Some((own, _)) = self.solved {
            self.work_ms.add(now_ms, prefill.work(self) * own);
        }
    }

    /// Its first token came.
    pub fn first_token(&mut self, now_ms: f64, id: u64) {
        let Some(at) = self.prefills.iter().position(|prefill| prefill.id == id) else {
            return;
        };
        let Some(prefill) = self.prefills.remove(at) else {
            return;
        };
        let tokens = to_f64(prefill.prompt_tokens.saturating_sub(prefill.cached_tokens));
        if tokens < 1.0 {
            // Another node has computed it: this one spent nothing on it.
            return;
        }
        let began_ms = prefill.since_ms.max(self.last_first_token_ms);
        self.last_first_token_ms = now_ms;
        let spent_ms = now_ms - began_ms - prefill.fetch_ms;
        // Where most of the time is said to have gone into a fetch, the rest says little.
        let is_prefill = spent_ms > prefill.fetch_ms && spent_ms > 0.0;
        if tokens >= FIT_TOKENS_MIN && is_prefill {
            let context = to_f64(prefill.cached_tokens) + tokens / 2.0;
            let most_ms = self.solved.map_or(f64::INFINITY, |(own, added)| {
                STALL_MAX * tokens * (own + added * context)
            });
            self.fit.add(tokens, context, spent_ms.min(most_ms));
            self.solved = self.fit.solved();
        }
    }

    /// It will have no first token: how long it was there says nothing about the node's rate.
    pub fn broke_off(&mut self, id: u64) {
        self.prefills.retain(|prefill| prefill.id != id);
    }

    /// It is over, in whatever way.
    pub fn ended(&mut self, now_ms: f64, id: u64) {
        self.first_token(now_ms, id);
        if let Some(running) = self.running.remove(&id) {
            self.decode_tokens -= running.output_tokens;
            self.pool_blocks -= running.pool_blocks;
        }
    }

    /// Weighted prefill tokens that are left now.
    pub fn prefill_tokens(&self, now_ms: f64) -> u64 {
        let has_work = |prefill: &&Prefill| prefill.prompt_tokens > prefill.cached_tokens;
        let Some(oldest) = self.prefills.iter().find(has_work) else {
            return 0;
        };
        let all: f64 = self.prefills.iter().map(|p| p.work(self)).sum();
        let began_ms = oldest.since_ms.max(self.last_first_token_ms);
        let done = (now_ms - began_ms).max(0.0) * self.tokens_per_s() / 1000.0;
        let done_max = oldest.work(self) * (1.0 - LEFT_SHARE_MIN);
        to_tokens(all - done.min(done_max))
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

    /// Requests there.
    pub fn requests(&self) -> u64 {
        self.running.len() as u64
    }

    /// Requests there that are past their prefill.
    pub fn decoding(&self) -> u64 {
        (self.running.len().saturating_sub(self.prefills.len())) as u64
    }

    /// Blocks of its pool that requests in flight hold or will.
    pub fn pool_blocks(&self) -> u64 {
        self.pool_blocks
    }

    /// Prefill rate without context; 0 before the first measurement.
    pub fn tokens_per_s(&self) -> f64 {
        self.solved.map_or(0.0, |(own, _)| 1000.0 / own)
    }

    /// Context at which a token costs twice as much.
    pub fn context_doubles_tokens(&self) -> f64 {
        match self.solved {
            Some((own, added)) if added > 0.0 => own / added,
            Some(_) => 0.0,
            None => CONTEXT_DOUBLES_TOKENS,
        }
    }
}

#[cfg(test)]
mod tests;
