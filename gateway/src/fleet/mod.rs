//! Which nodes are there, how are they, and what do they hold?
//!
//! Two tasks a node: one checks its health (`health`), one follows its KV events into the index of
//! its model (`cache_events`). Requests only read: [`Fleet::nodes`] and [`Fleet::known`] never wait
//! for either. Load is counted here at dispatch ([`InFlight`]), and with it what the node will hold
//! (`knowledge`).
//!
//! Left out on purpose: nodes that come and go at run time; the set is what the configuration says.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, PoisonError, RwLock};

use cache_index::block::BlockHash;
use cache_index::ids::NodeId;
use cache_index::index::{Index, Limits};
use cache_index::tiers::Tiers;
use cache_index::trust::Trust;
use policies::view::NodeState;

use crate::config::NodeConfig;
use crate::tasks::Tasks;

mod cache_events;
mod giver;
mod health;
mod knowledge;
mod load;
pub mod metrics;
mod node;
mod partner;
mod probe;
mod replay;
mod tiers;

use self::knowledge::Knowledge;
pub(crate) use giver::Giver;
pub use load::{Dispatch, InFlight, Part};
pub use node::{Facts, Node};
pub use partner::KvInfo;
pub use tiers::{NodeTier, NodeTiers};

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
    /// Where each of them stands in `nodes`. Two nodes of one name are refused by the configuration;
    /// here the first would be known.
    places: HashMap<NodeId, usize>,
    knowledge: Arc<Knowledge>,
    /// One index for each model id that a node has named.
    indexes: RwLock<HashMap<Arc<str>, Arc<Index>>>,
    /// Salts issued so far; an index that is made later gets them all.
    salts: RwLock<HashSet<Box<str>>>,
}

impl Fleet {
    /// The configured nodes, all of them down until [`Fleet::start`].
    pub fn new(nodes: &[NodeConfig]) -> Arc<Fleet> {
        let places = nodes.iter().enumerate().rev();
        Arc::new(Self {
            nodes: Arc::new(
                nodes
                    .iter()
                    .map(|config| Arc::new(Node::new(config)))
                    .collect(),
            ),
            places: places.map(|(at, config)| (config.id.clone(), at)).collect(),
            knowledge: Arc::new(Knowledge::new()),
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

    /// Leading blocks of `chain` that each node holds, tier by tier, or will hold once it has done
    /// what is in flight there. Left out: nodes that hold none, and what a node tells whose account is
    /// not to be believed now.
    pub fn known(&self, model: &str, chain: &[BlockHash]) -> Vec<(NodeId, Tiers)> {
        let node = |id: &NodeId| self.places.get(id).map(|at| &self.nodes[*at]);
        let mut known = Vec::new();
        if let Some(index) = self.made_index(model) {
            index.visit(chain, |id, tiers| {
                if node(id).is_some_and(|node| node.trust() != Trust::Unknown) {
                    known.push((id.clone(), tiers));
                }
            });
        }
        let judged = |id: &NodeId| node(id).is_some_and(|node| node.is_judged());
        self.knowledge.add(chain, judged, &mut known);
        known
    }

    /// Leading blocks of `chain` on each node's device, now or soon; see [`Fleet::known`].
    pub fn overlaps(&self, model: &str, chain: &[BlockHash]) -> Vec<(NodeId, usize)> {
        let known = self.known(model, chain).into_iter();
        known
            .map(|(id, tiers)| (id, tiers.device))
            .filter(|(_, blocks)| *blocks > 0)
            .collect()
    }

    /// Blocks of 16 tokens that a node is credited with, tier by tier.
    pub fn held(&self, node: &Node) -> Tiers {
        let indexed = node.model().and_then(|model| self.made_index(&model));
        let mut held = indexed.map_or(Tiers::default(), |index| index.held_by_tier(&node.id));
        if node.is_judged() {
            held.device = held.device.max(self.knowledge.guessed_blocks(&node.id));
        }
        held
    }

    /// Blocks of 16 tokens that a node is credited with on its device.
    pub fn held_blocks(&self, node: &Node) -> usize {
        self.held(node).device
    }

    /// Requests in flight whose blocks are expected on their nodes.
    pub fn expected_requests(&self) -> usize {
        self.knowledge.tickets()
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

    /// Counts a request on a node until the guard is dropped, and expects the node to hold its
    /// blocks from now on.
    pub fn dispatch(&self, node: &Arc<Node>, dispatch: &Dispatch<'_>) -> InFlight {
        // A session lives where its turns are answered.
        if dispatch.part != Part::Prompt {
            for other in self.nodes.iter().filter(|other| !Arc::ptr_eq(other, node)) {
                other.left_by(dispatch.session);
            }
            node.used_by(dispatch);
        }
        let lent = self.knowledge.lend(node, dispatch.chain);
        InFlight::new(node, dispatch, lent)
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
        node.kv_is_doubtful();
        node.check_now.notify_one();
    }

    /// An attempt worked.
    pub fn succeeded(&self, node: &Node) {
        node.with_breaker(|breaker, now_ms| breaker.on_success(now_ms));
    }

    /// The node's process is gone, or its cache is empty: nothing that was sent there counts.
    fn forget(&self, node: &Node) {
        self.knowledge.forget(&node.id);
    }

    fn made_index(&self, model: &str) -> Option<Arc<Index>> {
        let indexes = self.indexes.read().unwrap_or_else(PoisonError::into_inner);
        indexes.get(model).cloned()
    }

    /// The index of a model, made with the first node that serves it.
    fn index(&self, model: &Arc<str>) -> Arc<Index> {
        if let Some(index) = self.made_index(model) {
            return index;
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
mod standing;
#[cfg(test)]
mod tests;
