//! What does each block that the model names by a number hold, and which of them are cached?
//!
//! The timing model ([`simulate::engine`]) counts blocks and does not look into them; events and
//! prompts need their hashes and tokens. A block has a number as long as somebody uses it: the
//! cache, or a request that computes with it. Numbers are used again.

use std::collections::HashMap;
use std::sync::Arc;

use cache_index::block::{BLOCK_TOKENS, BlockHash};

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
    cached: bool,
}

/// All blocks in use.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    numbers: HashMap<BlockHash, u32>,
    blocks: Vec<Option<Block>>,
    free: Vec<u32>,
}

impl Blocks {
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
            let number = self.numbers.get(hash).copied().unwrap_or_else(|| {
                self.insert(Block {
                    hash: *hash,
                    parent,
                    tokens: *tokens,
                    salt: salt.cloned(),
                    depth,
                    users: 0,
                    cached: false,
                })
            });
            if let Some(block) = self.at(number) {
                block.users += 1;
            }
            path.push(number);
            parent = Some(*hash);
        }
        path
    }

    /// A request no longer uses these.
    pub(super) fn release(&mut self, path: &[u32]) {
        for number in path {
            if let Some(block) = self.at(*number) {
                block.users -= 1;
            }
            self.free_unused(*number);
        }
    }

    /// The cache has it now.
    pub(super) fn stored(&mut self, number: u32) -> Option<&Block> {
        let block = self.at(number)?;
        block.cached = true;
        Some(block)
    }

    /// The cache has it no longer; its hash.
    pub(super) fn removed(&mut self, number: u32) -> Option<BlockHash> {
        let block = self.at(number)?;
        block.cached = false;
        let hash = block.hash;
        self.free_unused(number);
        Some(hash)
    }

    /// The hashes of a path's blocks.
    pub(super) fn hashes(&self, path: &[u32]) -> Vec<BlockHash> {
        let block = |number: &u32| self.blocks.get(*number as usize)?.as_ref();
        path.iter()
            .filter_map(block)
            .map(|block| block.hash)
            .collect()
    }

    /// Everything cached, parents before children.
    pub(super) fn cached(&self) -> Vec<&Block> {
        let mut cached: Vec<&Block> = self.blocks.iter().flatten().filter(|b| b.cached).collect();
        cached.sort_by_key(|block| block.depth);
        cached
    }

    fn at(&mut self, number: u32) -> Option<&mut Block> {
        self.blocks.get_mut(number as usize)?.as_mut()
    }

    fn insert(&mut self, block: Block) -> u32 {
        let number = self.free.pop().unwrap_or_else(|| {
            self.blocks.push(None);
            u32::try_from(self.blocks.len() - 1).expect("fewer than 2^32 blocks in use")
        });
        self.numbers.insert(block.hash, number);
        self.blocks[number as usize] = Some(block);
        number
    }

    fn free_unused(&mut self, number: u32) {
        let unused = |block: &mut Block| block.users == 0 && !block.cached;
        if self.at(number).is_some_and(unused)
            && let Some(block) = self.blocks[number as usize].take()
        {
            self.numbers.remove(&block.hash);
            self.free.push(number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cache_index::block::{Namespace, hash_chain};

    /// Catches a number given to two blocks, a block forgotten while in use, and a leak.
    #[test]
    fn a_block_keeps_its_number_while_anybody_uses_it() {
        let namespace = Namespace::new("m", None, None);
        let long: Vec<u32> = (0..48).collect();
        let branch: Vec<u32> = (0..16).chain(100..132).collect();
        let mut blocks = Blocks::default();
        let path = |blocks: &mut Blocks, tokens: &[u32]| {
            blocks.use_chain(&hash_chain(&namespace, tokens), tokens, None)
        };
        let a = path(&mut blocks, &long);
        let b = path(&mut blocks, &branch);
        assert_eq!(a[0], b[0]);
        assert!(a[1..].iter().all(|number| !b.contains(number)));
        let first = blocks.stored(a[0]).expect("in use").clone();
        assert_eq!((first.parent, first.depth), (None, 0));
        blocks.release(&a);
        blocks.release(&b);
        assert_eq!(blocks.cached().len(), 1);
        let again = path(&mut blocks, &long);
        assert_eq!(again[0], a[0]);
        blocks.release(&again);
        assert_eq!(blocks.removed(a[0]), Some(first.hash));
        assert!(blocks.numbers.is_empty());
        assert_eq!(blocks.free.len(), blocks.blocks.len());
    }
}
