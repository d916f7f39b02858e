//! What would the index answer if it were slow and obvious?
//!
//! The twin that [`crate::index::Index`] is tested against, on random event streams: same answers,
//! same counts. It keeps every node block with all tokens from the start of its prompt, scans lists
//! where the index follows links, and computes every hash again for every question. Nothing is
//! shared with the index but the block hash and the event types.

use std::collections::{BTreeMap, BTreeSet};

use crate::block::{BLOCK_TOKENS, BlockHash, Namespace, hash_chain};
use crate::event::{EngineHash, EventBatch, ExtraKey, GroupKind, KvEvent, Medium};
use crate::ids::NodeId;
use crate::index::{Applied, Limits};
use crate::tiers::Tiers;

/// Media that count, the fastest first.
const TIERS: [Medium; 4] = [Medium::Device, Medium::Host, Medium::Disk, Medium::Shared];

/// Adapter and salt of a chain.
type Space = (Option<String>, Option<String>);

/// The slow index.
pub struct Reference {
    model: String,
    limits: Limits,
    salts: BTreeSet<String>,
    nodes: BTreeMap<NodeId, Node>,
}

#[derive(Default)]
struct Node {
    blocks: Vec<Block>,
    group: Option<u32>,
    block_tokens: Option<usize>,
}

#[derive(Clone)]
struct Block {
    /// Its place in [`TIERS`].
    tier: usize,
    name: EngineHash,
    parent: Option<EngineHash>,
    space: Space,
    /// All tokens from the start of the prompt to its end.
    prefix: Vec<u32>,
    /// Its own tokens among them.
    own: usize,
    /// How often it was stored.
    copies: usize,
}

impl Block {
    fn begins(&self) -> usize {
        self.prefix.len() - self.own
    }

    fn ends_inside_ours(&self) -> bool {
        !self.prefix.len().is_multiple_of(BLOCK_TOKENS)
    }

    /// The hashes of our blocks that end in it.
    fn completes(&self, model: &str) -> Vec<BlockHash> {
        let (adapter, salt) = &self.space;
        let namespace = Namespace::new(model, adapter.as_deref(), salt.as_deref());
        let mut hashes = hash_chain(&namespace, &self.prefix);
        hashes.split_off(self.begins() / BLOCK_TOKENS)
    }

    fn weight(&self) -> usize {
        (self.prefix.len() / BLOCK_TOKENS - self.begins() / BLOCK_TOKENS).max(1)
    }
}

impl Node {
    /// The block of this name, in this tier rather than in another.
    fn find(&self, tier: usize, name: &EngineHash) -> Option<&Block> {
        self.find_in(tier, name)
            .or_else(|| (0..TIERS.len()).find_map(|other| self.find_in(other, name)))
    }

    fn find_in(&self, tier: usize, name: &EngineHash) -> Option<&Block> {
        let found = |block: &&Block| block.tier == tier && block.name == *name;
        self.blocks.iter().find(found)
    }

    /// The keys of a tier.
    fn held(&self, model: &str, tier: usize) -> BTreeSet<BlockHash> {
        let blocks = self.blocks.iter();
        blocks
            .filter(|block| block.tier == tier)
            .flat_map(|block| block.completes(model))
            .collect()
    }

    fn weight(&self) -> usize {
        self.blocks.iter().map(Block::weight).sum()
    }

    /// Removes one copy of a block, and the block with the last of them.
    fn remove_copy(&mut self, tier: usize, name: &EngineHash) -> bool {
        match self.find_mut(tier, name) {
            Some(block) if block.copies > 1 => {
                block.copies -= 1;
                true
            }
            _ => self.remove(tier, name),
        }
    }

    fn add_copy(&mut self, tier: usize, name: &EngineHash) {
        if let Some(block) = self.find_mut(tier, name) {
            block.copies += 1;
        }
    }

    fn find_mut(&mut self, tier: usize, name: &EngineHash) -> Option<&mut Block> {
        let found = |block: &&mut Block| block.tier == tier && block.name == *name;
        self.blocks.iter_mut().find(found)
    }

    /// Removes a block, and with it each that begins inside a block of ours where it ended.
    fn remove(&mut self, tier: usize, name: &EngineHash) -> bool {
        let is_it = |block: &Block| block.tier == tier && block.name == *name;
        let Some(at) = self.blocks.iter().position(is_it) else {
            return false;
        };
        let gone = self.blocks.remove(at);
        if gone.ends_inside_ours() {
            let continues = |block: &Block| {
                block.tier == tier
                    && block.parent.as_ref() == Some(name)
                    && block.space == gone.space
                    && block.begins() == gone.prefix.len()
                    && block.prefix.starts_with(&gone.prefix)
            };
            let after: Vec<_> = self
                .blocks
                .iter()
                .filter(|block| continues(block))
                .cloned()
                .collect();
            for block in after {
                self.remove(tier, &block.name);
            }
        }
        true
    }
}

