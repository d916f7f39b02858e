//! The ops that serve: packed quantised weights, int8 activations, keys and values in 16 or 8 bits.
//!
//! [`isa`] says what a processor must offer, and has one file per instruction set; the kernels in
//! [`product`], [`attention`], [`rows`] and [`positions`] are written once over it, and those that touch
//! the KV pool once over what it stores ([`stored`]). This file cuts
//! each op into chunks for the threads. The cut depends on the batch; the result of a row does not.

mod attention;
mod isa;
mod pack;
mod plan;
mod positions;
mod product;
mod rows;
mod stored;
#[cfg(test)]
mod tests;

use std::marker::PhantomData;

use attention::{Source, Tile};

use isa::LANES;
use pack::{BLOCK, Packed};
use plan::{BlockWrite, Segment};
use positions::{Rotate, StoreBlock};
use product::{GatedProduct, GroupProduct, Put};
use rows::{Lower, Norm, NormFloats, NormHeads, PANEL, PanelBlock, Quantise, Rows};

pub(crate) use isa::Isa;
pub(crate) use isa::portable::Portable;
#[cfg(target_arch = "x86_64")]
pub(crate) use isa::{avx2::Avx2, avx512::Avx512};
pub(crate) use stored::Stored;

use crate::kv::layout::{F16, KeyOrder};
use crate::kv::storage::{BLOCK_TOKENS, KvStorage};
use crate::model::ModelConfig;
use crate::ops::{
    Heads, Ops, Pairs, PartBytes, Precision, Rotation, RowOrder, SeqInput, Tensor, sized,
};
use crate::sys::disjoint::Disjoint;
use crate::sys::pool::Pool;

/// Chunks per thread that a product of few rows is cut into: enough that a thread that was
/// descheduled leaves the others something to take, few enough that claiming costs nothing.
const CHUNKS_PER_THREAD: usize = 8;

/// The op set for one instruction set and one format of keys and values.
pub(crate) struct CpuOps<I, S = F16> {
    isa: I,
    stored: PhantomData<S>,
    pool: Pool,
    /// Some matrix is not quantised, so rows must keep their floats.
    dense: bool,
    /// One row of the norm, per panel.
    normed: Vec<f32>,
    /// Rows of f32 on their way to being quantised.
    floats: Vec<f32>,
    /// Tiles of attention, each with the start of its partial results.
    tiles: Vec<(Tile, usize)>,
    segments: Vec<Segment>,
    partials: Vec<f32>,
    blocks: Vec<BlockWrite>,
}

impl<I: Isa, S: Stored> CpuOps<I, S> {
    /// The op set on its own threads, if the processor has the instructions.
    pub(crate) fn new(threads: usize) -> Option<CpuOps<I, S>> {
        Some(CpuOps {
            isa: I::detect()?,
            stored: PhantomData,
            pool: Pool::new(threads),
            dense: false,
            normed: Vec::new(),
            floats: Vec::new(),
            tiles: Vec::new(),
            segments: Vec::new(),
            partials: Vec::new(),
            blocks: Vec::new(),
        })
    }

    /// Quantises `self.floats` into `out`, a panel at a time.
    fn quantise(&mut self, cols: usize, out: &mut Rows) {
        let CpuOps {
            isa,
            pool,
            floats,
            dense,
            ..
        } = self;
        let rows = floats.len() / cols;
        out.resize(rows, cols, *dense);
        let writer = out.writer();
        pool.run(rows.div_ceil(PANEL), &|panel| {
            let rows = &floats[panel * PANEL * cols..];
            let rows = &rows[..rows.len().min(PANEL * cols)];
            // SAFETY: each panel is one chunk.
            #[expect(unsafe_code, reason = "chunks are apart, which Rust cannot see")]
            let panel = unsafe { writer.panel(panel, rows.len() / cols) };
            isa.run(Quantise { rows, panel });
        });
    }

    /// How many groups make a chunk.
    fn chunk_of_groups(&self, groups: usize) -> usize {
        groups.div_ceil(self.pool.threads() * CHUNKS_PER_THREAD)
    }

