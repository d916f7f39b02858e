//! Who used what, and what does it cost?
//!
//! A request is opened before it is sent to a node ([`Ledger::begin`]), noted while its answer is
//! relayed ([`OpenEntry::checkpoint`]) and settled with its one [`UsageRecord`]
//! ([`OpenEntry::settle`]). All three are lines of a journal that are with the kernel when the call
//! returns, so SIGKILL loses nothing; a power loss may take the last [`SYNC_EVERY`] plus one fsync.
//!
//! States of a request: open → settled, once. An [`OpenEntry`] that is dropped settles itself from
//! its last checkpoint; one that outlives its process is settled as `cut` by the next (`recover`).
//!
//! A thread syncs the journal; another fills SQLite from it ([`sqlite`]) and moves segments that
//! are in there to `ledger/archive`. The archive is kept: it is what the database can be made from
//! again, and the operator's to delete.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use policies::price::{DEFAULT_MODEL, PriceBook, Rates};

mod background;
mod entry;
mod journal;
mod lock;
pub mod record;
mod recover;
mod segment;
pub mod sqlite;

use background::Stop;
use entry::Checkpoint;
use journal::{Journal, Promise};
pub use lock::DataLock;
pub use record::{Status, UsageRecord};

/// How often the journal is synced: what a power loss may take of acknowledged records is this
/// plus the duration of one fsync.
pub const SYNC_EVERY: Duration = Duration::from_millis(50);

/// A checkpoint is written at the first token and then when this many tokens were relayed since
/// the last one, or this much time has passed, whichever comes first.
const CHECKPOINT_TOKENS: u64 = 16;
const CHECKPOINT_EVERY: Duration = Duration::from_millis(250);

/// A settlement may be longer than its opening by the node's name and the digits of its numbers:
/// 8 numbers of up to 20 digits and a name of at most 256 bytes, escaped.
const SETTLE_GROWTH_BYTES: u64 = 768;

/// Segments that are projected and settled go here.
const ARCHIVE: &str = "archive";

/// Why the ledger could not take a request or a record.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// There is no room for the record of one more request. The request must be refused; it may
    /// work again as soon as somebody makes room.
    #[error("the disk of the ledger is full ({path}): free space there, nothing else is needed")]
    Full {
        /// The journal's directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Another process works on this data directory.
    #[error(
        "{path} is in use by another homing gateway (pid {pid}): stop it, or give this one its own \
         --data directory"
    )]
    InUse {
        /// The data directory.
        path: PathBuf,
        /// The other process, as it wrote itself down.
        pid: String,
    },
    /// The journal could not be read or written.
    #[error("the ledger at {path}: {source}")]
    Io {
        /// Which file or directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

impl LedgerError {
    fn at(path: &Path, source: io::Error) -> Self {
        use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
        let path = path.to_owned();
        match source.kind() {
            StorageFull | QuotaExceeded | FileTooLarge => Self::Full { path, source },
            _ => Self::Io { path, source },
        }
    }
}

/// The journal of usage records of one gateway.
pub struct Ledger {
    shared: Arc<Shared>,
    prices: PriceBook,
    stop: Arc<Stop>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    _lock: DataLock,
}

/// What open entries and threads need of the ledger; outlives it as long as one request is open.
struct Shared {
    data: PathBuf,
    dir: PathBuf,
    journal: Journal,
}

/// How the ledger is doing, for metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LedgerStats {
    /// Requests that are opened and not settled.
    pub open_requests: usize,
    /// Segment being written.
    pub segment: u64,
    /// Its length.
    pub segment_bytes: u64,
}

impl Ledger {
    /// Locks the data directory, settles what an ended process left open, and starts the threads
    /// that sync and project. `prices` are the rates written on openings.
    pub fn open(data: &Path, prices: PriceBook) -> Result<Arc<Ledger>, LedgerError> {
        let lock = DataLock::acquire(data)?;
        let dir = dir(data);
        let found = recover::recover(&dir).map_err(|source| LedgerError::at(&dir, source))?;
        let shared = Arc::new(start_journal(data, &found)?);
        let stop = Arc::new(Stop::default());
        let threads = background::start(&shared, &stop)
            .map_err(|source| LedgerError::at(&shared.dir, source))?;
        Ok(Arc::new(Self {
            shared,
            prices,
            stop,
            threads: Mutex::new(threads),
            _lock: lock,
        }))
    }

    /// Settles what an ended gateway left open, if none is running; says whether it did. For
    /// `homing report`, which must not touch the open requests of a living gateway.
    pub fn recover_if_idle(data: &Path) -> Result<bool, LedgerError> {
        if segment::list(&dir(data)).is_ok_and(|segments| segments.is_empty()) {
            return Ok(false);
        }
        let _lock = match DataLock::try_acquire(data) {
            Err(LedgerError::InUse { .. }) => return Ok(false),
            other => other?,
        };
        let dir = dir(data);
        let found = recover::recover(&dir).map_err(|source| LedgerError::at(&dir, source))?;
        if !found.cut.is_empty() {
            let shared = start_journal(data, &found)?;
            shared
                .journal
                .close()
                .map_err(|source| LedgerError::at(&shared.dir, source))?;
        }
        Ok(true)
    }

    /// Writes the opening of a request and sets the room for its settlement aside.
    pub fn begin(&self, opening: &UsageRecord) -> Result<OpenEntry, LedgerError> {
        let models = &self.prices.models;
        let rates = models
            .get(&opening.model)
            .or_else(|| models.get(DEFAULT_MODEL));
        let rates = rates.copied().unwrap_or_default();
        let line = entry::open_line(opening, &rates);
        let promise = self
            .shared
            .journal
            .begin(&line, line.len() as u64 + SETTLE_GROWTH_BYTES)
            .map_err(|source| LedgerError::at(&self.shared.dir, source))?;
        Ok(OpenEntry(Some(Open {
            shared: Arc::clone(&self.shared),
            promise,
            opening: opening.clone(),
            rates,
            since: Instant::now(),
            last: None,
            noted: None,
        })))
    }