impl Reference {
    /// See [`crate::index::Index::new`].
    pub fn new(model: &str, limits: Limits) -> Self {
        let (salts, nodes) = (BTreeSet::new(), BTreeMap::new());
        Self {
            model: model.to_owned(),
            limits,
            salts,
            nodes,
        }
    }

    /// See [`crate::index::Index::issue_salt`].
    pub fn issue_salt(&mut self, salt: &str) -> bool {
        if self.salts.len() < self.limits.salts_max {
            self.salts.insert(salt.to_owned());
        }
        self.salts.contains(salt)
    }

    /// See [`crate::index::Index::overlap`]; sorted.
    pub fn overlap(&self, chain: &[BlockHash]) -> Vec<(NodeId, usize)> {
        let tiers = self.tiers(chain).into_iter();
        tiers
            .filter(|(_, tiers)| tiers.device > 0)
            .map(|(id, tiers)| (id, tiers.device))
            .collect()
    }

    /// See [`crate::index::Index::tiers`]; sorted.
    pub fn tiers(&self, chain: &[BlockHash]) -> Vec<(NodeId, Tiers)> {
        let mut found = Vec::new();
        for (id, node) in &self.nodes {
            let mut fastest: BTreeMap<BlockHash, usize> = BTreeMap::new();
            for block in &node.blocks {
                for hash in block.completes(&self.model) {
                    let tier = fastest.entry(hash).or_insert(block.tier);
                    *tier = block.tier.min(*tier);
                }
            }
            let leading = |slowest: usize| {
                let is_held = |hash: &&BlockHash| fastest.get(hash).is_some_and(|t| *t <= slowest);
                let run = chain.iter().take_while(is_held).count();
                let own = node.block_tokens.unwrap_or(BLOCK_TOKENS);
                let whole_node_blocks = run * BLOCK_TOKENS / own;
                whole_node_blocks * own / BLOCK_TOKENS
            };
            let tiers = Tiers {
                device: leading(0),
                host: leading(1),
                disk: leading(2),
                shared: leading(3),
            };
            if tiers.shared > 0 {
                found.push((id.clone(), tiers));
            }
        }
        found
    }

    /// See [`crate::index::Index::held`].
    pub fn held(&self, node: &NodeId) -> usize {
        let held = |node: &Node| {
            let tiers = 0..TIERS.len();
            tiers.map(|tier| node.held(&self.model, tier).len()).sum()
        };
        self.nodes.get(node).map_or(0, held)
    }

    /// See [`crate::index::Index::forget`].
    pub fn forget(&mut self, node: &NodeId) {
        self.nodes.remove(node);
    }

    /// See [`crate::index::Index::apply`]. The net changes `stored` and `removed` are not counted.
    pub fn apply(&mut self, id: &NodeId, batch: &EventBatch) -> Applied {
        let mut applied = Applied::default();
        for event in &batch.events {
            match event {
                KvEvent::Cleared => self.node(id).blocks.clear(),
                KvEvent::Removed {
                    block_hashes,
                    medium,
                    group_idx,
                } => {
                    let node = self.node(id);
                    let believed = node.group.is_none() || node.group == group_idx.or(Some(0));
                    let Some(tier) = tier_of(medium.as_ref()).filter(|_| believed) else {
                        applied.ignored += 1;
                        continue;
                    };
                    let names = block_hashes.iter();
                    let known = names.filter(|name| node.remove_copy(tier, name)).count();
                    applied.unknown_removals += block_hashes.len() - known;
                }
                KvEvent::Stored {
                    medium,
                    group_idx,
                    group_kind,
                    ..
                } => {
                    let group = group_idx.unwrap_or(0);
                    let full = match group_kind {
                        GroupKind::Full => true,
                        GroupKind::Unsaid => group == 0,
                        GroupKind::Other => false,
                    };
                    let node = self.node(id);
                    let fits = full && node.group.is_none_or(|known| known == group);
                    let Some(tier) = tier_of(medium.as_ref()).filter(|_| fits) else {
                        applied.ignored += 1;
                        continue;
                    };
                    node.group = Some(group);
                    self.store(id, tier, event, &mut applied);
                }
            }
        }
        applied
    }

    fn node(&mut self, id: &NodeId) -> &mut Node {
        self.nodes.entry(id.clone()).or_default()
    }

