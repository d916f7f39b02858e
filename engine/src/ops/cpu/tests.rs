//! Each op of the serving set against its twin in the reference set, and all variants against the
//! portable one, bit for bit. Inputs of products are integers up to 127 (128ths of them for fine
//! rows; 16ths of them beside outliers) with a ±127 in every block, and keys and values are f16 numbers, so that quantisation is
//! exact and only f32 rounding is left.

mod noise;

use std::ops::Range;

use prompt::gguf::Dtype;

use super::isa::{Isa, Kernel, LANES};
use super::rows::{PANEL, Rows};
use super::*;
use crate::ops::reference::ReferenceOps;
use crate::ops::reference::dequant::values_together;
use noise::Noise;

const FORMATS: [Dtype; 11] = [
    Dtype::Q4_0,
    Dtype::Q4_1,
    Dtype::Q5_0,
    Dtype::Q5_1,
    Dtype::Q8_0,
    Dtype::Q4K,
    Dtype::Q5K,
    Dtype::Q6K,
    Dtype::F16,
    Dtype::BF16,
    Dtype::F32,
];

/// Calls a generic check for every variant this processor has.
macro_rules! on_each_variant {
    ($check:ident) => {{
        $check::<Portable>("portable");
        #[cfg(target_arch = "x86_64")]
        {
            $check::<Avx2>("avx2");
            $check::<Avx512>("avx512");
        }
    }};
}

// After the macro, which they use.
mod pools;
mod shards;

impl<I: Isa, S: Stored> CpuOps<I, S> {
    /// Lends the op set and these rows, quantised and with their floats kept.
    fn quantise_rows(
        &mut self,
        precision: Precision,
        (rows, cols): (&[f32], usize),
        work: impl FnOnce(&mut Self, &Rows),
    ) {
        let mut quantised = Rows::new(precision);
        self.dense = true;
        // First others, whose outliers lie elsewhere: what they leave behind must not show.
        self.floats.clear();
        self.floats.extend(rows);
        self.floats.rotate_left(BLOCK.min(rows.len()));
        self.quantise(cols, &mut quantised);
        self.floats.clear();
        self.floats.extend(rows);
        self.quantise(cols, &mut quantised);
        work(self, &quantised);
    }
}

fn ops<I: Isa>(name: &str) -> Option<CpuOps<I>> {
    ops_storing::<I, F16>(name)
}

fn ops_storing<I: Isa, S: Stored>(name: &str) -> Option<CpuOps<I, S>> {
    let ops = CpuOps::new(2);
    if ops.is_none() {
        println!("{name}: not on this processor");
    }
    ops
}

/// What the quantised rows stand for.
fn numbers(rows: &Rows) -> Vec<f32> {
    let mut out = Vec::new();
    for row in 0..rows.rows {
        for block in 0..rows.blocks() {
            let index = row / PANEL * rows.blocks() + block;
            let panel = &rows.panels[index];
            let scale = panel.scales[row % PANEL];
            let quants = panel.quants[row % PANEL];
            assert_eq!(
                panel.sums[row % PANEL],
                quants.iter().map(|quant| i32::from(*quant)).sum::<i32>()
            );
            out.extend(quants.iter().map(|quant| scale * f32::from(*quant)));
        }
    }
    out
}

fn assert_close(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let delta = (found - expected).abs();
        assert!(
            delta <= tolerance,
            "{what}: {found} for {expected} at {index}"
        );
    }
}

fn assert_same(what: &str, found: &[f32], expected: &[f32]) {
    let bits = |values: &[f32]| {
        values
            .iter()
            .map(|value| value.to_bits())
            .collect::<Vec<_>>()
    };
    assert!(bits(found) == bits(expected), "{what}: bits differ");
}

