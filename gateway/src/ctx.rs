//! What travels between the phases of one request?
//!
//! Who asked, how it is going, and what the one log line at the end will say. Guards in here give
//! back what they hold when the request ends, in whatever way it ends.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dialects::error::Shape;
use uuid::Uuid;

use crate::decisions::Routed;
use crate::hold::Going;
use crate::ledger::unix_ms;
use crate::metrics::{GaugeGuard, Metrics};
use crate::responses::Local;
use crate::store::KeyIdentity;

/// State of one request.
pub struct Ctx {
    /// When it arrived.
    pub(crate) started: Instant,
    /// The same, unix milliseconds.
    pub(crate) t_ms: i64,
    /// Its id: ours until the client's own is found to be usable.
    pub(crate) request_id: String,
    /// Ours, also the key of its usage record.
    pub(crate) own_id: Uuid,
    /// Whose errors the client reads.
    pub(crate) shape: Shape,
    /// The endpoint, as metrics name it.
    pub(crate) endpoint: &'static str,
    /// The status the client saw; 0 before there is one.
    pub(crate) status: u16,
    /// What the connection remembers of its own turns, where it carries many.
    pub(crate) local: Option<Arc<Local>>,
    /// What the client wants of a turn.
    pub(crate) answer: Wanted,
    /// What the log line says.
    pub(crate) line: Line,
    /// Its place among the turns that run; none before it was let go.
    pub(crate) going: Option<Going>,
    /// How it was routed; none where it did not get so far.
    pub(crate) routed: Option<Routed>,
    _in_flight: GaugeGuard,
}

/// What a client wants of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// An answer.
    Answer,
    /// An id that a later turn can continue, for all that the request says; no node is asked.
    Preparation,
}

/// Fields of the log line; empty where a request did not get so far.
#[derive(Debug, Default)]
pub(crate) struct Line {
    pub(crate) tenant: String,
    pub(crate) key_id: String,
    pub(crate) model: String,
    /// The client's name for it, where that is another one.
    pub(crate) model_asked: Option<String>,
    pub(crate) node: String,
    /// The one that computed the prompt, where that is another one.
    pub(crate) prefill_node: Option<String>,
    pub(crate) route: &'static str,
    pub(crate) session: String,
    /// The signal that named it.
    pub(crate) session_from: String,
    pub(crate) outcome: &'static str,
    pub(crate) attempts: u32,
    pub(crate) input: u64,
    pub(crate) cached: u64,
    pub(crate) expected_cached: u64,
    pub(crate) output: u64,
    pub(crate) ttft_ms: Option<u32>,
    pub(crate) cause: Option<String>,
}

impl Line {
    /// Who asked.
    pub(crate) fn is_of(&mut self, identity: &KeyIdentity) {
        identity.tenant.id.as_str().clone_into(&mut self.tenant);
        self.key_id = identity.key_id.to_string();
    }
}

impl Ctx {
    /// A request that arrives now.
    pub(crate) fn new(metrics: &Metrics) -> Self {
        let own_id = Uuid::now_v7();
        Self {
            started: Instant::now(),
            t_ms: unix_ms(),
            request_id: own_id.to_string(),
            own_id,
            shape: Shape::default(),
            endpoint: "unknown",
            status: 0,
            local: None,
            answer: Wanted::Answer,
            line: Line::default(),
            going: None,
            routed: None,
            _in_flight: GaugeGuard::new(&metrics.in_flight),
        }
    }

    /// Milliseconds since it arrived.
    pub(crate) fn elapsed_ms(&self) -> u32 {
        whole_ms(self.started.elapsed())
    }

    /// The one line.
    pub(crate) fn log(&self) {
        let line = &self.line;
        tracing::info!(
            request_id = self.request_id,
            endpoint = self.endpoint,
            status = self.status,
            tenant = line.tenant,
            key = line.key_id,
            session = line.session,
            session_from = line.session_from,
            model = line.model,
            model_asked = line.model_asked,
            node = line.node,
            prefill_node = line.prefill_node,
            route = line.route,
            outcome = line.outcome,
            attempts = line.attempts,
            input = line.input,
            cached = line.cached,
            expected_cached = line.expected_cached,
            output = line.output,
            ttft_ms = line.ttft_ms,
            duration_ms = self.elapsed_ms(),
            cause = line.cause,
            "request"
        );
    }
}

/// Whole milliseconds, capped at seven weeks.
pub(crate) fn whole_ms(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}
