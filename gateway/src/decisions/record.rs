//! What is written of one turn's way?

use std::collections::BTreeMap;
use std::sync::Arc;

use cache_index::block::BlockHash;
use policies::pick::{self, Decision};
use serde::{Deserialize, Serialize};

use crate::ctx::Ctx;

/// Blocks of 16 tokens that one block of the log stands for: 512 tokens, as public traces have
/// them. A chained hash names everything before it, so every 32nd says enough.
const LOG_BLOCK: usize = 32;

/// One turn: what was asked, where it could have gone, where it went, and what came of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Decided {
    /// The version of this form: 1.
    pub(crate) v: u32,
    /// The id that the client knows.
    pub(crate) request_id: String,
    /// The id of its usage record.
    pub(crate) record_id: String,
    /// Arrival, unix milliseconds.
    pub(crate) t_ms: i64,
    /// Who asked.
    pub(crate) tenant: String,
    /// The session's key: 32 hex digits.
    pub(crate) session: String,
    /// What names the session: the client's id, or a fingerprint.
    pub(crate) session_id: String,
    /// The model's id.
    pub(crate) model: String,
    /// The prompt's length.
    pub(crate) prompt_tokens: u64,
    /// Whether that and the blocks are the node's own, or an estimate.
    pub(crate) exact: bool,
    /// The answer's length as it was expected.
    pub(crate) output_tokens_expected: u64,
    /// The answer's length.
    pub(crate) output_tokens: u64,
    /// Prompt tokens that the node had in its cache.
    pub(crate) cached_tokens: u64,
    /// Arrival to the first byte of the answer.
    pub(crate) ttft_ms: Option<u32>,
    /// Arrival to the end.
    pub(crate) duration_ms: u32,
    /// How it ended, in the ledger's words.
    pub(crate) outcome: String,
    /// One for each full 512 tokens of the prompt: 64 bits of the chained hash there, in hex. Equal
    /// ones stand for equal beginnings, within a tenant's cache scope.
    pub(crate) blocks: Vec<String>,
    /// One for each node that was tried.
    pub(crate) attempts: Vec<Attempt>,
}

/// One decision.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Attempt {
    /// The node that was chosen.
    pub(crate) node: String,
    /// Why.
    pub(crate) reason: String,
    /// Prompt tokens that it was expected to have in its cache.
    pub(crate) expected_cached_tokens: u64,
    /// Every node that could have taken it.
    pub(crate) candidates: Vec<Candidate>,
    /// What was looked at for its two halves, where two nodes could have shared it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) legs: Option<Legs>,
    /// Every node that could not.
    pub(crate) refused: Vec<Refused>,
}

/// What was looked at for the two halves of a turn.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Legs {
    /// Every node that could have computed the prompt.
    pub(crate) prefill: Vec<Candidate>,
    /// Every node that could have answered from it.
    pub(crate) decode: Vec<Candidate>,
    /// The cheapest two; none where too little was missing where it is answered.
    pub(crate) cheapest: Option<Pair>,
    /// The two that took the turn; none where one node did all of it.
    pub(crate) chosen: Option<Pair>,
}

/// Two nodes that share a turn.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Pair {
    /// The one that computes the prompt.
    pub(crate) prefill: String,
    /// The one that answers.
    pub(crate) decode: String,
    /// Prompt tokens that the first was expected to have in its cache.
    pub(crate) cached_tokens: u64,
    /// Prompt tokens whose KV the second lacked.
    pub(crate) moved_tokens: u64,
    /// Of the transfer's time, what the prefill hides.
    pub(crate) hidden_ms: f64,
    /// Both halves' costs, less that.
    pub(crate) cost_ms: f64,
}

/// A node that could have taken the turn.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Candidate {
    /// Its name.
    pub(crate) node: String,
    /// Prompt tokens that it was expected to have in its cache.
    pub(crate) cached_tokens: u64,
    /// What it would cost: the sum of the terms.
    pub(crate) cost_ms: f64,
    /// The terms by name, in milliseconds; those that are 0 are left out.
    pub(crate) terms: BTreeMap<String, f64>,
}

/// A node that could not take it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Refused {
    /// Its name.
    pub(crate) node: String,
    /// A word from a closed set.
    pub(crate) reason: String,
    /// The same with its details.
    pub(crate) why: String,
}

/// What a request remembers of its routing until it ends.
#[derive(Debug)]
pub(crate) struct Routed {
    /// The session's key.
    pub(crate) session: u128,
    /// The prompt's length.
    pub(crate) prompt_tokens: u64,
    /// Whether that is the node's own.
    pub(crate) exact: bool,
    /// The answer's length as it was expected.
    pub(crate) output_tokens_expected: u64,
    /// From [`Routed::log_blocks`].
    pub(crate) blocks: Vec<u64>,
    /// One for each attempt.
    pub(crate) decisions: Vec<Arc<Decision>>,
}

