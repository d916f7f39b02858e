//! Causal attention over the paged KV pool, with online softmax.
//!
//! A *tile* is up to 12 query vectors that share a key head: the heads of a group, for one or
//! several rows. It walks the sequence's KV blocks from position 0 on: 16 keys are the lanes of
//! a vector, so scores need no sum across lanes and a block is read once for the whole tile.
//!
//! Every [`SEGMENT`] positions the running result is closed, and the results of a tile's segments
//! are merged in order afterwards, so that one long sequence keeps several threads busy. Blocks
//! and segments lie at absolute positions, so how the work was cut moves no bit. A query that sees nothing of a block leaves its sums as they
//! are: its weights are exactly 0 and its rescaling exactly 1.

use std::ops::Range;

use super::isa::{Isa, Kernel, LANES, unrolled};
use super::stored::{Row, Stored, Sums};
use crate::kv::layout::KvFormat;
use crate::kv::storage::{BLOCK_TOKENS, BlockId, KvShape};
use crate::ops::{Heads, SeqInput};

/// Positions whose weights share one online softmax; a multiple of the block. Two segments on two
/// threads are worth a merge, and 256 positions of one head are 64 KB, half a second-level cache.
pub(crate) const SEGMENT: usize = 256;

/// The widest head; [`ModelConfig`](crate::model::ModelConfig) refuses wider ones.
pub(crate) const DIM_MAX: usize = 256;

/// Stands for minus infinity without its arithmetic: e to the power of it is 0 for any score.
const NONE: f32 = -1e30;

/// The most vectors in a tile.
pub(crate) const TILE_MAX: usize = 12;

/// Tile sizes there are kernels for.
pub(crate) fn tile_sizes<I: Isa>() -> &'static [usize] {
    if I::WIDE_TILES {
        &[12, 8, 4, 3, 2, 1]
    } else {
        &[6, 4, 3, 2, 1]
    }
}

/// Where queries, keys and values are.
#[derive(Clone, Copy)]
pub(crate) struct Source<'a, S: KvFormat> {
    pub(crate) queries: &'a [f32],
    pub(crate) heads: Heads,
    pub(crate) kv: &'a [S::Element],
    pub(crate) shape: KvShape,
    pub(crate) layer: usize,
}

impl<'a, S: KvFormat> Source<'a, S> {
    /// Rows of sixteen elements in a cache line.
    const ROWS_PER_LINE: usize = 64 / size_of::<Row<S>>();

    /// The rows of a tile: the first half keys, the second values.
    #[inline(always)]
    fn tile(&self, block: BlockId, head: usize) -> &'a [Row<S>] {
        let start = self.shape.tile_start::<S>(self.layer, block, head);
        let stored = &self.kv[start..][..2 * self.shape.half_tile::<S>()];
        stored.as_chunks().0
    }
}

/// Query vectors of one sequence that share a key head. Vectors are counted row by row and within
/// a row by the heads of the group.
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    /// Index of the sequence in the batch.
    pub(crate) sequence: usize,
    /// The sequence's first row in the batch.
    pub(crate) first_row: usize,
    pub(crate) kv_head: usize,
    /// First vector, and how many: one of [`tile_sizes`].
    pub(crate) first: usize,
    pub(crate) count: usize,
}

impl Tile {
    /// Row (in its sequence) and query head of the tile's vector `index`.
    #[inline(always)]
    fn vector(&self, heads: Heads, index: usize) -> (usize, usize) {
        let group = heads.heads / heads.kv_heads;
        let vector = self.first + index;
        (vector / group, self.kv_head * group + vector % group)
    }

    /// Where the output (and the query) of vector `index` begins in the batch's rows.
    #[inline(always)]
    pub(crate) fn start(&self, heads: Heads, index: usize) -> usize {
        let (row, head) = self.vector(heads, index);
        ((self.first_row + row) * heads.heads + head) * heads.dim
    }

    /// How many positions vector `index` sees.
    #[inline(always)]
    fn sees(&self, seq: &SeqInput<'_>, heads: Heads, index: usize) -> usize {
        seq.start + self.vector(heads, index).0 + 1
    }

    /// From which position on vector `index` sees.
    #[inline(always)]
    fn sees_from(&self, seq: &SeqInput<'_>, heads: Heads, index: usize) -> usize {
        heads.sees_from(seq.start + self.vector(heads, index).0)
    }

