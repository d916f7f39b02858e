//! What does this node count, and under which names?
//!
//! vLLM's names where they exist, so that dashboards and gateways made for it work here; ours
//! (`homing:`) for the rest. Every name is in this file, and labels come from closed sets.

use std::time::{SystemTime, UNIX_EPOCH};

use prometheus::{
    Counter, Gauge, GaugeVec, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge,
    IntGaugeVec, Opts, Registry, TextEncoder,
};

use cache_index::block::BLOCK_TOKENS;

use crate::kv::store::Tier;
use crate::kv::transfer::Medium;

/// How a request ended, as a label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The model or a stop string ended the answer.
    Stop,
    /// `max_tokens` or the context ended it.
    Length,
    /// The request did not end by its deadline.
    TimedOut,
    /// The client went away.
    Cancelled,
    /// The node failed.
    Failed,
}

impl Ending {
    /// The label's value, also used in logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::TimedOut => "timeout",
            Self::Cancelled => "abort",
            Self::Failed => "error",
        }
    }
}

/// Of prefilled prompts that wait to be fetched.
pub struct TicketMetrics {
    /// Blocks that are pinned for them.
    pub blocks: IntGauge,
    /// Tickets.
    pub open: IntGauge,
    /// Tickets whose deadline passed.
    pub expired: IntCounter,
    /// Tickets broken before their deadline, for want of blocks.
    pub broken: IntCounter,
}

/// Of KV that moves between nodes.
pub struct TransferMetrics {
    /// Handovers that are open at this node.
    pub open: IntGauge,
    /// Transfers whose receiver has everything.
    pub sent: IntCounter,
    /// Transfers that this node asked for.
    pub asked: IntCounter,
    /// Those of them that came whole.
    pub received: IntCounter,
    /// Those that failed: their prompts were computed here, or their requests failed.
    pub failed: IntCounter,
    /// Bytes of blocks that came.
    pub bytes_received: IntCounter,
    bytes_sent: IntCounterVec,
}

impl TransferMetrics {
    /// Bytes of blocks that were handed over this way.
    pub fn bytes_sent(&self, medium: Medium) -> IntCounter {
        self.bytes_sent.with_label_values(&[medium.as_str()])
    }
}

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
    /// Requests that computed what the disk did not give in time.
    pub late: IntCounter,
}

impl TierMetrics {
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
}

/// The handles behind `/metrics`.
pub struct Metrics {
    registry: Registry,
    /// Sequences in the running batch.
    pub running: IntGauge,
    /// Requests that wait for blocks.
    pub waiting: IntGauge,
    /// Share of the pool that sequences hold, 0 to 1.
    pub kv_usage: Gauge,
    /// Blocks that sequences hold.
    pub kv_blocks_held: IntGauge,
    /// Blocks that can be found by hash, used or idle.
    pub kv_blocks_published: IntGauge,
    /// Prefilled prompts that wait to be fetched.
    pub tickets: TicketMetrics,
    /// KV that moves between nodes.
    pub transfers: TransferMetrics,
    /// The tiers below the pool.
    pub tiers: TierMetrics,
    /// Open client connections.
    pub connections: IntGauge,
    /// Prompt tokens of all requests that joined, cached ones included.
    pub prompt_tokens: IntCounter,
    /// Tokens sampled.
    pub generation_tokens: IntCounter,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_queries: IntCounter,
    /// Prompt tokens found there.
    pub prefix_hits: IntCounter,
    /// Sequences that gave their blocks back to older ones.
    pub preemptions: IntCounter,
    /// Tokens of answers that a grammar forced, taken without sampling.
    pub forced_tokens: IntCounter,
    /// Tokens computed by forward passes, of prompts and answers.
    pub computed_tokens: IntCounter,
    /// Seconds from arrival to the first token.
    pub time_to_first_token: Histogram,
    /// Seconds between two tokens of an answer.
    pub inter_token_latency: Histogram,
    /// Seconds of one step.
    pub step_seconds: Histogram,
    finished: IntCounterVec,
}

/// Bounds for times to the first token: 1 ms (a cached prompt) to over a minute (a long queue).
const FIRST_TOKEN_S: [f64; 16] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 60.0,
];
/// Bounds for times of one step, and between tokens.
const STEP_S: [f64; 14] = [
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 0.75, 1.0, 2.5,
];

struct Builder<'a> {
    registry: Registry,
    model: &'a str,
}

