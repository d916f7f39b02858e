//! Which node gets this request, and why?
//!
//! The cheapest eligible node by [`crate::cost`]; where there are many, the cheapest of those worth
//! looking at ([`crate::sample`]). Two refinements: a bound session moves only for a clear gain
//! ([`crate::affinity`]), and a cold session (no usable binding, and nobody holds a relevant part of
//! its prompt) goes to the least loaded of the nearest nodes: the cost without its own prefill, which
//! is the same everywhere. Ties go to the node with the fewest bound
//! sessions, then to the session's rendezvous order, so that every gateway decides alike. Where
//! prompts and answers are computed on separate nodes, two of them are chosen together (`pair`).
//! The decision is a value: nothing is reserved, and every candidate's terms are in it.

use std::cmp::Ordering;
use std::fmt;

use cache_index::ids::NodeId;

use crate::affinity::rendezvous;
pub use crate::cost::{Candidate, Params, Terms};
use crate::cost::{candidate, is_measured, to_f64};
use crate::eligible::{Ineligible, check};
use crate::sample::sample;
use crate::view::{FleetView, NodeView, RequestView, Role, Splits};

mod pair;

pub use pair::{Legs, Pair};

/// Why the node was chosen; a closed set, shown to clients and used as a metric label.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Reason {
    /// The request has failed elsewhere before.
    Retry,
    /// It is the node that the session is bound to.
    Session,
    /// It is the only eligible node.
    Only,
    /// It is the cheapest, and holds a relevant part of the prompt.
    Prefix,
    /// Nobody holds a relevant part of the prompt: the least loaded.
    LeastLoaded,
}

impl Reason {
    /// Its name in headers, logs and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Retry => "retry",
            Self::Session => "session",
            Self::Only => "only",
            Self::Prefix => "prefix",
            Self::LeastLoaded => "least-loaded",
        }
    }
}

/// A choice and its explanation.
#[derive(Clone, PartialEq, Debug)]
pub struct Decision {
    /// The chosen node.
    pub node: NodeId,
    /// Why it was chosen.
    pub reason: Reason,
    /// Prompt tokens it is expected to read from cache.
    pub expected_cached_tokens: u64,
    /// Every node that was looked at for the whole turn with its terms, in the order given.
    pub candidates: Vec<Candidate>,
    /// What was looked at for its two halves; none where they cannot be apart.
    pub legs: Option<Legs>,
    /// Nodes that could have taken it and were not looked at, because there are many.
    pub passed_over: usize,
    /// Every other node, with the reason.
    pub refused: Vec<(NodeId, Ineligible)>,
}

impl Decision {
    /// The two nodes that share the turn, where they are two; `node` is the one that answers.
    pub fn pair(&self) -> Option<&Pair> {
        self.legs.as_ref()?.chosen.as_ref()
    }

    /// The node that computes the prompt.
    pub fn prefill_node(&self) -> &NodeId {
        self.pair().map_or(&self.node, |pair| &pair.prefill)
    }

    /// What the node that computes the prompt is expected to fetch from slower tiers.
    pub fn fetched(&self) -> Fetched {
        let node = self.prefill_node();
        let mut looked_at = self.prefill_candidates().iter();
        let chosen = looked_at.find(|candidate| candidate.node == *node);
        chosen.map_or(Fetched::default(), |candidate| Fetched {
            tokens: candidate.fetched_tokens,
            ms: candidate.fetched_ms,
        })
    }

    /// The nodes that were looked at for computing the prompt, as the turn is to be carried out.
    pub fn prefill_candidates(&self) -> &[Candidate] {
        match &self.legs {
            Some(legs) if legs.chosen.is_some() => &legs.prefill,
            _ => &self.candidates,
        }
    }
}

/// What a node fetches from its slower tiers before it computes the rest of a prompt.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Fetched {
    /// Prompt tokens that are expected to come from there.
    pub tokens: u64,
    /// How long that is expected to take.
    pub ms: f64,
}

/// No node can take the request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NoNode {
    /// Each node with its reason; empty where there are no nodes at all.
    pub reasons: Vec<(NodeId, Ineligible)>,
}

impl NoNode {
    /// The largest context among the nodes, if the prompt fits none of them: then trying again is
    /// pointless, and the client must be told the limit instead.
    pub fn context_max(&self) -> Option<u64> {
        let limit = |(_, reason): &(NodeId, Ineligible)| match reason {
            Ineligible::ContextTooSmall { max, .. } => Some(*max),
            _ => None,
        };
        let limits: Option<Vec<u64>> = self.reasons.iter().map(limit).collect();
        limits?.into_iter().max()
    }
}

impl fmt::Display for NoNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.reasons.is_empty() {
            return f.write_str("no node serves this model");
        }
        f.write_str("no node can take the request")?;
        self.reasons
            .iter()
            .try_for_each(|(node, reason)| write!(f, "; {node}: {reason}"))
    }
}

impl std::error::Error for NoNode {}

/// Nodes whose loads differ by less than this share of a cold request's prefill term (`b` times its
/// own prefill, so about a tenth of that) are equally good places for it; the one with the fewest
/// sessions gets it.
const COLD_LOAD_SLACK: f64 = 0.03;

