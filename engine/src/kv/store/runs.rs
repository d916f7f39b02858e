//! In which order are the blocks of several tiers told, so that a parent always comes first?

use std::collections::{HashMap, HashSet};

use cache_index::block::BlockHash;

use super::Tier;
use crate::kv::pool::Stored;

struct Node<'a> {
    stored: &'a Stored,
    tiers: Vec<Tier>,
}

/// Runs of consecutive blocks of one chain and one tier. `above` has been told already; blocks to
/// which no chain leads from there, or from a root, are left out.
pub(super) fn of<'a>(
    above: &HashSet<BlockHash>,
    blocks: impl Iterator<Item = (BlockHash, &'a Stored, Tier)>,
) -> Vec<(Tier, Vec<Stored>)> {
    let mut nodes: HashMap<BlockHash, Node<'a>> = HashMap::new();
    for (hash, stored, tier) in blocks {
        let fresh = || Node {
            stored,
            tiers: Vec::new(),
        };
        nodes.entry(hash).or_insert_with(fresh).tiers.push(tier);
    }
    let mut below: HashMap<BlockHash, Vec<BlockHash>> = HashMap::new();
    let mut starts = Vec::new();
    for (hash, node) in &nodes {
        match node.stored.parent_hash {
            Some(parent) if nodes.contains_key(&parent) => {
                below.entry(parent).or_default().push(*hash);
            }
            Some(parent) if !above.contains(&parent) => {}
            Some(_) | None => starts.push(*hash),
        }
    }
    let mut runs = Vec::new();
    while let Some(start) = starts.pop() {
        let mut run: Vec<&Node<'a>> = nodes.get(&start).into_iter().collect();
        let mut last = start;
        while let Some(next) = below.remove(&last) {
            let [only] = next[..] else {
                starts.extend(next);
                break;
            };
            run.extend(nodes.get(&only));
            last = only;
        }
        // Cut where the tiers change: a block is told in all of its tiers before the next one.
        for part in run.chunk_by(|a, b| a.tiers == b.tiers) {
            let tiers = part.first().map_or(&[][..], |node| &node.tiers);
            let stored = || part.iter().map(|node| node.stored.clone()).collect();
            runs.extend(tiers.iter().map(|tier| (*tier, stored())));
        }
    }
    runs
}
