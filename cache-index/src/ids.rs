//! How are nodes named? One newtype, cheap to clone, shared by index, policies and gateway.

use std::fmt;
use std::sync::Arc;

/// The name of a node: one serving process with its own KV pool.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(Arc<str>);

impl NodeId {
    /// Wraps a node's configured name.
    pub fn new(name: &str) -> Self {
        Self(Arc::from(name))
    }

    /// The name as configured.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NodeId({})", self.0)
    }
}
