//! How are the lines of a block unpacked into AVX2 registers, and multiplied with many rows at once?

use std::arch::x86_64::*;

use super::super::{Finish, Line};

/// How the lines of a block become vectors: 8 rows of four columns.
pub(super) trait Unpack {
    /// Vectors of products that 16 bits hold the sum of, whatever the input.
    const TOGETHER: usize;
    /// The weights of rows `8 half..` and columns `4 index..` of the block that begins here.
    unsafe fn weights(lines: *const Line, half: usize, index: usize) -> __m256i;
}

pub(super) struct Four;
pub(super) struct Five;
pub(super) struct Six;
pub(super) struct Signed;

#[inline(always)]
unsafe fn line_half(lines: *const Line, half: usize, line: usize) -> __m256i {
    // SAFETY: the caller gives lines of a whole block, and two halves are in each.
    unsafe { _mm256_load_si256(lines.add(line).cast::<__m256i>().add(half)) }
}

impl Unpack for Four {
    const TOGETHER: usize = 8;
    #[inline(always)]
    unsafe fn weights(lines: *const Line, half: usize, index: usize) -> __m256i {
        // SAFETY: the caller's lines are a block's, the processor has AVX2.
        unsafe {
            let both = line_half(lines, half, index % 4);
            let nibbles = if index < 4 {
                both
            } else {
                _mm256_srli_epi16::<4>(both)
            };
            _mm256_and_si256(nibbles, _mm256_set1_epi8(15))
        }
    }
}

impl Unpack for Five {
    const TOGETHER: usize = 4;
    #[inline(always)]
    unsafe fn weights(lines: *const Line, half: usize, index: usize) -> __m256i {
        // SAFETY: as above.
        unsafe {
            let above = line_half(lines, half, 4);
            let moved = match index {
                0 => _mm256_slli_epi16::<4>(above),
                1 => _mm256_slli_epi16::<3>(above),
                2 => _mm256_slli_epi16::<2>(above),
                3 => _mm256_slli_epi16::<1>(above),
                4 => above,
                5 => _mm256_srli_epi16::<1>(above),
                6 => _mm256_srli_epi16::<2>(above),
                _ => _mm256_srli_epi16::<3>(above),
            };
            let fifth = _mm256_and_si256(moved, _mm256_set1_epi8(16));
            _mm256_or_si256(Four::weights(lines, half, index), fifth)
        }
    }
}

impl Unpack for Six {
    const TOGETHER: usize = 2;
    #[inline(always)]
    unsafe fn weights(lines: *const Line, half: usize, index: usize) -> __m256i {
        // SAFETY: as above.
        unsafe {
            let above = line_half(lines, half, 4 + index / 4);
            let moved = match index % 4 {
                0 => _mm256_slli_epi16::<4>(above),
                1 => _mm256_slli_epi16::<2>(above),
                2 => above,
                _ => _mm256_srli_epi16::<2>(above),
            };
            let upper = _mm256_and_si256(moved, _mm256_set1_epi8(48));
            _mm256_or_si256(Four::weights(lines, half, index), upper)
        }
    }
}

impl Unpack for Signed {
    const TOGETHER: usize = 0;
    #[inline(always)]
    unsafe fn weights(lines: *const Line, half: usize, index: usize) -> __m256i {
        // SAFETY: as above.
        unsafe { _mm256_xor_si256(line_half(lines, half, index), _mm256_set1_epi8(-128)) }
    }
}

/// A whole block, unpacked.
#[inline(always)]
pub(super) fn block<U: Unpack>(lines: *const Line) -> [[__m256i; 8]; 2] {
    proven! {
        let mut weights = [[_mm256_setzero_si256(); 8]; 2];
        for (half, weights) in weights.iter_mut().enumerate() {
            for (index, weights) in weights.iter_mut().enumerate() {
                *weights = U::weights(lines, half, index);
            }
        }
        weights
    }
}

/// The same four bytes of an input row in every lane.
#[inline(always)]
pub(super) unsafe fn four_bytes(input: *const i8, index: usize) -> __m256i {
    // SAFETY: the caller's row has at least `4 (index + 1)` bytes.
    unsafe { _mm256_set1_epi32(input.cast::<i32>().add(index).read_unaligned()) }
}

