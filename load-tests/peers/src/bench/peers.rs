//! How is each index fed and asked?
//!
//! One adapter each, all with the same shape: an event is made from a chain's tokens beforehand
//! (hashes included, which the peers leave to their caller), applying it is timed. Ours hashes as it
//! applies; that part is timed apart, over the same tokens. Each answer is checked against what an
//! exact index says.

use std::sync::Mutex;

use cache_index::block::{BlockHash, Namespace, hash_chain};
use cache_index::event::{EngineHash, EventBatch, ExtraKeys, GroupKind, KvEvent};
use cache_index::ids::NodeId;
use cache_index::index::{Index, Limits};
use dynamo_kv_router::ConcurrentRadixTreeCompressed;
use dynamo_kv_router::indexer::ThreadPoolIndexer;
use dynamo_kv_router::protocols as dynamo;
use futures_executor::block_on;
use kv_index::{ChainBlockMap, ChainIndex, ContentHash, SequenceHash, StoredBlock};

use crate::workload::{BLOCK_TOKENS, NODES, Workload};

const MODEL: &str = "model";

/// An index under test.
pub trait Peer: Sync + Sized {
    /// What the table calls it.
    const NAME: &str;
    /// A change, ready to be applied.
    type Event: Clone + Send + Sync;
    /// What a block is called in a question.
    type Block: Clone + Sync;

    fn new() -> Self;
    fn stored(&self, workload: &Workload, chain: usize) -> Self::Event;
    fn removed(&self, workload: &Workload, chain: usize) -> Self::Event;
    fn query(&self, workload: &Workload, chain: usize) -> Vec<Self::Block>;
    /// Applies all, and returns once lookups see them.
    fn apply(&self, events: Vec<Self::Event>);
    /// Nodes that hold some of it, and all their blocks.
    fn lookup(&self, query: &[Self::Block]) -> (usize, usize);
}

/// The engines' names of a chain's blocks: the same 64 bits for all indexes.
fn names(workload: &Workload, chain: usize) -> Vec<u64> {
    let contents = kv_index::compute_request_content_hashes(&workload.tokens(chain), BLOCK_TOKENS);
    let names = kv_index::request_prefix_hashes(&contents);
    names.into_iter().map(|name| name.0).collect()
}

/// This repository's.
pub struct Ours {
    index: Index,
    nodes: Vec<NodeId>,
}

impl Ours {
    fn event(chain: usize, event: KvEvent) -> (usize, EventBatch) {
        let batch = EventBatch {
            events: vec![event],
            ..EventBatch::default()
        };
        (Workload::node(chain), batch)
    }
}

impl Peer for Ours {
    const NAME: &str = "cache-index";
    type Event = (usize, EventBatch);
    type Block = BlockHash;

    fn new() -> Self {
        let limits = Limits {
            node_blocks_max: 100_000_000,
            total_blocks_max: 100_000_000,
            ..Limits::default()
        };
        let name = |node| NodeId::new(&format!("node-{node}"));
        Self {
            index: Index::new(MODEL, limits),
            nodes: (0..NODES).map(name).collect(),
        }
    }

    fn stored(&self, workload: &Workload, chain: usize) -> Self::Event {
        let names = names(workload, chain);
        let stored = KvEvent::Stored {
            block_hashes: names.into_iter().map(EngineHash::Int).collect(),
            parent: None,
            token_ids: workload.tokens(chain),
            block_size: BLOCK_TOKENS,
            medium: None,
            lora_name: None,
            extra_keys: ExtraKeys::none(),
            group_idx: None,
            group_kind: GroupKind::Unsaid,
        };
        Self::event(chain, stored)
    }

    fn removed(&self, workload: &Workload, chain: usize) -> Self::Event {
        let names = names(workload, chain);
        let removed = KvEvent::Removed {
            block_hashes: names.into_iter().rev().map(EngineHash::Int).collect(),
            medium: None,
            group_idx: None,
        };
        Self::event(chain, removed)
    }

    fn query(&self, workload: &Workload, chain: usize) -> Vec<Self::Block> {
        hash_chain(&Namespace::new(MODEL, None, None), &workload.tokens(chain))
    }

    fn apply(&self, events: Vec<Self::Event>) {
        for (node, batch) in events {
            self.index.apply(&self.nodes[node], &batch);
        }
    }

    fn lookup(&self, query: &[Self::Block]) -> (usize, usize) {
        let mut found = (0, 0);
        self.index.visit(query, |_, tiers| {
            found.0 += 1;
            found.1 += tiers.device;
        });
        found
    }
}

/// The one of SMG, by its own result type.
pub struct KvIndex {
    index: ChainIndex,
    workers: Vec<u32>,
    maps: Mutex<Vec<ChainBlockMap>>,
}

/// A change of one of its workers.
#[derive(Clone)]
pub enum KvIndexEvent {
    Stored(usize, Vec<StoredBlock>),
    Removed(usize, Vec<SequenceHash>),
}

