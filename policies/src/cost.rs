//! What does it cost, in milliseconds, to send this request to that node?
//!
//! Milliseconds and not weights: every term is time that somebody waits, so terms can be measured
//! and compared. The cost is the round trip, plus (in-flight prefill + b × uncached tokens) /
//! prefill rate, plus pool pressure, decode interference and fetching KV, minus the session's
//! bonus.
//! `b` above 1 says that a recomputed token costs more than this request's own wait: it delays
//! everybody behind it and takes pool room from a prefix that somebody else needs. Replays of
//! public agent traces found 4 to 8 robust.
//! Left out for now: KV store tiers (`fetch_ms` is always 0) and a measured decode model: a token
//! to be decoded counts as one to be prefilled, which is what it costs in arithmetic once a batch
//! shares the reading of the weights.

use cache_index::block::BLOCK_TOKENS;
use cache_index::ids::NodeId;

use crate::affinity::AffinityParams;
use crate::view::{NodeView, RequestView};

/// A block as a token count.
const BLOCK_TOKENS_U64: u64 = BLOCK_TOKENS as u64;

/// What the cost is computed with.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Params {
    /// Weight of this request's own uncached tokens.
    pub b: f64,
    /// Prefill rate assumed for a node that has none measured.
    pub prefill_tokens_per_s_default: f64,
    /// Weight of what those wait longer who come after this request.
    pub behind: f64,
    /// Those who come after are at most so many in a second of this node's time.
    pub behind_per_s_max: f64,
    /// Share of a pool that the live sessions' prefixes may fill before a new one displaces them.
    pub live_share: f64,
    /// Weight of live blocks displaced.
    pub live_pressure: f64,
    /// Weight of recomputing what this request would push out of a full pool.
    pub pool_pressure: f64,
    /// Prefill tokens that one token of decode in flight counts as.
    pub decode_interference: f64,
    /// A session without binding is cold where no node holds more than this share of its prompt.
    pub cold_overlap_share: f64,
    /// Nor is it relevant where it is fewer tokens than this: what every prompt of a template has in
    /// common (a default system prompt is some twenty tokens) must not gather all traffic.
    pub cold_overlap_tokens_min: u64,
    /// A cold session goes only to nodes at most this much further away than the nearest.
    pub cold_round_trip_slack_ms: f64,
    /// How strongly sessions stay.
    pub affinity: AffinityParams,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            b: 6.0,
            prefill_tokens_per_s_default: 1000.0,
            behind: 1.0,
            behind_per_s_max: 8.0,
            live_share: 0.9,
            live_pressure: 1.0,
            pool_pressure: 1.0,
            decode_interference: 1.0,
            cold_overlap_share: 0.1,
            cold_overlap_tokens_min: 64,
            cold_round_trip_slack_ms: 10.0,
            affinity: AffinityParams::default(),
        }
    }
}

/// Every term of one candidate's cost, in milliseconds.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Terms {
    /// Network.
    pub round_trip_ms: f64,
    /// Waiting for the prefill that is already in flight there.
    pub queue_ms: f64,
    /// This request's own uncached tokens, weighted with `b`.
    pub prefill_ms: f64,
    /// What those wait longer who come while this request's prefill is queued or computed.
    pub behind_ms: f64,
    /// Recomputing what it would push out of a full pool.
    pub pool_ms: f64,
    /// Sharing steps with the decodes in flight there.
    pub decode_ms: f64,
    /// Fetching KV from a store tier.
    pub fetch_ms: f64,
    /// The bonus of the node that the session is bound to: 0 or negative.
    pub session_ms: f64,
}

