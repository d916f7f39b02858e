//! What do nodes, index and ledger look like to Prometheus?
//!
//! Numbers that already live elsewhere are read when somebody asks, not kept twice.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cache_index::tiers::Tiers;
use cache_index::trust::Trust;
use policies::view::NodeState;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{GaugeVec, IntGauge, Opts, Registry};

use super::Fleet;
use crate::ledger::Ledger;

/// Metrics of nodes; each has the label `node`.
#[derive(Clone, Copy)]
enum Name {
    Up,
    Requests,
    PrefillTokens,
    DecodeTokens,
    PrefillRate,
    RoundTrip,
    IndexBlocks,
    IndexTrust,
    IndexResyncs,
    EventBatches,
    StoreBlocks,
    Malformed,
    Orphans,
    Uncreditable,
    OverLimit,
}

impl Name {
    const ALL: [Self; 15] = [
        Self::Up,
        Self::Requests,
        Self::PrefillTokens,
        Self::DecodeTokens,
        Self::PrefillRate,
        Self::RoundTrip,
        Self::IndexBlocks,
        Self::IndexTrust,
        Self::IndexResyncs,
        Self::EventBatches,
        Self::StoreBlocks,
        Self::Malformed,
        Self::Orphans,
        Self::Uncreditable,
        Self::OverLimit,
    ];

    fn text(self) -> (&'static str, &'static str) {
        match self {
            Self::Up => ("homing_node_up", "1 while the node takes requests"),
            Self::Requests => (
                "homing_node_requests_in_flight",
                "Requests sent and not ended",
            ),
            Self::PrefillTokens => (
                "homing_node_prefill_tokens_in_flight",
                "Uncached prompt tokens not yet computed",
            ),
            Self::DecodeTokens => (
                "homing_node_decode_tokens_in_flight",
                "Output tokens still expected",
            ),
            Self::PrefillRate => (
                "homing_node_prefill_tokens_per_second",
                "Measured prefill rate; 0 is unknown",
            ),
            Self::RoundTrip => (
                "homing_node_round_trip_seconds",
                "Shortest recent health check",
            ),
            Self::IndexBlocks => (
                "homing_index_blocks",
                "Blocks the index credits the node with",
            ),
            Self::IndexTrust => ("homing_index_trust", "0 unknown, 1 partial, 2 exact"),
            Self::IndexResyncs => (
                "homing_index_resyncs_total",
                "Times the node's blocks were forgotten",
            ),
            Self::EventBatches => ("homing_kv_event_batches_total", "KV event batches applied"),
            Self::StoreBlocks => (
                "homing_index_store_blocks",
                "Blocks the index knows in the node's slower tiers",
            ),
            Self::Malformed => (
                "homing_kv_events_malformed_total",
                "Messages and events that contradict themselves",
            ),
            Self::Orphans => (
                "homing_kv_event_orphan_blocks_total",
                "Blocks after one that is not known",
            ),
            Self::Uncreditable => (
                "homing_kv_event_foreign_blocks_total",
                "Blocks of prompts that are not ours",
            ),
            Self::OverLimit => (
                "homing_kv_event_over_limit_blocks_total",
                "Blocks left out because the index is full",
            ),
        }
    }
}

struct FleetCollector {
    fleet: Arc<Fleet>,
    ledger: Arc<Ledger>,
    nodes: Vec<(Name, GaugeVec)>,
    open_requests: IntGauge,
    segment_bytes: IntGauge,
    expected_requests: IntGauge,
}

/// Adds the metrics of nodes, index and ledger to a registry.
pub fn register(
    registry: &Registry,
    fleet: &Arc<Fleet>,
    ledger: &Arc<Ledger>,
) -> Result<(), prometheus::Error> {
    let gauge = |name: Name| {
        let (text, help) = name.text();
        Ok::<_, prometheus::Error>((name, GaugeVec::new(Opts::new(text, help), &["node"])?))
    };
    registry.register(Box::new(FleetCollector {
        fleet: Arc::clone(fleet),
        ledger: Arc::clone(ledger),
        nodes: Name::ALL.into_iter().map(gauge).collect::<Result<_, _>>()?,
        open_requests: IntGauge::new(
            "homing_ledger_open_requests",
            "Requests opened in the journal and not settled",
        )?,
        expected_requests: IntGauge::new(
            "homing_index_expected_requests",
            "Requests in flight whose blocks are expected on their nodes",
        )?,
        segment_bytes: IntGauge::new(
            "homing_ledger_segment_bytes",
            "Length of the journal segment being written",
        )?,
    }))
}

impl FleetCollector {
    #[expect(
        clippy::cast_precision_loss,
        reason = "a scrape needs no more than 52 bits"
    )]
    fn read(&self) {
        for node in self.fleet.nodes().iter() {
            let view = node.view(Tiers::default());
            let held = self.fleet.held(node);
            let counted = |counter: &AtomicU64| counter.load(Ordering::Relaxed) as f64;
            for (name, gauge) in &self.nodes {
                let value = match name {
                    Name::Up => f64::from(u8::from(view.state == NodeState::Up)),
                    Name::Requests => node.requests_in_flight() as f64,
                    Name::PrefillTokens => view.inflight_prefill_tokens as f64,
                    Name::DecodeTokens => view.inflight_decode_tokens as f64,
                    Name::PrefillRate => view.prefill_tokens_per_s,
                    Name::RoundTrip => view.round_trip_ms / 1000.0,
                    Name::IndexBlocks => held.device as f64,
                    Name::StoreBlocks => (held.host + held.disk + held.shared) as f64,
                    Name::Malformed => counted(&node.refused.malformed),
                    Name::Orphans => counted(&node.refused.orphans),
                    Name::Uncreditable => counted(&node.refused.uncreditable),
                    Name::OverLimit => counted(&node.refused.over_limit),
                    Name::IndexTrust => match node.trust() {
                        Trust::Unknown => 0.0,
                        Trust::Partial => 1.0,
                        Trust::Exact => 2.0,
                    },
                    Name::IndexResyncs => node.resyncs() as f64,
                    Name::EventBatches => node.event_batches() as f64,
                };
                gauge.with_label_values(&[node.id.as_str()]).set(value);
            }
        }
        let expected = self.fleet.expected_requests();
        self.expected_requests
            .set(i64::try_from(expected).unwrap_or(i64::MAX));
        let ledger = self.ledger.stats();
        self.open_requests
            .set(i64::try_from(ledger.open_requests).unwrap_or(i64::MAX));
        self.segment_bytes
            .set(i64::try_from(ledger.segment_bytes).unwrap_or(i64::MAX));
    }
}

impl Collector for FleetCollector {
    fn desc(&self) -> Vec<&Desc> {
        let nodes = self.nodes.iter().flat_map(|(_, gauge)| gauge.desc());
        nodes
            .chain(self.open_requests.desc())
            .chain(self.segment_bytes.desc())
            .chain(self.expected_requests.desc())
            .collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.read();
        let nodes = self.nodes.iter().flat_map(|(_, gauge)| gauge.collect());
        nodes
            .chain(self.open_requests.collect())
            .chain(self.segment_bytes.collect())
            .chain(self.expected_requests.collect())
            .collect()
    }
}
