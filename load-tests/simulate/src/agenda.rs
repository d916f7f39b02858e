//! What happens next, and when?
//!
//! Events in the order of their times; equal times in the order in which they were foreseen.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// What is to come, on a clock that stands at the last event that was taken.
#[derive(Debug)]
pub(crate) struct Agenda<W> {
    events: BinaryHeap<Event<W>>,
    next_number: u64,
    now_ms: f64,
}

#[derive(Clone, Copy, Debug)]
struct Event<W> {
    at_ms: f64,
    number: u64,
    what: W,
}

impl<W> PartialEq for Event<W> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl<W> Eq for Event<W> {}
impl<W> PartialOrd for Event<W> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl<W> Ord for Event<W> {
    /// The earliest is the greatest, as a heap wants it.
    fn cmp(&self, other: &Self) -> Ordering {
        other
            .at_ms
            .total_cmp(&self.at_ms)
            .then(other.number.cmp(&self.number))
    }
}

impl<W> Default for Agenda<W> {
    fn default() -> Self {
        Self {
            events: BinaryHeap::new(),
            next_number: 0,
            now_ms: 0.0,
        }
    }
}

impl<W> Agenda<W> {
    /// The time, ms.
    pub(crate) fn now_ms(&self) -> f64 {
        self.now_ms
    }

    /// This will happen then.
    pub(crate) fn foresee(&mut self, at_ms: f64, what: W) {
        self.next_number += 1;
        self.events.push(Event {
            at_ms,
            number: self.next_number,
            what,
        });
    }

    /// The next event, if it comes by then; it is that late now.
    pub(crate) fn next_until(&mut self, horizon_ms: f64) -> Option<W> {
        let next = self.events.pop()?;
        if next.at_ms > horizon_ms {
            return None;
        }
        self.now_ms = next.at_ms;
        Some(next.what)
    }
}
