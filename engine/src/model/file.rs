//! How does a model come into memory, from a GGUF file or from a folder in Hugging Face's layout?
//!
//! It is mapped, not read: headers are parsed from the mappings, weights are copied out of them
//! once while they are packed, and two nodes on one machine share the page cache. What files
//! must not do is change while they are mapped; the weights are packed at load for that reason too,
//! so that nothing reads the mappings afterwards.
//!
//! Whatever the layout, there is one header, in GGUF's words; offsets count from the beginning of the
//! first file, as if all lay end to end.

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use prompt::checkpoint::safetensors::SafeTensors;
use prompt::checkpoint::{
    Checkpoint, CheckpointError, INDEX_FILE, Index, Shard, Texts, TextsError, shard_names,
};
use prompt::gguf::{Header, TensorInfo};

use super::config::{Architecture, ModelConfig};
use super::error::ModelError;
use crate::ops::Pairs;
use crate::sys::mmap::Mapping;

/// Bytes of an index of shards: 200 for each of the most tensors that are read.
const INDEX_BYTES_MAX: u64 = 64 << 20;

/// A model's files, mapped, with their headers read and checked.
#[derive(Debug)]
pub struct ModelFile {
    path: PathBuf,
    layout: Layout,
    header: Header,
    /// In order of `begin`; each ends where the next one begins, or before it.
    parts: Vec<Part>,
}

/// How the files store queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Layout {
    /// By the family: llama's rows are reordered when a model is converted.
    Gguf,
    /// As the model was trained.
    HuggingFace,
}

/// Bytes of a model.
#[derive(Debug)]
struct Part {
    begin: u64,
    bytes: Bytes,
}

#[derive(Debug)]
enum Bytes {
    Mapped(Mapping),
    /// Made from the configuration.
    Made(Vec<u8>),
}

impl Bytes {
    fn get(&self) -> &[u8] {
        match self {
            Self::Mapped(mapping) => mapping.bytes(),
            Self::Made(bytes) => bytes,
        }
    }
}

impl ModelFile {
    /// Maps a GGUF file, or the files of a folder, and reads the headers. Truncated or foreign files are
    /// refused here.
    pub fn open(path: &Path) -> Result<ModelFile, ModelError> {
        if path.is_dir() {
            return Folder(path).open();
        }
        let mapping = Mapping::open(path).map_err(open_error(path))?;
        let header = Header::parse(mapping.bytes()).map_err(|source| ModelError::Header {
            path: path.to_owned(),
            source,
        })?;
        let part = Part {
            begin: 0,
            bytes: Bytes::Mapped(mapping),
        };
        Ok(ModelFile {
            path: path.to_owned(),
            layout: Layout::Gguf,
            header,
            parts: vec![part],
        })
    }

    /// The metadata and the list of tensors.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The path the model was opened at.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Tells this model's weights from others: made of every tensor's description and first bytes.
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

    /// Which outputs of the query and key matrices rope turns together, as these files store them.
    pub(crate) fn pairs(&self, architecture: Architecture) -> Pairs {
        match self.layout {
            Layout::Gguf => architecture.pairs(),
            Layout::HuggingFace => Pairs::Halves,
        }
    }

    /// The stored bytes of one of this header's tensors; `None` if they lie past the end.
    pub(crate) fn tensor_bytes(&self, tensor: &TensorInfo) -> Option<&[u8]> {
        let start = self.header.data_offset.checked_add(tensor.offset)?;
        let after = self.parts.partition_point(|part| part.begin <= start);
        let part = self.parts.get(after.checked_sub(1)?)?;
        let start = start - part.begin;
        let end = start.checked_add(tensor.bytes)?;
        let bytes = part.bytes.get();
        bytes.get(usize::try_from(start).ok()?..usize::try_from(end).ok()?)
    }
}

fn open_error(path: &Path) -> impl FnOnce(io::Error) -> ModelError {
    let path = path.to_owned();
    move |source| ModelError::Open { path, source }
}

/// A folder in Hugging Face's layout.
struct Folder<'a>(&'a Path);

impl Folder<'_> {
    fn open(&self) -> Result<ModelFile, ModelError> {
        let texts = Texts::read(|name, bytes_max| self.text(name, bytes_max));
        let texts = texts.map_err(|error| match error {
            TextsError::Read(error) => error,
            TextsError::Text(source) => self.wrong(source),
        })?;
        let checkpoint = Checkpoint::read(&texts).map_err(|source| self.wrong(source))?;
        let (names, index) = self.weights()?;
        let mut mapped = Vec::with_capacity(names.len());
        for name in names {
            let path = self.0.join(&name);
            let mapping = Mapping::open(&path).map_err(open_error(&path))?;
            let tensors = SafeTensors::parse(&name, mapping.bytes());
            mapped.push((name, tensors.map_err(|source| self.wrong(source))?, mapping));
        }
        let mut shards = Vec::with_capacity(mapped.len());
        let mut end = 0;
        for (name, tensors, mapping) in &mapped {
            shards.push(Shard {
                name,
                tensors,
                begin: end,
            });
            end += mapping.bytes().len() as u64;
        }
        if let Some(index) = index {
            index.check(&shards).map_err(|source| self.wrong(source))?;
        }
        let factors = checkpoint.pair_factors();
        let header = checkpoint.header(&shards, end);
        let header = header.map_err(|source| self.wrong(source))?;
        let begins: Vec<u64> = shards.iter().map(|shard| shard.begin).collect();
        let mappings = mapped
            .into_iter()
            .map(|(.., mapping)| Bytes::Mapped(mapping));
        let bytes = mappings.chain([Bytes::Made(factors)]);
        let parts = begins.into_iter().chain([end]).zip(bytes);
        Ok(ModelFile {
            path: self.0.to_owned(),
            layout: Layout::HuggingFace,
            header,
            parts: parts.map(|(begin, bytes)| Part { begin, bytes }).collect(),
        })
    }

    /// The files of weights.
    fn weights(&self) -> Result<(Vec<String>, Option<Index>), ModelError> {
        let entries = std::fs::read_dir(self.0).map_err(open_error(self.0))?;
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(open_error(self.0))?;
            // Names that are not UTF-8 are none of ours.
            names.extend(entry.file_name().into_string());
        }
        names.sort_unstable();
        let index = || {
            let bytes = self.text(INDEX_FILE, INDEX_BYTES_MAX)?.unwrap_or_default();
            let index = Index::parse(&String::from_utf8_lossy(&bytes));
            index.map_err(|source| self.wrong(source))
        };
        shard_names(&names, |source| self.wrong(source), index)
    }

    /// A small file, if it is there; one byte more than `bytes_max` where it has more.
    fn text(&self, name: &str, bytes_max: u64) -> Result<Option<Vec<u8>>, ModelError> {
        let path = self.0.join(name);
        let file = match std::fs::File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(open_error(&path)(error)),
        };
        let mut bytes = Vec::new();
        file.take(bytes_max + 1)
            .read_to_end(&mut bytes)
            .map_err(open_error(&path))?;
        Ok(Some(bytes))
    }

    fn wrong(&self, source: CheckpointError) -> ModelError {
        ModelError::Checkpoint {
            path: self.0.to_owned(),
            source,
        }
    }
}