    fn product<const P: usize>(
        &mut self,
        input: &Rows,
        parts: [(&Packed, &mut [f32]); P],
        put: Put,
    ) {
        let groups: usize = parts.iter().map(|(matrix, _)| matrix.groups()).sum();
        let chunk_groups = self.chunk_of_groups(groups);
        let parts = parts.map(|(matrix, out)| (matrix, Disjoint::new(out)));
        let isa = self.isa;
        self.pool.run(groups.div_ceil(chunk_groups), &|chunk| {
            let first = chunk * chunk_groups;
            for index in first..(first + chunk_groups).min(groups) {
                let (mut group, mut parts) = (index, parts.iter());
                let (matrix, out) = loop {
                    let (matrix, out) = parts.next().expect("groups are counted over the parts");
                    match group.checked_sub(matrix.groups()) {
                        Some(later) => group = later,
                        None => break (*matrix, out),
                    }
                };
                let is_last = index + 1 == first + chunk_groups || group + 1 == matrix.groups();
                let next = (!is_last).then_some(group + 1);
                isa.run(GroupProduct {
                    input,
                    matrix,
                    group,
                    next,
                    put,
                    out,
                });
            }
        });
    }
}

/// The most bytes that this many rows ready for products take: finely quantised, with their floats.
pub(crate) fn input_bytes_most(rows: usize, cols: usize) -> usize {
    let panels = rows.div_ceil(PANEL);
    let block = size_of::<PanelBlock>() + size_of::<Lower>();
    panels * (cols / BLOCK) * block + size_of::<f32>() * rows * cols
}

/// The most bytes that an op set's own buffers take in a pass of this many rows.
pub(crate) fn own_bytes_most(config: &ModelConfig, rows: usize) -> usize {
    let floats = rows * config.ff.max(config.heads * config.head_dim);
    let normed = rows.div_ceil(PANEL) * config.width;
    plan::bytes_most(config, rows) + size_of::<f32>() * (floats + normed)
}

impl<I: Isa, S: Stored> Ops for CpuOps<I, S> {
    type Matrix = Packed;
    type Input = Rows;
    type Kv = S;
    const KEY_ORDER: KeyOrder = KeyOrder::Halves;

    fn input(precision: Precision) -> Rows {
        Rows::new(precision)
    }

    fn input_bytes(input: &Rows) -> usize {
        input.bytes()
    }

    fn scratch_bytes(&self) -> usize {
        let floats = [&self.normed, &self.floats, &self.partials];
        size_of::<f32>() * floats.map(Vec::capacity).iter().sum::<usize>()
            + size_of::<(Tile, usize)>() * self.tiles.capacity()
            + size_of::<Segment>() * self.segments.capacity()
            + size_of::<BlockWrite>() * self.blocks.capacity()
    }

    fn pack(&mut self, tensor: &Tensor<'_>, order: RowOrder) -> Packed {
        let packed = Packed::new(tensor, order);
        self.dense |= packed.is_dense();
        packed
    }

    const LAYOUT: Option<u32> = Some(pack::LAYOUT);

    fn stored(matrix: &Packed) -> [&[u8]; PartBytes::PARTS] {
        matrix.stored()
    }

    fn restore(
        &mut self,
        tensor: &Tensor<'_>,
        order: RowOrder,
        parts: &PartBytes,
    ) -> Option<Packed> {
        let packed = Packed::restore(tensor, order, parts)?;
        self.dense |= packed.is_dense();
        Some(packed)
    }

    fn arrange(&self, values: &[f32], order: RowOrder) -> Vec<f32> {
        order.arrange(values, Pairs::Halves)
    }

    fn matrix_bytes(matrix: &Packed) -> usize {
        matrix.bytes()
    }

    fn embed(&mut self, table: &Packed, tokens: &[u32], out: &mut [f32]) {
        let cols = table.cols;
        self.pool.each_chunk(out, cols * PANEL, |chunk, out| {
            for (out, token) in out.chunks_exact_mut(cols).zip(&tokens[chunk * PANEL..]) {
                table.row(*token as usize, out);
            }
        });
    }

    fn norm(&mut self, x: &[f32], weight: &[f32], eps: f32, out: &mut Rows) {
        let cols = weight.len();
        let rows = x.len() / cols;
        out.resize(rows, cols, self.dense);
        let panels = rows.div_ceil(PANEL);
        sized(&mut self.normed, panels * cols, 0.0);
        let (isa, writer) = (self.isa, out.writer());
        let scratch = Disjoint::new(&mut self.normed);
        self.pool.run(panels, &|panel| {
            let rows = &x[panel * PANEL * cols..];
            let rows = &rows[..rows.len().min(PANEL * cols)];
            // SAFETY: each panel, with its row of scratch, is one chunk.
            #[expect(unsafe_code, reason = "chunks are apart, which Rust cannot see")]
            let (scratch, panel) = unsafe {
                (
                    scratch.range(panel * cols, cols),
                    writer.panel(panel, rows.len() / cols),
                )
            };
            isa.run(Norm {
                rows,
                weight,
                eps,
                scratch,
                panel,
            });
        });
    }

