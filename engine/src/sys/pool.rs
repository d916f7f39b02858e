//! How is one forward pass spread over a few threads?
//!
//! Fork and join: the caller publishes a piece of work cut into chunks, everyone (the caller too)
//! takes chunks until none is left, and the caller returns when all taken chunks are done. A
//! thread that never wakes costs nothing, because the others take its share: on a machine whose
//! cores are also wanted by others this decides how fast decode is.
//!
//! States of a worker:
//! - *working*: has claimed a chunk by lowering `unclaimed`;
//! - *spinning*: `unclaimed` is 0; looks again for `SPIN`, the gap between two pieces of work
//!   inside a pass being a few microseconds;
//! - *asleep*: on the condition variable, until the next piece of work finds `sleepers > 0`.
//!
//! The caller waits for the last chunks in the same way: spins, then sleeps. So nobody burns a
//! core that a descheduled thread needs.
#![expect(
    unsafe_code,
    reason = "a closure on the caller's stack is lent to threads that outlive it"
)]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::disjoint::Disjoint;

/// How long a thread looks for work before it sleeps. Serial parts of a pass take 1 to 10 µs, a
/// wake-up 5 to 50 µs; 30 µs per pass is a burn of under 1 % at 200 passes a second.
const SPIN: Duration = Duration::from_micros(30);

/// Looks between two readings of the clock.
const SPIN_LOOKS: usize = 32;

/// A fat pointer to the work, by way of a thin pointer to it.
type Work<'a> = &'a (dyn Fn(usize) + Sync);

/// A fixed set of threads that run one piece of work at a time.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    /// Chunks of the current work that nobody has claimed yet.
    unclaimed: AtomicUsize,
    /// Chunks of the current work that are not finished yet.
    unfinished: AtomicUsize,
    /// Points at the caller's `Work`; read only by who holds a claimed chunk.
    work: AtomicPtr<()>,
    panicked: AtomicBool,
    stop: AtomicBool,
    sleepers: AtomicUsize,
    caller_sleeps: AtomicBool,
    lock: Mutex<()>,
    wake_workers: Condvar,
    wake_caller: Condvar,
}

