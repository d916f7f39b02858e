//! What does a matrix product read?
//!
//! Rows of int8 with one f32 scale per 32 columns, quantised once for all products that share
//! them. Rows lie in *panels* of [`PANEL`]: inside a panel, the same block of all rows is
//! contiguous, so the product's inner loop has one pointer and constant offsets, and a panel with
//! a group of weights fits the first cache. A row is quantised by itself; which panel it lies in
//! changes its address and no bit of it.

use super::attention::DIM_MAX;
use super::isa::{Isa, Kernel, LANES};
use super::pack::BLOCK;
use crate::ops::{Precision, sized};
use crate::sys::disjoint::Disjoint;

/// Rows in a panel: as many as there are registers for, beside eight of weights.
pub(crate) const PANEL: usize = 12;

/// Quantised rows.
#[derive(Debug)]
pub(crate) struct Rows {
    pub(crate) precision: Precision,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) quants: Vec<[[i8; BLOCK]; PANEL]>,
    /// The lower seven bits of fine quants; empty for coarse ones.
    pub(crate) lower: Vec<[[i8; BLOCK]; PANEL]>,
    /// What one step of a quant is worth.
    pub(crate) scales: Vec<[f32; PANEL]>,
    /// The sum of a block's quants.
    pub(crate) sums: Vec<[i32; PANEL]>,
    /// The sum of the first 16 of them.
    pub(crate) firsts: Vec<[i32; PANEL]>,
    /// The same as a number: `scale × sum`.
    pub(crate) totals: Vec<[f32; PANEL]>,
    /// The rows before quantisation, for weights that are not quantised; empty if there are none.
    pub(crate) floats: Vec<f32>,
}

impl Rows {
    /// No rows yet.
    pub(crate) fn new(precision: Precision) -> Rows {
        Rows {
            precision,
            rows: 0,
            cols: 0,
            quants: Vec::new(),
            lower: Vec::new(),
            scales: Vec::new(),
            sums: Vec::new(),
            firsts: Vec::new(),
            totals: Vec::new(),
            floats: Vec::new(),
        }
    }

    /// Blocks of 32 columns in a row.
    pub(crate) fn blocks(&self) -> usize {
        self.cols / BLOCK
    }

    /// Sizes the buffers. What they hold until written is of no meaning.
    pub(crate) fn resize(&mut self, rows: usize, cols: usize, keep_floats: bool) {
        (self.rows, self.cols) = (rows, cols);
        let blocks = rows.div_ceil(PANEL) * self.blocks();
        sized(&mut self.quants, blocks, [[0; BLOCK]; PANEL]);
        let lower = if self.precision == Precision::Fine {
            blocks
        } else {
            0
        };
        sized(&mut self.lower, lower, [[0; BLOCK]; PANEL]);
        sized(&mut self.scales, blocks, [0.0; PANEL]);
        sized(&mut self.sums, blocks, [0; PANEL]);
        sized(&mut self.firsts, blocks, [0; PANEL]);
        sized(&mut self.totals, blocks, [0.0; PANEL]);
        let floats = if keep_floats { rows * cols } else { 0 };
        sized(&mut self.floats, floats, 0.0);
    }

    /// Bytes of the buffers as they are now.
    pub(crate) fn bytes(&self) -> usize {
        let per_block = [&self.scales, &self.totals];
        PANEL * BLOCK * (self.quants.capacity() + self.lower.capacity())
            + size_of::<[f32; PANEL]>() * per_block.map(Vec::capacity).iter().sum::<usize>()
            + size_of::<[i32; PANEL]>() * (self.sums.capacity() + self.firsts.capacity())
            + size_of::<f32>() * self.floats.capacity()
    }

    /// The rows as something that several threads fill, each its own panels.
    pub(crate) fn writer(&mut self) -> RowsWriter<'_> {
        RowsWriter {
            blocks: self.blocks(),
            cols: self.cols,
            quants: Disjoint::new(&mut self.quants),
            lower: Disjoint::new(&mut self.lower),
            scales: Disjoint::new(&mut self.scales),
            sums: Disjoint::new(&mut self.sums),
            firsts: Disjoint::new(&mut self.firsts),
            totals: Disjoint::new(&mut self.totals),
            floats: Disjoint::new(&mut self.floats),
        }
    }
}

