//! The 16 lanes as two AVX2 registers, int8 products by multiply-add of pairs.
//!
//! The pair product adds two u8 × i8 products in 16 bits and saturates. Nibbles stay far below
//! that even over a whole block (8 × 2 × 15 × 127 = 30,480), integers of five bits over half a block
//! (4 × 2 × 31 × 127 = 31,496), those of six over a quarter (2 × 2 × 63 × 127 = 32,004). Bytes do not,
//! so their sign is moved to the input: 2 × 128 × 127 = 32,512 fits.
#![expect(
    unsafe_code,
    reason = "intrinsics; the token proves that the processor has them"
)]

use std::arch::x86_64::*;

use super::{Finish, Halves, Isa, Kernel, LANES, Line};

/// Proof that the processor has AVX2, FMA and F16C.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2(());

#[target_feature(enable = "avx2,fma,f16c")]
fn enter<K: Kernel>(kernel: K, isa: Avx2) -> K::Output {
    kernel.run(isa)
}

/// Intrinsics on values, or on references of the exact size they read or write.
macro_rules! proven {
    ($($body:tt)*) => {
        // SAFETY: an `Avx2` exists only where `detect` found the instructions, and loads and
        // stores go through references to as many bytes as they touch.
        unsafe { $($body)* }
    };
}

/// Runs the body for each index below a constant of at most 12, by copies of it: as a loop the
/// compiler would work out anew for each index where its bits lie.
macro_rules! copies {
    ($index:ident < $count:expr, $body:block) => {
        copies!(@ $index $count, $body, 0 1 2 3 4 5 6 7 8 9 10 11);
    };
    (@ $index:ident $count:expr, $body:block, $($number:literal)+) => {
        $(if $number < $count {
            let $index: usize = $number;
            $body
        })+
    };
}

/// Both halves of a lane-wise operation.
macro_rules! halves {
    ($op:ident, $($arg:ident),+) => { proven!([$op($($arg[0]),+), $op($($arg[1]),+)]) };
}

mod panel;

use panel::{Five, Four, Signed, Six, add, add_signed, add_signed_fine, block, four_bytes};

impl Isa for Avx2 {
    type F = [__m256; 2];
    type I = [__m256i; 2];
    type Weights = [[__m256i; 8]; 2];

    const WIDE_TILES: bool = false;

    fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        found.then_some(Avx2(()))
    }

    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        proven!(enter(kernel, self))
    }

    #[inline(always)]
    fn prefetch<T>(self, place: &T) {
        let start: *const i8 = (&raw const *place).cast();
        for line in 0..size_of::<T>().div_ceil(64) {
            proven!(_mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(64 * line)));
        }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> Self::F {
        proven!([_mm256_set1_ps(value); 2])
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::F {
        let from = from.as_ptr();
        proven!([_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))])
    }

    #[inline(always)]
    fn store(self, value: Self::F, to: &mut [f32; LANES]) {
        let to = to.as_mut_ptr();
        proven! {
            _mm256_storeu_ps(to, value[0]);
            _mm256_storeu_ps(to.add(8), value[1]);
        }
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        halves!(_mm256_add_ps, a, b)
    }

    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        halves!(_mm256_sub_ps, a, b)
    }

    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        halves!(_mm256_mul_ps, a, b)
    }

    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        halves!(_mm256_div_ps, a, b)
    }

    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        halves!(_mm256_fmadd_ps, a, b, c)
    }

    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        halves!(_mm256_max_ps, a, b)
    }

    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        halves!(_mm256_min_ps, a, b)
    }

    #[inline(always)]
    fn abs(self, a: Self::F) -> Self::F {
        let sign = proven!([_mm256_set1_ps(-0.0); 2]);
        halves!(_mm256_andnot_ps, sign, a)
    }

    #[inline(always)]
    fn largest(self, a: Self::F) -> f32 {
        proven! {
            let eight = _mm256_max_ps(a[0], a[1]);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }

    #[inline(always)]
    fn split(self, count: usize, a: Self::F, b: Self::F) -> Self::F {
        proven! {
            let count = _mm256_set1_epi32(count.min(LANES) as i32);
            let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let low = _mm256_cmpgt_epi32(count, lanes);
            let high = _mm256_cmpgt_epi32(count, _mm256_add_epi32(lanes, _mm256_set1_epi32(8)));
            [
                _mm256_blendv_ps(b[0], a[0], _mm256_castsi256_ps(low)),
                _mm256_blendv_ps(b[1], a[1], _mm256_castsi256_ps(high)),
            ]
        }
    }

    #[inline(always)]
    fn load_half(self, from: &Halves) -> Self::F {
        let from = from.as_ptr();
        proven! {[
            _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
            _mm256_cvtph_ps(_mm_loadu_si128(from.add(8).cast())),
        ]}
    }

    #[inline(always)]
    fn store_half(self, value: Self::F, to: &mut Halves) {
        let to = to.as_mut_ptr();
        proven! {
            let low = _mm256_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT }>(value[0]);
            let high = _mm256_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT }>(value[1]);
            _mm_storeu_si128(to.cast(), low);
            _mm_storeu_si128(to.add(8).cast(), high);
        }
    }

    #[inline(always)]
    fn to_float(self, a: Self::I) -> Self::F {
        halves!(_mm256_cvtepi32_ps, a)
    }

    #[inline(always)]
    fn round(self, a: Self::F) -> Self::I {
        halves!(_mm256_cvtps_epi32, a)
    }

    #[inline(always)]
    fn power_of_two(self, a: Self::I) -> Self::F {
        proven! {
            let bias = _mm256_set1_epi32(127);
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(a[0], bias))),
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(a[1], bias))),
            ]
        }
    }

    #[inline(always)]
    fn total(self, a: Self::I) -> i32 {
        proven! {
            let eight = _mm256_add_epi32(a[0], a[1]);
            let high = _mm256_extracti128_si256::<1>(eight);
            let four = _mm_add_epi32(_mm256_castsi256_si128(eight), high);
            let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b1110>(four));
            _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<1>(two)))
        }
    }

    #[inline(always)]
    fn store_bytes(self, a: Self::I, to: &mut [i8; LANES]) {
        proven! {
            // Packing works in halves of 128 bits; the permutation puts them in order again.
            let words = _mm256_packs_epi32(a[0], a[1]);
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            let high = _mm256_extracti128_si256::<1>(words);
            let bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), high);
            _mm_storeu_si128(to.as_mut_ptr().cast(), bytes);
        }
    }

    #[inline(always)]
    fn four(self, lines: &[Line; 4]) -> Self::Weights {
        block::<Four>(lines.as_ptr())
    }

    #[inline(always)]
    fn five(self, lines: &[Line; 5]) -> Self::Weights {
        block::<Five>(lines.as_ptr())
    }

    #[inline(always)]
    fn six(self, lines: &[Line; 6]) -> Self::Weights {
        block::<Six>(lines.as_ptr())
    }

    #[inline(always)]
    fn bytes(self, lines: &[Line; 8]) -> Self::Weights {
        block::<Signed>(lines.as_ptr())
    }

    #[inline(always)]
    fn dot_four(self, weights: &Self::Weights, input: &[i8; 32], start: Self::I) -> Self::I {
        proven! {
            let mut sums = [_mm256_setzero_si256(); 2];
            for index in 0..8 {
                let four = four_bytes(input.as_ptr(), index);
                for (sum, weights) in sums.iter_mut().zip(weights) {
                    *sum = _mm256_add_epi16(*sum, _mm256_maddubs_epi16(weights[index], four));
                }
            }
            let one = _mm256_set1_epi16(1);
            [
                _mm256_add_epi32(start[0], _mm256_madd_epi16(sums[0], one)),
                _mm256_add_epi32(start[1], _mm256_madd_epi16(sums[1], one)),
            ]
        }
    }

    #[inline(always)]
    fn dot_half(
        self,
        weights: &Self::Weights,
        second: bool,
        input: &[i8; 32],
        start: Self::I,
    ) -> Self::I {
        let first = 4 * usize::from(second);
        proven! {
            let one = _mm256_set1_epi16(1);
            let mut sums = start;
            for index in [first, first + 2] {
                let four = [
                    four_bytes(input.as_ptr(), index),
                    four_bytes(input.as_ptr(), index + 1),
                ];
                for (sum, weights) in sums.iter_mut().zip(weights) {
                    let pairs = _mm256_add_epi16(
                        _mm256_maddubs_epi16(weights[index], four[0]),
                        _mm256_maddubs_epi16(weights[index + 1], four[1]),
                    );
                    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, one));
                }
            }
            sums
        }
    }

    const BYTES_OFFSET: i32 = 0;

    #[inline(always)]
    fn dot_bytes(self, weights: &Self::Weights, input: &[i8; 32], start: Self::I) -> Self::I {
        proven! {
            let one = _mm256_set1_epi16(1);
            let mut sums = start;
            for index in 0..8 {
                let four = four_bytes(input.as_ptr(), index);
                for (sum, weights) in sums.iter_mut().zip(weights) {
                    let signed = _mm256_sign_epi8(four, weights[index]);
                    let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights[index]), signed);
                    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, one));
                }
            }
            sums
        }
    }

    const BY_PANEL: bool = true;

    #[inline(always)]
    fn add_four<const M: usize>(
        self,
        lines: &[Line; 4],
        inputs: &[[i8; 32]; M],
        finish: Finish<'_, Self::F, M>,
    ) {
        add::<Four, 0, 0, M>(lines.as_ptr(), inputs, finish);
    }

    #[inline(always)]
    fn add_five<const M: usize>(
        self,
        lines: &[Line; 5],
        inputs: &[[i8; 32]; M],
        finish: Finish<'_, Self::F, M>,
    ) {
        add::<Five, 0, 4, M>(lines.as_ptr(), inputs, finish);
    }

    #[inline(always)]
    fn add_half<const M: usize>(
        self,
        (lines, second): (&[Line; 6], bool),
        inputs: &[[i8; 32]; M],
        finish: Finish<'_, Self::F, M>,
    ) {
        if second {
            add::<Six, 4, 6, M>(lines.as_ptr(), inputs, finish);
        } else {
            add::<Six, 0, 2, M>(lines.as_ptr(), inputs, finish);
        }
    }

    #[inline(always)]
    fn add_bytes<const M: usize>(
        self,
        lines: &[Line; 8],
        inputs: &[[i8; 32]; M],
        finish: Finish<'_, Self::F, M>,
    ) {
        add_signed(lines.as_ptr(), inputs, finish);
    }

    #[inline(always)]
    fn add_fine_bytes<const M: usize>(
        self,
        lines: &[Line; 8],
        inputs: (&[[i8; 32]; M], &[[i8; 32]; M]),
        finish: Finish<'_, Self::F, M>,
    ) {
        add_signed_fine(lines.as_ptr(), inputs, finish);
    }

    #[inline(always)]
    fn load_int(self, from: &[i32; LANES]) -> Self::I {
        let from = from.as_ptr();
        proven! {[
            _mm256_loadu_si256(from.cast()),
            _mm256_loadu_si256(from.add(8).cast()),
        ]}
    }

    #[inline(always)]
    fn store_int(self, value: Self::I, to: &mut [i32; LANES]) {
        let to = to.as_mut_ptr();
        proven! {
            _mm256_storeu_si256(to.cast(), value[0]);
            _mm256_storeu_si256(to.add(8).cast(), value[1]);
        }
    }

    #[inline(always)]
    fn splat_int(self, value: i32) -> Self::I {
        proven!([_mm256_set1_epi32(value); 2])
    }

    #[inline(always)]
    fn add_int(self, a: Self::I, b: Self::I) -> Self::I {
        halves!(_mm256_add_epi32, a, b)
    }

    #[inline(always)]
    fn sub_int(self, a: Self::I, b: Self::I) -> Self::I {
        halves!(_mm256_sub_epi32, a, b)
    }

    #[inline(always)]
    fn up_7(self, a: Self::I) -> Self::I {
        proven!([_mm256_slli_epi32::<7>(a[0]), _mm256_slli_epi32::<7>(a[1])])
    }

    #[inline(always)]
    fn down_7(self, a: Self::I) -> Self::I {
        proven!([_mm256_srai_epi32::<7>(a[0]), _mm256_srai_epi32::<7>(a[1])])
    }
}
