//! The forward pass as decoder models have it in common, over any op set and any group of ranks.
//!
//! Tokens are looked up, each layer adds to the residual stream, the last rows become logits. What a
//! layer does, step by step, is in the file of its family ([`super::llama`], [`super::qwen2`],
//! [`super::qwen3`]), in terms of the steps here.
//!
//! A rank alone computes everything. One of several computes its part of each large product, and
//! meets the others three times: to add up the table's rows and the two products of every layer
//! that sum over what is spread, and to gather the logits.

use std::ops::Range;

use super::config::{Architecture, ModelConfig};
use super::part::Part;
use super::pass::{Pass, PassOutput, Watch};
use super::rope::Rope;
use super::weights::Weights;
use super::{llama, qwen2, qwen3};
use crate::kv::layout::{self, BlockLayout, HeadRange, KvFormat as _, LayoutError};
use crate::kv::storage::{BLOCK_TOKENS, BlockId, KvShape, KvStorage};
use crate::ops::{Ops, Precision, Rotation, SeqInput, sized};
use crate::parallel::Collectives;

/// A model on one op set, or a rank's part of it.
pub(crate) struct Decoder<O: Ops, C: Collectives> {
    config: ModelConfig,
    part: Part,
    rope: Rope,
    ops: O,
    weights: Weights<O::Matrix>,
    kv: KvStorage<O::Kv>,
    ranks: C,
    scratch: Scratch<O::Input>,
}

/// Buffers of a pass, kept so that a step of the size of an earlier one allocates nothing.
struct Scratch<I> {
    tokens: Vec<u32>,
    rotation: Rotation,
    /// The residual stream.
    x: Vec<f32>,
    queries: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    /// What each kind of product reads: the queries', keys' and values', the attention's output's,
    /// the gate's, the feed-forward's last, the logits'.
    attention_input: I,
    attended: I,
    ff_input: I,
    hidden: I,
    last: I,
    /// This rank's summand of what the ranks add up, or its columns of the logits; empty for a
    /// rank alone.
    partial: Vec<f32>,
}

impl<O: Ops, C: Collectives> Decoder<O, C> {
    /// Puts the parts together, with an empty KV pool.
    pub(crate) fn new(
        config: ModelConfig,
        part: Part,
        (ops, weights): (O, Weights<O::Matrix>),
        kv_blocks: usize,
        ranks: C,
    ) -> Decoder<O, C> {
        let shape = KvShape {
            blocks: kv_blocks,
            heads: part.kv_heads.len(),
            head_dim: config.head_dim,
        };
        let kv = KvStorage::new(config.layers, shape);
        let (dim, base) = (config.head_dim, config.rope_base);
        let rope = Rope::new(dim, base, config.rope_scaling, &weights.pair_factors);
        Decoder {
            config,
            part,
            rope,
            ops,
            weights,
            kv,
            ranks,
            scratch: Scratch::new::<O>(),
        }
    }

    /// Bytes of the packed weights.
    pub(crate) fn weight_bytes(&self) -> usize {
        self.weights.matrices().map(O::matrix_bytes).sum()
    }

    /// Bytes of the buffers of a pass, as they are now.
    pub(crate) fn scratch_bytes(&self) -> usize {
        self.scratch.bytes::<O>() + self.ops.scratch_bytes()
    }

    /// Copies one block's KV onto another.
    pub(crate) fn copy_block(&mut self, from: BlockId, to: BlockId) {
        self.kv.copy_block(from, to);
    }

    /// How this rank's KV blocks look from outside.
    pub(crate) fn block_layout(&self) -> BlockLayout {
        BlockLayout {
            dtype: O::Kv::DTYPE,
            key_order: O::KEY_ORDER,
            block_tokens: BLOCK_TOKENS,
            layers: self.config.layers,
            kv_heads: self.config.kv_heads,
            heads: HeadRange {
                first: self.part.kv_heads.start,
                count: self.part.kv_heads.len(),
            },
            head_dim: self.config.head_dim,
        }
    }

    /// Appends one layer of a block to `out`.
    pub(crate) fn export_block(
        &self,
        (block, layer): (BlockId, usize),
        tokens: usize,
        out: &mut Vec<u8>,
    ) {
        layout::export(&self.kv, &self.block_layout(), (block, layer), tokens, out);
    }

