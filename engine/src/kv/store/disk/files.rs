//! The two files of the disk tier: opened by one process at a time, readable by its user only.

use std::fs::{DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::buffer::Buffer;
use super::format::{ENTRY_BYTES, Entry, Head, PAGE, slot_bytes};
use crate::kv::store::index::Slot;

/// Entries read at once.
const ENTRIES_AT_ONCE: usize = 4096;

/// The disk tier cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The operating system refuses.
    #[error("cannot {what} {path}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Another process has it.
    #[error("{path} is in use by another node: each node needs a folder of its own")]
    InUse {
        /// The folder.
        path: PathBuf,
    },
    /// No disk tier lies there.
    #[error("{path} holds no KV blocks that this build knows")]
    Unknown {
        /// The folder.
        path: PathBuf,
    },
    /// Not even one block fits.
    #[error("--kv-disk-size {given} bytes holds no block; at least {least} are needed")]
    TooSmall {
        /// What was given.
        given: u64,
        /// What would do.
        least: u64,
    },
}

/// Reads and writes slots. One implementation is [`Files`]; tests have others, which fail.
pub(crate) trait Drive: Send {
    /// Reads a slot.
    fn read(&self, slot: Slot, to: &mut [u8]) -> io::Result<()>;
    /// Writes a slot.
    fn write(&self, slot: Slot, from: &[u8]) -> io::Result<()>;
    /// Writes a slot's entry; zeros for an empty one.
    fn write_entry(&self, slot: Slot, entry: &[u8]) -> io::Result<()>;
}

/// The files of a folder.
#[derive(Debug)]
pub(super) struct Files {
    index: File,
    blocks: File,
    slot_bytes: usize,
}

/// What was found in a folder.
pub(super) struct Found {
    pub(super) files: Files,
    /// Slots there are.
    pub(super) slots: usize,
    pub(super) entries: Vec<(Slot, Entry)>,
    /// Whether the page cache is passed by.
    pub(super) direct: bool,
}

impl Files {
    /// Opens a folder for blocks of this kind, and makes it if it is not there. Blocks of another
    /// kind are dropped.
    pub(super) fn open(dir: &Path, head: Head, size: u64) -> Result<Found, DiskError> {
        let slot_bytes = slot_bytes(head.body_bytes);
        let each = (slot_bytes + ENTRY_BYTES) as u64;
        let least = each + PAGE as u64;
        if size < least {
            return Err(DiskError::TooSmall { given: size, least });
        }
        // Slots are numbered in 32 bits.
        let slots = ((size - PAGE as u64) / each).min(u64::from(u32::MAX)) as usize;
        let made = DirBuilder::new().recursive(true).mode(0o700).create(dir);
        made.map_err(fault("create", dir))?;
        let index = open_file(&dir.join("index"), true, 0)?;
        lock(&index, dir)?;
        let ours = read_head(&index) == Some(head);
        let path = dir.join("index");
        if !ours {
            index.set_len(0).map_err(fault("empty", &path))?;
        }
        let index_bytes = (PAGE + slots * ENTRY_BYTES) as u64;
        index
            .set_len(index_bytes)
            .and_then(|()| index.write_all_at(&head.encode(), 0))
            .map_err(fault("write", &path))?;
        let (blocks, direct) = open_blocks(&dir.join("blocks"))?;
        if !ours {
            // Without entries nobody could wipe what lies there.
            let emptied = blocks.set_len(0);
            emptied.map_err(fault("empty", &dir.join("blocks")))?;
        }
        blocks
            .set_len((slots * slot_bytes) as u64)
            .map_err(fault("size", &dir.join("blocks")))?;
        let entries = read_entries(&index, slots).map_err(fault("read", &path))?;
        let files = Files {
            index,
            blocks,
            slot_bytes,
        };
        Ok(Found {
            files,
            slots,
            entries,
            direct,
        })
    }
}

impl Drive for Files {
    fn read(&self, slot: Slot, to: &mut [u8]) -> io::Result<()> {
        self.blocks.read_exact_at(to, self.block_at(slot))
    }

    fn write(&self, slot: Slot, from: &[u8]) -> io::Result<()> {
        self.blocks.write_all_at(from, self.block_at(slot))
    }

    fn write_entry(&self, slot: Slot, entry: &[u8]) -> io::Result<()> {
        self.index.write_all_at(entry, entry_at(slot))
    }
}

impl Files {
    fn wipe(&self, slot: Slot, zeros: &Buffer) -> io::Result<()> {
        self.write_entry(slot, &[0; ENTRY_BYTES])?;
        self.write(slot, zeros.bytes())
    }

    /// A slot without an entry may hold what a failed write or a crash left: whose, nobody knows.
    fn wipe_leftovers(&self, slot: Slot, [zeros, found]: &mut [Buffer; 2]) -> io::Result<()> {
        self.read(slot, found.bytes_mut())?;
        if found.bytes() == zeros.bytes() {
            return Ok(());
        }
        self.wipe(slot, zeros)
    }