impl Routed {
    /// The blocks of a prompt as the log has them.
    pub(crate) fn log_blocks(chain: &[BlockHash]) -> Vec<u64> {
        chain
            .iter()
            .skip(LOG_BLOCK - 1)
            .step_by(LOG_BLOCK)
            .map(|hash| hash.short())
            .collect()
    }
}

/// A record as the request leaves it: what costs time to spell is spelled by the log's thread.
pub(crate) struct Pending {
    pub(super) decided: Decided,
    pub(super) routed: Option<Routed>,
}

impl Pending {
    /// The whole record.
    pub(super) fn spelled(self) -> Decided {
        let Self {
            mut decided,
            routed,
        } = self;
        if let Some(routed) = routed {
            let blocks = routed.blocks.iter();
            decided.blocks = blocks.map(|block| format!("{block:016x}")).collect();
            let attempts = routed.decisions.iter();
            decided.attempts = attempts.map(|one| Attempt::of(one)).collect();
        }
        decided
    }
}

impl Decided {
    /// Of a request that has ended.
    pub(crate) fn pending(ctx: &Ctx, routed: Routed) -> Pending {
        Pending {
            decided: Self::of(ctx, &routed),
            routed: Some(routed),
        }
    }

    /// Without its blocks and attempts.
    fn of(ctx: &Ctx, routed: &Routed) -> Self {
        let line = &ctx.line;
        Self {
            v: 1,
            request_id: ctx.request_id.clone(),
            record_id: ctx.own_id.to_string(),
            t_ms: ctx.t_ms,
            tenant: line.tenant.clone(),
            session: format!("{:032x}", routed.session),
            session_id: line.session.clone(),
            model: line.model.clone(),
            prompt_tokens: routed.prompt_tokens,
            exact: routed.exact,
            output_tokens_expected: routed.output_tokens_expected,
            output_tokens: line.output,
            cached_tokens: line.cached,
            ttft_ms: line.ttft_ms,
            duration_ms: ctx.elapsed_ms(),
            outcome: line.outcome.to_owned(),
            blocks: Vec::new(),
            attempts: Vec::new(),
        }
    }

    /// Whether a person who writes this id means this turn.
    pub(crate) fn is_called(&self, id: &str) -> bool {
        self.request_id == id || self.record_id == id
    }
}

impl Attempt {
    fn of(decision: &Decision) -> Self {
        let refused = decision.refused.iter().map(|(node, why)| Refused {
            node: node.to_string(),
            reason: why.as_str().to_owned(),
            why: why.to_string(),
        });
        Self {
            node: decision.node.to_string(),
            reason: decision.reason.as_str().to_owned(),
            expected_cached_tokens: decision.expected_cached_tokens,
            candidates: decision.candidates.iter().map(Candidate::of).collect(),
            legs: decision.legs.as_ref().map(Legs::of),
            refused: refused.collect(),
        }
    }
}

impl Candidate {
    fn of(candidate: &pick::Candidate) -> Self {
        let terms = candidate.terms.named().into_iter();
        Self {
            node: candidate.node.to_string(),
            cached_tokens: candidate.cached_tokens,
            cost_ms: rounded(candidate.cost_ms),
            terms: terms
                .filter(|(_, ms)| *ms != 0.0)
                .map(|(name, ms)| (name.to_owned(), rounded(ms)))
                .collect(),
        }
    }
}

impl Legs {
    fn of(legs: &pick::Legs) -> Self {
        let pick::Legs {
            prefill,
            decode,
            cheapest,
            chosen,
        } = legs;
        Self {
            prefill: prefill.iter().map(Candidate::of).collect(),
            decode: decode.iter().map(Candidate::of).collect(),
            cheapest: cheapest.as_ref().map(Pair::of),
            chosen: chosen.as_ref().map(Pair::of),
        }
    }
}

impl Pair {
    fn of(pair: &pick::Pair) -> Self {
        let pick::Pair {
            prefill,
            decode,
            cached_tokens,
            moved_tokens,
            moved_bytes: _,
            hidden_ms,
            cost_ms,
        } = pair;
        Self {
            prefill: prefill.to_string(),
            decode: decode.to_string(),
            cached_tokens: *cached_tokens,
            moved_tokens: *moved_tokens,
            hidden_ms: rounded(*hidden_ms),
            cost_ms: rounded(*cost_ms),
        }
    }
}

/// To a thousandth: what is behind it says nothing and fills the log.
fn rounded(ms: f64) -> f64 {
    (ms * 1000.0).round() / 1000.0
}
