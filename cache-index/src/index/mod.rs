//! How many leading blocks of a chain does each node hold?
//!
//! One index for each model, shared by `Arc`: all methods take `&self`. Events are applied by one
//! caller at a time (a mutex; use one task for each node or one for all), while lookups run beside
//! them and never wait for them: they read published runs of keys, which the writer exchanges once
//! a batch is applied. What a lookup sees of a batch half shown is some of its blocks.
//!
//! In reading order: `search` looks a chain up in `view`s of runs, which `heads` finds by their
//! first key; `runs` is the writer's side of them, and `spans` says who holds which of their keys;
//! a `node` keeps its blocks by the engine's `names`, and blocks of another size than ours as
//! `odd` ones; `spaces` tells namespaces apart.
//!
//! Memory is bounded: see [`Limits`]. A block costs 42 to 69 bytes where one node holds it (26 to 51
//! for its name, 16 to 18 for its key, which all nodes share), a run of them some 400 more, and a node
//! block of another size than ours some 150 more. At a limit new blocks are left out, which credits
//! too little and never too much, and removals make room again.
//!
//! The index believes what it is told. Whether a node's stream deserves that is decided in
//! [`crate::trust`]; drop nodes that are [`crate::trust::Trust::Unknown`] from a lookup's answer.

mod heads;
mod names;
mod node;
mod odd;
mod runs;
mod search;
mod spaces;
mod spans;
#[cfg(test)]
mod tests;
mod view;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use self::node::{Node, Shared, Stored, tier_of};
use self::runs::Runs;
use self::search::leading;
use self::spaces::{Salts, Spaces};
use self::view::{Published, Shown};
use crate::block::{BLOCK_TOKENS, BlockHash};
use crate::event::{EventBatch, KvEvent};
use crate::ids::NodeId;
use crate::tiers::Tiers;

/// Bounds of an index's memory. At each of them blocks go without credit and are counted in
/// [`Applied`]; nothing that is held is dropped for something new.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Blocks of 16 tokens that are indexed of one node.
    pub node_blocks_max: usize,
    /// Blocks of 16 tokens that are indexed of all nodes together, a block that two nodes or two
    /// tiers hold counted twice. Twice as many keys are kept at most, counting those that nobody
    /// holds and others build on.
    pub total_blocks_max: usize,
    /// Cache salts that may be issued; chains under a salt past this go without credit.
    pub salts_max: usize,
}

impl Default for Limits {
    /// A node of 64 million tokens of KV, a fleet of 256 million: 0.8 GB, and 8 at the very most, if
    /// each block begins a run of its own, as the first blocks of prompts do.
    fn default() -> Self {
        Self {
            node_blocks_max: 4_000_000,
            total_blocks_max: 16_000_000,
            salts_max: 65_536,
        }
    }
}

/// Nodes that a lookup has room for at first.
const FOUND: usize = 16;

/// Namespaces for each salt that may be issued: without an adapter and with three.
const SPACES_PER_SALT: usize = 4;
/// Namespaces whatever the limits say.
const SPACES_MAX: usize = 1 << 28;
/// Nodes that can be told apart.
const NODES_MAX: usize = 1024;
/// Keys that are kept beyond twice the blocks that may be held, so that small limits leave room for
/// chains on their way in.
const KEYS_SPARE: usize = 65_536;

/// What became of a batch, for metrics and the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Applied {
    /// Blocks of 16 tokens that are held now and were not before.
    pub stored: usize,
    /// Blocks of 16 tokens that were held before and are not now.
    pub removed: usize,
    /// Node blocks stored again under the same name: further copies, each to be removed for itself.
    pub repeated: usize,
    /// Node blocks without credit because the block before them is not known.
    pub orphans: usize,
    /// Node blocks without credit because of a salt that was never issued or of other extra keys.
    pub uncreditable: usize,
    /// Node blocks left out because a limit was reached.
    pub over_limit: usize,
    /// Removed node blocks that were not known.
    pub unknown_removals: usize,
    /// Events about a medium that we do not know or another attention group.
    pub ignored: usize,
    /// Events whose lengths contradict each other, or whose blocks have no tokens.
    pub malformed: usize,
}

/// The index of one model.
pub struct Index {
    published: Arc<Published>,
    writer: Mutex<Writer>,
    salts: Salts,
}

/// What only the one who applies events touches.
struct Writer {
    nodes: HashMap<NodeId, Node>,
    runs: Runs,
    spaces: Spaces,
    total: usize,
    limits: Limits,
}

