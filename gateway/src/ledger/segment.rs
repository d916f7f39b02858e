//! How is one file of the journal made, written and read?
//!
//! A segment is a file whose room is allocated ahead (`fallocate`), so that what was promised can
//! be written on a full disk. It is written by `pwrite` at an offset the writer keeps: what
//! follows the last line is zeros, and the end of the data is the last byte that is not zero.
//!
//! Left out on purpose: a header. The name carries the number, and each line its checksum.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::entry::{self, Entry};

/// A segment being written.
pub(crate) struct Segment {
    pub(crate) number: u64,
    pub(crate) path: PathBuf,
    pub(crate) file: Arc<File>,
    /// Bytes written.
    pub(crate) used: u64,
    /// Bytes that are sure to be writable.
    pub(crate) allocated: u64,
}

impl Segment {
    /// Makes segment `number` in `dir` with `room` bytes allocated.
    pub(crate) fn create(dir: &Path, number: u64, room: u64) -> io::Result<Self> {
        let path = dir.join(name(number));
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)?;
        let mut segment = Self {
            number,
            path,
            file: Arc::new(file),
            used: 0,
            allocated: 0,
        };
        if let Err(error) = segment.allocate(room) {
            // An empty file on a full disk would only be in the way; a later start skips it anyway.
            let _ = fs::remove_file(&segment.path);
            return Err(error);
        }
        Ok(segment)
    }

    /// Makes sure that bytes up to offset `to` can be written.
    pub(crate) fn allocate(&mut self, to: u64) -> io::Result<()> {
        if to > self.allocated {
            allocate(&self.file, self.allocated, to)?;
            self.allocated = to;
        }
        Ok(())
    }

    /// Writes `line` behind the last one; after an error nothing counts as written.
    pub(crate) fn append(&mut self, line: &[u8]) -> io::Result<()> {
        self.file.write_all_at(line, self.used)?;
        self.used += line.len() as u64;
        Ok(())
    }

    /// Gives unused room back.
    pub(crate) fn close(&self) -> io::Result<()> {
        self.file.set_len(self.used)
    }
}

/// Allocates `[from, to)` of a file; where the file system has no `fallocate`, by writing zeros.
pub(crate) fn allocate(file: &File, from: u64, to: u64) -> io::Result<()> {
    use rustix::fs::{FallocateFlags, fallocate};
    use rustix::io::Errno;
    match fallocate(file, FallocateFlags::empty(), from, to - from) {
        Ok(()) => Ok(()),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
            let zeros = vec![0; 64 * 1024];
            let mut at = from;
            while at < to {
                let step = zeros
                    .len()
                    .min(usize::try_from(to - at).unwrap_or(usize::MAX));
                file.write_all_at(&zeros[..step], at)?;
                at += step as u64;
            }
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

/// The file name of a segment.
pub(crate) fn name(number: u64) -> String {
    format!("journal-{number:010}.log")
}

/// The segments in `dir`, oldest first; a missing directory has none.
pub(crate) fn list(dir: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let mut segments = Vec::new();
    for found in entries {
        let path = found?.path();
        let number = path
            .file_name()
            .and_then(|name| name.to_str())
            .and_then(|name| {
                name.strip_prefix("journal-")?
                    .strip_suffix(".log")?
                    .parse()
                    .ok()
            });
        if let Some(number) = number {
            segments.push((number, path));
        }
    }
    segments.sort();
    Ok(segments)
}

/// What a stretch of a segment holds.
pub(crate) struct Stretch {
    /// The entries in the order in which they were written.
    pub(crate) entries: Vec<Entry>,
    /// Lines that are not what was written.
    pub(crate) damaged: usize,
    /// Offset behind the last line that is whole.
    pub(crate) end: u64,
    /// Bytes behind `end` that belong to no whole line.
    pub(crate) torn_bytes: u64,
}

/// Reads the lines of a segment from offset `from` to its end, or to `to` where that is known.
///
/// The last line may be one that is being written at this moment (or was when the process died):
/// whatever cannot be read at the very end counts as torn, not as damaged.
pub(crate) fn read(path: &Path, from: u64, to: Option<u64>) -> io::Result<Stretch> {
    let file = File::open(path)?;
    let length = to.unwrap_or(file.metadata()?.len());
    let mut bytes = vec![0; usize::try_from(length.saturating_sub(from)).unwrap_or(usize::MAX)];
    let mut filled = 0;
    while filled < bytes.len() {
        match file.read_at(&mut bytes[filled..], from + filled as u64)? {
            // The writer gave unused room back between the two calls.
            0 => break,
            count => filled += count,
        }
    }
    Ok(parse(&bytes[..filled], from))
}

fn parse(bytes: &[u8], from: u64) -> Stretch {
    let data = bytes
        .iter()
        .rposition(|byte| *byte != 0)
        .map_or(0, |last| last + 1);
    let mut stretch = Stretch {
        entries: Vec::new(),
        damaged: 0,
        end: from,
        torn_bytes: 0,
    };
    let mut at = 0;
    // Damaged lines that nothing whole has followed yet.
    let mut doubtful = 0;
    while let Some(length) = bytes[at..data].iter().position(|byte| *byte == b'\n') {
        match entry::decode(&bytes[at..at + length]) {
            Ok(entry) => {
                stretch.entries.push(entry);
                stretch.damaged += std::mem::take(&mut doubtful);
                stretch.end = from + (at + length + 1) as u64;
            }
            Err(entry::Damaged) => doubtful += 1,
        }
        at += length + 1;
    }
    stretch.torn_bytes = from + data as u64 - stretch.end;
    stretch
}
