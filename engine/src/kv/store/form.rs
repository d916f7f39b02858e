//! How are blocks kept below the pool: bit for bit, or in about half of the bytes?
//!
//! In 8 bits, 16 values share a scale: for keys those of one dimension over a block's 16 tokens (what
//! differs most between dimensions is how large they are), for values 16 dimensions of one token. So 16
//! values of 16 bits take 18 bytes, of 32 bits 20. What comes back is off by at most half a step, 1/254 of
//! the largest of its group (of 16-bit values at least 4e-6); `engine/tests/golden` holds what that does to a
//! model's logits. Answers behind such blocks are not those of a node that keeps them exactly, so it is
//! never the default, and blocks of one form are none of the other's. The blocks of a pool that is in 8 bits itself
//! are kept as they are in both.

use crate::kv::layout::KvDtype;

/// Values that share a scale. A tile's keys and its values are multiples of it.
const GROUP: usize = 16;
/// The largest of a group.
const STEPS: f32 = 127.0;

/// See the module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// The bytes that the pool has.
    #[default]
    Exact,
    /// 8 bits a value, and a scale for 16 of them.
    Int8,
}

/// What a pool's values are, where they can be kept in fewer bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Float {
    F16,
    Bf16,
    F32,
}

impl Form {
    /// What is squeezed; `None` where blocks are kept as they are.
    fn squeezed(self, dtype: KvDtype) -> Option<Float> {
        match (self, dtype) {
            (Self::Exact, _) | (Self::Int8, KvDtype::Int8) => None,
            (Self::Int8, KvDtype::F16) => Some(Float::F16),
            (Self::Int8, KvDtype::Bf16) => Some(Float::Bf16),
            (Self::Int8, KvDtype::F32) => Some(Float::F32),
        }
    }

    /// Bytes of a block whose body has `body_bytes` in the pool, in values of this format.
    pub fn kept_bytes(self, dtype: KvDtype, body_bytes: usize) -> usize {
        self.squeezed(dtype).map_or(body_bytes, |float| {
            body_bytes / (GROUP * float.bytes()) * (GROUP + float.bytes())
        })
    }

    /// Tells blocks of this form from others of the same model: a fingerprint of both.
    pub fn mark(self, fingerprint: [u8; 32]) -> [u8; 32] {
        match self {
            Self::Exact => fingerprint,
            Self::Int8 => {
                let mut hasher = blake3::Hasher::new_derive_key("homing 2026-11 KV kept in 8 bits");
                hasher.update(&fingerprint);
                *hasher.finalize().as_bytes()
            }
        }
    }

    /// Writes a body as it is kept. Values must be finite.
    ///
    /// # Panics
    /// If `to` has not just [`Form::kept_bytes`].
    pub fn keep(self, dtype: KvDtype, body: &[u8], to: &mut [u8]) {
        assert_eq!(
            to.len(),
            self.kept_bytes(dtype, body.len()),
            "bytes of a kept block"
        );
        let Some(float) = self.squeezed(dtype) else {
            return to.copy_from_slice(body);
        };
        let groups = body.chunks_exact(GROUP * float.bytes());
        for (from, to) in groups.zip(to.chunks_exact_mut(GROUP + float.bytes())) {
            let values = read(float, from);
            let largest = values
                .iter()
                .fold(0.0_f32, |most, value| most.max(value.abs()));
            let (scale, steps) = to.split_at_mut(float.bytes());
            let scale = write_scale(float, largest / STEPS, scale);
            for (step, value) in steps.iter_mut().zip(values) {
                let nearest = if scale > 0.0 {
                    (value / scale).round()
                } else {
                    0.0
                };
                *step = (nearest.clamp(-STEPS, STEPS) as i8).to_le_bytes()[0];
            }
        }
    }

    /// Writes a body as the pool has it, from what [`Form::keep`] gave.
    ///
    /// # Panics
    /// If `from` has not just [`Form::kept_bytes`].
    pub fn restore(self, dtype: KvDtype, from: &[u8], body: &mut [u8]) {
        assert_eq!(
            from.len(),
            self.kept_bytes(dtype, body.len()),
            "bytes of a kept block"
        );
        let Some(float) = self.squeezed(dtype) else {
            return body.copy_from_slice(from);
        };
        let groups = body.chunks_exact_mut(GROUP * float.bytes());
        for (from, to) in from.chunks_exact(GROUP + float.bytes()).zip(groups) {
            let (scale, steps) = from.split_at(float.bytes());
            let scale = value_at(float, scale);
            for (step, to) in steps.iter().zip(to.chunks_exact_mut(float.bytes())) {
                let value = f32::from(i8::from_le_bytes([*step])) * scale;
                // The largest values round up to what their format cannot hold.
                let most = largest(float);
                write_value(float, value.clamp(-most, most), to);
            }
        }
    }

    /// Whether what is kept gives finite values alone, whoever wrote it: attention can mask no others.
    pub fn is_finite(self, dtype: KvDtype, kept: &[u8]) -> bool {
        let Some(float) = self.squeezed(dtype) else {
            return dtype.are_finite(kept);
        };
        // The scales lie between the steps. Without a way out in the middle, so that many are looked at
        // at once.
        kept.chunks_exact(GROUP + float.bytes())
            .fold(true, |all, group| all & value_at(float, group).is_finite())
    }
}

impl Float {
    fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }
}

fn largest(float: Float) -> f32 {
    match float {
        Float::F16 => half::f16::MAX.to_f32(),
        Float::Bf16 => half::bf16::MAX.to_f32(),
        Float::F32 => f32::MAX,
    }
}

fn read(float: Float, from: &[u8]) -> [f32; GROUP] {
    let mut values = [0.0; GROUP];
    for (value, from) in values.iter_mut().zip(from.chunks_exact(float.bytes())) {
        *value = value_at(float, from);
    }
    values
}

