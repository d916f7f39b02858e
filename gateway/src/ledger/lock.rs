//! How does a data directory have one gateway at most?
//!
//! By `flock` on `data/gateway.lock`. The kernel gives it back when the process ends, however it
//! ends, so a lock left by SIGKILL is no lock. The file holds the pid, for the message only.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use super::LedgerError;

/// `homing report` holds the lock for as long as it settles what an ended gateway left.
const WAIT: Duration = Duration::from_secs(5);

/// The right to write in a data directory.
#[derive(Debug)]
pub struct DataLock {
    _file: File,
}

impl DataLock {
    /// Takes the lock; waits a little for a report that holds it.
    pub fn acquire(data: &Path) -> Result<Self, LedgerError> {
        let until = Instant::now() + WAIT;
        loop {
            match Self::try_acquire(data) {
                // A gateway writes its pid down, a report does not: only the latter is worth it.
                Err(LedgerError::InUse { pid, .. }) if pid.is_empty() && Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Ok(mut lock) => {
                    lock.write_pid(data)?;
                    return Ok(lock);
                }
                other => return other,
            }
        }
    }

    /// Takes the lock or says who holds it. Does not write the pid down.
    pub fn try_acquire(data: &Path) -> Result<Self, LedgerError> {
        let path = data.join("gateway.lock");
        let io = |source| LedgerError::at(&path, source);
        crate::secrets::private_dir(data).map_err(io)?;
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(io)?;
        match file.try_lock() {
            Ok(()) => {
                file.set_len(0).map_err(io)?;
                Ok(Self { _file: file })
            }
            Err(TryLockError::WouldBlock) => {
                let mut pid = String::new();
                file.read_to_string(&mut pid).map_err(io)?;
                let pid = pid.trim().to_owned();
                Err(LedgerError::InUse {
                    path: data.to_owned(),
                    pid,
                })
            }
            Err(TryLockError::Error(source)) => Err(io(source)),
        }
    }

    fn write_pid(&mut self, data: &Path) -> Result<(), LedgerError> {
        let mut write = || {
            self._file.rewind()?;
            writeln!(self._file, "{}", std::process::id())
        };
        // On a full disk the lock holds all the same; the pid only serves a message.
        if let Err(error) = write() {
            tracing::warn!(%error, data = %data.display(), "the lock file does not name its holder");
        }
        Ok(())
    }
}
