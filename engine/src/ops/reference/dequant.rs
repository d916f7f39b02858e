//! What number does a quantised weight stand for?
//!
//! The formats are ggml's. A block is 32 values with one f16 scale; Q4_0 counts from -8, Q4_1 adds
//! an f16 minimum, and the low nibbles of a block are its first 16 values, the high ones its last.

use half::f16;
use prompt::gguf::Dtype;

/// Values in one quantised block.
pub(crate) const QUANT_BLOCK: usize = 32;

/// Bytes that `values` values take in a format; `None` for a format that is not read here or a
/// count that is not whole blocks.
pub(crate) fn stored_bytes(dtype: Dtype, values: usize) -> Option<usize> {
    let blocks = || {
        values
            .is_multiple_of(QUANT_BLOCK)
            .then_some(values / QUANT_BLOCK)
    };
    match dtype {
        Dtype::F32 => values.checked_mul(4),
        Dtype::F16 => values.checked_mul(2),
        Dtype::Q4_0 => blocks()?.checked_mul(18),
        Dtype::Q4_1 => blocks()?.checked_mul(20),
        Dtype::Q8_0 => blocks()?.checked_mul(34),
        Dtype::Other(_) => None,
    }
}

/// Fills `out` with the values that `bytes` store. The lengths must agree with
/// [`stored_bytes`]; the loader has checked both.
pub(crate) fn dequantise(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(
        stored_bytes(dtype, out.len()),
        Some(bytes.len()),
        "{dtype:?} of {}",
        out.len()
    );
    match dtype {
        Dtype::F32 => {
            for (value, stored) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*stored);
            }
        }
        Dtype::F16 => {
            for (value, stored) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *value = half(*stored);
            }
        }
        Dtype::Q8_0 => {
            for (values, stored) in blocks::<34>(out, bytes) {
                let scale = half([stored[0], stored[1]]);
                for (value, quant) in values.iter_mut().zip(&stored[2..]) {
                    *value = scale * f32::from(*quant as i8);
                }
            }
        }
        Dtype::Q4_0 => {
            for (values, stored) in blocks::<18>(out, bytes) {
                let scale = half([stored[0], stored[1]]);
                for (index, quant) in stored[2..].iter().enumerate() {
                    values[index] = scale * (f32::from(quant & 15) - 8.0);
                    values[index + 16] = scale * (f32::from(quant >> 4) - 8.0);
                }
            }
        }
        Dtype::Q4_1 => {
            for (values, stored) in blocks::<20>(out, bytes) {
                let scale = half([stored[0], stored[1]]);
                let minimum = half([stored[2], stored[3]]);
                for (index, quant) in stored[4..].iter().enumerate() {
                    values[index] = scale * f32::from(quant & 15) + minimum;
                    values[index + 16] = scale * f32::from(quant >> 4) + minimum;
                }
            }
        }
        Dtype::Other(_) => {}
    }
}

fn half(bytes: [u8; 2]) -> f32 {
    f16::from_le_bytes(bytes).to_f32()
}

fn blocks<'a, const BYTES: usize>(
    out: &'a mut [f32],
    bytes: &'a [u8],
) -> impl Iterator<Item = (&'a mut [f32; QUANT_BLOCK], &'a [u8; BYTES])> {
    out.as_chunks_mut::<QUANT_BLOCK>()
        .0
        .iter_mut()
        .zip(bytes.as_chunks::<BYTES>().0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Would catch swapped nibbles, a wrong offset or a wrong byte order.
    #[test]
    fn each_format_by_hand() {
        fn check(dtype: Dtype, bytes: &[u8], expected: &[(usize, f32)]) {
            let mut out = [f32::NAN; QUANT_BLOCK];
            dequantise(dtype, bytes, &mut out);
            for (index, value) in expected {
                assert_eq!(out[*index], *value, "{dtype:?} at {index}");
            }
        }
        let half_scale = f16::from_f32(0.5).to_le_bytes();
        let minus_three = f16::from_f32(-3.0).to_le_bytes();
        let nibbles = |head: &[u8]| {
            let mut bytes = head.to_vec();
            bytes.extend([0xF0, 0x1A]);
            bytes.resize(head.len() + 16, 0x88);
            bytes
        };
        let q4_0 = [
            (0, -4.0),
            (16, 3.5),
            (1, 1.0),
            (17, -3.5),
            (2, 0.0),
            (31, 0.0),
        ];
        check(Dtype::Q4_0, &nibbles(&half_scale), &q4_0);
        let q4_1 = [(0, -3.0), (16, 4.5), (1, 2.0), (17, -2.5), (31, 1.0)];
        check(
            Dtype::Q4_1,
            &nibbles(&[half_scale, minus_three].concat()),
            &q4_1,
        );
        let mut q8_0 = half_scale.to_vec();
        q8_0.extend([127, 0x80]);
        q8_0.resize(34, 2);
        check(Dtype::Q8_0, &q8_0, &[(0, 63.5), (1, -64.0), (31, 1.0)]);
    }
}