    fn store(&mut self, id: &NodeId, tier: usize, event: &KvEvent, applied: &mut Applied) {
        let KvEvent::Stored {
            block_hashes,
            parent,
            token_ids,
            block_size,
            lora_name,
            extra_keys,
            ..
        } = event
        else {
            return;
        };
        if tier > 0 && token_ids.is_empty() && !block_hashes.is_empty() {
            self.store_by_name(id, tier, block_hashes, applied);
            return;
        }
        if *block_size == 0 || block_hashes.len() * block_size != token_ids.len() {
            applied.malformed += 1;
            return;
        }
        self.node(id).block_tokens = Some(*block_size);
        let mut parent = parent.clone();
        for (at, name) in block_hashes.iter().enumerate() {
            let left = block_hashes.len() - at;
            let before = match &parent {
                None => None,
                Some(parent) => match self.node(id).find(tier, parent) {
                    Some(block) if block.tier == tier || !block.ends_inside_ours() => {
                        Some(block.clone())
                    }
                    _ => {
                        applied.orphans += left;
                        return;
                    }
                },
            };
            let keys = beside_adapter(extra_keys.of(at), lora_name.as_deref());
            let Some(space) = self.space(before.as_ref(), &keys, lora_name.as_ref()) else {
                applied.uncreditable += left;
                return;
            };
            let parent_tier = before.as_ref().map_or(tier, |block| block.tier);
            let mut prefix = before.map(|block| block.prefix).unwrap_or_default();
            prefix.extend(&token_ids[at * block_size..(at + 1) * block_size]);
            let block = Block {
                tier,
                name: name.clone(),
                parent: parent.clone(),
                space,
                prefix,
                own: *block_size,
                copies: 1,
            };
            match self.store_one(id, parent_tier, block) {
                One::Stored => {}
                One::Repeated => applied.repeated += 1,
                One::Orphan => {
                    applied.orphans += left;
                    return;
                }
                One::OverLimit => {
                    applied.over_limit += left;
                    return;
                }
            }
            parent = Some(name.clone());
        }
    }

    /// The chain's after a block, or a new one's; none where it cannot be named.
    fn space(
        &self,
        before: Option<&Block>,
        keys: &[ExtraKey],
        adapter: Option<&String>,
    ) -> Option<Space> {
        match (before, keys) {
            (None, []) => Some((adapter.cloned(), None)),
            (None, [ExtraKey::Text(salt)]) if self.salts.contains(&**salt) => {
                Some((adapter.cloned(), Some(salt.to_string())))
            }
            (Some(before), []) if before.space.0.as_ref() == adapter => Some(before.space.clone()),
            _ => None,
        }
    }

    /// Blocks without tokens are those that the node holds under these names elsewhere.
    fn store_by_name(
        &mut self,
        id: &NodeId,
        tier: usize,
        names: &[EngineHash],
        applied: &mut Applied,
    ) {
        for (at, name) in names.iter().enumerate() {
            let found = self.node(id).find(tier, name).cloned();
            let is_whole = |block: &Block| {
                !block.ends_inside_ours() && block.begins().is_multiple_of(BLOCK_TOKENS)
            };
            let Some(block) = found.filter(|block| block.tier == tier || is_whole(block)) else {
                applied.orphans += 1;
                continue;
            };
            if block.tier == tier {
                self.node(id).add_copy(tier, name);
                applied.repeated += 1;
            } else if self.has_room(id, &block) {
                let copies = 1;
                self.node(id).blocks.push(Block {
                    tier,
                    copies,
                    ..block
                });
            } else {
                applied.over_limit += names.len() - at;
                return;
            }
        }
    }

    fn store_one(&mut self, id: &NodeId, parent_tier: usize, block: Block) -> One {
        let model = self.model.clone();
        let node = self.node(id);
        let same = |old: &Block| {
            old.space == block.space
                && old.prefix == block.prefix
                && old.completes(&model) == block.completes(&model)
        };
        if node.find_in(block.tier, &block.name).is_some_and(same) {
            node.add_copy(block.tier, &block.name);
            return One::Repeated;
        }
        node.remove(block.tier, &block.name);
        if block
            .parent
            .as_ref()
            .is_some_and(|parent| node.find_in(parent_tier, parent).is_none())
        {
            return One::Orphan;
        }
        if !self.has_room(id, &block) {
            return One::OverLimit;
        }
        self.node(id).blocks.push(block);
        One::Stored
    }

    fn has_room(&self, id: &NodeId, block: &Block) -> bool {
        let own = self.nodes.get(id).map_or(0, Node::weight) + block.weight();
        let total: usize = self.nodes.values().map(Node::weight).sum();
        own <= self.limits.node_blocks_max && total + block.weight() <= self.limits.total_blocks_max
    }
}

/// What became of one node block.
enum One {
    Stored,
    Repeated,
    Orphan,
    OverLimit,
}

fn tier_of(medium: Option<&Medium>) -> Option<usize> {
    let medium = medium.unwrap_or(&Medium::Device);
    TIERS.iter().position(|tier| tier == medium)
}

/// The keys without the adapter's name, once.
fn beside_adapter(keys: &[ExtraKey], adapter: Option<&str>) -> Vec<ExtraKey> {
    let mut rest = keys.to_vec();
    let own = adapter.map(|name| ExtraKey::Text(name.into()));
    if let Some(at) = rest.iter().position(|key| Some(key) == own.as_ref()) {
        rest.remove(at);
    }
    rest
}
