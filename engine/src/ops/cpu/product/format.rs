//! How does each format of weights look to the inner loop?

use std::ops::Range;

use super::super::isa::{Finish, Isa, Line};
use super::super::pack::{BLOCK, BLOCKS_OF_K, Parts, Scales, Small};

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
    /// Those of some blocks.
    pub(super) fn of(parts: &'a Parts, blocks: &Range<usize>) -> Affine<'a> {
        let units = blocks.start / BLOCKS_OF_K..blocks.end / BLOCKS_OF_K;
        let is_k = !parts.small_scales.is_empty();
        let scales = if is_k { units } else { blocks.clone() };
        Affine {
            scales: &parts.scales[scales.clone()],
            minimums: parts.minimums.get(scales).unwrap_or_default(),
            small_scales: parts.small_scales.get(blocks.clone()).unwrap_or_default(),
            small_minimums: parts.small_minimums.get(blocks.clone()).unwrap_or_default(),
        }
    }
}

/// The integers of a block.
pub(super) trait Quants {
    /// Its lines.
    type Lines;
    /// What the kernels leave in every integer, besides what the format has there.
    #[inline(always)]
    fn left<I: Isa>() -> i32 {
        0
    }
    fn unpack<I: Isa>(isa: I, lines: &Self::Lines) -> I::Weights;
    fn dot<I: Isa>(isa: I, weights: &I::Weights, input: &[i8; BLOCK], start: I::I) -> I::I;
    /// Adds a block to rows of sums: all of its columns, or the first or the second half if the
    /// format has a scale for each.
    fn add<I: Isa, const M: usize>(
        isa: I,
        lines: (&Self::Lines, bool),
        inputs: &[[i8; BLOCK]; M],
        finish: Finish<'_, I::F, M>,
    );
    /// Whether rows that are all fine are better added with both parts at once.
    const FINE_AT_ONCE: bool = false;
    /// [`Quants::add`] with the upper and the lower parts of rows that are all fine.
    #[inline(always)]
    fn add_fine<I: Isa, const M: usize>(
        _isa: I,
        _lines: &Self::Lines,
        _inputs: (&[[i8; BLOCK]; M], &[[i8; BLOCK]; M]),
        _finish: Finish<'_, I::F, M>,
    ) {
        unreachable!("only where it is said to be better");
    }
}

macro_rules! quants {
    ($name:ident, $lines:literal, $unpack:ident, $dot:ident, $add:ident) => {
        pub(super) struct $name;
        impl Quants for $name {
            type Lines = [Line; $lines];
            quants!(@rest $lines, $unpack, $dot);
            #[inline(always)]
            fn add<I: Isa, const M: usize>(
                isa: I,
                (lines, _): (&Self::Lines, bool),
                inputs: &[[i8; BLOCK]; M],
                finish: Finish<'_, I::F, M>,
            ) {
                isa.$add(lines, inputs, finish);
            }
        }
    };
    (@rest $lines:literal, $unpack:ident, $dot:ident) => {
        #[inline(always)]
        fn unpack<I: Isa>(isa: I, lines: &[Line; $lines]) -> I::Weights {
            isa.$unpack(lines)
        }
        #[inline(always)]
        fn dot<I: Isa>(isa: I, weights: &I::Weights, input: &[i8; BLOCK], start: I::I) -> I::I {
            isa.$dot(weights, input, start)
        }
    };
}

quants!(Four, 4, four, dot_four, add_four);
quants!(Five, 5, five, dot_six, add_five);

pub(super) struct Six;

impl Quants for Six {
    type Lines = [Line; 6];
    quants!(@rest 6, six, dot_six);
    #[inline(always)]
    fn add<I: Isa, const M: usize>(
        isa: I,
        lines: (&Self::Lines, bool),
        inputs: &[[i8; BLOCK]; M],
        finish: Finish<'_, I::F, M>,
    ) {
        isa.add_half(lines, inputs, finish);
    }
}

pub(super) struct Eight;

