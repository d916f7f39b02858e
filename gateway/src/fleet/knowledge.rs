//! What does a node hold, or will it hold, beyond what its events have told?
//!
//! Two things that no event tells. What requests in flight will leave on their node
//! (`cache_index::expected`): without it, a burst of siblings would compute one prefix on every
//! node. And what nodes hold that tell nothing, or whose events carry no salt
//! (`cache_index::approximate`): they are judged by what was sent there, and corrected by the usage
//! that they report. Both are lent with a request, and settled when its guard is dropped.
//!
//! A node that has never reported a cached token either has no cache or does not say: its zeros are
//! not believed, since most engines leave the field out unless they are told to fill it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cache_index::approximate::{self, Approximate, Sent};
use cache_index::block::{BLOCK_TOKENS, BlockHash};
use cache_index::expected::{self, Expected, Ticket};
use cache_index::ids::NodeId;
use cache_index::tiers::Tiers;

use super::node::Node;

/// Of all nodes and models: a block's hash tells its model.
pub(super) struct Knowledge {
    expected: Mutex<Expected>,
    guess: Mutex<Approximate>,
}

impl Knowledge {
    pub(super) fn new() -> Self {
        Self {
            expected: Mutex::new(Expected::new(expected::Limits::default())),
            guess: Mutex::new(Approximate::new(approximate::Limits::default())),
        }
    }

    /// Adds to what the index knows of a chain. `judged` says which nodes are to be judged by what
    /// was sent there.
    pub(super) fn add(
        &self,
        chain: &[BlockHash],
        judged: impl Fn(&NodeId) -> bool,
        known: &mut Vec<(NodeId, Tiers)>,
    ) {
        let guessed = self.guess().overlap(chain);
        let guessed = guessed.into_iter().filter(|(node, _)| judged(node));
        let expected = self.expected().overlap(chain);
        for (node, blocks) in guessed.chain(expected) {
            let more = Tiers::on_device(blocks);
            match known.iter_mut().find(|(id, _)| *id == node) {
                Some((_, tiers)) => *tiers = tiers.longest(more),
                None => known.push((node, more)),
            }
        }
    }

    /// A request with this chain goes to a node.
    pub(super) fn lend(self: &Arc<Self>, node: &Arc<Node>, chain: &[BlockHash]) -> Lent {
        let chain: Arc<[BlockHash]> = chain.into();
        let sent = node.is_judged().then(|| {
            let mut guess = self.guess();
            let pool = usize::try_from(node.facts().pool_blocks).unwrap_or(usize::MAX);
            guess.set_pool(&node.id, pool);
            guess.sent(&node.id, &chain)
        });
        Lent {
            knowledge: Arc::clone(self),
            node: Arc::clone(node),
            ticket: self.expected().add(&node.id, &chain),
            sent: Mutex::new(sent),
            has_begun: AtomicBool::new(false),
            chain,
        }
    }

    /// The node's cache is another one, or empty.
    pub(super) fn forget(&self, node: &NodeId) {
        self.expected().forget(node);
        self.guess().forget(node);
    }

    /// Blocks that a node is thought to hold by what was sent there.
    pub(super) fn guessed_blocks(&self, node: &NodeId) -> usize {
        self.guess().held(node)
    }

    /// Requests in flight whose blocks are expected.
    pub(super) fn tickets(&self) -> usize {
        self.expected().tickets()
    }

    // A poisoned lock means that an assertion failed while it was held: credit may be off, which
    // costs time and never correctness.
    fn expected(&self) -> MutexGuard<'_, Expected> {
        self.expected.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn guess(&self) -> MutexGuard<'_, Approximate> {
        self.guess.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a request in flight has lent; dropping it settles the account.
pub(super) struct Lent {
    knowledge: Arc<Knowledge>,
    node: Arc<Node>,
    chain: Arc<[BlockHash]>,
    ticket: Option<Ticket>,
    /// None where the node's events tell, or once its report has been taken.
    sent: Mutex<Option<Sent>>,
    /// The node has computed the prompt.
    has_begun: AtomicBool,
}

impl Lent {
    pub(super) fn first_token(&self) {
        self.has_begun.store(true, Ordering::Relaxed);
    }

    /// The node says of how many prompt tokens it had the blocks.
    pub(super) fn reported(&self, cached_tokens: u64) {
        if cached_tokens > 0 {
            self.node.reports_cached.store(true, Ordering::Relaxed);
        }
        let believed = self.node.reports_cached.load(Ordering::Relaxed);
        // The last token is always computed: a prompt held whole is reported one short.
        let blocks = cached_tokens.div_ceil(BLOCK_TOKENS as u64);
        let blocks = usize::try_from(blocks).unwrap_or(usize::MAX);
        self.served(believed.then_some(blocks));
    }

    fn served(&self, reported_blocks: Option<usize>) {
        let sent = self
            .sent
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(sent) = sent {
            let mut guess = self.knowledge.guess();
            guess.served(&self.node.id, &self.chain, sent, reported_blocks);
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // An answer that broke off after its first token has left its prompt there all the same.
        if *self.has_begun.get_mut() {
            self.served(None);
        }
        if let Some(ticket) = self.ticket.take() {
            self.knowledge.expected().end(ticket);
        }
    }
}
