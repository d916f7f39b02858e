//! What does a decision see? Snapshots: of one request, and of every node at that instant.
//!
//! Plain values with public fields, because any value is right: a stale or absurd one makes a
//! worse choice, never a wrong answer. Regions are already here as a name and a round trip, so
//! that a fleet in several of them needs no other type.

use cache_index::ids::NodeId;
use cache_index::tiers::Tiers;

/// The name of an agent conversation, hashed by the gateway from tenant and session header.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct SessionKey(pub u128);

/// Whether a node takes new work.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NodeState {
    /// Healthy.
    Up,
    /// Its health check or its last connections failed.
    Down {
        /// What failed, for the log and the explanation.
        why: String,
    },
    /// It finishes what it has and takes nothing new.
    Draining,
    /// Its circuit breaker keeps requests away for a while.
    BreakerOpen,
}

/// What a node does for a turn, where prompts and answers are computed on separate nodes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Role {
    /// Computes prompts and answers.
    #[default]
    Mixed,
    /// Computes prompts, for others to answer.
    Prefill,
    /// Answers, from prompts that others have computed.
    Decode,
}

impl Role {
    /// Its name in configuration, logs and explanations.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Mixed => "mixed",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// How a node hands KV over, or takes it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Handover {
    /// Only nodes that speak the same one understand each other.
    pub protocol: &'static str,
    /// Size of one token's KV; 0 where it is not known.
    pub bytes_per_token: f64,
    /// How fast it arrives there, measured or assumed; 0 where nothing is known.
    pub bytes_per_s: f64,
    /// Whether KV travels while the prompt is still being computed.
    pub overlaps_prefill: bool,
}

/// One node at the instant of a decision, as seen by one request.
#[derive(Clone, PartialEq, Debug)]
pub struct NodeView {
    /// Its name.
    pub id: NodeId,
    /// Where it stands.
    pub region: String,
    /// Whether it takes new work.
    pub state: NodeState,
    /// Network round trip from this gateway.
    pub round_trip_ms: f64,
    /// Uncached prompt tokens that were sent there and are not computed yet, each weighted with its
    /// context ([`crate::load::weighted_tokens`]); what is to be fetched from slower tiers first counts as
    /// the tokens that could be computed meanwhile.
    pub inflight_prefill_tokens: u64,
    /// Output tokens that its running requests are still expected to produce.
    pub inflight_decode_tokens: u64,
    /// Measured prefill rate; 0 where nothing has been measured yet.
    pub prefill_tokens_per_s: f64,
    /// Context at which a token costs twice what one without context costs; 0 where that is not
    /// known: then context costs nothing.
    pub context_doubles_tokens: f64,
    /// Size of its KV pool in blocks of 16 tokens; 0 where it is not known.
    pub pool_blocks: u64,
    /// Of these, the blocks that running requests hold.
    pub pool_used_blocks: u64,
    /// Leading blocks of this request's prompt that its device holds, or will hold once it has done
    /// what is in flight there.
    pub overlap_blocks: usize,
    /// Leading blocks that it holds if it reads its slower tiers as well; what is below
    /// `overlap_blocks` says nothing.
    pub overlap_tiers: Tiers,
    /// What fetching from those costs.
    pub fetch_ms_per_block: FetchCosts,
    /// Its own block size in tokens, to which it rounds reuse down; 16 for our engine.
    pub node_block_tokens: u64,
    /// Most tokens that a prompt and its answer may have together; 0 where it is not known.
    pub context_max: u64,
    /// Sessions whose binding names this node: the memory of recent placements, which in-flight
    /// tokens lose as soon as a turn ends.
    pub bound_sessions: u64,
    /// Requests lately sent there, in a second.
    pub arrivals_per_s: f64,
    /// Share of its time that it lately spent on prefill, 0 to 1.
    pub busy_share: f64,
    /// How long ago that was last used which this request's prompt would push out of the caches of
    /// other sessions there ([`crate::working_set`]); infinite where there is room or nothing is
    /// known.
    pub kept_ms: f64,
    /// What it does for a turn.
    pub role: Role,
    /// How it hands KV over or takes it; none where it cannot (now).
    pub handover: Option<Handover>,
    /// It answers nothing by itself: a prompt has to come from, or go to, another node.
    pub needs_partner: bool,
    /// Requests there that produce tokens.
    pub decoding_requests: u64,
}

/// Milliseconds to bring a block of 16 tokens to the device, by where it lies; 0 where that is not
/// known or there is no such tier: then it is not counted on.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct FetchCosts {
    /// From host memory.
    pub host_ms: f64,
    /// From a local drive.
    pub disk_ms: f64,
    /// From a store that nodes share.
    pub shared_ms: f64,
}

/// What a decision must know of all nodes together.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct FleetView {
    /// Requests lately sent to a node, in a second, as a mean over the nodes.
    pub arrivals_per_s: f64,
    /// Prefill rate of the nodes that have one measured, as their mean; 0 where none has.
    pub prefill_tokens_per_s: f64,
    /// Whether this request's prompt could be computed on a node that answers nobody.
    pub splits: Splits,
}

/// Whether a request's prompt and answer can be computed on separate nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Splits {
    /// They can.
    Yes,
    /// They cannot, or there are no such nodes.
    #[default]
    No,
}

/// One request at the instant of a decision.
#[derive(Clone, PartialEq, Debug)]
pub struct RequestView {
    /// All tokens of the prompt.
    pub prompt_tokens: u64,
    /// Predicted length of the answer.
    pub output_tokens_expected: u64,
    /// The conversation it belongs to.
    pub session: SessionKey,
    /// The node that served the session's last turn.
    pub bound: Option<NodeId>,
    /// Nodes that this request must not be sent to again.
    pub excluded: Vec<NodeId>,
    /// Whether its prompt may be computed on one node and its answer on another.
    pub splits: Splits,
}
