//! How long is waited for what may be slow?
//!
//! vLLM shares the machine's few cores with whatever else runs there, so no fixed time is right. What
//! counts is whether it gets on: a wait is over once what is looked at has stayed the same for
//! too long.

use std::time::{Duration, Instant};

/// One wait, and how far it had come when that was last something new.
pub(super) struct Patience<T> {
    longest: Duration,
    seen: T,
    since: Instant,
}

impl<T: PartialEq> Patience<T> {
    /// Begins a wait of at most `longest` without anything new.
    pub(super) fn new(longest: Duration, seen: T) -> Self {
        Self {
            longest,
            seen,
            since: Instant::now(),
        }
    }

    /// Takes note of how far it has come by now; whether it has stayed there for too long.
    pub(super) fn is_over(&mut self, seen: T) -> bool {
        self.is_over_at(seen, Instant::now())
    }

    fn is_over_at(&mut self, seen: T, now: Instant) -> bool {
        if self.seen != seen {
            (self.seen, self.since) = (seen, now);
        }
        now.duration_since(self.since) > self.longest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Catches a wait that ends although something went on, and one that never ends.
    #[test]
    fn only_a_standstill_ends_a_wait() {
        let mut patience = Patience::new(Duration::from_secs(10), 0);
        let start = patience.since;
        for (second, seen, is_over) in [
            (9, 0, false),
            (11, 1, false),
            (20, 1, false),
            (22, 1, true),
            (23, 2, false),
            (33, 2, false),
            (34, 2, true),
        ] {
            let now = start + Duration::from_secs(second);
            assert_eq!(patience.is_over_at(seen, now), is_over, "second {second}");
        }
    }
}
