//! How many leading blocks of a chain does each node hold?
//!
//! One index for each model, shared by `Arc`: all methods take `&self`. Events are applied by one
//! caller at a time (a mutex; use one task for each node or one for all), while lookups run beside
//! them and never wait for them: they read a published snapshot whose words the writer changes one
//! by one. What a lookup sees of an event half applied is some of its blocks, which is what a
//! moment earlier or later looks like anyway.
//!
//! In reading order: `search` looks a chain up in the `table`, which is cut in `shard`s; a
//! `node` keeps its blocks by the engine's `names`, as `chains` of `records`, and blocks of
//! another size than ours as `odd` ones; `spaces` tells namespaces apart.
//!
//! Memory is bounded: see [`Limits`]. A block costs 47 to 60 bytes (20 in its record, 16 to 24 for
//! its name, 11 to 16 in the table), 45 more where it follows none that stands next to it, and a
//! node block of another size than ours some 150 more. At a limit new blocks are left out, which
//! credits too little and never too much, and removals make room again.
//!
//! The index believes what it is told. Whether a node's stream deserves that is decided in
//! [`crate::trust`]; drop nodes that are [`crate::trust::Trust::Unknown`] from a lookup's answer.

mod chains;
mod names;
mod node;
mod odd;
mod records;
mod search;
mod shard;
mod spaces;
mod table;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arc_swap::ArcSwap;

use self::node::{Node, Shared, Stored};
use self::search::leading_runs;
use self::shard::NODES_MAX;
use self::spaces::{Salts, Spaces};
use self::table::{Shown, Snapshot, Table};
use crate::block::{BLOCK_TOKENS, BlockHash};
use crate::event::{EventBatch, KvEvent};
use crate::ids::NodeId;

/// Bounds of an index's memory. At each of them blocks go without credit and are counted in
/// [`Applied`]; nothing that is held is dropped for something new.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Blocks of 16 tokens that are indexed of one node.
    pub node_blocks_max: usize,
    /// Blocks of 16 tokens that are indexed of all nodes together, a block that two nodes hold
    /// counted twice.
    pub total_blocks_max: usize,
    /// Cache salts that may be issued; chains under a salt past this go without credit.
    pub salts_max: usize,
}

impl Default for Limits {
    /// A node of 64 million tokens of KV, a fleet of 256 million: 0.8 GB, and 4 at the very most.
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
/// Namespaces whatever the limits say: their numbers fit in a record's link.
const SPACES_MAX: usize = 1 << 28;

/// What became of a batch, for metrics and the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Applied {
    /// Blocks of 16 tokens that are held now and were not before.
    pub stored: usize,
    /// Blocks of 16 tokens that were held before and are not now.
    pub removed: usize,
    /// Node blocks stored again, which changes nothing.
    pub repeated: usize,
    /// Node blocks without credit because the block before them is not known.
    pub orphans: usize,
    /// Node blocks without credit because of a salt that was never issued or of other extra keys.
    pub uncreditable: usize,
    /// Node blocks left out because a limit was reached.
    pub over_limit: usize,
    /// Removed node blocks that were not known.
    pub unknown_removals: usize,
    /// Events about another medium than the device or another attention group.
    pub ignored: usize,
    /// Events whose lengths contradict each other.
    pub malformed: usize,
}

/// The index of one model.
pub struct Index {
    published: Arc<ArcSwap<Snapshot>>,
    writer: Mutex<Writer>,
    salts: Salts,
}

/// What only the one who applies events touches.
struct Writer {
    nodes: HashMap<NodeId, Node>,
    table: Table,
    spaces: Spaces,
    total: usize,
    limits: Limits,
}

