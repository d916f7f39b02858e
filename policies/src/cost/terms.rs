//! What is a candidate's cost made of?

/// Every term of one candidate's cost, in milliseconds.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Terms {
    /// Network.
    pub round_trip_ms: f64,
    /// Waiting for the prefill that is already in flight there.
    pub queue_ms: f64,
    /// This request's own uncached tokens, weighted with `b`.
    pub prefill_ms: f64,
    /// What those wait longer who come while this request's prefill is queued or computed.
    pub behind_ms: f64,
    /// Waiting for room among what running requests hold.
    pub pool_ms: f64,
    /// Computing again what it pushes out of the prefixes of live sessions.
    pub live_ms: f64,
    /// What a new session will wait for the sessions that are bound there, beyond the fewest of any
    /// node; 0 for a session that is bound.
    pub crowd_ms: f64,
    /// Sharing steps with the decodes in flight there.
    pub decode_ms: f64,
    /// Fetching KV from a slower tier, weighted with `b`.
    pub fetch_ms: f64,
    /// What the streams there lose while this request's prompt is computed between their steps.
    pub stall_ms: f64,
    /// Bringing the KV of the prompt from the node that computes it.
    pub transfer_ms: f64,
    /// The bonus of the node that the session is bound to: 0 or negative.
    pub session_ms: f64,
}

impl Terms {
    /// Each with its name, for whoever has to show or write them all.
    pub fn named(&self) -> [(&'static str, f64); 12] {
        let Self {
            round_trip_ms,
            queue_ms,
            prefill_ms,
            behind_ms,
            pool_ms,
            live_ms,
            crowd_ms,
            decode_ms,
            fetch_ms,
            stall_ms,
            transfer_ms,
            session_ms,
        } = *self;
        [
            ("round_trip_ms", round_trip_ms),
            ("queue_ms", queue_ms),
            ("prefill_ms", prefill_ms),
            ("behind_ms", behind_ms),
            ("pool_ms", pool_ms),
            ("live_ms", live_ms),
            ("crowd_ms", crowd_ms),
            ("decode_ms", decode_ms),
            ("fetch_ms", fetch_ms),
            ("stall_ms", stall_ms),
            ("transfer_ms", transfer_ms),
            ("session_ms", session_ms),
        ]
    }

    /// Their sum.
    pub fn total_ms(&self) -> f64 {
        self.named().iter().map(|(_, ms)| ms).sum()
    }
}
