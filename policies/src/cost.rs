//! What does it cost, in milliseconds, to send this request to that node?
//!
//! Milliseconds and not weights: every term is time that somebody waits, so terms can be measured
//! and compared. What this request waits itself: the round trip, the prefill in flight before it,
//! its own prefill, room in the pool, fetching KV from a store tier. What others wait because of
//! it: those who come while its prefill is queued or computed (`behind_ms`), those whose prefix it
//! pushes out (`live_ms`), those whose decode it shares steps with.
//!
//! `b` weighs the request's own prefill. Without `behind_ms` a single weight has to stand for all
//! that others lose by it, and replays of public agent traces found 4 to 8 best. Spelled out, that
//! loss grows with the square of the prefill, with how often others come, and with how busy the
//! node is: moving a short context is cheap, a long one dear. The replays then find 3 best, and all
//! between 1 and 4 good.

use cache_index::block::BLOCK_TOKENS;
use cache_index::ids::NodeId;
use cache_index::tiers::Tiers;

use crate::affinity::AffinityParams;
use crate::load::weighted_tokens;
use crate::view::{FetchCosts, FleetView, NodeView, RequestView, Role, Splits};

mod legs;
mod terms;

pub(crate) use legs::{decode_leg, moved_bytes, moved_tokens, prefill_leg};
pub use terms::Terms;

/// A block as a token count.
const BLOCK_TOKENS_U64: u64 = BLOCK_TOKENS as u64;

/// What the cost is computed with.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Params {
    /// Weight of this request's own prefill, and of the fetch before it, which keeps a node from the next
    /// prompt just the same.
    pub b: f64,
    /// Prefill rate assumed for a node that has none measured.
    pub prefill_tokens_per_s_default: f64,
    /// Weight of what those wait longer who come after this request.
    pub behind: f64,
    /// At most so many are counted to come in a second of a node's idle time.
    pub behind_per_s_max: f64,
    /// Share of a pool that running requests may hold before the next one waits for room.
    pub pool_share: f64,
    /// How long a request keeps its blocks.
    pub pool_wait_ms: f64,
    /// Weight of computing again what is pushed out of live sessions' prefixes.
    pub live: f64,
    /// What was last used so long ago counts a third of what was used just now.
    pub live_fade_ms: f64,
    /// Prefill tokens that one token of decode in flight counts as.
    pub decode_interference: f64,
    /// Weight of each session bound to a node beyond the fewest, in prefills of the turn that is being
    /// placed. Below 0.9, six prompts on four nodes leave one node with two of them for ever; replays
    /// tell 0 from 1 by no more than seeds do, and lose from 2 on.
    pub crowd: f64,
    /// Weight of what the streams of a node lose while a prompt is computed there that another node
    /// could compute.
    pub stall: f64,
    /// A prompt with fewer uncached tokens than this on the node that answers is computed there.
    pub split_tokens_min: u64,
    /// A session without binding is cold where no node holds more than this share of its prompt.
    pub cold_overlap_share: f64,
    /// Nor is it relevant where it is fewer tokens than this: what every prompt of a template has in
    /// common (a default system prompt is some twenty tokens) must not gather all traffic.
    pub cold_overlap_tokens_min: u64,
    /// A cold session goes only to nodes at most this much further away than the nearest.
    pub cold_round_trip_slack_ms: f64,
    /// How strongly sessions stay.
    pub affinity: AffinityParams,
    /// Which nodes are looked at where there are many.
    pub sample: SampleParams,
}

impl Default for Params {
    /// Found by replaying public agent traces on modelled nodes, the same for all of them; see
    /// `docs/decisions/`. A decode token counts little: a step of a running batch costs about as
    /// much with one sequence more.
    fn default() -> Self {
        Self {
            b: 3.0,
            prefill_tokens_per_s_default: 1000.0,
            behind: 0.7,
            behind_per_s_max: 8.0,
            pool_share: 0.7,
            pool_wait_ms: 20_000.0,
            live: 4.0,
            live_fade_ms: 200_000.0,
            decode_interference: 0.05,
            crowd: 1.0,
            // Every step waits for the prefill between it and the last one: a stream is late by all
            // of it.
            stall: 1.0,
            // Two requests and a handover take some 10 ms, as long as a CPU node computes ten tokens
            // and a large GPU about 256.
            split_tokens_min: 256,
            cold_overlap_share: 0.2,
            cold_overlap_tokens_min: 64,
            cold_round_trip_slack_ms: 10.0,
            affinity: AffinityParams::default(),
            sample: SampleParams::default(),
        }
    }
}

