//! Which nodes are there, how are they, and what do they hold? (skeleton)
use std::net::SocketAddr;
use std::sync::Arc;

use arc_swap::ArcSwapOption;
use cache_index::block::BlockHash;
use cache_index::ids::NodeId;

/// One node of the fleet.
pub struct Node {
    /// Configured name.
    pub id: NodeId,
    /// Where to connect.
    pub addr: SocketAddr,
    /// `host:port` as configured, for the Host header.
    pub host: String,
    /// Configured region.
    pub region: String,
    model: ArcSwapOption<String>,
}

impl Node {
    /// The model id that the node serves; `None` until it has answered once.
    pub fn model(&self) -> Option<Arc<String>> {
        self.model.load_full()
    }
}

/// Why an attempt on a node failed.
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

/// All nodes.
pub struct Fleet;

impl Fleet {
    /// Snapshot of the nodes.
    pub fn nodes(&self) -> Arc<Vec<Arc<Node>>> {
        unimplemented!()
    }
    /// Leading blocks of `chain` that each node holds; nodes with none are left out.
    pub fn overlaps(&self, _model: &str, _chain: &[BlockHash]) -> Vec<(NodeId, usize)> {
        unimplemented!()
    }
    /// Tells the index that this salt is one of ours.
    pub fn issue_salt(&self, _salt: &str) {
        unimplemented!()
    }
    /// Counts a request's tokens on a node until the guard is dropped.
    pub fn dispatch(&self, _node: &Arc<Node>, _uncached_prefill_tokens: u64, _decode_tokens: u64) -> InFlight {
        unimplemented!()
    }
    /// Tells the breaker of an attempt that failed.
    pub fn failed(&self, _node: &Node, _why: Failure) {
        unimplemented!()
    }
    /// Tells the breaker of an attempt that worked.
    pub fn succeeded(&self, _node: &Node) {
        unimplemented!()
    }
}

/// A request's share of its node's load; dropping it gives the share back.
#[must_use]
pub struct InFlight;

impl InFlight {
    /// The first token arrived: prefill is over (and its rate is learnt from it).
    pub fn first_token(&mut self) {
        unimplemented!()
    }
    /// `tokens` more tokens were generated.
    pub fn decoded(&mut self, _tokens: u64) {
        unimplemented!()
    }
}