/// Would catch a wrong layout, a saturated product, a wrong tail of rows or outputs.
#[test]
fn products_equal_the_reference() {
    fn check<I: Isa>(name: &str) {
        let Some(mut ops) = ops::<I>(name) else {
            return;
        };
        let mut noise = Noise(1);
        for dtype in FORMATS {
            for precision in [Precision::Coarse, Precision::Outliers(2), Precision::Fine] {
                for rows in [1, 2, 7, 11, 12, 13, 20, 27] {
                    for (outputs, cols) in [(1, 32), (17, 96), (48, 160)] {
                        let together = values_together(dtype).expect("it is read");
                        let cols = cols * together.div_ceil(32).max(1);
                        let bytes = noise.weight(dtype, outputs * cols);
                        let tensor = Tensor {
                            dtype,
                            rows: outputs,
                            cols,
                            bytes: &bytes,
                        };
                        let input = noise.exact_rows(precision, rows, cols);
                        let what = format!(
                            "{name} {dtype:?} {precision:?}: {rows} rows, {outputs} by {cols}"
                        );
                        check_product(&what, &mut ops, (precision, &input), &tensor);
                    }
                }
            }
        }
    }
    on_each_variant!(check);
}

/// Weights and inputs at their limits. Would catch sums that 16 bits do not hold.
#[test]
fn the_largest_products_fit() {
    // Bytes of a block, and of those the integers' place.
    let blocks = [
        (Dtype::Q4_0, 18, 2..18),
        (Dtype::Q4_1, 20, 4..20),
        (Dtype::Q5_0, 22, 2..22),
        (Dtype::Q5_1, 24, 4..24),
        (Dtype::Q8_0, 34, 2..34),
        (Dtype::Q4K, 144, 16..144),
        (Dtype::Q5K, 176, 16..176),
        (Dtype::Q6K, 210, 0..192),
    ];
    fn check<I: Isa>(name: &str, (dtype, stored, quants): (Dtype, usize, Range<usize>)) {
        let Some(mut ops) = ops::<I>(name) else {
            return;
        };
        for integers in [0, 0x7f, 0x80, 0xff] {
            let mut bytes = Noise(11).weight(dtype, 16 * 256);
            for block in bytes.chunks_exact_mut(stored) {
                block[quants.clone()].fill(integers);
            }
            let tensor = Tensor {
                dtype,
                rows: 16,
                cols: 256,
                bytes: &bytes,
            };
            // The sign of one row after the other; small, so that f32 sums stay exact enough.
            let input: Vec<f32> = (0..13 * 256)
                .map(|place| [127.0, -127.0][place / 256 % 2] / 1024.0)
                .collect();
            for precision in [Precision::Coarse, Precision::Fine] {
                let what = format!("{name} {dtype:?} {precision:?}, all {integers:#x}");
                check_product(&what, &mut ops, (precision, &input), &tensor);
            }
        }
    }
    for block in blocks {
        check::<Portable>("portable", block.clone());
        #[cfg(target_arch = "x86_64")]
        {
            check::<Avx2>("avx2", block.clone());
            check::<Avx512>("avx512", block.clone());
        }
    }
}

fn check_product<I: Isa>(
    what: &str,
    ops: &mut CpuOps<I>,
    (precision, input): (Precision, &[f32]),
    tensor: &Tensor<'_>,
) {
    let (mut plain, mut portable) = (
        ReferenceOps::new(1),
        CpuOps::<Portable, F16>::new(1).unwrap(),
    );
    let cols = tensor.cols;
    let mut expected = vec![1.0; input.len() / cols * tensor.rows];
    let (mut found, mut same) = (expected.clone(), expected.clone());
    let matrix = ops.pack(tensor, RowOrder::Plain);
    ops.quantise_rows(precision, (input, cols), |ops, quantised| {
        ops.project_add(quantised, &matrix, &mut found);
    });
    let matrix = portable.pack(tensor, RowOrder::Plain);
    portable.quantise_rows(precision, (input, cols), |ops, quantised| {
        ops.project_add(quantised, &matrix, &mut same);
    });
    let matrix = plain.pack(tensor, RowOrder::Plain);
    plain.project_add(&input.to_vec(), &matrix, &mut expected);
    // Sums of so many products of about 127 × 16 in f32, to 5 digits.
    assert_close(
        what,
        &found,
        &expected,
        0.1 * (cols as f32 / 160.0).max(1.0),
    );
    assert_same(what, &found, &same);
}

