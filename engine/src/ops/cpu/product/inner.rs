//! The inner loop of a matrix product: a group of quantised weights and up to a panel of rows.

use super::super::isa::{Addition, Dots, Finish, Isa, Kernel, LANES, unrolled};
use super::super::pack::BLOCK;
use super::super::rows::{Lower, PanelBlock};
use super::format::{Affine, Format, Quants};
use super::{Tile, of_tile};

/// The lines of a group's blocks, and of those that are fetched meanwhile.
pub(super) type Lines<'a, W> = (
    &'a [<<W as Format>::Quants as Quants>::Lines],
    &'a [<<W as Format>::Quants as Quants>::Lines],
);

/// The inner loop: a kernel of its own, so that it is compiled once for all that call it.
pub(super) struct QuantisedTile<'a, W: Format, const M: usize> {
    pub(super) tile: &'a Tile<'a>,
    /// The group's, and those of the next one.
    pub(super) lines: Lines<'a, W>,
    pub(super) affine: Affine<'a>,
    pub(super) out: &'a mut [[f32; LANES]; M],
}

impl<W: Format, const M: usize> Kernel for QuantisedTile<'_, W, M> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        if I::BY_PANEL && M >= 8 {
            self.by_panel(isa);
        } else {
            self.by_block(isa);
        }
    }
}

/// Quants of a block, of each row of a tile.
type TileQuants<const M: usize> = [[i8; BLOCK]; M];

/// What a tile reads of its input in one block.
struct Block<'a, const M: usize> {
    quants: &'a TileQuants<M>,
    /// Of fine rows; where it is missing, none is.
    lower: Option<&'a TileQuants<M>>,
    factors: &'a [f32; M],
    sums: &'a [i32; M],
    firsts: &'a [i32; M],
    totals: &'a [f32; M],
    /// A bit for each row that is fine.
    fine: u16,
}

impl<const M: usize> Block<'_, M> {
    /// The sum of a row's quants, or of its first or last 16.
    #[inline(always)]
    fn sum<W: Format>(&self, row: usize, second: bool) -> i32 {
        match (W::HALVES, second) {
            (false, _) => self.sums[row],
            (true, false) => self.firsts[row],
            (true, true) => self.sums[row] - self.firsts[row],
        }
    }

    /// The parts of the rows' quants, if all are fine and better taken at once.
    #[inline(always)]
    fn all_fine<W: Format>(&self) -> Option<(&TileQuants<M>, &TileQuants<M>)> {
        let all = W::Quants::FINE_AT_ONCE && self.fine == (1 << M) - 1;
        self.lower.filter(|_| all).map(|lower| (self.quants, lower))
    }

    /// The lower part of a row's quants, if it is fine.
    #[inline(always)]
    fn lower(&self, row: usize) -> Option<&[i8; BLOCK]> {
        if self.fine >> row & 1 == 0 {
            return None;
        }
        self.lower.map(|lower| &lower[row])
    }
}

impl<const M: usize> Block<'_, M> {
    #[inline(always)]
    fn of<'a>((panel, lower): (&'a PanelBlock, Option<&'a Lower>), slot: usize) -> Block<'a, M> {
        Block {
            quants: of_tile::<_, M>(&panel.quants, slot),
            lower: lower.map(|lower| of_tile::<_, M>(lower, slot)),
            factors: of_tile::<_, M>(&panel.scales, slot),
            sums: of_tile::<_, M>(&panel.sums, slot),
            firsts: of_tile::<_, M>(&panel.firsts, slot),
            totals: of_tile::<_, M>(&panel.totals, slot),
            fine: panel.fine >> slot & ((1 << M) - 1),
        }
    }
}

/// The scale of a block, or of its first or second half.
#[inline(always)]
fn scale<I: Isa, W: Format>(isa: I, affine: &Affine<'_>, block: usize, second: bool) -> I::F {
    if second {
        W::second_scale(isa, affine, block)
    } else {
        W::scale(isa, affine, block)
    }
}

/// The products of a block, or of one half of it.
#[inline(always)]
fn dot<I: Isa, W: Format>(
    isa: I,
    (weights, second): (&I::Weights, bool),
    input: &[i8; BLOCK],
    start: I::I,
) -> I::I {
    if W::HALVES {
        isa.dot_half(weights, second, input, start)
    } else {
        W::Quants::dot(isa, weights, input, start)
    }
}

/// Parts of a block that have a scale each.
const fn parts<W: Format>() -> usize {
    1 + W::HALVES as usize
}

