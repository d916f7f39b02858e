//! What does each block that the model names by a number hold, and in which tiers is it?
//!
//! The timing model ([`simulate::engine`]) counts blocks and does not look into them; events and
//! prompts need their hashes and tokens. A node knows a block as long as it uses it: its tiers, or a
//! request that computes with it. The numbers are the process's ([`Numbers`]).

use std::collections::HashMap;
use std::sync::Arc;

use cache_index::block::{BLOCK_TOKENS, BlockHash};
use simulate::engine::tiers::Tier;

use super::numbers::Numbers;

/// The tiers, the quickest first.
pub(super) const TIERS: [Tier; 3] = [Tier::Device, Tier::Host, Tier::Shared];

/// A block.
#[derive(Clone, Debug)]
pub(super) struct Block {
    pub(super) hash: BlockHash,
    pub(super) parent: Option<BlockHash>,
    pub(super) tokens: [u32; BLOCK_TOKENS],
    pub(super) salt: Option<Arc<str>>,
    /// Blocks before it.
    pub(super) depth: usize,
    users: u32,
    /// Where it is, as [`TIERS`] are ordered.
    lies_in: [bool; TIERS.len()],
}

impl Block {
    fn place(&mut self, tier: Tier) -> &mut bool {
        &mut self.lies_in[match tier {
            Tier::Device => 0,
            Tier::Host => 1,
            Tier::Shared => 2,
        }]
    }
}

/// All blocks in use.
#[derive(Debug)]
pub(super) struct Blocks {
    numbers: Arc<Numbers>,
    blocks: HashMap<u32, Block>,
}

impl Blocks {
    /// None yet.
    pub(super) fn new(numbers: Arc<Numbers>) -> Self {
        Self {
            numbers,
            blocks: HashMap::new(),
        }
    }

    /// The numbers of a chain's blocks, each used once more until [`Blocks::release`].
    pub(super) fn use_chain(
        &mut self,
        chain: &[BlockHash],
        tokens: &[u32],
        salt: Option<&Arc<str>>,
    ) -> Vec<u32> {
        let (tokens, _) = tokens.as_chunks::<BLOCK_TOKENS>();
        let mut parent = None;
        let mut path = Vec::with_capacity(chain.len());
        for (depth, (hash, tokens)) in chain.iter().zip(tokens).enumerate() {
            let number = self.numbers.take(*hash);
            let new = || Block {
                hash: *hash,
                parent,
                tokens: *tokens,
                salt: salt.cloned(),
                depth,
                users: 0,
                lies_in: [false; TIERS.len()],
            };
            let entry = self.blocks.entry(number);
            if let std::collections::hash_map::Entry::Occupied(_) = &entry {
                // This node has it already: once is enough.
                self.numbers.give_back(number);
            }
            entry.or_insert_with(new).users += 1;
            path.push(number);
            parent = Some(*hash);
        }
        path
    }

    /// A request no longer uses these.
    pub(super) fn release(&mut self, path: &[u32]) {
        for number in path {
            if let Some(block) = self.blocks.get_mut(number) {
                block.users -= 1;
            }
            self.forget_unused(*number);
        }
    }

    /// A tier has it now.
    pub(super) fn stored(&mut self, number: u32, tier: Tier) -> Option<&Block> {
        let block = self.blocks.get_mut(&number)?;
        *block.place(tier) = true;
        Some(block)
    }

    /// A tier has it no longer; its hash, if it was there.
    pub(super) fn removed(&mut self, number: u32, tier: Tier) -> Option<BlockHash> {
        let block = self.blocks.get_mut(&number)?;
        let was_there = std::mem::replace(block.place(tier), false);
        let hash = block.hash;
        self.forget_unused(number);
        was_there.then_some(hash)
    }

    /// The hashes of a path's blocks.
    pub(super) fn hashes(&self, path: &[u32]) -> Vec<BlockHash> {
        path.iter()
            .filter_map(|number| self.blocks.get(number))
            .map(|block| block.hash)
            .collect()
    }

    /// Blocks in a tier.
    pub(super) fn count(&self, tier: Tier) -> usize {
        self.held(tier).count()
    }

    /// Everything in a tier, parents before children.
    pub(super) fn cached(&self, tier: Tier) -> Vec<&Block> {
        let mut cached: Vec<&Block> = self.held(tier).collect();
        cached.sort_by_key(|block| block.depth);
        cached
    }

    fn held(&self, tier: Tier) -> impl Iterator<Item = &Block> {
        let at = TIERS.iter().position(|one| *one == tier).unwrap_or(0);
        self.blocks.values().filter(move |block| block.lies_in[at])
    }

    fn forget_unused(&mut self, number: u32) {
        let unused = |block: &Block| block.users == 0 && block.lies_in == [false; TIERS.len()];
        if self.blocks.get(&number).is_some_and(unused) {
            self.blocks.remove(&number);
            self.numbers.give_back(number);
        }
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        for number in self.blocks.keys() {
            self.numbers.give_back(*number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cache_index::block::{Namespace, hash_chain};

    /// Catches a number given to two blocks, a block forgotten while in use, a tier that is taken for
    /// another, and a leak.
    #[test]
    fn a_block_keeps_its_number_while_anybody_uses_it() {
        let namespace = Namespace::new("m", None, None);
        let long: Vec<u32> = (0..48).collect();
        let branch: Vec<u32> = (0..16).chain(100..132).collect();
        let numbers = Arc::new(Numbers::default());
        let mut blocks = Blocks::new(Arc::clone(&numbers));
        let mut others = Blocks::new(Arc::clone(&numbers));
        let path = |blocks: &mut Blocks, tokens: &[u32]| {
            blocks.use_chain(&hash_chain(&namespace, tokens), tokens, None)
        };
        let a = path(&mut blocks, &long);
        let b = path(&mut blocks, &branch);
        assert_eq!(a[0], b[0]);
        assert!(a[1..].iter().all(|number| !b.contains(number)));
        assert_eq!(path(&mut others, &long), a, "nodes mean the same");
        let first = blocks.stored(a[0], Tier::Device).expect("in use").clone();
        assert_eq!((first.parent, first.depth), (None, 0));
        blocks.stored(a[0], Tier::Host);
        blocks.release(&a);
        blocks.release(&b);
        assert_eq!(
            (blocks.count(Tier::Device), blocks.count(Tier::Shared)),
            (1, 0)
        );
        let again = path(&mut blocks, &long);
        assert_eq!(again[0], a[0]);
        blocks.release(&again);
        assert_eq!(blocks.removed(a[0], Tier::Device), Some(first.hash));
        assert_eq!(blocks.cached(Tier::Host).len(), 1);
        assert_eq!(blocks.removed(a[0], Tier::Host), Some(first.hash));
        assert_eq!(blocks.removed(a[0], Tier::Host), None);
        assert!(blocks.blocks.is_empty());
        assert_eq!(numbers.in_use(), 3);
        drop(others);
        assert_eq!(numbers.in_use(), 0);
    }
}
