//! How does a trace's block become one of the index, and whose prefix does it end?
//!
//! A trace names each block by its whole prefix, so that one number stands for a path. In the index
//! it becomes one block of 16 synthetic tokens that spell the number, hashed behind its parent by
//! the real `cache_index::block`. A hash is computed once, when its number is first seen.

use std::collections::HashMap;
use std::sync::Arc;

use cache_index::block::{BLOCK_TOKENS, BlockHash, Namespace};
use cache_index::event::{EngineHash, ExtraKeys, GroupKind, KvEvent, Medium};

use crate::engine::tiers::Tier;

/// One block seen in some prompt.
#[derive(Clone, Copy, Debug)]
struct Known {
    hash: BlockHash,
    parent: Option<u32>,
}

/// All blocks seen so far.
#[derive(Debug)]
pub(super) struct Paths {
    namespace: Namespace,
    known: HashMap<u32, Known>,
}

/// The tokens that spell a block's number.
fn spelled(block: u32) -> [u32; BLOCK_TOKENS] {
    [block; BLOCK_TOKENS]
}

impl Paths {
    pub(super) fn new(model: &str) -> Self {
        Self {
            namespace: Namespace::new(model, None, None),
            known: HashMap::new(),
        }
    }

    /// The hashes of a prompt's blocks.
    pub(super) fn chain(&mut self, path: &[u32]) -> Arc<[BlockHash]> {
        let mut before: Option<(u32, BlockHash)> = None;
        let mut chain = Vec::with_capacity(path.len());
        for block in path {
            let parent = before.map(|(block, _)| block);
            let after = before.map_or(BlockHash::ROOT, |(_, hash)| hash);
            let namespace = &self.namespace;
            let known = self.known.entry(*block).or_insert_with(|| Known {
                hash: namespace.hash(after, &spelled(*block)),
                parent,
            });
            before = Some((*block, known.hash));
            chain.push(known.hash);
        }
        chain.into()
    }

    /// Makes a path known from this place on, where it is not yet.
    pub(super) fn learn(&mut self, path: &[u32], from: usize) {
        if path[from..]
            .iter()
            .any(|block| !self.known.contains_key(block))
        {
            self.chain(path);
        }
    }

    /// The event that says that a node holds these consecutive blocks of one path now; none where
    /// the first of them was never heard of.
    pub(super) fn stored(&self, tier: Tier, blocks: &[u32]) -> Option<KvEvent> {
        let first = self.known.get(blocks.first()?)?;
        Some(KvEvent::Stored {
            block_hashes: blocks.iter().map(|block| name(*block)).collect(),
            parent: first.parent.map(name),
            token_ids: blocks.iter().flat_map(|block| spelled(*block)).collect(),
            block_size: BLOCK_TOKENS,
            medium: medium(tier),
            lora_name: None,
            extra_keys: ExtraKeys::none(),
            group_idx: None,
            group_kind: GroupKind::Unsaid,
        })
    }

    /// The event that says that a node holds these blocks no longer.
    pub(super) fn removed(tier: Tier, blocks: &[u32]) -> KvEvent {
        KvEvent::Removed {
            block_hashes: blocks.iter().map(|block| name(*block)).collect(),
            medium: medium(tier),
            group_idx: None,
        }
    }
}

/// The tier in events; the store has an entry of its own in the index, where it is the first tier.
fn medium(tier: Tier) -> Option<Medium> {
    match tier {
        Tier::Device | Tier::Shared => None,
        Tier::Host => Some(Medium::Host),
    }
}

fn name(block: u32) -> EngineHash {
    EngineHash::Int(u64::from(block))
}