impl Builder<'_> {
    fn opts(&self, name: &str, help: &str) -> Opts {
        Opts::new(name, help).const_label("model_name", self.model)
    }

    fn register(&self, metric: impl prometheus::core::Collector + 'static) {
        self.registry
            .register(Box::new(metric))
            .expect("every metric name appears once");
    }

    fn counter(&self, name: &str, help: &str) -> IntCounter {
        let counter = IntCounter::with_opts(self.opts(name, help)).expect("the name is valid");
        self.register(counter.clone());
        counter
    }

    fn gauge(&self, name: &str, help: &str) -> IntGauge {
        let gauge = IntGauge::with_opts(self.opts(name, help)).expect("the name is valid");
        self.register(gauge.clone());
        gauge
    }

    fn float_gauge(&self, opts: Opts) -> Gauge {
        let gauge = Gauge::with_opts(opts).expect("the name is valid");
        self.register(gauge.clone());
        gauge
    }

    fn histogram(&self, name: &str, help: &str, bounds: &[f64]) -> Histogram {
        let opts = HistogramOpts::new(name, help)
            .const_label("model_name", self.model)
            .buckets(bounds.to_vec());
        let histogram = Histogram::with_opts(opts).expect("the name and bounds are valid");
        self.register(histogram.clone());
        histogram
    }

    /// What never changes in a process.
    fn constants(&self, kv_blocks: usize) {
        let cache = self
            .opts("vllm:cache_config_info", "The KV pool's shape.")
            .const_label("block_size", BLOCK_TOKENS.to_string())
            .const_label("num_gpu_blocks", kv_blocks.to_string());
        self.float_gauge(cache).set(1.0);
        let started = Opts::new(
            "process_start_time_seconds",
            "Start of the process, Unix time.",
        );
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        self.float_gauge(started).set(now.as_secs_f64());
    }

    fn tickets(&self) -> TicketMetrics {
        TicketMetrics {
            blocks: self.gauge(
                "homing:kv_blocks_pinned",
                "KV blocks of prefilled prompts that wait to be fetched.",
            ),
            open: self.gauge(
                "homing:kv_tickets",
                "Prefilled prompts that wait to be fetched.",
            ),
            expired: self.counter(
                "homing:kv_tickets_expired_total",
                "Prefilled prompts that nobody fetched in time.",
            ),
            broken: self.counter(
                "homing:kv_tickets_broken_total",
                "Prefilled prompts given up early for want of KV blocks.",
            ),
        }
    }

    fn transfers(&self) -> TransferMetrics {
        let opts = self.opts(
            "homing:kv_transfer_sent_bytes_total",
            "Bytes of KV blocks sent to other nodes.",
        );
        let bytes_sent = IntCounterVec::new(opts, &["medium"]).expect("the name is valid");
        for medium in [Medium::Tcp, Medium::Shared] {
            bytes_sent.with_label_values(&[medium.as_str()]);
        }
        self.register(bytes_sent.clone());
        TransferMetrics {
            open: self.gauge(
                "homing:kv_handovers",
                "Prompts that are computed or held for another node.",
            ),
            sent: self.counter(
                "homing:kv_transfers_sent_total",
                "Prompts that another node has taken over.",
            ),
            asked: self.counter(
                "homing:kv_transfers_asked_total",
                "Prompts whose KV this node asked another one for.",
            ),
            received: self.counter(
                "homing:kv_transfers_received_total",
                "Prompts whose KV came from another node.",
            ),
            failed: self.counter(
                "homing:kv_transfers_failed_total",
                "Prompts whose KV did not come from another node, and was computed if at all.",
            ),
            bytes_received: self.counter(
                "homing:kv_transfer_received_bytes_total",
                "Bytes of KV blocks received from other nodes.",
            ),
            bytes_sent,
        }
    }

    fn block_seconds(&self) -> GaugeVec {
        let opts = self.opts(
            "homing:kv_tier_block_seconds",
            "Seconds until a KV block from a tier is in the pool, measured lately; 0: not yet.",
        );
        let seconds = GaugeVec::new(opts, &["tier"]).expect("the name is valid");
        self.register(seconds.clone());
        seconds
    }

    fn tiers(&self) -> TierMetrics {
        let counters = |name: &str, help: &str| {
            let counters = IntCounterVec::new(self.opts(name, help), &["tier"]);
            let counters = counters.expect("the name is valid");
            counters.with_label_values(&[Tier::Host.as_str()]);
            counters.with_label_values(&[Tier::Disk.as_str()]);
            self.register(counters.clone());
            counters
        };
        let gauges = |name: &str, help: &str| {
            let gauges = IntGaugeVec::new(self.opts(name, help), &["tier"]);
            let gauges = gauges.expect("the name is valid");
            gauges.with_label_values(&[Tier::Host.as_str()]);
            gauges.with_label_values(&[Tier::Disk.as_str()]);
            self.register(gauges.clone());
            gauges
        };
        let seconds = self.opts(
            "homing:kv_tier_fetch_seconds_total",
            "Seconds of steps that went into copying KV blocks back.",
        );
        let fetch_seconds = Counter::with_opts(seconds).expect("the name is valid");
        self.register(fetch_seconds.clone());
        TierMetrics {
            hit_tokens: counters(
                "homing:kv_tier_hit_tokens_total",
                "Prompt tokens that a tier below the pool served.",
            ),
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
            block_seconds: self.block_seconds(),
            stored: counters(
                "homing:kv_tier_stored_total",
                "KV blocks that went into a tier.",
            ),
            evicted: counters(
                "homing:kv_tier_evicted_total",
                "KV blocks that had to make room in a tier.",
            ),
            refused: self.counter(
                "homing:kv_tier_refused_total",
                "KV blocks that left the pool and were not worth keeping.",
            ),
            fetch_seconds,
            dropped: self.counter(
                "homing:kv_disk_dropped_total",
                "KV blocks that the disk was too busy or too full to take.",
            ),
            damaged: self.counter(
                "homing:kv_disk_damaged_total",
                "KV blocks on the disk that were found damaged.",
            ),
            failed: self.counter(
                "homing:kv_disk_failed_total",
                "Reads and writes of the KV disk that failed.",
            ),
            late: self.counter(
                "homing:kv_disk_late_total",
                "Requests that computed what the disk did not give in time.",
            ),
        }
    }

    fn endings(&self) -> IntCounterVec {
        let opts = self.opts("vllm:request_success_total", "Requests that ended, by how.");
        let finished = IntCounterVec::new(opts, &["finished_reason"]).expect("the name is valid");
        // All rows exist from the start, so that a rate over them has a first value.
        for ending in [
            Ending::Stop,
            Ending::Length,
            Ending::TimedOut,
            Ending::Cancelled,
            Ending::Failed,
        ] {
            finished.with_label_values(&[ending.as_str()]);
        }
        self.register(finished.clone());
        finished
    }
}

