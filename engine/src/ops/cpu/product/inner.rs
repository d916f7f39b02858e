//! The inner loop of a matrix product: a group of quantised weights and up to a panel of rows.

use super::super::isa::{Isa, Kernel, LANES, unrolled};
use super::super::pack::BLOCK;
use super::super::rows::PANEL;
use super::format::{Affine, Format, Quants};
use super::{Tile, of_tile};

/// The lines of a group's blocks, and of those that are fetched meanwhile.
pub(super) type Lines<'a, W> = (
    &'a [<<W as Format>::Quants as Quants>::Lines],
    &'a [<<W as Format>::Quants as Quants>::Lines],
);

/// The inner loop: a kernel of its own, so that it is compiled once for all that call it.
pub(super) struct QuantisedTile<'a, W: Format, const M: usize, const FINE: bool> {
    pub(super) tile: &'a Tile<'a>,
    /// The group's, and those of the next one.
    pub(super) lines: Lines<'a, W>,
    pub(super) affine: Affine<'a>,
    pub(super) out: &'a mut [[f32; LANES]; M],
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
