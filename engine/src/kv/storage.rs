//! Where do the keys and values of a block lie in memory?
//!
//! One allocation for the whole pool: layer, then block, then head, then a *tile*: the keys of 16
//! tokens, transposed (so that one vector register holds the same dimension of 16 tokens and a
//! score needs no sum across lanes), followed by their values, token by token. Values are kept in
//! the precision the ops read them in: `u16` holds the bits of an f16.
//!
//! The memory is zeroed by the operating system and so costs nothing before it is first written;
//! every value in it is finite at all times, which lets attention multiply masked positions by 0.

pub use cache_index::block::BLOCK_TOKENS;

/// One block of the KV pool: an index below the number of blocks in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

/// The keys and values of every block in every layer.
#[derive(Debug)]
pub struct KvStorage<T> {
    values: Vec<T>,
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
    /// Values in the keys (or the values) of one tile.
    pub fn half_tile(&self) -> usize {
        self.head_dim * BLOCK_TOKENS
    }

    /// Where the keys of a tile begin; its values follow after [`KvShape::half_tile`].
    pub fn tile_start(&self, layer: usize, block: BlockId, head: usize) -> usize {
        ((layer * self.blocks + block.0 as usize) * self.heads + head) * 2 * self.half_tile()
    }
}

impl<T: Copy + Default> KvStorage<T> {
    /// A zeroed pool.
    pub fn new(layers: usize, shape: KvShape) -> KvStorage<T> {
        let len = layers * shape.blocks * shape.heads * 2 * shape.half_tile();
        KvStorage {
            values: vec![T::default(); len],
            layers,
            shape,
        }
    }

    /// The sizes that address a tile.
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// All values, to be addressed by [`KvShape::tile_start`].
    pub fn values(&self) -> &[T] {
        &self.values
    }

    /// All values, for writing.
    pub fn values_mut(&mut self) -> &mut [T] {
        &mut self.values
    }

    /// Copies one block onto another in every layer.
    pub fn copy_block(&mut self, from: BlockId, to: BlockId) {
        let len = self.shape.heads * 2 * self.shape.half_tile();
        for layer in 0..self.layers {
            let source = self.shape.tile_start(layer, from, 0);
            let target = self.shape.tile_start(layer, to, 0);
            self.values.copy_within(source..source + len, target);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Would catch tiles that overlap, and a copy that misses a layer or hits a neighbour.
    #[test]
    fn tiles_are_apart_and_blocks_copy_whole() {
        let shape = KvShape {
            blocks: 3,
            heads: 2,
            head_dim: 32,
        };
        let mut kv = KvStorage::<u16>::new(2, shape);
        for layer in 0..2 {
            for block in 0..3 {
                for head in 0..2 {
                    let start = shape.tile_start(layer, BlockId(block), head);
                    let tile = &mut kv.values_mut()[start..start + 2 * shape.half_tile()];
                    assert!(tile.iter().all(|value| *value == 0));
                    tile.fill((1 + layer * 100 + block as usize * 10 + head) as u16);
                }
            }
        }
        kv.copy_block(BlockId(0), BlockId(2));
        let expected = [1, 2, 11, 12, 1, 2, 101, 102, 111, 112, 101, 102];
        let tiles = kv.values().chunks_exact(2 * shape.half_tile());
        for (tile, expected) in tiles.zip(expected) {
            assert!(tile.iter().all(|value| *value == expected));
        }
    }
}
