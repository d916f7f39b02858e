//! How does each format of weights look to the inner loop?

use std::ops::Range;

use super::super::isa::{Isa, Line};
use super::super::pack::{BLOCK, BLOCKS_OF_K, KScales, Scales, Small, Values};

/// The lines of a group's blocks, and of those that are fetched meanwhile.
pub(super) fn lines_of<const N: usize>(
    lines: &[Line],
    (weights, ahead): (Range<usize>, Range<usize>),
) -> (&[[Line; N]], &[[Line; N]]) {
    let lines = lines.as_chunks::<N>().0;
    (&lines[weights], &lines[ahead])
}

/// Scales and minimums of a group, as its format keeps them.
#[derive(Clone, Copy, Default)]
pub(super) struct Affine<'a> {
    /// Of each block; of a K format of each 256 columns.
    scales: &'a [Scales],
    /// The same.
    minimums: &'a [Scales],
    /// Of each block of a K format.
    small_scales: &'a [Small],
    /// The same.
    small_minimums: &'a [Small],
}

impl<'a> Affine<'a> {
    /// Those of some blocks; of none for weights that are not quantised.
    pub(super) fn of(values: &'a Values, blocks: &Range<usize>) -> Affine<'a> {
        let none = Affine::default();
        match values {
            Values::Nibbles { scales, .. } | Values::Bytes { scales, .. } => {
                let scales = &scales[blocks.clone()];
                Affine { scales, ..none }
            }
            Values::NibblesAndMinimum {
                scales, minimums, ..
            }
            | Values::BytesAndMinimum {
                scales, minimums, ..
            } => Affine {
                scales: &scales[blocks.clone()],
                minimums: &minimums[blocks.clone()],
                ..none
            },
            Values::KNibbles(_, k) | Values::KBytes(_, k) | Values::KHalves(_, k) => {
                Affine::of_k(k, blocks)
            }
            Values::F16 { .. } | Values::BF16 { .. } | Values::F32 { .. } => none,
        }
    }

    fn of_k(k: &'a KScales, blocks: &Range<usize>) -> Affine<'a> {
        let units = blocks.start / BLOCKS_OF_K..blocks.end / BLOCKS_OF_K;
        Affine {
            scales: &k.units[units.clone()],
            minimums: &k.minimum_units[units.clone()],
            small_scales: &k.scales[blocks.clone()],
            small_minimums: &k.minimums[blocks.clone()],
        }
    }

    #[inline(always)]
    fn scale<I: Isa>(&self, isa: I, block: usize) -> I::F {
        isa.load_half(&self.scales[block].0)
    }

    #[inline(always)]
    fn minimum<I: Isa>(&self, isa: I, block: usize) -> I::F {
        isa.load_half(&self.minimums[block].0)
    }

    #[inline(always)]
    fn k_scale<I: Isa>(&self, isa: I, block: usize) -> I::F {
        let unit = isa.load_half(&self.scales[block / BLOCKS_OF_K].0);
        isa.mul(unit, isa.load_small(&self.small_scales[block]))
    }

    #[inline(always)]
    fn k_minimum<I: Isa>(&self, isa: I, block: usize) -> I::F {
        let unit = isa.load_half(&self.minimums[block / BLOCKS_OF_K].0);
        isa.mul(unit, isa.load_small(&self.small_minimums[block]))
    }
}

/// A quantised weight format, as the inner loop needs it.
pub(super) trait Format {
    /// The lines of a block.
    type Lines;
    /// Whether a minimum is added to every weight.
    const MINIMUM: bool = false;
    /// Whether the first and the last 16 columns of a block have a scale each.
    const HALVES: bool = false;
    /// What is to be taken off every integer weight.
    fn offset<I: Isa>() -> i32;
    fn unpack<I: Isa>(isa: I, lines: &Self::Lines) -> I::Weights;
    fn dot<I: Isa>(isa: I, weights: &I::Weights, input: &[i8; BLOCK], start: I::I) -> I::I;
    /// The scale of a block, or of its first half.
    #[inline(always)]
    fn scale<I: Isa>(isa: I, affine: &Affine<'_>, block: usize) -> I::F {
        affine.scale(isa, block)
    }
    /// The scale of its second half.
    #[inline(always)]
    fn second_scale<I: Isa>(isa: I, affine: &Affine<'_>, block: usize) -> I::F {
        Self::scale(isa, affine, block)
    }
    #[inline(always)]
    fn minimum<I: Isa>(isa: I, affine: &Affine<'_>, block: usize) -> I::F {
        affine.minimum(isa, block)
    }
}

/// A format with nibbles.
macro_rules! of_nibbles {
    ($offset:expr) => {
        type Lines = [Line; 4];
        #[inline(always)]
        fn offset<I: Isa>() -> i32 {
            $offset
        }
        #[inline(always)]
        fn unpack<I: Isa>(isa: I, lines: &[Line; 4]) -> I::Weights {
            isa.nibbles(lines)
        }
        #[inline(always)]
        fn dot<I: Isa>(isa: I, weights: &I::Weights, input: &[i8; BLOCK], start: I::I) -> I::I {
            isa.dot_nibbles(weights, input, start)
        }
    };
}

/// A format with bytes.
macro_rules! of_bytes {
    () => {
        type Lines = [Line; 8];
        #[inline(always)]
        fn offset<I: Isa>() -> i32 {
            I::BYTES_OFFSET
        }
        #[inline(always)]
        fn unpack<I: Isa>(isa: I, lines: &[Line; 8]) -> I::Weights {
            isa.bytes(lines)
        }
        #[inline(always)]
        fn dot<I: Isa>(isa: I, weights: &I::Weights, input: &[i8; BLOCK], start: I::I) -> I::I {
            isa.dot_bytes(weights, input, start)
        }
    };
}

/// Scales and minimums as the K formats have them.
macro_rules! of_k {
    () => {
        const MINIMUM: bool = true;
        #[inline(always)]
        fn scale<I: Isa>(isa: I, affine: &Affine<'_>, block: usize) -> I::F {
            affine.k_scale(isa, block)
        }
        #[inline(always)]
        fn minimum<I: Isa>(isa: I, affine: &Affine<'_>, block: usize) -> I::F {
            affine.k_minimum(isa, block)
        }
    };
}

pub(super) struct NibblesFromMinus8;
pub(super) struct NibblesAndMinimum;
pub(super) struct Bytes;
pub(super) struct BytesAndMinimum;
pub(super) struct KNibbles;
pub(super) struct KBytes;
pub(super) struct KHalves;

impl Format for NibblesFromMinus8 {
    of_nibbles!(8);
}

impl Format for NibblesAndMinimum {
    const MINIMUM: bool = true;
    of_nibbles!(0);
}

impl Format for Bytes {
    of_bytes!();
}

impl Format for BytesAndMinimum {
    const MINIMUM: bool = true;
    of_bytes!();
}

impl Format for KNibbles {
    of_nibbles!(0);
    of_k!();
}

impl Format for KBytes {
    of_bytes!();
    of_k!();
}

impl Format for KHalves {
    const HALVES: bool = true;
    of_bytes!();
    #[inline(always)]
    fn scale<I: Isa>(isa: I, affine: &Affine<'_>, block: usize) -> I::F {
        let unit = affine.scale(isa, block / BLOCKS_OF_K);
        isa.mul(unit, isa.load_signed(&affine.small_scales[block]))
    }
    #[inline(always)]
    fn second_scale<I: Isa>(isa: I, affine: &Affine<'_>, block: usize) -> I::F {
        let unit = affine.scale(isa, block / BLOCKS_OF_K);
        isa.mul(unit, isa.load_signed(&affine.small_minimums[block]))
    }
}
