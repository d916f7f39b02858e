//! How do changes of a cache become events?
//!
//! Consecutive blocks of one chain in one tier are one event, consecutive removals another; the order between
//! events is the order in which things happened.

use cache_index::block::{BLOCK_TOKENS, BlockHash};
use cache_index::event::{EngineHash, ExtraKeys, GroupKind, KvEvent, Medium};
use simulate::engine::tiers::Tier;

use super::blocks::Block;

/// Changes on their way to become events.
pub(super) struct Changes {
    events: Vec<KvEvent>,
    /// Of what follows.
    tier: Tier,
    stored: Vec<Block>,
    removed: Vec<BlockHash>,
}

impl Default for Changes {
    fn default() -> Self {
        Self {
            events: Vec::new(),
            tier: Tier::Device,
            stored: Vec::new(),
            removed: Vec::new(),
        }
    }
}

impl Changes {
    /// A tier has this block now.
    pub(super) fn stored(&mut self, tier: Tier, block: Option<&Block>) {
        let Some(block) = block else { return };
        let parent = self.stored.last().map(|last| last.hash);
        if parent.is_none() || block.parent != parent {
            self.flush();
        }
        self.turn_to(tier);
        self.stored.push(block.clone());
    }

    /// A tier has this block no longer.
    pub(super) fn removed(&mut self, tier: Tier, hash: Option<BlockHash>) {
        let Some(hash) = hash else { return };
        if !self.stored.is_empty() {
            self.flush();
        }
        self.turn_to(tier);
        self.removed.push(hash);
    }

    /// The events.
    pub(super) fn finish(mut self) -> Vec<KvEvent> {
        self.flush();
        self.events
    }

    fn turn_to(&mut self, tier: Tier) {
        if self.tier != tier {
            self.flush();
            self.tier = tier;
        }
    }

    /// One of the two kinds is always empty.
    fn flush(&mut self) {
        if !self.stored.is_empty() {
            let run: Vec<&Block> = self.stored.iter().collect();
            self.events.push(stored(self.tier, &run));
            self.stored.clear();
        }
        if !self.removed.is_empty() {
            self.events.push(removed(self.tier, &self.removed));
            self.removed.clear();
        }
    }
}

/// One event for consecutive blocks of one chain in one tier.
pub(super) fn stored(tier: Tier, run: &[&Block]) -> KvEvent {
    let first = run.first();
    let parent = first.and_then(|block| block.parent);
    // The salt enters the first block of a chain alone, as in vLLM.
    let salt = first.and_then(|block| block.salt.as_deref());
    KvEvent::Stored {
        block_hashes: run.iter().map(|block| engine_hash(block.hash)).collect(),
        parent: parent.map(engine_hash),
        token_ids: run.iter().flat_map(|block| block.tokens).collect(),
        block_size: BLOCK_TOKENS,
        medium: medium(tier),
        lora_name: None,
        extra_keys: match (salt, parent) {
            (Some(salt), None) => ExtraKeys::salt(salt),
            _ => ExtraKeys::none(),
        },
        group_idx: None,
        group_kind: GroupKind::Unsaid,
    }
}

fn removed(tier: Tier, hashes: &[BlockHash]) -> KvEvent {
    KvEvent::Removed {
        block_hashes: hashes.iter().copied().map(engine_hash).collect(),
        medium: medium(tier),
        group_idx: None,
    }
}

/// As our engine and vLLM name the tiers; the pool goes without a name.
fn medium(tier: Tier) -> Option<Medium> {
    match tier {
        Tier::Device => None,
        Tier::Host => Some(Medium::Host),
        Tier::Shared => Some(Medium::Shared),
    }
}

fn engine_hash(hash: BlockHash) -> EngineHash {
    EngineHash::Bytes(Box::from(hash.0))
}
