//! Which node computes this prompt, and which one answers?
//!
//! Both are chosen together: a pair costs what its two halves cost ([`crate::cost`]), less the part
//! of the transfer that is hidden behind the prefill. Beside the pairs stand the nodes that can do
//! the whole turn: mixed ones, and those that answer, which compute a prompt themselves where little
//! of it is missing, where the pairs are dearer, or where nobody else can. A node that only computes
//! prompts does a whole turn where no other is left. The session's binding, the reason and the
//! treatment of costs that are as good as each other are those of one node.

use std::cmp::Ordering;

use cache_index::ids::NodeId;

use super::{COLD_LOAD_SLACK, Decision, Entry, NoNode, Params, Reason};
use super::{best, fleet_view, holds_much, priced, reason, suspected};
use crate::affinity::rendezvous;
use crate::cost::{Candidate, decode_leg, moved_bytes, moved_tokens, prefill_leg};
use crate::eligible::{Ineligible, check};
use crate::sample::sample;
use crate::view::{FleetView, NodeView, RequestView, Role, Splits};

/// Two nodes that share a turn.
#[derive(Clone, PartialEq, Debug)]
pub struct Pair {
    /// The one that computes the prompt.
    pub prefill: NodeId,
    /// The one that answers.
    pub decode: NodeId,
    /// Prompt tokens that the first is expected to read from its cache.
    pub cached_tokens: u64,
    /// Prompt tokens whose KV has to reach the second.
    pub moved_tokens: u64,
    /// The size of that KV.
    pub moved_bytes: f64,
    /// What of the transfer's time is hidden behind the prefill.
    pub hidden_ms: f64,
    /// Both halves' costs, less that.
    pub cost_ms: f64,
}

/// What was looked at for the two halves of a turn.
#[derive(Clone, PartialEq, Debug)]
pub struct Legs {
    /// Every node that was looked at for computing the prompt.
    pub prefill: Vec<Candidate>,
    /// Every node that was looked at for answering from it.
    pub decode: Vec<Candidate>,
    /// The cheapest pair; none where too little is missing on every node that answers.
    pub cheapest: Option<Pair>,
    /// The pair that takes the turn; none where one node does all of it.
    pub chosen: Option<Pair>,
}

/// Chooses among nodes of which some do only a part of a turn.
pub(super) fn decide(
    req: &RequestView,
    nodes: &[NodeView],
    p: &Params,
) -> Result<Decision, NoNode> {
    let mut refused = Vec::new();
    let mut able = Vec::with_capacity(nodes.len());
    for view in nodes {
        match check(req, view) {
            Ok(()) => able.push(view),
            Err(why) => refused.push((view.id.clone(), why)),
        }
    }
    let mut sides = Sides::of(req, &able);
    if sides.is_empty() {
        able.extend(suspected(nodes, &mut refused));
        sides = Sides::of(req, &able);
    }
    if sides.is_empty() {
        // Slow company for answers, and better than none.
        let can = |view: &&&NodeView| view.role == Role::Prefill && !view.needs_partner;
        sides.whole = able.iter().filter(can).copied().collect();
    }
    for view in able.iter().filter(|view| !sides.have(view)) {
        let why = Ineligible::NoPartner { role: view.role };
        refused.push((view.id.clone(), why));
    }
    let looked = Looked::at(req, &sides, &able, p);
    let Some(outcome) = looked.choose(req, p) else {
        return Err(NoNode { reasons: refused });
    };
    Ok(looked.decision(outcome, refused))
}

/// Nodes by what they can do for this request.
#[derive(Default)]
struct Sides<'a> {
    prefill: Vec<&'a NodeView>,
    decode: Vec<&'a NodeView>,
    whole: Vec<&'a NodeView>,
}

impl<'a> Sides<'a> {
    fn of(req: &RequestView, able: &[&'a NodeView]) -> Self {
        let of_role = |role: Role| {
            able.iter()
                .copied()
                .filter(move |view| req.splits == Splits::Yes && view.role == role)
        };
        let with_partner = |role: Role, other: Role| {
            let has_partner =
                move |view: &&NodeView| of_role(other).any(|partner| understand(view, partner));
            of_role(role).filter(has_partner).collect()
        };
        let whole = |view: &&&NodeView| view.role != Role::Prefill && !view.needs_partner;
        Self {
            prefill: with_partner(Role::Prefill, Role::Decode),
            decode: with_partner(Role::Decode, Role::Prefill),
            whole: able.iter().filter(whole).copied().collect(),
        }
    }

    /// Whether nobody can take the request.
    fn is_empty(&self) -> bool {
        self.whole.is_empty() && self.prefill.is_empty()
    }

    fn have(&self, view: &NodeView) -> bool {
        let Self {
            prefill,
            decode,
            whole,
        } = self;
        let mut all = prefill.iter().chain(decode).chain(whole);
        all.any(|other| other.id == view.id)
    }
}

/// Whether one can take over what the other has computed.
fn understand(a: &NodeView, b: &NodeView) -> bool {
    match (a.handover, b.handover) {
        (Some(a), Some(b)) => a.protocol == b.protocol,
        _ => false,
    }
}

/// What was looked at, with its costs.
struct Looked<'a> {
    whole: Vec<Entry<'a>>,
    prefill: Vec<Entry<'a>>,
    decode: Vec<Entry<'a>>,
    passed_over: usize,
}

