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
    name: EngineHash,
    parent: Option<EngineHash>,
    space: Space,
    /// All tokens from the start of the prompt to its end.
    prefix: Vec<u32>,
    /// Its own tokens among them.
    own: usize,
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
    fn find(&self, name: &EngineHash) -> Option<&Block> {
        self.blocks.iter().find(|block| block.name == *name)
    }

    fn held(&self, model: &str) -> BTreeSet<BlockHash> {
        self.blocks
            .iter()
            .flat_map(|block| block.completes(model))
            .collect()
    }

    fn weight(&self) -> usize {
        self.blocks.iter().map(Block::weight).sum()
    }

    /// Removes a block, and with it each that begins inside a block of ours where it ended.
    fn remove(&mut self, name: &EngineHash) -> bool {
        let Some(at) = self.blocks.iter().position(|block| block.name == *name) else {
            return false;
        };
        let gone = self.blocks.remove(at);
        if gone.ends_inside_ours() {
            let continues = |block: &Block| {
                block.parent.as_ref() == Some(name)
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
                self.remove(&block.name);
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
        let mut found = Vec::new();
        for (id, node) in &self.nodes {
            let held = node.held(&self.model);
            let run = chain.iter().take_while(|hash| held.contains(hash)).count();
            let own = node.block_tokens.unwrap_or(BLOCK_TOKENS);
            let whole_node_blocks = run * BLOCK_TOKENS / own;
            let blocks = whole_node_blocks * own / BLOCK_TOKENS;
            if blocks > 0 {
                found.push((id.clone(), blocks));
            }
        }
        found
    }

    /// See [`crate::index::Index::held`].
    pub fn held(&self, node: &NodeId) -> usize {
        self.nodes
            .get(node)
            .map_or(0, |node| node.held(&self.model).len())
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
                    if !on_device(medium.as_ref()) || !believed {
                        applied.ignored += 1;
                        continue;
                    }
                    let known = block_hashes.iter().filter(|name| node.remove(name)).count();
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
                    if !on_device(medium.as_ref())
                        || !full
                        || node.group.is_some_and(|g| g != group)
                    {
                        applied.ignored += 1;
                        continue;
                    }
                    node.group = Some(group);
                    self.store(id, event, &mut applied);
                }
            }
        }
        applied
    }

    fn node(&mut self, id: &NodeId) -> &mut Node {
        self.nodes.entry(id.clone()).or_default()
    }

    fn store(&mut self, id: &NodeId, event: &KvEvent, applied: &mut Applied) {
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
        if block_hashes.len() * block_size != token_ids.len() {
            applied.malformed += 1;
            return;
        }
        self.node(id).block_tokens = Some(*block_size);
        let mut parent = parent.clone();
        for (at, name) in block_hashes.iter().enumerate() {
            let left = block_hashes.len() - at;
            let before = match &parent {
                None => None,
                Some(parent) => match self.node(id).find(parent) {
                    Some(block) => Some(block.clone()),
                    None => {
                        applied.orphans += left;
                        return;
                    }
                },
            };
            let keys = beside_adapter(extra_keys.of(at), lora_name.as_deref());
            let space = match (&before, &keys[..]) {
                (None, []) => (lora_name.clone(), None),
                (None, [ExtraKey::Text(salt)]) if self.salts.contains(&**salt) => {
                    (lora_name.clone(), Some(salt.to_string()))
                }
                (Some(before), []) if before.space.0 == *lora_name => before.space.clone(),
                _ => {
                    applied.uncreditable += left;
                    return;
                }
            };
            let mut prefix = before.map(|block| block.prefix).unwrap_or_default();
            prefix.extend(&token_ids[at * block_size..(at + 1) * block_size]);
            let block = Block {
                name: name.clone(),
                parent: parent.clone(),
                space,
                prefix,
                own: *block_size,
            };
            match self.store_one(id, block) {
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

    fn store_one(&mut self, id: &NodeId, block: Block) -> One {
        let limits = self.limits;
        let model = self.model.clone();
        let node = self.node(id);
        let same = |old: &Block| {
            old.space == block.space
                && old.prefix == block.prefix
                && old.completes(&model) == block.completes(&model)
        };
        if node.find(&block.name).is_some_and(same) {
            return One::Repeated;
        }
        node.remove(&block.name);
        if block
            .parent
            .as_ref()
            .is_some_and(|parent| node.find(parent).is_none())
        {
            return One::Orphan;
        }
        let own_weight = node.weight() + block.weight();
        let total: usize = self.nodes.values().map(Node::weight).sum();
        if own_weight > limits.node_blocks_max || total + block.weight() > limits.total_blocks_max {
            return One::OverLimit;
        }
        self.node(id).blocks.push(block);
        One::Stored
    }
}

/// What became of one node block.
enum One {
    Stored,
    Repeated,
    Orphan,
    OverLimit,
}

fn on_device(medium: Option<&Medium>) -> bool {
    medium.is_none_or(|medium| *medium == Medium::Device)
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
