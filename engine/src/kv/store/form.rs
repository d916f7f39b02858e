//! How are blocks kept below the pool: bit for bit, or in about half of the bytes?
//!
//! In 8 bits, 16 values share a scale: for keys those of one dimension over a block's 16 tokens (what
//! differs most between dimensions is how large they are), for values 16 dimensions of one token. So 16
//! values of 16 bits take 18 bytes, of 32 bits 20. What comes back is off by at most half a step, 1/254 of
//! the largest of its group (of 16-bit values at least 4e-6); `engine/tests/golden` holds what that does to a
//! model's logits. Answers behind such blocks are not those of a node that keeps them exactly, so it is
//! never the default, and blocks of one form are none of the other's.

use crate::kv::layout::{KvDtype, KvValue};

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

impl Form {
    /// Bytes of a block whose body has `body_bytes` in the pool, in values of this format.
    pub fn kept_bytes(self, dtype: KvDtype, body_bytes: usize) -> usize {
        match self {
            Self::Exact => body_bytes,
            Self::Int8 => body_bytes / (GROUP * dtype.bytes()) * (GROUP + dtype.bytes()),
        }
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
        if self == Self::Exact {
            return to.copy_from_slice(body);
        }
        let groups = body.chunks_exact(GROUP * dtype.bytes());
        for (from, to) in groups.zip(to.chunks_exact_mut(GROUP + dtype.bytes())) {
            let values = read(dtype, from);
            let largest = values
                .iter()
                .fold(0.0_f32, |most, value| most.max(value.abs()));
            let (scale, steps) = to.split_at_mut(dtype.bytes());
            let scale = write_scale(dtype, largest / STEPS, scale);
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
        if self == Self::Exact {
            return body.copy_from_slice(from);
        }
        let groups = body.chunks_exact_mut(GROUP * dtype.bytes());
        for (from, to) in from.chunks_exact(GROUP + dtype.bytes()).zip(groups) {
            let (scale, steps) = from.split_at(dtype.bytes());
            let scale = value_at(dtype, scale);
            for (step, to) in steps.iter().zip(to.chunks_exact_mut(dtype.bytes())) {
                let value = f32::from(i8::from_le_bytes([*step])) * scale;
                // The largest values round up to what their format cannot hold.
                let most = largest(dtype);
                write_value(dtype, value.clamp(-most, most), to);
            }
        }
    }

    /// Whether what is kept gives finite values alone, whoever wrote it: attention can mask no others.
    pub fn is_finite(self, dtype: KvDtype, kept: &[u8]) -> bool {
        // Values, or the scales that lie between them.
        let apart = match self {
            Self::Exact => dtype.bytes(),
            Self::Int8 => GROUP + dtype.bytes(),
        };
        // Without a way out in the middle, so that many are looked at at once.
        kept.chunks_exact(apart)
            .fold(true, |finite, value| finite & is_finite_value(dtype, value))
    }
}

/// Neither infinite nor not a number.
fn is_finite_value(dtype: KvDtype, from: &[u8]) -> bool {
    match dtype {
        KvDtype::F16 => KvValue::is_finite(u16::from_le_bytes([from[0], from[1]])),
        KvDtype::F32 => {
            KvValue::is_finite(f32::from_le_bytes([from[0], from[1], from[2], from[3]]))
        }
    }
}

fn largest(dtype: KvDtype) -> f32 {
    match dtype {
        KvDtype::F16 => half::f16::MAX.to_f32(),
        KvDtype::F32 => f32::MAX,
    }
}

fn read(dtype: KvDtype, from: &[u8]) -> [f32; GROUP] {
    let mut values = [0.0; GROUP];
    for (value, from) in values.iter_mut().zip(from.chunks_exact(dtype.bytes())) {
        *value = value_at(dtype, from);
    }
    values
}

fn value_at(dtype: KvDtype, from: &[u8]) -> f32 {
    match dtype {
        KvDtype::F16 => half::f16::from_le_bytes([from[0], from[1]]).to_f32(),
        KvDtype::F32 => f32::from_le_bytes([from[0], from[1], from[2], from[3]]),
    }
}

fn write_value(dtype: KvDtype, value: f32, to: &mut [u8]) {
    match dtype {
        KvDtype::F16 => to.copy_from_slice(&half::f16::from_f32(value).to_le_bytes()),
        KvDtype::F32 => to.copy_from_slice(&value.to_le_bytes()),
    }
}

/// Writes a scale, and gives it as it will be read.
fn write_scale(dtype: KvDtype, scale: f32, to: &mut [u8]) -> f32 {
    write_value(dtype, scale, to);
    value_at(dtype, to)
}

#[cfg(test)]
mod tests {
    //! Catches values that come back further off than half a step, or not finite, and groups that
    //! overlap.
    use super::*;

