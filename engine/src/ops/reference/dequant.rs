//! What number does a quantised weight stand for?
//!
//! The formats are ggml's (`ggml-common.h`, `ggml-quants.c`). In most a block is 32 values with one f16
//! scale, and perhaps an f16 minimum; the low nibbles of a block are its first 16 values, the high ones its
//! last, and the fifth bits of all stand together before them. The K formats have blocks of 256 values in
//! groups of 32 (Q6_K: 16) with small integers for scales, and an f16 that these count in.

use half::{bf16, f16};
use prompt::gguf::Dtype;

pub(crate) mod k;

/// Values in one quantised block of most formats.
pub(crate) const QUANT_BLOCK: usize = 32;

/// Values that a format keeps together; `None` for a format that is not read here.
pub(crate) fn values_together(dtype: Dtype) -> Option<usize> {
    match dtype {
        Dtype::Other(_) => None,
        known => known.block().map(|(values, _)| values as usize),
    }
}

/// Bytes that `values` values take in a format; `None` for a format that is not read here or a
/// count that is not whole blocks.
pub(crate) fn stored_bytes(dtype: Dtype, values: usize) -> Option<usize> {
    let together = values_together(dtype)?;
    let (_, bytes) = dtype.block()?;
    let blocks = values
        .is_multiple_of(together)
        .then_some(values / together)?;
    blocks.checked_mul(bytes as usize)
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
        Dtype::BF16 => {
            for (value, stored) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *value = bf16::from_le_bytes(*stored).to_f32();
            }
        }
        Dtype::Q5_0 => {
            for (values, stored) in blocks::<22>(out, bytes) {
                let scale = half([stored[0], stored[1]]);
                let quants = five_bits(&stored[2..]);
                for (value, quant) in values.iter_mut().zip(quants) {
                    *value = scale * (f32::from(quant) - 16.0);
                }
            }
        }
        Dtype::Q5_1 => {
            for (values, stored) in blocks::<24>(out, bytes) {
                let scale = half([stored[0], stored[1]]);
                let minimum = half([stored[2], stored[3]]);
                for (value, quant) in values.iter_mut().zip(five_bits(&stored[4..])) {
                    *value = scale * f32::from(quant) + minimum;
                }
            }
        }
        Dtype::Q4K | Dtype::Q5K | Dtype::Q6K => k::dequantise(dtype, bytes, out),
        Dtype::Other(_) => {}
    }
}

/// The integers of a block of Q5_0 or Q5_1: 32 fifth bits, then 16 bytes of nibbles.
pub(crate) fn five_bits(stored: &[u8]) -> [u8; QUANT_BLOCK] {
    let (fifths, nibbles) = stored.split_at(4);
    let mut quants = [0; QUANT_BLOCK];
    for (place, quant) in quants.iter_mut().enumerate() {
        let both = nibbles[place % 16];
        let four = if place < 16 { both & 15 } else { both >> 4 };
        *quant = four | (fifths[place / 8] >> (place % 8) & 1) << 4;
    }
    quants
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

    /// What ggml's own package makes of random blocks (`goldens/formats.py`), to the bit. Would catch bits
    /// that are taken from another place.
    #[test]
    fn each_format_as_ggml_reads_it() {
        let golden = include_str!("../../../goldens/formats.json");
        let golden: serde_json::Value = serde_json::from_str(golden).expect("JSON");
        let formats = golden.as_object().expect("formats");
        assert_eq!(formats.len(), 8);
        for (name, golden) in formats {
            let number = golden["number"].as_u64().expect("a number") as u32;
            let stored = golden["stored"].as_str().expect("digits");
            let stored: Vec<u8> = (0..stored.len() / 2)
                .map(|at| u8::from_str_radix(&stored[2 * at..][..2], 16).expect("a byte"))
                .collect();
            let expected = golden["bits"].as_array().expect("bits").iter();
            let expected: Vec<u64> = expected.map(|bits| bits.as_u64().expect("bits")).collect();
            let mut found = vec![f32::NAN; expected.len()];
            dequantise(Dtype::from_ggml(number), &stored, &mut found);
            for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
                assert_eq!(
                    u64::from(found.to_bits()),
                    expected,
                    "{name} at {at}: {found}"
                );
            }
        }
    }

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
