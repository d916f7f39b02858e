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
mod llama;
mod pass;
mod weights;

use prompt::gguf::Header;

pub use crate::kv::storage::{BLOCK_TOKENS, BlockId};
pub use crate::ops::SeqInput;
pub use config::ModelConfig;
pub use error::{ForwardError, ModelError};
pub use file::GgufFile;
pub use pass::{Pass, PassOutput};

use crate::ops::Ops;
#[cfg(target_arch = "x86_64")]
use crate::ops::cpu::{Avx2, Avx512, Isa as _};
use crate::ops::cpu::{CpuOps, Portable};
use crate::ops::reference::ReferenceOps;
use llama::Llama;
use pass::PassCheck;

/// Which implementation of the ops runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpsKind {
    /// f32 weights and f32 KV, slow and obvious: what the others are compared with.
    Reference,
    /// Quantised kernels for this processor, f16 KV.
    Cpu,
}

/// An instruction set that the serving ops have kernels for. All give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// x86-64 with AVX-512 VNNI.
    Avx512,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// Any processor; slow.
    Portable,
}

impl Variant {
    /// All variants, best first.
    pub const ALL: [Variant; 3] = [Variant::Avx512, Variant::Avx2, Variant::Portable];

    /// Whether this processor can run it.
    pub fn is_available(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Variant::Avx512 => Avx512::detect().is_some(),
            #[cfg(target_arch = "x86_64")]
            Variant::Avx2 => Avx2::detect().is_some(),
            #[cfg(not(target_arch = "x86_64"))]
            Variant::Avx512 | Variant::Avx2 => false,
            Variant::Portable => true,
        }
    }

    /// The name in messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Variant::Avx512 => "avx512",
            Variant::Avx2 => "avx2",
            Variant::Portable => "portable",
        }
    }
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

/// A loaded model with its KV pool and its threads.
pub struct Model {
    config: ModelConfig,
    kv_blocks: usize,
    weight_bytes: usize,
    check: PassCheck,
    runner: Box<dyn Runner>,
}

/// A model on some op set, with the op set's types out of sight.
trait Runner: Send {
    fn run(&mut self, pass: &Pass<'_>, output: &mut PassOutput);
    fn copy_block(&mut self, from: BlockId, to: BlockId);
}

impl<O: Ops> Runner for Llama<O> {
    fn run(&mut self, pass: &Pass<'_>, output: &mut PassOutput) {
        Llama::run(self, pass, output);
    }

    fn copy_block(&mut self, from: BlockId, to: BlockId) {
        Llama::copy_block(self, from, to);
    }
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
        options: &ModelOptions,
        progress: &mut dyn FnMut(f32),
    ) -> Result<Model, ModelError> {
        let best = Variant::ALL
            .into_iter()
            .find(|variant| variant.is_available());
        Model::load_on(best.unwrap_or(Variant::Portable), file, options, progress)
    }

    /// As [`Model::load`], but on a given instruction set instead of the best one. It matters
    /// to [`OpsKind::Cpu`] alone.
    pub fn load_on(
        variant: Variant,
        file: &GgufFile,
        options: &ModelOptions,
        progress: &mut dyn FnMut(f32),
    ) -> Result<Model, ModelError> {
        if options.threads == 0 || options.kv_blocks == 0 || options.kv_blocks > u32::MAX as usize {
            let what = if options.threads == 0 {
                "threads"
            } else {
                "kv_blocks"
            };
            return Err(ModelError::Options {
                what,
                allowed: "at least 1 and below 2^32",
            });
        }
        let loading = Loading {
            file,
            config: Model::config(file.header())?,
            options,
        };
        match options.ops {
            OpsKind::Reference => loading.run_on(ReferenceOps::new(options.threads), progress),
            OpsKind::Cpu => loading.run_on_variant(variant, progress),
        }
    }

    /// The hyperparameters of this model.
    pub fn shape(&self) -> &ModelConfig {
        &self.config
    }

    /// Bytes of the packed weights in memory.
    pub fn weight_bytes(&self) -> usize {
        self.weight_bytes
    }

    /// Copies one block's KV onto another, in every layer: how a partial tail block is shared.
    pub fn copy_block(&mut self, from: BlockId, to: BlockId) {
        for block in [from, to] {
            let pool = self.kv_blocks;
            assert!(
                (block.0 as usize) < pool,
                "block {} of a pool of {pool}",
                block.0
            );
        }
        self.runner.copy_block(from, to);
    }

    /// Runs every sequence's tokens in one pass, and hands out what it asks for.
    pub fn run(&mut self, pass: &Pass<'_>, output: &mut PassOutput) -> Result<(), ForwardError> {
        self.check.check(&self.config, pass)?;
        self.runner.run(pass, output);
        Ok(())
    }

    /// As [`Model::run`] for who wants logits alone: `logits` is emptied, then holds one row of
    /// `vocab` values for each token asked for, in batch order.
    pub fn forward(
        &mut self,
        batch: &[SeqInput<'_>],
        logits: &mut Vec<f32>,
    ) -> Result<(), ForwardError> {
        let mut output = PassOutput {
            logits: std::mem::take(logits),
            hidden: Vec::new(),
        };
        let pass = Pass {
            batch,
            capture: &[],
        };
        let result = self.run(&pass, &mut output);
        *logits = output.logits;
        result
    }
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

/// What is known before an op set is chosen.
struct Loading<'a> {
    file: &'a GgufFile,
    config: ModelConfig,
    options: &'a ModelOptions,
}

impl Loading<'_> {
    fn run_on_variant(
        self,
        variant: Variant,
        progress: &mut dyn FnMut(f32),
    ) -> Result<Model, ModelError> {
        let threads = self.options.threads;
        let missing = || ModelError::Variant {
            wanted: variant.as_str(),
        };
        match variant {
            #[cfg(target_arch = "x86_64")]
            Variant::Avx512 => self.run_on(
                CpuOps::<Avx512>::new(threads).ok_or_else(missing)?,
                progress,
            ),
            #[cfg(target_arch = "x86_64")]
            Variant::Avx2 => {
                self.run_on(CpuOps::<Avx2>::new(threads).ok_or_else(missing)?, progress)
            }
            #[cfg(not(target_arch = "x86_64"))]
            Variant::Avx512 | Variant::Avx2 => Err(missing()),
            Variant::Portable => self.run_on(
                CpuOps::<Portable>::new(threads).ok_or_else(missing)?,
                progress,
            ),
        }
    }

    fn run_on<O: Ops + 'static>(
        self,
        mut ops: O,
        progress: &mut dyn FnMut(f32),
    ) -> Result<Model, ModelError> {
        let Loading {
            file,
            config,
            options,
        } = self;
        let weights = weights::load(file, &config, &mut ops, progress)?;
        let llama = Llama::new(config, ops, weights, options.kv_blocks);
        Ok(Model {
            config,
            kv_blocks: options.kv_blocks,
            check: PassCheck::new(options.kv_blocks),
            weight_bytes: llama.weight_bytes(),
            runner: Box::new(llama),
        })
    }
}
