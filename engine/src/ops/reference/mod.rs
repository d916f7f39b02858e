//! The ops as their definitions read: f32 on dequantised weights, f32 keys and values.
//!
//! Nothing here is clever. Loops are plain so that the compiler can vectorise them, and rows or
//! outputs are spread over threads, which changes no sum. A few hundred tokens a second is enough
//! for what this is for: to be compared with.

pub(crate) mod dequant;

use std::ops::Range;

use crate::kv::layout::{F32, KeyOrder};
use crate::kv::storage::{BLOCK_TOKENS, KvStorage};
use crate::ops::{Heads, Ops, Pairs, Precision, Rotation, RowOrder, SeqInput, Tensor, slot};
use crate::sys::pool::Pool;

/// The reference op set.
#[derive(Debug)]
pub struct ReferenceOps {
    pool: Pool,
}

impl ReferenceOps {
    /// The op set on its own threads.
    pub fn new(threads: usize) -> ReferenceOps {
        ReferenceOps {
            pool: Pool::new(threads),
        }
    }
}

/// A dequantised weight, row after row.
#[derive(Debug)]
pub struct Dense {
    cols: usize,
    values: Vec<f32>,
}

impl Dense {
    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.cols..][..self.cols]
    }

    fn rows(&self) -> usize {
        self.values.len() / self.cols
    }
}

impl Ops for ReferenceOps {
    type Matrix = Dense;
    type Input = Vec<f32>;
    type Kv = F32;
    const KEY_ORDER: KeyOrder = KeyOrder::Pairs;

    fn input(_precision: Precision) -> Vec<f32> {
        Vec::new()
    }

    fn input_bytes(input: &Vec<f32>) -> usize {
        size_of::<f32>() * input.capacity()
    }

    /// Temporary rows are made and dropped inside each op: nothing is kept.
    fn scratch_bytes(&self) -> usize {
        0
    }

    fn arrange(&self, values: &[f32], order: RowOrder) -> Vec<f32> {
        order.arrange(values, Pairs::Neighbours)
    }

    fn pack(&mut self, tensor: &Tensor<'_>, order: RowOrder) -> Dense {
        let mut values = vec![0.0; tensor.rows * tensor.cols];
        let row_bytes = tensor.bytes.len() / tensor.rows;
        self.pool.each_chunk(&mut values, tensor.cols, |row, out| {
            dequant::dequantise(
                tensor.dtype,
                &tensor.bytes[row * row_bytes..][..row_bytes],
                out,
            );
        });
        if order != RowOrder::Plain {
            let stored = values.clone();
            for (row, stored) in stored.chunks_exact(tensor.cols).enumerate() {
                let place = order.place(row, Pairs::Neighbours);
                values[place * tensor.cols..][..tensor.cols].copy_from_slice(stored);
            }
        }
        Dense {
            cols: tensor.cols,
            values,
        }
    }

    fn matrix_bytes(matrix: &Dense) -> usize {
        size_of_val(matrix.values.as_slice())
    }

    fn embed(&mut self, table: &Dense, tokens: &[u32], out: &mut [f32]) {
        for (row, token) in out.chunks_exact_mut(table.cols).zip(tokens) {
            row.copy_from_slice(table.row(*token as usize));
        }
    }

    fn norm(&mut self, x: &[f32], weight: &[f32], eps: f32, out: &mut Vec<f32>) {
        out.resize(x.len(), 0.0);
        self.norm_floats(x, weight, eps, out);
    }

    fn norm_floats(&mut self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        let rows = x.chunks_exact(weight.len());
        for (row, out) in rows.zip(out.chunks_exact_mut(weight.len())) {
            let mean_square = dot(row, row) / row.len() as f32;
            let scale = 1.0 / (mean_square + eps).sqrt();
            for ((out, value), weight) in out.iter_mut().zip(row).zip(weight) {
                *out = value * scale * weight;
            }
        }
    }

    fn project<const P: usize>(&mut self, input: &Vec<f32>, parts: [(&Dense, &mut [f32]); P]) {
        for (matrix, out) in parts {
            product(&mut self.pool, input, matrix, out, |old, new| *old = new);
        }
    }

    fn project_add(&mut self, input: &Vec<f32>, matrix: &Dense, x: &mut [f32]) {
        product(&mut self.pool, input, matrix, x, |old, new| *old += new);
    }

    fn gated(&mut self, input: &Vec<f32>, gate: &Dense, up: &Dense, out: &mut Vec<f32>) {
        let rows = input.len() / gate.cols;
        let mut ups = vec![0.0; rows * up.rows()];
        out.clear();
        out.resize(ups.len(), 0.0);
        self.project(input, [(gate, out), (up, &mut ups)]);
        for (value, up) in out.iter_mut().zip(&ups) {
            *value = *value / (1.0 + (-*value).exp()) * up;
        }
    }

    fn add_rows(&mut self, x: &mut [f32], values: &[f32]) {
        for row in x.chunks_exact_mut(values.len()) {
            row.iter_mut()
                .zip(values)
                .for_each(|(x, value)| *x += value);
        }
    }

    fn norm_heads(&mut self, x: &mut [f32], weight: &[f32], eps: f32) {
        let before = x.to_vec();
        self.norm_floats(&before, weight, eps, x);
    }

