//! Which tensors make up a model, and are they all there in the right shape?
//!
//! Every tensor is looked up, checked against the shape that the metadata implies, and packed by
//! the op set, or the part of it that this rank holds. Small vectors (norm weights, biases) are plain f32
//! for both op sets. A tensor that nothing asks for is refused: a model that leaves it out answers wrongly.

use std::collections::HashSet;
use std::ops::Range;

use prompt::gguf::{Dtype, TensorInfo};

use super::config::{Architecture, ModelConfig, PAIR_FACTORS};
use super::error::ModelError;
use super::file::ModelFile;
use super::part::Part;
use super::rope::RopeScaling;
use crate::ops::reference::dequant::{dequantise, stored_bytes};
use crate::ops::{Ops, RowOrder, Tensor, shard};

/// The packed weights of a model.
#[derive(Debug)]
pub(crate) struct Weights<M> {
    /// One row per token; also the output matrix where the file has none of its own.
    pub(crate) table: M,
    pub(crate) layers: Vec<Layer<M>>,
    pub(crate) output_norm: Vec<f32>,
    /// The output matrix, unless it is the table.
    pub(crate) output: Option<M>,
    /// What each pair's frequency is divided by; empty in most models.
    pub(crate) pair_factors: Vec<f32>,
}

/// The packed weights of one layer.
#[derive(Debug)]
pub(crate) struct Layer<M> {
    pub(crate) attention_norm: Vec<f32>,
    pub(crate) query: M,
    pub(crate) key: M,
    pub(crate) value: M,
    pub(crate) attention_output: M,
    pub(crate) ff_norm: Vec<f32>,
    pub(crate) gate: M,
    pub(crate) up: M,
    pub(crate) down: M,
    /// Added to queries, keys and values, in families that have them.
    pub(crate) biases: Option<[Vec<f32>; 3]>,
    /// Weights of the norms of each head's queries and keys, in families that have them.
    pub(crate) head_norms: Option<[Vec<f32>; 2]>,
}

/// Packs this rank's part of all weights of the file; `progress` hears the share done.
pub(crate) fn load<O: Ops>(
    file: &ModelFile,
    (config, part): (&ModelConfig, &Part),
    ops: &mut O,
    progress: &mut dyn FnMut(f32),
) -> Result<Weights<O::Matrix>, ModelError> {
    let mut loader = Loader {
        file,
        ops,
        progress,
        asked: HashSet::new(),
        done_bytes: 0,
        total_bytes: total(file),
    };
    let (width, plain) = (config.width, RowOrder::Plain);
    let by_token = Cut::Rows(part.vocab.clone());
    let table = loader.matrix("token_embd.weight", (config.vocab, width), plain, &by_token)?;
    // Not more than there are tensors: a damaged count must not take memory.
    let mut layers = Vec::with_capacity(config.layers.min(file.header().tensors.len()));
    for layer in 0..config.layers {
        layers.push(loader.layer(layer, config, part)?);
    }
    let output_norm = loader.vector("output_norm.weight", width)?;
    let output = match find(file, "output.weight") {
        Some(_) => Some(loader.matrix("output.weight", (config.vocab, width), plain, &by_token)?),
        None => None,
    };
    let pair_factors = match config.rope_scaling {
        RopeScaling::PerPair => loader.vector(PAIR_FACTORS, config.head_dim / 2)?,
        _ => Vec::new(),
    };
    loader.check_all_asked(config.architecture)?;
    progress(1.0);
    Ok(Weights {
        table,
        layers,
        output_norm,
        output,
        pair_factors,
    })
}

/// What a rank keeps of a matrix.
enum Cut {
    Rows(Range<usize>),
    Cols(Range<usize>),
}

impl<M> Weights<M> {
    /// Every matrix, for counting.
    pub(crate) fn matrices(&self) -> impl Iterator<Item = &M> {
        self.layers
            .iter()
            .flat_map(|l| {
                [
                    &l.query,
                    &l.key,
                    &l.value,
                    &l.attention_output,
                    &l.gate,
                    &l.up,
                    &l.down,
                ]
            })
            .chain([&self.table])
            .chain(&self.output)
    }
}

fn find<'a>(file: &'a ModelFile, name: &str) -> Option<&'a TensorInfo> {
    file.header()
        .tensors
        .iter()
        .find(|tensor| tensor.name == name)
}

fn total(file: &ModelFile) -> u64 {
    file.header()
        .tensors
        .iter()
        .map(|tensor| tensor.bytes)
        .sum()
}

struct Loader<'a, O> {
    file: &'a ModelFile,
    ops: &'a mut O,
    progress: &'a mut dyn FnMut(f32),
    /// Tensors that were asked for.
    asked: HashSet<String>,
    done_bytes: u64,
    total_bytes: u64,
}

