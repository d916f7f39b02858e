//! NVIDIA Dynamo's KV router, by its crate's own code.
//!
//! The indexer that its router builds by default (a concurrent radix tree behind a thread pool) is fed
//! from `kv`; the overlaps become signals as its router makes them (`OverlapAnalysis`); what is under
//! way on each worker is kept in its `ActiveSequencesMultiWorker`, booked at the decision, marked when
//! the first token comes and freed at the end; the choice is its `DefaultWorkerSelector`'s, with a seed.
//! What its scheduler does around the choice (a queue per class of requests) stands open by default and
//! cannot be said in the protocol. Parameters have the names and checks of its configuration
//! (`KvRouterConfig`). All events are applied before a question: a router that hears of them at once.

use std::collections::{HashMap, HashSet};

use dynamo_kv_router::indexer::{ThreadPoolIndexer, TieredMatchDetails};
use dynamo_kv_router::protocols::{
    self, ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData,
    KvCacheStoreData, KvCacheStoredBlockData, LocalBlockHash, RouterEvent, RoutingConstraints,
    WorkerConfigLike, WorkerId,
};
use dynamo_kv_router::scheduling::{
    OverlapAnalysis, ScheduleMode, SchedulingRequest, effective_prefill_tokens,
    prefill_load_hint_from_effective_tokens,
};
use dynamo_kv_router::{
    ActiveSequencesMultiWorker, ConcurrentRadixTreeCompressed, DefaultWorkerSelector,
    KvRouterConfig, NoopSequencePublisher, SequenceRequest, WorkerSelectionInput, WorkerSelector,
};
use futures_executor::block_on;
use serde_json::{Map, Value};
use tokio::time::Instant;

use super::{Hello, Parameters, Policy, Request};

/// The kind of workers that prefill and decode, as its router calls them.
const WORKER_TYPE: &str = "aggregated";

/// What can be set: what the choice reads. The rest of the configuration is about its transport and
/// its queue.
const KEYS: &[&str] = &[
    "overlap_score_credit",
    "overlap_score_credit_decay",
    "prefill_load_scale",
    "decode_active_request_weight",
    "router_temperature",
    "router_track_active_blocks",
    "router_track_prefill_tokens",
];

/// A worker with one rank.
struct Worker {
    blocks: u64,
}

impl WorkerConfigLike for Worker {
    fn data_parallel_start_rank(&self) -> u32 {
        0
    }

    fn data_parallel_size(&self) -> u32 {
        1
    }

    fn max_num_batched_tokens(&self) -> Option<u64> {
        None
    }

    fn total_kv_blocks(&self) -> Option<u64> {
        Some(self.blocks)
    }
}

/// The router.
pub struct Dynamo {
    config: KvRouterConfig,
    block_tokens: u32,
    workers: HashMap<WorkerId, Worker>,
    index: ThreadPoolIndexer<ConcurrentRadixTreeCompressed>,
    has_news: bool,
    events: u64,
    active: ActiveSequencesMultiWorker<NoopSequencePublisher>,
    selector: DefaultWorkerSelector,
}

impl Dynamo {
    /// With its defaults but for these.
    pub fn new(hello: &Hello, given: &Parameters) -> Result<Self, String> {
        let config = config(given)?;
        let ids = 0..hello.nodes as WorkerId;
        let worker = |id| {
            let blocks = hello.capacity_blocks;
            (id, Worker { blocks })
        };
        let index = ConcurrentRadixTreeCompressed::new();
        Ok(Self {
            workers: ids.clone().map(worker).collect(),
            index: ThreadPoolIndexer::new(index, 1, hello.block_tokens),
            has_news: false,
            events: 0,
            // A simulated request may take longer than what real ones are forgotten after.
            active: ActiveSequencesMultiWorker::new_without_expiry(
                NoopSequencePublisher,
                hello.block_tokens as usize,
                ids.map(|id| (id, (0, 1))).collect(),
                false,
                0,
                WORKER_TYPE,
            ),
            selector: DefaultWorkerSelector::new_seeded(
                Some(config.clone()),
                WORKER_TYPE,
                hello.seed,
            ),
            block_tokens: hello.block_tokens,
            config,
        })
    }

    fn tell(&mut self, node: usize, data: KvCacheEventData) -> Result<(), String> {
        self.events += 1;
        self.has_news = true;
        let event = KvCacheEvent {
            event_id: self.events,
            data,
            dp_rank: 0,
        };
        let event = RouterEvent::new(node as WorkerId, event);
        self.index.enqueue_event(event).map_err(told)
    }

