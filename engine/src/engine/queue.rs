//! How many may wait, and how long will that take?
//!
//! The queue is bounded for the node and for each salt's share of it: where several tenants are
//! served, none of them fills the queue for the others. A place is a guard, given back when its
//! request joins the batch or is dropped.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crate::error::{ApiError, Kind};
use crate::scheduler::turns::Share;

/// Of the queue's places, the part that one salt may take: three in four.
const SHARE_PART: (usize, usize) = (3, 4);
/// What one new interval weighs in the mean time between two requests that join.
const WEIGHT: f64 = 0.1;
/// The longest wait that is ever advised: after a minute everything may be different.
const RETRY_AFTER_S_MAX: f64 = 60.0;

/// The places in front of an engine.
#[derive(Debug)]
pub(super) struct Queue {
    pub(super) most: usize,
    /// Salts come from outside; a keyed hash keeps anybody from choosing whose share is theirs.
    hasher: RandomState,
    waiting: Mutex<Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    total: usize,
    by_share: HashMap<Share, usize>,
    last_join: Option<Instant>,
    /// Mean seconds between two requests that join while others wait.
    seconds_per_join: Option<f64>,
}

/// How busy an engine's queue is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// Requests that wait.
    pub waiting: usize,
    /// How many of them join in a second, lately; none if nobody had to wait yet.
    pub joins_per_s: Option<f64>,
}

impl Load {
    /// Seconds after which somebody who comes now would join.
    pub fn retry_after_s(&self) -> u32 {
        let per_join = self.joins_per_s.map_or(1.0, |joins| 1.0 / joins);
        let wait = self.waiting as f64 * per_join;
        wait.ceil().clamp(1.0, RETRY_AFTER_S_MAX) as u32
    }
}

/// A place in the queue.
#[derive(Debug)]
pub(super) struct QueuePlace {
    queue: Arc<Queue>,
    pub(super) share: Share,
}

impl Drop for QueuePlace {
    fn drop(&mut self) {
        let mut waiting = self.queue.lock();
        waiting.total -= 1;
        if let Some(count) = waiting.by_share.get_mut(&self.share) {
            *count -= 1;
            if *count == 0 {
                waiting.by_share.remove(&self.share);
            }
        }
    }
}

impl Queue {
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self {
            most,
            hasher: RandomState::new(),
            waiting: Mutex::default(),
        })
    }

    pub(super) fn load(&self) -> Load {
        let waiting = self.lock();
        Load {
            waiting: waiting.total,
            joins_per_s: waiting.seconds_per_join.map(|seconds| 1.0 / seconds),
        }
    }

    /// A place for a request of this salt. Requests without a salt come from a node's only user,
    /// who may take all places.
    pub(super) fn take_place(self: &Arc<Self>, salt: Option<&str>) -> Result<QueuePlace, ApiError> {
        let share = Share(self.hasher.hash_one(salt));
        let load = self.load();
        let mut waiting = self.lock();
        if waiting.total >= self.most {
            return Err(self.full(&load));
        }
        let mine = waiting.by_share.entry(share).or_default();
        if *mine >= self.places(salt) {
            return Err(share_full(*mine, &load));
        }
        *mine += 1;
        waiting.total += 1;
        drop(waiting);
        Ok(QueuePlace {
            queue: Arc::clone(self),
            share,
        })
    }

    /// The places that requests of this salt may take at most.
    pub(super) fn places(&self, salt: Option<&str>) -> usize {
        let (part, of) = SHARE_PART;
        match salt {
            None => self.most,
            Some(_) => (self.most * part / of).max(1),
        }
    }

    /// Notes that a request joins, before it gives its place back.
    pub(super) fn joined(&self, now: Instant) {
        let mut waiting = self.lock();
        let last = waiting.last_join.replace(now);
        if waiting.total < 2 {
            // Nobody else waited: the next interval says how often requests come, not how fast
            // they join.
            waiting.last_join = None;
        }
        let Some(last) = last else { return };
        let seconds = (now - last).as_secs_f64().max(1e-6);
        let mean = waiting.seconds_per_join.unwrap_or(seconds);
        waiting.seconds_per_join = Some(mean + WEIGHT * (seconds - mean));
    }

    pub(super) fn full(&self, load: &Load) -> ApiError {
        let message = format!(
            "This node's queue is full ({} requests wait). Try again shortly.",
            self.most
        );
        ApiError::new(Kind::Overloaded, "queue_full", message)
            .with_retry_after(load.retry_after_s())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Waiting> {
        // Nothing under the lock can panic half-way.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn share_full(mine: usize, load: &Load) -> ApiError {
    let message = format!(
        "{mine} of your requests wait at this node already, which is all that one tenant may have \
         waiting. Try again shortly."
    );
    ApiError::new(Kind::TooMany, "queue_share_full", message).with_retry_after(load.retry_after_s())
}

#[cfg(test)]
mod tests {
    //! Catches a lost place, a tenant that fills the queue, and a wait that is advised for ever.
    use super::*;
    use std::time::Duration;

    #[test]
    fn one_salt_cannot_fill_the_queue() {
        let queue = Queue::new(8);
        let mine: Vec<_> = (0..6)
            .map(|_| queue.take_place(Some("a")).expect("room"))
            .collect();
        let refused = queue.take_place(Some("a")).expect_err("its share is full");
        assert_eq!(
            (refused.kind, refused.code),
            (Kind::TooMany, "queue_share_full")
        );
        let other = queue
            .take_place(Some("b"))
            .expect("there is room for others");
        let last = queue.take_place(None).expect("and for one more");
        let refused = queue.take_place(Some("c")).expect_err("the queue is full");
        assert_eq!(
            (refused.kind, refused.code),
            (Kind::Overloaded, "queue_full")
        );
        assert_ne!(mine[0].share, other.share);
        assert_eq!(mine[0].share, mine[5].share);
        drop((mine, other, last));
        assert_eq!(queue.load().waiting, 0);
        assert!(queue.lock().by_share.is_empty());
    }

    #[test]
    fn the_advised_wait_follows_the_rate() {
        let queue = Queue::new(100);
        assert_eq!(queue.load().retry_after_s(), 1);
        let places: Vec<_> = (0..40)
            .map(|_| queue.take_place(None).expect("room"))
            .collect();
        assert_eq!(
            queue.load().retry_after_s(),
            40,
            "a second each until known better"
        );
        let start = Instant::now();
        for joined in 0..10 {
            queue.joined(start + Duration::from_millis(500 * joined));
        }
        assert_eq!(queue.load().retry_after_s(), 20);
        queue.joined(start + Duration::from_secs(10_000));
        assert_eq!(queue.load().retry_after_s(), 60, "no longer than a minute");
        drop(places);
    }
}