/// The same address, of which the compiler does not know that it is: it would keep what it loaded
/// there for the second half of the weights, for which there are no registers.
#[expect(
    clippy::pointers_in_nomem_asm_block,
    reason = "nothing is read there: only the address passes through"
)]
#[inline(always)]
pub(super) fn opaque(mut place: *const i8) -> *const i8 {
    // SAFETY: no instruction at all.
    unsafe {
        std::arch::asm!("/* {0} */", inout(reg) place, options(nomem, nostack, preserves_flags));
    }
    place
}

/// The same vector, of which the compiler does not know that it is. It would add up a row's products
/// as a tree, for whose branches there are no registers either.
#[inline]
#[target_feature(enable = "avx2")]
fn in_turn(mut sum: __m256i) -> __m256i {
    // SAFETY: no instruction at all.
    unsafe {
        std::arch::asm!("/* {0} */", inout(ymm_reg) sum, options(pure, nomem, nostack, preserves_flags));
    }
    sum
}

/// The products of `M` input rows with unsigned weights, over as many columns from `4 FROM` on as 16
/// bits hold the sums of.
#[inline(always)]
fn pairs<U: Unpack, const FROM: usize, const M: usize>(
    (lines, half): (*const Line, usize),
    inputs: *const i8,
) -> [__m256i; M] {
    proven! {
        let inputs = opaque(inputs);
        let mut sums = [_mm256_setzero_si256(); M];
        copies!(place < U::TOGETHER, {
            let index = FROM + place;
            let weights = U::weights(lines, half, index);
            for (row, sum) in sums.iter_mut().enumerate() {
                let four = four_bytes(inputs.add(32 * row), index);
                let pairs = _mm256_maddubs_epi16(weights, four);
                *sum = in_turn(if place == 0 { pairs } else { _mm256_add_epi16(*sum, pairs) });
            }
        });
        sums
    }
}

/// Adds the products over the columns from `4 FIRST` on, and if it is another place those from
/// `4 SECOND` on, to the rows' sums. Eight weight rows at a time: the sums of 12 input rows, two
/// vectors of weights and one of input are all the registers there are.
#[inline(always)]
pub(super) fn add<U: Unpack, const FIRST: usize, const SECOND: usize, const M: usize>(
    lines: *const Line,
    inputs: &[[i8; 32]; M],
    mut finish: Finish<'_, [__m256; 2], M>,
) {
    let inputs: *const i8 = inputs.as_ptr().cast();
    proven! {
        let one = _mm256_set1_epi16(1);
        for half in 0..2 {
            let mut firsts = [_mm256_setzero_si256(); M];
            if SECOND != FIRST {
                let sums = pairs::<U, FIRST, M>((lines, half), inputs);
                copies!(row < M, {
                    firsts[row] = _mm256_madd_epi16(sums[row], one);
                });
            }
            let sums = pairs::<U, SECOND, M>((lines, half), inputs);
            copies!(row < M, {
                let mut sum = _mm256_madd_epi16(sums[row], one);
                if SECOND != FIRST {
                    sum = _mm256_add_epi32(sum, firsts[row]);
                }
                end::<M>(&mut finish, (row, half), sum);
            });
        }
    }
}

/// The same with signed weights of eight bits, whose sign is moved to the input.
#[inline(always)]
pub(super) fn add_signed<const M: usize>(
    lines: *const Line,
    inputs: &[[i8; 32]; M],
    mut finish: Finish<'_, [__m256; 2], M>,
) {
    let inputs: *const i8 = inputs.as_ptr().cast();
    proven! {
        let one = _mm256_set1_epi16(1);
        for half in 0..2 {
            let inputs = opaque(inputs);
            let mut sums = [_mm256_setzero_si256(); M];
            copies!(index < 8, {
                let weights = Signed::weights(lines, half, index);
                let sizes = _mm256_abs_epi8(weights);
                for (row, sum) in sums.iter_mut().enumerate() {
                    let four = four_bytes(inputs.add(32 * row), index);
                    let signed = _mm256_sign_epi8(four, weights);
                    let pairs = _mm256_madd_epi16(_mm256_maddubs_epi16(sizes, signed), one);
                    *sum = _mm256_add_epi32(*sum, pairs);
                }
            });
            copies!(row < M, {
                end::<M>(&mut finish, (row, half), sums[row]);
            });
        }
    }
}

