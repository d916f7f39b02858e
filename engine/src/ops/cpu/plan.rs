//! How is the work on keys and values cut?
//!
//! Into blocks to write, into tiles of attention, and those into segments. A plan holds indices
//! only and lives in the op set, so that a step like the one before allocates nothing.

use std::ops::Range;

use super::CpuOps;
use super::attention::{
    AttendSegment, Merge, SEGMENT, Source, TILE_MAX, Tile, partial_len, tile_sizes,
};
use super::isa::Isa;
use super::stored::Stored;
use crate::kv::storage::BLOCK_TOKENS;
use crate::model::ModelConfig;
use crate::ops::{Heads, SeqInput, sized};
use crate::sys::disjoint::Disjoint;

/// Tiles whose segments one chunk merges: one merge is too short to be worth a claim.
const MERGES: usize = 16;

/// The most partial results that are kept at a time, in floats: 1 MB, which stays in the second
/// cache and keeps several threads busy between two meetings. Without a bound they grow with rows
/// times context: 39 MB for 512 rows at 8,192 tokens. A tile that alone has more still runs.
const PARTIALS_MAX: usize = 1 << 18;

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

/// The most bytes that the plans and the partial results of a pass of this many rows take.
pub(super) fn bytes_most(config: &ModelConfig, rows: usize) -> usize {
    // No tile has fewer vectors than one, no partial result fewer values than a head; lists grow
    // by doubling.
    let tiles = 2 * rows * config.heads * size_of::<(Tile, usize)>();
    let blocks = 2 * rows * size_of::<BlockWrite>();
    let longest = config.context.div_ceil(SEGMENT) * partial_len(TILE_MAX, config.head_dim);
    let partials = PARTIALS_MAX.max(longest);
    let segments = 2 * partials / partial_len(1, config.head_dim) * size_of::<Segment>();
    tiles + blocks + segments + size_of::<f32>() * partials
}

impl<I: Isa, S: Stored> CpuOps<I, S> {
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

    /// Fills `self.floats` with the outputs of the planned tiles, some tiles at a time: first every
    /// segment of them, then the merge of each tile's segments.
    pub(super) fn attend_tiles(&mut self, batch: &[SeqInput<'_>], source: Source<'_, S>) {
        sized(&mut self.floats, source.queries.len(), 0.0);
        let mut done = 0;
        while done < self.tiles.len() {
            let count = self.plan_segments(batch, done, source.heads);
            self.attend_segments(batch, source);
            self.merge_segments(batch, source.heads, done..done + count);
            done += count;
        }
    }

    /// Plans the segments of the tiles from `first` on whose partial results fit, and says how
    /// many tiles those are.
    fn plan_segments(&mut self, batch: &[SeqInput<'_>], first: usize, heads: Heads) -> usize {
        let (mut partials_len, mut count) = (0, 0);
        self.segments.clear();
        for (tile, partial_start) in &mut self.tiles[first..] {
            let len = partial_len(tile.count, heads.dim);
            let segments = tile.segments(&batch[tile.sequence], heads);
            if count > 0 && partials_len + segments.len() * len > PARTIALS_MAX {
                break;
            }
            *partial_start = partials_len;
            let starts = (partials_len..).step_by(len);
            let planned = segments.clone().zip(starts);
            self.segments
                .extend(planned.map(|(segment, start)| Segment {
                    tile: *tile,
                    segment,
                    start,
                }));
            partials_len += segments.len() * len;
            count += 1;
        }
        sized(&mut self.partials, partials_len, 0.0);
        count
    }

    fn attend_segments(&mut self, batch: &[SeqInput<'_>], source: Source<'_, S>) {
        let CpuOps {
            isa,
            pool,
            segments,
            partials,
            ..
        } = self;
        let (isa, dim) = (*isa, source.heads.dim);
        let partials = Disjoint::new(partials);
        pool.run(segments.len(), &|index| {
            let Segment {
                tile,
                segment,
                start,
            } = segments[index];
            // SAFETY: each segment of each tile has a range of its own, and is one chunk.
            #[expect(unsafe_code, reason = "segments are apart, which Rust cannot see")]
            let out = unsafe { partials.range(start, partial_len(tile.count, dim)) };
            isa.run(AttendSegment {
                source,
                tile,
                seq: &batch[tile.sequence],
                segment,
                out,
            });
        });
    }

    fn merge_segments(&mut self, batch: &[SeqInput<'_>], heads: Heads, tiles: Range<usize>) {
        let CpuOps {
            isa,
            pool,
            floats,
            tiles: all,
            partials,
            ..
        } = self;
        let (isa, tiles) = (*isa, &all[tiles]);
        let (partials, out) = (Disjoint::new(partials), Disjoint::new(floats));
        pool.run(tiles.len().div_ceil(MERGES), &|chunk| {
            for (tile, start) in tiles.iter().skip(chunk * MERGES).take(MERGES) {
                let len = partial_len(tile.count, heads.dim);
                let parts = tile.segments(&batch[tile.sequence], heads).len();
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
