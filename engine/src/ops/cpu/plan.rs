//! How is the work on keys and values cut?
//!
//! Into blocks to write, into tiles of attention, and those into segments. A plan holds indices
//! only and lives in the op set, so that a step like the one before allocates nothing.

use super::CpuOps;
use super::attention::{AttendSegment, Merge, Source, Tile, partial_len, tile_sizes};
use super::isa::Isa;
use crate::kv::storage::BLOCK_TOKENS;
use crate::ops::{Heads, SeqInput};
use crate::sys::disjoint::Disjoint;

/// Tiles whose segments one chunk merges: one merge is too short to be worth a claim.
const MERGES: usize = 16;

/// One segment of one tile, and where its partial result goes.
#[derive(Clone, Copy)]
pub(super) struct Segment {
    tile: Tile,
    segment: usize,
    start: usize,
}

/// Rows of one sequence that go into one block.
#[derive(Clone, Copy)]
pub(super) struct BlockWrite {
    pub(super) sequence: usize,
    /// First row in the batch, and how many.
    pub(super) first_row: usize,
    pub(super) rows: usize,
    pub(super) position: usize,
}

impl<I: Isa> CpuOps<I> {
    pub(super) fn plan_blocks(&mut self, batch: &[SeqInput<'_>]) {
        self.blocks.clear();
        let mut first_row = 0;
        for (sequence, seq) in batch.iter().enumerate() {
            let (mut position, end) = (seq.start, seq.start + seq.tokens.len());
            while position < end {
                let rows = (BLOCK_TOKENS - position % BLOCK_TOKENS).min(end - position);
                self.blocks.push(BlockWrite {
                    sequence,
                    first_row,
                    rows,
                    position,
                });
                first_row += rows;
                position += rows;
            }
        }
    }

    pub(super) fn plan_tiles(&mut self, batch: &[SeqInput<'_>], heads: Heads) {
        self.tiles.clear();
        let mut first_row = 0;
        for (sequence, seq) in batch.iter().enumerate() {
            let vectors = seq.tokens.len() * (heads.heads / heads.kv_heads);
            for kv_head in 0..heads.kv_heads {
                let mut first = 0;
                while first < vectors {
                    let fits = |size: &&usize| **size <= vectors - first;
                    let count = *tile_sizes::<I>()
                        .iter()
                        .find(fits)
                        .expect("a tile of one always fits");
                    self.tiles.push((
                        Tile {
                            sequence,
                            first_row,
                            kv_head,
                            first,
                            count,
                        },
                        0,
                    ));
                    first += count;
                }
            }
            first_row += seq.tokens.len();
        }
    }

    /// Fills `self.floats` with the outputs of the planned tiles: first every segment of every
    /// tile, then the merge of each tile's segments.
    pub(super) fn attend_tiles(&mut self, batch: &[SeqInput<'_>], source: Source<'_>) {
        let CpuOps {
            isa,
            pool,
            floats,
            tiles,
            segments,
            partials,
            ..
        } = self;
        let (isa, heads) = (*isa, source.heads);
        let mut partials_len = 0;
        segments.clear();
        for (tile, partial_start) in tiles.iter_mut() {
            *partial_start = partials_len;
            let len = partial_len(tile.count, heads.dim);
            for segment in 0..tile.segments(&batch[tile.sequence], heads) {
                segments.push(Segment {
                    tile: *tile,
                    segment,
                    start: partials_len,
                });
                partials_len += len;
            }
        }
        partials.resize(partials_len, 0.0);
        floats.resize(source.queries.len(), 0.0);
        let (partials, out) = (Disjoint::new(partials), Disjoint::new(floats));
        pool.run(segments.len(), &|index| {
            let Segment {
                tile,
                segment,
                start,
            } = segments[index];
            // SAFETY: each segment of each tile has a range of its own, and is one chunk.
            #[expect(unsafe_code, reason = "segments are apart, which Rust cannot see")]
            let out = unsafe { partials.range(start, partial_len(tile.count, heads.dim)) };
            isa.run(AttendSegment {
                source,
                tile,
                seq: &batch[tile.sequence],
                segment,
                out,
            });
        });
        pool.run(tiles.len().div_ceil(MERGES), &|chunk| {
            for (tile, start) in tiles.iter().skip(chunk * MERGES).take(MERGES) {
                let len = partial_len(tile.count, heads.dim);
                let parts = tile.segments(&batch[tile.sequence], heads);
                // SAFETY: a tile's segments are one range, and each tile is in one chunk.
                #[expect(unsafe_code, reason = "tiles are apart, which Rust cannot see")]
                let partials = unsafe { partials.range(*start, parts * len) };
                isa.run(Merge {
                    partials,
                    count: tile.count,
                    dim: heads.dim,
                });
                let values = partials[2 * tile.count..len].chunks_exact(heads.dim);
                for (vector, values) in values.enumerate() {
                    // SAFETY: each query vector's output belongs to one tile.
                    #[expect(unsafe_code, reason = "tiles are apart, which Rust cannot see")]
                    let out = unsafe { out.range(tile.start(heads, vector), heads.dim) };
                    out.copy_from_slice(values);
                }
            }
        });
    }
}