/// A candidate together with the node it was computed from.
struct Entry<'a> {
    candidate: Candidate,
    view: &'a NodeView,
}

/// Chooses a node for `req` among `nodes`, or two that share it.
pub fn decide(req: &RequestView, nodes: &[NodeView], p: &Params) -> Result<Decision, NoNode> {
    if nodes.iter().any(|node| node.role != Role::Mixed) {
        return pair::decide(req, nodes, p);
    }
    let mut able = Vec::with_capacity(nodes.len());
    let mut refused = Vec::new();
    for view in nodes {
        match check(req, view) {
            Ok(()) => able.push(view),
            Err(reason) => refused.push((view.id.clone(), reason)),
        }
    }
    if able.is_empty() {
        able = suspected(nodes, &mut refused);
    }
    let fleet = fleet_view(&able);
    let (mut entries, passed_over) = priced(req, &able, &fleet, p);
    crowd(req, &mut entries, p);
    let Some(chosen) = best(req, &entries, p) else {
        return Err(NoNode { reasons: refused });
    };
    let reason = reason(req, &chosen.view.id, able.len(), holds_much(req, chosen, p));
    let (node, expected_cached_tokens) = (chosen.view.id.clone(), chosen.candidate.cached_tokens);
    let candidates = entries.into_iter().map(|entry| entry.candidate).collect();
    Ok(Decision {
        node,
        reason,
        expected_cached_tokens,
        candidates,
        legs: None,
        passed_over,
        refused,
    })
}

/// The node of the session; else, where none holds a relevant part of the prompt, the least loaded;
/// else the cheapest.
fn best<'a, 'b>(req: &RequestView, entries: &'a [Entry<'b>], p: &Params) -> Option<&'a Entry<'b>> {
    let bound = entries
        .iter()
        .find(|entry| Some(&entry.view.id) == req.bound.as_ref());
    if bound.is_none() && !entries.iter().any(|entry| holds_much(req, entry, p)) {
        return least_loaded(req, entries, p);
    }
    cheapest(req, entries, bound).map(|best| stay_or_move(bound, best, p))
}

/// Whether the node holds a relevant part of the prompt.
fn holds_much(req: &RequestView, entry: &Entry<'_>, p: &Params) -> bool {
    let relevant = p.cold_overlap_share * to_f64(req.prompt_tokens);
    entry.candidate.cached_tokens >= p.cold_overlap_tokens_min
        && to_f64(entry.candidate.cached_tokens) > relevant
}

/// Why a node was chosen to answer, out of so many.
fn reason(req: &RequestView, node: &NodeId, of: usize, holds_much: bool) -> Reason {
    if !req.excluded.is_empty() {
        Reason::Retry
    } else if req.bound.as_ref() == Some(node) {
        Reason::Session
    } else if of == 1 {
        Reason::Only
    } else if holds_much {
        Reason::Prefix
    } else {
        Reason::LeastLoaded
    }
}

/// What a decision must know of these nodes together.
fn fleet_view(able: &[&NodeView]) -> FleetView {
    let arrivals: f64 = able.iter().map(|view| view.arrivals_per_s).sum();
    let rates = able.iter().map(|view| view.prefill_tokens_per_s);
    let rates: Vec<f64> = rates.filter(|rate| is_measured(*rate)).collect();
    FleetView {
        arrivals_per_s: arrivals / to_f64(able.len().max(1) as u64),
        prefill_tokens_per_s: rates.iter().sum::<f64>() / to_f64(rates.len().max(1) as u64),
        splits: Splits::No,
    }
}

/// The nodes worth looking at with their costs, and how many others could take the request.
fn priced<'a>(
    req: &RequestView,
    able: &[&'a NodeView],
    fleet: &FleetView,
    p: &Params,
) -> (Vec<Entry<'a>>, usize) {
    let sampled = sample(req, able, &p.sample);
    let passed_over = able.len() - sampled.len();
    let entry = |at: usize| Entry {
        candidate: candidate(req, able[at], fleet, p),
        view: able[at],
    };
    (sampled.into_iter().map(entry).collect(), passed_over)
}

