//! Can this node take requests?
//!
//! One loop a node. States: *down* (no connection, no answer, or 503 before it was ever up),
//! *draining* (503 from a node that was up: it finishes what it has), *up*. A refused connection
//! takes it out at once, a missing answer after [`MISSES_MAX`] in a row: a node whose cores are all
//! in a prefill may be late. It is up again with the first good answer. Whenever it comes up, it
//! says anew which model it serves and how large it is: it may be another process at the address.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::StatusCode;
use policies::breaker::{Breaker, BreakerParams};
use policies::view::NodeState;

use super::node::Node;
use super::partner;
use super::probe::{Probe, ProbeError, Served, first_model, read_metrics};
use crate::tasks::{Drain, Phase};

/// Between two checks of a node that is up.
const CHECK_EVERY: Duration = Duration::from_millis(500);
/// Between two checks of one that is not: a restarted node is in use this much later.
const CHECK_DOWN_EVERY: Duration = Duration::from_millis(200);
/// Longest wait for an answer.
const CHECK_TIMEOUT: Duration = Duration::from_secs(2);
/// Unanswered checks in a row that take a node out.
const MISSES_MAX: u32 = 2;
/// Metrics are read with every so many checks.
const METRICS_EVERY: u32 = 4;
/// The round trip is the shortest of so many checks: the rest of them measure the node's load.
const ROUND_TRIPS: usize = 32;

/// Checks one node until the process stops.
pub(super) async fn watch(node: Arc<Node>, probe: Probe, drain: Drain) {
    let mut checks = Checks {
        node,
        probe,
        misses: 0,
        count: 0,
        round_trips: VecDeque::new(),
    };
    loop {
        checks.once().await;
        let pause = match checks.node.facts.load().state {
            NodeState::Up => CHECK_EVERY,
            _ => CHECK_DOWN_EVERY,
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = checks.node.check_now.notified() => {}
            () = drain.reached(Phase::Stopping) => return,
        }
    }
}

struct Checks {
    node: Arc<Node>,
    probe: Probe,
    misses: u32,
    count: u32,
    round_trips: VecDeque<f64>,
}

impl Checks {
    async fn once(&mut self) {
        let before = self.node.facts.load().state.clone();
        let since = Instant::now();
        let answer = self.probe.get(&self.node, "/health", CHECK_TIMEOUT).await;
        let after = match answer {
            Ok((status, _)) if status.is_success() => {
                self.misses = 0;
                self.round_trip(since.elapsed());
                self.up(&before).await
            }
            Ok((StatusCode::SERVICE_UNAVAILABLE, _)) => match before {
                NodeState::Up | NodeState::Draining => NodeState::Draining,
                _ => NodeState::Down {
                    why: "it is loading its model".to_owned(),
                },
            },
            Ok((status, _)) => NodeState::Down {
                why: format!("/health answers {status}"),
            },
            Err(ProbeError::Connect) => NodeState::Down {
                why: "no connection".to_owned(),
            },
            Err(error) => {
                self.misses += 1;
                match before {
                    NodeState::Up if self.misses < MISSES_MAX => NodeState::Up,
                    _ => NodeState::Down {
                        why: error.to_string(),
                    },
                }
            }
        };
        self.turn(&before, after);
    }

    /// The node is healthy: learns what it serves if it just came up, and its load now and then.
    async fn up(&mut self, before: &NodeState) -> NodeState {
        let came_up = *before != NodeState::Up;
        self.count = self.count.wrapping_add(1);
        if came_up && let Err(why) = self.learn_model().await {
            return NodeState::Down { why };
        }
        if came_up || self.count.is_multiple_of(METRICS_EVERY) {
            self.learn_metrics(before).await;
        }
        let ask_again = self.count.is_multiple_of(METRICS_EVERY);
        if came_up || self.node.wants_kv(ask_again) {
            partner::learn(&self.node, &self.probe, CHECK_TIMEOUT).await;
        }
        NodeState::Up
    }

    async fn learn_model(&mut self) -> Result<(), String> {
        let (status, body) = self
            .probe
            .get(&self.node, "/v1/models", CHECK_TIMEOUT)
            .await
            .map_err(|error| format!("/v1/models: {error}"))?;
        if matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
            return Err("it refuses our node token".to_owned());
        }
        let Served {
            id,
            max_model_len,
            token_ids,
        } = first_model(&body)
            .ok_or_else(|| format!("/v1/models answers {status} and no model"))?;
        self.node.set_facts(|facts| {
            facts.context_max = max_model_len.unwrap_or(u64::MAX);
            facts.token_ids = token_ids;
        });
        self.node.model.send_if_modified(|model| {
            let changed = model.as_deref() != Some(&id);
            if changed {
                *model = Some(id.into());
            }
            changed
        });
        Ok(())
    }

    /// A node without metrics stays usable; pressure and restarts are then seen in other ways.
    async fn learn_metrics(&mut self, before: &NodeState) {
        let Ok((StatusCode::OK, body)) =
            self.probe.get(&self.node, "/metrics", CHECK_TIMEOUT).await
        else {
            return;
        };
        let found = read_metrics(&String::from_utf8_lossy(&body));
        let known = self.node.facts.load().started_s;
        let restarted = known.is_some() && found.started_s.is_some() && known != found.started_s;
        if restarted {
            // The failures were another process's: one crash ends all its requests at once, and a
            // trial would keep the new process at one request until that has its whole answer.
            self.node
                .with_breaker(|breaker, _| *breaker = Breaker::new(BreakerParams::default()));
            self.node.kv_is_doubtful();
        }
        // One that was seen down has been forgotten already.
        if restarted && !matches!(before, NodeState::Down { .. }) {
            tracing::warn!(node = %self.node.id, "node was restarted between two health checks");
            self.node.lost.notify_one();
        }
        self.node.set_facts(|facts| {
            facts.started_s = found.started_s.or(facts.started_s);
            facts.block_tokens = found.block_tokens.unwrap_or(facts.block_tokens).max(1);
            facts.tiers = found.tiers;
            if let Some(blocks) = found.pool_blocks {
                facts.pool_blocks = blocks.saturating_mul(facts.block_tokens) / 16;
            }
            if let Some(usage) = found.pool_usage {
                #[expect(
                    clippy::cast_precision_loss,
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "a share of a block count, rounded"
                )]
                let used = (usage.clamp(0.0, 1.0) * facts.pool_blocks as f64).round() as u64;
                facts.pool_used_blocks = used;
            }
        });
    }

    fn round_trip(&mut self, took: Duration) {
        if self.round_trips.len() == ROUND_TRIPS {
            self.round_trips.pop_front();
        }
        self.round_trips.push_back(took.as_secs_f64() * 1000.0);
        let shortest = self
            .round_trips
            .iter()
            .copied()
            .fold(f64::INFINITY, f64::min);
        self.node.set_facts(|facts| facts.round_trip_ms = shortest);
    }

    fn turn(&self, before: &NodeState, after: NodeState) {
        if *before == after {
            return;
        }
        match &after {
            NodeState::Up => tracing::info!(
                node = %self.node.id,
                model = self.node.model().as_deref().unwrap_or_default(),
                "node takes requests"
            ),
            NodeState::Down { why } => {
                tracing::warn!(node = %self.node.id, why, "node takes no requests");
                if *before == NodeState::Up {
                    self.node.lost.notify_one();
                }
            }
            state => tracing::info!(node = %self.node.id, ?state, "node takes no new requests"),
        }
        self.node.set_facts(|facts| facts.state = after);
    }
}
