//! The product's router with its gate: turns are held, ordered and refused as `policies::hold` says.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use cache_index::block::BlockHash;
use policies::hold::capacity_blocks;
use policies::hold::served::BLOCK_TOKENS;
use policies::hold::{Footprint, Gate, NodeRoom, Params, Place, Room, Start, Turn, Verdict};
use policies::pick::{Candidate, Decision, Terms};
use policies::view::SessionKey;

use super::Homing;
use crate::engine::Node;
use crate::router::{Answer, Ask, Change, Router};

/// An [`Ask`] that outlives its moment.
#[derive(Debug)]
struct Kept {
    id: u32,
    session: u64,
    region: usize,
    prompt_tokens: u32,
    output_tokens: u32,
    blocks: Arc<[u32]>,
    chain: Arc<[BlockHash]>,
}

impl Kept {
    fn of(ask: &Ask<'_>, chain: Arc<[BlockHash]>) -> Self {
        let Ask {
            id,
            session,
            region,
            prompt_tokens,
            output_tokens,
            blocks,
        } = *ask;
        Self {
            id,
            session,
            region,
            prompt_tokens,
            output_tokens,
            blocks: blocks.into(),
            chain,
        }
    }

    fn ask(&self) -> Ask<'_> {
        Ask {
            id: self.id,
            session: self.session,
            region: self.region,
            prompt_tokens: self.prompt_tokens,
            output_tokens: self.output_tokens,
            blocks: &self.blocks,
        }
    }
}

/// A router behind a gate.
#[derive(Debug)]
pub struct Gated {
    homing: Homing,
    gate: Gate,
    held: HashMap<u64, Kept>,
    seen: HashSet<u64>,
}

impl Gated {
    /// A gate before this router.
    pub fn new(homing: Homing, params: Params) -> Self {
        Self {
            homing,
            gate: Gate::new(params),
            held: HashMap::new(),
            seen: HashSet::new(),
        }
    }
}

impl Gated {
    fn room(&self, now_ms: f64) -> Vec<NodeRoom> {
        let Homing { nodes, fleet, .. } = &self.homing;
        let room = |(number, known): (usize, &super::Known)| {
            let tokens = known.load.prefill_tokens(now_ms) as f64;
            let capacity = fleet.nodes[number].capacity_blocks;
            let rate = known.load.tokens_per_s().max(1.0);
            NodeRoom {
                node: number as u64,
                capacity_blocks: capacity_blocks(
                    capacity * fleet.block_tokens / BLOCK_TOKENS,
                    if self.homing.settings.reads_tiers {
                        &fleet.tiers
                    } else {
                        &[]
                    },
                    1000.0 / rate,
                ),
                queue_ms: tokens * 1000.0 / rate,
            }
        };
        nodes.iter().enumerate().map(room).collect()
    }
}

/// The chosen candidate's terms.
fn chosen(decision: &Decision) -> Option<&Terms> {
    let is_chosen = |candidate: &&Candidate| candidate.node == decision.node;
    let candidate = decision.candidates.iter().find(is_chosen)?;
    Some(&candidate.terms)
}

