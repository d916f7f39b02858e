//! Where may background work start, and how does it learn that the process is leaving?
//!
//! [`Tasks`] is the only place that spawns. Every task is named, runs on one runtime that outlives
//! Pingora's, and is counted, so that a drain can wait for the last of them. The state of the
//! process is a `watch` channel ([`Drain`]): `Running → Draining → Stopping`, never backwards.
//!
//! Left out on purpose: restarting tasks that end. Whoever needs a loop writes the loop.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

/// Where the process is on its way out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Serving.
    Running,
    /// No new connections; what is in flight may finish.
    Draining,
    /// Everything stops now.
    Stopping,
}

/// The receiving side of the process state; cheap to clone into every task.
#[derive(Clone, Debug)]
pub struct Drain(watch::Receiver<Phase>);

impl Drain {
    /// The state now.
    pub fn phase(&self) -> Phase {
        *self.0.borrow()
    }

    /// Resolves once the state is at least `phase`. A vanished sender counts as stopping.
    pub async fn reached(&self, phase: Phase) {
        let mut receiver = self.0.clone();
        // An error means that the sender is gone, which only happens when the process ends.
        let _ = receiver.wait_for(|now| *now >= phase).await;
    }
}

struct Shared {
    handle: Handle,
    phase: watch::Sender<Phase>,
    running: AtomicUsize,
    idle: Notify,
}

/// The only place that spawns; clones share one count and one state.
#[derive(Clone)]
pub struct Tasks(Arc<Shared>);

/// Counts a task out again, also when it is aborted or panics.
struct Counted(Arc<Shared>);

impl Drop for Counted {
    fn drop(&mut self) {
        if self.0.running.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.idle.notify_waiters();
        }
    }
}

impl Tasks {
    /// Tasks that run on `handle`'s runtime.
    pub fn new(handle: Handle) -> Self {
        let (phase, _) = watch::channel(Phase::Running);
        Self(Arc::new(Shared {
            handle,
            phase,
            running: AtomicUsize::new(0),
            idle: Notify::new(),
        }))
    }

    /// Starts `future` under `name` (for the log only).
    #[expect(clippy::disallowed_methods, reason = "the one place that spawns")]
    pub fn spawn<F>(&self, name: &'static str, future: F) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        self.0.running.fetch_add(1, Ordering::AcqRel);
        let counted = Counted(Arc::clone(&self.0));
        self.0.handle.spawn(async move {
            let _counted = counted;
            tracing::trace!(task = name, "task starts");
            future.await
        })
    }

    /// The state of the process, for tasks and requests to watch.
    pub fn drain(&self) -> Drain {
        Drain(self.0.phase.subscribe())
    }

    /// Moves the state forward; an attempt to move it back is ignored.
    pub fn advance(&self, to: Phase) {
        self.0.phase.send_if_modified(|now| {
            let forward = to > *now;
            if forward {
                *now = to;
            }
            forward
        });
    }

    /// How many tasks run.
    pub fn running(&self) -> usize {
        self.0.running.load(Ordering::Acquire)
    }

    /// Waits until no task runs, at most for `limit`; says how many were left.
    pub async fn finished(&self, limit: Duration) -> usize {
        let wait = async {
            loop {
                let notified = self.0.idle.notified();
                if self.running() == 0 {
                    return;
                }
                notified.await;
            }
        };
        // Running out of time is an answer, not an error: the caller reads the count.
        let _ = tokio::time::timeout(limit, wait).await;
        self.running()
    }
}