impl Peer for KvIndex {
    const NAME: &str = "kv-index ChainIndex";
    type Event = KvIndexEvent;
    type Block = ContentHash;

    fn new() -> Self {
        let index = ChainIndex::with_max_workers(NODES);
        let intern = |node| {
            index
                .intern_worker(&format!("node-{node}"))
                .expect("64 fit")
        };
        Self {
            workers: (0..NODES).map(intern).collect(),
            maps: Mutex::new((0..NODES).map(|_| ChainBlockMap::default()).collect()),
            index,
        }
    }

    fn stored(&self, workload: &Workload, chain: usize) -> Self::Event {
        let names = names(workload, chain);
        let block = |(name, content_hash)| StoredBlock {
            seq_hash: SequenceHash(name),
            content_hash,
        };
        let blocks = names
            .into_iter()
            .zip(self.query(workload, chain))
            .map(block);
        KvIndexEvent::Stored(Workload::node(chain), blocks.collect())
    }

    fn removed(&self, workload: &Workload, chain: usize) -> Self::Event {
        let names = names(workload, chain).into_iter().rev();
        KvIndexEvent::Removed(Workload::node(chain), names.map(SequenceHash).collect())
    }

    fn query(&self, workload: &Workload, chain: usize) -> Vec<Self::Block> {
        kv_index::compute_request_content_hashes(&workload.tokens(chain), BLOCK_TOKENS)
    }

    fn apply(&self, events: Vec<Self::Event>) {
        let mut maps = self.maps.lock().expect("no panic before");
        for event in events {
            match event {
                KvIndexEvent::Stored(node, blocks) => self
                    .index
                    .apply_stored(self.workers[node], &blocks, None, &mut maps[node])
                    .expect("no parent is missing"),
                KvIndexEvent::Removed(node, names) => {
                    self.index
                        .apply_removed(self.workers[node], &names, &mut maps[node]);
                }
            }
        }
    }

    fn lookup(&self, query: &[Self::Block]) -> (usize, usize) {
        let found = self.index.find_matches(query, false).scores;
        (
            found.len(),
            found.values().map(|blocks| *blocks as usize).sum(),
        )
    }
}

/// The one of Dynamo, with one event thread, which it brings itself.
pub struct Dynamo {
    index: ThreadPoolIndexer<ConcurrentRadixTreeCompressed>,
}

impl Dynamo {
    fn event(chain: usize, data: dynamo::KvCacheEventData) -> dynamo::RouterEvent {
        let event = dynamo::KvCacheEvent {
            event_id: 0,
            data,
            dp_rank: 0,
        };
        dynamo::RouterEvent::new(Workload::node(chain) as u64, event)
    }
}

impl Peer for Dynamo {
    const NAME: &str = "dynamo-kv-router CRTC";
    type Event = dynamo::RouterEvent;
    type Block = dynamo::LocalBlockHash;

    fn new() -> Self {
        let index = ConcurrentRadixTreeCompressed::new();
        Self {
            index: ThreadPoolIndexer::new(index, 1, BLOCK_TOKENS as u32),
        }
    }

    fn stored(&self, workload: &Workload, chain: usize) -> Self::Event {
        let block = |(name, tokens_hash)| dynamo::KvCacheStoredBlockData {
            block_hash: dynamo::ExternalSequenceBlockHash(name),
            tokens_hash,
            mm_extra_info: None,
        };
        let names = names(workload, chain).into_iter();
        let stored = dynamo::KvCacheStoreData {
            parent_hash: None,
            start_position: None,
            blocks: names.zip(self.query(workload, chain)).map(block).collect(),
        };
        Self::event(chain, dynamo::KvCacheEventData::Stored(stored))
    }

    fn removed(&self, workload: &Workload, chain: usize) -> Self::Event {
        let names = names(workload, chain).into_iter().rev();
        let removed = dynamo::KvCacheRemoveData {
            block_hashes: names.map(dynamo::ExternalSequenceBlockHash).collect(),
        };
        Self::event(chain, dynamo::KvCacheEventData::Removed(removed))
    }

    fn query(&self, workload: &Workload, chain: usize) -> Vec<Self::Block> {
        let tokens = workload.tokens(chain);
        let options = dynamo::BlockHashOptions::default();
        dynamo::compute_block_hash_for_seq(&tokens, BLOCK_TOKENS as u32, options)
    }

    fn apply(&self, events: Vec<Self::Event>) {
        for event in events {
            self.index.enqueue_event(event).expect("its thread runs");
        }
        block_on(self.index.flush_and_wait()).expect("its thread runs");
    }

    fn lookup(&self, query: &[Self::Block]) -> (usize, usize) {
        let found = self.index.backend().find_matches_impl(query, false).scores;
        (
            found.len(),
            found.values().map(|blocks| *blocks as usize).sum(),
        )
    }
}
