//! Where are the packed weights of a model kept, and what becomes of what is wrong with them?
//!
//! Nothing that happens here stops a model from loading: a folder that cannot be written, a disk that is
//! full, a file of another model or a damaged one cost the time to pack, and a line in the log.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use super::file::ModelFile;
use super::packed::{self, Key, PackedFile, Unusable};
use super::part::Part;
use crate::ops::PartBytes;

/// The packed weights of one rank of one file.
#[derive(Debug)]
pub(super) struct Packing {
    path: PathBuf,
    key: Key,
}

impl Packing {
    /// None if packed weights of this file are not to be kept.
    pub(super) fn of(file: &ModelFile, layout: u32, part: &Part) -> Option<Packing> {
        let mut path = file.packed()?.as_os_str().to_owned();
        let rank = part.rank();
        if rank.count() > 1 {
            path.push(format!(".{}of{}", rank.index(), rank.count()));
        }
        path.push(".packed");
        let mut hasher = blake3::Hasher::new_derive_key("homing 2026-11 packed weights");
        hasher.update(&file.fingerprint());
        hasher.update(&written(file.path())?);
        for number in [rank.index(), rank.count()] {
            hasher.update(&(number as u64).to_le_bytes());
        }
        let source = *hasher.finalize().as_bytes();
        Some(Packing {
            path: path.into(),
            key: Key { layout, source },
        })
    }

    /// The file, if it is whole and of this model.
    pub(super) fn open(&self, threads: usize) -> Option<PackedFile> {
        match PackedFile::open(&self.path, &self.key, threads) {
            Ok(file) => Some(file),
            Err(Unusable::Missing) => None,
            Err(why) => {
                tracing::warn!(path = %self.path.display(), %why, "packed weights are made anew");
                None
            }
        }
    }

    /// Keeps these matrices for the next start.
    pub(super) fn write<'a>(&self, matrices: impl Iterator<Item = [&'a [u8]; PartBytes::PARTS]>) {
        let path = self.path.display();
        match packed::write(&self.path, &self.key, matrices) {
            Ok(true) => tracing::info!(%path, "packed weights are kept for the next start"),
            Ok(false) => tracing::info!(%path, "another process is keeping the packed weights"),
            Err(error) => tracing::warn!(
                %path,
                %error,
                "packed weights cannot be kept: every start packs anew (--packed-weights)"
            ),
        }
    }
}

/// Lengths and times of change of a model's files.
fn written(path: &Path) -> Option<Vec<u8>> {
    let mut files = vec![path.to_owned()];
    if path.is_dir() {
        let entries = fs::read_dir(path).ok()?.flatten();
        let weights = |path: &PathBuf| path.extension().is_some_and(|e| e == "safetensors");
        files = entries.map(|entry| entry.path()).filter(weights).collect();
        files.sort_unstable();
    }
    let mut bytes = Vec::new();
    for file in files {
        let metadata = fs::metadata(file).ok()?;
        let time = metadata.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
        bytes.extend_from_slice(&metadata.len().to_le_bytes());
        bytes.extend_from_slice(&time.as_nanos().to_le_bytes());
    }
    Some(bytes)
}
