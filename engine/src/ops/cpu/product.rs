//! Matrix products: one group of 16 outputs for up to [`PANEL`] rows at a time.
//!
//! The inner loop unpacks a block of weights into registers once and uses it for every row of
//! the tile, so prefill is bound by the int8 units and decode by memory. Estimate for AVX-512
//! VNNI, two 512-bit units: per block and row 8 products, 1 multiply and 2 fused multiply-adds
//! against 8 products alone, so at best 73 % of the int8 peak.
//!
//! Each output of each row is summed over blocks in order, in one accumulator: the same sequence
//! of operations in a tile of 12 rows as in a tile of one. That is what makes a row's result
//! independent of the rows beside it; no sum is ever split over threads or tiles.

mod format;
mod inner;

use std::ops::Range;

use prompt::gguf::Dtype;

use super::isa::{Isa, Kernel, LANES, Line};
use super::pack::{Packed, Parts};
use super::rows::{Lower, PANEL, PanelBlock, Rows};
use crate::sys::disjoint::Disjoint;
use format::{Affine, Format, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, Quants, lines_of};
use inner::QuantisedTile;

/// What happens to the results of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Put {
    /// They replace the output.
    Store,
    /// They are added to it.
    Add,
}

/// One group of outputs for all rows.
pub(crate) struct GroupProduct<'a> {
    pub(crate) input: &'a Rows,
    pub(crate) matrix: &'a Packed,
    pub(crate) group: usize,
    /// A group that this thread will do next, if it knows.
    pub(crate) next: Option<usize>,
    pub(crate) put: Put,
    /// Rows of `matrix.rows` outputs; this group's columns are this kernel's alone.
    pub(crate) out: &'a Disjoint<'a, f32>,
}

impl Kernel for GroupProduct<'_> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        each_tile(isa, &self, self.input.rows);
    }
}

impl Tiled for GroupProduct<'_> {
    #[inline(always)]
    fn tile<I: Isa, const M: usize>(&self, isa: I, first: usize) {
        let place = Place::new(self.group, self.next, first..first + M, self.input.rows);
        let mut sums = [[0.0; LANES]; M];
        tile_sums(isa, self.input, self.matrix, (place, &mut sums));
        let column = self.group * LANES;
        let width = LANES.min(self.matrix.rows - column);
        for (index, sums) in sums.iter().enumerate() {
            let start = (first + index) * self.matrix.rows + column;
            // SAFETY: rows `first..` of this group's columns are written by this kernel alone.
            #[expect(unsafe_code, reason = "groups are apart, which Rust cannot see")]
            let out = unsafe { self.out.range(start, width) };
            put(isa, self.put, isa.load(sums), out);
        }
    }
}

/// A kernel that goes over its rows tile by tile.
trait Tiled {
    /// Handles the rows `first..first + M`, which lie in one panel.
    fn tile<I: Isa, const M: usize>(&self, isa: I, first: usize);
}

/// Cuts rows into tiles of the sizes there are, none of which reaches over two panels.
#[inline(always)]
fn each_tile<I: Isa>(isa: I, kernel: &impl Tiled, rows: usize) {
    let mut first = 0;
    while first < rows {
        let left = (PANEL - first % PANEL).min(rows - first);
        first += match left {
            12.. if I::WIDE_TILES || I::BY_PANEL => {
                kernel.tile::<I, 12>(isa, first);
                12
            }
            8.. if I::WIDE_TILES || I::BY_PANEL => {
                kernel.tile::<I, 8>(isa, first);
                8
            }
            4.. => {
                kernel.tile::<I, 4>(isa, first);
                4
            }
            2.. => {
                kernel.tile::<I, 2>(isa, first);
                2
            }
            _ => {
                kernel.tile::<I, 1>(isa, first);
                1
            }
        };
    }
}

