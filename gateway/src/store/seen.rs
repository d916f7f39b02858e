//! Which request ids are taken?
//!
//! A bounded memory of 64-bit hashes of tenant and request id, keyed afresh in each process so
//! that nobody can aim at a collision. Two generations: when the young one is full it becomes the
//! old one and the old one is forgotten.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};

/// How many request ids are remembered at least; half as many again at most. 16 bytes each.
pub const REQUEST_IDS_MAX: usize = 500_000;

#[derive(Default)]
pub(super) struct SeenRequests {
    hasher: RandomState,
    young: HashSet<u64>,
    old: HashSet<u64>,
}

impl SeenRequests {
    /// Remembers an id; says whether it was there already.
    pub(super) fn insert(&mut self, tenant: &str, request_id: &str) -> bool {
        let hash = self.hasher.hash_one((tenant, request_id));
        if self.old.contains(&hash) || !self.young.insert(hash) {
            return true;
        }
        if self.young.len() >= REQUEST_IDS_MAX {
            self.old = std::mem::take(&mut self.young);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Would catch a memory that forgets a recent id or grows without bound.
    #[test]
    fn remembers_the_recent_ones() {
        let mut seen = SeenRequests::default();
        for number in 0..REQUEST_IDS_MAX * 3 {
            assert!(!seen.insert("t", &number.to_string()));
        }
        assert!(seen.insert("t", &(REQUEST_IDS_MAX * 3 - 1).to_string()));
        assert!(seen.insert("t", &(REQUEST_IDS_MAX * 2).to_string()));
        assert!(!seen.insert("other", &(REQUEST_IDS_MAX * 3 - 1).to_string()));
        assert!(seen.young.len() + seen.old.len() <= REQUEST_IDS_MAX * 2);
    }
}