    fn block_at(&self, slot: Slot) -> u64 {
        u64::from(slot.0) * self.slot_bytes as u64
    }
}

/// Whose blocks are to go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Those of a cache salt.
    Salt(String),
    /// Those without one.
    Unsalted,
    /// All.
    Everything,
}

impl Scope {
    fn covers(&self, salt: Option<&str>) -> bool {
        match self {
            Self::Salt(wanted) => salt == Some(wanted),
            Self::Unsalted => salt.is_none(),
            Self::Everything => true,
        }
    }
}

/// Overwrites every block of a scope with zeros, on the disk itself; says how many there were. No
/// node may use the folder meanwhile.
pub fn wipe(dir: &Path, scope: &Scope) -> Result<usize, DiskError> {
    let unknown = || DiskError::Unknown {
        path: dir.to_owned(),
    };
    let path = dir.join("index");
    if !path.exists() {
        return Err(unknown());
    }
    let index = open_file(&path, false, 0)?;
    lock(&index, dir)?;
    let head = read_head(&index).ok_or_else(unknown)?;
    let length = index.metadata().map_err(fault("read", &path))?.len();
    let slots = usize::try_from(length).unwrap_or(0).saturating_sub(PAGE) / ENTRY_BYTES;
    let entries = read_entries(&index, slots).map_err(fault("read", &path))?;
    let (blocks, _direct) = open_blocks(&dir.join("blocks"))?;
    let files = Files {
        index,
        blocks,
        slot_bytes: slot_bytes(head.body_bytes),
    };
    let mut owned = vec![None; slots];
    for (slot, entry) in &entries {
        owned[slot.0 as usize] = Some(scope.covers(entry.stored.content.salt.as_deref()));
    }
    let mut buffers = [Buffer::new(files.slot_bytes), Buffer::new(files.slot_bytes)];
    for (slot, covered) in (0_u32..).map(Slot).zip(&owned) {
        let wiped = match covered {
            Some(false) => Ok(()),
            Some(true) => files.wipe(slot, &buffers[0]),
            None => files.wipe_leftovers(slot, &mut buffers),
        };
        wiped.map_err(fault("wipe", dir))?;
    }
    let flushed = files
        .index
        .sync_all()
        .and_then(|()| files.blocks.sync_all());
    flushed.map_err(fault("flush", dir))?;
    Ok(owned
        .iter()
        .filter(|covered| **covered == Some(true))
        .count())
}

fn entry_at(slot: Slot) -> u64 {
    (PAGE + slot.0 as usize * ENTRY_BYTES) as u64
}

fn read_head(index: &File) -> Option<Head> {
    let mut page = vec![0; PAGE];
    index.read_exact_at(&mut page, 0).ok()?;
    Head::decode(&page)
}

fn read_entries(index: &File, slots: usize) -> io::Result<Vec<(Slot, Entry)>> {
    let mut entries = Vec::new();
    let mut bytes = vec![0; ENTRIES_AT_ONCE * ENTRY_BYTES];
    for first in (0..slots).step_by(ENTRIES_AT_ONCE) {
        let count = ENTRIES_AT_ONCE.min(slots - first);
        let bytes = &mut bytes[..count * ENTRY_BYTES];
        index.read_exact_at(bytes, (PAGE + first * ENTRY_BYTES) as u64)?;
        for (slot, entry) in (first as u32..).zip(bytes.chunks_exact(ENTRY_BYTES)) {
            entries.extend(Entry::decode(entry).map(|entry| (Slot(slot), entry)));
        }
    }
    Ok(entries)
}

/// Past the page cache where the file system allows: blocks are read once and then lie in host
/// memory, so a second copy in the page cache would only push out what others need.
fn open_blocks(path: &Path) -> Result<(File, bool), DiskError> {
    match open_file(path, true, libc::O_DIRECT) {
        Ok(file) => Ok((file, true)),
        Err(_) => Ok((open_file(path, true, 0)?, false)),
    }
}

fn open_file(path: &Path, create: bool, flags: i32) -> Result<File, DiskError> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(create)
        .mode(0o600)
        .custom_flags(flags)
        .open(path)
        .map_err(fault("open", path))?;
    // A file that was there before may be readable by others.
    file.set_permissions(Permissions::from_mode(0o600))
        .map_err(fault("protect", path))?;
    Ok(file)
}

fn lock(index: &File, dir: &Path) -> Result<(), DiskError> {
    match index.try_lock() {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => Err(DiskError::InUse {
            path: dir.to_owned(),
        }),
        Err(TryLockError::Error(source)) => Err(fault("lock", dir)(source)),
    }
}

fn fault(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DiskError {
    let path = path.to_owned();
    move |source| DiskError::Io { what, path, source }
}
