//! Why did each turn go where it went?
//!
//! Every routed turn leaves one [`Decided`]: the candidates of each attempt with the terms of
//! their costs, what was chosen and why, and what came of it (expected against real cached tokens).
//! The last ones stay in memory for the admin interface; all go to a log in the data directory
//! ([`files`]), which `homing explain` reads and `homing-load simulate` can replay: it has the
//! prompt's blocks, never its text.
//!
//! A request hands its record over and goes on; a thread writes. Where that thread cannot keep up,
//! records are left out and counted: explanations must never slow a turn down. The log is not the
//! ledger: a crash may take its last lines.

mod files;
mod record;

use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use prometheus::IntCounter;

pub(crate) use files::find_in;
pub(crate) use record::{Attempt, Decided, Routed};

use crate::config::Config;
use crate::metrics::Metrics;
use files::Writer;

/// Records that may wait for the thread.
const QUEUE_MAX: usize = 4096;
/// Records in memory: with 64 candidates each some 20 MB.
const RECENT_MAX: usize = 1024;

/// The explanations of a gateway's turns.
pub(crate) struct Decisions {
    recent: Arc<Mutex<VecDeque<Arc<Decided>>>>,
    /// None once closed.
    sender: Mutex<Option<SyncSender<Arc<Decided>>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    left_out: IntCounter,
}

impl Decisions {
    /// Those of a gateway.
    pub(crate) fn of(config: &Config, metrics: &Metrics) -> std::io::Result<Self> {
        let left_out = metrics.decisions_left_out.clone();
        Self::open(&config.data, config.decisions_bytes_max, left_out)
    }

    /// Opens the log in a data directory; with no bytes to keep there is only the memory.
    fn open(data: &Path, bytes_max: u64, left_out: IntCounter) -> std::io::Result<Self> {
        let writer = match bytes_max {
            0 => None,
            _ => Some(Writer::open(data, bytes_max)?),
        };
        let (sender, receiver) = sync_channel(QUEUE_MAX);
        let failed = left_out.clone();
        let thread = std::thread::Builder::new()
            .name("decisions".to_owned())
            .spawn(move || {
                if let Some(writer) = writer {
                    write_all(&receiver, writer, &failed);
                } else {
                    // Nothing is written; the records are dropped as they come.
                    receiver.iter().for_each(drop);
                }
            })?;
        Ok(Self {
            recent: Arc::default(),
            sender: Mutex::new(Some(sender)),
            thread: Mutex::new(Some(thread)),
            left_out,
        })
    }

    /// Takes one turn's record.
    pub(crate) fn note(&self, decided: Decided) {
        let decided = Arc::new(decided);
        let mut recent = lock(&self.recent);
        if recent.len() == RECENT_MAX {
            recent.pop_front();
        }
        recent.push_back(Arc::clone(&decided));
        drop(recent);
        let sender = lock(&self.sender);
        let sent = sender.as_ref().map(|sender| sender.try_send(decided));
        if let Some(Err(TrySendError::Full(_) | TrySendError::Disconnected(_))) = sent {
            self.left_out.inc();
        }
    }

    /// The records in memory of a request, by the client's id for it or ours. Several tenants may
    /// have used one id.
    pub(crate) fn find(&self, id: &str) -> Vec<Arc<Decided>> {
        let recent = lock(&self.recent);
        let is_it = |decided: &&Arc<Decided>| decided.is_called(id);
        recent.iter().filter(is_it).cloned().collect()
    }

    /// The last records, newest first.
    pub(crate) fn recent(&self, count: usize) -> Vec<Arc<Decided>> {
        lock(&self.recent)
            .iter()
            .rev()
            .take(count)
            .cloned()
            .collect()
    }

    /// Writes what is left and ends the thread.
    pub(crate) fn close(&self) {
        lock(&self.sender).take();
        if let Some(thread) = lock(&self.thread).take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of the decision log had panicked");
        }
    }
}

impl Drop for Decisions {
    fn drop(&mut self) {
        self.close();
    }
}

/// Writes until the gateway closes; what is written is with the kernel whenever nothing waits.
fn write_all(receiver: &Receiver<Arc<Decided>>, mut writer: Writer, left_out: &IntCounter) {
    let failing = AtomicU64::new(0);
    let note = |result: std::io::Result<()>| match result {
        Ok(()) => failing.store(0, Ordering::Relaxed),
        Err(error) => {
            left_out.inc();
            if failing.fetch_add(1, Ordering::Relaxed) == 0 {
                tracing::error!(%error, "the decision log cannot be written");
            }
        }
    };
    while let Ok(mut decided) = receiver.recv() {
        loop {
            note(writer.append(&decided));
            decided = match receiver.try_recv() {
                Ok(next) => next,
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => break,
            };
        }
        note(writer.flush());
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