/// Sends a turn to the best node of those where it may go, if that is open.
fn start(
    homing: &mut Homing,
    gate: &Params,
    now_ms: f64,
    ((ask, chain), place): ((&Ask<'_>, &Arc<[BlockHash]>), &Place),
) -> Start {
    let offered: Vec<usize> = (0..homing.nodes.len())
        .filter(|node| place.allows(*node as u64))
        .collect();
    let Some(decided) = homing.decide_on(now_ms, ask, Arc::clone(chain), &offered) else {
        return Start::Nowhere;
    };
    let node = homing.numbers.get(&decided.decision.node).copied();
    let (Some(terms), Some(node)) = (chosen(&decided.decision), node) else {
        return Start::Nowhere;
    };
    if terms.queue_ms > gate.node_queue_ms {
        return Start::Full(node as u64);
    }
    homing.dispatch(now_ms, ask, node, &decided);
    Start::Sent(node as u64)
}

fn node_of(started: Start) -> Option<usize> {
    match started {
        Start::Sent(node) => usize::try_from(node).ok(),
        Start::Full(_) | Start::Nowhere => None,
    }
}

impl Router for Gated {
    fn route(&mut self, now_ms: f64, ask: &Ask<'_>, nodes: &[Node]) -> Answer {
        if self.homing.fleet.handover.is_some() {
            // Nobody has one place where prompts and answers are computed apart.
            return self.homing.route(now_ms, ask, nodes);
        }
        let offered: Vec<usize> = (0..self.homing.nodes.len()).collect();
        let chain = self.homing.paths.chain(ask.blocks);
        let decided = self
            .homing
            .decide_on(now_ms, ask, Arc::clone(&chain), &offered);
        let b = self.homing.settings.params.b.max(0.1);
        let work_ms = decided
            .as_ref()
            .and_then(|decided| chosen(&decided.decision))
            .map_or(0.0, |terms| (terms.prefill_ms + terms.fetch_ms) / b);
        let turn = Turn {
            id: u64::from(ask.id),
            tenant: 0,
            session: SessionKey(u128::from(ask.session)),
            work_ms,
            returns: !self.seen.insert(ask.session),
            footprint: Footprint {
                blocks: ask.blocks.iter().map(|block| u64::from(*block)).collect(),
                tokens: u64::from(ask.prompt_tokens),
            },
        };
        let mut sent = None;
        let room = self.room(now_ms);
        let (homing, params) = (&mut self.homing, *self.gate.params());
        let room = Room { nodes: &room };
        let verdict = self.gate.arrive(now_ms, room, turn, |place| {
            let started = start(homing, &params, now_ms, ((ask, &chain), place));
            sent = node_of(started);
            started
        });
        match (verdict, sent) {
            (Verdict::Go, Some(node)) => Answer::Send(node),
            (Verdict::Refuse { retry_after_ms }, _) => Answer::Refuse { retry_after_ms },
            (Verdict::Hold | Verdict::Go, _) => {
                self.held.insert(u64::from(ask.id), Kept::of(ask, chain));
                Answer::Hold
            }
        }
    }

    fn changed(&mut self, now_ms: f64, node: usize, change: &Change<'_>) {
        self.homing.changed(now_ms, node, change);
    }

    fn computed(&mut self, now_ms: f64, id: u32, node: usize) {
        self.homing.computed(now_ms, id, node);
    }

    fn first_token(&mut self, now_ms: f64, id: u32, node: usize, cached_tokens: u32) {
        self.homing.first_token(now_ms, id, node, cached_tokens);
        self.gate.first_token(u64::from(id));
    }

    fn finished(&mut self, now_ms: f64, id: u32, node: usize, output_tokens: u32) {
        self.homing.finished(now_ms, id, node, output_tokens);
        self.gate.ended(now_ms, u64::from(id));
    }

    fn release(&mut self, now_ms: f64, _nodes: &[Node]) -> Vec<(u32, Answer)> {
        let mut sent = HashMap::new();
        let room = self.room(now_ms);
        let (homing, held, params) = (&mut self.homing, &self.held, *self.gate.params());
        let room = Room { nodes: &room };
        let done = self.gate.release(now_ms, room, |id, place| {
            let Some(kept) = held.get(&id) else {
                return Start::Nowhere;
            };
            let asked = (&kept.ask(), &kept.chain);
            let started = start(homing, &params, now_ms, (asked, place));
            if let Some(node) = node_of(started) {
                sent.insert(id, node);
            }
            started
        });
        let answers = done.into_iter().filter_map(|(id, verdict)| {
            let kept = self.held.remove(&id)?;
            let answer = match verdict {
                Verdict::Go => Answer::Send(*sent.get(&id)?),
                Verdict::Refuse { retry_after_ms } => Answer::Refuse { retry_after_ms },
                Verdict::Hold => Answer::Hold,
            };
            Some((kept.id, answer))
        });
        answers.collect()
    }

    fn wake_ms(&self) -> Option<f64> {
        self.gate.wake_ms()
    }
}
