//! Why did each turn go where it went?
//!
//! Every routed turn leaves one [`Decided`]: the candidates of each attempt with the terms of
//! their costs, what was chosen and why, and what came of it (expected against real cached tokens).
//! The last ones stay in memory for the admin interface; all go to a log in the data directory
//! ([`files`]), which `homing explain` reads and `homing-load simulate` can replay: it has the
//! prompt's blocks, never its text.
//!
//! A request hands its record over and goes on; a thread spells and writes, a few times a second,
//! since waking it for each record would cost more than writing does. Where it cannot keep up,
//! records are left out and counted: explanations must never slow a turn down. The log is not the
//! ledger: a crash may take its last lines.

mod files;
mod record;

use std::collections::VecDeque;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use prometheus::IntCounter;

pub(crate) use files::find_in;
pub(crate) use record::{Attempt, Candidate, Decided, Legs, Pair, Pending, Routed};

use crate::config::Config;
use crate::metrics::Metrics;
use files::Writer;

/// How long records gather before the thread takes them.
const GATHER: Duration = Duration::from_millis(50);
/// Records that may wait for the thread.
const QUEUE_MAX: usize = 4096;
/// Records in memory: with 64 candidates each some 20 MB.
const RECENT_MAX: usize = 1024;

/// The last records, the oldest first.
type Recent = Arc<Mutex<VecDeque<Arc<Decided>>>>;

/// The explanations of a gateway's turns.
pub(crate) struct Decisions {
    recent: Recent,
    /// None once closed.
    sender: Mutex<Option<SyncSender<Box<Pending>>>>,
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
        let recent = Recent::default();
        let log = Log {
            recent: Arc::clone(&recent),
            writer,
            left_out: left_out.clone(),
            is_failing: false,
        };
        let thread = std::thread::Builder::new()
            .name("decisions".to_owned())
            .spawn(move || log.run(&receiver))?;
        Ok(Self {
            recent,
            sender: Mutex::new(Some(sender)),
            thread: Mutex::new(Some(thread)),
            left_out,
        })
    }

    /// Takes one turn's record.
    pub(crate) fn note(&self, pending: Pending) {
        let sender = lock(&self.sender);
        let sent = sender
            .as_ref()
            .map(|sender| sender.try_send(Box::new(pending)));
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

/// What the thread works with.
struct Log {
    recent: Recent,
    /// None where nothing is kept on disk.
    writer: Option<Writer>,
    left_out: IntCounter,
    is_failing: bool,
}

impl Log {
    /// Takes records until the gateway closes; what is written is with the kernel whenever none
    /// waits.
    fn run(mut self, receiver: &Receiver<Box<Pending>>) {
        while let Ok(first) = receiver.recv() {
            self.take(*first);
            std::thread::sleep(GATHER);
            receiver.try_iter().for_each(|pending| self.take(*pending));
            let flushed = self.writer.as_mut().map_or(Ok(()), Writer::flush);
            self.note(flushed);
        }
    }

    fn take(&mut self, pending: Pending) {
        let decided = Arc::new(pending.spelled());
        let written = match &mut self.writer {
            Some(writer) => writer.append(&decided),
            None => Ok(()),
        };
        self.note(written);
        let mut recent = lock(&self.recent);
        if recent.len() == RECENT_MAX {
            recent.pop_front();
        }
        recent.push_back(decided);
    }

    fn note(&mut self, result: std::io::Result<()>) {
        if let Err(error) = &result {
            self.left_out.inc();
            if !self.is_failing {
                tracing::error!(%error, "the decision log cannot be written");
            }
        }
        self.is_failing = result.is_err();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
