//! What would one cache have had that never forgets and is shared by all nodes?
//!
//! The best that any choice of nodes could reach: every full block of every prompt, from the moment
//! it is asked, and of every answer that was completed.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use cache_index::block::BlockHash;

/// Everything that any node was ever asked: the cache that no fleet has.
#[derive(Debug, Default)]
pub(super) struct OneCache {
    seen: Mutex<HashSet<BlockHash>>,
}

impl OneCache {
    /// Leading blocks of a chain that were seen, and all of it is from now on.
    pub(super) fn see(&self, chain: &[BlockHash]) -> usize {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let held = chain.iter().take_while(|hash| seen.contains(*hash)).count();
        seen.extend(&chain[held..]);
        held
    }
}
