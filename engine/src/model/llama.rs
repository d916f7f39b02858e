//! The forward pass of a llama model, read top to bottom, over any op set.

use super::config::ModelConfig;
use super::pass::{Pass, PassOutput};
use super::weights::{Layer, Weights};
use crate::kv::storage::{BlockId, KvShape, KvStorage};
use crate::ops::{Heads, Ops, Precision, Rotation, SeqInput};

/// A llama model on one op set.
pub(crate) struct Llama<O: Ops> {
    config: ModelConfig,
    ops: O,
    weights: Weights<O::Matrix>,
    kv: KvStorage<O::KvValue>,
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
}

impl<O: Ops> Llama<O> {
    /// Puts the parts together, with an empty KV pool.
    pub(crate) fn new(
        config: ModelConfig,
        ops: O,
        weights: Weights<O::Matrix>,
        kv_blocks: usize,
    ) -> Llama<O> {
        let shape = KvShape {
            blocks: kv_blocks,
            heads: config.kv_heads,
            head_dim: config.head_dim,
        };
        let kv = KvStorage::new(config.layers, shape);
        Llama {
            config,
            ops,
            weights,
            kv,
            scratch: Scratch::new::<O>(),
        }
    }

    /// Bytes of the packed weights.
    pub(crate) fn weight_bytes(&self) -> usize {
        self.weights.matrices().map(O::matrix_bytes).sum()
    }

    /// Copies one block's KV onto another.
    pub(crate) fn copy_block(&mut self, from: BlockId, to: BlockId) {
        self.kv.copy_block(from, to);
    }

    /// One checked pass.
    pub(crate) fn run(&mut self, pass: &Pass<'_>, output: &mut PassOutput) {
        let Llama {
            config,
            ops,
            weights,
            kv,
            scratch,
        } = self;
        let (batch, last) = (pass.batch, config.layers);
        output.hidden.resize_with(pass.capture.len(), Vec::new);
        scratch.prepare(config, batch);
        ops.embed(&weights.table, &scratch.tokens, &mut scratch.x);
        for (index, layer) in weights.layers.iter().enumerate() {
            capture(pass, output, index, &scratch.x);
            attention(config, ops, (index, layer), batch, kv, scratch);
            feed_forward(config, ops, layer, scratch);
        }
        capture(pass, output, last, &scratch.x);
        for (wanted, hidden) in pass.capture.iter().zip(&mut output.hidden) {
            if *wanted > last {
                hidden.resize(scratch.x.len(), 0.0);
                ops.norm_floats(&scratch.x, &weights.output_norm, config.rms_eps, hidden);
            }
        }
        let rows = scratch.keep_wanted(config, batch);
        output.logits.resize(rows * config.vocab, 0.0);
        if rows > 0 {
            let matrix = weights.output.as_ref().unwrap_or(&weights.table);
            ops.norm(
                &scratch.x,
                &weights.output_norm,
                config.rms_eps,
                &mut scratch.last,
            );
            ops.project(&scratch.last, [(matrix, &mut output.logits)]);
        }
    }
}

/// Copies the residual stream out where it is asked for as `layer`.
fn capture(pass: &Pass<'_>, output: &mut PassOutput, layer: usize, x: &[f32]) {
    for (wanted, hidden) in pass.capture.iter().zip(&mut output.hidden) {
        if *wanted == layer {
            hidden.clear();
            hidden.extend_from_slice(x);
        }
    }
}

fn attention<O: Ops>(
    config: &ModelConfig,
    ops: &mut O,
    (index, layer): (usize, &Layer<O::Matrix>),
    batch: &[SeqInput<'_>],
    kv: &mut KvStorage<O::KvValue>,
    scratch: &mut Scratch<O::Input>,
) {
    let Scratch {
        tokens,
        rotation,
        x,
        queries,
        keys,
        values,
        attention_input: input,
        attended,
        ..
    } = scratch;
    let heads = Heads {
        heads: config.heads,
        kv_heads: config.kv_heads,
        dim: config.head_dim,
    };
    ops.norm(x, &layer.attention_norm, config.rms_eps, input);
    ops.project(
        input,
        [
            (&layer.query, queries),
            (&layer.key, keys),
            (&layer.value, values),
        ],
    );
    ops.rotate(queries, tokens.len(), rotation);
    ops.rotate(keys, tokens.len(), rotation);
    ops.store(index, batch, (keys, values), kv);
    ops.attend(index, batch, (queries, heads), kv, attended);
    ops.project_add(attended, &layer.attention_output, x);
}

fn feed_forward<O: Ops>(
    config: &ModelConfig,
    ops: &mut O,
    layer: &Layer<O::Matrix>,
    scratch: &mut Scratch<O::Input>,
) {
    let Scratch {
        x,
        ff_input: input,
        hidden,
        ..
    } = scratch;
    ops.norm(x, &layer.ff_norm, config.rms_eps, input);
    ops.gated(input, &layer.gate, &layer.up, hidden);
    ops.project_add(hidden, &layer.down, x);
}

impl<I> Scratch<I> {
    fn new<O: Ops<Input = I>>() -> Scratch<I> {
        // What 8 bits cost on the default model, as mean KL from the reference in 1e-3 nats, with
        // everything coarse at 3.9: fine queries, keys and values take off 1.4, the last product
        // 0.9, gate and up 0.6, down 0.6, the attention's output nothing. Gate and up are half
        // of all work and stay coarse; the three others together leave 0.9.
        let (coarse, fine) = (Precision::Coarse, Precision::Fine);
        Scratch {
            tokens: Vec::new(),
            rotation: Rotation::default(),
            x: Vec::new(),
            queries: Vec::new(),
            keys: Vec::new(),
            values: Vec::new(),
            attention_input: O::input(fine),
            attended: O::input(coarse),
            ff_input: O::input(coarse),
            hidden: O::input(fine),
            last: O::input(fine),
        }
    }

    /// Sizes the buffers for the batch and fills in tokens and angles.
    fn prepare(&mut self, config: &ModelConfig, batch: &[SeqInput<'_>]) {
        self.tokens.clear();
        self.rotation.restart(config.head_dim / 2);
        for seq in batch {
            self.tokens.extend(seq.tokens);
            for position in seq.start..seq.start + seq.tokens.len() {
                self.rotation.push(position, config.rope_base);
            }
        }
        let rows = self.tokens.len();
        self.x.resize(rows * config.width, 0.0);
        self.queries
            .resize(rows * config.heads * config.head_dim, 0.0);
        self.keys
            .resize(rows * config.kv_heads * config.head_dim, 0.0);
        self.values
            .resize(rows * config.kv_heads * config.head_dim, 0.0);
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
    fn restart(&mut self, half: usize) {
        self.half = half;
        self.cos.clear();
        self.sin.clear();
    }

    /// Appends one position's angles. Frequencies and angles are rounded to f32 as the reference
    /// implementations do: far from position 0 that rounding is visible in the logits.
    fn push(&mut self, position: usize, base: f32) {
        for pair in 0..self.half {
            let exponent = pair as f32 / self.half as f32;
            let frequency = 1.0 / base.powf(exponent);
            let angle = f64::from(position as f32 * frequency);
            self.cos.push(angle.cos() as f32);
            self.sin.push(angle.sin() as f32);
        }
    }
}