/// What takes the turn.
#[derive(Clone, Copy)]
enum Choice<'l, 'a> {
    Whole(&'l Entry<'a>),
    Pair(Both<'l, 'a>),
}

/// Two halves and what they cost together.
#[derive(Clone, Copy)]
struct Both<'l, 'a> {
    prefill: &'l Entry<'a>,
    decode: &'l Entry<'a>,
    hidden_ms: f64,
    cost_ms: f64,
}

/// The choice, apart from what was looked at.
struct Outcome {
    node: NodeId,
    reason: Reason,
    expected_cached_tokens: u64,
    cheapest: Option<Pair>,
    chosen: Option<Pair>,
}

impl<'a> Looked<'a> {
    fn at(req: &RequestView, sides: &Sides<'a>, able: &[&NodeView], p: &Params) -> Self {
        let splits = if sides.prefill.is_empty() {
            Splits::No
        } else {
            Splits::Yes
        };
        let all = fleet_view(able);
        let fleet = |side: &[&NodeView]| {
            let own = fleet_view(side);
            // Nodes that never compute a prompt have no rate of their own; another's is closer to it
            // than a default.
            let rates = [own.prefill_tokens_per_s, all.prefill_tokens_per_s];
            let rate = rates.into_iter().find(|rate| *rate > 0.0);
            FleetView {
                prefill_tokens_per_s: rate.unwrap_or(0.0),
                splits,
                ..own
            }
        };
        let (whole, mut passed_over) = priced(req, &sides.whole, &fleet(&sides.whole), p);
        let mut leg =
            |side: &[&'a NodeView],
             price: fn(&RequestView, &NodeView, &FleetView, &Params) -> Candidate| {
                let (fleet, sampled) = (fleet(side), sample(req, side, &p.sample));
                passed_over += side.len() - sampled.len();
                let entry = |at: usize| Entry {
                    candidate: price(req, side[at], &fleet, p),
                    view: side[at],
                };
                sampled.into_iter().map(entry).collect()
            };
        Self {
            prefill: leg(&sides.prefill, prefill_leg),
            decode: leg(&sides.decode, decode_leg),
            whole,
            passed_over,
        }
    }

    /// All pairs that are worth two requests.
    fn pairs(&self, req: &RequestView, p: &Params) -> Vec<Both<'_, 'a>> {
        let is_worth_it = |view: &NodeView| {
            view.needs_partner || moved_tokens(req, view) >= p.split_tokens_min.max(1)
        };
        let mut pairs = Vec::new();
        for decode in self.decode.iter().filter(|entry| is_worth_it(entry.view)) {
            for prefill in &self.prefill {
                if understand(prefill.view, decode.view) {
                    pairs.push(Both::of(prefill, decode, p));
                }
            }
        }
        pairs
    }

    fn choose(&self, req: &RequestView, p: &Params) -> Option<Outcome> {
        let pairs = self.pairs(req, p);
        let cheapest = cheapest(req, pairs.iter().copied());
        let choices = [
            best(req, &self.whole, p).map(Choice::Whole),
            cheapest.map(Choice::Pair),
        ];
        let mut choice = cheaper(choices)?;
        if let Some(bound) = &req.bound
            && choice.node() != bound
        {
            let here = |view: &NodeView| view.id == *bound;
            let mut whole = self.whole.iter();
            let pairs = pairs.iter().copied().filter(|both| here(both.decode.view));
            let stay = cheaper([
                whole.find(|entry| here(entry.view)).map(Choice::Whole),
                self::cheapest(req, pairs).map(Choice::Pair),
            ]);
            let stay =
                stay.filter(|stay| !p.affinity.worth_moving(stay.cost_ms(), choice.cost_ms()));
            choice = stay.unwrap_or(choice);
        }
        let of = self.whole.len() + pairs.len();
        let (much, expected_cached_tokens, chosen) = match choice {
            Choice::Whole(entry) => {
                let cached = entry.candidate.cached_tokens;
                (holds_much(req, entry, p), cached, None)
            }
            Choice::Pair(both) => {
                let much = [both.prefill, both.decode].map(|half| holds_much(req, half, p));
                let pair = both.named(req);
                (much.contains(&true), pair.cached_tokens, Some(pair))
            }
        };
        Some(Outcome {
            node: choice.node().clone(),
            reason: reason(req, choice.node(), of, much),
            expected_cached_tokens,
            cheapest: cheapest.map(|both| both.named(req)),
            chosen,
        })
    }

    fn decision(self, outcome: Outcome, refused: Vec<(NodeId, Ineligible)>) -> Decision {
        let Self {
            whole,
            prefill,
            decode,
            passed_over,
        } = self;
        let Outcome {
            node,
            reason,
            expected_cached_tokens,
            cheapest,
            chosen,
        } = outcome;
        let candidates = |entries: Vec<Entry<'_>>| -> Vec<Candidate> {
            let candidates = entries.into_iter().map(|entry| entry.candidate);
            candidates.collect()
        };
        let legs = (!prefill.is_empty()).then(|| Legs {
            prefill: candidates(prefill),
            decode: candidates(decode),
            cheapest,
            chosen,
        });
        Decision {
            node,
            reason,
            expected_cached_tokens,
            candidates: candidates(whole),
            legs,
            passed_over,
            refused,
        }
    }
}

