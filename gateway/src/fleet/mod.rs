//! Which nodes are there, how are they, and what do they hold?
//!
//! Two tasks a node: one checks its health (`health`), one follows its KV events into the index of
//! its model (`cache_events`). Requests only read: [`Fleet::nodes`] and [`Fleet::overlaps`] never
//! wait for either. Load is counted here at dispatch ([`InFlight`]).
//!
//! Left out on purpose: nodes that come and go at run time; the set is what the configuration says.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, PoisonError, RwLock};

use cache_index::block::BlockHash;
use cache_index::ids::NodeId;
use cache_index::index::{Index, Limits};
use cache_index::trust::Trust;
use policies::view::NodeState;

use crate::config::NodeConfig;
use crate::tasks::Tasks;

mod cache_events;
mod health;
mod load;
pub mod metrics;
mod node;
mod probe;
mod replay;

pub use load::InFlight;
pub use node::{Facts, Node};

/// Why an attempt on a node failed, as far as it is the node's fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// No connection.
    Connect,
    /// The connection broke before the answer was whole.
    Broken,
    /// No answer in time.
    Timeout,
    /// The node answered 5xx.
    Status(u16),
}

/// All nodes of this gateway.
pub struct Fleet {
    nodes: Arc<Vec<Arc<Node>>>,
    /// One index for each model id that a node has named.
    indexes: RwLock<HashMap<Arc<str>, Arc<Index>>>,
    /// Salts issued so far; an index that is made later gets them all.
    salts: RwLock<HashSet<Box<str>>>,
}

impl Fleet {
    /// The configured nodes, all of them down until [`Fleet::start`].
    pub fn new(nodes: &[NodeConfig]) -> Arc<Fleet> {
        Arc::new(Self {
            nodes: Arc::new(
                nodes
                    .iter()
                    .map(|config| Arc::new(Node::new(config)))
                    .collect(),
            ),
            indexes: RwLock::default(),
            salts: RwLock::default(),
        })
    }

    /// Starts checking and following every node. Salts of existing tenants should be issued before.
    pub fn start(self: &Arc<Self>, node_token: &str, tasks: &Tasks) {
        let probe = probe::Probe::new(node_token);
        for node in self.nodes.iter() {
            let health = health::watch(Arc::clone(node), probe.clone(), tasks.drain());
            tasks.spawn("node-health", health);
            let events = cache_events::follow(Arc::clone(self), Arc::clone(node), tasks.clone());
            tasks.spawn("kv-events", events);
        }
    }

    /// All nodes, in configured order.
    pub fn nodes(&self) -> Arc<Vec<Arc<Node>>> {
        Arc::clone(&self.nodes)
    }

    /// Leading blocks of `chain` that each node holds. Left out: nodes that hold none, and nodes
    /// whose account is not to be believed now.
    pub fn overlaps(&self, model: &str, chain: &[BlockHash]) -> Vec<(NodeId, usize)> {
        let index = {
            let indexes = self.indexes.read().unwrap_or_else(PoisonError::into_inner);
            match indexes.get(model) {
                Some(index) => Arc::clone(index),
                None => return Vec::new(),
            }
        };
        let mut overlaps = index.overlap(chain);
        overlaps.retain(|(id, _)| {
            self.nodes
                .iter()
                .any(|node| node.id == *id && node.trust() != Trust::Unknown)
        });
        overlaps
    }

    /// Blocks of 16 tokens that the index credits a node with.
    pub fn held_blocks(&self, node: &Node) -> usize {
        node.model()
            .map_or(0, |model| self.index(&model).held(&node.id))
    }

    /// Tells the indexes that this salt is one of ours. Cheap when it was told before.
    pub fn issue_salt(&self, salt: &str) {
        if self
            .salts
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .contains(salt)
        {
            return;
        }
        // In this order, and `index` in the other, so that no index misses a salt.
        let mut salts = self.salts.write().unwrap_or_else(PoisonError::into_inner);
        let indexes = self.indexes.read().unwrap_or_else(PoisonError::into_inner);
        let taken = indexes
            .values()
            .map(|index| index.issue_salt(salt))
            .filter(|taken| !taken);
        if taken.count() > 0 {
            tracing::warn!("an index takes no more cache salts: some prompts get no cache credit");
            return;
        }
        salts.insert(salt.into());
    }

    /// Counts a request's tokens on a node until the guard is dropped.
    pub fn dispatch(
        &self,
        node: &Arc<Node>,
        uncached_prefill_tokens: u64,
        decode_tokens: u64,
    ) -> InFlight {
        InFlight::new(node, uncached_prefill_tokens, decode_tokens)
    }

    /// An attempt failed by the node's fault: the breaker counts it, and a refused connection takes
    /// the node out at once.
    pub fn failed(&self, node: &Node, why: Failure) {
        node.with_breaker(|breaker, now_ms| breaker.on_failure(now_ms));
        tracing::debug!(node = %node.id, ?why, "an attempt on the node failed");
        if why == Failure::Connect {
            node.set_facts(|facts| {
                if facts.state == NodeState::Up {
                    facts.state = NodeState::Down {
                        why: "no connection".to_owned(),
                    };
                }
            });
        }
        node.check_now.notify_one();
    }

    /// An attempt worked.
    pub fn succeeded(&self, node: &Node) {
        node.with_breaker(|breaker, now_ms| breaker.on_success(now_ms));
    }

    /// The index of a model, made with the first node that serves it.
    fn index(&self, model: &Arc<str>) -> Arc<Index> {
        if let Some(index) = self
            .indexes
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(model)
        {
            return Arc::clone(index);
        }
        let salts = self.salts.read().unwrap_or_else(PoisonError::into_inner);
        let mut indexes = self.indexes.write().unwrap_or_else(PoisonError::into_inner);
        let made = indexes.entry(Arc::clone(model)).or_insert_with(|| {
            let index = Index::new(model, Limits::default());
            for salt in salts.iter() {
                index.issue_salt(salt);
            }
            Arc::new(index)
        });
        Arc::clone(made)
    }
}

#[cfg(test)]
mod tests;