    fn scheduling_request(&mut self, request: &Request) -> Result<SchedulingRequest, String> {
        if std::mem::take(&mut self.has_news) {
            block_on(self.index.flush_and_wait()).map_err(told)?;
        }
        let hashes: Vec<LocalBlockHash> = request.blocks.iter().map(|b| local(*b)).collect();
        let matches = TieredMatchDetails {
            device: self.index.backend().find_match_details_impl(&hashes, false),
            lower_tier: HashMap::new(),
        };
        let tracks_blocks = self.config.router_track_active_blocks;
        let sequence = tracks_blocks.then(|| protocols::compute_seq_hash_for_block(&hashes));
        let offered = request.nodes.iter().map(|node| node.id as WorkerId);
        let offered: HashSet<WorkerId> = offered.collect();
        Ok(SchedulingRequest {
            mode: ScheduleMode::Tracked {
                request_id: request.id.to_string(),
            },
            worker_loads: self
                .active
                .project_worker_loads(sequence.as_deref(), Instant::now()),
            token_seq: sequence,
            isl_tokens: request.input_tokens as usize,
            overlap: OverlapAnalysis::new(&self.config, self.block_tokens, &matches).signals(),
            allowed_worker_ids: (offered.len() < self.workers.len()).then_some(offered),
            track_prefill_tokens: self.config.router_track_prefill_tokens,
            lora_name: None,
            expected_output_tokens: None,
            affinity_target: None,
            pinned_worker: None,
            routing_constraints: RoutingConstraints::default(),
            router_config_override: None,
            priority_jump: 0.0,
            strict_priority: 0,
            policy_class: None,
            session_context: None,
            kv_transfer_candidates: None,
            retain_kv_transfer_chain: false,
            shared_cache_hits: None,
            resp_tx: None,
        })
    }
}

/// Its own reading of a configuration, its checks included.
fn config(given: &Parameters) -> Result<KvRouterConfig, String> {
    let mut fields = Map::new();
    for (key, value) in given {
        if !KEYS.contains(&key.as_str()) {
            return Err(format!(
                "no parameter {key:?}; there are: {}",
                KEYS.join(", ")
            ));
        }
        let value = serde_json::from_str(value).unwrap_or_else(|_| Value::from(value.as_str()));
        fields.insert(key.clone(), value);
    }
    serde_json::from_value(Value::Object(fields)).map_err(told)
}

fn told(error: impl std::fmt::Display) -> String {
    format!("dynamo-kv-router: {error}")
}

/// What the router's own hash of a block's tokens would be.
fn local(block: u32) -> LocalBlockHash {
    LocalBlockHash(u64::from(block).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// What the engine calls a block and all before it.
fn external(block: u32) -> ExternalSequenceBlockHash {
    ExternalSequenceBlockHash(u64::from(block) + 1)
}

impl Policy for Dynamo {
    fn stored(&mut self, node: usize, parent: Option<u32>, blocks: &[u32]) -> Result<(), String> {
        let block = |block: &u32| KvCacheStoredBlockData {
            block_hash: external(*block),
            tokens_hash: local(*block),
            mm_extra_info: None,
        };
        let stored = KvCacheStoreData {
            parent_hash: parent.map(external),
            start_position: None,
            blocks: blocks.iter().map(block).collect(),
        };
        self.tell(node, KvCacheEventData::Stored(stored))
    }

    fn removed(&mut self, node: usize, blocks: &[u32]) -> Result<(), String> {
        let block_hashes = blocks.iter().map(|block| external(*block)).collect();
        self.tell(
            node,
            KvCacheEventData::Removed(KvCacheRemoveData { block_hashes }),
        )
    }

    fn choose(&mut self, request: &Request) -> Result<usize, String> {
        let mut scheduling = self.scheduling_request(request)?;
        let input = WorkerSelectionInput::configured(
            &self.workers,
            &scheduling,
            scheduling.eligibility(),
            self.block_tokens,
        );
        let selected = self.selector.select_worker(input).map_err(told)?;
        let (prompt, cached) = (scheduling.isl_tokens, selected.cached_tokens);
        let uncached = effective_prefill_tokens(prompt, cached);
        let hint = match scheduling.track_prefill_tokens && uncached > 0 {
            true => Some(prefill_load_hint_from_effective_tokens(prompt, uncached).map_err(told)?),
            false => None,
        };
        let booked = SequenceRequest {
            request_id: request.id.to_string(),
            token_sequence: scheduling.token_seq.take(),
            track_prefill_tokens: scheduling.track_prefill_tokens,
            expected_output_tokens: None,
            prefill_load_hint: hint,
            worker: selected.worker,
            lora_name: None,
        };
        self.active
            .add_request(booked, Instant::now())
            .map_err(told)?;
        usize::try_from(selected.worker.worker_id).map_err(told)
    }

    fn first_token(&mut self, id: u32) -> Result<(), String> {
        let marked = self
            .active
            .mark_prefill_completed(&id.to_string(), Instant::now());
        marked.map(|_| ()).map_err(told)
    }

    fn finished(&mut self, id: u32) -> Result<(), String> {
        let freed = self.active.free(&id.to_string(), Instant::now());
        freed.map(|_| ()).map_err(told)
    }
}