/// Which nodes are looked at where there are many; see [`crate::sample`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SampleParams {
    /// Up to so many nodes all are looked at.
    pub nodes_max: usize,
    /// Of those that hold some of the prompt, the ones that hold most.
    pub holders: usize,
    /// The ones with the least work before them.
    pub idle: usize,
    /// The session's own, by rendezvous.
    pub rendezvous: usize,
}

impl Default for SampleParams {
    /// Replays with 64 nodes lose nothing by it.
    fn default() -> Self {
        Self {
            nodes_max: 32,
            holders: 8,
            idle: 8,
            rendezvous: 2,
        }
    }
}

/// A node that can take the request, and what that would cost.
#[derive(Clone, PartialEq, Debug)]
pub struct Candidate {
    /// The node.
    pub node: NodeId,
    /// Prompt tokens it is expected to read from cache, those fetched from a store tier included.
    pub cached_tokens: u64,
    /// Of these, the ones that it would fetch.
    pub fetched_tokens: u64,
    /// How long that takes, in milliseconds.
    pub fetched_ms: f64,
    /// The terms of its cost.
    pub terms: Terms,
    /// Their sum.
    pub cost_ms: f64,
}

/// Prompt tokens that a node with so many leading blocks is expected to read from cache: whole
/// blocks of its own size, and never the last token, which is always computed because its logits
/// are needed.
fn creditable(request: &RequestView, node: &NodeView, blocks: usize) -> u64 {
    let held = u64::try_from(blocks).unwrap_or(u64::MAX);
    let most = request.prompt_tokens.saturating_sub(1) / BLOCK_TOKENS_U64;
    let tokens = BLOCK_TOKENS_U64 * held.min(most);
    let granule = node.node_block_tokens.max(1);
    tokens / granule * granule
}

/// Prompt tokens that `node` is expected to find in its device's memory.
pub fn cached_tokens(request: &RequestView, node: &NodeView) -> u64 {
    creditable(request, node, node.overlap_blocks)
}

/// Computes one candidate's cost.
pub fn candidate(
    request: &RequestView,
    node: &NodeView,
    fleet: &FleetView,
    p: &Params,
) -> Candidate {
    let rate = prefill_rate(node, fleet, p);
    let ms = |tokens: f64| tokens * 1000.0 / rate;
    let prefill = |cached| {
        ms(weighted_tokens(
            cached,
            request.prompt_tokens,
            node.context_doubles_tokens,
        ))
    };
    let source = quickest_source(request, node, prefill);
    let uncached = request.prompt_tokens - source.cached_tokens;
    let queue_ms = ms(to_f64(node.inflight_prefill_tokens));
    let own_ms = prefill(source.cached_tokens);
    let occupied_ms = own_ms + source.fetch_ms;
    let bound = request.bound.as_ref() == Some(&node.id);
    // A binding to a node that has lost the session's prefix is worth nothing.
    let bonus = p.affinity.bonus_ms(ms(to_f64(source.cached_tokens)));
    let terms = Terms {
        round_trip_ms: node.round_trip_ms.max(0.0),
        queue_ms,
        prefill_ms: p.b * own_ms,
        behind_ms: p.behind * behind_ms(node, fleet, (queue_ms, occupied_ms), p),
        pool_ms: pool_wait_ms(request, node, p),
        live_ms: ms(p.live * displaced_live(request, node, uncached, p)),
        crowd_ms: 0.0,
        decode_ms: ms(p.decode_interference * to_f64(node.inflight_decode_tokens)),
        fetch_ms: p.b * source.fetch_ms,
        stall_ms: p.stall * stall_ms(node, fleet, own_ms),
        transfer_ms: 0.0,
        session_ms: if bound { -bonus } else { 0.0 },
    };
    Candidate {
        node: node.id.clone(),
        cached_tokens: source.cached_tokens,
        fetched_tokens: source.fetched_tokens,
        fetched_ms: source.fetch_ms,
        terms,
        cost_ms: terms.total_ms(),
    }
}

/// How the request's prefix would come to be on the device.
struct Source {
    cached_tokens: u64,
    fetched_tokens: u64,
    fetch_ms: f64,
}