    fn body(dtype: KvDtype, values: &[f32]) -> Vec<u8> {
        let mut body = vec![0; values.len() * dtype.bytes()];
        for (value, to) in values.iter().zip(body.chunks_exact_mut(dtype.bytes())) {
            write_value(dtype, *value, to);
        }
        body
    }

    #[test]
    fn what_comes_back_is_near() {
        for dtype in [KvDtype::F16, KvDtype::F32] {
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
            let values: Vec<f32> = values.chain([largest(dtype); GROUP]).collect();
            let exact = body(dtype, &values);
            let mut kept = vec![0; Form::Int8.kept_bytes(dtype, exact.len())];
            Form::Int8.keep(dtype, &exact, &mut kept);
            let mut back = vec![1; exact.len()];
            Form::Int8.restore(dtype, &kept, &mut back);
            let sized = exact.chunks_exact(GROUP * dtype.bytes());
            for (exact, back) in sized.zip(back.chunks_exact(GROUP * dtype.bytes())) {
                let (exact, back) = (read(dtype, exact), read(dtype, back));
                let largest = exact
                    .iter()
                    .fold(0.0_f32, |most, value| most.max(value.abs()));
                // A scale of half precision adds a little, and the smallest have steps of 2^-24.
                let coarse = if dtype == KvDtype::F16 {
                    STEPS * 3e-8
                } else {
                    0.0
                };
                let near = largest / STEPS * 0.57 + coarse;
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
        for dtype in [KvDtype::F16, KvDtype::F32] {
            for form in [Form::Exact, Form::Int8] {
                let mut kept = vec![0; form.kept_bytes(dtype, 4 * GROUP * dtype.bytes())];
                form.keep(dtype, &body(dtype, &[-3.0; 4 * GROUP]), &mut kept);
                assert!(form.is_finite(dtype, &kept), "{form:?} of {dtype:?}");
                for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let mut kept = kept.clone();
                    let second = kept.len() / 4;
                    write_value(dtype, wrong, &mut kept[second..][..dtype.bytes()]);
                    assert!(!form.is_finite(dtype, &kept), "{form:?} of {dtype:?}");
                }
                // Any steps do: it is the scale that counts.
                if form == Form::Int8 {
                    kept[dtype.bytes()..][..GROUP].fill(0xff);
                    assert!(form.is_finite(dtype, &kept), "{dtype:?}");
                }
            }
        }
    }

    #[test]
    fn sizes_and_marks() {
        assert_eq!(Form::Int8.kept_bytes(KvDtype::F16, 368_640), 207_360);
        assert_eq!(Form::Int8.kept_bytes(KvDtype::F32, 640), 200);
        let exact = body(KvDtype::F16, &[1.5; 2 * GROUP]);
        let mut kept = vec![0; exact.len()];
        Form::Exact.keep(KvDtype::F16, &exact, &mut kept);
        assert_eq!(kept, exact);
        assert_eq!(Form::Exact.mark([3; 32]), [3; 32]);
        assert_ne!(Form::Int8.mark([3; 32]), [3; 32]);
    }
}