    fn norm_floats(&mut self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        let (isa, cols) = (self.isa, weight.len());
        self.pool.each_chunk(out, cols * PANEL, |chunk, out| {
            let rows = &x[chunk * PANEL * cols..][..out.len()];
            isa.run(NormFloats {
                rows,
                weight,
                eps,
                out,
            });
        });
    }

    fn project<const P: usize>(&mut self, input: &Rows, parts: [(&Packed, &mut [f32]); P]) {
        self.product(input, parts, Put::Store);
    }

    fn project_add(&mut self, input: &Rows, matrix: &Packed, x: &mut [f32]) {
        self.product(input, [(matrix, x)], Put::Add);
    }

    fn gated(&mut self, input: &Rows, gate: &Packed, up: &Packed, out: &mut Rows) {
        let groups = gate.groups();
        let chunk_groups = self.chunk_of_groups(2 * groups).div_ceil(2);
        sized(&mut self.floats, input.rows * gate.rows, 0.0);
        let isa = self.isa;
        let floats = Disjoint::new(&mut self.floats);
        self.pool.run(groups.div_ceil(chunk_groups), &|chunk| {
            let first = chunk * chunk_groups;
            let end = (first + chunk_groups).min(groups);
            for group in first..end {
                isa.run(GatedProduct {
                    input,
                    gate,
                    up,
                    group,
                    next: (group + 1 < end).then_some(group + 1),
                    out: &floats,
                });
            }
        });
        self.quantise(gate.rows, out);
    }

    fn add_rows(&mut self, x: &mut [f32], values: &[f32]) {
        self.pool.each_chunk(x, values.len() * PANEL, |_, x| {
            for row in x.chunks_exact_mut(values.len()) {
                row.iter_mut()
                    .zip(values)
                    .for_each(|(x, value)| *x += value);
            }
        });
    }

    fn norm_heads(&mut self, x: &mut [f32], weight: &[f32], eps: f32) {
        let isa = self.isa;
        // About as many heads as rows have.
        self.pool
            .each_chunk(x, weight.len() * 8 * PANEL, |_, heads| {
                isa.run(NormHeads { heads, weight, eps });
            });
    }

    fn rotate(&mut self, x: &mut [f32], rows: usize, rotation: &Rotation) {
        let row_len = x.len() / rows;
        let isa = self.isa;
        self.pool.each_chunk(x, row_len * PANEL, |chunk, x| {
            isa.run(Rotate {
                x,
                row_len,
                rotation,
                first: chunk * PANEL,
            });
        });
    }

    fn store(
        &mut self,
        layer: usize,
        batch: &[SeqInput<'_>],
        (keys, values): (&[f32], &[f32]),
        kv: &mut KvStorage<S>,
    ) {
        self.plan_blocks(batch);
        let shape = kv.shape();
        let row_len = shape.heads * shape.head_dim;
        let tiles_len = shape.heads * 2 * shape.half_tile::<S>();
        let (isa, blocks) = (self.isa, &self.blocks);
        let pool = Disjoint::new(kv.elements_mut());
        // Sixteen decoding sequences write one row each: not worth waking anyone.
        let per_chunk = if keys.len() / row_len <= BLOCK_TOKENS {
            blocks.len()
        } else {
            1
        };
        self.pool.run(blocks.len().div_ceil(per_chunk), &|chunk| {
            for write in blocks.iter().skip(chunk * per_chunk).take(per_chunk) {
                let block = batch[write.sequence].blocks[write.position / BLOCK_TOKENS];
                let start = shape.tile_start::<S>(layer, block, 0);
                // SAFETY: a block is written by one sequence only, which `Model::forward`
                // checks, and all of the sequence's rows in it are one entry of the plan.
                #[expect(unsafe_code, reason = "blocks are apart, which Rust cannot see")]
                let tiles = unsafe { pool.range(start, tiles_len) };
                let rows = write.first_row * row_len..(write.first_row + write.rows) * row_len;
                let (keys, values) = (&keys[rows.clone()], &values[rows]);
                let token = write.position % BLOCK_TOKENS;
                isa.run(StoreBlock::<S> {
                    tiles,
                    shape,
                    keys,
                    values,
                    token,
                });
            }
        });
    }

    fn attend(
        &mut self,
        layer: usize,
        batch: &[SeqInput<'_>],
        (queries, heads): (&[f32], Heads),
        kv: &KvStorage<S>,
        out: &mut Rows,
    ) {
        self.plan_tiles(batch, heads);
        let source = Source {
            queries,
            heads,
            kv: kv.elements(),
            shape: kv.shape(),
            layer,
        };
        self.attend_tiles(batch, source);
        self.quantise(heads.heads * heads.dim, out);
    }
}

const _: () = assert!(BLOCK_TOKENS == LANES, "a block of keys is one vector");
