//! Where in a tile does a value lie, and which number is it?
//!
//! The slow, obvious reading of a tile, a value at a time: what conversions use, and what kernels are
//! compared with.

use super::{BlockLayout, KvDtype};

/// The two halves of a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Half {
    Keys,
    Values,
}

/// Where a value lies, in bytes from its tile's start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    value: usize,
    /// Its scale; of formats that have none, nothing.
    scale: usize,
}

impl BlockLayout {
    fn place(&self, half: Half, dimension: usize, token: usize) -> Place {
        let dtype = self.dtype;
        let dims = dtype.group_dims(self.head_dim);
        let scales = dtype.scale_bytes() * self.block_tokens;
        let group_bytes = scales + dims * self.block_tokens * dtype.value_bytes();
        let (group, inside) = (dimension / dims, dimension % dims);
        let (half, row) = match half {
            Half::Keys => (0, inside * self.block_tokens + token),
            Half::Values => (self.tile_bytes() / 2, token * dims + inside),
        };
        let start = half + group * group_bytes;
        Place {
            value: start + scales + row * dtype.value_bytes(),
            scale: start + token * dtype.scale_bytes(),
        }
    }

    /// The bytes of a value, for formats without scales.
    pub(super) fn bytes_of<'a>(
        &self,
        tile: &'a [u8],
        (half, dimension, token): (Half, usize, usize),
    ) -> &'a [u8] {
        &tile[self.place(half, dimension, token).value..][..self.dtype.value_bytes()]
    }

    /// Writes them.
    pub(super) fn set_bytes(
        &self,
        tile: &mut [u8],
        (half, dimension, token): (Half, usize, usize),
        bytes: &[u8],
    ) {
        let start = self.place(half, dimension, token).value;
        tile[start..start + self.dtype.value_bytes()].copy_from_slice(bytes);
    }

    /// The number that is stored there.
    pub(crate) fn number(
        &self,
        tile: &[u8],
        (half, dimension, token): (Half, usize, usize),
    ) -> f32 {
        let place = self.place(half, dimension, token);
        let two = |at: usize| [tile[at], tile[at + 1]];
        match self.dtype {
            KvDtype::F16 => half::f16::from_le_bytes(two(place.value)).to_f32(),
            KvDtype::Bf16 => half::bf16::from_le_bytes(two(place.value)).to_f32(),
            KvDtype::F32 => {
                let [low, high] = [two(place.value), two(place.value + 2)];
                f32::from_le_bytes([low[0], low[1], high[0], high[1]])
            }
            KvDtype::Int8 => {
                let scale = half::f16::from_le_bytes(two(place.scale)).to_f32();
                f32::from(i8::from_le_bytes([tile[place.value]])) * scale
            }
        }
    }

    /// Every value of a tile.
    pub(crate) fn each_value(&self) -> impl Iterator<Item = (Half, usize, usize)> + use<> {
        let (dims, tokens) = (self.head_dim, self.block_tokens);
        let of_half = move |half| {
            (0..dims).flat_map(move |dim| (0..tokens).map(move |token| (half, dim, token)))
        };
        of_half(Half::Keys).chain(of_half(Half::Values))
    }

    /// Makes zeros of all values and scales from this position on.
    pub(super) fn clear_from(&self, tile: &mut [u8], tokens: usize) {
        for (half, dimension, token) in self.each_value().filter(|value| value.2 >= tokens) {
            let place = self.place(half, dimension, token);
            tile[place.value..place.value + self.dtype.value_bytes()].fill(0);
            tile[place.scale..place.scale + self.dtype.scale_bytes()].fill(0);
        }
    }
}

#[cfg(test)]
mod tests {
    //! Catches two values at one place, bytes that nobody has, and a place outside the tile.
    use super::super::{HeadRange, KeyOrder};
    use super::*;

    #[test]
    fn values_and_scales_fill_a_tile() {
        for dtype in KvDtype::ALL {
            let layout = BlockLayout {
                dtype,
                key_order: KeyOrder::Halves,
                block_tokens: 16,
                layers: 1,
                kv_heads: 1,
                heads: HeadRange { first: 0, count: 1 },
                head_dim: 96,
            };
            let mut bytes = vec![0; layout.tile_bytes()];
            for (half, dimension, token) in layout.each_value() {
                let place = layout.place(half, dimension, token);
                let value = &mut bytes[place.value..place.value + dtype.value_bytes()];
                value.iter_mut().for_each(|count| *count += 1);
                // A scale has the values of its group.
                if dimension % dtype.group_dims(layout.head_dim) == 0 {
                    let scale = &mut bytes[place.scale..place.scale + dtype.scale_bytes()];
                    scale.iter_mut().for_each(|count| *count += 1);
                }
            }
            assert!(bytes.iter().all(|count| *count == 1), "{dtype:?}");
        }
    }
}
