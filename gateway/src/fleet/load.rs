//! What is sent to a node, and when is it over?
//!
//! Load is counted at dispatch, before the node has seen the request, and corrected as the answer
//! streams; what it comes to is `policies::load`'s to say, as is how fast the node works, which is
//! learnt from first tokens. The guard gives back exactly what it still holds, so that a request that
//! ends in any way leaves nothing behind; from one that ends before its first token nothing is
//! learnt.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use cache_index::block::{BLOCK_TOKENS, BlockHash};
use policies::load::Sent;
use policies::pick::Fetched;
use policies::view::SessionKey;

use super::knowledge::Lent;
use super::node::Node;

/// A block as a token count.
const BLOCK_TOKENS_U64: u64 = BLOCK_TOKENS as u64;

/// What a request brings to its node.
#[derive(Clone, Copy, Debug)]
pub struct Dispatch<'a> {
    /// All tokens of the prompt.
    pub prompt_tokens: u64,
    /// Those that the node is expected to read from cache.
    pub cached_tokens: u64,
    /// What of these it is expected to fetch from slower tiers.
    pub fetched: Fetched,
    /// Tokens that the answer is expected to have.
    pub output_tokens: u64,
    /// The prompt's full blocks.
    pub chain: &'a [BlockHash],
    /// The conversation that it belongs to.
    pub session: SessionKey,
    /// What of the turn is the node's.
    pub part: Part,
}

/// What of a turn a node does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// All of it.
    Whole,
    /// It computes the prompt.
    Prompt,
    /// It answers, from a prompt that another node computes.
    Answer,
}

impl Dispatch<'_> {
    /// Full blocks of the prompt, and those that the node has.
    pub(super) fn blocks(&self) -> (u64, u64) {
        let prompt = self.prompt_tokens / BLOCK_TOKENS_U64;
        (prompt, (self.cached_tokens / BLOCK_TOKENS_U64).min(prompt))
    }
}

/// A request's share of its node's load; dropping it gives the share back.
#[must_use = "dropping it gives the share back"]
pub struct InFlight {
    node: Arc<Node>,
    id: u64,
    has_begun: bool,
    decode_tokens: u64,
    lent: Lent,
}

impl InFlight {
    pub(super) fn new(node: &Arc<Node>, dispatch: &Dispatch<'_>, lent: Lent) -> Self {
        let load = &node.load;
        let id = load.dispatched.fetch_add(1, Ordering::Relaxed);
        let (prompt, cached) = dispatch.blocks();
        let sent = Sent {
            cached_tokens: match dispatch.part {
                Part::Whole | Part::Prompt => dispatch.cached_tokens,
                Part::Answer => dispatch.prompt_tokens,
            },
            fetch_ms: dispatch.fetched.ms,
            prompt_tokens: dispatch.prompt_tokens,
            output_tokens: dispatch.output_tokens,
            pool_blocks: (prompt - cached) + dispatch.fetched.tokens / BLOCK_TOKENS_U64,
        };
        node.with_work(|work, now_ms| work.dispatched(now_ms, id, sent));
        load.decode_tokens
            .fetch_add(dispatch.output_tokens, Ordering::Relaxed);
        load.requests.fetch_add(1, Ordering::Relaxed);
        node.with_breaker(|breaker, now_ms| breaker.on_dispatch(now_ms));
        Self {
            node: Arc::clone(node),
            id,
            has_begun: false,
            decode_tokens: dispatch.output_tokens,
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
        if std::mem::replace(&mut self.has_begun, true) {
            return;
        }
        self.lent.first_token();
        self.node
            .with_work(|work, now_ms| work.first_token(now_ms, self.id));
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
        self.node.with_work(|work, now_ms| {
            if !self.has_begun {
                work.broke_off(self.id);
            }
            work.ended(now_ms, self.id);
        });
        load.decode_tokens
            .fetch_sub(self.decode_tokens, Ordering::Relaxed);
        load.requests.fetch_sub(1, Ordering::Relaxed);
        // Where an outcome was reported before, this changes nothing.
        self.node
            .with_breaker(|breaker, now_ms| breaker.on_neutral(now_ms));
    }
}
