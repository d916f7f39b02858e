//! A node failed: is the request sent to another one, and when?
//!
//! Only before the first byte has reached the client: after that a second answer would contradict
//! the first. What is tried again is what another node may well do better: a broken connection, a
//! node that is overloaded, draining or faulty. What the client got wrong is wrong everywhere.
//! Three bounds: attempts per request, the request's deadline, and a budget over all requests, so
//! that a fleet in trouble is not finished off by its own retries.

/// How one attempt ended, seen from the gateway.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// No connection to the node.
    ConnectFailed,
    /// The connection broke before the answer's first byte was relayed.
    BrokenBeforeFirstByte,
    /// The node said nothing within the time it had.
    TimeoutBeforeFirstByte,
    /// It answered with this HTTP status, not relayed yet.
    Status(u16),
    /// The answer was not HTTP or not what was asked for, and was not relayed.
    BadAnswer,
    /// Something has been relayed already.
    AfterFirstByte,
    /// The client went away.
    ClientGone,
}

impl Outcome {
    /// Whether another node may do better.
    pub fn is_retryable(self) -> bool {
        match self {
            Self::ConnectFailed
            | Self::BrokenBeforeFirstByte
            | Self::TimeoutBeforeFirstByte
            | Self::BadAnswer => true,
            // 401 and 403 speak of the node token, which is the fleet's mistake, not the client's;
            // 404 of a model that this node does not serve (any more).
            Self::Status(status) => matches!(status, 401 | 403 | 404 | 429 | 500 | 502..=504),
            Self::AfterFirstByte | Self::ClientGone => false,
        }
    }

    /// Whether it counts against the node's circuit breaker. An overloaded node is not a sick
    /// one, and a client's mistake or departure is not the node's.
    pub fn is_node_fault(self) -> bool {
        match self {
            Self::ConnectFailed
            | Self::BrokenBeforeFirstByte
            | Self::TimeoutBeforeFirstByte
            | Self::BadAnswer
            | Self::AfterFirstByte => true,
            Self::Status(status) => matches!(status, 401 | 403 | 500 | 502 | 504),
            Self::ClientGone => false,
        }
    }
}

/// The bounds of one request's retries.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RetryParams {
    /// Attempts in all, the first included.
    pub attempts_max: u32,
    /// The pause before the third attempt; it doubles from there. The second attempt goes to
    /// another node at once.
    pub backoff_ms: u64,
    /// The longest pause.
    pub backoff_ms_max: u64,
}

impl Default for RetryParams {
    /// Two other nodes; a restarting one is back within about a second.
    fn default() -> Self {
        Self {
            attempts_max: 3,
            backoff_ms: 50,
            backoff_ms_max: 1000,
        }
    }
}

/// Where a request stands after an attempt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attempts {
    /// Attempts made so far, the failed one included.
    pub made: u32,
    /// Time left until the request's deadline.
    pub left_ms: u64,
}

/// What to do next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Send it to another node after this pause; exclude the one that failed.
    Again {
        /// The pause.
        after_ms: u64,
    },
    /// Give the client this failure.
    Stop(Stop),
}

/// Why a request is not tried again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stop {
    /// No other node would do better, or something was relayed already.
    NotRetryable,
    /// It had all its attempts.
    Attempts,
    /// Its deadline would pass.
    Deadline,
    /// The budget over all requests is empty.
    Budget,
}

/// Decides after a failed attempt. `random` spreads the pauses of requests that failed together.
pub fn after_failure(
    outcome: Outcome,
    attempts: Attempts,
    params: &RetryParams,
    budget: &mut Budget,
    random: u64,
) -> Verdict {
    if !outcome.is_retryable() {
        return Verdict::Stop(Stop::NotRetryable);
    }
    if attempts.made >= params.attempts_max {
        return Verdict::Stop(Stop::Attempts);
    }
    let after_ms = pause_ms(attempts.made, params, random);
    if after_ms >= attempts.left_ms {
        return Verdict::Stop(Stop::Deadline);
    }
    if !budget.withdraw() {
        return Verdict::Stop(Stop::Budget);
    }
    Verdict::Again { after_ms }
}

/// 0 after the first attempt, then a random share (half to all) of a doubling pause.
fn pause_ms(made: u32, params: &RetryParams, random: u64) -> u64 {
    let Some(doublings) = made.checked_sub(2) else {
        return 0;
    };
    let factor = 1_u64.checked_shl(doublings).unwrap_or(u64::MAX);
    let full = params
        .backoff_ms
        .saturating_mul(factor)
        .min(params.backoff_ms_max);
    let half = full / 2;
    half + random % (full - half + 1)
}

/// Retries that may still be made over all requests: a fixed reserve, refilled by requests.
#[derive(Clone, Debug)]
pub struct Budget {
    percent: u32,
    reserve: u32,
    /// In hundredths of a retry, so that a percentage needs no fractions.
    balance: u64,
}

impl Budget {
    /// A full budget: `reserve` retries at once, then `percent` of the requests.
    pub fn new(percent: u32, reserve: u32) -> Self {
        Self {
            percent,
            reserve,
            balance: u64::from(reserve) * 100,
        }
    }

    /// A new request came in (not a retry).
    pub fn on_request(&mut self) {
        let full = u64::from(self.reserve) * 100;
        self.balance = self
            .balance
            .saturating_add(u64::from(self.percent))
            .min(full);
    }

    /// Takes one retry, if there is one.
    pub fn withdraw(&mut self) -> bool {
        match self.balance.checked_sub(100) {
            Some(rest) => {
                self.balance = rest;
                true
            }
            None => false,
        }
    }
}

impl Default for Budget {
    /// A dying node fails everything that was in flight there at once, hence the reserve; in a
    /// lasting outage one request in five is tried again.
    fn default() -> Self {
        Self::new(20, 100)
    }
}

#[cfg(test)]
mod tests;
