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
mod decoder;
pub mod error;
pub mod file;
mod llama;
mod load;
mod memory;
mod part;
mod pass;
mod qwen2;
mod qwen3;
mod rope;
mod weights;

use std::ops::Range;

use prompt::gguf::Header;

use crate::kv::layout::{BlockLayout, HeadRange, KvDtype, LayoutError};
pub use crate::kv::storage::{BLOCK_TOKENS, BlockId};
pub use crate::ops::SeqInput;
pub use config::{Architecture, ModelConfig};
pub use error::{ForwardError, ModelError};
pub use file::ModelFile;
pub use pass::{Pass, PassOutput, ReadLayers, Watch};
pub use rope::RopeScaling;

use crate::ops::Ops;
#[cfg(target_arch = "x86_64")]
use crate::ops::cpu::{Avx2, Avx512, Isa as _};
use crate::parallel::Collectives;
use decoder::Decoder;
use pass::PassCheck;

/// Which implementation of the ops runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpsKind {
    /// f32 weights and f32 KV, slow and obvious: what the others are compared with.
    Reference,
    /// Quantised kernels for this processor, f16 KV.
    Cpu,
}

impl OpsKind {
    /// The format of the pool's keys and values.
    pub fn kv_dtype(self) -> KvDtype {
        match self {
            Self::Reference => KvDtype::F32,
            Self::Cpu => KvDtype::F16,
        }
    }
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

    /// The best that this processor can run.
    pub fn best() -> Variant {
        let found = Variant::ALL.into_iter().find(|v| v.is_available());
        found.unwrap_or(Variant::Portable)
    }

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

/// A model on some op set and some group of ranks, with their types out of sight.
trait Runner: Send {
    fn run(&mut self, pass: &Pass<'_>, output: &mut PassOutput, watch: &mut Watch<'_>);
    fn copy_block(&mut self, from: BlockId, to: BlockId);
    fn block_layout(&self) -> BlockLayout;
    fn export_block(&self, place: (BlockId, usize), tokens: usize, out: &mut Vec<u8>);
    fn import_block(
        &mut self,
        place: (BlockId, usize),
        bytes: &[u8],
    ) -> Result<HeadRange, LayoutError>;
    fn read_block(&self, block: BlockId, to: &mut [u8]);
    fn write_block(&mut self, block: BlockId, from: &[u8]);
    fn read_layers(&self, place: (BlockId, Range<usize>), to: &mut [u8]);
    fn take_layers(&mut self, place: (BlockId, Range<usize>), from: &[u8]) -> bool;
    fn scratch_bytes(&self) -> usize;
}

impl<O: Ops, C: Collectives> Runner for Decoder<O, C> {
    fn run(&mut self, pass: &Pass<'_>, output: &mut PassOutput, watch: &mut Watch<'_>) {
        Decoder::run(self, pass, output, watch);
    }

    fn copy_block(&mut self, from: BlockId, to: BlockId) {
        Decoder::copy_block(self, from, to);
    }

    fn block_layout(&self) -> BlockLayout {
        Decoder::block_layout(self)
    }

    fn export_block(&self, place: (BlockId, usize), tokens: usize, out: &mut Vec<u8>) {
        Decoder::export_block(self, place, tokens, out);
    }

    fn import_block(
        &mut self,
        place: (BlockId, usize),
        bytes: &[u8],
    ) -> Result<HeadRange, LayoutError> {
        Decoder::import_block(self, place, bytes)
    }

    fn read_block(&self, block: BlockId, to: &mut [u8]) {
        Decoder::read_block(self, block, to);
    }

    fn write_block(&mut self, block: BlockId, from: &[u8]) {
        Decoder::write_block(self, block, from);
    }

    fn read_layers(&self, place: (BlockId, Range<usize>), to: &mut [u8]) {
        Decoder::read_layers(self, place, to);
    }

    fn take_layers(&mut self, place: (BlockId, Range<usize>), from: &[u8]) -> bool {
        Decoder::take_layers(self, place, from)
    }