impl<'a, O: Ops> Loader<'a, O> {
    fn layer(
        &mut self,
        layer: usize,
        config: &ModelConfig,
        part: &Part,
    ) -> Result<Layer<O::Matrix>, ModelError> {
        let (width, ff, head_dim) = (config.width, config.ff, config.head_dim);
        let (queries, keys) = (config.heads * head_dim, config.kv_heads * head_dim);
        let pairs = self.file.pairs(config.architecture);
        let (plain, rotary) = (RowOrder::Plain, RowOrder::Rotary { head_dim, pairs });
        let [of_queries, of_keys, of_ff] =
            [part.queries(), part.keys(), part.ff.clone()].map(Cut::Rows);
        let [from_queries, from_ff] = [part.queries(), part.ff.clone()].map(Cut::Cols);
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        let mut matrix =
            |part: &str, shape, order, cut| self.matrix(&name(part), shape, order, cut);
        Ok(Layer {
            query: matrix("attn_q", (queries, width), rotary, &of_queries)?,
            key: matrix("attn_k", (keys, width), rotary, &of_keys)?,
            value: matrix("attn_v", (keys, width), plain, &of_keys)?,
            attention_output: matrix("attn_output", (width, queries), plain, &from_queries)?,
            gate: matrix("ffn_gate", (ff, width), plain, &of_ff)?,
            up: matrix("ffn_up", (ff, width), plain, &of_ff)?,
            down: matrix("ffn_down", (width, ff), plain, &from_ff)?,
            attention_norm: self.vector(&name("attn_norm"), width)?,
            ff_norm: self.vector(&name("ffn_norm"), width)?,
            biases: match config.architecture {
                Architecture::Qwen2 => Some([
                    self.bias((layer, "q"), queries, rotary, part.queries())?,
                    self.bias((layer, "k"), keys, rotary, part.keys())?,
                    self.bias((layer, "v"), keys, plain, part.keys())?,
                ]),
                Architecture::Llama | Architecture::Qwen3 => None,
            },
            head_norms: match config.architecture {
                Architecture::Qwen3 => Some([
                    self.arranged(&name("attn_q_norm"), head_dim, rotary)?,
                    self.arranged(&name("attn_k_norm"), head_dim, rotary)?,
                ]),
                Architecture::Llama | Architecture::Qwen2 => None,
            },
        })
    }

    /// The part of a bias that goes with this rank's outputs.
    fn bias(
        &mut self,
        (layer, which): (usize, &str),
        len: usize,
        order: RowOrder,
        range: Range<usize>,
    ) -> Result<Vec<f32>, ModelError> {
        let values = self.vector(&format!("blk.{layer}.attn_{which}.bias"), len)?;
        Ok(self.ops.arrange(&values[range], order))
    }

    fn arranged(
        &mut self,
        name: &str,
        len: usize,
        order: RowOrder,
    ) -> Result<Vec<f32>, ModelError> {
        let values = self.vector(name, len)?;
        Ok(self.ops.arrange(&values, order))
    }

    /// Packs what the rank keeps of a matrix.
    fn matrix(
        &mut self,
        name: &str,
        (rows, cols): (usize, usize),
        order: RowOrder,
        cut: &Cut,
    ) -> Result<O::Matrix, ModelError> {
        let (dtype, bytes) = self.stored(name, &[cols as u64, rows as u64])?;
        let whole = Tensor {
            dtype,
            rows,
            cols,
            bytes,
        };
        let kept = match cut {
            Cut::Rows(range) => shard::rows(&whole, range.clone()),
            Cut::Cols(range) => shard::cols(&whole, range.clone()),
        };
        let kept = kept.map_err(|source| ModelError::Shard {
            name: name.to_owned(),
            source,
        })?;
        let matrix = self.ops.pack(&kept.tensor(), order);
        self.done_bytes += bytes.len() as u64;
        (self.progress)(self.done_bytes as f32 / self.total_bytes.max(1) as f32);
        Ok(matrix)
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        let (dtype, bytes) = self.stored(name, &[len as u64])?;
        let mut values = vec![0.0; len];
        dequantise(dtype, bytes, &mut values);
        if values.iter().any(|value| !value.is_finite()) {
            let name = name.to_owned();
            return Err(ModelError::NotFinite { name });
        }
        Ok(values)
    }

    /// Refuses a file with tensors that nobody asked for.
    fn check_all_asked(&self, architecture: Architecture) -> Result<(), ModelError> {
        let tensors = self.file.header().tensors.iter();
        let mut unknown = tensors.filter(|tensor| !self.asked.contains(&tensor.name));
        match unknown.next() {
            None => Ok(()),
            Some(tensor) => Err(ModelError::TensorUnknown {
                name: tensor.name.clone(),
                architecture: architecture.as_str(),
            }),
        }
    }

    /// A tensor's format and bytes, if it has the shape.
    fn stored(&mut self, name: &str, shape: &[u64]) -> Result<(Dtype, &'a [u8]), ModelError> {
        let missing = || ModelError::TensorMissing {
            name: name.to_owned(),
        };
        let tensor = find(self.file, name).ok_or_else(missing)?;
        self.asked.insert(name.to_owned());
        if tensor.dims != shape {
            return Err(ModelError::TensorShape {
                name: name.to_owned(),
                found: tensor.dims.clone(),
                expected: shape.to_vec(),
            });
        }
        let bytes = self.file.tensor_bytes(tensor).ok_or_else(missing)?;
        let values = shape.iter().product::<u64>() as usize;
        if stored_bytes(tensor.dtype, values) != Some(bytes.len()) {
            return Err(ModelError::TensorType {
                name: name.to_owned(),
                found: format!("{:?}", tensor.dtype),
            });
        }
        Ok((tensor.dtype, bytes))
    }
}