impl<'l, 'a> Both<'l, 'a> {
    fn of(prefill: &'l Entry<'a>, decode: &'l Entry<'a>, p: &Params) -> Self {
        let overlaps = [prefill, decode].map(|half| {
            let handover = half.view.handover;
            handover.is_some_and(|handover| handover.overlaps_prefill)
        });
        let own_ms = prefill.candidate.terms.prefill_ms / p.b.max(f64::MIN_POSITIVE);
        let hidden_ms = match overlaps {
            [true, true] => own_ms.min(decode.candidate.terms.transfer_ms).max(0.0),
            _ => 0.0,
        };
        Self {
            prefill,
            decode,
            hidden_ms,
            cost_ms: prefill.candidate.cost_ms + decode.candidate.cost_ms - hidden_ms,
        }
    }

    fn named(&self, req: &RequestView) -> Pair {
        Pair {
            prefill: self.prefill.view.id.clone(),
            decode: self.decode.view.id.clone(),
            cached_tokens: self.prefill.candidate.cached_tokens,
            moved_tokens: moved_tokens(req, self.decode.view),
            moved_bytes: moved_bytes(req, self.decode.view),
            hidden_ms: self.hidden_ms,
            cost_ms: self.cost_ms,
        }
    }
}

impl Choice<'_, '_> {
    /// The node that answers.
    fn node(&self) -> &NodeId {
        match self {
            Self::Whole(entry) => &entry.view.id,
            Self::Pair(both) => &both.decode.view.id,
        }
    }

    fn cost_ms(&self) -> f64 {
        match self {
            Self::Whole(entry) => entry.candidate.cost_ms,
            Self::Pair(both) => both.cost_ms,
        }
    }
}

/// The one that costs less; the first where both cost the same.
fn cheaper<'l, 'a>(choices: [Option<Choice<'l, 'a>>; 2]) -> Option<Choice<'l, 'a>> {
    let choices = choices.into_iter().flatten();
    choices.min_by(|a, b| a.cost_ms().total_cmp(&b.cost_ms()))
}

/// The lowest cost. For a session that is not bound yet, pairs are equally good whose costs differ
/// by little beside the prompt's prefill, as in [`super::cheapest`]: of these, the one whose second
/// node has the fewest tokens to produce.
fn cheapest<'l, 'a: 'l>(
    req: &RequestView,
    pairs: impl Iterator<Item = Both<'l, 'a>> + Clone,
) -> Option<Both<'l, 'a>> {
    let lowest = pairs.clone().min_by(|a, b| {
        let by_cost = a.cost_ms.total_cmp(&b.cost_ms);
        by_cost.then_with(|| tie_break(req, a, b))
    })?;
    if req.bound.is_some() {
        return Some(lowest);
    }
    let slack = COLD_LOAD_SLACK * lowest.prefill.candidate.terms.prefill_ms.max(0.0);
    let as_good = pairs.filter(|both| both.cost_ms <= lowest.cost_ms + slack);
    as_good.min_by(|a, b| tie_break(req, a, b)).or(Some(lowest))
}

/// Fewer tokens to produce, then fewer bound sessions, then less to move although nobody waits for
/// it, then the session's own order of nodes.
fn tie_break(req: &RequestView, a: &Both<'_, '_>, b: &Both<'_, '_>) -> Ordering {
    let key = |both: &Both<'_, '_>| {
        let (prefill, decode) = (both.prefill.view, both.decode.view);
        (
            decode.inflight_decode_tokens,
            decode.bound_sessions,
            moved_tokens(req, decode),
            u64::MAX - rendezvous(req.session, &decode.id),
            u64::MAX - rendezvous(req.session, &prefill.id),
        )
    };
    key(a).cmp(&key(b))
}

#[cfg(test)]
mod tests;