/// See [`Rows::writer`].
pub(crate) struct RowsWriter<'a> {
    blocks: usize,
    cols: usize,
    quants: Disjoint<'a, [[i8; BLOCK]; PANEL]>,
    lower: Disjoint<'a, [[i8; BLOCK]; PANEL]>,
    scales: Disjoint<'a, [f32; PANEL]>,
    sums: Disjoint<'a, [i32; PANEL]>,
    firsts: Disjoint<'a, [i32; PANEL]>,
    totals: Disjoint<'a, [f32; PANEL]>,
    floats: Disjoint<'a, f32>,
}

impl RowsWriter<'_> {
    /// The panel that starts at row `panel * PANEL`.
    ///
    /// # Safety
    /// No panel may be asked for while it is in use.
    #[expect(unsafe_code, reason = "panels are apart, which Rust cannot see")]
    pub(crate) unsafe fn panel(&self, panel: usize, rows: usize) -> PanelMut<'_> {
        let (start, len) = (panel * self.blocks, self.blocks);
        let lower = if self.lower.is_empty() {
            (0, 0)
        } else {
            (start, len)
        };
        let floats = if self.floats.is_empty() {
            (0, 0)
        } else {
            (panel * PANEL * self.cols, rows * self.cols)
        };
        // SAFETY: the ranges of two panels do not overlap; the caller keeps each to one user.
        unsafe {
            PanelMut {
                cols: self.cols,
                quants: self.quants.range(start, len),
                lower: self.lower.range(lower.0, lower.1),
                scales: self.scales.range(start, len),
                sums: self.sums.range(start, len),
                firsts: self.firsts.range(start, len),
                totals: self.totals.range(start, len),
                floats: self.floats.range(floats.0, floats.1),
            }
        }
    }
}

/// One panel, to be filled row by row.
pub(crate) struct PanelMut<'a> {
    cols: usize,
    quants: &'a mut [[[i8; BLOCK]; PANEL]],
    lower: &'a mut [[[i8; BLOCK]; PANEL]],
    scales: &'a mut [[f32; PANEL]],
    sums: &'a mut [[i32; PANEL]],
    firsts: &'a mut [[i32; PANEL]],
    totals: &'a mut [[f32; PANEL]],
    floats: &'a mut [f32],
}

impl PanelMut<'_> {
    /// Quantises a row into place `slot` of the panel.
    #[inline(always)]
    pub(crate) fn put<I: Isa>(&mut self, isa: I, slot: usize, row: &[f32]) {
        if !self.floats.is_empty() {
            self.floats[slot * self.cols..][..self.cols].copy_from_slice(row);
        }
        for (block, values) in row.as_chunks::<BLOCK>().0.iter().enumerate() {
            self.put_block(isa, (block, slot), values);
        }
    }

    /// Quantises one block: the largest value becomes ±127, or ±127 × 128 in fine rows.
    #[inline(always)]
    fn put_block<I: Isa>(&mut self, isa: I, (block, slot): (usize, usize), values: &[f32; BLOCK]) {
        let halves = values.as_chunks::<LANES>().0;
        let (low, high) = (isa.load(&halves[0]), isa.load(&halves[1]));
        let largest = isa.largest(isa.max(isa.abs(low), isa.abs(high)));
        let most = if self.lower.is_empty() {
            127.0
        } else {
            127.0 * 128.0
        };
        // A block of zeros, or of values so small that the inverse would overflow, is all zeros.
        let steps = if largest > 1e-30 { most / largest } else { 0.0 };
        let scale = largest / most;
        let low = isa.round(isa.mul(low, isa.splat(steps)));
        let high = isa.round(isa.mul(high, isa.splat(steps)));
        let first = isa.total(low);
        let sum = first + isa.total(high);
        if self.lower.is_empty() {
            store(isa, low, high, &mut self.quants[block][slot]);
        } else {
            // To the nearest multiple of 128, which leaves -64 to 63.
            let half = isa.splat_int(64);
            let (upper_low, upper_high) = (
                isa.down_7(isa.add_int(low, half)),
                isa.down_7(isa.add_int(high, half)),
            );
            store(isa, upper_low, upper_high, &mut self.quants[block][slot]);
            let rest_low = isa.sub_int(low, isa.up_7(upper_low));
            let rest_high = isa.sub_int(high, isa.up_7(upper_high));
            store(isa, rest_low, rest_high, &mut self.lower[block][slot]);
        }
        self.scales[block][slot] = scale;
        self.sums[block][slot] = sum;
        self.firsts[block][slot] = first;
        self.totals[block][slot] = scale * sum as f32;
    }
}

