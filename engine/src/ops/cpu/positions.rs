//! Rope, and the way of keys and values into the pool.

use super::isa::{Isa, Kernel, LANES};
use super::stored::Stored;
use crate::kv::layout::KvFormat;
use crate::kv::storage::KvShape;
use crate::ops::Rotation;

/// Turns the heads of some rows. Rows are packed so that a pair's sides are half a head apart.
pub(crate) struct Rotate<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) row_len: usize,
    pub(crate) rotation: &'a Rotation,
    /// Index of the first row in the pass.
    pub(crate) first: usize,
}

impl Kernel for Rotate<'_> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let half = self.rotation.half;
        for (index, row) in self.x.chunks_exact_mut(self.row_len).enumerate() {
            let start = (self.first + index) * half;
            let cos = self.rotation.cos[start..][..half].as_chunks::<LANES>().0;
            let sin = self.rotation.sin[start..][..half].as_chunks::<LANES>().0;
            for head in row.chunks_exact_mut(2 * half) {
                let (left, right) = head.as_chunks_mut::<LANES>().0.split_at_mut(half / LANES);
                let angles = cos.iter().zip(sin);
                for ((left, right), (cos, sin)) in left.iter_mut().zip(right).zip(angles) {
                    let (a, b) = (isa.load(left), isa.load(right));
                    let (cos, sin) = (isa.load(cos), isa.load(sin));
                    let minus = isa.sub(isa.splat(0.0), isa.mul(b, sin));
                    isa.store(isa.fma(a, cos, minus), left);
                    isa.store(isa.fma(b, cos, isa.mul(a, sin)), right);
                }
            }
        }
    }
}

/// Writes the keys and values of consecutive positions inside one block.
pub(crate) struct StoreBlock<'a, S: KvFormat> {
    /// The block's tiles of one layer, head after head.
    pub(crate) tiles: &'a mut [S::Element],
    pub(crate) shape: KvShape,
    /// Rows of all heads, one per position.
    pub(crate) keys: &'a [f32],
    pub(crate) values: &'a [f32],
    /// The first position's place in the block.
    pub(crate) token: usize,
}

impl<S: Stored> Kernel for StoreBlock<'_, S> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let (dim, half_tile) = (self.shape.head_dim, self.shape.half_tile::<S>());
        let row_len = self.shape.heads * dim;
        let rows = self
            .keys
            .chunks_exact(row_len)
            .zip(self.values.chunks_exact(row_len));
        for (index, (keys, values)) in rows.enumerate() {
            let token = self.token + index;
            let heads = keys.chunks_exact(dim).zip(values.chunks_exact(dim));
            for (tile, (key, value)) in self.tiles.chunks_exact_mut(2 * half_tile).zip(heads) {
                let (keys, values) = tile.split_at_mut(half_tile);
                S::store_key(isa, key, token, keys.as_chunks_mut().0);
                S::store_value(isa, value, token, values.as_chunks_mut().0);
            }
        }
    }
}
