//! How do blocks move between the pool and the tiers below it, within a step?
//!
//! Down: what the pool evicted while the step was planned is copied out before the pass writes over
//! it. Up: when a sequence joins, the blocks that its chain has below the pool are copied in, one by
//! one, and published as if they had just been computed. Those that are on the disk are asked for
//! while the sequence waits, and it waits no longer than computing them would take: the others go
//! on meanwhile.

use std::time::{Duration, Instant};

use cache_index::block::BlockHash;
use prometheus::IntCounter;

use super::sequence::{DiskWait, Sequence};
use super::{BLOCK_TOKENS, Engine, Parts};
use crate::kv::pool::Stored;
use crate::kv::prefix::LastUse;
use crate::kv::store::{Store, Tier, TierChange, Wanted};
use crate::kv::table::BlockTable;
use crate::scheduler::pace::StepWork;

/// Blocks copied back within a step after which nobody else joins in it: 2,048 tokens. The default
/// model copies them in about the time of one decode.
pub(super) const FETCHED_MAX: usize = 128;

/// The tiers that these parts ask for and can have.
pub(super) fn store(parts: &mut Parts) -> Option<Store> {
    let block_bytes = parts.device.kept_bytes();
    let wanted = parts.host_blocks > 0 && block_bytes > 0;
    wanted.then(|| {
        let store = Store::new(parts.host_blocks, block_bytes, parts.disk.take());
        store.sharing(parts.shared.take())
    })
}

/// How often to look for what the disk has done while somebody waits for it.
const LOOK_WAITING: Duration = Duration::from_micros(300);
/// The same while nobody does: only the events wait.
const LOOK_IDLE: Duration = Duration::from_millis(20);
/// The same while nothing is on its way: what is told of a shared store is taken back when it is lost.
const LOOK_AT_REST: Duration = Duration::from_secs(1);

/// How whoever wants this chain, of which the first `found` blocks are in pool and host memory, goes on
/// waiting for the tiers below.
fn read_on(
    (store, late): (&mut Store, &IntCounter),
    wanted: &Wanted<'_>,
    found: usize,
    (wait, used): (DiskWait, LastUse),
) -> DiskWait {
    let Some(first) = wanted.chain.get(found).copied() else {
        return DiskWait::Over;
    };
    let now = Instant::now();
    let deadline = match wait {
        DiskWait::Until(deadline) => Some(deadline),
        DiskWait::Open if store.pays(first) => None,
        DiskWait::Open | DiskWait::Over => return DiskWait::Over,
    };
    let blocks = store.below(&wanted.chain[found..]);
    let rest = &wanted.chain[found + blocks..];
    if deadline.is_some_and(|deadline| now >= deadline) {
        let waits = blocks > 0 || store.is_reading(first) || store.is_asking(rest);
        late.inc_by(u64::from(waits));
        return DiskWait::Over;
    }
    let asks = store.ask(rest);
    let reads = store.read(wanted, found..found + blocks, used);
    if !(asks || reads || store.is_reading(first)) {
        return DiskWait::Over;
    }
    DiskWait::Until(deadline.unwrap_or_else(|| {
        let blocks = if blocks > 0 { blocks } else { rest.len() };
        now + Duration::from_secs_f64(store.rates.patience_ms(blocks) / 1e3)
    }))
}

impl Engine {
    /// Takes the pool's changes over, and keeps what it evicted.
    pub(super) fn note_changes(&mut self) {
        self.take_changes();
        if let Some(store) = &mut self.store {
            store.make_room(&self.pool, &mut *self.parts.device);
            self.changes.extend(store.take_changes());
        }
    }

    /// Takes what the disk has done.
    pub(super) fn poll_disk(&mut self) {
        if let Some(store) = &mut self.store {
            store.poll(&self.pool, &mut *self.parts.device);
        }
        self.note_changes();
    }