impl Metrics {
    /// Registers everything for a node that serves `model` from a pool of `kv_blocks`.
    pub fn new(model: &str, kv_blocks: usize) -> Self {
        let b = Builder {
            registry: Registry::new(),
            model,
        };
        b.constants(kv_blocks);
        let usage = b.opts(
            "vllm:kv_cache_usage_perc",
            "Share of KV blocks in use, 0 to 1.",
        );
        Self {
            running: b.gauge(
                "vllm:num_requests_running",
                "Sequences in the running batch.",
            ),
            waiting: b.gauge("vllm:num_requests_waiting", "Requests that wait to run."),
            kv_usage: b.float_gauge(usage),
            kv_blocks_held: b.gauge("homing:kv_blocks_held", "KV blocks that sequences hold."),
            kv_blocks_published: b.gauge(
                "homing:kv_blocks_published",
                "KV blocks that can be found by hash.",
            ),
            tickets: b.tickets(),
            transfers: b.transfers(),
            tiers: b.tiers(),
            connections: b.gauge("homing:connections", "Open client connections."),
            prompt_tokens: b.counter("vllm:prompt_tokens_total", "Prompt tokens, cached or not."),
            generation_tokens: b.counter("vllm:generation_tokens_total", "Tokens sampled."),
            prefix_queries: b.counter(
                "vllm:prefix_cache_queries_total",
                "Prompt tokens looked up.",
            ),
            prefix_hits: b.counter(
                "vllm:prefix_cache_hits_total",
                "Prompt tokens found cached.",
            ),
            preemptions: b.counter(
                "vllm:num_preemptions_total",
                "Sequences that gave their blocks back.",
            ),
            forced_tokens: b.counter(
                "homing:forced_tokens_total",
                "Tokens that a grammar forced.",
            ),
            computed_tokens: b.counter(
                "homing:computed_tokens_total",
                "Tokens computed by forward passes.",
            ),
            time_to_first_token: b.histogram(
                "vllm:time_to_first_token_seconds",
                "From arrival to the first token.",
                &FIRST_TOKEN_S,
            ),
            inter_token_latency: b.histogram(
                "vllm:inter_token_latency_seconds",
                "Between two tokens of one answer.",
                &STEP_S,
            ),
            step_seconds: b.histogram("homing:step_seconds", "One step of the engine.", &STEP_S),
            finished: b.endings(),
            registry: b.registry,
        }
    }

    /// Counts a request that ended.
    pub fn finished(&self, ending: Ending) {
        self.finished.with_label_values(&[ending.as_str()]).inc();
    }

    /// The text of `/metrics`.
    pub fn render(&self) -> String {
        let encoder = TextEncoder::new();
        // Encoding into a string fails only on metrics without a name; ours are all above.
        encoder
            .encode_to_string(&self.registry.gather())
            .unwrap_or_default()
    }
}