    /// Segments that some vector of the tile sees.
    pub(crate) fn segments(&self, seq: &SeqInput<'_>, heads: Heads) -> Range<usize> {
        let end = self.sees(seq, heads, self.count - 1).div_ceil(SEGMENT);
        self.sees_from(seq, heads, 0) / SEGMENT..end
    }
}

/// Softmax and weighted sum over some positions, not yet divided by the sum of weights.
#[derive(Clone, Copy)]
pub(crate) struct Partial<'a> {
    pub(crate) largest: &'a [f32],
    pub(crate) weight: &'a [f32],
    /// One row of `dim` values per vector.
    pub(crate) values: &'a [f32],
}

/// A tile over one segment, left as a partial result: `count` maxima, `count` sums, then values.
pub(crate) struct AttendSegment<'a, S: KvFormat> {
    pub(crate) source: Source<'a, S>,
    pub(crate) tile: Tile,
    pub(crate) seq: &'a SeqInput<'a>,
    pub(crate) segment: usize,
    pub(crate) out: &'a mut [f32],
}

/// Values in the partial result of a tile.
pub(crate) fn partial_len(count: usize, dim: usize) -> usize {
    count * (2 + dim)
}

/// The parts of a stored partial result.
pub(crate) fn partial(stored: &[f32], count: usize) -> Partial<'_> {
    let (largest, rest) = stored.split_at(count);
    let (weight, values) = rest.split_at(count);
    Partial {
        largest,
        weight,
        values,
    }
}

impl<S: Stored> Kernel for AttendSegment<'_, S> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        match self.tile.count {
            12 if I::WIDE_TILES => self.store::<I, 12>(isa),
            8 if I::WIDE_TILES => self.store::<I, 8>(isa),
            6 if !I::WIDE_TILES => self.store::<I, 6>(isa),
            4 => self.store::<I, 4>(isa),
            3 => self.store::<I, 3>(isa),
            2 => self.store::<I, 2>(isa),
            _ => self.store::<I, 1>(isa),
        }
    }
}

impl<S: Stored> AttendSegment<'_, S> {
    #[inline(always)]
    fn store<I: Isa, const N: usize>(self, isa: I) {
        let dim = self.source.heads.dim;
        let walk = Walk::<N>::over(isa, &self.source, &self.tile, self.seq, self.segment);
        let (largest, rest) = self.out.split_at_mut(N);
        let (weight, values) = rest.split_at_mut(N);
        largest.copy_from_slice(&walk.largest[..N]);
        weight.copy_from_slice(&walk.weight[..N]);
        for (out, values) in values.chunks_exact_mut(dim).zip(&walk.values) {
            out.copy_from_slice(&values.as_flattened()[..dim]);
        }
    }
}

/// The running result of `N` query vectors over one segment.
struct Walk<const N: usize> {
    largest: [f32; LANES],
    weight: [f32; LANES],
    values: Sums<N>,
}