    fn rotate(&mut self, x: &mut [f32], rows: usize, rotation: &Rotation) {
        let half = rotation.half;
        for (row, values) in x.chunks_exact_mut(x.len() / rows).enumerate() {
            let cos = &rotation.cos[row * half..][..half];
            let sin = &rotation.sin[row * half..][..half];
            for head in values.chunks_exact_mut(2 * half) {
                for (pair, (cos, sin)) in head
                    .as_chunks_mut::<2>()
                    .0
                    .iter_mut()
                    .zip(cos.iter().zip(sin))
                {
                    *pair = [pair[0] * cos - pair[1] * sin, pair[1] * cos + pair[0] * sin];
                }
            }
        }
    }

    fn store(
        &mut self,
        layer: usize,
        batch: &[SeqInput<'_>],
        (keys, values): (&[f32], &[f32]),
        kv: &mut KvStorage<F32>,
    ) {
        let shape = kv.shape();
        let row_len = shape.heads * shape.head_dim;
        let mut rows = keys.chunks_exact(row_len).zip(values.chunks_exact(row_len));
        let positions = batch
            .iter()
            .flat_map(|seq| (0..seq.tokens.len()).map(move |index| (seq, seq.start + index)));
        for ((seq, position), (key_row, value_row)) in positions.zip(&mut rows) {
            let (tiles, token) = slot::<F32>(shape, layer, seq.blocks, position);
            for head in 0..shape.heads {
                let tile = &mut kv.elements_mut()[tiles + head * 2 * shape.half_tile::<F32>()..];
                for dim in 0..shape.head_dim {
                    let index = head * shape.head_dim + dim;
                    tile[dim * BLOCK_TOKENS + token] = key_row[index];
                    tile[shape.half_tile::<F32>() + token * shape.head_dim + dim] =
                        value_row[index];
                }
            }
        }
    }

    fn attend(
        &mut self,
        layer: usize,
        batch: &[SeqInput<'_>],
        (queries, heads): (&[f32], Heads),
        kv: &KvStorage<F32>,
        out: &mut Vec<f32>,
    ) {
        out.clear();
        out.resize(queries.len(), 0.0);
        let row_len = heads.heads * heads.dim;
        let rows: Vec<(&SeqInput<'_>, usize)> = batch
            .iter()
            .flat_map(|seq| (0..seq.tokens.len()).map(move |index| (seq, seq.start + index)))
            .collect();
        self.pool.each_chunk(out, row_len, |row, out| {
            let (seq, position) = rows[row];
            for (head, out) in out.chunks_exact_mut(heads.dim).enumerate() {
                let query = &queries[row * row_len + head * heads.dim..][..heads.dim];
                let kv_head = head / (heads.heads / heads.kv_heads);
                let seen = heads.sees_from(position)..position + 1;
                attend_head(query, kv, (layer, kv_head), (seq, seen), out);
            }
        });
    }
}

/// One query over the positions that it sees: scores, softmax, weighted sum of values.
fn attend_head(
    query: &[f32],
    kv: &KvStorage<F32>,
    (layer, kv_head): (usize, usize),
    (seq, seen): (&SeqInput<'_>, Range<usize>),
    out: &mut [f32],
) {
    let shape = kv.shape();
    let scale = 1.0 / (query.len() as f32).sqrt();
    let tile = |past: usize| {
        let (tiles, token) = slot::<F32>(shape, layer, seq.blocks, past);
        (
            &kv.elements()[tiles + kv_head * 2 * shape.half_tile::<F32>()..],
            token,
        )
    };
    let mut weights: Vec<f32> = seen
        .clone()
        .map(|past| {
            let (tile, token) = tile(past);
            let products = query.iter().enumerate();
            scale
                * products
                    .map(|(dim, q)| q * tile[dim * BLOCK_TOKENS + token])
                    .sum::<f32>()
        })
        .collect();
    let largest = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    weights
        .iter_mut()
        .for_each(|weight| *weight = (*weight - largest).exp());
    let total: f32 = weights.iter().sum();
    for (past, weight) in seen.zip(&weights) {
        let (tile, token) = tile(past);
        let values = &tile[shape.half_tile::<F32>() + token * shape.head_dim..][..shape.head_dim];
        for (out, value) in out.iter_mut().zip(values) {
            *out += weight / total * value;
        }
    }
}

/// `put(out[row][output], matrix row · input row)` for all of them, rows spread over threads.
fn product(
    pool: &mut Pool,
    input: &[f32],
    matrix: &Dense,
    out: &mut [f32],
    put: impl Fn(&mut f32, f32) + Sync,
) {
    /// Input rows that stay in the cache while all weight rows pass by.
    const ROWS: usize = 16;
    let (cols, outputs) = (matrix.cols, matrix.rows());
    assert_eq!(
        out.len() * cols,
        input.len() * outputs,
        "{cols} inputs, {outputs} outputs a row"
    );
    pool.each_chunk(out, ROWS * outputs, |chunk, out| {
        let input = &input[chunk * ROWS * cols..];
        for output in 0..outputs {
            let weights = matrix.row(output);
            for (out, input) in out.chunks_exact_mut(outputs).zip(input.chunks_exact(cols)) {
                put(&mut out[output], dot(weights, input));
            }
        }
    });
}

/// The dot product in 16 partial sums, which the compiler keeps in vector registers.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 16];
    let (a, a_rest) = a.as_chunks::<16>();
    let (b, b_rest) = b.as_chunks::<16>();
    for (a, b) in a.iter().zip(b) {
        for lane in 0..16 {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}
