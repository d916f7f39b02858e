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

/// The same block of all rows of a panel.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub(crate) struct PanelBlock {
    pub(crate) quants: [[i8; BLOCK]; PANEL],
    /// What one step of a quant is worth.
    pub(crate) scales: [f32; PANEL],
    /// The sum of a row's quants.
    pub(crate) sums: [i32; PANEL],
    /// The sum of the first 16 of them.
    pub(crate) firsts: [i32; PANEL],
    /// The sum as a number: `scale × sum`.
    pub(crate) totals: [f32; PANEL],
    /// Which rows are fine, a bit each: their quants are `128 × quants + lower`.
    pub(crate) fine: u16,
}

const EMPTY: PanelBlock = PanelBlock {
    quants: [[0; BLOCK]; PANEL],
    scales: [0.0; PANEL],
    sums: [0; PANEL],
    firsts: [0; PANEL],
    totals: [0.0; PANEL],
    fine: 0,
};

/// The lower seven bits of the fine rows of a panel's block. Of other rows they are of no meaning.
pub(crate) type Lower = [[i8; BLOCK]; PANEL];

/// Quantised rows.
#[derive(Debug)]
pub(crate) struct Rows {
    precision: Precision,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// The blocks of the first panel, then those of the next.
    pub(crate) panels: Vec<PanelBlock>,
    /// One for each of them; empty if no row can be fine.
    pub(crate) lower: Vec<Lower>,
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
            panels: Vec::new(),
            lower: Vec::new(),
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
        sized(&mut self.panels, blocks, EMPTY);
        let lower = if self.precision == Precision::Coarse {
            0
        } else {
            blocks
        };
        sized(&mut self.lower, lower, [[0; BLOCK]; PANEL]);
        let floats = if keep_floats { rows * cols } else { 0 };
        sized(&mut self.floats, floats, 0.0);
    }

    /// Bytes of the buffers as they are now.
    pub(crate) fn bytes(&self) -> usize {
        size_of::<PanelBlock>() * self.panels.capacity()
            + size_of::<Lower>() * self.lower.capacity()
            + size_of::<f32>() * self.floats.capacity()
    }

    /// The rows as something that several threads fill, each its own panels.
    pub(crate) fn writer(&mut self) -> RowsWriter<'_> {
        RowsWriter {
            precision: self.precision,
            blocks: self.blocks(),
            cols: self.cols,
            panels: Disjoint::new(&mut self.panels),
            lower: Disjoint::new(&mut self.lower),
            floats: Disjoint::new(&mut self.floats),
        }
    }
}

/// See [`Rows::writer`].
pub(crate) struct RowsWriter<'a> {
    precision: Precision,
    blocks: usize,
    cols: usize,
    panels: Disjoint<'a, PanelBlock>,
    lower: Disjoint<'a, Lower>,
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
                precision: self.precision,
                cols: self.cols,
                blocks: self.panels.range(start, len),
                lower: self.lower.range(lower.0, lower.1),
                floats: self.floats.range(floats.0, floats.1),
            }
        }
    }
}

/// One panel, to be filled row by row.
pub(crate) struct PanelMut<'a> {
    precision: Precision,
    cols: usize,
    blocks: &'a mut [PanelBlock],
    lower: &'a mut [Lower],
    floats: &'a mut [f32],
}

impl PanelMut<'_> {
    /// Quantises a row into place `slot` of the panel.
    #[inline(always)]
    pub(crate) fn put<I: Isa>(&mut self, isa: I, slot: usize, row: &[f32]) {
        if !self.floats.is_empty() {
            self.floats[slot * self.cols..][..self.cols].copy_from_slice(row);
        }
        let blocks = row.as_chunks::<BLOCK>().0;
        // The square of the largest value beyond which a block is fine.
        let most = match self.precision {
            Precision::Coarse => f32::INFINITY,
            Precision::Fine => f32::NEG_INFINITY,
            Precision::Outliers(beyond) => {
                let mut squares = 0.0;
                for values in blocks {
                    let largest = largest(isa, values);
                    squares += largest * largest;
                }
                f32::from(beyond) * squares / blocks.len() as f32
            }
        };
        for (block, values) in blocks.iter().enumerate() {
            let largest = largest(isa, values);
            if largest * largest > most {
                self.put_fine(isa, (block, slot), (values, largest));
            } else {
                self.put_coarse(isa, (block, slot), (values, largest));
            }
        }
    }

    /// Quantises a block: its largest value becomes ±127.
    #[inline(always)]
    fn put_coarse<I: Isa>(&mut self, isa: I, place: Place, values: (&[f32; BLOCK], f32)) {
        let (block, slot) = place;
        let (scale, [low, high]) = quants(isa, values, 127.0);
        store(isa, low, high, &mut self.blocks[block].quants[slot]);
        self.blocks[block].fine &= !(1 << slot);
        self.put_sums(isa, place, scale, [low, high]);
    }

    /// The same to 128 times as many steps, in two parts.
    #[inline(always)]
    fn put_fine<I: Isa>(&mut self, isa: I, place: Place, values: (&[f32; BLOCK], f32)) {
        let (block, slot) = place;
        let (scale, [low, high]) = quants(isa, values, 127.0 * 128.0);
        // To the nearest multiple of 128, which leaves -64 to 63.
        let half = isa.splat_int(64);
        let upper_low = isa.down_7(isa.add_int(low, half));
        let upper_high = isa.down_7(isa.add_int(high, half));
        store(
            isa,
            upper_low,
            upper_high,
            &mut self.blocks[block].quants[slot],
        );
        let rest_low = isa.sub_int(low, isa.up_7(upper_low));
        let rest_high = isa.sub_int(high, isa.up_7(upper_high));
        store(isa, rest_low, rest_high, &mut self.lower[block][slot]);
        self.blocks[block].fine |= 1 << slot;
        self.put_sums(isa, place, scale, [low, high]);
    }

    #[inline(always)]
    fn put_sums<I: Isa>(
        &mut self,
        isa: I,
        (block, slot): Place,
        scale: f32,
        [low, high]: [I::I; 2],
    ) {
        let first = isa.total(low);
        let sum = first + isa.total(high);
        let block = &mut self.blocks[block];
        block.scales[slot] = scale;
        block.sums[slot] = sum;
        block.firsts[slot] = first;
        block.totals[slot] = scale * sum as f32;
    }
}

/// A block, and a row's place in it.
type Place = (usize, usize);

/// The largest value of a block, whatever its sign.
#[inline(always)]
fn largest<I: Isa>(isa: I, values: &[f32; BLOCK]) -> f32 {
    let halves = values.as_chunks::<LANES>().0;
    let (low, high) = (isa.load(&halves[0]), isa.load(&halves[1]));
    isa.largest(isa.max(isa.abs(low), isa.abs(high)))
}

/// The quants of a block whose largest value becomes ±`most`, and what one step of them is worth.
#[inline(always)]
fn quants<I: Isa>(isa: I, (values, largest): (&[f32; BLOCK], f32), most: f32) -> (f32, [I::I; 2]) {
    let halves = values.as_chunks::<LANES>().0;
    // A block of zeros, or of values so small that the inverse would overflow, is all zeros.
    let steps = if largest > 1e-30 { most / largest } else { 0.0 };
    let (low, high) = (isa.load(&halves[0]), isa.load(&halves[1]));
    let low = isa.round(isa.mul(low, isa.splat(steps)));
    let high = isa.round(isa.mul(high, isa.splat(steps)));
    (largest / most, [low, high])
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
