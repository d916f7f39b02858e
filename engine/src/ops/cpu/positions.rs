//! Rope, and the way of keys and values into the pool.

use super::isa::{Isa, Kernel, LANES};
use crate::kv::storage::{BLOCK_TOKENS, KvShape};
use crate::ops::Rotation;

/// The largest finite f16: what is stored must stay finite, because masked positions are
/// multiplied by 0 and not skipped.
const HALF_MAX: f32 = 65_504.0;

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
pub(crate) struct StoreBlock<'a> {
    /// The block's tiles of one layer, head after head.
    pub(crate) tiles: &'a mut [u16],
    pub(crate) shape: KvShape,
    /// Rows of all heads, one per position.
    pub(crate) keys: &'a [f32],
    pub(crate) values: &'a [f32],
    /// The first position's place in the block.
    pub(crate) token: usize,
}

impl Kernel for StoreBlock<'_> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let (dim, half_tile) = (self.shape.head_dim, self.shape.half_tile());
        let row_len = self.shape.heads * dim;
        let rows = self
            .keys
            .chunks_exact(row_len)
            .zip(self.values.chunks_exact(row_len));
        for (index, (keys, values)) in rows.enumerate() {
            let token = self.token + index;
            let heads = keys.chunks_exact(dim).zip(values.chunks_exact(dim));
            for (tile, (keys, values)) in self.tiles.chunks_exact_mut(2 * half_tile).zip(heads) {
                let (key_tile, value_tile) = tile.split_at_mut(half_tile);
                let mut columns = key_tile.as_chunks_mut::<BLOCK_TOKENS>().0.iter_mut();
                for keys in keys.as_chunks::<LANES>().0 {
                    let mut halves = [0; LANES];
                    isa.store_half(finite(isa, isa.load(keys)), &mut halves);
                    for (half, column) in halves.iter().zip(&mut columns) {
                        column[token] = *half;
                    }
                }
                let row = value_tile[token * dim..][..dim].as_chunks_mut::<LANES>().0;
                for (out, values) in row.iter_mut().zip(values.as_chunks::<LANES>().0) {
                    isa.store_half(finite(isa, isa.load(values)), out);
                }
            }
        }
    }
}

#[inline(always)]
fn finite<I: Isa>(isa: I, value: I::F) -> I::F {
    isa.min(isa.max(value, isa.splat(-HALF_MAX)), isa.splat(HALF_MAX))
}
