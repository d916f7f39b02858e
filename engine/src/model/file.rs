//! How does a model file come into memory?
//!
//! It is mapped, not read: the header is parsed from the mapping, weights are copied out of it
//! once while they are packed, and two nodes on one machine share the page cache. What the file
//! must not do is change while it is mapped; the weights are packed at load for that reason too,
//! so that nothing reads the mapping afterwards.

use std::path::{Path, PathBuf};

use prompt::gguf::{Header, TensorInfo};

use super::config::ModelConfig;
use super::error::ModelError;
use crate::sys::mmap::Mapping;

/// A GGUF file, mapped, with its header read and checked.
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    mapping: Mapping,
    header: Header,
    packed: Option<PathBuf>,
}

impl GgufFile {
    /// Maps the file and reads its header. A truncated or foreign file is refused here.
    pub fn open(path: &Path) -> Result<GgufFile, ModelError> {
        let open_error = |source| ModelError::Open {
            path: path.to_owned(),
            source,
        };
        let mapping = Mapping::open(path).map_err(open_error)?;
        let header = Header::parse(mapping.bytes()).map_err(|source| ModelError::Header {
            path: path.to_owned(),
            source,
        })?;
        Ok(GgufFile {
            path: path.to_owned(),
            mapping,
            header,
            packed: None,
        })
    }

    /// Keeps packed weights in a folder, or beside the file if none is given: whoever loads it maps them
    /// if they are there, and else packs and writes them.
    pub fn keep_packed(&mut self, folder: Option<&Path>) {
        let mut name = self.path.file_name().unwrap_or_default().to_owned();
        if folder.is_some() {
            // Files of one name may lie in many folders.
            let whole = self
                .path
                .canonicalize()
                .unwrap_or_else(|_| self.path.clone());
            let place = blake3::hash(whole.as_os_str().as_encoded_bytes());
            name.push(format!(".{}", &place.to_hex()[..16]));
        }
        let folder = folder.or(self.path.parent()).unwrap_or(Path::new(""));
        self.packed = Some(folder.join(name));
    }

    /// The beginning of the path at which packed weights are kept.
    pub(crate) fn packed(&self) -> Option<&Path> {
        self.packed.as_deref()
    }

    /// The metadata and the list of tensors.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The path the file was opened at.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Tells this file's weights from others: made of every tensor's description and first bytes.
    /// Nobody who trains or quantises a model leaves all of those as they were.
    pub fn fingerprint(&self) -> [u8; 32] {
        /// Of each tensor: a page, so that a large file is not read for it.
        const BYTES: usize = 4096;
        let mut hasher = blake3::Hasher::new_derive_key("homing 2026-11 model fingerprint");
        // What else decides about a block: rope, norms, the numbers of heads and layers.
        hasher.update(format!("{:?}", ModelConfig::from_header(&self.header).ok()).as_bytes());
        for tensor in &self.header.tensors {
            hasher.update(format!("{tensor:?}").as_bytes());
            let bytes = self.tensor_bytes(tensor).unwrap_or_default();
            hasher.update(&bytes[..bytes.len().min(BYTES)]);
        }
        *hasher.finalize().as_bytes()
    }

    /// The stored bytes of one of this header's tensors; `None` if they lie past the end.
    pub(crate) fn tensor_bytes(&self, tensor: &TensorInfo) -> Option<&[u8]> {
        let start = self.header.data_offset.checked_add(tensor.offset)?;
        let end = start.checked_add(tensor.bytes)?;
        self.mapping
            .bytes()
            .get(usize::try_from(start).ok()?..usize::try_from(end).ok()?)
    }
}
