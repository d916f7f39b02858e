//! What goes into one forward pass, what comes out, and which passes are refused.
//!
//! A pass is checked before anything is written, so a refused one leaves weights, pool and logits
//! as they were. Whatever passes the check lies inside the model's own bounds: the ops below index
//! without asking again.

use std::ops::Range;

use super::config::ModelConfig;
use super::error::ForwardError;
use crate::kv::storage::{BLOCK_TOKENS, BlockId};
use crate::ops::SeqInput;

/// One forward pass.
#[derive(Debug, Clone, Copy)]
pub struct Pass<'a> {
    /// Each sequence with its new tokens.
    pub batch: &'a [SeqInput<'a>],
    /// The layers whose hidden states are wanted: 0 is the embedding, `layers` what the last
    /// layer leaves, `layers + 1` that after the output norm. Empty costs nothing.
    pub capture: &'a [usize],
}

/// What a pass gives. Kept by the caller, so that a pass like the one before allocates nothing.
#[derive(Debug, Default)]
pub struct PassOutput {
    /// One row of `vocab` values for each token whose logits were asked for, in batch order.
    pub logits: Vec<f32>,
    /// For each captured layer, one row of `width` values for every token of the batch, in order.
    pub hidden: Vec<Vec<f32>>,
}

/// Told of each layer of a pass, once its keys and values are in the pool and before anything else is
/// computed: how many layers are, and a way to copy them out.
pub type Watch<'a> = dyn FnMut(usize, &ReadLayers<'_>) + 'a;

/// Copies some layers of a full block out, layer after layer.
pub type ReadLayers<'a> = dyn Fn(BlockId, Range<usize>, &mut [u8]) + 'a;

/// Refuses what does not fit the model, and counts passes to see blocks that are written twice.
#[derive(Debug)]
pub(crate) struct PassCheck {
    kv_blocks: usize,
    /// Passes so far, and for each block the last one that wrote it.
    passes: u64,
    written_in: Vec<u64>,
}

impl PassCheck {
    pub(crate) fn new(kv_blocks: usize) -> PassCheck {
        PassCheck {
            kv_blocks,
            passes: 0,
            written_in: vec![0; kv_blocks],
        }
    }

    pub(crate) fn check(
        &mut self,
        config: &ModelConfig,
        pass: &Pass<'_>,
    ) -> Result<(), ForwardError> {
        let last = config.layers + 1;
        if let Some(layer) = pass.capture.iter().copied().find(|layer| *layer > last) {
            return Err(ForwardError::Capture { layer, last });
        }
        for (sequence, seq) in pass.batch.iter().enumerate() {
            self.check_sequence(config, sequence, seq)?;
        }
        self.check_writes(pass.batch)
    }

    /// No block may be written twice in one pass: threads write blocks side by side.
    fn check_writes(&mut self, batch: &[SeqInput<'_>]) -> Result<(), ForwardError> {
        self.passes += 1;
        for (sequence, seq) in batch.iter().enumerate() {
            let end = (seq.start + seq.tokens.len()).div_ceil(BLOCK_TOKENS);
            for block in &seq.blocks[seq.start / BLOCK_TOKENS..end] {
                let last_pass = &mut self.written_in[block.0 as usize];
                if *last_pass == self.passes {
                    return Err(ForwardError::BlockTwice {
                        sequence,
                        block: block.0,
                    });
                }
                *last_pass = self.passes;
            }
        }
        Ok(())
    }

    fn check_sequence(
        &self,
        config: &ModelConfig,
        sequence: usize,
        seq: &SeqInput<'_>,
    ) -> Result<(), ForwardError> {
        let (vocab, context, pool) = (config.vocab, config.context, self.kv_blocks);
        let tokens = seq.tokens.len();
        if tokens == 0 {
            return Err(ForwardError::Empty { sequence });
        }
        if let Some(token) = seq
            .tokens
            .iter()
            .copied()
            .find(|token| *token as usize >= vocab)
        {
            return Err(ForwardError::Token {
                sequence,
                token,
                vocab,
            });
        }
        let end = seq.start.saturating_add(tokens);
        if end > context {
            return Err(ForwardError::Context {
                sequence,
                end,
                context,
            });
        }
        let needed = end.div_ceil(BLOCK_TOKENS);
        let Some(blocks) = seq.blocks.get(..needed) else {
            return Err(ForwardError::BlocksShort {
                sequence,
                have: seq.blocks.len(),
                end,
            });
        };
        if let Some(block) = blocks.iter().find(|block| block.0 as usize >= pool) {
            return Err(ForwardError::Block {
                sequence,
                block: block.0,
                pool,
            });
        }
        if seq.logits_last > tokens {
            return Err(ForwardError::Logits {
                sequence,
                wanted: seq.logits_last,
                tokens,
            });
        }
        Ok(())
    }
}
