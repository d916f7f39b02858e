//! The least of several, and a place on a ring.

use crate::random::{Random, mix};

/// Points of each node on a ring: enough that shares differ by about a tenth.
const POINTS_PER_NODE: u64 = 100;
/// Costs nearer than this are equal.
const EQUAL: f64 = 1e-9;

/// Breaks ties by chance.
#[derive(Clone, Debug)]
pub struct Ties(Random);

impl Ties {
    /// The same choices for the same seed.
    pub fn new(seed: u64) -> Self {
        /// Keeps these draws apart from those that make the load.
        const APART: u64 = 991;
        Self(Random::new(seed.wrapping_add(APART)))
    }

    /// One of the candidates with the least cost.
    ///
    /// # Panics
    /// Without a candidate.
    pub fn least(
        &mut self,
        candidates: impl Iterator<Item = usize>,
        cost: impl Fn(usize) -> f64,
    ) -> usize {
        let mut least = f64::INFINITY;
        let mut equal = Vec::new();
        for candidate in candidates {
            let cost = cost(candidate);
            if cost < least - EQUAL || equal.is_empty() {
                least = cost;
                equal.clear();
                equal.push(candidate);
            } else if (cost - least).abs() <= EQUAL {
                equal.push(candidate);
            }
        }
        assert!(!equal.is_empty(), "no candidate to choose from");
        equal[self.0.below(equal.len())]
    }
}

/// Consistent hashing: nodes at many places of a ring, a key belongs to the next one.
#[derive(Clone, Debug)]
pub struct Ring {
    points: Vec<(u64, usize)>,
}

impl Ring {
    /// The ring of so many nodes.
    pub fn new(nodes: usize) -> Self {
        let point = |node: usize, i: u64| (mix(node as u64 * 1000 + i + 5), node);
        let mut points: Vec<(u64, usize)> = (0..nodes)
            .flat_map(|node| (0..POINTS_PER_NODE).map(move |i| point(node, i)))
            .collect();
        points.sort_unstable();
        Self { points }
    }

    /// The nodes in the order in which a key meets them, each as often as it has points.
    pub fn from(&self, key: u64) -> impl Iterator<Item = usize> {
        let start = self.points.partition_point(|(point, _)| *point < key);
        let (before, after) = self.points.split_at(start);
        after.iter().chain(before).map(|(_, node)| *node)
    }

    /// The node of a key.
    pub fn node(&self, key: u64) -> usize {
        self.from(key).next().unwrap_or(0)
    }
}