    /// When to look at the disk again, if nothing else is to do.
    pub(super) fn next_look(&self) -> Option<Duration> {
        let waited_for = self.waiting.iter().any(|s| !s.waits_for_node()) || self.outgoing.seeks();
        let store = self.store.as_ref();
        match store {
            _ if waited_for => Some(LOOK_WAITING),
            Some(store) if store.is_busy() => Some(LOOK_IDLE),
            Some(store) if store.must_be_watched() => Some(LOOK_AT_REST),
            _ => None,
        }
    }

    /// Whether this waiting sequence, `found` of whose blocks are in pool and host memory, should
    /// wait on for others that are on the disk or in the shared store.
    pub(super) fn reads(&mut self, index: usize, found: usize) -> bool {
        let Some(store) = &mut self.store else {
            return false;
        };
        let sequence = &mut self.waiting[index];
        let wanted = Wanted {
            chain: &sequence.chain,
            tokens: &sequence.tokens,
            salt: sequence.job.scope.salt.as_ref(),
        };
        let late = &self.parts.metrics.tiers.late;
        let now = self.pool.now();
        sequence.disk = read_on((store, late), &wanted, found, (sequence.disk, now));
        sequence.waits_for_disk()
    }

    /// Has slow tiers bring what they are expected to hold of a prompt that has just come: by the time it
    /// has its turn it is in host memory. What they do not bring is for its turn to see to.
    pub(super) fn read_ahead(&mut self, sequence: &Sequence) {
        let Some(store) = &mut self.store else { return };
        let expected = sequence.job.prefetch_tokens / BLOCK_TOKENS;
        let chain = &sequence.chain[..expected.min(sequence.chain.len())];
        let held = self.pool.overlap(chain).blocks;
        let found = held + store.overlap(&chain[held..]);
        let wanted = Wanted {
            chain,
            tokens: &sequence.tokens,
            salt: sequence.job.scope.salt.as_ref(),
        };
        if chain.get(found).is_some_and(|first| store.pays(*first)) {
            let below = found + store.below(&chain[found..]);
            store.ask(&chain[below..]);
            store.read(&wanted, found..below, self.pool.now());
        }
    }

    /// The same for another node, which has asked for this chain: what is on the disk here, or known to
    /// be in the shared store.
    pub(super) fn reads_for(&mut self, wanted: &Wanted<'_>, wait: DiskWait) -> DiskWait {
        let held = self.pool.overlap(wanted.chain).blocks;
        let Some(store) = &mut self.store else {
            return DiskWait::Over;
        };
        let found = held + store.overlap(&wanted.chain[held..]);
        let known = found + store.below(&wanted.chain[found..]);
        let wanted = Wanted {
            chain: &wanted.chain[..known],
            ..*wanted
        };
        let late = &self.parts.metrics.tiers.late;
        read_on((store, late), &wanted, found, (wait, self.pool.now()))
    }

    pub(super) fn take_changes(&mut self) {
        let changes = self.pool.take_changes();
        let evicted = self.pool.take_evicted();
        match &mut self.store {
            Some(store) => {
                store.note(changes, evicted, &self.pool, &mut *self.parts.device);
                self.changes.extend(store.take_changes());
            }
            None => {
                let changes = changes.into_iter().map(TierChange::on_device);
                self.changes.extend(changes);
            }
        }
    }