impl Index {
    /// An empty index of the model that nodes serve under this id.
    pub fn new(model: &str, limits: Limits) -> Self {
        let spaces_max = limits.salts_max.saturating_mul(SPACES_PER_SALT);
        let spaces = Spaces::new(model, spaces_max.clamp(1, SPACES_MAX));
        let keys_max = limits.total_blocks_max.saturating_mul(2);
        let runs = Runs::new(keys_max.saturating_add(KEYS_SPARE));
        Self {
            published: runs.published(),
            writer: Mutex::new(Writer {
                nodes: HashMap::new(),
                runs,
                spaces,
                total: 0,
                limits,
            }),
            salts: Salts::new(limits.salts_max),
        }
    }

    /// Takes a salt into the set of those that an extra key may be taken for; to be called before
    /// the request that carries it is sent. False where the limit of salts is reached.
    pub fn issue_salt(&self, salt: &str) -> bool {
        self.salts.issue(salt)
    }

    /// Leading blocks of `chain` that each node holds on its device, rounded down to whole blocks of
    /// its own; nodes that hold none are left out. In no particular order.
    pub fn overlap(&self, chain: &[BlockHash]) -> Vec<(NodeId, usize)> {
        let mut overlaps = Vec::new();
        self.visit(chain, |node, tiers| {
            if tiers.device > 0 {
                overlaps.push((node.clone(), tiers.device));
            }
        });
        overlaps
    }

    /// The same for all tiers; nodes that hold none in any of them are left out.
    pub fn tiers(&self, chain: &[BlockHash]) -> Vec<(NodeId, Tiers)> {
        let mut overlaps = Vec::new();
        self.visit(chain, |node, tiers| overlaps.push((node.clone(), tiers)));
        overlaps
    }

    /// Calls `visit` once for each node that holds leading blocks of `chain` in any tier, with how
    /// many; see [`Index::overlap`].
    pub fn visit(&self, chain: &[BlockHash], mut visit: impl FnMut(&NodeId, Tiers)) {
        let mut found = Vec::with_capacity(FOUND);
        let mut snapshot = self.published.snapshot.load();
        loop {
            leading(&self.published, &snapshot, chain, &mut found);
            // A number may have gone from one node to another meanwhile. That happens when nodes
            // come and go, so this ends.
            let now = self.published.snapshot.load();
            if Arc::ptr_eq(&now.nodes, &snapshot.nodes) {
                break;
            }
            snapshot = now;
        }
        for found in &found {
            let Some(shown) = snapshot.nodes.get(found.node()) else {
                continue;
            };
            let own = shown.block_tokens.load(Ordering::Relaxed);
            let tiers = Tiers {
                device: whole_blocks(found.leading(0), own),
                host: whole_blocks(found.leading(1), own),
                disk: whole_blocks(found.leading(2), own),
                shared: whole_blocks(found.leading(3), own),
            };
            if let Some(id) = shown.id.as_ref().filter(|_| tiers.shared > 0) {
                visit(id, tiers);
            }
        }
    }

    /// Blocks of 16 tokens that a node holds, those in several tiers counted in each. Waits for
    /// events being applied.
    pub fn held(&self, node: &NodeId) -> usize {
        let held = self.held_by_tier(node);
        held.device + held.host + held.disk + held.shared
    }

    /// Blocks of 16 tokens that a node holds in each tier. Waits for events being applied.
    pub fn held_by_tier(&self, node: &NodeId) -> Tiers {
        let writer = self.writer();
        let [device, host, disk, shared] = writer.nodes.get(node).map_or([0; 4], Node::held);
        Tiers {
            device,
            host,
            disk,
            shared,
        }
    }

    /// Different blocks of 16 tokens that any node holds, counted one run after another. Waits for
    /// events being applied.
    pub fn distinct_blocks(&self) -> usize {
        self.writer().runs.held()
    }

    /// Blocks of 16 tokens whose keys are kept, held or not. Waits for events being applied.
    pub fn keys(&self) -> usize {
        self.writer().runs.keys()
    }

    /// Applies one batch of a node's events, in order.
    pub fn apply(&self, node: &NodeId, batch: &EventBatch) -> Applied {
        let mut applied = Applied::default();
        let writer = &mut *self.writer();
        if !writer.admit(node) {
            applied.over_limit = batch.events.iter().map(stored_blocks).sum();
            return applied;
        }
        for event in &batch.events {
            self.apply_event(writer, node, event, &mut applied);
        }
        writer.runs.publish();
        applied
    }

