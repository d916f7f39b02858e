//! A file mapped read-only, as a slice of bytes.
#![expect(
    unsafe_code,
    reason = "mapping a file is a promise about the file that Rust cannot check"
)]

use std::fs::File;
use std::io;
use std::path::Path;

/// A whole file, mapped read-only.
#[derive(Debug)]
pub struct Mapping(memmap2::Mmap);

impl Mapping {
    /// Maps the file. An empty file gives an empty mapping.
    pub fn open(path: &Path) -> io::Result<Mapping> {
        let file = File::open(path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "not a regular file",
            ));
        }
        // SAFETY: the mapping is private and read-only. Another process that shortens or
        // rewrites the file while it is mapped would break the promise; model files are
        // replaced by renaming, and the engine reads the mapping only while it loads.
        let map = unsafe { memmap2::Mmap::map(&file)? };
        Ok(Mapping(map))
    }

    /// The file's bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}
