//! The K formats: blocks of 256 values in groups whose scales are small integers.

use prompt::gguf::Dtype;

use super::half;

/// Values in one block.
pub(crate) const K_BLOCK: usize = 256;

/// See [`super::dequantise`].
pub(super) fn dequantise(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    let (_, block_bytes) = dtype.block().unwrap_or((1, 1));
    let stored = bytes.chunks_exact(block_bytes as usize);
    for (values, stored) in out.chunks_exact_mut(K_BLOCK).zip(stored) {
        if dtype == Dtype::Q6K {
            SixBits::read(stored).values(values);
        } else {
            KBlock::read(dtype, stored).values(values);
        }
    }
}

/// A block of Q4_K or Q5_K: value = scale × scales\[group\] × quant - minimum × minimums\[group\], in
/// groups of 32.
pub(crate) struct KBlock {
    /// An f16, little-endian.
    pub(crate) scale: [u8; 2],
    /// The same.
    pub(crate) minimum: [u8; 2],
    pub(crate) scales: [u8; 8],
    pub(crate) minimums: [u8; 8],
    pub(crate) quants: [u8; K_BLOCK],
}

impl KBlock {
    /// Two f16, 12 bytes of scales and minimums, of Q5_K 32 bytes of fifth bits, 128 bytes of nibbles.
    pub(crate) fn read(dtype: Dtype, stored: &[u8]) -> KBlock {
        let packed = &stored[4..16];
        let (fifths, nibbles) = match dtype {
            Dtype::Q5K => (Some(&stored[16..48]), &stored[48..]),
            _ => (None, &stored[16..]),
        };
        let (mut scales, mut minimums) = ([0; 8], [0; 8]);
        for group in 0..4 {
            // The first four lie in the low six bits; the others' high two bits lie above those.
            let (scale, minimum, rest) = (packed[group], packed[group + 4], packed[group + 8]);
            (scales[group], minimums[group]) = (scale & 63, minimum & 63);
            scales[group + 4] = rest & 15 | scale >> 6 << 4;
            minimums[group + 4] = rest >> 4 | minimum >> 6 << 4;
        }
        let mut quants = [0; K_BLOCK];
        for (place, quant) in quants.iter_mut().enumerate() {
            let (group, column) = (place / 32, place % 32);
            let both = nibbles[group / 2 * 32 + column];
            let four = if group % 2 == 0 { both & 15 } else { both >> 4 };
            let fifth = fifths.map_or(0, |fifths| fifths[column] >> group & 1);
            *quant = four | fifth << 4;
        }
        KBlock {
            scale: [stored[0], stored[1]],
            minimum: [stored[2], stored[3]],
            scales,
            minimums,
            quants,
        }
    }

    fn values(&self, out: &mut [f32]) {
        let (scale, minimum) = (half(self.scale), half(self.minimum));
        let groups = out.chunks_exact_mut(32).zip(self.quants.chunks_exact(32));
        for (group, (values, quants)) in groups.enumerate() {
            let scale = scale * f32::from(self.scales[group]);
            let minimum = minimum * f32::from(self.minimums[group]);
            for (value, quant) in values.iter_mut().zip(quants) {
                *value = scale * f32::from(*quant) - minimum;
            }
        }
    }
}

/// A block of Q6_K: value = scale × scales\[group\] × quant, in groups of 16.
pub(crate) struct SixBits {
    /// An f16, little-endian.
    pub(crate) scale: [u8; 2],
    pub(crate) scales: [i8; 16],
    /// From -32 to 31.
    pub(crate) quants: [i8; K_BLOCK],
}

impl SixBits {
    /// 128 bytes of low nibbles, 64 bytes of the two bits above, 16 scales, an f16.
    pub(crate) fn read(stored: &[u8]) -> SixBits {
        let (nibbles, rest) = stored.split_at(128);
        let (pairs, rest) = rest.split_at(64);
        let mut scales = [0; 16];
        for (scale, byte) in scales.iter_mut().zip(rest) {
            *scale = *byte as i8;
        }
        let mut quants = [0; K_BLOCK];
        for (place, quant) in quants.iter_mut().enumerate() {
            // Two halves; in each four rows of 32, of which two share their bytes of nibbles.
            let (half, row, column) = (place / 128, place % 128 / 32, place % 32);
            let both = nibbles[64 * half + 32 * (row % 2) + column];
            let four = if row < 2 { both & 15 } else { both >> 4 };
            let two = pairs[32 * half + column] >> (2 * row) & 3;
            *quant = (four | two << 4) as i8 - 32;
        }
        SixBits {
            scale: [rest[16], rest[17]],
            scales,
            quants,
        }
    }

    fn values(&self, out: &mut [f32]) {
        let groups = out.chunks_exact_mut(16).zip(self.quants.chunks_exact(16));
        for ((values, quants), scale) in groups.zip(self.scales) {
            let scale = half(self.scale) * f32::from(scale);
            for (value, quant) in values.iter_mut().zip(quants) {
                *value = scale * f32::from(*quant);
            }
        }
    }
}
