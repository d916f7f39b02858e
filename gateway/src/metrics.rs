//! What does the gateway count?
//!
//! All metric names live in one enum; labels come from closed sets (configured models and nodes,
//! dialects, statuses), so that no client can grow the registry. The admin interface renders it.

use prometheus::{
    Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts, Registry,
    TextEncoder,
};

/// Every metric of the request path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Name {
    Requests,
    Tokens,
    TimeToFirstToken,
    Duration,
    InFlight,
    Waiting,
    Retries,
    PredictionError,
    PromptMismatch,
    UsageMissing,
    PromptBlocks,
    Answers,
    Routes,
    Credit,
    DecisionsLeftOut,
    Held,
    HoldRefusals,
    Handovers,
    Fetches,
}

impl Name {
    fn text(self) -> (&'static str, &'static str) {
        match self {
            Self::Requests => (
                "homing_requests_total",
                "Requests by endpoint and HTTP status",
            ),
            Self::Tokens => ("homing_tokens_total", "Billed tokens by model and class"),
            Self::TimeToFirstToken => (
                "homing_time_to_first_token_seconds",
                "Arrival to the first generated text",
            ),
            Self::Duration => ("homing_request_duration_seconds", "Arrival to the end"),
            Self::InFlight => ("homing_requests_in_flight", "Requests that have not ended"),
            Self::Waiting => (
                "homing_requests_waiting",
                "Requests waiting for their tenant's turn",
            ),
            Self::Retries => (
                "homing_retries_total",
                "Attempts after the first, by node that failed",
            ),
            Self::PredictionError => (
                "homing_cached_prediction_error_tokens",
                "Expected against real cached tokens",
            ),
            Self::PromptMismatch => (
                "homing_prompt_mismatch_total",
                "Prompts whose token count or block hash the node disagrees with",
            ),
            Self::UsageMissing => (
                "homing_usage_missing_total",
                "Answers without a usage report",
            ),
            Self::PromptBlocks => (
                "homing_prompt_blocks_total",
                "Prompt blocks by whether their hash was known",
            ),
            Self::Answers => (
                "homing_answers_total",
                "Answers whose tokens a node reported, by whether a next turn can repeat them",
            ),
            Self::Routes => ("homing_routes_total", "Decisions by node and reason"),
            Self::Credit => (
                "homing_cache_credit_tokens_total",
                "Prompt tokens by node: expected in its cache, found there, and the part of each that the other lacks",
            ),
            Self::Held => (
                "homing_turns_held",
                "Turns that wait in the gateway until the nodes have time or room for them",
            ),
            Self::HoldRefusals => (
                "homing_hold_refusals_total",
                "Turns that were told to come again, because the nodes have no time or room",
            ),
            Self::Handovers => (
                "homing_handovers_total",
                "Turns that two nodes shared, by the one that computed the prompt and what came of it",
            ),
            Self::Fetches => (
                "homing_kv_fetches_total",
                "Turns whose node was told to fetch KV from another one's cache, by that other one",
            ),
            Self::DecisionsLeftOut => (
                "homing_decisions_left_out_total",
                "Decisions that the log could not take",
            ),
        }
    }

    fn opts(self) -> Opts {
        let (name, help) = self.text();
        Opts::new(name, help)
    }
}

/// The handles; cheap to share.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// By endpoint and status.
    pub(crate) requests: IntCounterVec,
    /// By model and class (input, cached, output).
    pub(crate) tokens: IntCounterVec,
    /// By model.
    pub(crate) time_to_first_token: HistogramVec,
    /// By endpoint.
    pub(crate) duration: HistogramVec,
    /// Requests that have not ended.
    pub(crate) in_flight: IntGauge,
    /// Requests in a tenant's queue.
    pub(crate) waiting: IntGauge,
    /// By the node that failed.
    pub(crate) retries: IntCounterVec,
    /// |expected − real| cached tokens.
    prediction_error: Histogram,
    /// By node.
    pub(crate) prompt_mismatch: IntCounterVec,
    /// Answers without usage.
    pub(crate) usage_missing: IntCounter,
    /// By whether the hash was known.
    pub(crate) prompt_blocks: IntCounterVec,
    /// By whether the answer's tokens were remembered.
    pub(crate) answers: IntCounterVec,
    /// By node and reason.
    pub(crate) routes: IntCounterVec,
    /// By node and what (expected, found, missing, unexpected).
    credit: IntCounterVec,
    /// By the node that computed the prompt and what came of it.
    pub(crate) handovers: IntCounterVec,
    /// By the node that holds the KV.
    pub(crate) fetches: IntCounterVec,
    /// Turns held before a node is asked.
    pub(crate) held: IntGauge,
    /// Turns refused for want of room.
    pub(crate) hold_refusals: IntCounter,
    /// Decisions missing in the log.
    pub(crate) decisions_left_out: IntCounter,
}

