//! How do blocks move between the pool and the tiers below it, within a step?
//!
//! Down: what the pool evicted while the step was planned is copied out before the pass writes over
//! it. Up: when a sequence joins, the blocks that its chain has below the pool are copied in, one by
//! one, and published as if they had just been computed. Those that are on the disk are asked for
//! while the sequence waits, and it waits no longer than computing them would take: the others go
//! on meanwhile.

use std::time::{Duration, Instant};

use cache_index::block::BlockHash;

use super::sequence::DiskWait;
use super::{BLOCK_TOKENS, Engine, Parts};
use crate::kv::pool::Stored;
use crate::kv::store::{Store, Tier, TierChange};
use crate::kv::table::BlockTable;
use crate::scheduler::pace::StepWork;

/// Blocks copied back within a step after which nobody else joins in it: 2,048 tokens. The default
/// model copies them in about the time of one decode.
pub(super) const FETCHED_MAX: usize = 128;

/// The tiers that these parts ask for and can have.
pub(super) fn store(parts: &mut Parts) -> Option<Store> {
    let block_bytes = parts.device.block_bytes();
    let wanted = parts.host_blocks > 0 && block_bytes > 0;
    wanted.then(|| Store::new(parts.host_blocks, block_bytes, parts.disk.take()))
}

/// How often to look for what the disk has done while somebody waits for it.
const LOOK_WAITING: Duration = Duration::from_micros(300);
/// The same while nobody does: only the events wait.
const LOOK_IDLE: Duration = Duration::from_millis(20);

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
        let busy = self.store.as_ref().is_some_and(Store::is_busy);
        let waited_for = self.waiting.iter().any(|s| !s.waits_for_node()) || self.outgoing.seeks();
        (busy || waited_for).then_some(if waited_for { LOOK_WAITING } else { LOOK_IDLE })
    }

    /// Whether this waiting sequence, `found` of whose blocks are in pool and host memory, should
    /// wait on for others that are on the disk.
    pub(super) fn reads(&mut self, index: usize, found: usize) -> bool {
        let sequence = &mut self.waiting[index];
        let (chain, wait) = (std::mem::take(&mut sequence.chain), sequence.disk);
        let wait = self.read_on(&chain[found..], wait);
        let sequence = &mut self.waiting[index];
        sequence.chain = chain;
        sequence.disk = wait;
        sequence.waits_for_disk()
    }

    /// How whoever wants these blocks, the first of which is in neither pool nor host memory, goes on
    /// waiting for the disk.
    pub(super) fn read_on(&mut self, rest: &[BlockHash], wait: DiskWait) -> DiskWait {
        let Some(store) = &mut self.store else {
            return DiskWait::Over;
        };
        let blocks = store.on_disk(rest);
        let coming = rest.first().is_some_and(|hash| store.is_reading(*hash));
        if wait == DiskWait::Over || (blocks == 0 && !coming) {
            return DiskWait::Over;
        }
        let until = match wait {
            DiskWait::Until(deadline) if Instant::now() < deadline => deadline,
            DiskWait::Until(_) => {
                self.parts.metrics.tiers.late.inc();
                return DiskWait::Over;
            }
            _ if !store.rates.read_pays() => {
                store.rates.forgive_reading();
                return DiskWait::Over;
            }
            _ => {
                let patience_ms = store.rates.patience_ms(blocks);
                Instant::now() + Duration::from_secs_f64(patience_ms / 1e3)
            }
        };
        if store.read(&rest[..blocks]) || coming {
            DiskWait::Until(until)
        } else {
            DiskWait::Over
        }
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
        let Some(moved) = store.take_disk_moved() else {
            return;
        };
        tiers.stored(Tier::Disk).inc_by(moved.stored);
        tiers.evicted(Tier::Disk).inc_by(moved.evicted);
        let read = moved.read * BLOCK_TOKENS as u64;
        tiers.hit_tokens(Tier::Disk).inc_by(read);
        tiers.dropped.inc_by(moved.dropped);
        tiers.damaged.inc_by(moved.damaged);
        tiers.failed.inc_by(moved.failed);
        tiers.blocks(Tier::Disk).set(store.disk_blocks() as i64);
        tiers
            .bytes(Tier::Disk)
            .set((store.disk_blocks() * bytes) as i64);
    }
}
