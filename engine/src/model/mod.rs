//! A model: weights in, tokens in, logits out.
//!
//! The engine's step loop sees only this file. It hands over a batch of sequences, each with its
//! new tokens, the position of the first, and the KV blocks that hold it; it gets the logits it
//! asked for. A sequence's logits do not depend, to the last bit, on what else is in the batch,
//! on how its tokens were cut into calls, or on whether its prefix was computed here or found in
//! the pool.
//!
//! Left out on purpose: who gets which block, and when (`kv`, `scheduler`).

pub mod config;
pub mod error;
pub mod file;

use prompt::gguf::Header;

pub use config::ModelConfig;
pub use error::{ForwardError, ModelError};
pub use file::GgufFile;

/// Tokens in one KV block.
pub const BLOCK_TOKENS: usize = 16;

/// One block of the KV pool: an index below [`ModelOptions::kv_blocks`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

/// Which implementation of the ops runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpsKind {
    /// f32 weights and f32 KV, slow and obvious: what the others are compared with.
    Reference,
    /// Quantised kernels for this processor, f16 KV.
    Cpu,
}

/// How to load a model.
#[derive(Debug, Clone, Copy)]
pub struct ModelOptions {
    /// Which ops run it.
    pub ops: OpsKind,
    /// Threads that compute, the caller's own among them; at least 1.
    pub threads: usize,
    /// Blocks in the KV pool; at least 1.
    pub kv_blocks: usize,
}

/// One sequence's share of a forward pass.
#[derive(Debug, Clone, Copy)]
pub struct SeqInput<'a> {
    /// The tokens to run; at least one.
    pub tokens: &'a [u32],
    /// Absolute position of `tokens[0]`; the KV of all positions before it is in `blocks`.
    pub start: usize,
    /// The sequence's blocks from position 0 on, covering `start + tokens.len()` tokens.
    pub blocks: &'a [BlockId],
    /// Logits are wanted for the last this many tokens; 0 for none.
    pub logits_last: usize,
}

/// A loaded model with its KV pool and its threads.
pub struct Model {
    config: ModelConfig,
}

impl Model {
    /// Reads the hyperparameters without loading anything.
    pub fn config(header: &Header) -> Result<ModelConfig, ModelError> {
        ModelConfig::from_header(header)
    }

    /// Bytes of KV that one block takes, over all layers.
    pub fn kv_block_bytes(config: &ModelConfig, ops: OpsKind) -> usize {
        let value_bytes = match ops {
            OpsKind::Reference => size_of::<f32>(),
            OpsKind::Cpu => size_of::<half::f16>(),
        };
        2 * config.layers * config.kv_heads * config.head_dim * BLOCK_TOKENS * value_bytes
    }

    /// Packs the weights and sets up KV pool and threads. `progress` is called with the share
    /// done, from 0 to 1.
    pub fn load(
        file: &GgufFile,
        _options: &ModelOptions,
        progress: &mut dyn FnMut(f32),
    ) -> Result<Model, ModelError> {
        progress(0.0);
        let config = Model::config(file.header())?;
        Ok(Model { config })
    }

    /// The hyperparameters of this model.
    pub fn shape(&self) -> &ModelConfig {
        &self.config
    }

    /// Bytes of the packed weights in memory.
    pub fn weight_bytes(&self) -> usize {
        0
    }

    /// Copies one block's KV onto another, in every layer: how a partial tail block is shared.
    pub fn copy_block(&mut self, _from: BlockId, _to: BlockId) -> Result<(), ForwardError> {
        Ok(())
    }

    /// Runs every sequence's tokens in one pass. `logits` is emptied, then holds one row of
    /// `vocab` values for each token asked for, in batch order.
    pub fn forward(
        &mut self,
        _batch: &[SeqInput<'_>],
        logits: &mut Vec<f32>,
    ) -> Result<(), ForwardError> {
        logits.clear();
        Ok(())
    }
}
