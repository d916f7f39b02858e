//! Weights as the kernels want them, on the disk: a node that starts again maps them and packs nothing.
//!
//! The file holds the parts of every matrix in the order in which a model asks for them, each with
//! a checksum, behind a head that names what it was made of: the model's fingerprint, its file's
//! length and time of change, the layout's version, the rank. A file of anything else is stale and
//! is made anew; so is one that a checksum finds damaged. It is written beside its place under a
//! lock and renamed when it is whole, so that of two processes that pack at once one writes, and a
//! reader never sees half a file. Whatever is wrong with it, the model loads without it.
//!
//! The mapping must not change while it is in use, as with the model's own file: whoever replaces
//! it does so by renaming.

use std::fs::{self, File};
use std::io::{self, BufWriter, Seek, Write};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use xxhash_rust::xxh3::xxh3_64;

use crate::ops::PartBytes;
use crate::sys::mmap::Mapping;

const MAGIC: [u8; 8] = *b"HOMEPACK";
/// The version of the head below.
const VERSION: u32 = 1;
/// Parts begin at multiples of this: a line of the cache.
const ALIGNMENT: u64 = 64;
/// Magic, version, layout, key, number of parts, checksum of all this and the table.
const HEAD_BYTES: usize = 8 + 4 + 4 + 32 + 8 + 8;
/// First byte, length and checksum of a part.
const ENTRY_BYTES: usize = 24;
/// More parts than any model has.
const PARTS_MAX: usize = 1 << 20;

/// What a packed file must have been made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Key {
    /// The version of the layout of parts.
    pub(crate) layout: u32,
    /// Model, file and rank.
    pub(crate) source: [u8; 32],
}

/// Why a packed file is of no use.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unusable {
    /// There is none.
    #[error("there is none")]
    Missing,
    /// It cannot be read.
    #[error("{0}")]
    Io(io::Error),
    /// Made of another model, or by another version.
    #[error("it was packed from another file or by another version")]
    Stale,
    /// Not what was written.
    #[error("it is damaged: {0}")]
    Damaged(&'static str),
}

/// A packed file, mapped and checked; its matrices come in the order in which they were written.
#[derive(Debug)]
pub(crate) struct PackedFile {
    file: Arc<Mapping>,
    parts: Vec<Range<usize>>,
    next: usize,
}

impl PackedFile {
    /// Opens and checks a file, with so many threads.
    pub(crate) fn open(path: &Path, key: &Key, threads: usize) -> Result<PackedFile, Unusable> {
        let file = Mapping::open(path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Unusable::Missing,
            _ => Unusable::Io(error),
        })?;
        let (parts, sums) = table(file.bytes(), key)?;
        if !all_whole(file.bytes(), (&parts, &sums), threads) {
            return Err(Unusable::Damaged("a checksum is wrong"));
        }
        let file = Arc::new(file);
        Ok(PackedFile {
            file,
            parts,
            next: 0,
        })
    }

    /// The next matrix.
    pub(crate) fn next(&mut self) -> Option<PartBytes> {
        let parts = self.parts.get(self.next..)?.first_chunk()?;
        self.next += PartBytes::PARTS;
        Some(PartBytes {
            file: Arc::clone(&self.file),
            ranges: parts.clone(),
        })
    }

    /// Whether all matrices were taken.
    pub(crate) fn is_used_up(&self) -> bool {
        self.next == self.parts.len()
    }
}

/// Places and checksums of the parts, if the head is that of this key.
fn table(bytes: &[u8], key: &Key) -> Result<(Vec<Range<usize>>, Vec<u64>), Unusable> {
    let damaged = |what| Unusable::Damaged(what);
    let head = bytes.get(..HEAD_BYTES).ok_or(damaged("it is too short"))?;
    if head[..8] != MAGIC || head[8..12] != VERSION.to_le_bytes() {
        return Err(Unusable::Stale);
    }
    if head[12..16] != key.layout.to_le_bytes() || head[16..48] != key.source {
        return Err(Unusable::Stale);
    }
    let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    let count = usize::try_from(number(48)).unwrap_or(usize::MAX);
    if count > PARTS_MAX {
        return Err(damaged("too many parts"));
    }
    let end = HEAD_BYTES + count * ENTRY_BYTES;
    let table = bytes
        .get(HEAD_BYTES..end)
        .ok_or(damaged("it is too short"))?;
    if head_sum(&head[..56], table) != number(56) {
        return Err(damaged("the checksum of its head is wrong"));
    }
    let (mut parts, mut sums) = (Vec::with_capacity(count), Vec::with_capacity(count));
    for entry in 0..count {
        let at = HEAD_BYTES + entry * ENTRY_BYTES;
        let (start, len) = (number(at), number(at + 8));
        let end = start
            .checked_add(len)
            .filter(|end| *end <= bytes.len() as u64);
        let end = end.ok_or(damaged("it is too short"))?;
        parts.push(start as usize..end as usize);
        sums.push(number(at + 16));
    }
    Ok((parts, sums))
}