/// Would catch a wrong row of the table, or rows that packing reordered.
#[test]
fn looking_up_tokens_equals_the_reference() {
    fn check<I: Isa>(name: &str) {
        let Some(mut ops) = ops::<I>(name) else {
            return;
        };
        let mut plain = ReferenceOps::new(1);
        let mut noise = Noise(2);
        for dtype in FORMATS {
            let cols = values_together(dtype).expect("it is read").max(32) * 2;
            let bytes = noise.weight(dtype, 37 * cols);
            let tensor = Tensor {
                dtype,
                rows: 37,
                cols,
                bytes: &bytes,
            };
            let tokens: Vec<u32> = (0..37).chain([5, 5, 36]).collect();
            let (mut found, mut expected) = (vec![0.0; 40 * cols], vec![0.0; 40 * cols]);
            let table = ops.pack(&tensor, RowOrder::Plain);
            ops.embed(&table, &tokens, &mut found);
            let table = plain.pack(&tensor, RowOrder::Plain);
            plain.embed(&table, &tokens, &mut expected);
            assert_same(&format!("{name} {dtype:?}"), &found, &expected);
        }
    }
    on_each_variant!(check);
}

/// Would catch a wrong mean, scale or step of quantisation.
#[test]
fn norms_equal_the_reference_up_to_a_quant() {
    fn check<I: Isa>(name: &str) {
        let Some(mut ops) = ops::<I>(name) else {
            return;
        };
        let mut noise = Noise(3);
        for (rows, cols) in [(1, 32), (13, 96), (30, 576)] {
            let mut x = noise.floats(rows * cols);
            x[..32].fill(0.0);
            let weight = noise.floats(cols);
            let (mut found, mut expected) = (Rows::new(Precision::Coarse), Vec::new());
            ops.norm(&x, &weight, 1e-5, &mut found);
            ReferenceOps::new(1).norm(&x, &weight, 1e-5, &mut expected);
            // The largest normed value is near 2; half a step of 1/127 of it.
            assert_close(name, &numbers(&found), &expected, 0.012);
            let mut found = vec![f32::NAN; x.len()];
            ops.norm_floats(&x, &weight, 1e-5, &mut found);
            assert_close(name, &found, &expected, 1e-6);
            let mut heads = x.clone();
            ops.norm_heads(&mut heads, &weight[..32], 1e-5);
            ReferenceOps::new(1).norm_heads(&mut x, &weight[..32], 1e-5);
            assert_close(name, &heads, &x, 1e-6);
            ops.add_rows(&mut heads, &weight);
            ReferenceOps::new(1).add_rows(&mut x, &weight);
            assert_close(name, &heads, &x, 1e-6);
        }
    }
    on_each_variant!(check);
}