    /// Takes one layer of a block in.
    pub(crate) fn import_block(
        &mut self,
        place: (BlockId, usize),
        bytes: &[u8],
    ) -> Result<HeadRange, LayoutError> {
        let own = self.block_layout();
        layout::import(&mut self.kv, &own, place, bytes)
    }

    /// Copies a full block out.
    pub(crate) fn read_block(&self, block: BlockId, to: &mut [u8]) {
        layout::read_body(&self.kv, &self.block_layout(), block, to);
    }

    /// Copies a full block in.
    pub(crate) fn write_block(&mut self, block: BlockId, from: &[u8]) {
        let own = self.block_layout();
        layout::write_body(&mut self.kv, &own, block, from);
    }

    /// Copies some layers of a block out.
    pub(crate) fn read_layers(&self, place: (BlockId, Range<usize>), to: &mut [u8]) {
        layout::read_layers(&self.kv, &self.block_layout(), place, to);
    }

    /// Copies some layers of a block in that came from elsewhere.
    pub(crate) fn take_layers(&mut self, place: (BlockId, Range<usize>), from: &[u8]) -> bool {
        let own = self.block_layout();
        layout::take_layers(&mut self.kv, &own, place, from)
    }

    /// One checked pass. `watch` is told of each layer as soon as its keys and values are in the pool.
    pub(crate) fn run(&mut self, pass: &Pass<'_>, output: &mut PassOutput, watch: &mut Watch<'_>) {
        let last = self.config.layers;
        output.hidden.resize_with(pass.capture.len(), Vec::new);
        self.scratch
            .prepare(&self.config, (&self.part, &self.rope), pass.batch);
        self.embed();
        for layer in 0..last {
            self.capture(layer, pass, output);
            let mut stored = |model: &Self| {
                watch(layer + 1, &|block, layers, to| {
                    model.read_layers((block, layers), to);
                });
            };
            let layer = (layer, pass.batch);
            match self.config.architecture {
                Architecture::Llama => llama::layer(self, layer, &mut stored),
                Architecture::Qwen2 => qwen2::layer(self, layer, &mut stored),
                Architecture::Qwen3 => qwen3::layer(self, layer, &mut stored),
            }
        }
        self.capture(last, pass, output);
        self.capture_normed(pass, output);
        self.logits(pass.batch, &mut output.logits);
    }

    /// Looks the tokens up. A rank has the rows of some tokens and adds zeros for the others.
    fn embed(&mut self) {
        let Scratch { tokens, x, .. } = &mut self.scratch;
        if self.ranks.rank().count() == 1 {
            self.ops.embed(&self.weights.table, tokens, x);
            return;
        }
        let own = |token: u32| self.part.vocab.contains(&(token as usize));
        let first = self.part.vocab.start as u32;
        let local: Vec<u32> = tokens
            .iter()
            .map(|token| if own(*token) { token - first } else { 0 })
            .collect();
        self.ops.embed(&self.weights.table, &local, x);
        for (row, token) in x.chunks_exact_mut(self.config.width).zip(&*tokens) {
            if !own(*token) {
                row.fill(0.0);
            }
        }
        self.ranks.all_reduce(x);
    }

    /// Queries, keys and values of the rows, from their norm.
    pub(super) fn project(&mut self, layer: usize) {
        let (ops, layer) = (&mut self.ops, &self.weights.layers[layer]);
        let Scratch {
            x,
            queries,
            keys,
            values,
            attention_input: input,
            ..
        } = &mut self.scratch;
        ops.norm(x, &layer.attention_norm, self.config.rms_eps, input);
        ops.project(
            input,
            [
                (&layer.query, queries),
                (&layer.key, keys),
                (&layer.value, values),
            ],
        );
    }

    /// Adds the biases of queries, keys and values.
    pub(super) fn add_biases(&mut self, layer: usize) {
        let Scratch {
            queries,
            keys,
            values,
            ..
        } = &mut self.scratch;
        if let Some(biases) = &self.weights.layers[layer].biases {
            for (x, bias) in [queries, keys, values].into_iter().zip(biases) {
                self.ops.add_rows(x, bias);
            }
        }
    }