    fn scratch_bytes(&self) -> usize {
        Decoder::scratch_bytes(self)
    }
}

impl Model {
    /// Reads the hyperparameters without loading anything.
    pub fn config(header: &Header) -> Result<ModelConfig, ModelError> {
        ModelConfig::from_header(header)
    }

    /// The hyperparameters of this model.
    pub fn shape(&self) -> &ModelConfig {
        &self.config
    }

    /// Bytes of the packed weights in memory.
    pub fn weight_bytes(&self) -> usize {
        self.weight_bytes
    }

    /// Bytes of the buffers of a pass, as they have grown by now: at most
    /// [`Model::scratch_bytes`] of the largest pass so far.
    pub fn scratch_held(&self) -> usize {
        self.runner.scratch_bytes()
    }

    /// Copies one block's KV onto another, in every layer: how a partial tail block is shared.
    pub fn copy_block(&mut self, from: BlockId, to: BlockId) {
        self.assert_block(from);
        self.assert_block(to);
        self.runner.copy_block(from, to);
    }

    /// How the KV blocks of this model look outside its pool.
    pub fn block_layout(&self) -> BlockLayout {
        self.runner.block_layout()
    }

    /// Appends one layer of a block to `out`, as a record of [`crate::kv::layout`]. `tokens`
    /// leading positions are computed; what the pool has after them is left out.
    pub fn export_block(&self, block: BlockId, layer: usize, tokens: usize, out: &mut Vec<u8>) {
        self.assert_block(block);
        let layers = self.config.layers;
        assert!(layer < layers, "layer {layer} of {layers}");
        assert!(
            (1..=BLOCK_TOKENS).contains(&tokens),
            "{tokens} tokens of a block of {BLOCK_TOKENS}"
        );
        self.runner.export_block((block, layer), tokens, out);
    }

    /// Takes one layer of a block in, and says which heads the record had of this pool's: the
    /// block is whole when all layers and heads are. Nothing about the bytes is trusted; when they
    /// are refused, the pool is as it was.
    pub fn import_block(
        &mut self,
        block: BlockId,
        layer: usize,
        bytes: &[u8],
    ) -> Result<HeadRange, LayoutError> {
        self.assert_block(block);
        self.runner.import_block((block, layer), bytes)
    }

    /// Copies a full block's body out, see [`BlockLayout::body_bytes`].
    pub fn read_block(&self, block: BlockId, to: &mut [u8]) {
        self.assert_block(block);
        self.runner.read_block(block, to);
    }

    /// Copies a body in that [`Model::read_block`] gave, of a model of the same layout. Unlike a
    /// record it is trusted: it never left this node.
    pub fn write_block(&mut self, block: BlockId, from: &[u8]) {
        self.assert_block(block);
        self.runner.write_block(block, from);
    }

    /// Copies some layers of a full block out, layer after layer.
    pub fn read_layers(&self, block: BlockId, layers: Range<usize>, to: &mut [u8]) {
        self.assert_block(block);
        self.runner.read_layers((block, layers), to);
    }

    /// Copies some layers of a block in that another node's model of the same layout gave. False, and
    /// zeros, if a value in them is not finite: no pool has such values, and attention could not mask
    /// them.
    pub fn take_layers(&mut self, block: BlockId, layers: Range<usize>, from: &[u8]) -> bool {
        self.assert_block(block);
        self.runner.take_layers((block, layers), from)
    }

    fn assert_block(&self, block: BlockId) {
        let pool = self.kv_blocks;
        assert!(
            (block.0 as usize) < pool,
            "block {} of a pool of {pool}",
            block.0
        );
    }

    /// Runs every sequence's tokens in one pass, and hands out what it asks for.
    pub fn run(&mut self, pass: &Pass<'_>, output: &mut PassOutput) -> Result<(), ForwardError> {
        self.run_watched(pass, output, &mut |_, _| ())
    }

    /// The same, and tells of each layer as it is computed. What `watch` takes, the pass takes longer.
    pub fn run_watched(
        &mut self,
        pass: &Pass<'_>,
        output: &mut PassOutput,
        watch: &mut Watch<'_>,
    ) -> Result<(), ForwardError> {
        self.check.check(&self.config, pass)?;
        self.runner.run(pass, output, watch);
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