/// The same for rows that are all fine, as numbers of 16 bits: four operations for 32 products, where
/// the two parts by themselves would take eight.
#[inline(always)]
pub(super) fn add_signed_fine<const M: usize>(
    lines: *const Line,
    (upper, lower): (&[[i8; 32]; M], &[[i8; 32]; M]),
    mut finish: Finish<'_, [__m256; 2], M>,
) {
    let mut wide = [[0i16; 32]; M];
    for (wide, (upper, lower)) in wide.iter_mut().zip(upper.iter().zip(lower)) {
        widen(upper, lower, wide);
    }
    proven! {
        for half in 0..2 {
            let inputs = opaque(wide.as_ptr().cast());
            let mut sums = [_mm256_setzero_si256(); M];
            copies!(index < 8, {
                let weights = Signed::weights(lines, half, index);
                let even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(weights));
                let odd = _mm256_srai_epi16::<8>(weights);
                for (row, sum) in sums.iter_mut().enumerate() {
                    let row = inputs.add(64 * row);
                    let products = _mm256_madd_epi16(even, four_bytes(row, 2 * index));
                    *sum = in_turn(_mm256_add_epi32(*sum, products));
                    let products = _mm256_madd_epi16(odd, four_bytes(row, 2 * index + 1));
                    *sum = in_turn(_mm256_add_epi32(*sum, products));
                }
            });
            copies!(row < M, {
                end::<M>(&mut finish, (row, half), sums[row]);
            });
        }
    }
}

/// Fine quants in one number each, of every four columns the first and third before the others.
#[inline(always)]
fn widen(upper: &[i8; 32], lower: &[i8; 32], wide: &mut [i16; 32]) {
    proven! {
        let order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
        for half in 0..2 {
            let upper = _mm_loadu_si128(upper.as_ptr().cast::<__m128i>().add(half));
            let lower = _mm_loadu_si128(lower.as_ptr().cast::<__m128i>().add(half));
            let upper = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(upper, order));
            let lower = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(lower, order));
            let both = _mm256_add_epi16(_mm256_slli_epi16::<7>(upper), lower);
            _mm256_storeu_si256(wide.as_mut_ptr().cast::<__m256i>().add(half), both);
        }
    }
}

/// [`Finish::row`] for one half of the outputs.
#[inline(always)]
fn end<const M: usize>(
    finish: &mut Finish<'_, [__m256; 2], M>,
    (row, half): (usize, usize),
    mut dot: __m256i,
) {
    proven! {
        let add = match finish {
            Finish::Keep(dots) => {
                let place: *mut __m256i = dots[row].as_mut_ptr().cast();
                return _mm256_storeu_si256(place.add(half), dot);
            }
            Finish::Add(add) => add,
        };
        if let Some((ups, lower)) = add.lower {
            dot = _mm256_sllv_epi32(dot, _mm256_set1_epi32(ups[row]));
            let lower: *const __m256i = lower[row].as_ptr().cast();
            dot = _mm256_add_epi32(dot, _mm256_loadu_si256(lower.add(half)));
        }
        if let Some(starts) = add.starts {
            dot = _mm256_add_epi32(dot, _mm256_set1_epi32(starts[row]));
        }
        let place = add.sums[row].as_mut_ptr().add(8 * half);
        let scale = _mm256_mul_ps(add.scales[half], _mm256_set1_ps(add.factors[row]));
        let mut sums = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, _mm256_loadu_ps(place));
        if let Some((minimums, totals)) = add.minimums {
            sums = _mm256_fmadd_ps(minimums[half], _mm256_set1_ps(totals[row]), sums);
        }
        _mm256_storeu_ps(place, sums);
    }
}
