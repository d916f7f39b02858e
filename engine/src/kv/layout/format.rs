//! In which formats does a pool store keys and values?
//!
//! [`KvFormat`] is a format as a type, so that kernels and pools are compiled for each; [`KvDtype`] the
//! same as a value, for headers, messages and sizes. Floats are stored one by one. In 8 bits, 16
//! neighbouring dimensions of one token share a scale, so a token's bytes depend on that token alone. A key
//! has few very large dimensions, which coarsen those they share a scale with: with 32 to a scale the format
//! costs twice as much accuracy, with 64 four times (docs/MEASUREMENTS.md).
//!
//! ```text
//! floats    keys    dimension by dimension, 16 tokens each     values    token by token
//! 8 bits    a group of 16 dimensions after the other, each  16 scales (f16), 16 × 16 steps (i8), the
//!           steps in the same order: of keys dimension by dimension, of values token by token
//! ```

/// Neighbouring dimensions that share a scale in 8 bits. Heads are multiples of it.
pub(crate) const GROUP_DIMS: usize = 16;
/// Bytes of a scale: an f16. Steps are found with the scale as it is stored, so its rounding costs nothing.
const SCALE_BYTES: usize = 2;
/// Bytes of the scales of a group: one for each token of a block.
const SCALES_BYTES: usize = SCALE_BYTES * crate::kv::storage::BLOCK_TOKENS;
/// Bytes of a group of a whole block.
const GROUP_BYTES: usize = SCALES_BYTES + GROUP_DIMS * crate::kv::storage::BLOCK_TOKENS;

/// The format of stored keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvDtype {
    /// 16-bit floats.
    F16,
    /// 32-bit floats.
    F32,
    /// 16-bit floats with the range of 32-bit ones.
    Bf16,
    /// 8-bit steps, and an f16 scale for 16 of them.
    Int8,
}

impl KvDtype {
    /// All of them, by their numbers in records.
    pub(super) const ALL: [KvDtype; 4] = [Self::F16, Self::F32, Self::Bf16, Self::Int8];

    /// Bytes of one value, without its share of a scale.
    pub fn value_bytes(self) -> usize {
        match self {
            KvDtype::F16 | KvDtype::Bf16 => 2,
            KvDtype::F32 => 4,
            KvDtype::Int8 => 1,
        }
    }

    /// Bytes of the keys and values of one head for so many tokens.
    pub fn tile_bytes(self, head_dim: usize, tokens: usize) -> usize {
        let values = head_dim * self.value_bytes();
        let scales = head_dim / self.group_dims(head_dim) * self.scale_bytes();
        2 * tokens * (values + scales)
    }

    /// The name on the command line and between nodes.
    pub fn as_str(self) -> &'static str {
        match self {
            KvDtype::F16 => "f16",
            KvDtype::F32 => "f32",
            KvDtype::Bf16 => "bf16",
            KvDtype::Int8 => "int8",
        }
    }

    /// The format of this name.
    pub(crate) fn named(name: &str) -> Option<KvDtype> {
        Self::ALL.into_iter().find(|dtype| dtype.as_str() == name)
    }

    /// Whether heads of this width can be stored so.
    pub(super) fn takes(self, head_dim: usize) -> bool {
        head_dim.is_multiple_of(2) && head_dim.is_multiple_of(self.group_dims(head_dim))
    }

    /// Whether every value of this format is one of the other too: a step times its scale has 18 bits,
    /// so it is an f32 and no shorter float.
    pub(super) fn is_within(self, other: KvDtype) -> bool {
        self == other || other == KvDtype::F32
    }

    /// Neighbouring dimensions that are stored together.
    pub(super) fn group_dims(self, head_dim: usize) -> usize {
        match self {
            KvDtype::Int8 => GROUP_DIMS,
            KvDtype::F16 | KvDtype::F32 | KvDtype::Bf16 => head_dim,
        }
    }

    /// Bytes of a group's scale, a token.
    pub(super) fn scale_bytes(self) -> usize {
        match self {
            KvDtype::Int8 => SCALE_BYTES,
            KvDtype::F16 | KvDtype::F32 | KvDtype::Bf16 => 0,
        }
    }

    /// Whether all values of whole tiles are finite: attention can mask no others.
    pub(crate) fn are_finite(self, tiles: &[u8]) -> bool {
        // Without a way out in the middle, so that many are looked at at once.
        match self {
            KvDtype::F16 => halves_are_finite(tiles, F16_EXPONENT),
            KvDtype::Bf16 => halves_are_finite(tiles, BF16_EXPONENT),
            KvDtype::F32 => {
                let values = tiles.as_chunks().0.iter();
                values.fold(true, |all, bytes| {
                    all & f32::from_le_bytes(*bytes).is_finite()
                })
            }
            // Any steps do: it is the scales that count.
            KvDtype::Int8 => {
                let groups = tiles.chunks_exact(GROUP_BYTES);
                groups.fold(true, |all, group| {
                    all & halves_are_finite(&group[..SCALES_BYTES], F16_EXPONENT)
                })
            }
        }
    }
}

/// The bits that are all set in what is not finite.
const F16_EXPONENT: u16 = 0x7c00;
const BF16_EXPONENT: u16 = 0x7f80;

fn halves_are_finite(bytes: &[u8], exponent: u16) -> bool {
    let halves = bytes.as_chunks().0.iter();
    halves.fold(true, |all, bytes| {
        all & (u16::from_le_bytes(*bytes) & exponent != exponent)
    })
}

