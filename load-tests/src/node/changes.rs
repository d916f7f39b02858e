//! How do changes of a cache become events?
//!
//! Consecutive blocks of one chain are one event, consecutive removals another; the order between
//! events is the order in which things happened.

use cache_index::block::{BLOCK_TOKENS, BlockHash};
use cache_index::event::{EngineHash, ExtraKeys, GroupKind, KvEvent};

use super::blocks::Block;

/// Changes on their way to become events.
#[derive(Default)]
pub(super) struct Changes {
    events: Vec<KvEvent>,
    stored: Vec<Block>,
    removed: Vec<BlockHash>,
}

impl Changes {
    /// The cache has this block now.
    pub(super) fn stored(&mut self, block: Option<&Block>) {
        let Some(block) = block else { return };
        let parent = self.stored.last().map(|last| last.hash);
        if parent.is_none() || block.parent != parent {
            self.flush();
        }
        self.stored.push(block.clone());
    }

    /// The cache has this block no longer.
    pub(super) fn removed(&mut self, hash: Option<BlockHash>) {
        let Some(hash) = hash else { return };
        if !self.stored.is_empty() {
            self.flush();
        }
        self.removed.push(hash);
    }

    /// The events.
    pub(super) fn finish(mut self) -> Vec<KvEvent> {
        self.flush();
        self.events
    }

    /// One of the two kinds is always empty.
    fn flush(&mut self) {
        if !self.stored.is_empty() {
            let run: Vec<&Block> = self.stored.iter().collect();
            self.events.push(stored(&run));
            self.stored.clear();
        }
        if !self.removed.is_empty() {
            self.events.push(removed(&self.removed));
            self.removed.clear();
        }
    }
}

/// One event for consecutive blocks of one chain.
pub(super) fn stored(run: &[&Block]) -> KvEvent {
    let first = run.first();
    let parent = first.and_then(|block| block.parent);
    // The salt enters the first block of a chain alone, as in vLLM.
    let salt = first.and_then(|block| block.salt.as_deref());
    KvEvent::Stored {
        block_hashes: run.iter().map(|block| engine_hash(block.hash)).collect(),
        parent: parent.map(engine_hash),
        token_ids: run.iter().flat_map(|block| block.tokens).collect(),
        block_size: BLOCK_TOKENS,
        medium: None,
        lora_name: None,
        extra_keys: match (salt, parent) {
            (Some(salt), None) => ExtraKeys::salt(salt),
            _ => ExtraKeys::none(),
        },
        group_idx: None,
        group_kind: GroupKind::Unsaid,
    }
}

fn removed(hashes: &[BlockHash]) -> KvEvent {
    KvEvent::Removed {
        block_hashes: hashes.iter().copied().map(engine_hash).collect(),
        medium: None,
        group_idx: None,
    }
}

fn engine_hash(hash: BlockHash) -> EngineHash {
    EngineHash::Bytes(Box::from(hash.0))
}