impl Pool {
    /// Starts `threads - 1` workers; the caller of [`Pool::run`] is the last one.
    pub fn new(threads: usize) -> Pool {
        let shared = Arc::new(Shared::default());
        let workers = (1..threads.max(1))
            .map(|index| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new()
                    .name(format!("ops-{index}"))
                    .spawn(move || shared.serve())
                    .expect("the operating system gives a thread at start")
            })
            .collect();
        Pool { shared, workers }
    }

    /// How many threads compute, the caller among them.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `work` once with each index below `chunks`, in no particular order, and returns when
    /// all calls have. `&mut self`: one piece of work at a time.
    pub fn run(&mut self, chunks: usize, work: Work<'_>) {
        if self.workers.is_empty() || chunks <= 1 {
            (0..chunks).for_each(work);
            return;
        }
        let shared = &*self.shared;
        shared
            .work
            .store((&raw const work).cast_mut().cast(), Ordering::Relaxed);
        shared.unfinished.store(chunks, Ordering::Relaxed);
        // SeqCst against the sleeper's own pair: it counts itself, then looks at `unclaimed`.
        shared.unclaimed.store(chunks, Ordering::SeqCst);
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            drop(shared.locked());
            shared.wake_workers.notify_all();
        }
        while shared.work_one() {}
        shared.join();
        if shared.panicked.swap(false, Ordering::Relaxed) {
            resume_unwind(Box::new("a compute thread panicked"));
        }
    }

    /// Cuts `data` into chunks of `chunk_len` (the last may be shorter) and calls `work` with each
    /// chunk and its index.
    pub fn each_chunk<T: Send>(
        &mut self,
        data: &mut [T],
        chunk_len: usize,
        work: impl Fn(usize, &mut [T]) + Sync,
    ) {
        assert!(chunk_len > 0, "chunks have a length");
        let len = data.len();
        let shared = Disjoint::new(data);
        self.run(len.div_ceil(chunk_len), &|chunk| {
            let start = chunk * chunk_len;
            // SAFETY: `run` calls with each index once, and the chunks do not overlap.
            work(chunk, unsafe {
                shared.range(start, chunk_len.min(len - start))
            });
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        drop(self.shared.locked());
        self.shared.wake_workers.notify_all();
        for worker in self.workers.drain(..) {
            // A worker's panics are caught and reported by `run`; there is nothing to add here.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn locked(&self) -> MutexGuard<'_, ()> {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Claims and runs one chunk; false if there is none to claim.
    fn work_one(&self) -> bool {
        let claim = |left: usize| left.checked_sub(1);
        let Ok(left) = self
            .unclaimed
            .fetch_update(Ordering::Acquire, Ordering::Relaxed, claim)
        else {
            return false;
        };
        let work: *const Work<'_> = self.work.load(Ordering::Relaxed).cast();
        // SAFETY: a chunk of the current work was claimed and is unfinished, so `run`, which owns
        // what `work` points at, has not returned; the Acquire above sees what it stored.
        let work = unsafe { *work };
        if catch_unwind(AssertUnwindSafe(|| work(left - 1))).is_err() {
            self.panicked.store(true, Ordering::Relaxed);
        }
        if self.unfinished.fetch_sub(1, Ordering::SeqCst) == 1
            && self.caller_sleeps.load(Ordering::SeqCst)
        {
            drop(self.locked());
            self.wake_caller.notify_one();
        }
        true
    }

    /// The caller's wait for chunks that others still run.
    fn join(&self) {
        let done = || self.unfinished.load(Ordering::Acquire) == 0;
        if spin_until(done) {
            return;
        }
        self.caller_sleeps.store(true, Ordering::SeqCst);
        let mut guard = self.locked();
        while self.unfinished.load(Ordering::SeqCst) != 0 {
            guard = self
                .wake_caller
                .wait(guard)
                .unwrap_or_else(PoisonError::into_inner);
        }
        drop(guard);
        self.caller_sleeps.store(false, Ordering::SeqCst);
    }

    /// A worker's life.
    fn serve(&self) {
        while !self.stop.load(Ordering::Relaxed) {
            while self.work_one() {}
            let look =
                || self.unclaimed.load(Ordering::Relaxed) > 0 || self.stop.load(Ordering::Relaxed);
            if spin_until(look) {
                continue;
            }
            self.sleepers.fetch_add(1, Ordering::SeqCst);
            let mut guard = self.locked();
            while self.unclaimed.load(Ordering::SeqCst) == 0 && !self.stop.load(Ordering::SeqCst) {
                guard = self
                    .wake_workers
                    .wait(guard)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            drop(guard);
            self.sleepers.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// Looks until `holds` or [`SPIN`] is over; says which.
fn spin_until(holds: impl Fn() -> bool) -> bool {
    if holds() {
        return true;
    }
    let start = Instant::now();
    loop {
        for _ in 0..SPIN_LOOKS {
            if holds() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() > SPIN {
            return false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Would catch a chunk that is skipped, run twice, or still running when `run` returns.
    #[test]
    fn every_chunk_runs_once() {
        for threads in [1, 2, 3, 5] {
            let mut pool = Pool::new(threads);
            for round in 0..2_000 {
                let chunks = round % 17;
                let counts: Vec<AtomicUsize> = (0..chunks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(chunks, &|chunk| {
                    counts[chunk].fetch_add(1, Ordering::Relaxed);
                });
                assert!(
                    counts
                        .iter()
                        .all(|count| count.load(Ordering::Relaxed) == 1)
                );
            }
        }
    }

    /// Would catch a deadlock or a lost panic when the work itself fails.
    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let mut pool = Pool::new(2);
        let result = catch_unwind(AssertUnwindSafe(|| {
            pool.run(8, &|chunk| assert!(chunk != 5, "chunk 5 fails"));
        }));
        assert!(result.is_err());
        let mut rows = vec![0usize; 11];
        pool.each_chunk(&mut rows, 3, |row, values| values.fill(row));
        assert_eq!(rows, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3]);
    }
}
