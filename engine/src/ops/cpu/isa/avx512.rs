//! The 16 lanes as one AVX-512 register, int8 products by VNNI.
#![expect(
    unsafe_code,
    reason = "intrinsics; the token proves that the processor has them"
)]

use std::arch::x86_64::*;

use super::{Halves, Isa, Kernel, LANES, Line};

/// Proof that the processor has AVX-512 F, BW, DQ, VL and VNNI.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512(());

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn enter<K: Kernel>(kernel: K, isa: Avx512) -> K::Output {
    kernel.run(isa)
}

/// Intrinsics on values, or on references of the exact size they read or write.
macro_rules! proven {
    ($($body:tt)*) => {
        // SAFETY: an `Avx512` exists only where `detect` found the instructions, and loads and
        // stores go through references to as many bytes as they touch.
        unsafe { $($body)* }
    };
}

impl Isa for Avx512 {
    type F = __m512;
    type I = __m512i;
    type Weights = [__m512i; 8];

    const WIDE_TILES: bool = true;

    fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        found.then_some(Avx512(()))
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
    fn splat(self, value: f32) -> __m512 {
        proven!(_mm512_set1_ps(value))
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> __m512 {
        proven!(_mm512_loadu_ps(from.as_ptr()))
    }

    #[inline(always)]
    fn store(self, value: __m512, to: &mut [f32; LANES]) {
        proven!(_mm512_storeu_ps(to.as_mut_ptr(), value));
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_div_ps(a, b))
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        proven!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_max_ps(a, b))
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_min_ps(a, b))
    }

    #[inline(always)]
    fn abs(self, a: __m512) -> __m512 {
        proven!(_mm512_abs_ps(a))
    }

    #[inline(always)]
    fn largest(self, a: __m512) -> f32 {
        proven!(_mm512_reduce_max_ps(a))
    }

    #[inline(always)]
    fn split(self, count: usize, a: __m512, b: __m512) -> __m512 {
        let mask = ((1u32 << count.min(LANES)) - 1) as __mmask16;
        proven!(_mm512_mask_blend_ps(mask, b, a))
    }

    #[inline(always)]
    fn load_half(self, from: &Halves) -> __m512 {
        proven!(_mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())))
    }

    #[inline(always)]
    fn store_half(self, value: __m512, to: &mut Halves) {
        proven! {
            let halves = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT }>(value);
            _mm256_storeu_si256(to.as_mut_ptr().cast(), halves);
        }
    }

    #[inline(always)]
    fn to_float(self, a: __m512i) -> __m512 {
        proven!(_mm512_cvtepi32_ps(a))
    }

    #[inline(always)]
    fn round(self, a: __m512) -> __m512i {
        proven!(_mm512_cvtps_epi32(a))
    }

    #[inline(always)]
    fn power_of_two(self, a: __m512i) -> __m512 {
        proven! {
            let biased = _mm512_add_epi32(a, _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
        }
    }

    #[inline(always)]
    fn total(self, a: __m512i) -> i32 {
        proven!(_mm512_reduce_add_epi32(a))
    }

    #[inline(always)]
    fn store_bytes(self, a: __m512i, to: &mut [i8; LANES]) {
        proven!(_mm_storeu_si128(
            to.as_mut_ptr().cast(),
            _mm512_cvtepi32_epi8(a)
        ));
    }

    #[inline(always)]
    fn four(self, lines: &[Line; 4]) -> Self::Weights {
        proven! {
            let low = _mm512_set1_epi8(15);
            let mut weights = [low; 8];
            for (index, line) in lines.iter().enumerate() {
                let both = _mm512_load_si512((&raw const line.0).cast());
                weights[index] = _mm512_and_si512(both, low);
                weights[index + 4] = _mm512_and_si512(_mm512_srli_epi16::<4>(both), low);
            }
            weights
        }
    }

    #[inline(always)]
    fn five(self, lines: &[Line; 5]) -> Self::Weights {
        let [nibbles @ .., above] = lines;
        let mut weights = self.four(nibbles);
        proven! {
            let fifth = _mm512_set1_epi8(16);
            let above = _mm512_load_si512((&raw const above.0).cast());
            for (index, weights) in weights.iter_mut().enumerate() {
                let (left, right) = (4_usize.saturating_sub(index), index.saturating_sub(4));
                let moved = _mm512_sll_epi16(above, _mm_cvtsi32_si128(left as i32));
                let moved = _mm512_srl_epi16(moved, _mm_cvtsi32_si128(right as i32));
                *weights = _mm512_or_si512(*weights, _mm512_and_si512(moved, fifth));
            }
        }
        weights
    }

    #[inline(always)]
    fn six(self, lines: &[Line; 6]) -> Self::Weights {
        let [nibbles @ .., first, second] = lines;
        let mut weights = self.four(nibbles);
        proven! {
            let upper = _mm512_set1_epi8(48);
            for (above, weights) in [first, second].into_iter().zip(weights.chunks_exact_mut(4)) {
                let above = _mm512_load_si512((&raw const above.0).cast());
                let moved = [
                    _mm512_slli_epi16::<4>(above),
                    _mm512_slli_epi16::<2>(above),
                    above,
                    _mm512_srli_epi16::<2>(above),
                ];
                for (weights, moved) in weights.iter_mut().zip(moved) {
                    *weights = _mm512_or_si512(*weights, _mm512_and_si512(moved, upper));
                }
            }
        }
        weights
    }

    #[inline(always)]
    fn bytes(self, lines: &[Line; 8]) -> Self::Weights {
        proven! {
            let mut weights = [_mm512_setzero_si512(); 8];
            for (index, line) in lines.iter().enumerate() {
                weights[index] = _mm512_load_si512((&raw const line.0).cast());
            }
            weights
        }
    }

    #[inline(always)]
    fn dot_four(self, weights: &Self::Weights, input: &[i8; 32], start: __m512i) -> __m512i {
        proven! {
            let mut sum = start;
            for (index, weights) in weights.iter().enumerate() {
                let four = input.as_ptr().cast::<i32>().add(index).read_unaligned();
                sum = _mm512_dpbusd_epi32(sum, *weights, _mm512_set1_epi32(four));
            }
            sum
        }
    }

    const BYTES_OFFSET: i32 = 128;

    #[inline(always)]
    fn dot_bytes(self, weights: &Self::Weights, input: &[i8; 32], start: __m512i) -> __m512i {
        self.dot_four(weights, input, start)
    }

    #[inline(always)]
    fn dot_half(
        self,
        weights: &Self::Weights,
        second: bool,
        input: &[i8; 32],
        start: __m512i,
    ) -> __m512i {
        let first = 4 * usize::from(second);
        proven! {
            let mut sum = start;
            for (index, weights) in weights.iter().enumerate().skip(first).take(4) {
                let four = input.as_ptr().cast::<i32>().add(index).read_unaligned();
                sum = _mm512_dpbusd_epi32(sum, *weights, _mm512_set1_epi32(four));
            }
            sum
        }
    }

    #[inline(always)]
    fn load_int(self, from: &[i32; LANES]) -> __m512i {
        proven!(_mm512_loadu_si512(from.as_ptr().cast()))
    }

    #[inline(always)]
    fn store_int(self, value: __m512i, to: &mut [i32; LANES]) {
        proven!(_mm512_storeu_si512(to.as_mut_ptr().cast(), value));
    }

    #[inline(always)]
    fn splat_int(self, value: i32) -> __m512i {
        proven!(_mm512_set1_epi32(value))
    }

    #[inline(always)]
    fn add_int(self, a: __m512i, b: __m512i) -> __m512i {
        proven!(_mm512_add_epi32(a, b))
    }

    #[inline(always)]
    fn sub_int(self, a: __m512i, b: __m512i) -> __m512i {
        proven!(_mm512_sub_epi32(a, b))
    }

    #[inline(always)]
    fn up_7(self, a: __m512i) -> __m512i {
        proven!(_mm512_slli_epi32::<7>(a))
    }

    #[inline(always)]
    fn down_7(self, a: __m512i) -> __m512i {
        proven!(_mm512_srai_epi32::<7>(a))
    }
}
