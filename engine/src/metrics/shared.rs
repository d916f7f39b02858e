//! What is counted of the shared KV store.

use cache_index::block::BLOCK_TOKENS;
use prometheus::{Counter, IntCounter, IntGauge};

use super::Builder;
use crate::kv::store::shared::SharedMoved;

/// Of the store that nodes share.
pub struct SharedMetrics {
    /// 1 while it is reached.
    pub up: IntGauge,
    hit_tokens: IntCounter,
    stored: IntCounter,
    no_room: IntCounter,
    dropped: IntCounter,
    missed: IntCounter,
    /// Objects that were not the blocks that they should be.
    pub damaged: IntCounter,
    failed: IntCounter,
    put_bytes: IntCounter,
    put_seconds: Counter,
    get_bytes: IntCounter,
    get_seconds: Counter,
}

impl SharedMetrics {
    pub(super) fn new(b: &Builder<'_>, hit_tokens: IntCounter, stored: IntCounter) -> Self {
        Self {
            up: b.gauge(
                "homing:kv_shared_up",
                "1 while the shared KV store is reached.",
            ),
            hit_tokens,
            stored,
            no_room: b.counter(
                "homing:kv_shared_no_room_total",
                "KV blocks that the shared store had no room for.",
            ),
            dropped: b.counter(
                "homing:kv_shared_dropped_total",
                "KV blocks not put because the shared store was away or too busy.",
            ),
            missed: b.counter(
                "homing:kv_shared_missed_total",
                "KV blocks that were gone from the shared store when they were fetched.",
            ),
            damaged: b.counter(
                "homing:kv_shared_damaged_total",
                "Objects of the shared store that were not the KV blocks that they should be.",
            ),
            failed: b.counter(
                "homing:kv_shared_failed_total",
                "KV blocks that the shared store failed to give or to take.",
            ),
            put_bytes: b.counter(
                "homing:kv_shared_put_bytes_total",
                "Bytes of KV put into the shared store.",
            ),
            put_seconds: b.seconds(
                "homing:kv_shared_put_seconds_total",
                "Seconds that putting them took.",
            ),
            get_bytes: b.counter(
                "homing:kv_shared_get_bytes_total",
                "Bytes of KV fetched from the shared store.",
            ),
            get_seconds: b.seconds(
                "homing:kv_shared_get_seconds_total",
                "Seconds that fetching them took.",
            ),
        }
    }

    /// Counts what the store did, with blocks of so many bytes.
    pub fn count(&self, moved: &SharedMoved, block_bytes: usize) {
        self.hit_tokens.inc_by(moved.read * BLOCK_TOKENS as u64);
        self.stored.inc_by(moved.stored);
        self.no_room.inc_by(moved.no_room);
        self.dropped.inc_by(moved.dropped);
        self.missed.inc_by(moved.missed);
        self.damaged.inc_by(moved.damaged);
        self.failed.inc_by(moved.failed);
        self.put_bytes.inc_by(moved.stored * block_bytes as u64);
        self.put_seconds.inc_by(moved.put_ms / 1e3);
        self.get_bytes.inc_by(moved.read * block_bytes as u64);
        self.get_seconds.inc_by(moved.get_ms / 1e3);
    }
}
