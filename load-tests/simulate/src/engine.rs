//! How would a node spend its time? A model of one, on a clock that its caller moves.
//!
//! A node computes one prompt at a time, first come first served, in chunks; all answers under way
//! advance together, one token a step, and a step that also computes a chunk takes that much
//! longer. A request can also be shared ([`Part`]): one node computes its prompt and keeps the
//! blocks as cache, another one answers as soon as it has room for the KV that has come. One pool of
//! blocks holds what running requests need (pinned) and, in what is left, the blocks of earlier prompts
//! (see `pool`). A prompt starts when the pool can take it and its
//! answer; until then it and all behind it wait.
//!
//! The same type serves the simulator's virtual clock and a simulated node in real time: the
//! caller asks [`Node::next_ms`] when something will happen and calls [`Node::advance`] then, or
//! later. Left out on purpose: preemption, batches of several prompts, other orders than first come
//! first served, and speculation. What lies below the pool is in [`tiers`].

mod answers;
mod held;
mod look;
mod node;
pub(crate) mod pool;
#[cfg(test)]
mod tests;
pub mod tiers;

use std::sync::Arc;

pub use node::Node;
use tiers::Tier;

/// How fast a node is. The defaults are about those of a 70B-class model on eight GPUs: assumed,
/// not measured, so compare policies with them and never quote the milliseconds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Params {
    /// Tokens in one block of the pool.
    pub block_tokens: u32,
    /// Prefill of the first tokens of a prompt, tokens a second.
    pub prefill_tokens_per_s: f64,
    /// After so many tokens of context a prefilled token costs twice as much.
    pub context_doubling_tokens: f64,
    /// Prompt tokens that one step computes.
    pub chunk_tokens: f64,
    /// A step with nothing in it, ms.
    pub step_ms: f64,
    /// What each answer under way adds to a step, ms.
    pub step_ms_per_answer: f64,
    /// What each token of context of an answer under way adds to a step, ms.
    pub step_ms_per_context_token: f64,
    /// Answers under way at once, at most.
    pub batch_max: usize,
    /// Size of one token's KV, bytes.
    pub kv_bytes_per_token: f64,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            block_tokens: 512,
            prefill_tokens_per_s: 20_000.0,
            context_doubling_tokens: 100_000.0,
            chunk_tokens: 2048.0,
            step_ms: 12.0,
            step_ms_per_answer: 0.08,
            step_ms_per_context_token: 1.5e-5,
            batch_max: 256,
            kv_bytes_per_token: 160_000.0,
        }
    }
}

impl Params {
    /// Milliseconds that one prompt token costs behind this many tokens of context.
    pub fn token_ms(&self, context_tokens: f64) -> f64 {
        1000.0 / self.prefill_tokens_per_s * (1.0 + context_tokens / self.context_doubling_tokens)
    }

    /// Milliseconds to compute a prompt of which `cached` tokens are held, on an idle node.
    pub fn prefill_ms(&self, prompt_tokens: f64, cached_tokens: f64) -> f64 {
        (prompt_tokens - cached_tokens) * self.token_ms((prompt_tokens + cached_tokens) / 2.0)
    }

    /// Tokens of a prompt that this many held blocks save: the last token is always computed.
    pub fn cached_tokens(&self, blocks: usize, prompt_tokens: u32) -> u32 {
        (blocks as u32 * self.block_tokens).min(prompt_tokens.saturating_sub(1))
    }

    /// Blocks that an answer of this many tokens may need.
    pub fn answer_blocks(&self, output_tokens: u32) -> usize {
        (output_tokens / self.block_tokens) as usize + 1
    }

    /// How long the KV of so many tokens travels over a link of so many GB (10^9 bytes) a second, ms.
    pub fn handover_ms(&self, tokens: f64, gb_per_s: f64) -> f64 {
        tokens * self.kv_bytes_per_token / (gb_per_s * 1e6)
    }

    /// What is left of a handover of so many tokens when their prompt is computed, which took so long,
    /// ms: KV travels meanwhile, layer by layer, so that at least the last chunk's is still to come.
    pub fn handover_left_ms(&self, tokens: f64, gb_per_s: f64, took_ms: f64) -> f64 {
        let last = tokens.min(self.chunk_tokens);
        (self.handover_ms(tokens, gb_per_s) - took_ms).max(self.handover_ms(last, gb_per_s))
    }

    /// The least that this prompt's first token takes, with these tokens held and the node idle.
    pub fn floor_ms(&self, prompt_tokens: u32, cached_tokens: u32) -> f64 {
        let chunk_ms = self.chunk_tokens * 1000.0 / self.prefill_tokens_per_s;
        self.prefill_ms(f64::from(prompt_tokens), f64::from(cached_tokens))
            * (1.0 + self.step_ms / chunk_ms)
            + self.step_ms
    }
}

/// One request as a node sees it.
#[derive(Clone, Debug)]
pub struct Job {
    /// Its number; a node holds no two with the same.
    pub id: u32,
    /// The full blocks of the prompt, each named uniquely by its whole prefix.
    pub blocks: Arc<[u32]>,
    /// All tokens of the prompt, at least one.
    pub prompt_tokens: u32,
    /// Tokens of the answer, at least one.
    pub output_tokens: u32,
    /// What of it is the node's.
    pub part: Part,
}

/// What of a request a node does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Part {
    /// All of it.
    #[default]
    Whole,
    /// It computes the prompt, for another node.
    Prompt,
    /// It answers, from a prompt whose KV has come from another node.
    Answer,
}

/// What a node has done, in the order in which it did it.
#[derive(Clone, Debug)]
pub enum Happened {
    /// The first token of an answer has left the node.
    FirstToken {
        /// When.
        at_ms: f64,
        /// Whose.
        id: u32,
        /// Tokens of the prompt that were not computed: held in the pool when the prefill started, or
        /// fetched before it.
        cached_tokens: u32,
        /// Of these, the ones that were fetched.
        fetched_tokens: u32,
    },
    /// The prompt is computed whose answer is another node's.
    Computed {
        /// When.
        at_ms: f64,
        /// Whose.
        id: u32,
        /// Tokens of the prompt that were not computed.
        cached_tokens: u32,
        /// Of these, the ones that were fetched.
        fetched_tokens: u32,
        /// For how long it was computed.
        took_ms: f64,
    },
    /// An answer is complete.
    Finished {
        /// When.
        at_ms: f64,
        /// Whose.
        id: u32,
        /// Its tokens.
        output_tokens: u32,
    },
    /// A tier has taken in `path[from..to]`; `path[..from]` was there.
    Stored {
        /// When.
        at_ms: f64,
        /// Which.
        tier: Tier,
        /// The whole path of the prompt.
        path: Arc<[u32]>,
        /// The first new block's place in it.
        from: usize,
        /// One past the last; less than the path is long only where the tier is smaller.
        to: usize,
    },
    /// A tier has let go of these.
    Removed {
        /// When.
        at_ms: f64,
        /// Which.
        tier: Tier,
        /// Which, in order.
        blocks: Vec<u32>,
    },
}
