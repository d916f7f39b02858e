//! What is counted of the tiers below the KV pool.

use cache_index::block::BLOCK_TOKENS;
use prometheus::{Counter, Gauge, GaugeVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec};

use super::{Builder, SharedMetrics};
use crate::kv::store::Tier;
use crate::kv::store::disk::DiskMoved;

/// The tiers below the pool.
const BELOW: [Tier; 3] = [Tier::Host, Tier::Disk, Tier::Shared];

/// Of the tiers below the KV pool.
pub struct TierMetrics {
    hit_tokens: IntCounterVec,
    blocks: IntGaugeVec,
    bytes: IntGaugeVec,
    capacity: IntGaugeVec,
    block_seconds: GaugeVec,
    stored: IntCounterVec,
    evicted: IntCounterVec,
    /// Evicted blocks that were not worth keeping.
    pub refused: IntCounter,
    /// Seconds of the step loop that went into copying blocks back.
    pub fetch_seconds: Counter,
    /// Blocks that the disk was too busy or too full to take.
    pub dropped: IntCounter,
    /// Blocks on the disk whose bytes were not those that were written.
    pub damaged: IntCounter,
    /// Reads and writes of the disk that failed.
    pub failed: IntCounter,
    /// Requests that computed what disk or shared store did not give in time.
    pub late: IntCounter,
    /// The shared store.
    pub shared: SharedMetrics,
}

impl TierMetrics {
    pub(super) fn new(b: &Builder<'_>) -> Self {
        let counters = |name: &str, help: &str| counters(b, name, help);
        let gauges = |name: &str, help: &str| gauges(b, name, help);
        let hit_tokens = counters(
            "homing:kv_tier_hit_tokens_total",
            "Prompt tokens that a tier below the pool served.",
        );
        let stored = counters(
            "homing:kv_tier_stored_total",
            "KV blocks that went into a tier.",
        );
        let shared =
            |counters: &IntCounterVec| counters.with_label_values(&[Tier::Shared.as_str()]);
        Self {
            shared: SharedMetrics::new(b, shared(&hit_tokens), shared(&stored)),
            hit_tokens,
            blocks: gauges(
                "homing:kv_tier_blocks",
                "KV blocks in a tier below the pool.",
            ),
            bytes: gauges(
                "homing:kv_tier_bytes",
                "Bytes of KV in a tier below the pool.",
            ),
            capacity: gauges(
                "homing:kv_tier_capacity_blocks",
                "KV blocks that a tier below the pool has room for.",
            ),
            block_seconds: block_seconds(b),
            stored,
            evicted: counters(
                "homing:kv_tier_evicted_total",
                "KV blocks that had to make room in a tier.",
            ),
            refused: b.counter(
                "homing:kv_tier_refused_total",
                "KV blocks that left the pool and were not worth keeping.",
            ),
            fetch_seconds: b.seconds(
                "homing:kv_tier_fetch_seconds_total",
                "Seconds of steps that went into copying KV blocks back.",
            ),
            dropped: b.counter(
                "homing:kv_disk_dropped_total",
                "KV blocks that the disk was too busy or too full to take.",
            ),
            damaged: b.counter(
                "homing:kv_disk_damaged_total",
                "KV blocks on the disk that were found damaged.",
            ),
            failed: b.counter(
                "homing:kv_disk_failed_total",
                "Reads and writes of the KV disk that failed.",
            ),
            late: b.counter(
                "homing:kv_disk_late_total",
                "Requests that computed what disk or shared store did not give in time.",
            ),
        }
    }

    /// Prompt tokens that a tier served.
    pub fn hit_tokens(&self, tier: Tier) -> IntCounter {
        self.hit_tokens.with_label_values(&[tier.as_str()])
    }

    /// Blocks in a tier.
    pub fn blocks(&self, tier: Tier) -> IntGauge {
        self.blocks.with_label_values(&[tier.as_str()])
    }

    /// Bytes of them.
    pub fn bytes(&self, tier: Tier) -> IntGauge {
        self.bytes.with_label_values(&[tier.as_str()])
    }

    /// Blocks that a tier has room for.
    pub fn capacity(&self, tier: Tier) -> IntGauge {
        self.capacity.with_label_values(&[tier.as_str()])
    }

    /// Seconds until a block from a tier is in the pool, as measured lately.
    pub fn block_seconds(&self, tier: Tier) -> Gauge {
        self.block_seconds.with_label_values(&[tier.as_str()])
    }

    /// Blocks that went into a tier.
    pub fn stored(&self, tier: Tier) -> IntCounter {
        self.stored.with_label_values(&[tier.as_str()])
    }

    /// Blocks that had to make room in a tier.
    pub fn evicted(&self, tier: Tier) -> IntCounter {
        self.evicted.with_label_values(&[tier.as_str()])
    }

    /// Counts what the drive did, which now holds so many blocks and bytes of them.
    pub fn count_disk(&self, moved: &DiskMoved, blocks: usize, bytes: usize) {
        self.stored(Tier::Disk).inc_by(moved.stored);
        self.evicted(Tier::Disk).inc_by(moved.evicted);
        let read = moved.read * BLOCK_TOKENS as u64;
        self.hit_tokens(Tier::Disk).inc_by(read);
        self.dropped.inc_by(moved.dropped);
        self.damaged.inc_by(moved.damaged);
        self.failed.inc_by(moved.failed);
        self.blocks(Tier::Disk).set(blocks as i64);
        self.bytes(Tier::Disk).set(bytes as i64);
    }
}

fn block_seconds(b: &Builder<'_>) -> GaugeVec {
    let opts = b.opts(
        "homing:kv_tier_block_seconds",
        "Seconds until a KV block from a tier is in the pool, measured lately; 0: not yet.",
    );
    let seconds = GaugeVec::new(opts, &["tier"]).expect("the name is valid");
    b.register(seconds.clone());
    seconds
}

/// A counter for each tier below the pool.
fn counters(b: &Builder<'_>, name: &str, help: &str) -> IntCounterVec {
    let counters = IntCounterVec::new(b.opts(name, help), &["tier"]);
    let counters = counters.expect("the name is valid");
    for tier in BELOW {
        counters.with_label_values(&[tier.as_str()]);
    }
    b.register(counters.clone());
    counters
}

/// A gauge for each tier below the pool.
fn gauges(b: &Builder<'_>, name: &str, help: &str) -> IntGaugeVec {
    let gauges = IntGaugeVec::new(b.opts(name, help), &["tier"]);
    let gauges = gauges.expect("the name is valid");
    for tier in BELOW {
        gauges.with_label_values(&[tier.as_str()]);
    }
    b.register(gauges.clone());
    gauges
}
