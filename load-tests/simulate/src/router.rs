//! What does a policy see of a request, and what may it answer?

use crate::engine::tiers::Tier;
use crate::engine::{Happened, Node};

/// One request at the moment of a decision.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// Its number in this run.
    pub id: u32,
    /// The conversation it belongs to, unique in this run.
    pub session: u64,
    /// Where it enters.
    pub region: usize,
    /// All tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens the answer will have; only an oracle may read it.
    pub output_tokens: u32,
    /// The full blocks of the prompt, each named uniquely by its whole prefix.
    pub blocks: &'a [u32],
}

/// What becomes of a request.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Answer {
    /// It goes to this node now.
    Send(usize),
    /// Two nodes share it.
    Pair {
        /// The one that computes its prompt.
        prefill: usize,
        /// The one that answers.
        decode: usize,
    },
    /// It waits in the gateway; the router gives it back from [`Router::release`].
    Hold,
    /// The client is told to come again after this many milliseconds.
    Refuse {
        /// Until then it stays away.
        retry_after_ms: f64,
    },
}

/// Blocks of one path that a node now has, or no longer has.
#[derive(Clone, Debug)]
pub enum Change<'a> {
    /// `path[from..]` is new; everything before it was there.
    Stored {
        /// Where; what is in the store that nodes share is there for all of them.
        tier: Tier,
        /// The whole path.
        path: &'a [u32],
        /// The first new block's place in it.
        from: usize,
    },
    /// These are gone.
    Removed {
        /// From where.
        tier: Tier,
        /// Which.
        blocks: &'a [u32],
    },
}

impl<'a> Change<'a> {
    /// The change that this is, if it is one, and when.
    pub(crate) fn of(happened: &'a Happened) -> Option<(f64, Self)> {
        match happened {
            Happened::Stored {
                at_ms,
                tier,
                path,
                from,
                to,
            } => {
                let (tier, path, from) = (*tier, &path[..*to], *from);
                Some((*at_ms, Self::Stored { tier, path, from }))
            }
            Happened::Removed {
                at_ms,
                tier,
                blocks,
            } => {
                let tier = *tier;
                Some((*at_ms, Self::Removed { tier, blocks }))
            }
            _ => None,
        }
    }
}

/// A routing policy. `nodes` is the exact state: oracles read all of it, an honest policy only what
/// a gateway could know, which it learns through the other calls.
pub trait Router {
    /// Decides about a request that has just come.
    fn route(&mut self, now_ms: f64, ask: &Ask<'_>, nodes: &[Node]) -> Answer;

    /// A node's cache has changed. An index that hears of it later than this must delay it itself.
    fn changed(&mut self, _now_ms: f64, _node: usize, _change: &Change<'_>) {}

    /// A node has computed the prompt of a request that two share.
    fn computed(&mut self, _now_ms: f64, _id: u32, _node: usize) {}

    /// The first token of a request has come.
    fn first_token(&mut self, _now_ms: f64, _id: u32, _node: usize, _cached_tokens: u32) {}

    /// A request has ended.
    fn finished(&mut self, _now_ms: f64, _id: u32, _node: usize, _output_tokens: u32) {}

    /// Held requests to be sent or refused now; asked after every event, and at the time that
    /// [`Router::wake_ms`] names.
    fn release(&mut self, _now_ms: f64, _nodes: &[Node]) -> Vec<(u32, Answer)> {
        Vec::new()
    }

    /// When to ask [`Router::release`] next even if nothing happens.
    fn wake_ms(&self) -> Option<f64> {
        None
    }
}
