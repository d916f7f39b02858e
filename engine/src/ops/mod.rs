//! The operations a forward pass is made of, in two implementations.
//!
//! [`Ops`] lists them; a model's file reads as a sequence of these calls and is written once.
//! [`mod@reference`] is plain f32 on dequantised weights, slow and obvious. `cpu` is what serves:
//! packed quantised weights, int8 activations, its KV in f16, bf16 or 8 bits. Every op of the second is tested against
//! its twin in the first.
//!
//! The rule that binds every implementation: a row's result is a function of that row and of the
//! KV before it alone. No sum may be cut differently because other rows are present.

pub(crate) mod cpu;
pub mod reference;
pub mod shard;

use std::ops::Range;
use std::sync::Arc;

use prompt::gguf::Dtype;

use crate::kv::layout::{KeyOrder, KvFormat};
use crate::kv::storage::{BlockId, KvShape, KvStorage};
use crate::sys::mmap::Mapping;

/// A weight as the file stores it: `rows` rows of `cols` values, `cols` being summed over.
#[derive(Debug, Clone, Copy)]
pub struct Tensor<'a> {
    /// The format of the values.
    pub dtype: Dtype,
    /// Outputs of a product with it.
    pub rows: usize,
    /// Inputs of a product with it.
    pub cols: usize,
    /// The stored bytes, row after row.
    pub bytes: &'a [u8],
}

/// The parts of a packed weight in a mapped file.
#[derive(Debug)]
pub struct PartBytes {
    /// The file.
    pub(crate) file: Arc<Mapping>,
    /// Where in it each part lies.
    pub(crate) ranges: [Range<usize>; PartBytes::PARTS],
}

impl PartBytes {
    /// Parts of a weight at most; those that a format does not have are empty.
    pub(crate) const PARTS: usize = 6;
}

/// Which of a weight's rows mean what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowOrder {
    /// Nothing looks at single outputs.
    Plain,
    /// The outputs are heads that [`Ops::rotate`] will turn. An op set may reorder the rows inside
    /// a head as its rotation likes, as long as queries and keys agree.
    Rotary {
        /// Width of one head.
        head_dim: usize,
        /// Which of the file's outputs turn together.
        pairs: Pairs,
    },
}

/// Which two outputs of a head rope turns together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairs {
    /// `2i` and `2i + 1`.
    Neighbours,
    /// `i` and `half + i`.
    Halves,
}

impl RowOrder {
    /// Where a row of the file goes so that rope turns what these pairs say.
    fn place(self, row: usize, own: Pairs) -> usize {
        let RowOrder::Rotary { head_dim, pairs } = self else {
            return row;
        };
        let (start, inside, half) = (row / head_dim * head_dim, row % head_dim, head_dim / 2);
        start
            + match (pairs, own) {
                (Pairs::Neighbours, Pairs::Halves) => inside / 2 + inside % 2 * half,
                (Pairs::Halves, Pairs::Neighbours) => 2 * (inside % half) + inside / half,
                _ => inside,
            }
    }

    /// Values of the file's rows in the order in which an op set with these pairs has them.
    fn arrange(self, values: &[f32], own: Pairs) -> Vec<f32> {
        let mut arranged = vec![0.0; values.len()];
        for (row, value) in values.iter().enumerate() {
            arranged[self.place(row, own)] = *value;
        }
        arranged
    }
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

/// How the heads of attention are laid out in a row.
#[derive(Debug, Clone, Copy)]
pub struct Heads {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; query head `h` reads key head `h / (heads / kv_heads)`.
    pub kv_heads: usize,
    /// Width of one head.
    pub dim: usize,
    /// Positions that a query sees, its own among them: the last so many.
    pub window: usize,
}

impl Heads {
    /// The first position that the query at this one sees.
    pub(crate) fn sees_from(&self, position: usize) -> usize {
        (position + 1).saturating_sub(self.window)
    }
}

/// The angles of rope for the rows of one pass: `half` cosines and `half` sines a row.
#[derive(Debug, Default)]
pub struct Rotation {
    /// Half the width of a head.
    pub half: usize,
    /// Cosines, row after row.
    pub cos: Vec<f32>,
    /// Sines, row after row.
    pub sin: Vec<f32>,
}

/// How finely a matrix product must read its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// 8 bits are enough.
    Coarse,
    /// 8 bits are enough but where a few values stand out so far that their neighbours drown: where
    /// the square of a group's largest value is more than this many times the mean of those squares.
    Outliers(u8),
    /// About 15 bits are needed.
    Fine,
}

