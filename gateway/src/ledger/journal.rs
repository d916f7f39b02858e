//! How does a line reach the disk, and how is the room for it promised?
//!
//! One writer behind a mutex; a line is one `pwrite`, done when the call returns, so it survives
//! SIGKILL. The invariant is `used + promised ≤ allocated`: an admitted request has the room of its
//! settlement set aside, so a full disk refuses new requests and never loses an admitted one.
//! `fsync` is grouped by [`Journal::sync`], which the ledger's thread calls.
//!
//! Left out on purpose: buffering in the process. A `pwrite` costs a few microseconds, less than
//! the explanation of what a buffer may lose.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::segment::{self, Segment};

/// A segment that has grown past this is closed and the next one begun. Big enough that an
/// operator sees one file an hour at ten requests a second, small enough to be read in one piece.
const SEGMENT_BYTES_MAX: u64 = 16 * 1024 * 1024;

/// Room kept allocated ahead of what is promised: about a thousand requests.
const ROOM_AHEAD_BYTES: u64 = 1024 * 1024;

/// The journal's writing side.
pub(crate) struct Journal {
    dir: PathBuf,
    writer: Mutex<Writer>,
}

struct Writer {
    current: Segment,
    /// Bytes set aside for the settlements of open requests.
    promised: u64,
    /// Open requests by the segment that holds their opening.
    open: BTreeMap<u64, usize>,
    /// Files with bytes that no fsync has covered yet.
    unsynced: Vec<Arc<File>>,
    /// The last write failed half way: the current segment takes no more lines.
    broken: bool,
}

/// What an open request holds of the journal.
#[derive(Debug)]
pub(crate) struct Promise {
    segment: u64,
    bytes: u64,
}

impl Journal {
    /// Starts writing segment `number` in `dir`.
    pub(crate) fn create(dir: &Path, number: u64) -> io::Result<Self> {
        let current = Segment::create(dir, number, ROOM_AHEAD_BYTES)?;
        let unsynced = vec![Arc::clone(&current.file), Arc::new(File::open(dir)?)];
        let writer = Writer {
            current,
            promised: 0,
            open: BTreeMap::new(),
            unsynced,
            broken: false,
        };
        Ok(Self {
            dir: dir.to_owned(),
            writer: Mutex::new(writer),
        })
    }

    /// Writes the opening of a request and sets `settle_bytes` aside for its settlement.
    pub(crate) fn begin(&self, line: &[u8], settle_bytes: u64) -> io::Result<Promise> {
        let mut writer = self.writer();
        if writer.broken || writer.current.used >= SEGMENT_BYTES_MAX {
            writer.rotate(&self.dir, line.len() as u64 + settle_bytes)?;
        }
        writer.room(line.len() as u64 + settle_bytes)?;
        writer.append(line)?;
        writer.promised += settle_bytes;
        let segment = writer.current.number;
        *writer.open.entry(segment).or_default() += 1;
        Ok(Promise {
            segment,
            bytes: settle_bytes,
        })
    }

    /// Writes a line that may be left out: it never takes promised room.
    pub(crate) fn note(&self, line: &[u8]) -> io::Result<()> {
        let mut writer = self.writer();
        writer.room(line.len() as u64)?;
        writer.append(line)
    }

    /// Writes the settlement for which `promise` holds the room.
    pub(crate) fn settle(&self, line: &[u8], promise: &Promise) -> io::Result<()> {
        let mut writer = self.writer();
        writer.promised -= promise.bytes;
        if let Some(open) = writer.open.get_mut(&promise.segment) {
            *open -= 1;
            if *open == 0 {
                writer.open.remove(&promise.segment);
            }
        }
        if writer.broken {
            writer.rotate(&self.dir, line.len() as u64)?;
        }
        writer.room(line.len() as u64)?;
        writer.append(line).or_else(|_| {
            // A device error, not a full disk: one more try, in a fresh file.
            writer.rotate(&self.dir, line.len() as u64)?;
            writer.append(line)
        })
    }

