//! Should requests be kept away from a node that keeps failing?
//!
//! One breaker per node, driven by the outcomes of real requests; `now_ms` is an argument.
//! States:
//! - closed: requests pass; so many failures in a row open it.
//! - open: none pass until a time; each opening in a row doubles the wait, up to a bound.
//! - half-open: the wait is over; a few trial requests pass. One success closes it, one failure
//!   opens it again.
//!
//! Asking for the state reserves nothing; [`Breaker::on_dispatch`] counts a trial. Left out: active
//! health checks (they take a node out by its state), and failures that are the client's fault,
//! which the caller must not report here.

/// How a breaker behaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BreakerParams {
    /// Failures in a row that open it.
    pub failures_to_open: u32,
    /// How long it stays open the first time.
    pub open_ms: u64,
    /// How long it stays open at most.
    pub open_ms_max: u64,
    /// Trial requests in flight at the same time while half-open.
    pub trials_max: u32,
}

impl Default for BreakerParams {
    /// Three failures in a row are not chance; a node restarts in about a second here, and one
    /// trial at a time keeps a sick node from taking several sessions down.
    fn default() -> Self {
        Self {
            failures_to_open: 3,
            open_ms: 1000,
            open_ms_max: 30_000,
            trials_max: 1,
        }
    }
}

/// What a breaker says at an instant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Gate {
    /// Requests pass.
    Closed,
    /// None pass until then.
    Open {
        /// When the first trial may pass.
        until_ms: u64,
    },
    /// Trial requests pass.
    HalfOpen {
        /// How many more may be in flight.
        trials_left: u32,
    },
}

impl Gate {
    /// Whether one more request may be sent.
    pub fn passes(self) -> bool {
        match self {
            Self::Closed => true,
            Self::Open { .. } => false,
            Self::HalfOpen { trials_left } => trials_left > 0,
        }
    }
}

/// The state proper; half-open is an open breaker whose time has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Closed {
        failures: u32,
    },
    Open {
        until_ms: u64,
        openings: u32,
        trials: u32,
    },
}

/// One node's breaker.
#[derive(Clone, Debug)]
pub struct Breaker {
    params: BreakerParams,
    state: State,
}

impl Breaker {
    /// A closed breaker.
    pub fn new(params: BreakerParams) -> Self {
        Self {
            params,
            state: State::Closed { failures: 0 },
        }
    }

    /// What it says now.
    pub fn gate(&self, now_ms: u64) -> Gate {
        match self.state {
            State::Closed { .. } => Gate::Closed,
            State::Open { until_ms, .. } if now_ms < until_ms => Gate::Open { until_ms },
            State::Open { trials, .. } => Gate::HalfOpen {
                trials_left: self.params.trials_max.max(1).saturating_sub(trials),
            },
        }
    }

    /// A request was sent to the node.
    pub fn on_dispatch(&mut self, now_ms: u64) {
        if let State::Open {
            until_ms, trials, ..
        } = &mut self.state
            && now_ms >= *until_ms
        {
            *trials = trials.saturating_add(1);
        }
    }

    /// A request ended well.
    pub fn on_success(&mut self, now_ms: u64) {
        match self.state {
            // A request from before the opening proves nothing about now.
            State::Open { until_ms, .. } if now_ms < until_ms => {}
            State::Open { .. } | State::Closed { .. } => self.state = State::Closed { failures: 0 },
        }
    }

    /// A request ended without telling anything about the node (its client went away).
    pub fn on_neutral(&mut self, now_ms: u64) {
        if let State::Open {
            until_ms, trials, ..
        } = &mut self.state
            && now_ms >= *until_ms
        {
            *trials = trials.saturating_sub(1);
        }
    }

    /// A request failed by the node's fault.
    pub fn on_failure(&mut self, now_ms: u64) {
        match self.state {
            State::Closed { failures } => {
                let failures = failures.saturating_add(1);
                if failures >= self.params.failures_to_open.max(1) {
                    self.open(now_ms, 0);
                } else {
                    self.state = State::Closed { failures };
                }
            }
            // More failures of requests from before the opening do not prolong it.
            State::Open { until_ms, .. } if now_ms < until_ms => {}
            State::Open { openings, .. } => self.open(now_ms, openings.saturating_add(1)),
        }
    }

    fn open(&mut self, now_ms: u64, openings: u32) {
        let factor = 1_u64.checked_shl(openings).unwrap_or(u64::MAX);
        let wait_ms = self
            .params
            .open_ms
            .saturating_mul(factor)
            .min(self.params.open_ms_max);
        let until_ms = now_ms.saturating_add(wait_ms);
        self.state = State::Open {
            until_ms,
            openings,
            trials: 0,
        };
    }
}

#[cfg(test)]
mod tests;