impl<W: Format, const M: usize> QuantisedTile<'_, W, M> {
    /// Unpacks a block of weights once for all rows.
    #[inline(always)]
    fn by_block<I: Isa>(self, isa: I) {
        let Tile {
            blocks,
            lower,
            slot,
            ..
        } = *self.tile;
        let affine = &self.affine;
        let mut out = [isa.splat(0.0); M];
        let (lines, ahead) = self.lines;
        for (block, (lines, panel)) in lines.iter().zip(blocks).enumerate() {
            if let Some(ahead) = ahead.get(block) {
                // A group is too short for the processor to see a stream, so that it would fetch
                // and compute by turns: with 16 rows that took a third of the time.
                isa.prefetch(ahead);
            }
            let weights = W::Quants::unpack(isa, lines);
            let input = Block::<M>::of((panel, lower.get(block)), slot);
            let mut part = 0;
            while part < parts::<W>() {
                let weights = (&weights, part == 1);
                let scales = scale::<I, W>(isa, affine, block, part == 1);
                unrolled!(I, row < M, {
                    let start = -W::offset::<I>() * input.sum::<W>(row, part == 1);
                    let start = isa.splat_int(start);
                    let quants = &input.quants[row];
                    let dot = match input.lower(row) {
                        None => dot::<I, W>(isa, weights, quants, start),
                        Some(lower) => {
                            // Two chains of dependent products run side by side; one of twice the
                            // length would outgrow the processor's window.
                            let upper = dot::<I, W>(isa, weights, quants, isa.splat_int(0));
                            let lower = dot::<I, W>(isa, weights, lower, start);
                            isa.add_int(isa.up_7(upper), lower)
                        }
                    };
                    let scale = isa.mul(scales, isa.splat(input.factors[row]));
                    out[row] = isa.fma(isa.to_float(dot), scale, out[row]);
                });
                part += 1;
            }
            if W::MINIMUM {
                let minimums = W::minimum(isa, affine, block);
                unrolled!(I, row < M, {
                    out[row] = isa.fma(minimums, isa.splat(input.totals[row]), out[row]);
                });
            }
        }
        for (stored, out) in self.out.iter_mut().zip(out) {
            isa.store(out, stored);
        }
    }

    /// The same operations on each row's sums, in an order that needs few registers: the sums lie
    /// in memory, and the weights are gone over once for each half of the outputs.
    #[inline(always)]
    fn by_panel<I: Isa>(self, isa: I) {
        let Tile {
            blocks,
            lower,
            slot,
            ..
        } = *self.tile;
        let affine = &self.affine;
        let (lines, ahead) = self.lines;
        // Of rows that are not fine these are 0.
        let mut lower_dots = [[0; LANES]; M];
        for (block, (lines, panel)) in lines.iter().zip(blocks).enumerate() {
            if let Some(ahead) = ahead.get(block) {
                isa.prefetch(ahead);
            }
            let input = Block::<M>::of((panel, lower.get(block)), slot);
            let mut part = 0;
            while part < parts::<W>() {
                let second = part == 1;
                let mut starts = [0; M];
                for (row, start) in starts.iter_mut().enumerate() {
                    *start = -W::offset::<I>() * input.sum::<W>(row, second);
                }
                let last = part + 1 == parts::<W>();
                let mut add = Addition {
                    starts: (W::offset::<I>() != 0).then_some(&starts),
                    lower: None,
                    scales: scale::<I, W>(isa, affine, block, second),
                    factors: input.factors,
                    minimums: if W::MINIMUM && last {
                        Some((W::minimum(isa, affine, block), input.totals))
                    } else {
                        None
                    },
                    sums: &mut *self.out,
                };
                let lines = (lines, second);
                if input.fine == 0 {
                    W::Quants::add(isa, lines, input.quants, Finish::Add(add));
                } else if let Some(both) = input.all_fine::<W>() {
                    W::Quants::add_fine(isa, lines.0, both, Finish::Add(add));
                } else {
                    put_lower::<I, W, M>(isa, lines, &input, &mut lower_dots);
                    let ups = std::array::from_fn(|row| 7 * i32::from(input.fine >> row & 1));
                    add.lower = Some((&ups, &lower_dots));
                    W::Quants::add(isa, lines, input.quants, Finish::Add(add));
                    for row in rows(input.fine) {
                        lower_dots[row] = [0; LANES];
                    }
                }
                part += 1;
            }
        }
    }
}

/// The products with the lower parts of fine rows.
#[inline(always)]
fn put_lower<I: Isa, W: Format, const M: usize>(
    isa: I,
    (lines, second): (&<W::Quants as Quants>::Lines, bool),
    input: &Block<'_, M>,
    dots: &mut Dots<M>,
) {
    let Some(lower) = input.lower else { return };
    if 2 * input.fine.count_ones() as usize > M {
        W::Quants::add(isa, (lines, second), lower, Finish::Keep(dots));
        for row in rows(!input.fine & ((1 << M) - 1)) {
            dots[row] = [0; LANES];
        }
        return;
    }
    let weights = W::Quants::unpack(isa, lines);
    for row in rows(input.fine) {
        let dot = dot::<I, W>(isa, (&weights, second), &lower[row], isa.splat_int(0));
        isa.store_int(dot, &mut dots[row]);
    }
}

/// The places of a mask's bits.
#[inline(always)]
fn rows(mut mask: u16) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let row = (mask != 0).then_some(mask.trailing_zeros() as usize);
        mask &= mask.wrapping_sub(1);
        row
    })
}