impl<const N: usize> Walk<N> {
    #[inline(always)]
    fn over<I: Isa, S: Stored>(
        isa: I,
        source: &Source<'_, S>,
        tile: &Tile,
        seq: &SeqInput<'_>,
        segment: usize,
    ) -> Walk<N> {
        let heads = source.heads;
        let queries = Self::gather(source, tile);
        let mut walk = Walk {
            largest: [NONE; LANES],
            weight: [0.0; LANES],
            values: [[[0.0; LANES]; DIM_MAX / LANES]; N],
        };
        let mut weights = [isa.splat(0.0); N];
        let end = tile.sees(seq, heads, N - 1).min((segment + 1) * SEGMENT);
        let from = tile.sees_from(seq, heads, 0).max(segment * SEGMENT);
        let first_block = from / BLOCK_TOKENS;
        let blocks = &seq.blocks[..end.div_ceil(BLOCK_TOKENS)];
        for (index, block) in blocks.iter().enumerate().skip(first_block) {
            let stored = source.tile(*block, tile.kv_head);
            if let Some(next) = blocks.get(index + 1).filter(|_| tile.first == 0) {
                // The next tile is elsewhere: the hardware cannot guess where. A head's other query
                // vectors find it in the cache.
                let next = source.tile(*next, tile.kv_head);
                for row in next.iter().step_by(Source::<S>::ROWS_PER_LINE) {
                    isa.prefetch(row);
                }
            }
            let (keys, values) = stored.split_at(stored.len() / 2);
            // Whether all vectors see all of the block: the first sees least at its end, the last at
            // its beginning.
            let start = index * BLOCK_TOKENS;
            let whole = tile.sees(seq, heads, 0) >= start + BLOCK_TOKENS
                && tile.sees_from(seq, heads, N - 1) <= start;
            let scores = S::scores(isa, &queries, keys);
            let mut chances = [[0.0; LANES]; N];
            let before = walk.largest;
            let mut powers = [isa.splat(0.0); N];
            unrolled!(I, vector < N, {
                let seen = tile.sees(seq, heads, vector).saturating_sub(start);
                let hidden = tile.sees_from(seq, heads, vector).saturating_sub(start);
                let scores = if whole {
                    scores[vector]
                } else {
                    let scores = isa.first(seen, scores[vector], NONE);
                    isa.split(hidden, isa.splat(NONE), scores)
                };
                let largest = isa.largest(scores);
                let largest = if largest > before[vector] {
                    largest
                } else {
                    before[vector]
                };
                walk.largest[vector] = largest;
                let power = isa.exp(isa.sub(scores, isa.splat(largest)));
                powers[vector] = if whole {
                    power
                } else {
                    let power = isa.first(seen, power, 0.0);
                    isa.split(hidden, isa.splat(0.0), power)
                };
                isa.store(powers[vector], &mut chances[vector]);
            });
            let change = isa.sub(isa.load(&before), isa.load(&walk.largest));
            let mut rescale = [0.0; LANES];
            isa.store(isa.exp(change), &mut rescale);
            unrolled!(I, vector < N, {
                weights[vector] =
                    isa.fma(weights[vector], isa.splat(rescale[vector]), powers[vector]);
            });
            S::add_values(isa, &mut walk.values, values, &chances, &rescale);
        }
        unrolled!(I, vector < N, {
            walk.weight[vector] = isa.sum(weights[vector]);
        });
        walk
    }

    /// The tile's queries, scaled, with the same dimension of all vectors side by side.
    #[inline(always)]
    fn gather<S: KvFormat>(source: &Source<'_, S>, tile: &Tile) -> [[f32; N]; DIM_MAX] {
        let dim = source.heads.dim;
        let scale = 1.0 / (dim as f32).sqrt();
        let mut queries = [[0.0; N]; DIM_MAX];
        for vector in 0..N {
            let query = &source.queries[tile.start(source.heads, vector)..][..dim];
            for (to, from) in queries.iter_mut().zip(query) {
                to[vector] = from * scale;
            }
        }
        queries
    }
}

/// Merges the segments of a tile in order, divides, and writes the tile's outputs.
pub(crate) struct Merge<'a> {
    /// The partial results of the tile's segments, one after another.
    pub(crate) partials: &'a mut [f32],
    pub(crate) count: usize,
    pub(crate) dim: usize,
}

impl Kernel for Merge<'_> {
    type Output = ();
    /// Leaves the finished values in the place of the first segment's.
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let (count, dim) = (self.count, self.dim);
        let (total, later) = self.partials.split_at_mut(partial_len(count, dim));
        let (largest, rest) = total.split_at_mut(count);
        let (weight, values) = rest.split_at_mut(count);
        for stored in later.chunks_exact(partial_len(count, dim)) {
            let part = partial(stored, count);
            for vector in 0..count {
                let (old, new) = (largest[vector], part.largest[vector]);
                let both = if new > old { new } else { old };
                let mut factors = [0.0; LANES];
                (factors[0], factors[1]) = (old - both, new - both);
                let powers = isa.exp(isa.load(&factors));
                isa.store(powers, &mut factors);
                largest[vector] = both;
                weight[vector] = weight[vector] * factors[0] + part.weight[vector] * factors[1];
                let (old, new) = (isa.splat(factors[0]), isa.splat(factors[1]));
                let range = vector * dim..(vector + 1) * dim;
                let totals = values[range.clone()].as_chunks_mut::<LANES>().0;
                for (total, part) in totals.iter_mut().zip(part.values[range].as_chunks().0) {
                    let scaled = isa.mul(isa.load(total), old);
                    isa.store(isa.fma(isa.load(part), new, scaled), total);
                }
            }
        }
        for (values, weight) in values.chunks_exact_mut(dim).zip(&*weight) {
            for values in values.as_chunks_mut::<LANES>().0 {
                isa.store(isa.div(isa.load(values), isa.splat(*weight)), values);
            }
        }
    }
}