fn value_at(float: Float, from: &[u8]) -> f32 {
    match float {
        Float::F16 => half::f16::from_le_bytes([from[0], from[1]]).to_f32(),
        Float::Bf16 => half::bf16::from_le_bytes([from[0], from[1]]).to_f32(),
        Float::F32 => f32::from_le_bytes([from[0], from[1], from[2], from[3]]),
    }
}

fn write_value(float: Float, value: f32, to: &mut [u8]) {
    match float {
        Float::F16 => to.copy_from_slice(&half::f16::from_f32(value).to_le_bytes()),
        Float::Bf16 => to.copy_from_slice(&half::bf16::from_f32(value).to_le_bytes()),
        Float::F32 => to.copy_from_slice(&value.to_le_bytes()),
    }
}

/// Writes a scale, and gives it as it will be read.
fn write_scale(float: Float, scale: f32, to: &mut [u8]) -> f32 {
    write_value(float, scale, to);
    value_at(float, to)
}

#[cfg(test)]
mod tests {
    //! Catches values that come back further off than half a step, or not finite, and groups that
    //! overlap.
    use super::*;

    const FLOATS: [(KvDtype, Float); 3] = [
        (KvDtype::F16, Float::F16),
        (KvDtype::Bf16, Float::Bf16),
        (KvDtype::F32, Float::F32),
    ];

    fn body(float: Float, values: &[f32]) -> Vec<u8> {
        let mut body = vec![0; values.len() * float.bytes()];
        for (value, to) in values.iter().zip(body.chunks_exact_mut(float.bytes())) {
            write_value(float, *value, to);
        }
        body
    }

    #[test]
    fn what_comes_back_is_near() {
        for (dtype, float) in FLOATS {
            let mut state = 7_u64;
            let mut random = || {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                ((state >> 40) as f32 / (1 << 23) as f32) - 1.0
            };
            // Groups of very different sizes, with zeros, and as large as half precision goes.
            let sizes = [0.0, 1e-6, 0.01, 1.0, 300.0, 65_000.0];
            let values = sizes
                .iter()
                .flat_map(|size| [(); GROUP].map(|()| size * random()));
            let values: Vec<f32> = values.chain([largest(float); GROUP]).collect();
            let exact = body(float, &values);
            let mut kept = vec![0; Form::Int8.kept_bytes(dtype, exact.len())];
            Form::Int8.keep(dtype, &exact, &mut kept);
            let mut back = vec![1; exact.len()];
            Form::Int8.restore(dtype, &kept, &mut back);
            let sized = exact.chunks_exact(GROUP * float.bytes());
            for (exact, back) in sized.zip(back.chunks_exact(GROUP * float.bytes())) {
                let (exact, back) = (read(float, exact), read(float, back));
                let largest = exact
                    .iter()
                    .fold(0.0_f32, |most, value| most.max(value.abs()));
                // A scale of half precision adds a little, and the smallest have steps of 2^-24.
                let coarse = if dtype == KvDtype::F16 {
                    STEPS * 3e-8
                } else {
                    0.0
                };
                // The scale is rounded too, and in bf16 so is what comes back, by up to 2^-9.
                let rounding = if float == Float::Bf16 {
                    2.0 / 512.0
                } else {
                    0.0
                };
                let near = largest / STEPS * 0.57 + largest * rounding + coarse;
                for (exact, back) in exact.iter().zip(back) {
                    assert!(
                        back.is_finite() && (exact - back).abs() <= near,
                        "{exact} {back}"
                    );
                }
            }
        }
    }

    #[test]
    fn what_gives_values_that_are_not_finite() {
        for (dtype, float) in FLOATS {
            for form in [Form::Exact, Form::Int8] {
                let mut kept = vec![0; form.kept_bytes(dtype, 4 * GROUP * float.bytes())];
                form.keep(dtype, &body(float, &[-3.0; 4 * GROUP]), &mut kept);
                assert!(form.is_finite(dtype, &kept), "{form:?} of {dtype:?}");
                for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let mut kept = kept.clone();
                    let second = kept.len() / 4;
                    write_value(float, wrong, &mut kept[second..][..float.bytes()]);
                    assert!(!form.is_finite(dtype, &kept), "{form:?} of {dtype:?}");
                }
                // Any steps do: it is the scale that counts.
                if form == Form::Int8 {
                    kept[float.bytes()..][..GROUP].fill(0xff);
                    assert!(form.is_finite(dtype, &kept), "{dtype:?}");
                }
            }
        }
    }

    #[test]
    fn sizes_and_marks() {
        assert_eq!(Form::Int8.kept_bytes(KvDtype::F16, 368_640), 207_360);
        assert_eq!(Form::Int8.kept_bytes(KvDtype::F32, 640), 200);
        let exact = body(Float::F16, &[1.5; 2 * GROUP]);
        let mut kept = vec![0; exact.len()];
        Form::Exact.keep(KvDtype::F16, &exact, &mut kept);
        assert_eq!(kept, exact);
        // A pool in 8 bits has nothing to gain.
        let steps: Vec<u8> = (0..=255).cycle().take(2304).collect();
        assert_eq!(Form::Int8.kept_bytes(KvDtype::Int8, 2304), 2304);
        let (mut kept, mut back) = (vec![0; 2304], vec![0; 2304]);
        Form::Int8.keep(KvDtype::Int8, &steps, &mut kept);
        Form::Int8.restore(KvDtype::Int8, &kept, &mut back);
        assert_eq!(back, steps);
        assert_eq!(Form::Exact.mark([3; 32]), [3; 32]);
        assert_ne!(Form::Int8.mark([3; 32]), [3; 32]);
    }
}
