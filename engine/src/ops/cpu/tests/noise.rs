//! Random weights and rows that quantisation holds exactly.

use half::f16;
use prompt::gguf::Dtype;

use crate::ops::Precision;
use crate::ops::reference::dequant::stored_bytes;

/// A small generator of reproducible noise (splitmix64).
pub(super) struct Noise(pub(super) u64);

impl Noise {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        bits ^ (bits >> 31)
    }

    /// Between -1 and 1.
    pub(super) fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(super) fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.float()).collect()
    }

    pub(super) fn half(&mut self) -> f16 {
        f16::from_f32(self.float())
    }

    /// Bytes of a weight whose scales and minimums are moderate numbers.
    pub(super) fn weight(&mut self, dtype: Dtype, values: usize) -> Vec<u8> {
        let bytes = stored_bytes(dtype, values).expect("whole blocks");
        let mut stored: Vec<u8> = (0..bytes).map(|_| self.next() as u8).collect();
        let (block, halves) = match dtype {
            Dtype::F32 => {
                return self
                    .floats(values)
                    .iter()
                    .flat_map(|value| value.to_le_bytes())
                    .collect();
            }
            Dtype::F16 => (2, 1),
            Dtype::BF16 => {
                let brain = |value: &f32| half::bf16::from_f32(*value).to_le_bytes();
                return self.floats(values).iter().flat_map(brain).collect();
            }
            Dtype::Q4_0 => (18, 1),
            Dtype::Q4_1 => (20, 2),
            Dtype::Q5_0 => (22, 1),
            Dtype::Q5_1 => (24, 2),
            Dtype::Q4K => (144, 2),
            Dtype::Q5K => (176, 2),
            Dtype::Q6K => {
                for block in stored.chunks_exact_mut(210) {
                    let small = f16::from_f32(self.float() / 128.0);
                    block[208..].copy_from_slice(&small.to_le_bytes());
                }
                return stored;
            }
            _ => (34, 1),
        };
        let is_k = matches!(dtype, Dtype::Q4K | Dtype::Q5K);
        for block in stored.chunks_exact_mut(block) {
            for half in block.chunks_exact_mut(2).take(halves) {
                // Scales of up to 63 of these.
                let part = if is_k { 1.0 / 64.0 } else { 1.0 };
                let value = f16::from_f32(self.float() * part);
                half.copy_from_slice(&value.to_le_bytes());
            }
        }
        stored
    }

    /// Rows that quants of this precision hold exactly.
    pub(super) fn exact_rows(
        &mut self,
        precision: Precision,
        rows: usize,
        cols: usize,
    ) -> Vec<f32> {
        let mut values = Vec::new();
        for _ in 0..rows {
            // Of three blocks or more, one may stand out.
            let blocks = cols / 32;
            let out = (blocks > 2).then(|| self.next() as usize % blocks);
            for block in 0..blocks {
                values.extend(match precision {
                    Precision::Coarse => self.exact_block(1, 1.0),
                    Precision::Fine => self.exact_block(128, 1.0),
                    Precision::Outliers(_) if out == Some(block) => self.exact_block(128, 1.0),
                    Precision::Outliers(_) => self.exact_block(1, 1.0 / 16.0),
                });
            }
        }
        values
    }

    /// Multiples of `1 / parts` of which the largest is 127, all times `unit`.
    fn exact_block(&mut self, parts: u64, unit: f32) -> [f32; 32] {
        let most = 127 * parts;
        let mut block = [0.0; 32].map(|_: f32| {
            let value = (self.next() % (2 * most + 1)) as f32 - most as f32;
            value / parts as f32 * unit
        });
        let place = (self.next() % 32) as usize;
        let sign = if self.next().is_multiple_of(2) {
            1.0
        } else {
            -1.0
        };
        block[place] = sign * 127.0 * unit;
        block
    }
}