    /// Norms each head's queries and keys.
    pub(super) fn norm_heads(&mut self, layer: usize) {
        let Scratch { queries, keys, .. } = &mut self.scratch;
        if let Some(norms) = &self.weights.layers[layer].head_norms {
            for (x, weight) in [queries, keys].into_iter().zip(norms) {
                self.ops.norm_heads(x, weight, self.config.rms_eps);
            }
        }
    }

    /// Turns queries and keys by their positions.
    pub(super) fn rotate(&mut self) {
        let Scratch {
            tokens,
            rotation,
            queries,
            keys,
            ..
        } = &mut self.scratch;
        self.ops.rotate(queries, tokens.len(), rotation);
        self.ops.rotate(keys, tokens.len(), rotation);
    }

    /// Keeps keys and values in the batch's blocks.
    pub(super) fn store(&mut self, layer: usize, batch: &[SeqInput<'_>]) {
        let Scratch { keys, values, .. } = &self.scratch;
        self.ops.store(layer, batch, (keys, values), &mut self.kv);
    }

    /// Adds to the residual stream what the queries find among the keys and values before them.
    pub(super) fn attend(&mut self, layer: usize, batch: &[SeqInput<'_>]) {
        let Scratch {
            x,
            queries,
            attended,
            partial,
            ..
        } = &mut self.scratch;
        let (ops, heads) = (&mut self.ops, self.part.heads());
        ops.attend(layer, batch, (queries, heads), &self.kv, attended);
        let product = (&*attended, &self.weights.layers[layer].attention_output);
        add_product(ops, &mut self.ranks, product, partial, x);
    }

    /// Adds the gated feed-forward part.
    pub(super) fn feed_forward(&mut self, index: usize) {
        let (ops, layer) = (&mut self.ops, &self.weights.layers[index]);
        let Scratch {
            x,
            ff_input: input,
            hidden,
            partial,
            ..
        } = &mut self.scratch;
        ops.norm(x, &layer.ff_norm, self.config.rms_eps, input);
        ops.gated(input, &layer.gate, &layer.up, hidden);
        add_product(ops, &mut self.ranks, (&*hidden, &layer.down), partial, x);
    }

    /// Copies the residual stream out where it is asked for as `layer`.
    fn capture(&self, layer: usize, pass: &Pass<'_>, output: &mut PassOutput) {
        for (wanted, hidden) in pass.capture.iter().zip(&mut output.hidden) {
            if *wanted == layer {
                hidden.clear();
                hidden.extend_from_slice(&self.scratch.x);
            }
        }
    }

    /// The same for what comes after the output norm.
    fn capture_normed(&mut self, pass: &Pass<'_>, output: &mut PassOutput) {
        let (x, weight) = (&self.scratch.x, &self.weights.output_norm);
        for (wanted, hidden) in pass.capture.iter().zip(&mut output.hidden) {
            if *wanted > self.config.layers {
                hidden.resize(x.len(), 0.0);
                self.ops.norm_floats(x, weight, self.config.rms_eps, hidden);
            }
        }
    }

    /// The rows of logits that the batch asks for. A rank computes those of its tokens.
    fn logits(&mut self, batch: &[SeqInput<'_>], logits: &mut Vec<f32>) {
        let vocab = self.config.vocab;
        let rows = self.scratch.keep_wanted(&self.config, batch);
        sized(logits, rows * vocab, 0.0);
        if rows == 0 {
            return;
        }
        let Scratch {
            x, last, partial, ..
        } = &mut self.scratch;
        let (ops, weights) = (&mut self.ops, &self.weights);
        let matrix = weights.output.as_ref().unwrap_or(&weights.table);
        ops.norm(x, &weights.output_norm, self.config.rms_eps, last);
        if self.ranks.rank().count() == 1 {
            ops.project(last, [(matrix, logits)]);
            return;
        }
        sized(partial, rows * self.part.vocab.len(), 0.0);
        ops.project(last, [(matrix, partial)]);
        let mut column = 0;
        self.ranks.all_gather(partial, &mut |_, part| {
            let width = part.len() / rows;
            for (row, part) in logits.chunks_exact_mut(vocab).zip(part.chunks_exact(width)) {
                row[column..column + width].copy_from_slice(part);
            }
            column += width;
        });
    }
}

/// `x` += matrix × the input rows, where each rank has some of the columns.
fn add_product<O: Ops, C: Collectives>(
    ops: &mut O,
    ranks: &mut C,
    (input, matrix): (&O::Input, &O::Matrix),
    partial: &mut Vec<f32>,
    x: &mut [f32],
) {
    if ranks.rank().count() == 1 {
        ops.project_add(input, matrix, x);
        return;
    }
    sized(partial, x.len(), 0.0);
    ops.project(input, [(matrix, partial)]);
    ranks.all_reduce(partial);
    for (value, sum) in x.iter_mut().zip(&*partial) {
        *value += sum;
    }
}

impl<I> Scratch<I> {
    fn new<O: Ops<Input = I>>() -> Scratch<I> {
        // What 8 bits cost on the default model, as mean KL from the reference in 1e-3 nats, with
        // everything coarse at 3.7: fine queries, keys and values take off 1.4, the last product
        // 0.9, gate and up 0.6, down 0.6, the attention's output nothing. The last product has few
        // rows. A block's error grows with its largest value, and few blocks have most of a row's:
        // with 8 % of the blocks fine that go into attention and gates and 2 % of those that go down,
        // 0.9 is left, as much as when all but those of gates were fine. Below 3, blocks of noise
        // without outliers would count: 9 % of them at 2, 1 % at 3.
        let (coarse, fine) = (Precision::Coarse, Precision::Fine);
        Scratch {
            tokens: Vec::new(),
            rotation: Rotation::default(),
            x: Vec::new(),
            queries: Vec::new(),
            keys: Vec::new(),
            values: Vec::new(),
            attention_input: O::input(Precision::Outliers(3)),
            attended: O::input(coarse),
            ff_input: O::input(Precision::Outliers(3)),
            hidden: O::input(Precision::Outliers(6)),
            last: O::input(fine),
            partial: Vec::new(),
        }
    }

    /// Bytes of the buffers as they are now.
    fn bytes<O: Ops<Input = I>>(&self) -> usize {
        let floats = [
            &self.rotation.cos,
            &self.rotation.sin,
            &self.x,
            &self.queries,
            &self.keys,
            &self.values,
            &self.partial,
        ];
        let inputs = [
            &self.attention_input,
            &self.attended,
            &self.ff_input,
            &self.hidden,
            &self.last,
        ];
        size_of::<u32>() * self.tokens.capacity()
            + size_of::<f32>() * floats.map(Vec::capacity).iter().sum::<usize>()
            + inputs.map(O::input_bytes).iter().sum::<usize>()
    }

    /// Sizes the buffers for the batch and fills in tokens and angles.
    fn prepare(
        &mut self,
        config: &ModelConfig,
        (part, rope): (&Part, &Rope),
        batch: &[SeqInput<'_>],
    ) {
        let rows = batch.iter().map(|seq| seq.tokens.len()).sum();
        self.tokens.clear();
        self.tokens.reserve_exact(rows);
        self.rotation.restart(config.head_dim / 2, rows);
        for seq in batch {
            self.tokens.extend(seq.tokens);
            for position in seq.start..seq.start + seq.tokens.len() {
                rope.push(position, &mut self.rotation);
            }
        }
        sized(&mut self.x, rows * config.width, 0.0);
        sized(&mut self.queries, rows * part.queries().len(), 0.0);
        sized(&mut self.keys, rows * part.keys().len(), 0.0);
        sized(&mut self.values, rows * part.keys().len(), 0.0);
    }

    /// Keeps the rows of `x` whose logits are wanted, and says how many.
    fn keep_wanted(&mut self, config: &ModelConfig, batch: &[SeqInput<'_>]) -> usize {
        let (mut end, mut kept) = (0, 0);
        for seq in batch {
            end += seq.tokens.len();
            for row in end - seq.logits_last..end {
                let start = row * config.width;
                self.x
                    .copy_within(start..start + config.width, kept * config.width);
                kept += 1;
            }
        }
        self.x.truncate(kept * config.width);
        kept
    }
}

impl Rotation {
    fn restart(&mut self, half: usize, rows: usize) {
        self.half = half;
        for angles in [&mut self.cos, &mut self.sin] {
            angles.clear();
            angles.reserve_exact(rows * half);
        }
    }
}