/// Adds what speaks against nodes that have many sessions already. A node that holds a prefix which
/// all new sessions share is the cheapest for each of them, and would gather them all: its queue
/// shows that only when their later turns come, and by then moving is dear.
fn crowd(req: &RequestView, entries: &mut [Entry<'_>], p: &Params) {
    let is_bound = |entry: &Entry<'_>| Some(&entry.view.id) == req.bound.as_ref();
    if entries.iter().any(is_bound) {
        return;
    }
    let cost = |entry: &Entry<'_>| entry.candidate.cost_ms;
    let Some(best) = lowest(req, entries.iter(), cost) else {
        return;
    };
    let turn_ms = best.candidate.terms.prefill_ms.max(0.0) / p.b.max(f64::MIN_POSITIVE);
    let fewest = entries.iter().map(|entry| entry.view.bound_sessions).min();
    for entry in entries {
        let beyond = entry.view.bound_sessions - fewest.unwrap_or(0);
        let crowd_ms = p.crowd * turn_ms * to_f64(beyond);
        entry.candidate.terms.crowd_ms = crowd_ms;
        entry.candidate.cost_ms += crowd_ms;
    }
}

/// The nodes that only their breaker keeps out, for when nobody else is left: a node that failed a
/// moment ago may answer, an answer of "no node" never does.
fn suspected<'a>(
    nodes: &'a [NodeView],
    refused: &mut Vec<(NodeId, Ineligible)>,
) -> Vec<&'a NodeView> {
    let only_breaker = |id: &NodeId| {
        refused
            .iter()
            .any(|(node, why)| node == id && *why == Ineligible::BreakerOpen)
    };
    let able = nodes.iter().filter(|view| only_breaker(&view.id)).collect();
    refused.retain(|(_, why)| *why != Ineligible::BreakerOpen);
    able
}

/// The bound node, unless `best` is clearly cheaper.
fn stay_or_move<'a, 'b>(
    bound: Option<&'a Entry<'b>>,
    best: &'a Entry<'b>,
    p: &Params,
) -> &'a Entry<'b> {
    match bound {
        Some(bound)
            if !p
                .affinity
                .worth_moving(bound.candidate.cost_ms, best.candidate.cost_ms) =>
        {
            bound
        }
        _ => best,
    }
}

/// The lowest cost. For a session that is not bound yet, nodes are equally good whose costs differ
/// by little beside its whole prompt's prefill: what learnt rates and measured distances differ by
/// would else send every new session with a prompt that all nodes hold to the same one.
fn cheapest<'a, 'b>(
    req: &RequestView,
    entries: &'a [Entry<'b>],
    bound: Option<&Entry<'_>>,
) -> Option<&'a Entry<'b>> {
    let cost = |entry: &Entry<'_>| entry.candidate.cost_ms;
    let best = lowest(req, entries.iter(), cost)?;
    if bound.is_some() {
        return Some(best);
    }
    let uncached = req
        .prompt_tokens
        .saturating_sub(best.candidate.cached_tokens);
    let whole = to_f64(req.prompt_tokens) / to_f64(uncached.max(1));
    let slack = COLD_LOAD_SLACK * whole * best.candidate.terms.prefill_ms.max(0.0);
    let most = cost(best) + slack;
    let as_good = entries.iter().filter(|entry| cost(entry) <= most);
    as_good
        .min_by(|a, b| tie_break(req, a.view, b.view))
        .or(Some(best))
}

/// The least loaded of the nodes that are about as near as the nearest: a cold session would
/// otherwise cross an ocean for an idle node, and again for every later turn. The load is the cost
/// without the request's own prefill: the trace of its prompt that a node may hold is what all
/// prompts begin with, and would gather all sessions there.
fn least_loaded<'a, 'b>(
    req: &RequestView,
    entries: &'a [Entry<'b>],
    p: &Params,
) -> Option<&'a Entry<'b>> {
    let distance = |entry: &Entry<'_>| entry.candidate.terms.round_trip_ms;
    let nearest = entries.iter().map(distance).min_by(f64::total_cmp)?;
    let reach = nearest + p.cold_round_trip_slack_ms.max(0.0);
    let nearby = entries.iter().filter(|entry| distance(entry) <= reach);
    // Among these, distance decides nothing: the one that happened to answer a health check faster
    // by a tenth of a millisecond would get every session while all are idle.
    let load = |entry: &Entry<'_>| {
        let terms = &entry.candidate.terms;
        entry.candidate.cost_ms - terms.prefill_ms - terms.round_trip_ms - terms.crowd_ms
    };
    // Nor does what two learnt rates differ by, as long as it is little beside the request's own work.
    let nearby: Vec<&Entry<'_>> = nearby.collect();
    let least = nearby
        .iter()
        .copied()
        .min_by(|a, b| load(a).total_cmp(&load(b)))?;
    let slack = COLD_LOAD_SLACK * least.candidate.terms.prefill_ms.max(0.0);
    let most = load(least) + slack;
    let as_good = nearby.into_iter().filter(|entry| load(entry) <= most);
    as_good.min_by(|a, b| tie_break(req, a.view, b.view))
}

fn lowest<'a, 'b: 'a>(
    req: &RequestView,
    entries: impl Iterator<Item = &'a Entry<'b>>,
    key: impl Fn(&Entry<'_>) -> f64,
) -> Option<&'a Entry<'b>> {
    entries.min_by(|a, b| {
        key(a)
            .total_cmp(&key(b))
            .then_with(|| tie_break(req, a.view, b.view))
    })
}

/// Fewer bound sessions first, then the session's own order of nodes.
fn tie_break(req: &RequestView, a: &NodeView, b: &NodeView) -> Ordering {
    let weight = |view: &NodeView| rendezvous(req.session, &view.id);
    a.bound_sessions
        .cmp(&b.bound_sessions)
        .then_with(|| weight(b).cmp(&weight(a)))
}

#[cfg(test)]
mod tests;