/// 1 ms to about 2 minutes, doubling: TTFT spans a cache hit on a GPU and a long prefill on a CPU.
const SECONDS: [f64; 18] = [
    0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0,
    32.0, 64.0, 128.0,
];

/// One block and its powers of four, up to a long context.
const TOKENS: [f64; 9] = [
    0.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262_144.0,
];

impl Metrics {
    /// Registers everything in a registry of its own.
    pub fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new();
        let counters = |name: Name, labels: &[&str]| {
            let metric = IntCounterVec::new(name.opts(), labels)?;
            registry.register(Box::new(metric.clone()))?;
            Ok::<_, prometheus::Error>(metric)
        };
        let seconds = |name: Name, labels: &[&str]| {
            let opts = HistogramOpts::from(name.opts()).buckets(SECONDS.to_vec());
            let metric = HistogramVec::new(opts, labels)?;
            registry.register(Box::new(metric.clone()))?;
            Ok::<_, prometheus::Error>(metric)
        };
        let gauge = |name: Name| {
            let metric = IntGauge::with_opts(name.opts())?;
            registry.register(Box::new(metric.clone()))?;
            Ok::<_, prometheus::Error>(metric)
        };
        let tokens = HistogramOpts::from(Name::PredictionError.opts()).buckets(TOKENS.to_vec());
        let prediction_error = Histogram::with_opts(tokens)?;
        registry.register(Box::new(prediction_error.clone()))?;
        let usage_missing = IntCounter::with_opts(Name::UsageMissing.opts())?;
        registry.register(Box::new(usage_missing.clone()))?;
        let hold_refusals = IntCounter::with_opts(Name::HoldRefusals.opts())?;
        registry.register(Box::new(hold_refusals.clone()))?;
        let decisions_left_out = IntCounter::with_opts(Name::DecisionsLeftOut.opts())?;
        registry.register(Box::new(decisions_left_out.clone()))?;
        Ok(Self {
            requests: counters(Name::Requests, &["endpoint", "status"])?,
            tokens: counters(Name::Tokens, &["model", "class"])?,
            time_to_first_token: seconds(Name::TimeToFirstToken, &["model"])?,
            duration: seconds(Name::Duration, &["endpoint"])?,
            in_flight: gauge(Name::InFlight)?,
            waiting: gauge(Name::Waiting)?,
            retries: counters(Name::Retries, &["node"])?,
            prediction_error,
            prompt_mismatch: counters(Name::PromptMismatch, &["node"])?,
            usage_missing,
            prompt_blocks: counters(Name::PromptBlocks, &["known"])?,
            answers: counters(Name::Answers, &["remembered"])?,
            routes: counters(Name::Routes, &["node", "reason"])?,
            credit: counters(Name::Credit, &["node", "what"])?,
            handovers: counters(Name::Handovers, &["node", "outcome"])?,
            fetches: counters(Name::Fetches, &["node"])?,
            held: gauge(Name::Held)?,
            hold_refusals,
            decisions_left_out,
            registry,
        })
    }

    /// What was expected to be cached at a node, beside what was.
    pub(crate) fn predicted(&self, node: &str, expected: u64, found: u64) {
        #[expect(clippy::cast_precision_loss, reason = "far below 2^52 tokens")]
        self.prediction_error
            .observe(expected.abs_diff(found) as f64);
        for (what, tokens) in [
            ("expected", expected),
            ("found", found),
            ("missing", expected.saturating_sub(found)),
            ("unexpected", found.saturating_sub(expected)),
        ] {
            self.credit.with_label_values(&[node, what]).inc_by(tokens);
        }
    }

    /// The registry, for other modules' metrics.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Prometheus' text format.
    pub fn render(&self) -> Result<String, prometheus::Error> {
        TextEncoder::new().encode_to_string(&self.registry.gather())
    }
}

/// Counts one up until it is dropped.
#[derive(Debug)]
pub(crate) struct GaugeGuard(IntGauge);

impl GaugeGuard {
    pub(crate) fn new(gauge: &IntGauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}