    /// Makes everything written so far survive a power loss, and allocates room ahead.
    pub(crate) fn sync(&self) -> io::Result<()> {
        let (files, current, from, to) = {
            let mut writer = self.writer();
            let files = std::mem::take(&mut writer.unsynced);
            let current = &writer.current;
            let to = current.used + writer.promised + ROOM_AHEAD_BYTES;
            (files, Arc::clone(&current.file), current.allocated, to)
        };
        // Outside the lock: requests go on writing while the disk works.
        for (at, file) in files.iter().enumerate() {
            if let Err(error) = file.sync_data() {
                self.writer().unsynced.extend_from_slice(&files[at..]);
                return Err(error);
            }
        }
        // Half used up, so that a busy journal asks for room a few times a second, not always.
        if to.saturating_sub(from) > ROOM_AHEAD_BYTES / 2
            && segment::allocate(&current, from, to).is_ok()
        {
            let mut writer = self.writer();
            if Arc::ptr_eq(&writer.current.file, &current) {
                writer.current.allocated = writer.current.allocated.max(to);
            }
        }
        Ok(())
    }

    /// The segment being written and its length.
    pub(crate) fn position(&self) -> (u64, u64) {
        let writer = self.writer();
        (writer.current.number, writer.current.used)
    }

    /// How many requests are open.
    pub(crate) fn open_requests(&self) -> usize {
        self.writer().open.values().sum()
    }

    /// The oldest segment that holds the opening of an open request, or else the current one.
    pub(crate) fn oldest_needed(&self) -> u64 {
        let writer = self.writer();
        writer
            .open
            .keys()
            .next()
            .copied()
            .unwrap_or(writer.current.number)
    }

    /// Ends writing: gives unused room back and makes the rest durable.
    pub(crate) fn close(&self) -> io::Result<()> {
        let result = self.sync();
        let writer = self.writer();
        if writer.promised == 0 {
            writer.current.close()?;
        }
        writer.current.file.sync_all()?;
        result
    }

    fn writer(&self) -> MutexGuard<'_, Writer> {
        // A panic elsewhere must not take billing down; every method leaves the writer whole.
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Writer {
    /// Makes sure that `bytes` more can be written without touching what is promised.
    fn room(&mut self, bytes: u64) -> io::Result<()> {
        let need = self.current.used + self.promised + bytes;
        if need <= self.current.allocated {
            return Ok(());
        }
        // On a nearly full disk the exact need may still fit where the step ahead does not.
        self.current
            .allocate(need + ROOM_AHEAD_BYTES)
            .or_else(|_| self.current.allocate(need))
    }

    fn append(&mut self, line: &[u8]) -> io::Result<()> {
        if let Err(error) = self.current.append(line) {
            self.broken = true;
            return Err(error);
        }
        let dirty = self
            .unsynced
            .iter()
            .any(|file| Arc::ptr_eq(file, &self.current.file));
        if !dirty {
            self.unsynced.push(Arc::clone(&self.current.file));
        }
        Ok(())
    }

    /// Goes on in a new segment that has room for everything promised and `bytes` more. Where the
    /// disk refuses that, a segment that is only too long goes on growing.
    fn rotate(&mut self, dir: &Path, bytes: u64) -> io::Result<()> {
        let need = self.promised + bytes;
        let number = self.current.number + 1;
        let next = Segment::create(dir, number, need + ROOM_AHEAD_BYTES)
            .or_else(|_| Segment::create(dir, number, need));
        let next = match next {
            Ok(next) => next,
            Err(_) if !self.broken => return Ok(()),
            Err(error) => return Err(error),
        };
        if let Err(error) = self.current.close() {
            tracing::warn!(%error, "closed journal segment keeps its unused room");
        }
        self.current = next;
        self.unsynced.push(Arc::clone(&self.current.file));
        // The directory entry must survive a power loss too.
        self.unsynced.push(Arc::new(File::open(dir)?));
        self.broken = false;
        Ok(())
    }
}