    /// Drops all that is known of a node. Its credit is gone at once, whatever it held.
    pub fn forget(&self, node: &NodeId) {
        let writer = &mut *self.writer();
        let Some(gone) = writer.nodes.get(node) else {
            return;
        };
        let mut shown = self.published.snapshot.load().nodes.to_vec();
        shown[gone.number()].id = None;
        writer.runs.show(shown);
        self.apply_event(writer, node, &KvEvent::Cleared, &mut Applied::default());
        writer.runs.publish();
        writer.nodes.remove(node);
    }

    /// Recounts everything; panics where something does not add up. For tests.
    pub fn check_integrity(&self) {
        let writer = self.writer();
        let pins: Vec<_> = writer.nodes.values().flat_map(Node::pins).collect();
        let held = writer.runs.check_integrity(&pins);
        let total: usize = writer.nodes.values().map(Node::weight).sum();
        assert_eq!(total, writer.total, "weight of all nodes");
        let max = writer.limits.total_blocks_max;
        assert!(total <= max, "{total} blocks are over the limit");
        let shown = Arc::clone(&self.published.snapshot.load().nodes);
        for (id, node) in &writer.nodes {
            let number = node.number();
            let own = shown.get(number).and_then(|shown| shown.id.as_ref());
            assert_eq!(own, Some(id), "node {number}");
            node.check_integrity(&held);
        }
        let known = shown.iter().filter(|shown| shown.id.is_some()).count();
        assert_eq!(known, writer.nodes.len(), "nodes shown to lookups");
        for holder in held.keys() {
            let is_shown = shown
                .get(usize::from(holder.node()))
                .is_some_and(|shown| shown.id.is_some());
            assert!(is_shown, "keys of no node, {holder:?}");
        }
    }

    fn apply_event(
        &self,
        writer: &mut Writer,
        id: &NodeId,
        event: &KvEvent,
        applied: &mut Applied,
    ) {
        let Some(node) = writer.nodes.get_mut(id) else {
            return;
        };
        let mut shared = Shared {
            runs: &mut writer.runs,
            spaces: &mut writer.spaces,
            salts: &self.salts,
            limits: &writer.limits,
            total: &mut writer.total,
            applied,
        };
        match event {
            KvEvent::Cleared => node.clear(&mut shared),
            KvEvent::Removed {
                block_hashes,
                medium,
                group_idx,
            } => match tier_of(medium.as_ref()) {
                Some(tier) if node.believes_removed(*group_idx) => {
                    node.remove_all(tier, block_hashes, &mut shared);
                }
                _ => shared.applied.ignored += 1,
            },
            KvEvent::Stored {
                block_hashes,
                parent,
                token_ids,
                block_size,
                medium,
                lora_name,
                extra_keys,
                group_idx,
                group_kind,
            } => {
                let stored = Stored {
                    block_hashes,
                    parent: parent.as_ref(),
                    token_ids,
                    block_size: *block_size,
                    adapter: lora_name.as_deref(),
                    extra_keys,
                };
                match tier_of(medium.as_ref()) {
                    Some(tier) if node.believes_stored(*group_idx, *group_kind) => {
                        node.store(tier, &stored, &mut shared);
                    }
                    _ => shared.applied.ignored += 1,
                }
            }
        }
    }

    // A poisoned lock means that an assertion failed while it was held. Credit may be off from
    // then on, which costs time and never correctness; a gateway that stops would cost more.
    fn writer(&self) -> MutexGuard<'_, Writer> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Writer {
    /// Gives a node that is not known yet a number; false where there is none left.
    fn admit(&mut self, id: &NodeId) -> bool {
        if self.nodes.contains_key(id) {
            return true;
        }
        let mut shown = self.runs.published().snapshot.load().nodes.to_vec();
        let free = shown.iter().position(|shown| shown.id.is_none());
        let number = free.unwrap_or(shown.len());
        if number >= NODES_MAX {
            return false;
        }
        let own = Shown {
            id: Some(id.clone()),
            block_tokens: AtomicUsize::new(BLOCK_TOKENS),
        };
        match shown.get_mut(number) {
            Some(free) => *free = own,
            None => shown.push(own),
        }
        self.runs.show(shown);
        self.nodes.insert(id.clone(), Node::new(number));
        true
    }
}

/// Rounded down to whole blocks of a node's own.
fn whole_blocks(blocks: usize, own_tokens: usize) -> usize {
    // The common case, without a division.
    if own_tokens == BLOCK_TOKENS {
        return blocks;
    }
    let own = own_tokens.max(1);
    blocks * BLOCK_TOKENS / own * own / BLOCK_TOKENS
}

fn stored_blocks(event: &KvEvent) -> usize {
    match event {
        KvEvent::Stored { block_hashes, .. } => block_hashes.len(),
        KvEvent::Removed { .. } | KvEvent::Cleared => 0,
    }
}
