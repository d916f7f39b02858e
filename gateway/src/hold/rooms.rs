//! What does the gate see of a fleet and of a turn?

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use cache_index::ids::NodeId;
use cache_index::tiers::Tiers;
use policies::hold::served::BLOCK_TOKENS;
use policies::hold::{Footprint, NodeRoom, Place, Turn, capacity_blocks};
use policies::view::{NodeState, Role};

use crate::fleet::{Fleet, Node};
use crate::route::Chosen;
use crate::turn::Job;

/// A node with so many times less ahead than another is worth choosing anew for.
const MUCH_LESS: f64 = 4.0;

/// The node with the least prefill ahead among those where a turn may go.
pub(super) fn idlest<'a>(rooms: &'a [NodeRoom], place: &Place) -> Option<&'a NodeRoom> {
    let allowed = rooms.iter().filter(|room| place.allows(room.node));
    allowed.min_by(|a, b| a.queue_ms.total_cmp(&b.queue_ms))
}

/// The turn's own node, or another that has much less ahead: the turn chooses anew then, and its
/// cache counts there.
pub(super) fn own_or_idler(rooms: &[NodeRoom], own: u64) -> u64 {
    let Some(at_own) = rooms.iter().find(|room| room.node == own) else {
        return own;
    };
    match idlest(rooms, &Place::Anywhere) {
        Some(idlest) if idlest.queue_ms * MUCH_LESS < at_own.queue_ms => idlest.node,
        _ => own,
    }
}

pub(super) fn serves(node: &Node, model: &str) -> bool {
    node.model().is_some_and(|served| *served == *model)
}

/// Whether the node takes turns of this model now: one that is gone, drains or is kept away from looks
/// idle, and has room for nobody.
pub(super) fn takes(node: &Node, model: &str) -> bool {
    serves(node, model) && node.state() == NodeState::Up
}

/// Nodes under the numbers that the gate knows them by, and what their pools hold in blocks of 512
/// tokens. Every turn asks for all nodes, so neither is searched for.
#[derive(Default)]
pub(super) struct Numbered {
    ids: Vec<NodeId>,
    known: HashMap<NodeId, Known>,
}

#[derive(Clone, Copy)]
struct Known {
    number: u64,
    /// 0 where it is not known.
    capacity_blocks: u64,
}

impl Numbered {
    /// A node's number; a new one where it has none.
    pub(super) fn number(&mut self, node: &NodeId) -> u64 {
        self.known(node).number
    }

    /// The node of a number that [`Self::number`] gave.
    pub(super) fn named(&self, number: u64) -> &NodeId {
        &self.ids[usize::try_from(number).unwrap_or(usize::MAX)]
    }

    /// What is known of pools from now on; nothing of those that are not named.
    pub(super) fn set_capacities(&mut self, all: impl Iterator<Item = (NodeId, u64)>) {
        for known in self.known.values_mut() {
            known.capacity_blocks = 0;
        }
        for (node, blocks) in all {
            self.known(&node).capacity_blocks = blocks;
        }
    }

    /// A node as the gate sees it.
    pub(super) fn room(&mut self, node: &NodeId, queue_ms: f64) -> NodeRoom {
        let known = self.known(node);
        NodeRoom {
            node: known.number,
            capacity_blocks: known.capacity_blocks,
            queue_ms,
        }
    }

    fn known(&mut self, node: &NodeId) -> &mut Known {
        self.known.entry(node.clone()).or_insert_with(|| {
            self.ids.push(node.clone());
            Known {
                number: self.ids.len() as u64 - 1,
                capacity_blocks: 0,
            }
        })
    }
}

pub(super) fn turn(id: u64, job: &Job<'_>, first: &Chosen, returns: bool) -> Turn {
    let mut hasher = DefaultHasher::new();
    job.identity.tenant.id.as_str().hash(&mut hasher);
    // The node that is to compute the prompt.
    let node = first.decision.prefill_node();
    let mut candidates = first.decision.prefill_candidates().iter();
    let candidate = candidates.find(|candidate| candidate.node == *node);
    Turn {
        id,
        tenant: hasher.finish(),
        session: job.session.id.key,
        work_ms: candidate.map_or(0.0, |candidate| {
            candidate.terms.prefill_ms + candidate.terms.fetch_ms
        }),
        returns,
        footprint: Footprint {
            blocks: job.log_blocks.clone(),
            tokens: job.prompt.tokens,
        },
    }
}

/// The prefill ahead at each node that takes prompts of a model; those that only answer do so
/// where there is no other.
pub(super) fn queues(fleet: &Fleet, model: &str) -> HashMap<NodeId, f64> {
    let nodes = fleet.nodes();
    let queue = |node: &Arc<Node>| {
        let view = node.view(Tiers::default());
        let measured = view.prefill_tokens_per_s;
        let rate = if measured >= 1.0 {
            measured
        } else {
            policies::pick::Params::default().prefill_tokens_per_s_default
        };
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53 tokens")]
        let tokens = view.inflight_prefill_tokens as f64;
        (node.id.clone(), tokens * 1000.0 / rate)
    };
    let serving = nodes.iter().filter(|node| takes(node, model));
    let has_others = serving.clone().any(|node| node.duty.role != Role::Decode);
    let computes = |node: &&Arc<Node>| !(has_others && node.duty.role == Role::Decode);
    serving.filter(computes).map(queue).collect()
}

/// What a node keeps of the sessions that it serves, in the gate's blocks; 0 where it is not known.
pub(super) fn kept_blocks(node: &Node) -> u64 {
    /// Blocks of 16 tokens in one of the gate's.
    const PER: u64 = BLOCK_TOKENS / cache_index::block::BLOCK_TOKENS as u64;
    let facts = node.facts();
    let view = node.view(Tiers::default());
    let prefill_ms_per_token = match view.prefill_tokens_per_s {
        rate if rate > 0.0 => 1000.0 / rate,
        // Nobody knows yet whether a tier is quicker.
        _ => 0.0,
    };
    let tiers = facts.tiers.for_gate(view.fetch_ms_per_block, PER);
    capacity_blocks(facts.pool_blocks / PER, &tiers, prefill_ms_per_token)
}
