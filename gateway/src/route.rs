//! Which node gets this turn?
//!
//! A snapshot of nodes, index and load goes to `policies::pick`, which answers with the node, the
//! reason and what it expects to be cached. Nothing is reserved here; the caller dispatches.

use std::sync::Arc;

use cache_index::block::{BLOCK_TOKENS, creditable_blocks};
use cache_index::ids::NodeId;
use cache_index::tiers::Tiers;
use policies::pick::{Decision, NoNode, Params, decide};
use policies::view::{NodeView, RequestView, Splits};

use crate::fleet::{Fleet, Giver, Node};
use crate::prompt::Planned;
use crate::session::{Bindings, Known, SessionId};
use dialects::error::{ApiError, ErrorKind};

/// A node and why it was chosen.
pub(crate) struct Chosen {
    /// The one that answers.
    pub(crate) node: Arc<Node>,
    /// The one that computes the prompt, where that is another one.
    pub(crate) prefill: Option<Arc<Node>>,
    /// The one from whose cache it fetches, where it counts on that.
    pub(crate) giver: Option<Giver>,
    pub(crate) decision: Arc<Decision>,
}

/// What a choice depends on besides the fleet.
pub(crate) struct Question<'a> {
    pub(crate) model: &'a str,
    pub(crate) prompt: &'a Planned,
    pub(crate) session: &'a SessionId,
    pub(crate) known: &'a Known,
    pub(crate) output_tokens: u64,
    pub(crate) excluded: &'a [NodeId],
    /// Whether two nodes may share it.
    pub(crate) splits: Splits,
}

/// Chooses among the nodes that serve the model.
pub(crate) fn choose(
    fleet: &Fleet,
    bindings: &Bindings,
    params: &Params,
    question: &Question<'_>,
) -> Result<Chosen, ApiError> {
    choose_among(fleet, bindings, params, question, |_| true)
}

/// Chooses among those of them that are allowed.
pub(crate) fn choose_among(
    fleet: &Fleet,
    bindings: &Bindings,
    params: &Params,
    question: &Question<'_>,
    may: impl Fn(&NodeId) -> bool,
) -> Result<Chosen, ApiError> {
    let nodes = fleet.nodes();
    let known = fleet.known(question.model, &question.prompt.chain.hashes);
    // The prompt's last token is always computed, whatever a node holds.
    let creditable =
        creditable_blocks(usize::try_from(question.prompt.tokens).unwrap_or(usize::MAX));
    let serving = |node: &&Arc<Node>| {
        may(&node.id) && node.model().is_some_and(|model| *model == *question.model)
    };
    let held_by = |node: &Node| {
        let found = known.iter().find(|(id, _)| *id == node.id);
        found.map_or(Tiers::default(), |(_, held)| held.at_most(creditable))
    };
    let named = |id: &NodeId| nodes.iter().find(|node| node.id == *id).cloned();
    let mut views: Vec<NodeView> = nodes
        .iter()
        .filter(serving)
        .map(|node| {
            let held = held_by(node);
            let blocks = question.prompt.tokens / BLOCK_TOKENS as u64;
            let mut view = node.view_for(held, question.session.key, blocks);
            view.bound_sessions = bindings.bound_to(&node.id);
            view
        })
        .collect();
    let request = RequestView {
        prompt_tokens: tokens_for_policy(question.prompt, &views),
        output_tokens_expected: question.output_tokens,
        session: question.session.key,
        bound: question.known.node.clone(),
        excluded: question.excluded.to_vec(),
        splits: question.splits,
    };
    // Whoever holds enough more than the chosen node, most first.
    let offer = |to: &NodeId| {
        let to = named(to).filter(|_| question.splits == Splits::Yes)?;
        let least = to.worth_fetching(held_by(&to))?;
        let mut holders: Vec<_> = known
            .iter()
            .map(|(id, held)| (held.at_most(creditable).disk, id))
            .filter(|(blocks, id)| *blocks >= least && !question.excluded.contains(id))
            .collect();
        holders.sort_by_key(|(blocks, _)| std::cmp::Reverse(*blocks));
        let mut givers = holders.into_iter();
        let giver = givers.find_map(|(blocks, id)| Giver::of(&named(id)?, blocks))?;
        Some((giver, to))
    };
    let decided = decide_and_fetch(&request, &mut views, params, offer);
    let (decision, giver) = decided.map_err(|none| {
        if let Some(most) = none.context_max() {
            return context_length(question.prompt.tokens, 1, most);
        }
        let message = format!(
            "No node can serve the model '{}' right now. Try again in a moment.",
            question.model
        );
        ApiError::new(ErrorKind::NoNode, message).because(none)
    })?;
    let prefill = decision.pair().and_then(|pair| named(&pair.prefill));
    match named(&decision.node) {
        Some(node) => Ok(Chosen {
            node,
            giver,
            prefill,
            decision: Arc::new(decision),
        }),
        None => Err(ApiError::new(
            ErrorKind::Internal,
            "The chosen node does not exist.",
        )),
    }
}

