//! Where do the keys and values of a block lie in memory?
//!
//! One allocation for the whole pool: layer, then block, then head, then a *tile*: the keys of 16
//! tokens, transposed (so that one vector register holds the same dimension of 16 tokens and a
//! score needs no sum across lanes), followed by their values, token by token. They are kept in the
//! format the ops read them in, a type that [`KvFormat`] describes.
//!
//! The memory is zeroed by the operating system and so costs nothing before it is first written;
//! every value in it is finite at all times, which lets attention multiply masked positions by 0.

pub use cache_index::block::BLOCK_TOKENS;

use crate::kv::layout::KvFormat;

/// One block of the KV pool: an index below the number of blocks in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

/// The keys and values of every block in every layer.
#[derive(Debug)]
pub struct KvStorage<F: KvFormat> {
    elements: Vec<F::Element>,
    layers: usize,
    shape: KvShape,
}

/// The sizes that address a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Blocks in the pool.
    pub blocks: usize,
    /// Key and value heads.
    pub heads: usize,
    /// Width of one head.
    pub head_dim: usize,
}

impl KvShape {
    /// Elements in the keys (or the values) of one tile.
    #[inline]
    pub fn half_tile<F: KvFormat>(&self) -> usize {
        let bytes = F::DTYPE.tile_bytes(self.head_dim, BLOCK_TOKENS);
        bytes / 2 / size_of::<F::Element>()
    }

    /// Where the keys of a tile begin; its values follow after [`KvShape::half_tile`].
    #[inline]
    pub fn tile_start<F: KvFormat>(&self, layer: usize, block: BlockId, head: usize) -> usize {
        ((layer * self.blocks + block.0 as usize) * self.heads + head) * 2 * self.half_tile::<F>()
    }
}

impl<F: KvFormat> KvStorage<F> {
    /// A zeroed pool.
    pub fn new(layers: usize, shape: KvShape) -> KvStorage<F> {
        let len = layers * shape.blocks * shape.heads * 2 * shape.half_tile::<F>();
        KvStorage {
            elements: vec![F::Element::default(); len],
            layers,
            shape,
        }
    }

    /// The sizes that address a tile.
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// All elements, to be addressed by [`KvShape::tile_start`].
    pub fn elements(&self) -> &[F::Element] {
        &self.elements
    }

    /// All elements, for writing.
    pub fn elements_mut(&mut self) -> &mut [F::Element] {
        &mut self.elements
    }

    /// Copies one block onto another in every layer.
    pub fn copy_block(&mut self, from: BlockId, to: BlockId) {
        let len = self.shape.heads * 2 * self.shape.half_tile::<F>();
        for layer in 0..self.layers {
            let source = self.shape.tile_start::<F>(layer, from, 0);
            let target = self.shape.tile_start::<F>(layer, to, 0);
            self.elements.copy_within(source..source + len, target);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::layout::{F16, Int8};

    /// Would catch tiles that overlap, and a copy that misses a layer or hits a neighbour.
    #[test]
    fn tiles_are_apart_and_blocks_copy_whole() {
        check::<F16>(|number| number as u16);
        check::<Int8>(|number| number as u8);
    }

    fn check<F: KvFormat<Element: From<u8> + PartialEq>>(element: fn(usize) -> F::Element) {
        let shape = KvShape {
            blocks: 3,
            heads: 2,
            head_dim: 32,
        };
        let mut kv = KvStorage::<F>::new(2, shape);
        for layer in 0..2 {
            for block in 0..3 {
                for head in 0..2 {
                    let start = shape.tile_start::<F>(layer, BlockId(block), head);
                    let tile = &mut kv.elements_mut()[start..start + 2 * shape.half_tile::<F>()];
                    assert!(tile.iter().all(|value| *value == F::Element::from(0)));
                    tile.fill(element(1 + layer * 100 + block as usize * 10 + head));
                }
            }
        }
        kv.copy_block(BlockId(0), BlockId(2));
        let expected = [1, 2, 11, 12, 1, 2, 101, 102, 111, 112, 101, 102];
        let tiles = kv.elements().chunks_exact(2 * shape.half_tile::<F>());
        for (tile, expected) in tiles.zip(expected) {
            assert!(
                tile.iter()
                    .all(|value| *value == F::Element::from(expected))
            );
        }
    }
}