    /// Numbers for metrics.
    pub fn stats(&self) -> LedgerStats {
        let (segment, segment_bytes) = self.shared.journal.position();
        LedgerStats {
            open_requests: self.shared.journal.open_requests(),
            segment,
            segment_bytes,
        }
    }

    /// Stops the threads, after a last sync and a last projection. Entries still open can be
    /// settled afterwards; nobody projects them before the next start.
    pub fn close(&self) {
        self.stop.set();
        let threads =
            std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("a ledger thread had panicked");
            }
        }
        if let Err(error) = self.shared.journal.close() {
            tracing::error!(%error, "journal was not synced at the end");
        }
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        self.close();
    }
}

/// A request that is opened and not yet settled.
#[must_use = "dropping it settles the request from its last checkpoint"]
pub struct OpenEntry(Option<Open>);

struct Open {
    shared: Arc<Shared>,
    promise: Promise,
    opening: UsageRecord,
    rates: Rates,
    since: Instant,
    /// Totals at the last call, written or not.
    last: Option<Checkpoint>,
    /// Tokens and time of the last checkpoint written.
    noted: Option<(u64, Instant)>,
}

impl OpenEntry {
    /// The request went to another node than the one it was opened with.
    pub fn at_node(&mut self, node: &str) {
        if let Some(open) = &mut self.0 {
            node.clone_into(&mut open.opening.node);
        }
    }

    /// Totals so far. Call it for every relayed piece: it decides itself when to write.
    pub fn checkpoint(&mut self, input: u64, cached: u64, output: u64) {
        let Some(open) = &mut self.0 else { return };
        let now = Instant::now();
        let elapsed_ms = whole_ms(now.duration_since(open.since));
        let record_id = open.opening.record_id;
        let checkpoint = Checkpoint {
            record_id,
            input,
            cached,
            output,
            elapsed_ms,
        };
        open.last = Some(checkpoint);
        let due = open.noted.is_none_or(|(tokens, at)| {
            output >= tokens.saturating_add(CHECKPOINT_TOKENS)
                || (output > tokens && now.duration_since(at) >= CHECKPOINT_EVERY)
        });
        if due {
            open.noted = Some((output, now));
            let line = entry::checkpoint_line(&checkpoint, &open.opening.node);
            if let Err(error) = open.shared.journal.note(&line) {
                tracing::warn!(%error, "a checkpoint was left out of the journal");
            }
        }
    }

    /// Writes the final record; it is with the kernel when this returns.
    pub fn settle(mut self, record: UsageRecord) -> Result<(), LedgerError> {
        match self.0.take() {
            Some(open) => open.write(&record),
            None => Ok(()),
        }
    }
}

impl Drop for OpenEntry {
    fn drop(&mut self) {
        let Some(open) = self.0.take() else { return };
        let relayed = open.last.filter(|last| last.output > 0);
        let status = if relayed.is_some() {
            Status::Cut
        } else {
            Status::Failed
        };
        let mut record = recover::unfinished(&open.opening, &open.rates, relayed, status);
        record.duration_ms = whole_ms(open.since.elapsed());
        if let Err(error) = open.write(&record) {
            tracing::error!(%error, request_id = record.request_id, "a request was not settled");
        }
    }
}

impl Open {
    fn write(&self, record: &UsageRecord) -> Result<(), LedgerError> {
        self.shared
            .journal
            .settle(&entry::settle_line(record), &self.promise)
            .map_err(|source| LedgerError::at(&self.shared.dir, source))
    }
}

/// Where the journal of a data directory is.
pub(crate) fn dir(data: &Path) -> PathBuf {
    data.join("ledger")
}

/// Milliseconds since 1970.
pub fn unix_ms() -> i64 {
    let since = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

fn whole_ms(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

/// Begins a new segment, with the records of what was cut.
fn start_journal(data: &Path, found: &recover::Found) -> Result<Shared, LedgerError> {
    let dir = dir(data);
    let archive = dir.join(ARCHIVE);
    let at = |source| LedgerError::at(&dir, source);
    crate::secrets::private_dir(&archive).map_err(at)?;
    if found.damaged > 0 || found.torn_bytes > 0 {
        tracing::warn!(
            damaged_lines = found.damaged,
            torn_bytes = found.torn_bytes,
            "the journal was not whole"
        );
    }
    let archived = segment::list(&archive)
        .map_err(at)?
        .last()
        .map_or(0, |(number, _)| *number);
    let projected = sqlite::projected_segment(data);
    let number = found.last_segment.max(archived).max(projected) + 1;
    remove_empty(&dir).map_err(at)?;
    let journal = Journal::create(&dir, number).map_err(at)?;
    for record in &found.cut {
        tracing::info!(
            request_id = record.request_id,
            output_tokens = record.output_tokens,
            "a request of an ended process is recorded as cut"
        );
        journal.note(&entry::settle_line(record)).map_err(at)?;
    }
    Ok(Shared {
        data: data.to_owned(),
        journal,
        dir,
    })
}

/// Segments without a line are left by gateways that served nothing; they only clutter.
fn remove_empty(dir: &Path) -> io::Result<()> {
    for (_, path) in segment::list(dir)? {
        if fs::metadata(&path)?.len() == 0 {
            fs::remove_file(&path)?;
        }
    }
    Ok(())
}
