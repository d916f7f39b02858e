//! How does the rest of the world learn what this node holds?
//!
//! One batch of KV events per step, in vLLM's format, so that any router made for it can read
//! them. The step loop only numbers and encodes a batch into a bounded log ([`EventLog`]); tasks
//! of their own carry the log to subscribers ([`publish`]) and to late joiners ([`replay`]), so a
//! slow or absent subscriber never holds up a step. A subscriber that falls behind the log sees a
//! gap in the numbers and asks for a replay; what the log no longer has is replaced by a snapshot.
//!
//! Left out on purpose: secrecy. Events carry token ids in plain; they belong on loopback or on a
//! private network.

pub mod publish;
pub mod replay;

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use cache_index::block::{BLOCK_TOKENS, BlockHash};
use cache_index::event::{EngineHash, EventBatch, ExtraKeys, GroupKind, KvEvent, Medium};
use cache_index::wire::encode_batch;
use tokio::sync::Notify;

use crate::kv::pool::{Change, Stored};
use crate::kv::store::{Tier, TierChange};

/// A numbered batch as it goes over the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Numbered {
    /// Its number; consecutive from 0 in each life of the process.
    pub seq: u64,
    /// The encoded batch.
    pub payload: Bytes,
}

/// The last batches, and the number of the next one.
#[derive(Debug)]
pub struct EventLog {
    boot_id: String,
    batches_max: usize,
    inner: Mutex<Inner>,
    /// Wakes the publisher.
    appended: Notify,
}

#[derive(Debug, Default)]
struct Inner {
    batches: VecDeque<Numbered>,
    next_seq: u64,
    /// Time never runs backwards within one life: a consumer takes that for another life.
    timestamp: f64,
}

impl EventLog {
    /// An empty log of at most `batches_max` batches, for one life of the process.
    pub fn new(boot_id: String, batches_max: usize) -> Self {
        let inner = Mutex::new(Inner::default());
        Self {
            boot_id,
            batches_max,
            inner,
            appended: Notify::new(),
        }
    }

    /// Appends one step's changes as one batch; nothing if nothing changed.
    pub fn append(&self, changes: &[TierChange]) {
        if changes.is_empty() {
            return;
        }
        let events = events_of(changes);
        let mut inner = self.lock();
        let batch = EventBatch {
            timestamp: inner.advance_clock(),
            events,
            dp_rank: None,
            boot_id: Some(self.boot_id.clone()),
        };
        let seq = inner.next_seq;
        inner.next_seq += 1;
        inner.batches.push_back(Numbered {
            seq,
            payload: encode_batch(&batch).into(),
        });
        if inner.batches.len() > self.batches_max {
            inner.batches.pop_front();
        }
        drop(inner);
        self.appended.notify_one();
    }

    /// Everything held, as one batch with the number of the last one it includes; none if nothing
    /// was ever appended. Call it from the thread that appends, between two steps.
    pub fn snapshot(&self, runs: &[(Tier, Vec<Stored>)]) -> Option<Numbered> {
        let mut inner = self.lock();
        let seq = inner.next_seq.checked_sub(1)?;
        let stored = runs.iter().map(|(tier, run)| stored_event(*tier, run));
        let batch = EventBatch::snapshot(inner.advance_clock(), &self.boot_id, stored.collect());
        Some(Numbered {
            seq,
            payload: encode_batch(&batch).into(),
        })
    }

    /// The batches from `seq` on that are still here, at most `count` of them.
    pub fn from(&self, seq: u64, count: usize) -> Vec<Numbered> {
        let inner = self.lock();
        let skip = inner.batches.partition_point(|batch| batch.seq < seq);
        inner
            .batches
            .iter()
            .skip(skip)
            .take(count)
            .cloned()
            .collect()
    }

    /// Whether every batch from `seq` on is still here (true also for numbers yet to come).
    pub fn reaches(&self, seq: u64) -> bool {
        let inner = self.lock();
        let oldest = inner
            .batches
            .front()
            .map_or(inner.next_seq, |batch| batch.seq);
        oldest <= seq
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Nothing panics while the lock is held; the data is whole even if a thread died.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn advance_clock(&mut self) -> f64 {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        self.timestamp = now.as_secs_f64().max(self.timestamp);
        self.timestamp
    }
}

/// Changes as events: consecutive blocks of one chain become one event, and so do consecutive
/// removals, as far as they are of one tier; the order between events is the order in which things
/// happened.
fn events_of(changes: &[TierChange]) -> Vec<KvEvent> {
    let same_event = |a: &TierChange, b: &TierChange| {
        a.tier == b.tier
            && match (&a.change, &b.change) {
                (Change::Stored(a), Change::Stored(b)) => b.parent_hash == Some(a.content.hash),
                (Change::Removed(_), Change::Removed(_)) => true,
                _ => false,
            }
    };
    let of_one = changes.chunk_by(same_event);
    of_one
        .filter_map(|changes| Some(event_of(changes.first()?.tier, changes)))
        .collect()
}

fn event_of(tier: Tier, changes: &[TierChange]) -> KvEvent {
    let removed: Vec<_> = changes.iter().filter_map(removed_hash).collect();
    if !removed.is_empty() {
        return KvEvent::Removed {
            block_hashes: removed,
            medium: medium(tier),
            group_idx: None,
        };
    }
    let stored = changes.iter().filter_map(|change| match &change.change {
        Change::Stored(stored) => Some(stored.clone()),
        Change::Removed(_) => None,
    });
    stored_event(tier, &stored.collect::<Vec<_>>())
}

fn removed_hash(change: &TierChange) -> Option<EngineHash> {
    match &change.change {
        Change::Removed(hash) => Some(engine_hash(*hash)),
        Change::Stored(_) => None,
    }
}

/// The pool's blocks are named without a medium, as before there were tiers.
fn medium(tier: Tier) -> Option<Medium> {
    match tier {
        Tier::Device => None,
        Tier::Host => Some(Medium::Host),
        Tier::Disk => Some(Medium::Disk),
        Tier::Shared => Some(Medium::Shared),
    }
}

/// One event for a run of consecutive blocks of one chain.
fn stored_event(tier: Tier, run: &[Stored]) -> KvEvent {
    let first = run.first().expect("a run has a block");
    // The salt enters the first block of a chain only, as in vLLM; its children inherit it.
    let extra_keys = match (&first.content.salt, first.parent_hash) {
        (Some(salt), None) => ExtraKeys::salt(salt),
        _ => ExtraKeys::none(),
    };
    KvEvent::Stored {
        block_hashes: run
            .iter()
            .map(|stored| engine_hash(stored.content.hash))
            .collect(),
        parent: first.parent_hash.map(engine_hash),
        token_ids: run
            .iter()
            .flat_map(|stored| stored.content.tokens)
            .collect(),
        block_size: BLOCK_TOKENS,
        medium: medium(tier),
        lora_name: None,
        extra_keys,
        group_idx: None,
        group_kind: GroupKind::Unsaid,
    }
}

fn engine_hash(hash: BlockHash) -> EngineHash {
    EngineHash::Bytes(Box::from(hash.0))
}

#[cfg(test)]
mod tests;
