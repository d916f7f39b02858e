//! What does this node count, and under which names?
//!
//! vLLM's names where they exist, so that dashboards and gateways made for it work here; ours
//! (`homing:`) for the rest. Every name is in this file, and labels come from closed sets.

use std::time::{SystemTime, UNIX_EPOCH};

use prometheus::{
    Counter, Gauge, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry,
    TextEncoder,
};

use cache_index::block::BLOCK_TOKENS;

use crate::kv::transfer::Medium;

mod shared;
mod tiers;

pub use shared::SharedMetrics;
pub use tiers::TierMetrics;

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
    /// Those of them that were sent while a pass was computing.
    pub bytes_streamed: IntCounter,
}

impl TransferMetrics {
    /// Bytes of blocks that were handed over this way.
    pub fn bytes_sent(&self, medium: Medium) -> IntCounter {
        self.bytes_sent.with_label_values(&[medium.as_str()])
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

    fn seconds(&self, name: &str, help: &str) -> Counter {
        let counter = Counter::with_opts(self.opts(name, help)).expect("the name is valid");
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
            bytes_streamed: self.counter(
                "homing:kv_transfer_streamed_bytes_total",
                "Of the bytes sent, those sent while a step was computing.",
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
            tiers: TierMetrics::new(&b),
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
