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

use super::isa::{Isa, Kernel, LANES, Line};
use super::pack::{Packed, Scales, Values};
use super::rows::{PANEL, Rows};
use crate::sys::disjoint::Disjoint;

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
    pub(crate) put: Put,
    /// Rows of `matrix.rows` outputs; this group's columns are this kernel's alone.
    pub(crate) out: &'a Disjoint<'a, f32>,
}

impl Kernel for GroupProduct<'_> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let mut first = 0;
        while first < self.input.rows {
            let left = (PANEL - first % PANEL).min(self.input.rows - first);
            first += match left {
                12.. => self.tile::<I, 12>(isa, first),
                8.. => self.tile::<I, 8>(isa, first),
                4.. => self.tile::<I, 4>(isa, first),
                2.. => self.tile::<I, 2>(isa, first),
                _ => self.tile::<I, 1>(isa, first),
            };
        }
    }
}

impl GroupProduct<'_> {
    /// Computes and puts the tile of rows `first..first + M`; returns M.
    #[inline(always)]
    fn tile<I: Isa, const M: usize>(&self, isa: I, first: usize) -> usize {
        let sums = tile_sums::<I, M>(isa, self.input, self.matrix, (self.group, first));
        let column = self.group * LANES;
        let width = LANES.min(self.matrix.rows - column);
        for (index, sums) in sums.into_iter().enumerate() {
            let start = (first + index) * self.matrix.rows + column;
            // SAFETY: rows `first..` of this group's columns are written by this kernel alone.
            #[expect(unsafe_code, reason = "groups are apart, which Rust cannot see")]
            let out = unsafe { self.out.range(start, width) };
            put(isa, self.put, sums, out);
        }
        M
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
    pub(crate) out: &'a Disjoint<'a, f32>,
}

impl Kernel for GatedProduct<'_> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let mut first = 0;
        while first < self.input.rows {
            let left = (PANEL - first % PANEL).min(self.input.rows - first);
            first += match left {
                12.. => self.tile::<I, 12>(isa, first),
                8.. => self.tile::<I, 8>(isa, first),
                4.. => self.tile::<I, 4>(isa, first),
                2.. => self.tile::<I, 2>(isa, first),
                _ => self.tile::<I, 1>(isa, first),
            };
        }
    }
}

impl GatedProduct<'_> {
    #[inline(always)]
    fn tile<I: Isa, const M: usize>(&self, isa: I, first: usize) -> usize {
        let gates = tile_sums::<I, M>(isa, self.input, self.gate, (self.group, first));
        let ups = tile_sums::<I, M>(isa, self.input, self.up, (self.group, first));
        let column = self.group * LANES;
        let width = LANES.min(self.gate.rows - column);
        for (index, (gate, up)) in gates.into_iter().zip(ups).enumerate() {
            let start = (first + index) * self.gate.rows + column;
            // SAFETY: rows `first..` of this group's columns are written by this kernel alone.
            #[expect(unsafe_code, reason = "groups are apart, which Rust cannot see")]
            let out = unsafe { self.out.range(start, width) };
            let one = isa.splat(1.0);
            let divisor = isa.add(one, isa.exp(isa.sub(isa.splat(0.0), gate)));
            put(isa, Put::Store, isa.mul(isa.div(gate, divisor), up), out);
        }
        M
    }
}

/// The results of a group for the rows `first..first + M`, which lie in one panel.
#[inline(always)]
fn tile_sums<I: Isa, const M: usize>(
    isa: I,
    input: &Rows,
    matrix: &Packed,
    (group, first): (usize, usize),
) -> [I::F; M] {
    let blocks = input.blocks();
    let tile = Tile { input, blocks: (first / PANEL * blocks, blocks), slot: first % PANEL };
    let weights = group * blocks..(group + 1) * blocks;
    let columns = group * matrix.cols..(group + 1) * matrix.cols;
    match &matrix.values {
        Values::Q4_0 { lines, scales } => {
            let lines = &lines.as_chunks::<4>().0[weights.clone()];
            tile.nibbles_from_minus_8::<I, M>(isa, lines, &scales[weights])
        }
        Values::Q4_1 { lines, scales, minimums } => {
            let lines = &lines.as_chunks::<4>().0[weights.clone()];
            let affine = (&scales[weights.clone()], &minimums[weights]);
            tile.nibbles_and_minimum::<I, M>(isa, lines, affine)
        }
        Values::Q8_0 { lines, scales } => {
            let lines = &lines.as_chunks::<8>().0[weights.clone()];
            tile.bytes::<I, M>(isa, lines, &scales[weights])
        }
        Values::F16 { columns: all } => {
            let mut sums = [isa.splat(0.0); M];
            for (column, weights) in all[columns].iter().enumerate() {
                tile.add_column::<I, M>(isa, (first, column), isa.load_half(&weights.0), &mut sums);
            }
            sums
        }
        Values::F32 { columns: all } => {
            let mut sums = [isa.splat(0.0); M];
            for (column, weights) in all[columns].iter().enumerate() {
                tile.add_column::<I, M>(isa, (first, column), isa.load(weights), &mut sums);
            }
            sums
        }
    }
}