impl Quants for Eight {
    type Lines = [Line; 8];
    #[inline(always)]
    fn left<I: Isa>() -> i32 {
        I::BYTES_OFFSET
    }
    quants!(@rest 8, bytes, dot_bytes);
    #[inline(always)]
    fn add<I: Isa, const M: usize>(
        isa: I,
        (lines, _): (&Self::Lines, bool),
        inputs: &[[i8; BLOCK]; M],
        finish: Finish<'_, I::F, M>,
    ) {
        isa.add_bytes(lines, inputs, finish);
    }
    const FINE_AT_ONCE: bool = true;
    #[inline(always)]
    fn add_fine<I: Isa, const M: usize>(
        isa: I,
        lines: &Self::Lines,
        inputs: (&[[i8; BLOCK]; M], &[[i8; BLOCK]; M]),
        finish: Finish<'_, I::F, M>,
    ) {
        isa.add_fine_bytes(lines, inputs, finish);
    }
}

/// A quantised weight format, as the inner loop needs it.
pub(super) trait Format {
    /// Its integers.
    type Quants: Quants;
    /// What is to be taken off every one of them.
    const OFFSET: i32 = 0;
    /// Whether a minimum is added to every weight.
    const MINIMUM: bool = false;
    /// Whether the first and the last 16 columns of a block have a scale each.
    const HALVES: bool = false;
    /// What is to be taken off every integer that the kernels multiply.
    #[inline(always)]
    fn offset<I: Isa>() -> i32 {
        Self::OFFSET + Self::Quants::left::<I>()
    }
    /// The scale of a block, or of its first half.
    #[inline(always)]
    fn scale<I: Isa>(isa: I, affine: &Affine<'_>, block: usize) -> I::F {
        isa.load_half(&affine.scales[block].0)
    }
    /// The scale of its second half.
    #[inline(always)]
    fn second_scale<I: Isa>(isa: I, affine: &Affine<'_>, block: usize) -> I::F {
        Self::scale(isa, affine, block)
    }
    #[inline(always)]
    fn minimum<I: Isa>(isa: I, affine: &Affine<'_>, block: usize) -> I::F {
        isa.load_half(&affine.minimums[block].0)
    }
}

/// Scales and minimums as the K formats have them.
macro_rules! of_k {
    () => {
        const MINIMUM: bool = true;
        #[inline(always)]
        fn scale<I: Isa>(isa: I, affine: &Affine<'_>, block: usize) -> I::F {
            let unit = isa.load_half(&affine.scales[block / BLOCKS_OF_K].0);
            isa.mul(unit, isa.load_small(&affine.small_scales[block]))
        }
        #[inline(always)]
        fn minimum<I: Isa>(isa: I, affine: &Affine<'_>, block: usize) -> I::F {
            let unit = isa.load_half(&affine.minimums[block / BLOCKS_OF_K].0);
            isa.mul(unit, isa.load_small(&affine.small_minimums[block]))
        }
    };
}

pub(super) struct Q4_0;
pub(super) struct Q4_1;
pub(super) struct Q5_0;
pub(super) struct Q5_1;
pub(super) struct Q8_0;
pub(super) struct Q4K;
pub(super) struct Q5K;
pub(super) struct Q6K;

impl Format for Q4_0 {
    type Quants = Four;
    const OFFSET: i32 = 8;
}

impl Format for Q4_1 {
    type Quants = Four;
    const MINIMUM: bool = true;
}

impl Format for Q5_0 {
    type Quants = Five;
    const OFFSET: i32 = 16;
}

impl Format for Q5_1 {
    type Quants = Five;
    const MINIMUM: bool = true;
}

impl Format for Q8_0 {
    type Quants = Eight;
}

impl Format for Q4K {
    type Quants = Four;
    of_k!();
}

impl Format for Q5K {
    type Quants = Five;
    of_k!();
}

impl Format for Q6K {
    type Quants = Six;
    const OFFSET: i32 = 32;
    const HALVES: bool = true;
    #[inline(always)]
    fn scale<I: Isa>(isa: I, affine: &Affine<'_>, block: usize) -> I::F {
        let unit = isa.load_half(&affine.scales[block / BLOCKS_OF_K].0);
        isa.mul(unit, isa.load_signed(&affine.small_scales[block]))
    }
    #[inline(always)]
    fn second_scale<I: Isa>(isa: I, affine: &Affine<'_>, block: usize) -> I::F {
        let unit = isa.load_half(&affine.scales[block / BLOCKS_OF_K].0);
        isa.mul(unit, isa.load_signed(&affine.small_minimums[block]))
    }
}
