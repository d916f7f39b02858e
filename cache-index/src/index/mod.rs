//! How many leading blocks of a chain does each node hold?
//!
//! One index for each model, shared by `Arc`: all methods take `&self`. Events are applied by one
//! caller at a time (a mutex; use one task for each node or one for all), while lookups run beside
//! them and never wait for them: they read a table of atomic words behind a read lock that a writer
//! takes only to exchange a pointer. What a lookup sees of an event half applied is some of its
//! blocks, which is what a moment earlier or later looks like anyway.
//!
//! Memory is bounded: see [`Limits`]. A block costs 80 to 180 bytes, depending on how full the maps
//! are: 56 to 112 in its node's map, 21 to 64 in the table. At a limit new blocks are left out, which credits too little and never
//! too much, and removals make room again.
//!
//! The index believes what it is told. Whether a node's stream deserves that is decided in
//! [`crate::trust`]; drop nodes that are [`crate::trust::Trust::Unknown`] from a lookup's answer.

mod held;
mod node;
mod spaces;
mod table;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

use self::node::{Node, Shared, Stored};
use self::spaces::{Salts, Spaces};
use self::table::{NODES_MAX, Occupancy, Table};
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
    /// A node of 64 million tokens of KV, a fleet of 256 million: 3 GB at the very most.
    fn default() -> Self {
        Self {
            node_blocks_max: 4_000_000,
            total_blocks_max: 16_000_000,
            salts_max: 65_536,
        }
    }
}

/// Namespaces for each salt that may be issued: without an adapter and with three.
const SPACES_PER_SALT: usize = 4;

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
    published: RwLock<Published>,
    writer: Mutex<Writer>,
    salts: Salts,
}

/// What lookups read.
struct Published {
    table: Table,
    /// The node of each bit.
    nodes: Vec<Option<Shown>>,
}

/// A node as lookups see it.
struct Shown {
    id: NodeId,
    block_tokens: AtomicUsize,
}

/// What only the one who applies events touches.
struct Writer {
    nodes: HashMap<NodeId, Node>,
    spaces: Spaces,
    occupancy: Occupancy,
    total: usize,
    limits: Limits,
}

