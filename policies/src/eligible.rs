//! Which nodes can take this request at all, and why not the others?
//!
//! A hard yes or no with a reason, asked before any cost is computed. Every reason is shown to the
//! operator, and decides what the client reads when no node is left (see
//! [`crate::pick::NoNode`]). Left out: whether a node is a good choice.

use std::fmt;

use crate::view::{NodeState, NodeView, RequestView, Role};

/// Why a node cannot take a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Ineligible {
    /// The request has already failed there.
    Excluded,
    /// It is not healthy.
    Down {
        /// What failed.
        why: String,
    },
    /// It finishes what it has and takes nothing new.
    Draining,
    /// Its circuit breaker is open.
    BreakerOpen,
    /// The prompt does not fit, or leaves no room for one token of answer.
    ContextTooSmall {
        /// Tokens that the request needs at least.
        needed: u64,
        /// Tokens that the node can hold.
        max: u64,
    },
    /// It takes only a part of a turn, and no node can take the other.
    NoPartner {
        /// What it does.
        role: Role,
    },
}

impl Ineligible {
    /// A word from a closed set, for metric labels.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Excluded => "excluded",
            Self::Down { .. } => "down",
            Self::Draining => "draining",
            Self::BreakerOpen => "breaker_open",
            Self::ContextTooSmall { .. } => "context_too_small",
            Self::NoPartner { .. } => "no_partner",
        }
    }
}

impl fmt::Display for Ineligible {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Excluded => f.write_str("this request has already failed there"),
            Self::Down { why } => write!(f, "down: {why}"),
            Self::Draining => f.write_str("draining: it takes no new requests"),
            Self::BreakerOpen => f.write_str("its circuit breaker is open"),
            Self::ContextTooSmall { needed, max } => {
                write!(f, "needs {needed} tokens of context, it has {max}")
            }
            Self::NoPartner {
                role: Role::Prefill,
            } => f.write_str("it computes prompts, and no node can take this one over"),
            Self::NoPartner { .. } => {
                f.write_str("it answers from prompts of others, and no node can compute this one")
            }
        }
    }
}

/// Whether `node` can take `request`.
///
/// Context comes first: it holds for good, the other reasons pass, and a client whose prompt fits
/// nowhere must read that and not "try again".
pub fn check(request: &RequestView, node: &NodeView) -> Result<(), Ineligible> {
    // The expected output is only a prediction, so just one token of it is demanded.
    let needed = request.prompt_tokens.saturating_add(1);
    // A node that has not told its context yet is not a small one.
    if node.context_max != 0 && needed > node.context_max {
        return Err(Ineligible::ContextTooSmall {
            needed,
            max: node.context_max,
        });
    }
    if request.excluded.contains(&node.id) {
        return Err(Ineligible::Excluded);
    }
    match &node.state {
        NodeState::Up => Ok(()),
        NodeState::Down { why } => Err(Ineligible::Down { why: why.clone() }),
        NodeState::Draining => Err(Ineligible::Draining),
        NodeState::BreakerOpen => Err(Ineligible::BreakerOpen),
    }
}

#[cfg(test)]
mod tests;
