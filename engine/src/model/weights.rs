//! Which tensors make up a llama model, and are they all there in the right shape?
//!
//! Every tensor is looked up, checked against the shape that the metadata implies, and packed by
//! the op set. Small vectors (norm weights) are plain f32 for both op sets.

use prompt::gguf::{Dtype, TensorInfo};

use super::config::ModelConfig;
use super::error::ModelError;
use super::file::GgufFile;
use crate::ops::reference::dequant::{dequantise, stored_bytes};
use crate::ops::{Ops, RowOrder, Tensor};

/// The packed weights of a model.
#[derive(Debug)]
pub(crate) struct Weights<M> {
    /// One row per token; also the output matrix where the file has none of its own.
    pub(crate) table: M,
    pub(crate) layers: Vec<Layer<M>>,
    pub(crate) output_norm: Vec<f32>,
    /// The output matrix, unless it is the table.
    pub(crate) output: Option<M>,
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
}

/// Packs all weights of the file; `progress` hears the share done.
pub(crate) fn load<O: Ops>(
    file: &GgufFile,
    config: &ModelConfig,
    ops: &mut O,
    progress: &mut dyn FnMut(f32),
) -> Result<Weights<O::Matrix>, ModelError> {
    let mut loader = Loader {
        file,
        ops,
        progress,
        done_bytes: 0,
        total_bytes: total(file),
    };
    let (width, ff) = (config.width, config.ff);
    let (queries, keys) = (
        config.heads * config.head_dim,
        config.kv_heads * config.head_dim,
    );
    let rotary = RowOrder::Rotary {
        head_dim: config.head_dim,
    };
    let table = loader.matrix("token_embd.weight", config.vocab, width, RowOrder::Plain)?;
    let mut layers = Vec::with_capacity(config.layers);
    for layer in 0..config.layers {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        layers.push(Layer {
            attention_norm: loader.vector(&name("attn_norm"), width)?,
            query: loader.matrix(&name("attn_q"), queries, width, rotary)?,
            key: loader.matrix(&name("attn_k"), keys, width, rotary)?,
            value: loader.matrix(&name("attn_v"), keys, width, RowOrder::Plain)?,
            attention_output: loader.matrix(
                &name("attn_output"),
                width,
                queries,
                RowOrder::Plain,
            )?,
            ff_norm: loader.vector(&name("ffn_norm"), width)?,
            gate: loader.matrix(&name("ffn_gate"), ff, width, RowOrder::Plain)?,
            up: loader.matrix(&name("ffn_up"), ff, width, RowOrder::Plain)?,
            down: loader.matrix(&name("ffn_down"), width, ff, RowOrder::Plain)?,
        });
    }
    let output_norm = loader.vector("output_norm.weight", width)?;
    let output = match find(file, "output.weight") {
        Some(_) => Some(loader.matrix("output.weight", config.vocab, width, RowOrder::Plain)?),
        None => None,
    };
    progress(1.0);
    Ok(Weights {
        table,
        layers,
        output_norm,
        output,
    })
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

fn find<'a>(file: &'a GgufFile, name: &str) -> Option<&'a TensorInfo> {
    file.header()
        .tensors
        .iter()
        .find(|tensor| tensor.name == name)
}

fn total(file: &GgufFile) -> u64 {
    file.header()
        .tensors
        .iter()
        .map(|tensor| tensor.bytes)
        .sum()
}

struct Loader<'a, O> {
    file: &'a GgufFile,
    ops: &'a mut O,
    progress: &'a mut dyn FnMut(f32),
    done_bytes: u64,
    total_bytes: u64,
}

impl<'a, O: Ops> Loader<'a, O> {
    fn matrix(
        &mut self,
        name: &str,
        rows: usize,
        cols: usize,
        order: RowOrder,
    ) -> Result<O::Matrix, ModelError> {
        let (dtype, bytes) = self.stored(name, &[cols as u64, rows as u64])?;
        let matrix = self.ops.pack(
            &Tensor {
                dtype,
                rows,
                cols,
                bytes,
            },
            order,
        );
        self.done_bytes += bytes.len() as u64;
        (self.progress)(self.done_bytes as f32 / self.total_bytes.max(1) as f32);
        Ok(matrix)
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        let (dtype, bytes) = self.stored(name, &[len as u64])?;
        let mut values = vec![0.0; len];
        dequantise(dtype, bytes, &mut values);
        Ok(values)
    }

    /// A tensor's format and bytes, if it has the shape.
    fn stored(&self, name: &str, shape: &[u64]) -> Result<(Dtype, &'a [u8]), ModelError> {
        let missing = || ModelError::TensorMissing {
            name: name.to_owned(),
        };
        let tensor = find(self.file, name).ok_or_else(missing)?;
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