#[inline(always)]
fn store<I: Isa>(isa: I, low: I::I, high: I::I, to: &mut [i8; BLOCK]) {
    let halves = to.as_chunks_mut::<LANES>().0;
    isa.store_bytes(low, &mut halves[0]);
    isa.store_bytes(high, &mut halves[1]);
}

/// Quantises the rows of a panel from plain f32.
pub(crate) struct Quantise<'a> {
    pub(crate) rows: &'a [f32],
    pub(crate) panel: PanelMut<'a>,
}

impl Kernel for Quantise<'_> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(mut self, isa: I) {
        let cols = self.panel.cols;
        for (slot, row) in self.rows.chunks_exact(cols).enumerate() {
            self.panel.put(isa, slot, row);
        }
    }
}

/// Root-mean-square norm of the rows of a panel, quantised.
pub(crate) struct Norm<'a> {
    pub(crate) rows: &'a [f32],
    pub(crate) weight: &'a [f32],
    pub(crate) eps: f32,
    /// Room for one row.
    pub(crate) scratch: &'a mut [f32],
    pub(crate) panel: PanelMut<'a>,
}

impl Kernel for Norm<'_> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(mut self, isa: I) {
        let cols = self.panel.cols;
        for (slot, row) in self.rows.chunks_exact(cols).enumerate() {
            norm_row(isa, row, (self.weight, self.eps), self.scratch);
            self.panel.put(isa, slot, self.scratch);
        }
    }
}

/// Root-mean-square norm of some rows, left as they are.
pub(crate) struct NormFloats<'a> {
    pub(crate) rows: &'a [f32],
    pub(crate) weight: &'a [f32],
    pub(crate) eps: f32,
    pub(crate) out: &'a mut [f32],
}

impl Kernel for NormFloats<'_> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let cols = self.weight.len();
        let rows = self.rows.chunks_exact(cols);
        for (row, out) in rows.zip(self.out.chunks_exact_mut(cols)) {
            norm_row(isa, row, (self.weight, self.eps), out);
        }
    }
}

/// The same of heads, in place.
pub(crate) struct NormHeads<'a> {
    pub(crate) heads: &'a mut [f32],
    pub(crate) weight: &'a [f32],
    pub(crate) eps: f32,
}

impl Kernel for NormHeads<'_> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let dim = self.weight.len();
        let mut before = [0.0; DIM_MAX];
        for head in self.heads.chunks_exact_mut(dim) {
            before[..dim].copy_from_slice(head);
            norm_row(isa, &before[..dim], (self.weight, self.eps), head);
        }
    }
}

#[inline(always)]
fn norm_row<I: Isa>(isa: I, row: &[f32], (weight, eps): (&[f32], f32), out: &mut [f32]) {
    let cols = row.len() as f32;
    let row = row.as_chunks::<LANES>().0;
    let mut squares = isa.splat(0.0);
    for values in row {
        let values = isa.load(values);
        squares = isa.fma(values, values, squares);
    }
    let scale = isa.splat(1.0 / (isa.sum(squares) / cols + eps).sqrt());
    let weight = weight.as_chunks::<LANES>().0;
    let out = out.as_chunks_mut::<LANES>().0;
    for ((out, values), weight) in out.iter_mut().zip(row).zip(weight) {
        let value = isa.mul(isa.load(values), scale);
        isa.store(isa.mul(value, isa.load(weight)), out);
    }
}