/// A set of operations that can run a transformer.
///
/// Rows of the residual stream, queries, keys and values travel as plain f32. `Input` is what a
/// matrix product reads: a set may quantise it once for all products that share it.
pub trait Ops: Send {
    /// A packed weight.
    type Matrix: Send;
    /// Rows as matrix products read them.
    type Input: Send;
    /// What the KV pool stores.
    type Kv: KvFormat;
    /// In which order the dimensions of a stored key follow one another.
    const KEY_ORDER: KeyOrder;

    /// Room for rows that products read, to be used again and again.
    fn input(precision: Precision) -> Self::Input;

    /// Bytes of memory that such rows take.
    fn input_bytes(input: &Self::Input) -> usize;

    /// Bytes of memory of the set's own buffers, as they are now.
    fn scratch_bytes(&self) -> usize;

    /// Packs a weight for the products below.
    fn pack(&mut self, tensor: &Tensor<'_>, order: RowOrder) -> Self::Matrix;

    /// The version of what [`Ops::stored`] gives; none if a weight is packed anew at each start.
    const LAYOUT: Option<u32> = None;

    /// The parts of a packed weight, to be kept in a file.
    fn stored(_matrix: &Self::Matrix) -> [&[u8]; PartBytes::PARTS] {
        Default::default()
    }

    /// A weight that was packed before, of a tensor of this format and shape; its bytes are not read.
    /// None if these are not its parts.
    fn restore(
        &mut self,
        _tensor: &Tensor<'_>,
        _order: RowOrder,
        _parts: &PartBytes,
    ) -> Option<Self::Matrix> {
        None
    }

    /// Values that go with a weight's outputs, in its order.
    fn arrange(&self, values: &[f32], order: RowOrder) -> Vec<f32>;

    /// Bytes of memory that a packed weight takes.
    fn matrix_bytes(matrix: &Self::Matrix) -> usize;

    /// `out[i]` = the row of `table` for `tokens[i]`.
    fn embed(&mut self, table: &Self::Matrix, tokens: &[u32], out: &mut [f32]);

    /// Root-mean-square norm of each row of `x`, times `weight`, made ready for products.
    fn norm(&mut self, x: &[f32], weight: &[f32], eps: f32, out: &mut Self::Input);

    /// The same norm as plain rows, for who reads hidden states.
    fn norm_floats(&mut self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]);

    /// Each part's output = its matrix × the input rows.
    fn project<const P: usize>(
        &mut self,
        input: &Self::Input,
        parts: [(&Self::Matrix, &mut [f32]); P],
    );

    /// `x` += matrix × the input rows.
    fn project_add(&mut self, input: &Self::Input, matrix: &Self::Matrix, x: &mut [f32]);

    /// `out` = silu(gate × input) · (up × input), made ready for products.
    fn gated(
        &mut self,
        input: &Self::Input,
        gate: &Self::Matrix,
        up: &Self::Matrix,
        out: &mut Self::Input,
    );

    /// Adds the same values to each row of `x`.
    fn add_rows(&mut self, x: &mut [f32], values: &[f32]);

    /// Root-mean-square norm of each head of each row of `x`, times `weight`, which is one head wide.
    fn norm_heads(&mut self, x: &mut [f32], weight: &[f32], eps: f32);

    /// Turns each head of each row by the row's angles. Rows consist of whole heads.
    fn rotate(&mut self, x: &mut [f32], rows: usize, rotation: &Rotation);

    /// Writes the rows' keys and values into the batch's blocks.
    fn store(
        &mut self,
        layer: usize,
        batch: &[SeqInput<'_>],
        keys_values: (&[f32], &[f32]),
        kv: &mut KvStorage<Self::Kv>,
    );

    /// Causal attention of each row's queries over its sequence's keys and values, which include
    /// those of the same pass, read back as they are stored.
    fn attend(
        &mut self,
        layer: usize,
        batch: &[SeqInput<'_>],
        queries: (&[f32], Heads),
        kv: &KvStorage<Self::Kv>,
        out: &mut Self::Input,
    );
}

/// Gives a buffer of a pass its length. It grows by what is needed and not by doubling, so that the
/// memory of the largest pass can be said beforehand. What it holds is of no meaning.
pub(crate) fn sized<T: Clone>(buffer: &mut Vec<T>, len: usize, filler: T) {
    buffer.reserve_exact(len.saturating_sub(buffer.len()));
    buffer.resize(len, filler);
}

/// Where a position's key or value goes: the tile and the slot in it.
fn slot<F: KvFormat>(
    shape: KvShape,
    layer: usize,
    blocks: &[BlockId],
    position: usize,
) -> (usize, usize) {
    let block = blocks[position / crate::kv::storage::BLOCK_TOKENS];
    (
        shape.tile_start::<F>(layer, block, 0),
        position % crate::kv::storage::BLOCK_TOKENS,
    )
}
