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

use std::ops::Range;

use prompt::gguf::Dtype;

use super::isa::{Isa, Kernel, LANES, Line, unrolled};
use super::pack::{BLOCK, Packed, Parts};
use super::rows::{PANEL, Rows};
use crate::ops::Precision;
use crate::sys::disjoint::Disjoint;
use format::{Affine, Format, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, Quants, lines_of};

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
        let sums = tile_sums::<I, M>(
            isa,
            self.input,
            self.matrix,
            Place::new(self.group, self.next, first..first + M, self.input.rows),
        );
        let column = self.group * LANES;
        let width = LANES.min(self.matrix.rows - column);
        for (index, sums) in sums.into_iter().enumerate() {
            let start = (first + index) * self.matrix.rows + column;
            // SAFETY: rows `first..` of this group's columns are written by this kernel alone.
            #[expect(unsafe_code, reason = "groups are apart, which Rust cannot see")]
            let out = unsafe { self.out.range(start, width) };
            put(isa, self.put, sums, out);
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
            8.. if I::WIDE_TILES => {
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
        let gates = tile_sums::<I, M>(isa, self.input, self.gate, place);
        let ups = tile_sums::<I, M>(isa, self.input, self.up, place);
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

/// The results of a group for the rows `first..first + M`, which lie in one panel.
#[inline(always)]
fn tile_sums<I: Isa, const M: usize>(
    isa: I,
    input: &Rows,
    matrix: &Packed,
    place: Place,
) -> [I::F; M] {
    let (group, first, blocks) = (place.group, place.first, input.blocks());
    let tile = Tile {
        input,
        blocks: (first / PANEL * blocks, blocks),
        slot: first % PANEL,
    };
    let weights = group * blocks..(group + 1) * blocks;
    let ahead = place
        .next
        .map_or(0..0, |next| next * blocks..(next + 1) * blocks);
    let columns = group * matrix.cols..(group + 1) * matrix.cols;
    let parts = &matrix.parts;
    let ranges = (weights, ahead);
    match matrix.dtype {
        Dtype::Q4_0 => tile.sums::<I, Q4_0, 4, M>(isa, parts, ranges),
        Dtype::Q4_1 => tile.sums::<I, Q4_1, 4, M>(isa, parts, ranges),
        Dtype::Q5_0 => tile.sums::<I, Q5_0, 5, M>(isa, parts, ranges),
        Dtype::Q5_1 => tile.sums::<I, Q5_1, 5, M>(isa, parts, ranges),
        Dtype::Q8_0 => tile.sums::<I, Q8_0, 8, M>(isa, parts, ranges),
        Dtype::Q4K => tile.sums::<I, Q4K, 4, M>(isa, parts, ranges),
        Dtype::Q5K => tile.sums::<I, Q5K, 5, M>(isa, parts, ranges),
        Dtype::Q6K => tile.sums::<I, Q6K, 6, M>(isa, parts, ranges),
        Dtype::F16 => {
            let mut sums = [isa.splat(0.0); M];
            for (column, weights) in parts.scales[columns].iter().enumerate() {
                tile.add_column::<I, M>(isa, (first, column), isa.load_half(&weights.0), &mut sums);
            }
            sums
        }
        Dtype::BF16 => {
            let mut sums = [isa.splat(0.0); M];
            for (column, weights) in parts.scales[columns].iter().enumerate() {
                let weights = isa.load_brain(&weights.0);
                tile.add_column::<I, M>(isa, (first, column), weights, &mut sums);
            }
            sums
        }
        Dtype::F32 | Dtype::Other(_) => {
            let mut sums = [isa.splat(0.0); M];
            for (column, weights) in parts.floats[columns].iter().enumerate() {
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
    ) -> [I::F; M] {
        let mut out = [[0.0; LANES]; M];
        let tile = self;
        let affine = Affine::of(parts, &weights);
        let lines = lines_of(&parts.lines, (weights, ahead));
        match self.input.precision {
            Precision::Coarse => {
                isa.run(QuantisedTile::<W, M, false> {
                    tile,
                    lines,
                    affine,
                    out: &mut out,
                });
            }
            Precision::Fine => {
                isa.run(QuantisedTile::<W, M, true> {
                    tile,
                    lines,
                    affine,
                    out: &mut out,
                });
            }
        }
        let mut sums = [isa.splat(0.0); M];
        for (sums, out) in sums.iter_mut().zip(&out) {
            *sums = isa.load(out);
        }
        sums
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

/// The lines of a group's blocks, and of those that are fetched meanwhile.
type Lines<'a, W> = (
    &'a [<<W as Format>::Quants as Quants>::Lines],
    &'a [<<W as Format>::Quants as Quants>::Lines],
);

/// The inner loop: a kernel of its own, so that it is compiled once for all that call it.
struct QuantisedTile<'a, W: Format, const M: usize, const FINE: bool> {
    tile: &'a Tile<'a>,
    /// The group's, and those of the next one.
    lines: Lines<'a, W>,
    affine: Affine<'a>,
    out: &'a mut [[f32; LANES]; M],
}

impl<W: Format, const M: usize, const FINE: bool> Kernel for QuantisedTile<'_, W, M, FINE> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        if I::BY_PANEL && M == PANEL {
            self.by_panel(isa);
        } else {
            self.by_block(isa);
        }
    }
}

impl<W: Format, const M: usize, const FINE: bool> QuantisedTile<'_, W, M, FINE> {
    /// Unpacks a block of weights once for all rows.
    #[inline(always)]
    fn by_block<I: Isa>(self, isa: I) {
        let Tile {
            input,
            blocks: (first, count),
            slot,
        } = *self.tile;
        let affine = &self.affine;
        let mut out = [isa.splat(0.0); M];
        let (lines, ahead) = self.lines;
        for (block, lines) in lines.iter().take(count).enumerate() {
            if let Some(ahead) = ahead.get(block) {
                // A group is too short for the processor to see a stream, so that it would fetch
                // and compute by turns: with 16 rows that took a third of the time.
                isa.prefetch(ahead);
            }
            let weights = W::Quants::unpack(isa, lines);
            let scales = W::scale(isa, affine, block);
            let place = first + block;
            let quants = of_tile::<_, M>(&input.quants[place], slot);
            let factors = of_tile::<_, M>(&input.scales[place], slot);
            let sums = of_tile::<_, M>(&input.sums[place], slot);
            if W::HALVES {
                let second = W::second_scale(isa, affine, block);
                let firsts = of_tile::<_, M>(&input.firsts[place], slot);
                unrolled!(I, row < M, {
                    let starts = [firsts[row], sums[row] - firsts[row]];
                    let lower = if FINE {
                        Some(&of_tile::<_, M>(&input.lower[place], slot)[row])
                    } else {
                        None
                    };
                    let input = (&quants[row], lower);
                    let [a, b] = halves::<I, W>(isa, &weights, input, starts);
                    let factor = isa.splat(factors[row]);
                    out[row] = isa.fma(a, isa.mul(scales, factor), out[row]);
                    out[row] = isa.fma(b, isa.mul(second, factor), out[row]);
                });
                continue;
            }
            unrolled!(I, row < M, {
                let start = isa.splat_int(-W::offset::<I>() * sums[row]);
                let dot = if FINE {
                    let lower = of_tile::<_, M>(&input.lower[place], slot);
                    // Two chains of dependent products run side by side; one of twice the length
                    // would outgrow the processor's window.
                    let upper = W::Quants::dot(isa, &weights, &quants[row], isa.splat_int(0));
                    let lower = W::Quants::dot(isa, &weights, &lower[row], start);
                    isa.add_int(isa.up_7(upper), lower)
                } else {
                    W::Quants::dot(isa, &weights, &quants[row], start)
                };
                let scale = isa.mul(scales, isa.splat(factors[row]));
                out[row] = isa.fma(isa.to_float(dot), scale, out[row]);
            });
            if W::MINIMUM {
                let minimums = W::minimum(isa, affine, block);
                let totals = of_tile::<_, M>(&input.totals[place], slot);
                unrolled!(I, row < M, {
                    out[row] = isa.fma(minimums, isa.splat(totals[row]), out[row]);
                });
            }
        }
        for (stored, out) in self.out.iter_mut().zip(out) {
            isa.store(out, stored);
        }
    }

    /// The same operations on each row's sums, in an order that needs few registers: a block's
    /// integer products of all rows first, left in memory, then what they add to the sums.
    #[inline(always)]
    fn by_panel<I: Isa>(self, isa: I) {
        let Tile {
            input,
            blocks: (first, count),
            slot,
        } = *self.tile;
        let affine = &self.affine;
        let (lines, ahead) = self.lines;
        let (mut upper, mut lower) = ([[0; LANES]; M], [[0; LANES]; M]);
        for (block, lines) in lines.iter().take(count).enumerate() {
            if let Some(ahead) = ahead.get(block) {
                isa.prefetch(ahead);
            }
            let place = first + block;
            let factors = of_tile::<_, M>(&input.scales[place], slot);
            let sums = of_tile::<_, M>(&input.sums[place], slot);
            let mut half = 0;
            while half < 1 + usize::from(W::HALVES) {
                let lines = (lines, half == 1);
                let quants = of_tile::<_, M>(&input.quants[place], slot);
                W::Quants::dots(isa, lines, quants, &mut upper);
                if FINE {
                    let quants = of_tile::<_, M>(&input.lower[place], slot);
                    W::Quants::dots(isa, lines, quants, &mut lower);
                }
                let scale = if half == 0 {
                    W::scale(isa, affine, block)
                } else {
                    W::second_scale(isa, affine, block)
                };
                let firsts = of_tile::<_, M>(&input.firsts[place], slot);
                let mut starts = [0; M];
                for (row, start) in starts.iter_mut().enumerate() {
                    let sum = match (W::HALVES, half) {
                        (false, _) => sums[row],
                        (true, 0) => firsts[row],
                        _ => sums[row] - firsts[row],
                    };
                    *start = -W::offset::<I>() * sum;
                }
                for (row, start) in starts.iter().enumerate() {
                    let mut dot = isa.load_int(&upper[row]);
                    if FINE {
                        dot = isa.add_int(isa.up_7(dot), isa.load_int(&lower[row]));
                    }
                    if W::offset::<I>() != 0 {
                        dot = isa.add_int(dot, isa.splat_int(*start));
                    }
                    let scale = isa.mul(scale, isa.splat(factors[row]));
                    let out = &mut self.out[row];
                    isa.store(isa.fma(isa.to_float(dot), scale, isa.load(out)), out);
                }
                half += 1;
            }
            if W::MINIMUM {
                let minimums = W::minimum(isa, affine, block);
                let totals = of_tile::<_, M>(&input.totals[place], slot);
                for (out, total) in self.out.iter_mut().zip(totals) {
                    isa.store(isa.fma(minimums, isa.splat(*total), isa.load(out)), out);
                }
            }
        }
    }
}

/// The products of a block's first and last 16 columns; `sums` are those of their quants.
#[inline(always)]
fn halves<I: Isa, W: Format>(
    isa: I,
    weights: &I::Weights,
    (quants, lower): (&[i8; BLOCK], Option<&[i8; BLOCK]>),
    sums: [i32; 2],
) -> [I::F; 2] {
    let mut products = [isa.splat(0.0); 2];
    let mut half = 0;
    while half < 2 {
        let second = half == 1;
        let start = isa.splat_int(-W::offset::<I>() * sums[half]);
        let dot = match lower {
            Some(lower) => {
                let upper = isa.dot_half(weights, second, quants, isa.splat_int(0));
                let lower = isa.dot_half(weights, second, lower, start);
                isa.add_int(isa.up_7(upper), lower)
            }
            None => isa.dot_half(weights, second, quants, start),
        };
        products[half] = isa.to_float(dot);
        half += 1;
    }
    products
}