fn head_sum(head: &[u8], table: &[u8]) -> u64 {
    xxh3_64(&[head, table].concat())
}

/// Whether every part has its checksum. The largest are a few hundred megabytes, so that several
/// threads read at once.
fn all_whole(bytes: &[u8], (parts, sums): (&[Range<usize>], &[u64]), threads: usize) -> bool {
    let (next, whole) = (AtomicUsize::new(0), AtomicBool::new(true));
    let check = || {
        while whole.load(Ordering::Relaxed) {
            let part = next.fetch_add(1, Ordering::Relaxed);
            let Some(range) = parts.get(part) else { break };
            if xxh3_64(&bytes[range.clone()]) != sums[part] {
                whole.store(false, Ordering::Relaxed);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(check);
        }
        check();
    });
    whole.into_inner()
}

/// Writes the matrices to where [`PackedFile::open`] finds them. False if another process is doing
/// so at this moment.
pub(crate) fn write<'a>(
    path: &Path,
    key: &Key,
    matrices: impl Iterator<Item = [&'a [u8]; PartBytes::PARTS]>,
) -> io::Result<bool> {
    let part = beside(path);
    let file = File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .open(&part)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(fs::TryLockError::WouldBlock) => return Ok(false),
        Err(fs::TryLockError::Error(error)) => return Err(error),
    }
    // Whoever had the lock before may have renamed this very file to where it is in use now.
    let (ours, named) = (file.metadata()?, fs::metadata(&part)?);
    if (ours.dev(), ours.ino()) != (named.dev(), named.ino()) {
        return Ok(false);
    }
    let written = write_to(&file, key, &matrices.flatten().collect::<Vec<_>>());
    let placed = written.and_then(|()| fs::rename(&part, path));
    if placed.is_err() {
        // Nothing is left of it; the lock is still held.
        let _ = fs::remove_file(&part);
    }
    placed.map(|()| true)
}

/// Where a file is written before it has its name.
fn beside(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".part");
    path.with_file_name(name)
}

fn write_to(file: &File, key: &Key, parts: &[&[u8]]) -> io::Result<()> {
    file.set_len(0)?;
    let mut table = Vec::with_capacity(parts.len() * ENTRY_BYTES);
    let mut at = ((HEAD_BYTES + parts.len() * ENTRY_BYTES) as u64).next_multiple_of(ALIGNMENT);
    for part in parts {
        for number in [at, part.len() as u64, xxh3_64(part)] {
            table.extend_from_slice(&number.to_le_bytes());
        }
        at = (at + part.len() as u64).next_multiple_of(ALIGNMENT);
    }
    let mut head = Vec::with_capacity(HEAD_BYTES);
    head.extend_from_slice(&MAGIC);
    head.extend_from_slice(&VERSION.to_le_bytes());
    head.extend_from_slice(&key.layout.to_le_bytes());
    head.extend_from_slice(&key.source);
    head.extend_from_slice(&(parts.len() as u64).to_le_bytes());
    let sum = head_sum(&head, &table);
    head.extend_from_slice(&sum.to_le_bytes());
    let mut out = BufWriter::with_capacity(1 << 20, file);
    out.write_all(&head)?;
    out.write_all(&table)?;
    for part in parts {
        let here = out.stream_position()?;
        let gap = here.next_multiple_of(ALIGNMENT) - here;
        out.write_all(&[0; ALIGNMENT as usize][..gap as usize])?;
        out.write_all(part)?;
    }
    // Not synced: what a loss of power takes is found by the checksums, and packed again.
    out.flush()
}

#[cfg(test)]
mod tests;
