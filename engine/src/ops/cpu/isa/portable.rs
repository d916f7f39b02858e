//! The 16 lanes as plain loops: for processors without a variant of their own, and the slow twin
//! that the other variants are compared with, bit for bit.

use half::f16;

use super::{Halves, Isa, Kernel, LANES, Line};

/// Needs no proof.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Portable;

#[inline(always)]
fn each<A: Copy, B: Copy, C: Copy + Default>(
    a: &[A; LANES],
    b: &[B; LANES],
    op: impl Fn(A, B) -> C,
) -> [C; LANES] {
    let mut out = [C::default(); LANES];
    for lane in 0..LANES {
        out[lane] = op(a[lane], b[lane]);
    }
    out
}

impl Isa for Portable {
    type F = [f32; LANES];
    type I = [i32; LANES];
    type Weights = [[u8; 32]; LANES];

    const WIDE_TILES: bool = false;
    const BY_PANEL: bool = true;

    fn detect() -> Option<Self> {
        Some(Portable)
    }

    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }

    fn splat(self, value: f32) -> Self::F {
        [value; LANES]
    }

    fn load(self, from: &[f32; LANES]) -> Self::F {
        *from
    }

    fn store(self, value: Self::F, to: &mut [f32; LANES]) {
        *to = value;
    }

    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        each(&a, &b, |a, b| a + b)
    }

    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        each(&a, &b, |a, b| a - b)
    }

    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        each(&a, &b, |a, b| a * b)
    }

    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        each(&a, &b, |a, b| a / b)
    }

    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        let mut out = c;
        for lane in 0..LANES {
            out[lane] = a[lane].mul_add(b[lane], c[lane]);
        }
        out
    }

    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        each(&a, &b, |a, b| if a > b { a } else { b })
    }

    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        each(&a, &b, |a, b| if a < b { a } else { b })
    }

    fn abs(self, a: Self::F) -> Self::F {
        each(&a, &a, |a, _| a.abs())
    }

    fn largest(self, a: Self::F) -> f32 {
        a.iter()
            .copied()
            .fold(f32::NEG_INFINITY, |a, b| if a > b { a } else { b })
    }

    fn split(self, count: usize, a: Self::F, b: Self::F) -> Self::F {
        let mut out = b;
        let count = count.min(LANES);
        out[..count].copy_from_slice(&a[..count]);
        out
    }

    fn load_half(self, from: &Halves) -> Self::F {
        each(from, from, |bits, _| f16::from_bits(bits).to_f32())
    }

    fn store_half(self, value: Self::F, to: &mut Halves) {
        *to = each(&value, &value, |value, _| f16::from_f32(value).to_bits());
    }

    fn to_float(self, a: Self::I) -> Self::F {
        each(&a, &a, |a, _| a as f32)
    }

    fn round(self, a: Self::F) -> Self::I {
        each(&a, &a, |a, _| a.round_ties_even() as i32)
    }

    fn power_of_two(self, a: Self::I) -> Self::F {
        each(&a, &a, |a, _| f32::from_bits(((a + 127) as u32) << 23))
    }

    fn total(self, a: Self::I) -> i32 {
        a.iter().sum()
    }

    fn store_bytes(self, a: Self::I, to: &mut [i8; LANES]) {
        *to = each(&a, &a, |a, _| a as i8);
    }

    fn four(self, lines: &[Line; 4]) -> Self::Weights {
        let mut weights = [[0; 32]; LANES];
        for (index, line) in lines.iter().enumerate() {
            for (row, four) in line.0.as_chunks::<4>().0.iter().enumerate() {
                for (column, byte) in four.iter().enumerate() {
                    weights[row][4 * index + column] = byte & 15;
                    weights[row][16 + 4 * index + column] = byte >> 4;
                }
            }
        }
        weights
    }

    fn five(self, lines: &[Line; 5]) -> Self::Weights {
        let [nibbles @ .., above] = lines;
        let mut weights = self.four(nibbles);
        for (row, weights) in weights.iter_mut().enumerate() {
            for (column, weight) in weights.iter_mut().enumerate() {
                let bits = above.0[4 * row + column % 4];
                *weight |= (bits >> (column / 4) & 1) << 4;
            }
        }
        weights
    }

    fn six(self, lines: &[Line; 6]) -> Self::Weights {
        let [nibbles @ .., _, _] = lines;
        let mut weights = self.four(nibbles);
        for (row, weights) in weights.iter_mut().enumerate() {
            for (column, weight) in weights.iter_mut().enumerate() {
                let line = column / 4;
                let bits = lines[4 + line / 4].0[4 * row + column % 4];
                *weight |= (bits >> (2 * (line % 4)) & 3) << 4;
            }
        }
        weights
    }

    fn bytes(self, lines: &[Line; 8]) -> Self::Weights {
        let mut weights = [[0; 32]; LANES];
        for (index, line) in lines.iter().enumerate() {
            for (row, four) in line.0.as_chunks::<4>().0.iter().enumerate() {
                weights[row][4 * index..][..4].copy_from_slice(four);
            }
        }
        weights
    }

    fn dot_four(self, weights: &Self::Weights, input: &[i8; 32], start: Self::I) -> Self::I {
        let mut out = start;
        for (out, row) in out.iter_mut().zip(weights) {
            for (weight, input) in row.iter().zip(input) {
                *out += i32::from(*weight) * i32::from(*input);
            }
        }
        out
    }

    const BYTES_OFFSET: i32 = 128;

    fn dot_bytes(self, weights: &Self::Weights, input: &[i8; 32], start: Self::I) -> Self::I {
        self.dot_four(weights, input, start)
    }

    fn dot_half(
        self,
        weights: &Self::Weights,
        second: bool,
        input: &[i8; 32],
        start: Self::I,
    ) -> Self::I {
        let columns = 16 * usize::from(second)..16 + 16 * usize::from(second);
        let mut out = start;
        for (out, row) in out.iter_mut().zip(weights) {
            for (weight, input) in row[columns.clone()].iter().zip(&input[columns.clone()]) {
                *out += i32::from(*weight) * i32::from(*input);
            }
        }
        out
    }

    fn load_int(self, from: &[i32; LANES]) -> Self::I {
        *from
    }

    fn store_int(self, value: Self::I, to: &mut [i32; LANES]) {
        *to = value;
    }

    fn splat_int(self, value: i32) -> Self::I {
        [value; LANES]
    }

    fn add_int(self, a: Self::I, b: Self::I) -> Self::I {
        each(&a, &b, |a, b| a + b)
    }

    fn sub_int(self, a: Self::I, b: Self::I) -> Self::I {
        each(&a, &b, |a, b| a - b)
    }

    fn up_7(self, a: Self::I) -> Self::I {
        each(&a, &a, |a, _| a << 7)
    }

    fn down_7(self, a: Self::I) -> Self::I {
        each(&a, &a, |a, _| a >> 7)
    }
}
