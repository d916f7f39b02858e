//! How much time has passed for the model?
//!
//! Model time runs at a multiple of real time. The multiple may change; time itself never jumps.

use std::time::{Duration, Instant};

/// Model time.
#[derive(Debug)]
pub(super) struct Clock {
    since: Instant,
    /// Model time at `since`.
    begun_ms: f64,
    /// Model milliseconds in a real one.
    speed: f64,
}

impl Clock {
    /// A clock at 0.
    pub(super) fn new(speed: f64) -> Self {
        Self {
            since: Instant::now(),
            begun_ms: 0.0,
            speed,
        }
    }

    /// Model time now.
    pub(super) fn now_ms(&self) -> f64 {
        self.begun_ms + self.since.elapsed().as_secs_f64() * 1000.0 * self.speed
    }

    /// How long it takes until then; nothing where it is past.
    pub(super) fn until(&self, then_ms: f64) -> Duration {
        let ms = (then_ms - self.now_ms()).max(0.0) / self.speed;
        // A model that waits for ever must not overflow.
        Duration::from_secs_f64((ms / 1000.0).min(3600.0))
    }

    /// When it is so late for the model; both may be past.
    pub(super) fn instant(&self, then_ms: f64) -> Instant {
        let ms = (then_ms - self.begun_ms) / self.speed;
        let passed = Duration::from_secs_f64(ms.abs() / 1000.0);
        let then = match ms >= 0.0 {
            true => self.since.checked_add(passed),
            false => self.since.checked_sub(passed),
        };
        then.unwrap_or(self.since)
    }

    /// How late it is for the model then.
    pub(super) fn ms_at(&self, then: Instant) -> f64 {
        let ms = match then.checked_duration_since(self.since) {
            Some(passed) => passed.as_secs_f64() * 1000.0,
            None => -(self.since - then).as_secs_f64() * 1000.0,
        };
        self.begun_ms + ms * self.speed
    }

    /// Model milliseconds in a real one.
    pub(super) fn speed(&self) -> f64 {
        self.speed
    }

    /// From now on at this speed.
    pub(super) fn set_speed(&mut self, speed: f64) {
        self.begun_ms = self.now_ms();
        self.since = Instant::now();
        self.speed = speed;
    }
}