impl Index {
    /// An empty index of the model that nodes serve under this id.
    pub fn new(model: &str, limits: Limits) -> Self {
        let spaces_max = limits.salts_max.saturating_mul(SPACES_PER_SALT);
        let spaces = Spaces::new(model, spaces_max.clamp(1, SPACES_MAX));
        let table = Table::new();
        Self {
            published: table.published(),
            writer: Mutex::new(Writer {
                nodes: HashMap::new(),
                table,
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

    /// Leading blocks of `chain` that each node holds, rounded down to whole blocks of its own;
    /// nodes that hold none are left out. In no particular order.
    pub fn overlap(&self, chain: &[BlockHash]) -> Vec<(NodeId, usize)> {
        let mut found = Vec::with_capacity(FOUND);
        let mut snapshot = self.published.load();
        loop {
            leading_runs(&snapshot, chain, |node, run| {
                if let Some(Some(shown)) = snapshot.nodes.get(node) {
                    let own = shown.block_tokens.load(Ordering::Relaxed).max(1);
                    let blocks = run * BLOCK_TOKENS / own * own / BLOCK_TOKENS;
                    if blocks > 0 {
                        found.push((shown.id.clone(), blocks));
                    }
                }
            });
            // A number may have gone from one node to another meanwhile. That happens when nodes
            // come and go, so this ends.
            let now = self.published.load();
            if Arc::ptr_eq(&now.nodes, &snapshot.nodes) {
                return found;
            }
            found.clear();
            snapshot = now;
        }
    }

    /// Blocks of 16 tokens that a node holds. Waits for events being applied.
    pub fn held(&self, node: &NodeId) -> usize {
        self.writer().nodes.get(node).map_or(0, Node::held)
    }

    /// Different blocks of 16 tokens that any node can be credited with. Waits for events being
    /// applied.
    pub fn distinct_blocks(&self) -> usize {
        self.writer().table.live()
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
        applied
    }

    /// Drops all that is known of a node. Its credit is gone at once, whatever it held.
    pub fn forget(&self, node: &NodeId) {
        let writer = &mut *self.writer();
        let Some(gone) = writer.nodes.get(node) else {
            return;
        };
        let mut shown = self.published.load().nodes.to_vec();
        shown[gone.number()] = None;
        writer.table.show(shown);
        self.apply_event(writer, node, &KvEvent::Cleared, &mut Applied::default());
        writer.nodes.remove(node);
    }

    /// Recounts everything; panics where something does not add up. For tests.
    pub fn check_integrity(&self) {
        let writer = self.writer();
        let held = writer.table.recount();
        let total: usize = writer.nodes.values().map(Node::weight).sum();
        assert_eq!(total, writer.total, "weight of all nodes");
        let max = writer.limits.total_blocks_max;
        assert!(total <= max, "{total} blocks are over the limit");
        let shown = Arc::clone(&self.published.load().nodes);
        for (id, node) in &writer.nodes {
            let number = node.number();
            let own = shown.get(number).and_then(Option::as_ref);
            assert_eq!(own.map(|shown| &shown.id), Some(id), "node {number}");
            node.check_integrity(&held[number]);
        }
        let known = shown.iter().flatten().count();
        assert_eq!(known, writer.nodes.len(), "nodes shown to lookups");
        for (number, held) in held.iter().enumerate() {
            let is_shown = shown.get(number).is_some_and(Option::is_some);
            assert!(is_shown || held.is_empty(), "keys of no node, {number}");
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
            table: &mut writer.table,
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
            } => {
                if node.believes_removed(medium.as_ref(), *group_idx) {
                    node.remove_all(block_hashes, &mut shared);
                } else {
                    shared.applied.ignored += 1;
                }
            }
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
                if node.believes_stored(medium.as_ref(), *group_idx, *group_kind) {
                    node.store(&stored, &mut shared);
                } else {
                    shared.applied.ignored += 1;
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
        let mut shown = self.table.published().load().nodes.to_vec();
        let free = shown.iter().position(Option::is_none);
        let number = free.unwrap_or(shown.len());
        if number >= NODES_MAX {
            return false;
        }
        self.table.widen(number + 1);
        shown.resize(shown.len().max(number + 1), None);
        let own = Arc::new(Shown {
            id: id.clone(),
            block_tokens: AtomicUsize::new(BLOCK_TOKENS),
        });
        shown[number] = Some(Arc::clone(&own));
        self.table.show(shown);
        self.nodes.insert(id.clone(), Node::new(number, own));
        true
    }
}

fn stored_blocks(event: &KvEvent) -> usize {
    match event {
        KvEvent::Stored { block_hashes, .. } => block_hashes.len(),
        KvEvent::Removed { .. } | KvEvent::Cleared => 0,
    }
}
