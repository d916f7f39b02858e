//! Where else can a node find KV, and is it worth fetching?
//!
//! Below the pool a node can have memory of its own (host memory or a drive) and a store that nodes
//! share. What a node has computed is written to both at once, and each forgets the least recently
//! used, leaves first. A prompt's leading blocks are fetched where that takes less time than
//! computing them, over a link of the node's own; a fetch comes before the first chunk, and the next
//! prompt waits for it as it waits for a prefill. Left out: how long writing takes, and that nodes
//! might share a link.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::pool::{Pool, Touched};
use super::{Job, Params};

/// Bytes in a GB of a link's rate.
const BYTES_PER_GB: f64 = 1e9;

/// Where a block lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tier {
    /// In the node's pool.
    Device,
    /// In the node's own memory below it.
    Host,
    /// In the store that nodes share.
    Shared,
}

/// How large a tier is and how fast it is read.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TierParams {
    /// Blocks that it holds.
    pub blocks: usize,
    /// How fast a node reads from it, GB (10^9 bytes) a second.
    pub gb_per_s: f64,
}

impl TierParams {
    /// A tier, unless it has no blocks.
    pub fn of(blocks: usize, gb_per_s: f64) -> Option<Self> {
        (blocks > 0).then_some(Self { blocks, gb_per_s })
    }

    /// How long a block takes to the pool, ms.
    pub fn block_ms(&self, params: &Params) -> f64 {
        let bytes = f64::from(params.block_tokens) * params.kv_bytes_per_token;
        bytes / (self.gb_per_s * BYTES_PER_GB) * 1000.0
    }
}

/// A store that nodes share: clones are the same store.
#[derive(Clone, Debug)]
pub struct Store {
    blocks: Arc<Mutex<Pool>>,
    speed: TierParams,
}

impl Store {
    /// An empty one.
    pub fn new(params: TierParams) -> Self {
        Self {
            blocks: Arc::new(Mutex::new(Pool::new(params.blocks))),
            speed: params,
        }
    }

    fn blocks(&self) -> MutexGuard<'_, Pool> {
        // A list of numbers is as good after a panic elsewhere as before it.
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A node's own memory below its pool.
#[derive(Clone, Debug)]
struct Host {
    blocks: Pool,
    speed: TierParams,
}

/// What a node has below its pool.
#[derive(Clone, Debug, Default)]
pub(super) struct Tiers {
    host: Option<Host>,
    store: Option<Store>,
}

/// Leading blocks of a path, and how long it takes to have them in the pool.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Source {
    /// Blocks that need not be computed.
    pub(super) blocks: usize,
    /// Until those that are not in the pool are there.
    pub(super) transfer_ms: f64,
    /// That, and what is left to compute, on an idle node.
    pub(super) total_ms: f64,
}

impl Tiers {
    pub(super) fn set_host(&mut self, params: TierParams) {
        self.host = Some(Host {
            blocks: Pool::new(params.blocks),
            speed: params,
        });
    }

    pub(super) fn set_store(&mut self, store: Store) {
        self.store = Some(store);
    }

    /// The quickest of: what is in the pool alone, with the host's as well, with the store's too.
    pub(super) fn quickest(
        &self,
        params: &Params,
        job: &Job,
        path: &[u32],
        in_pool: usize,
    ) -> Source {
        let with = |blocks: usize, transfer_ms: f64| {
            let prompt = f64::from(job.prompt_tokens);
            let cached = f64::from(params.cached_tokens(blocks, job.prompt_tokens));
            Source {
                blocks,
                transfer_ms,
                total_ms: transfer_ms + params.prefill_ms(prompt, cached),
            }
        };
        let (mut blocks, mut transfer_ms) = (in_pool, 0.0);
        let mut best = with(blocks, transfer_ms);
        for (reach, block_ms) in self.reaches(params, path) {
            let more = reach.saturating_sub(blocks);
            blocks += more;
            transfer_ms += more as f64 * block_ms;
            let source = with(blocks, transfer_ms);
            if source.total_ms < best.total_ms {
                best = source;
            }
        }
        best
    }

    /// Leading blocks in each tier, the faster one first, and what each costs.
    fn reaches(&self, params: &Params, path: &[u32]) -> impl Iterator<Item = (usize, f64)> {
        let host = self.host.as_ref().map(|host| {
            let reach = host.blocks.overlap(path);
            (reach, host.speed.block_ms(params))
        });
        let store = self.store.as_ref().map(|store| {
            let reach = store.blocks().overlap(path);
            (reach, store.speed.block_ms(params))
        });
        host.into_iter().chain(store)
    }

    /// Writes a path to all tiers; what changed in each.
    pub(super) fn write(&mut self, path: &[u32]) -> impl Iterator<Item = (Tier, Touched)> {
        let host = self.host.as_mut().map(|host| host.blocks.touch(path));
        let store = self.store.as_ref().map(|store| store.blocks().touch(path));
        let host = host.map(|touched| (Tier::Host, touched));
        let store = store.map(|touched| (Tier::Shared, touched));
        host.into_iter().chain(store)
    }

    /// Empties what is the node's own.
    pub(super) fn wipe(&mut self) -> Vec<u32> {
        let mut removed = Vec::new();
        if let Some(host) = &mut self.host {
            host.blocks.evict_all(&mut removed);
        }
        removed
    }
}