/// Where a turn goes is decided without givers: only what the node would compute may be fetched instead.
/// Sessions that wander for the sake of a moment's load would have every node keep all of them.
fn decide_and_fetch(
    request: &RequestView,
    views: &mut [NodeView],
    params: &Params,
    offer: impl Fn(&NodeId) -> Option<(Giver, Arc<Node>)>,
) -> Result<(Decision, Option<Giver>), NoNode> {
    let decision = decide(request, views, params)?;
    let alone = decision.pair().is_none();
    let offered = alone.then(|| offer(&decision.node)).flatten();
    let view = views.iter_mut().find(|view| view.id == decision.node);
    let (Some((giver, node)), Some(view)) = (offered, view) else {
        return Ok((decision, None));
    };
    giver.show(view, &node);
    let fetching = decide(request, views, params)?;
    let pays = fetching.node == decision.node
        && fetching.expected_cached_tokens > decision.expected_cached_tokens;
    Ok(match pays {
        true => (fetching, Some(giver)),
        false => (decision, None),
    })
}

/// The prompt's length as the policy sees it. An estimate is cut to what fits the largest node: it
/// is no ground for a refusal, the node itself will count.
fn tokens_for_policy(prompt: &Planned, views: &[NodeView]) -> u64 {
    match views.iter().map(|view| view.context_max).max() {
        Some(most) if !prompt.exact => prompt.tokens.min(most.saturating_sub(1)),
        _ => prompt.tokens,
    }
}

/// The largest context that a node serving the model has; none if no node has told.
pub(crate) fn context_max(fleet: &Fleet, model: &str) -> Option<u64> {
    let nodes = fleet.nodes();
    let serving = |node: &&Arc<Node>| node.model().is_some_and(|served| *served == *model);
    nodes
        .iter()
        .filter(serving)
        .map(|node| node.view(Tiers::default()).context_max)
        .max()
        .filter(|most| *most > 0)
}

/// Refuses what fits no node: prompt and answer share the context.
pub(crate) fn check_context(
    fleet: &Fleet,
    model: &str,
    prompt: &Planned,
    output_tokens_max: Option<u64>,
) -> Result<(), ApiError> {
    // An estimate is no ground for a refusal; the node counts.
    let Some(most) = context_max(fleet, model).filter(|_| prompt.exact) else {
        return Ok(());
    };
    let output = output_tokens_max.unwrap_or(1);
    if prompt.tokens.saturating_add(output) <= most {
        return Ok(());
    }
    Err(context_length(prompt.tokens, output, most))
}

fn context_length(prompt: u64, output: u64, most: u64) -> ApiError {
    ApiError::param(
        ErrorKind::ContextLength,
        "messages",
        format!(
            "This model's maximum context length is {most} tokens. However, you requested {} tokens ({prompt} in the prompt, {output} for the completion). Please reduce the length of the prompt or of the completion.",
            prompt.saturating_add(output)
        ),
    )
}
