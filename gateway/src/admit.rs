//! May this request run now?
//!
//! One gate per tenant: so many requests run, so many wait in line, the rest are told when to come
//! back. The permit and the place in line are guards, so that a client that leaves gives them
//! back without any code. Whether to run, wait or refuse is `policies::admission`'s decision.
//!
//! Left out: budgets of tokens and money.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use policies::admission::{Admission, AdmissionLimits, TenantLoad, admit};
use prometheus::IntGauge;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::config::Limits;
use crate::metrics::GaugeGuard;
use crate::store::TenantId;
use dialects::error::{ApiError, ErrorKind};

/// All tenants' gates.
pub(crate) struct Gates {
    gates: RwLock<HashMap<TenantId, Arc<Gate>>>,
    limits: AdmissionLimits,
    queue_wait: Duration,
    waiting: IntGauge,
}

struct Gate {
    permits: Arc<Semaphore>,
    waiting: AtomicU32,
    /// Smoothed duration of the tenant's requests, for the advice to those refused.
    mean_duration_ms: AtomicU64,
}

/// The right to run; dropping it lets the next one in.
pub(crate) struct Permit {
    gate: Arc<Gate>,
    started: Instant,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Permit {
    fn drop(&mut self) {
        let took = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        let before = self.gate.mean_duration_ms.load(Ordering::Relaxed);
        // Requests that end together may lose one another's update; the figure is advice.
        self.gate
            .mean_duration_ms
            .store(before.midpoint(took), Ordering::Relaxed);
    }
}

/// A place in line.
struct Place<'a>(
    &'a Gate,
    #[expect(dead_code, reason = "held for its drop")] GaugeGuard,
);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Gates {
    pub(crate) fn new(limits: &Limits, waiting: IntGauge) -> Self {
        let bounded = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        Self {
            gates: RwLock::new(HashMap::new()),
            limits: AdmissionLimits {
                running_max: bounded(limits.concurrency_per_tenant),
                queued_max: bounded(limits.queue_per_tenant),
            },
            queue_wait: limits.queue_wait,
            waiting,
        }
    }

    fn gate(&self, tenant: &TenantId) -> Arc<Gate> {
        let gates = self.gates.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(gate) = gates.get(tenant) {
            return Arc::clone(gate);
        }
        drop(gates);
        let mut gates = self.gates.write().unwrap_or_else(PoisonError::into_inner);
        let gate = gates.entry(tenant.clone()).or_insert_with(|| {
            Arc::new(Gate {
                permits: Arc::new(Semaphore::new(self.limits.running_max as usize)),
                waiting: AtomicU32::new(0),
                mean_duration_ms: AtomicU64::new(0),
            })
        });
        Arc::clone(gate)
    }

    /// Waits for the tenant's turn, at most as long as the configuration says.
    pub(crate) async fn admit(&self, tenant: &TenantId) -> Result<Permit, ApiError> {
        let gate = self.gate(tenant);
        let free = u32::try_from(gate.permits.available_permits()).unwrap_or(u32::MAX);
        let load = TenantLoad {
            running: self.limits.running_max.saturating_sub(free),
            queued: gate.waiting.load(Ordering::Acquire),
            mean_duration_ms: gate.mean_duration_ms.load(Ordering::Relaxed),
        };
        match admit(&load, &self.limits) {
            Admission::Refuse { retry_after_s } => Err(self.refusal(retry_after_s)),
            Admission::Run => match Arc::clone(&gate.permits).try_acquire_owned() {
                Ok(permit) => Ok(Permit {
                    gate,
                    started: Instant::now(),
                    _permit: permit,
                }),
                // Somebody was faster since the counts were read.
                Err(_) => self.wait(gate).await,
            },
            Admission::Queue { .. } => self.wait(gate).await,
        }
    }

    async fn wait(&self, gate: Arc<Gate>) -> Result<Permit, ApiError> {
        gate.waiting.fetch_add(1, Ordering::AcqRel);
        let place = Place(&gate, GaugeGuard::new(&self.waiting));
        let turn = Arc::clone(&gate.permits).acquire_owned();
        match tokio::time::timeout(self.queue_wait, turn).await {
            Ok(Ok(permit)) => {
                drop(place);
                Ok(Permit {
                    gate,
                    started: Instant::now(),
                    _permit: permit,
                })
            }
            // The semaphore is never closed, so the only other end is the time limit.
            _ => Err(self.refusal(self.queue_wait.as_secs().max(1))),
        }
    }

    fn refusal(&self, retry_after_s: u64) -> ApiError {
        let message = format!(
            "Too many requests at once: {} of yours are running and the queue of {} is full or too slow. Try again in {retry_after_s} s.",
            self.limits.running_max, self.limits.queued_max
        );
        ApiError {
            retry_after_s: Some(retry_after_s),
            ..ApiError::new(ErrorKind::RateLimited, message)
        }
    }
}

#[cfg(test)]
mod tests {
    //! Catches a permit or a place in line that is not given back, and a queue without a bound.
    use super::*;

    fn gates(concurrency: usize, queue: usize) -> Gates {
        let limits = Limits {
            body_bytes_max: 1,
            header_bytes_max: 1,
            concurrency_per_tenant: concurrency,
            queue_per_tenant: queue,
            queue_wait: Duration::from_secs(60),
            client_timeout: Duration::from_secs(1),
            request_timeout: Duration::from_secs(1),
            drain: Duration::from_secs(1),
        };
        Gates::new(
            &limits,
            IntGauge::new("waiting", "waiting").expect("a valid name"),
        )
    }

    #[tokio::test(start_paused = true)]
    async fn the_queue_is_bounded_and_gives_back() {
        let (gates, tenant) = (gates(1, 1), TenantId::new("a").unwrap());
        let running = gates.admit(&tenant).await.expect("room");
        {
            let second = gates.admit(&tenant);
            tokio::pin!(second);
            assert!(futures_util::poll!(&mut second).is_pending());
            assert_eq!(gates.waiting.get(), 1);
            let third = gates.admit(&tenant).await.err().expect("a full queue");
            assert_eq!(third.kind, ErrorKind::RateLimited);
            assert!(third.retry_after_s.is_some());
            assert!(
                gates.admit(&TenantId::new("b").unwrap()).await.is_ok(),
                "tenants share no gate"
            );
        }
        assert_eq!(
            gates.waiting.get(),
            0,
            "a client that left is still in line"
        );
        let waiting = gates.admit(&tenant);
        tokio::pin!(waiting);
        assert!(futures_util::poll!(&mut waiting).is_pending());
        drop(running);
        assert!(waiting.await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_has_an_end() {
        let (gates, tenant) = (gates(1, 1), TenantId::new("a").unwrap());
        let _running = gates.admit(&tenant).await.expect("room");
        let late = gates.admit(&tenant).await.err().expect("nobody ends");
        assert_eq!(late.kind, ErrorKind::RateLimited);
    }
}