/// What a pool's memory is made of.
pub trait Element: Copy + Default + std::fmt::Debug + Send + Sync {
    /// Writes elements as they travel over `to`, which has room for just them.
    fn copy_out(elements: &[Self], to: &mut [u8]);

    /// Reads elements back that [`Element::copy_out`] wrote.
    fn copy_in(from: &[u8], elements: &mut [Self]);
}

/// A format of keys and values, as a type.
pub trait KvFormat: Copy + Default + std::fmt::Debug + Send + Sync + 'static {
    /// What its tiles are made of.
    type Element: Element;
    /// The same as a value.
    const DTYPE: KvDtype;

    /// Whether all values of whole tiles are finite.
    fn are_finite(tiles: &[Self::Element]) -> bool;
}

/// Elements are the bits of an f16.
#[derive(Debug, Clone, Copy, Default)]
pub struct F16;

/// Elements are the bits of a bf16.
#[derive(Debug, Clone, Copy, Default)]
pub struct Bf16;

/// Elements are bytes: steps, and the halves of scales between them.
#[derive(Debug, Clone, Copy, Default)]
pub struct Int8;

/// What the reference ops keep.
#[derive(Debug, Clone, Copy, Default)]
pub struct F32;

impl KvFormat for F16 {
    type Element = u16;
    const DTYPE: KvDtype = KvDtype::F16;

    fn are_finite(tiles: &[u16]) -> bool {
        tiles.iter().fold(true, |all, bits| {
            all & (bits & F16_EXPONENT != F16_EXPONENT)
        })
    }
}

impl KvFormat for Bf16 {
    type Element = u16;
    const DTYPE: KvDtype = KvDtype::Bf16;

    fn are_finite(tiles: &[u16]) -> bool {
        tiles.iter().fold(true, |all, bits| {
            all & (bits & BF16_EXPONENT != BF16_EXPONENT)
        })
    }
}

impl KvFormat for Int8 {
    type Element = u8;
    const DTYPE: KvDtype = KvDtype::Int8;

    fn are_finite(tiles: &[u8]) -> bool {
        Self::DTYPE.are_finite(tiles)
    }
}

impl KvFormat for F32 {
    type Element = f32;
    const DTYPE: KvDtype = KvDtype::F32;

    fn are_finite(tiles: &[f32]) -> bool {
        tiles
            .iter()
            .fold(true, |all, value| all & value.is_finite())
    }
}

impl Element for u8 {
    fn copy_out(elements: &[u8], to: &mut [u8]) {
        to.copy_from_slice(elements);
    }

    fn copy_in(from: &[u8], elements: &mut [u8]) {
        elements.copy_from_slice(from);
    }
}

impl Element for u16 {
    fn copy_out(elements: &[u16], to: &mut [u8]) {
        let (to, _rest) = to.as_chunks_mut();
        to.iter_mut()
            .zip(elements)
            .for_each(|(to, bits)| *to = bits.to_le_bytes());
    }

    fn copy_in(from: &[u8], elements: &mut [u16]) {
        let (from, _rest) = from.as_chunks();
        elements
            .iter_mut()
            .zip(from)
            .for_each(|(bits, bytes)| *bits = u16::from_le_bytes(*bytes));
    }
}

impl Element for f32 {
    fn copy_out(elements: &[f32], to: &mut [u8]) {
        let (to, _rest) = to.as_chunks_mut();
        to.iter_mut()
            .zip(elements)
            .for_each(|(to, value)| *to = value.to_le_bytes());
    }

    fn copy_in(from: &[u8], elements: &mut [f32]) {
        let (from, _rest) = from.as_chunks();
        elements
            .iter_mut()
            .zip(from)
            .for_each(|(value, bytes)| *value = f32::from_le_bytes(*bytes));
    }
}

#[cfg(test)]
mod tests {
    //! Catches sizes that leave scales out, and a value that is not finite and not seen.
    use super::*;

    #[test]
    fn sizes() {
        let rows = [
            (KvDtype::F16, 64, 4096),
            (KvDtype::Bf16, 64, 4096),
            (KvDtype::F32, 64, 8192),
            // 2 × 64 × 16 steps, and 2 × 4 × 16 scales of two bytes.
            (KvDtype::Int8, 64, 2304),
            (KvDtype::Int8, 32, 1152),
        ];
        for (dtype, head_dim, bytes) in rows {
            assert_eq!(dtype.tile_bytes(head_dim, 16), bytes, "{dtype:?}");
            assert!(dtype.takes(head_dim));
            assert_eq!(KvDtype::named(dtype.as_str()), Some(dtype));
        }
        assert!(!KvDtype::Int8.takes(40) && KvDtype::F16.takes(40) && !KvDtype::F16.takes(3));
        assert_eq!(KvDtype::named("fp8"), None);
    }

    /// Every byte of a tile of each format set to 0xff in turn: in 8 bits only scales matter.
    #[test]
    fn what_is_not_finite_is_seen() {
        for dtype in KvDtype::ALL {
            let mut tile = vec![0; dtype.tile_bytes(64, 16)];
            assert!(dtype.are_finite(&tile));
            for at in (0..tile.len()).step_by(dtype.value_bytes().max(2)) {
                let bytes = at..at + dtype.value_bytes().max(2);
                tile[bytes.clone()].fill(0xff);
                let scale = dtype != KvDtype::Int8 || at % GROUP_BYTES < SCALES_BYTES;
                assert_eq!(dtype.are_finite(&tile), !scale, "{dtype:?} at {at}");
                tile[bytes].fill(0);
            }
        }
    }
}