#[inline(always)]
fn put<I: Isa>(isa: I, put: Put, sums: I::F, out: &mut [f32]) {
    if let Ok(out) = <&mut [f32; LANES]>::try_from(&mut *out) {
        match put {
            Put::Store => isa.store(sums, out),
            Put::Add => isa.store(isa.add(isa.load(out), sums), out),
        }
        return;
    }
    let mut lanes = [0.0; LANES];
    isa.store(sums, &mut lanes);
    for (out, sum) in out.iter_mut().zip(lanes) {
        *out = if put == Put::Store { sum } else { *out + sum };
    }
}

/// silu(gate) · up for one group of outputs and all rows.
pub(crate) struct GatedProduct<'a> {
    pub(crate) input: &'a Rows,
    pub(crate) gate: &'a Packed,
    pub(crate) up: &'a Packed,
    pub(crate) group: usize,
    /// As for [`GroupProduct`].
    pub(crate) next: Option<usize>,
    /// As for [`GroupProduct`].
    pub(crate) out: &'a Disjoint<'a, f32>,
}

impl Kernel for GatedProduct<'_> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        each_tile(isa, &self, self.input.rows);
    }
}

impl Tiled for GatedProduct<'_> {
    #[inline(always)]
    fn tile<I: Isa, const M: usize>(&self, isa: I, first: usize) {
        let place = Place::new(self.group, self.next, first..first + M, self.input.rows);
        let (mut gates, mut ups) = ([[0.0; LANES]; M], [[0.0; LANES]; M]);
        tile_sums(isa, self.input, self.gate, (place, &mut gates));
        tile_sums(isa, self.input, self.up, (place, &mut ups));
        let column = self.group * LANES;
        let width = LANES.min(self.gate.rows - column);
        for (index, (gate, up)) in gates.iter().zip(&ups).enumerate() {
            let (gate, up) = (isa.load(gate), isa.load(up));
            let start = (first + index) * self.gate.rows + column;
            // SAFETY: rows `first..` of this group's columns are written by this kernel alone.
            #[expect(unsafe_code, reason = "groups are apart, which Rust cannot see")]
            let out = unsafe { self.out.range(start, width) };
            let one = isa.splat(1.0);
            let divisor = isa.add(one, isa.exp(isa.sub(isa.splat(0.0), gate)));
            put(isa, Put::Store, isa.mul(isa.div(gate, divisor), up), out);
        }
    }
}

/// What a tile computes: a group of outputs for some rows.
#[derive(Clone, Copy)]
struct Place {
    group: usize,
    /// The first row.
    first: usize,
    /// The group whose weights are fetched meanwhile.
    next: Option<usize>,
}

impl Place {
    /// Weights are fetched by the last tile of the rows alone: what comes earlier would be pushed
    /// out of the first cache again by the rows of the tiles between.
    #[inline(always)]
    fn new(group: usize, next: Option<usize>, tile: Range<usize>, rows: usize) -> Place {
        let next = if tile.end == rows { next } else { None };
        let first = tile.start;
        Place { group, first, next }
    }
}

/// The results of a group for the rows `first..first + M`, which lie in one panel; they are 0 before.
#[inline(always)]
fn tile_sums<I: Isa, const M: usize>(
    isa: I,
    input: &Rows,
    matrix: &Packed,
    (place, sums): (Place, &mut [[f32; LANES]; M]),
) {
    let (group, first, blocks) = (place.group, place.first, input.blocks());
    let panel = first / PANEL * blocks..(first / PANEL + 1) * blocks;
    let tile = Tile {
        input,
        blocks: &input.panels[panel.clone()],
        lower: input.lower.get(panel).unwrap_or_default(),
        slot: first % PANEL,
    };
    let weights = group * blocks..(group + 1) * blocks;
    let ahead = place
        .next
        .map_or(0..0, |next| next * blocks..(next + 1) * blocks);
    let parts = &matrix.parts;
    let ranges = (weights, ahead);
    match matrix.dtype {
        Dtype::Q4_0 => tile.sums::<I, Q4_0, 4, M>(isa, parts, ranges, sums),
        Dtype::Q4_1 => tile.sums::<I, Q4_1, 4, M>(isa, parts, ranges, sums),
        Dtype::Q5_0 => tile.sums::<I, Q5_0, 5, M>(isa, parts, ranges, sums),
        Dtype::Q5_1 => tile.sums::<I, Q5_1, 5, M>(isa, parts, ranges, sums),
        Dtype::Q8_0 => tile.sums::<I, Q8_0, 8, M>(isa, parts, ranges, sums),
        Dtype::Q4K => tile.sums::<I, Q4K, 4, M>(isa, parts, ranges, sums),
        Dtype::Q5K => tile.sums::<I, Q5K, 5, M>(isa, parts, ranges, sums),
        Dtype::Q6K => tile.sums::<I, Q6K, 6, M>(isa, parts, ranges, sums),
        _ => tile.dense_sums(isa, matrix, (group, first), sums),
    }
}

