//! What does a model in Hugging Face's layout say about itself?
//!
//! A folder with `config.json`, `tokenizer.json` and weights in `*.safetensors`. It is put into the words
//! of a GGUF header: the same metadata keys, the same names of tensors. So tokenizer, template and forward
//! pass have one source, whatever the model came in. What differs stays with whoever maps the files: where
//! a tensor's bytes lie, and that rope turns dimensions `i` and `half + i` of every family, where GGUF
//! has rows of llama's queries and keys reordered.
//!
//! Files come from anywhere: each is bounded, every value is checked for type and range, and nothing may
//! panic or allocate more than a small multiple of the file.
//!
//! Left out on purpose: weights that are quantised (GPTQ, AWQ, FP8: read a GGUF file in their place),
//! `pytorch_model.bin` (pickle runs code), tokenizers other than BPE, and reading: callers do that.

mod config;
mod error;
mod index;
mod json;
mod names;
mod rope;
pub mod safetensors;
mod split;
mod tokens;
mod vocabulary;

use std::collections::{BTreeMap, HashSet};

pub use error::CheckpointError;
pub use index::{INDEX_FILE, Index, shard_names};

use crate::gguf::{Header, TensorInfo, Value};
use config::Config;
use safetensors::SafeTensors;

/// The model's shape.
pub const CONFIG: &str = "config.json";
/// Vocabulary and rules of the tokenizer.
pub const TOKENIZER: &str = "tokenizer.json";
/// Names of special tokens, and in older models the chat template.
pub const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// What ends a generation.
pub const GENERATION_CONFIG: &str = "generation_config.json";
/// The chat template of newer models.
pub const CHAT_TEMPLATE: &str = "chat_template.jinja";

/// Every small file that is read, and the most bytes that it may have. The largest published
/// vocabulary takes 33 MB; what is read as any JSON takes up to 36 times its size in memory.
pub const TEXTS: [(&str, u64); 5] = [
    (CONFIG, 4 << 20),
    (TOKENIZER, 256 << 20),
    (TOKENIZER_CONFIG, 16 << 20),
    (GENERATION_CONFIG, 4 << 20),
    (CHAT_TEMPLATE, 16 << 20),
];

/// Tensors over all files of a model; the largest published ones have a few thousand.
const TENSORS_MAX: usize = 262_144;

/// Metadata as a GGUF file has it.
type Metadata = BTreeMap<String, Value>;

/// The small files of a model folder.
#[derive(Debug, Default)]
pub struct Texts(BTreeMap<&'static str, String>);

impl Texts {
    /// Asks `read` for each of [`TEXTS`]; it answers `None` where there is no such file.
    pub fn read<E>(
        mut read: impl FnMut(&'static str, u64) -> Result<Option<Vec<u8>>, E>,
    ) -> Result<Self, TextsError<E>> {
        let mut texts = BTreeMap::new();
        for (name, bytes_max) in TEXTS {
            let Some(bytes) = read(name, bytes_max).map_err(TextsError::Read)? else {
                continue;
            };
            if bytes.len() as u64 > bytes_max {
                let why = format!("has {} bytes; at most {bytes_max} are read", bytes.len());
                return Err(TextsError::Text(CheckpointError::damaged(name, why)));
            }
            let text = String::from_utf8(bytes).map_err(|error| {
                let at = error.utf8_error().valid_up_to();
                let why = format!("is not UTF-8 at byte {at}");
                TextsError::Text(CheckpointError::damaged(name, why))
            })?;
            texts.insert(name, text);
        }
        Ok(Self(texts))
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    fn demand(&self, name: &'static str) -> Result<&str, CheckpointError> {
        self.get(name).ok_or(CheckpointError::Missing { name })
    }
}

/// Why the small files could not be read.
#[derive(Debug)]
pub enum TextsError<E> {
    /// The reader's own error.
    Read(E),
    /// What was read is no text, or too much.
    Text(CheckpointError),
}

/// Tokenizer and chat template of a model folder: all that making prompts takes, whatever the
/// architecture.
pub fn prompt_header(texts: &Texts) -> Result<Header, CheckpointError> {
    Ok(described(tokens::metadata(texts)?, Vec::new()))
}

/// A model folder without its weights.
#[derive(Debug)]
pub struct Checkpoint {
    metadata: Metadata,
    config: Config,
}

/// One file of weights.
#[derive(Debug)]
pub struct Shard<'a> {
    /// Its name, for messages.
    pub name: &'a str,
    /// What its header says.
    pub tensors: &'a SafeTensors,
    /// Where the file begins when all are laid end to end.
    pub begin: u64,
}

/// The tensor of factors that `llama3` scaling divides frequencies by, as GGUF files name it.
const PAIR_FACTORS: &str = "rope_freqs.weight";

impl Checkpoint {
    /// Reads `config.json` and what the tokenizer's files say.
    pub fn read(texts: &Texts) -> Result<Self, CheckpointError> {
        let config = Config::read(texts.demand(CONFIG)?)?;
        let mut metadata = tokens::metadata(texts)?;
        metadata.extend(config.metadata());
        Ok(Self { metadata, config })
    }

    /// The factors of `llama3` scaling as the little-endian f32 of a file: config.json has the formula's
    /// numbers alone. They are looked for at `begin` of [`Checkpoint::header`].
    pub fn pair_factors(&self) -> Vec<u8> {
        let factors = self.config.pair_factors.iter();
        factors.flat_map(|factor| factor.to_le_bytes()).collect()
    }

    /// The header that a GGUF file of this model would have, except that offsets count from the beginning
    /// of the first shard. `factors_begin` is where [`Checkpoint::pair_factors`] lie.
    pub fn header(
        self,
        shards: &[Shard<'_>],
        factors_begin: u64,
    ) -> Result<Header, CheckpointError> {
        let mut tensors = Vec::new();
        let mut names = HashSet::new();
        let is_tied = self.config.is_tied(has(shards, names::HEAD))?;
        for shard in shards {
            for tensor in &shard.tensors.tensors {
                let name = match names::ggml(&tensor.name) {
                    None => continue,
                    // Two names for one matrix: the head is the table.
                    Some(_) if is_tied && tensor.name == names::HEAD => continue,
                    Some(name) => name,
                };
                if tensors.len() == TENSORS_MAX || !names.insert(name.clone()) {
                    let why = "appears twice, or is one of too many".to_owned();
                    return Err(CheckpointError::tensor(shard.name, &tensor.name, why));
                }
                let offset = shard.begin + shard.tensors.data_offset + tensor.offset;
                tensors.push(TensorInfo {
                    name,
                    offset,
                    ..tensor.clone()
                });
            }
        }
        self.config.check_vocab(&tensors)?;
        if !self.config.pair_factors.is_empty() {
            tensors.push(TensorInfo {
                name: PAIR_FACTORS.to_owned(),
                dims: vec![self.config.pair_factors.len() as u64],
                dtype: crate::gguf::Dtype::F32,
                offset: factors_begin,
                bytes: size_of_val(self.config.pair_factors.as_slice()) as u64,
            });
        }
        Ok(described(self.metadata, tensors))
    }
}

fn has(shards: &[Shard<'_>], name: &str) -> bool {
    let mut tensors = shards.iter().flat_map(|shard| &shard.tensors.tensors);
    tensors.any(|tensor| tensor.name == name)
}

fn described(metadata: Metadata, tensors: Vec<TensorInfo>) -> Header {
    Header {
        metadata,
        tensors,
        data_offset: 0,
        alignment: 1,
    }
}

#[cfg(test)]
mod tests;