/// The quickest of: what the device holds alone, and each store tier read as well. A node fetches
/// where that is quicker than computing, and not otherwise.
fn quickest_source(
    request: &RequestView,
    node: &NodeView,
    prefill_ms: impl Fn(u64) -> f64,
) -> Source {
    let Tiers {
        host, disk, shared, ..
    } = node.overlap_tiers;
    let FetchCosts {
        host_ms,
        disk_ms,
        shared_ms,
    } = node.fetch_ms_per_block;
    let device = node.overlap_blocks;
    let on_device = creditable(request, node, device);
    let mut best = Source {
        cached_tokens: on_device,
        fetched_tokens: 0,
        fetch_ms: 0.0,
    };
    let mut best_ms = prefill_ms(on_device);
    let (mut blocks, mut fetch_ms) = (device, 0.0);
    for (reach, block_ms) in [(host, host_ms), (disk, disk_ms), (shared, shared_ms)] {
        let more = reach.saturating_sub(blocks);
        // A tier whose speed is not known is not counted on, nor any behind it.
        if more > 0 && !(block_ms.is_finite() && block_ms > 0.0) {
            break;
        }
        blocks += more;
        fetch_ms += to_f64(u64::try_from(more).unwrap_or(u64::MAX)) * block_ms.max(0.0);
        let cached_tokens = creditable(request, node, blocks);
        let total_ms = fetch_ms + prefill_ms(cached_tokens);
        if cached_tokens > best.cached_tokens && total_ms < best_ms {
            best_ms = total_ms;
            best = Source {
                cached_tokens,
                fetched_tokens: cached_tokens - on_device,
                fetch_ms,
            };
        }
    }
    best
}

/// A measured rate; else that of the other nodes, since one that seems slow because nobody knows it
/// would never be tried; else the default.
fn prefill_rate(node: &NodeView, fleet: &FleetView, p: &Params) -> f64 {
    [node.prefill_tokens_per_s, fleet.prefill_tokens_per_s]
        .into_iter()
        .find(|rate| is_measured(*rate))
        .unwrap_or(p.prefill_tokens_per_s_default.max(1.0))
}

/// Whether a rate is one, and makes sense.
pub(crate) fn is_measured(tokens_per_s: f64) -> bool {
    tokens_per_s.is_finite() && tokens_per_s >= 1.0
}

/// What everybody waits longer who comes until the node has caught up, in all: while the queue and
/// this request's own work last, each of those is late by that work, and a busy node catches up
/// slower. This is the difference that one request makes to the waiting in an M/G/1 queue.
/// A node counts as visited at least as often as the others: one that serves slowly sees few
/// requests because its sessions wait, and would otherwise look like a quiet place.
fn behind_ms(
    node: &NodeView,
    fleet: &FleetView,
    (queue_ms, own_ms): (f64, f64),
    p: &Params,
) -> f64 {
    let idle = 1.0 - node.busy_share.clamp(0.0, 0.95);
    let arrivals_per_s = node.arrivals_per_s.max(fleet.arrivals_per_s).max(0.0);
    let per_s = (arrivals_per_s / idle).min(p.behind_per_s_max);
    own_ms * (queue_ms + own_ms / 2.0) / 1000.0 * per_s
}

/// What the streams of a node lose by a prompt that is computed between their steps, where another
/// node could compute it. A node that answers for others is about to get at least one more.
fn stall_ms(node: &NodeView, fleet: &FleetView, own_ms: f64) -> f64 {
    let streams = match (fleet.splits, node.role) {
        (Splits::No, _) => return 0.0,
        (Splits::Yes, Role::Decode) => node.decoding_requests.saturating_add(1),
        (Splits::Yes, Role::Mixed | Role::Prefill) => node.decoding_requests,
    };
    own_ms * to_f64(streams)
}

/// How long the request waits until others have given back the blocks that it needs: as long as a
/// request keeps its blocks, times the share of the pool that is missing.
fn pool_wait_ms(request: &RequestView, node: &NodeView, p: &Params) -> f64 {
    if node.pool_blocks == 0 {
        return 0.0;
    }
    let pool = to_f64(node.pool_blocks);
    let over = to_f64(node.pool_used_blocks) + to_f64(wanted_blocks(request)) - p.pool_share * pool;
    p.pool_wait_ms * (over / pool).clamp(0.0, 1.0)
}

/// Tokens that the request's new blocks push out and that are missed: fewer, the longer ago they
/// were used.
fn displaced_live(request: &RequestView, node: &NodeView, uncached: u64, p: &Params) -> f64 {
    let new = uncached.saturating_add(request.output_tokens_expected);
    to_f64(new) * (-node.kept_ms.max(0.0) / p.live_fade_ms.max(1.0)).exp()
}

/// Blocks that prompt and answer take.
fn wanted_blocks(request: &RequestView) -> u64 {
    request
        .prompt_tokens
        .saturating_add(request.output_tokens_expected)
        .div_ceil(BLOCK_TOKENS_U64)
}

/// Token counts are far below 2^53, where this is exact.
#[expect(
    clippy::cast_precision_loss,
    reason = "token counts are far below 2^53"
)]
pub(crate) fn to_f64(tokens: u64) -> f64 {
    tokens as f64
}

/// A count of tokens or blocks from a share of one; below 0 is 0.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the cast saturates, which is what is wanted"
)]
pub(crate) fn to_tokens(share: f64) -> u64 {
    share as u64
}

#[cfg(test)]
mod tests;