/// Up to [`PANEL`] rows of one panel.
struct Tile<'a> {
    input: &'a Rows,
    /// Those of the panel.
    blocks: &'a [PanelBlock],
    /// The same, if any row may be fine.
    lower: &'a [Lower],
    /// Place of the first row in the panel.
    slot: usize,
}

/// The `M` entries of a panel's block that belong to the tile.
#[inline(always)]
fn of_tile<T, const M: usize>(panel: &[T; PANEL], slot: usize) -> &[T; M] {
    panel[slot..]
        .first_chunk()
        .expect("a tile lies in one panel")
}

impl Tile<'_> {
    #[inline(always)]
    fn sums<
        I: Isa,
        W: Format<Quants: Quants<Lines = [Line; L]>>,
        const L: usize,
        const M: usize,
    >(
        &self,
        isa: I,
        parts: &Parts,
        (weights, ahead): (Range<usize>, Range<usize>),
        out: &mut [[f32; LANES]; M],
    ) {
        let affine = Affine::of(parts, &weights);
        isa.run(QuantisedTile::<W, M> {
            tile: self,
            lines: lines_of(&parts.lines, (weights, ahead)),
            affine,
            out,
        });
    }

    /// The same of weights that are not quantised.
    #[inline(always)]
    fn dense_sums<I: Isa, const M: usize>(
        &self,
        isa: I,
        matrix: &Packed,
        (group, first): (usize, usize),
        out: &mut [[f32; LANES]; M],
    ) {
        let parts = &matrix.parts;
        let columns = group * matrix.cols..(group + 1) * matrix.cols;
        let mut sums = [isa.splat(0.0); M];
        match matrix.dtype {
            Dtype::F16 => {
                for (column, weights) in parts.scales[columns].iter().enumerate() {
                    let weights = isa.load_half(&weights.0);
                    self.add_column::<I, M>(isa, (first, column), weights, &mut sums);
                }
            }
            Dtype::BF16 => {
                for (column, weights) in parts.scales[columns].iter().enumerate() {
                    let weights = isa.load_brain(&weights.0);
                    self.add_column::<I, M>(isa, (first, column), weights, &mut sums);
                }
            }
            _ => {
                for (column, weights) in parts.floats[columns].iter().enumerate() {
                    self.add_column::<I, M>(isa, (first, column), isa.load(weights), &mut sums);
                }
            }
        }
        for (out, sums) in out.iter_mut().zip(&sums) {
            isa.store(*sums, out);
        }
    }

    /// Adds one column of weights that are not quantised, times the rows' own values.
    #[inline(always)]
    fn add_column<I: Isa, const M: usize>(
        &self,
        isa: I,
        (first, column): (usize, usize),
        weights: I::F,
        sums: &mut [I::F; M],
    ) {
        for (row, sum) in sums.iter_mut().enumerate() {
            let value = self.input.floats[(first + row) * self.input.cols + column];
            *sum = isa.fma(weights, isa.splat(value), *sum);
        }
    }
}