/// Up to [`PANEL`] rows of one panel.
struct Tile<'a> {
    input: &'a Rows,
    /// First block of the panel, and their number.
    blocks: (usize, usize),
    /// Place of the first row in the panel.
    slot: usize,
}

/// The `M` entries of a panel's block that belong to the tile.
#[inline(always)]
fn of_tile<T, const M: usize>(panel: &[T; PANEL], slot: usize) -> &[T; M] {
    panel[slot..].first_chunk().expect("a tile lies in one panel")
}

impl Tile<'_> {
    #[inline(always)]
    fn of_panel<'a, T>(&self, all: &'a [T]) -> &'a [T] {
        &all[self.blocks.0..][..self.blocks.1]
    }

    #[inline(always)]
    fn nibbles_from_minus_8<I: Isa, const M: usize>(
        &self,
        isa: I,
        lines: &[[Line; 4]],
        scales: &[Scales],
    ) -> [I::F; M] {
        let mut out = [isa.splat(0.0); M];
        let quants = self.of_panel(&self.input.quants).iter();
        let factors = self.of_panel(&self.input.scales).iter();
        let sums = self.of_panel(&self.input.sums).iter();
        let weights = lines.iter().zip(scales);
        for (((quants, factors), sums), (lines, scales)) in quants.zip(factors).zip(sums).zip(weights) {
            let weights = isa.nibbles(lines);
            let scales = isa.load_half(&scales.0);
            let quants = of_tile::<_, M>(quants, self.slot);
            let factors = of_tile::<_, M>(factors, self.slot);
            let sums = of_tile::<_, M>(sums, self.slot);
            for row in 0..M {
                let dot = isa.dot_nibbles(&weights, &quants[row], -8 * sums[row]);
                let scale = isa.mul(scales, isa.splat(factors[row]));
                out[row] = isa.fma(isa.to_float(dot), scale, out[row]);
            }
        }
        out
    }

    #[inline(always)]
    fn nibbles_and_minimum<I: Isa, const M: usize>(
        &self,
        isa: I,
        lines: &[[Line; 4]],
        (scales, minimums): (&[Scales], &[Scales]),
    ) -> [I::F; M] {
        let mut out = [isa.splat(0.0); M];
        let quants = self.of_panel(&self.input.quants).iter();
        let factors = self.of_panel(&self.input.scales).iter();
        let totals = self.of_panel(&self.input.totals).iter();
        let weights = lines.iter().zip(scales).zip(minimums);
        for (((quants, factors), totals), ((lines, scales), minimums)) in
            quants.zip(factors).zip(totals).zip(weights)
        {
            let weights = isa.nibbles(lines);
            let scales = isa.load_half(&scales.0);
            let minimums = isa.load_half(&minimums.0);
            let quants = of_tile::<_, M>(quants, self.slot);
            let factors = of_tile::<_, M>(factors, self.slot);
            let totals = of_tile::<_, M>(totals, self.slot);
            for row in 0..M {
                let dot = isa.dot_nibbles(&weights, &quants[row], 0);
                let scale = isa.mul(scales, isa.splat(factors[row]));
                out[row] = isa.fma(isa.to_float(dot), scale, out[row]);
                out[row] = isa.fma(minimums, isa.splat(totals[row]), out[row]);
            }
        }
        out
    }

    #[inline(always)]
    fn bytes<I: Isa, const M: usize>(
        &self,
        isa: I,
        lines: &[[Line; 8]],
        scales: &[Scales],
    ) -> [I::F; M] {
        let mut out = [isa.splat(0.0); M];
        let quants = self.of_panel(&self.input.quants).iter();
        let factors = self.of_panel(&self.input.scales).iter();
        let sums = self.of_panel(&self.input.sums).iter();
        let weights = lines.iter().zip(scales);
        for (((quants, factors), sums), (lines, scales)) in quants.zip(factors).zip(sums).zip(weights) {
            let weights = isa.bytes(lines);
            let scales = isa.load_half(&scales.0);
            let quants = of_tile::<_, M>(quants, self.slot);
            let factors = of_tile::<_, M>(factors, self.slot);
            let sums = of_tile::<_, M>(sums, self.slot);
            for row in 0..M {
                let dot = isa.dot_bytes(&weights, &quants[row], sums[row]);
                let scale = isa.mul(scales, isa.splat(factors[row]));
                out[row] = isa.fma(isa.to_float(dot), scale, out[row]);
            }
        }
        out
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
