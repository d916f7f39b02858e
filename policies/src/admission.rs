//! May this tenant run one more request now, wait for it, or must it be refused?
//!
//! A pure function of the tenant's counts at this instant; the caller holds the permits (as
//! guards) and the queue. The bounds exist so that one tenant cannot take every node's time, and
//! so that a queue never grows past what will be served before its callers give up.
//! Left out: token and money budgets, and fairness between tenants in one queue.

/// What one tenant may have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AdmissionLimits {
    /// Requests that run at the same time.
    pub running_max: u32,
    /// Requests that wait for one of those to end.
    pub queued_max: u32,
}

impl Default for AdmissionLimits {
    /// An agent with its sub-agents runs a few dozen requests; four rounds of them may wait.
    fn default() -> Self {
        Self {
            running_max: 64,
            queued_max: 256,
        }
    }
}

/// What one tenant has now.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TenantLoad {
    /// Running requests.
    pub running: u32,
    /// Waiting requests.
    pub queued: u32,
    /// Mean duration of its recent requests; 0 where none has ended yet.
    pub mean_duration_ms: u64,
}

/// The answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Admission {
    /// Run at once.
    Run,
    /// Wait; this many are ahead.
    Queue {
        /// Waiting requests that come first.
        ahead: u32,
    },
    /// Answer 429 and say when to come back.
    Refuse {
        /// For the `Retry-After` header (which counts whole seconds: never 0).
        retry_after_s: u64,
    },
}

/// The shortest and longest time a refused client is told to wait: below a second the header
/// cannot say it, and beyond a minute the estimate means nothing.
const RETRY_AFTER_S: (u64, u64) = (1, 60);

/// Decides for one more request of a tenant with this load. Whoever waits goes first: a free
/// permit with a queue behind it belongs to the queue.
pub fn admit(load: &TenantLoad, limits: &AdmissionLimits) -> Admission {
    if load.running < limits.running_max && load.queued == 0 {
        return Admission::Run;
    }
    if load.queued < limits.queued_max {
        return Admission::Queue { ahead: load.queued };
    }
    // The queue drains `running_max` at a time, each round taking a mean duration.
    let rounds = u64::from(load.queued) / u64::from(limits.running_max.max(1)) + 1;
    let wait_s = rounds.saturating_mul(load.mean_duration_ms).div_ceil(1000);
    Admission::Refuse {
        retry_after_s: wait_s.clamp(RETRY_AFTER_S.0, RETRY_AFTER_S.1),
    }
}

#[cfg(test)]
mod tests;