/// Would catch a wrong gate, an overflow in the exponential, or a wrong tail.
#[test]
fn gates_equal_the_reference_up_to_a_quant() {
    fn check<I: Isa>(name: &str) {
        let Some(mut ops) = ops::<I>(name) else {
            return;
        };
        let mut plain = ReferenceOps::new(1);
        let mut noise = Noise(4);
        for rows in [1, 5, 25] {
            let weights = [
                noise.weight(Dtype::Q4_0, 96 * 64),
                noise.weight(Dtype::Q8_0, 96 * 64),
            ];
            let tensors =
                [(Dtype::Q4_0, &weights[0]), (Dtype::Q8_0, &weights[1])].map(|(dtype, bytes)| {
                    Tensor {
                        dtype,
                        rows: 96,
                        cols: 64,
                        bytes,
                    }
                });
            let input = noise.exact_rows(Precision::Coarse, rows, 64);
            let (mut found, mut expected) = (Rows::new(Precision::Coarse), Vec::new());
            let packed = tensors.map(|tensor| ops.pack(&tensor, RowOrder::Plain));
            ops.quantise_rows(Precision::Coarse, (&input, 64), |ops, quantised| {
                ops.gated(quantised, &packed[0], &packed[1], &mut found);
            });
            let dense = tensors.map(|tensor| plain.pack(&tensor, RowOrder::Plain));
            plain.gated(&input, &dense[0], &dense[1], &mut expected);
            for (found, expected) in numbers(&found).chunks(32).zip(expected.chunks(32)) {
                let largest = expected.iter().fold(0.0f32, |a, b| a.max(b.abs()));
                assert_close(name, found, expected, largest / 250.0 + 1e-3);
            }
        }
    }
    on_each_variant!(check);
}

/// Rope on reordered rows against rope on the file's order. Would catch a wrong pair or sign.
#[test]
fn rope_equals_the_reference() {
    fn check<I: Isa>(name: &str) {
        let Some(mut ops) = ops::<I>(name) else {
            return;
        };
        let mut noise = Noise(6);
        let (rows, dim, heads) = (29, 64, 3);
        let rotation = Rotation {
            half: dim / 2,
            cos: noise.floats(rows * 32),
            sin: noise.floats(rows * 32),
        };
        let mut expected = noise.floats(rows * heads * dim);
        let reorder = |values: &[f32]| -> Vec<f32> {
            let place = |index: usize| {
                let (head, inside) = (index / dim * dim, index % dim);
                // The inverse of the packing: left halves first, then right ones.
                head + if inside < dim / 2 {
                    2 * inside
                } else {
                    2 * (inside - dim / 2) + 1
                }
            };
            (0..values.len())
                .map(|index| values[place(index)])
                .collect()
        };
        let mut found = reorder(&expected);
        ops.rotate(&mut found, rows, &rotation);
        ReferenceOps::new(1).rotate(&mut expected, rows, &rotation);
        assert_close(name, &found, &reorder(&expected), 1e-6);
    }
    on_each_variant!(check);
}

/// The exponential by lanes: exact at 0, close elsewhere, finite at the ends.
#[test]
fn exponentials_are_close_and_exact_at_zero() {
    struct Exp<'a>(&'a [f32; LANES]);
    impl Kernel for Exp<'_> {
        type Output = [f32; LANES];
        #[inline(always)]
        fn run<I: Isa>(self, isa: I) -> [f32; LANES] {
            let mut out = [0.0; LANES];
            isa.store(isa.exp(isa.load(self.0)), &mut out);
            out
        }
    }
    fn check<I: Isa>(name: &str) {
        let Some(isa) = I::detect() else { return };
        assert_eq!(isa.run(Exp(&[0.0; LANES])), [1.0; LANES], "{name}");
        let ends = isa.run(Exp(&[-1e30; LANES]))[0]..isa.run(Exp(&[1e30; LANES]))[0];
        assert!(
            ends.start >= 0.0 && ends.start < 1e-37 && ends.end.is_finite(),
            "{name}: {ends:?}"
        );
        let mut noise = Noise(7);
        for _ in 0..20_000 {
            let values: [f32; LANES] = std::array::from_fn(|_| noise.float() * 86.0);
            let found = isa.run(Exp(&values));
            assert_same(name, &found, &Portable.run(Exp(&values)));
            for (found, value) in found.iter().zip(values) {
                let expected = f64::from(value).exp();
                let error = (f64::from(*found) - expected).abs() / expected;
                assert!(
                    error < 3e-7,
                    "{name}: e^{value} is {expected:e}, not {found:e}"
                );
            }
        }
    }
    on_each_variant!(check);
}