impl Index {
    /// An empty index of the model that nodes serve under this id.
    pub fn new(model: &str, limits: Limits) -> Self {
        let spaces = Spaces::new(
            model,
            limits.salts_max.saturating_mul(SPACES_PER_SALT).max(1),
        );
        Self {
            published: RwLock::new(Published {
                table: Table::new(0, 1),
                nodes: Vec::new(),
            }),
            writer: Mutex::new(Writer {
                nodes: HashMap::new(),
                spaces,
                occupancy: Occupancy::default(),
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
        let published = self.published();
        let mut found = Vec::new();
        published
            .table
            .leading_runs(chain.iter().map(|hash| hash.short()), |bit, run| {
                if let Some(Some(shown)) = published.nodes.get(bit) {
                    let own = shown.block_tokens.load(Ordering::Relaxed).max(1);
                    let blocks = run * BLOCK_TOKENS / own * own / BLOCK_TOKENS;
                    if blocks > 0 {
                        found.push((shown.id.clone(), blocks));
                    }
                }
            });
        found
    }

    /// Blocks of 16 tokens that a node holds. Waits for events being applied.
    pub fn held(&self, node: &NodeId) -> usize {
        self.writer().nodes.get(node).map_or(0, Node::held)
    }

    /// Different blocks of 16 tokens that any node holds. Waits for events being applied.
    pub fn distinct_blocks(&self) -> usize {
        self.writer().occupancy.live
    }

    /// Applies one batch of a node's events, in order.
    pub fn apply(&self, node: &NodeId, batch: &EventBatch) -> Applied {
        let mut applied = Applied::default();
        let writer = &mut *self.writer();
        if !self.admit(writer, node) {
            applied.over_limit = batch.events.iter().map(stored_blocks).sum();
            return applied;
        }
        for event in &batch.events {
            self.make_room(writer, event);
            self.apply_event(writer, node, event, &mut applied);
        }
        self.shrink(writer);
        applied
    }

    /// Drops all that is known of a node.
    pub fn forget(&self, node: &NodeId) {
        let writer = &mut *self.writer();
        self.apply_event(writer, node, &KvEvent::Cleared, &mut Applied::default());
        if let Some(gone) = writer.nodes.remove(node) {
            let mut published = self
                .published
                .write()
                .unwrap_or_else(PoisonError::into_inner);
            if let Some(shown) = published.nodes.get_mut(gone.slot()) {
                *shown = None;
            }
        }
        self.shrink(writer);
    }

    /// Recounts everything; panics where something does not add up. For tests.
    pub fn check_integrity(&self) {
        let writer = self.writer();
        let published = self.published();
        let (occupancy, bits) = published.table.recount();
        assert_eq!(occupancy, writer.occupancy, "occupancy of the table");
        let total: usize = writer.nodes.values().map(Node::weight).sum();
        assert_eq!(total, writer.total, "weight of all nodes");
        assert!(
            total <= writer.limits.total_blocks_max,
            "{total} blocks are over the limit"
        );
        for (id, node) in &writer.nodes {
            let shown = published.nodes.get(node.slot()).and_then(Option::as_ref);
            assert_eq!(
                shown.map(|shown| &shown.id),
                Some(id),
                "the node of bit {}",
                node.slot()
            );
            node.check_integrity(&published.table, bits[node.slot()]);
        }
        let known = published.nodes.iter().flatten().count();
        assert_eq!(known, writer.nodes.len(), "nodes shown to lookups");
        assert_eq!(
            bits.iter().sum::<usize>(),
            writer.nodes.values().map(Node::held).sum()
        );
    }

    fn apply_event(
        &self,
        writer: &mut Writer,
        id: &NodeId,
        event: &KvEvent,
        applied: &mut Applied,
    ) {
        let published = self.published();
        let Some(node) = writer.nodes.get_mut(id) else {
            return;
        };
        let mut shared = Shared {
            table: &published.table,
            occupancy: &mut writer.occupancy,
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
        if let Some(Some(shown)) = published.nodes.get(node.slot()) {
            shown
                .block_tokens
                .store(node.block_tokens(), Ordering::Relaxed);
        }
    }

    /// Gives a node that is not known yet a bit; false where there is none left.
    fn admit(&self, writer: &mut Writer, id: &NodeId) -> bool {
        if writer.nodes.contains_key(id) {
            return true;
        }
        let free = {
            let published = self.published();
            let gap = published.nodes.iter().position(Option::is_none);
            gap.unwrap_or(published.nodes.len())
        };
        if free >= NODES_MAX {
            return false;
        }
        if free >= self.published().table.nodes() {
            self.rebuild(writer, 0, free + 1);
        }
        let shown = Shown {
            id: id.clone(),
            block_tokens: AtomicUsize::new(BLOCK_TOKENS),
        };
        let mut published = self
            .published
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        if published.nodes.len() <= free {
            published.nodes.resize_with(free + 1, || None);
        }
        published.nodes[free] = Some(shown);
        writer.nodes.insert(id.clone(), Node::new(free));
        true
    }

    /// Sees to it that the table has a slot for every block that the event may complete.
    fn make_room(&self, writer: &mut Writer, event: &KvEvent) {
        let KvEvent::Stored { token_ids, .. } = event else {
            return;
        };
        let wanted = (token_ids.len() / BLOCK_TOKENS + 1).min(writer.limits.node_blocks_max);
        if !self.published().table.has_room(writer.occupancy, wanted) {
            self.rebuild(writer, wanted, 0);
        }
    }

    /// Gives memory back after much was removed.
    fn shrink(&self, writer: &mut Writer) {
        if self.published().table.is_oversized(writer.occupancy) {
            self.rebuild(writer, 0, 0);
        }
    }

    /// Builds a fresh table beside the old one, which lookups go on reading, then exchanges them.
    fn rebuild(&self, writer: &mut Writer, more: usize, nodes: usize) {
        let (fresh, occupancy) = self
            .published()
            .table
            .rebuilt(writer.occupancy.live, more, nodes);
        writer.occupancy = occupancy;
        let mut published = self
            .published
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        let old = std::mem::replace(&mut published.table, fresh);
        // Freeing the old table takes longer than the exchange.
        drop(published);
        drop(old);
    }

    // A poisoned lock means that an assertion failed while it was held. Credit may be off from
    // then on, which costs time and never correctness; a gateway that stops would cost more.
    fn published(&self) -> RwLockReadGuard<'_, Published> {
        self.published
            .read()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn writer(&self) -> MutexGuard<'_, Writer> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn stored_blocks(event: &KvEvent) -> usize {
    match event {
        KvEvent::Stored { block_hashes, .. } => block_hashes.len(),
        KvEvent::Removed { .. } | KvEvent::Cleared => 0,
    }
}