impl Terms {
    /// Each with its name, for whoever has to show or write them all.
    pub fn named(&self) -> [(&'static str, f64); 8] {
        let Self {
            round_trip_ms,
            queue_ms,
            prefill_ms,
            behind_ms,
            pool_ms,
            decode_ms,
            fetch_ms,
            session_ms,
        } = *self;
        [
            ("round_trip_ms", round_trip_ms),
            ("queue_ms", queue_ms),
            ("prefill_ms", prefill_ms),
            ("behind_ms", behind_ms),
            ("pool_ms", pool_ms),
            ("decode_ms", decode_ms),
            ("fetch_ms", fetch_ms),
            ("session_ms", session_ms),
        ]
    }

    /// Their sum.
    pub fn total_ms(&self) -> f64 {
        self.round_trip_ms
            + self.queue_ms
            + self.prefill_ms
            + self.behind_ms
            + self.pool_ms
            + self.decode_ms
            + self.fetch_ms
            + self.session_ms
    }
}

/// A node that can take the request, and what that would cost.
#[derive(Clone, PartialEq, Debug)]
pub struct Candidate {
    /// The node.
    pub node: NodeId,
    /// Prompt tokens it is expected to read from cache.
    pub cached_tokens: u64,
    /// The terms of its cost.
    pub terms: Terms,
    /// Their sum.
    pub cost_ms: f64,
}

/// Prompt tokens that `node` is expected to read from cache: whole blocks of its own size, and
/// never the last token, which is always computed because its logits are needed.
pub fn cached_tokens(request: &RequestView, node: &NodeView) -> u64 {
    let held = u64::try_from(node.overlap_blocks).unwrap_or(u64::MAX);
    let creditable = request.prompt_tokens.saturating_sub(1) / BLOCK_TOKENS_U64;
    let tokens = BLOCK_TOKENS_U64 * held.min(creditable);
    let granule = node.node_block_tokens.max(1);
    tokens / granule * granule
}

/// Computes one candidate's cost.
pub fn candidate(request: &RequestView, node: &NodeView, p: &Params) -> Candidate {
    let cached_tokens = cached_tokens(request, node);
    let uncached = request.prompt_tokens - cached_tokens;
    let rate = prefill_rate(node, p);
    let ms = |tokens: f64| tokens * 1000.0 / rate;
    let bound = request.bound.as_ref() == Some(&node.id);
    let bonus = p.affinity.bonus_ms(ms(to_f64(cached_tokens)));
    let queue_ms = ms(to_f64(node.inflight_prefill_tokens));
    let own_ms = ms(to_f64(uncached));
    let terms = Terms {
        round_trip_ms: node.round_trip_ms.max(0.0),
        queue_ms,
        prefill_ms: p.b * own_ms,
        behind_ms: p.behind * behind_ms(node, queue_ms, own_ms, p),
        pool_ms: ms(p.pool_pressure * to_f64(displaced_tokens(request, node, uncached))
            + p.live_pressure * to_f64(displaced_live(request, node, uncached, p))),
        decode_ms: ms(p.decode_interference * to_f64(node.inflight_decode_tokens)),
        fetch_ms: 0.0,
        session_ms: if bound { -bonus } else { 0.0 },
    };
    Candidate {
        node: node.id.clone(),
        cached_tokens,
        terms,
        cost_ms: terms.total_ms(),
    }
}

/// A measured rate, or the default where there is none or it makes no sense.
fn prefill_rate(node: &NodeView, p: &Params) -> f64 {
    let measured = node.prefill_tokens_per_s;
    if measured.is_finite() && measured >= 1.0 {
        measured
    } else {
        p.prefill_tokens_per_s_default.max(1.0)
    }
}

/// What everybody waits longer who comes until the node has caught up, in all: while the queue and
/// this request's own work last, each of those is late by that work; a node that is busy catches up
/// slower. This is the difference that the request makes to the mean of an M/G/1 queue's waiting.
fn behind_ms(node: &NodeView, queue_ms: f64, own_ms: f64, p: &Params) -> f64 {
    let idle = 1.0 - node.busy_share.clamp(0.0, 0.95);
    let per_s = (node.arrivals_per_s.max(0.0) / idle).min(p.behind_per_s_max);
    own_ms * (queue_ms + own_ms / 2.0) / 1000.0 * per_s
}

/// Tokens of live sessions' prefixes that the request's new blocks would push out.
fn displaced_live(request: &RequestView, node: &NodeView, uncached: u64, p: &Params) -> u64 {
    if node.pool_blocks == 0 { return 0; }
    let added = uncached.saturating_add(request.output_tokens_expected).div_ceil(BLOCK_TOKENS_U64);
    let wanted = request.prompt_tokens.saturating_add(request.output_tokens_expected).div_ceil(BLOCK_TOKENS_U64);
    let room = (p.live_share * to_f64(node.pool_blocks)) as u64;
    let over = node.live_blocks.saturating_add(wanted).saturating_sub(room);
    over.min(added) * BLOCK_TOKENS_U64
}

/// Tokens that the request needs room for and the pool, beside what running requests hold, does
/// not have: so much must be evicted from running work or waited for.
fn displaced_tokens(request: &RequestView, node: &NodeView, uncached: u64) -> u64 {
    if node.pool_blocks == 0 {
        return 0;
    }
    let wanted = uncached.saturating_add(request.output_tokens_expected);
    let free = node.pool_blocks.saturating_sub(node.pool_used_blocks);
    wanted
        .div_ceil(BLOCK_TOKENS_U64)
        .saturating_sub(free)
        .saturating_mul(BLOCK_TOKENS_U64)
}

/// Token counts are far below 2^53, where this is exact.
#[expect(
    clippy::cast_precision_loss,
    reason = "token counts are far below 2^53"
)]
pub(crate) fn to_f64(tokens: u64) -> f64 {
    tokens as f64
}

#[cfg(test)]
mod tests;