    /// Copies back what the tiers have of a chain after the blocks in its table.
    /// `tokens` begins with those of the chain.
    pub(super) fn fetch(&mut self, chain: &[BlockHash], tokens: &[u32], table: &mut BlockTable) {
        let from = table.blocks().len();
        let Some(store) = &mut self.store else { return };
        let most = from + store.overlap(&chain[from..]);
        if most == from {
            return;
        }
        if !store.rates.fetch_pays() {
            store.rates.forgive();
            return;
        }
        // What was evicted for others goes first, so that each block that comes back has to make
        // room for one at most.
        self.note_changes();
        let started = Instant::now();
        let mut fetched = 0;
        while from + fetched < most && self.fetch_next(chain[from + fetched], tokens, table) {
            fetched += 1;
        }
        self.note_changes();
        let Some(store) = &mut self.store else { return };
        if fetched > 0 {
            let ms = started.elapsed().as_secs_f64() * 1e3;
            store.rates.fetched(fetched, ms);
            let tokens = (fetched * BLOCK_TOKENS) as u64;
            let tiers = &self.parts.metrics.tiers;
            tiers.hit_tokens(Tier::Host).inc_by(tokens);
            tiers.fetch_seconds.inc_by(ms / 1e3);
        }
        self.fetched += fetched;
    }

    /// Copies one block back, behind those in the table; false if that cannot be.
    fn fetch_next(&mut self, hash: BlockHash, tokens: &[u32], table: &mut BlockTable) -> bool {
        let index = table.blocks().len();
        let end = (index + 1) * BLOCK_TOKENS;
        if table.grow(&mut self.pool, end).is_err() {
            return false;
        }
        // The block that it may have taken from another is copied out before it is written to.
        self.take_changes();
        let block = table.blocks()[index];
        let Some(store) = &mut self.store else {
            return false;
        };
        if !store.copy_back(hash, block, &mut *self.parts.device) {
            return false;
        }
        table.publish(&mut self.pool, &tokens[..end]);
        self.take_changes();
        if let Some(store) = &mut self.store {
            store.taken(hash);
        }
        true
    }

    /// Learns what computing costs, from steps that did nothing else.
    pub(super) fn observe_tiers(&mut self, work: &StepWork, ms: f64) {
        if let Some(store) = &mut self.store
            && work.decode_tokens == 0
            && work.prefill_tokens >= BLOCK_TOKENS
            && self.fetched == 0
        {
            store.rates.computed(work.prefill_tokens, ms);
        }
    }

    /// Everything that can be found, in all tiers.
    pub(super) fn held(&self) -> Vec<(Tier, Vec<Stored>)> {
        let device = self.pool.snapshot();
        match &self.store {
            Some(store) => store.snapshot(device),
            None => device.into_iter().map(|run| (Tier::Device, run)).collect(),
        }
    }

    /// Shows what moved.
    pub(super) fn count_tiers(&mut self) {
        let Some(store) = &mut self.store else { return };
        let moved = store.take_moved();
        let tiers = &self.parts.metrics.tiers;
        tiers.stored(Tier::Host).inc_by(moved.stored);
        tiers.evicted(Tier::Host).inc_by(moved.evicted);
        tiers.refused.inc_by(moved.refused);
        tiers.blocks(Tier::Host).set(store.host_blocks() as i64);
        tiers.capacity(Tier::Host).set(store.host_capacity() as i64);
        tiers
            .block_seconds(Tier::Host)
            .set(store.rates.host_block_s());
        tiers.capacity(Tier::Disk).set(store.disk_capacity() as i64);
        tiers
            .block_seconds(Tier::Disk)
            .set(store.rates.disk_block_s());
        let bytes = store.block_bytes();
        tiers
            .bytes(Tier::Host)
            .set((store.host_blocks() * bytes) as i64);
        tiers
            .block_seconds(Tier::Shared)
            .set(store.rates.shared_block_s());
        if let Some(moved) = store.take_disk_moved() {
            let blocks = store.disk_blocks();
            tiers.count_disk(&moved, blocks, blocks * bytes);
        }
        if let Some(moved) = store.take_shared_moved() {
            tiers.shared.count(&moved, bytes);
        }
        if let Some(shared) = store.shared() {
            let told = shared.told_blocks();
            tiers.blocks(Tier::Shared).set(told as i64);
            tiers.bytes(Tier::Shared).set((told * bytes) as i64);
            tiers.shared.up.set(i64::from(shared.is_up()));
        }
    }
}
