//! How much memory will a model take, before it is loaded?

use super::config::ModelConfig;
use super::{BLOCK_TOKENS, Model, OpsKind};
use crate::ops::cpu;

impl Model {
    /// Bytes of KV that one block takes, over all layers.
    pub fn kv_block_bytes(config: &ModelConfig, ops: OpsKind) -> usize {
        let tile_bytes = ops.kv_dtype().tile_bytes(config.head_dim, BLOCK_TOKENS);
        config.layers * config.kv_heads * tile_bytes
    }

    /// The most bytes that passes of up to `step_tokens` tokens and `logits_rows` rows of logits
    /// keep as scratch, the logits themselves among them, on the serving ops.
    pub fn scratch_bytes(config: &ModelConfig, step_tokens: usize, logits_rows: usize) -> usize {
        let (queries, keys) = (
            config.heads * config.head_dim,
            config.kv_heads * config.head_dim,
        );
        let (width, ff) = (config.width, config.ff);
        // Tokens, angles, residual stream, queries, keys, values.
        let plain_row = 1 + config.head_dim + width + queries + 2 * keys;
        let plain = size_of::<f32>() * step_tokens * plain_row;
        let inputs: usize = [width, queries, width, ff]
            .iter()
            .map(|cols| cpu::input_bytes_most(step_tokens, *cols))
            .sum();
        let last = cpu::input_bytes_most(logits_rows, width);
        let logits = size_of::<f32>() * logits_rows * config.vocab;
        plain + inputs + last + logits + cpu::own_bytes_most(config, step_tokens)
    }
}
