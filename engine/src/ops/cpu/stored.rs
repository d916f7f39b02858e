//! How do kernels read and write what the pool stores?
//!
//! [`Stored`] is attention's inner loops and the way into a tile, for each [`KvFormat`]. Floats are widened
//! as they are read. In 8 bits the steps are, and their scales are applied once for 16 of them: to the sums of
//! a group of the keys' dimensions, and to the softmax weights before a group of the values' is added up.
//! Whatever the format, sums go over dimensions and positions in one order, so no bit depends on tile,
//! thread or instruction set.

use half::{bf16, f16};

use super::attention::DIM_MAX;
use super::isa::{Isa, LANES, unrolled};
use crate::kv::layout::{Bf16, F16, GROUP_DIMS, Int8, KvFormat};

/// Sixteen elements: of one dimension or one token.
pub(crate) type Row<S> = [<S as KvFormat>::Element; LANES];

/// Weighted sums of values for some query vectors, by 16 dimensions.
pub(crate) type Sums<const N: usize> = [[[f32; LANES]; DIM_MAX / LANES]; N];

/// Weights of 16 positions for some query vectors.
pub(crate) type Chances<const N: usize> = [[f32; LANES]; N];

/// A format that kernels read row by row.
pub(crate) trait Loaded: KvFormat {
    /// A row as numbers, scales not applied.
    fn load<I: Isa>(isa: I, row: &Row<Self>) -> I::F;
}

/// A format that serves.
pub(crate) trait Stored: Loaded {
    /// Query times key for 16 positions.
    fn scores<I: Isa, const N: usize>(
        isa: I,
        queries: &[[f32; N]],
        keys: &[Row<Self>],
    ) -> [I::F; N];

    /// sums = sums × rescale + chances × the block's values, positions in order.
    fn add_values<I: Isa, const N: usize>(
        isa: I,
        sums: &mut Sums<N>,
        values: &[Row<Self>],
        chances: &Chances<N>,
        rescale: &[f32; LANES],
    );

    /// Writes one token's key into the keys of a tile.
    fn store_key<I: Isa>(isa: I, key: &[f32], token: usize, keys: &mut [Row<Self>]);

    /// Writes one token's value into the values of a tile.
    fn store_value<I: Isa>(isa: I, value: &[f32], token: usize, values: &mut [Row<Self>]);
}

/// Query times key for 16 positions, dimensions in order, even and odd ones apart (one chain of
/// dependent additions would leave the units idle in a tile of one row).
#[inline(always)]
fn products<S: Loaded, I: Isa, const N: usize>(
    isa: I,
    queries: &[[f32; N]],
    keys: &[Row<S>],
) -> [I::F; N] {
    let keys = keys.as_chunks::<2>().0;
    let queries = queries.as_chunks::<2>().0;
    let mut even = [isa.splat(0.0); N];
    let mut odd = [isa.splat(0.0); N];
    if !I::WIDE_TILES && N >= 3 {
        // Both at once would need more registers than there are; so many vectors keep the units busy.
        let pairs = keys.iter().zip(queries);
        for (keys, queries) in pairs.clone() {
            let key = S::load(isa, &keys[0]);
            unrolled!(I, vector < N, {
                even[vector] = isa.fma(key, isa.splat(queries[0][vector]), even[vector]);
            });
        }
        for (keys, queries) in pairs {
            let key = S::load(isa, &keys[1]);
            unrolled!(I, vector < N, {
                odd[vector] = isa.fma(key, isa.splat(queries[1][vector]), odd[vector]);
            });
        }
    } else {
        for (keys, queries) in keys.iter().zip(queries) {
            let key = S::load(isa, &keys[0]);
            unrolled!(I, vector < N, {
                even[vector] = isa.fma(key, isa.splat(queries[0][vector]), even[vector]);
            });
            let key = S::load(isa, &keys[1]);
            unrolled!(I, vector < N, {
                odd[vector] = isa.fma(key, isa.splat(queries[1][vector]), odd[vector]);
            });
        }
    }
    unrolled!(I, vector < N, {
        even[vector] = isa.add(even[vector], odd[vector]);
    });
    even
}

/// The same 16 dimensions of the block's values, rows `apart` from one position to the next.
#[inline(always)]
fn add_part<S: Loaded, I: Isa, const N: usize>(
    isa: I,
    (sums, part): (&mut Sums<N>, usize),
    (rows, apart): (&[Row<S>], usize),
    chances: &Chances<N>,
    rescale: &[f32; LANES],
) {
    let mut running = [isa.splat(0.0); N];
    unrolled!(I, vector < N, {
        let old = isa.load(&sums[vector][part]);
        running[vector] = isa.mul(old, isa.splat(rescale[vector]));
    });
    for token in 0..LANES {
        let value = S::load(isa, &rows[token * apart]);
        unrolled!(I, vector < N, {
            running[vector] = isa.fma(value, isa.splat(chances[vector][token]), running[vector]);
        });
    }
    unrolled!(I, vector < N, {
        isa.store(running[vector], &mut sums[vector][part]);
    });
}

/// What is stored must be finite, because masked positions are multiplied by 0 and not skipped.
#[inline(always)]
fn within<I: Isa>(isa: I, value: I::F, most: f32) -> I::F {
    isa.min(isa.max(value, isa.splat(-most)), isa.splat(most))
}

/// A format whose elements are the values.
pub(crate) trait Plain: Loaded<Element = u16> {
    /// The largest finite value.
    const MOST: f32;
    /// Rounds to nearest, ties to even.
    fn store<I: Isa>(isa: I, value: I::F, to: &mut Row<Self>);
}

impl Loaded for F16 {
    #[inline(always)]
    fn load<I: Isa>(isa: I, row: &[u16; LANES]) -> I::F {
        isa.load_half(row)
    }
}

impl Plain for F16 {
    const MOST: f32 = 65_504.0;

    #[inline(always)]
    fn store<I: Isa>(isa: I, value: I::F, to: &mut [u16; LANES]) {
        isa.store_half(value, to);
    }
}

impl Loaded for Bf16 {
    #[inline(always)]
    fn load<I: Isa>(isa: I, row: &[u16; LANES]) -> I::F {
        isa.load_brain(row)
    }
}

impl Plain for Bf16 {
    const MOST: f32 = f32::from_bits(0x7f7f_0000);

    #[inline(always)]
    fn store<I: Isa>(isa: I, value: I::F, to: &mut [u16; LANES]) {
        let mut lanes = [0.0; LANES];
        isa.store(value, &mut lanes);
        for (to, value) in to.iter_mut().zip(lanes) {
            *to = bf16::from_f32(value).to_bits();
        }
    }
}

impl<S: Plain> Stored for S {
    #[inline(always)]
    fn scores<I: Isa, const N: usize>(
        isa: I,
        queries: &[[f32; N]],
        keys: &[Row<Self>],
    ) -> [I::F; N] {
        products::<S, I, N>(isa, queries, keys)
    }

    #[inline(always)]
    fn add_values<I: Isa, const N: usize>(
        isa: I,
        sums: &mut Sums<N>,
        values: &[Row<Self>],
        chances: &Chances<N>,
        rescale: &[f32; LANES],
    ) {
        let parts = values.len() / LANES;
        for part in 0..parts {
            let rows = (&values[part..], parts);
            add_part::<S, I, N>(isa, (sums, part), rows, chances, rescale);
        }
    }

    #[inline(always)]
    fn store_key<I: Isa>(isa: I, key: &[f32], token: usize, keys: &mut [Row<Self>]) {
        let mut columns = keys.iter_mut();
        for key in key.as_chunks::<LANES>().0 {
            let mut row = [0; LANES];
            S::store(isa, within(isa, isa.load(key), S::MOST), &mut row);
            for (element, column) in row.iter().zip(&mut columns) {
                column[token] = *element;
            }
        }
    }

    #[inline(always)]
    fn store_value<I: Isa>(isa: I, value: &[f32], token: usize, values: &mut [Row<Self>]) {
        let parts = values.len() / LANES;
        let rows = &mut values[token * parts..][..parts];
        for (to, value) in rows.iter_mut().zip(value.as_chunks::<LANES>().0) {
            S::store(isa, within(isa, isa.load(value), S::MOST), to);
        }
    }
}

/// Rows of bytes that hold the scales of a group: 16 of two bytes.
const SCALE_ROWS: usize = 2;
/// A group of 16 dimensions and 16 tokens: scales, then of keys a row for each dimension, of values one for each
/// token.
type Group = [[u8; LANES]; SCALE_ROWS + LANES];
const _: () = assert!(
    GROUP_DIMS == LANES,
    "a token's part of a group is one vector"
);
/// The largest step.
const STEPS: f32 = 127.0;
/// Keys and values beyond this are cut: what f16 holds, so that a change of format moves no bound.
const INT8_MOST: f32 = F16::MOST;

impl Loaded for Int8 {
    #[inline(always)]
    fn load<I: Isa>(isa: I, row: &[u8; LANES]) -> I::F {
        isa.load_signed(row)
    }
}

/// The scales of a group, one for each token.
#[inline(always)]
fn scales<I: Isa>(isa: I, group: &Group) -> I::F {
    let mut halves = [0; LANES];
    let bytes = group[..SCALE_ROWS].as_flattened().as_chunks().0;
    for (half, bytes) in halves.iter_mut().zip(bytes) {
        *half = u16::from_le_bytes(*bytes);
    }
    isa.load_half(&halves)
}

/// A token's steps in a group, whose scale is put in its place.
#[inline(always)]
fn quantised<I: Isa>(
    isa: I,
    values: &[f32; LANES],
    (group, token): (&mut Group, usize),
) -> [u8; LANES] {
    let values = within(isa, isa.load(values), INT8_MOST);
    let largest = isa.largest(isa.abs(values));
    let mut bits = [0; LANES];
    isa.store_half(isa.splat(largest / STEPS), &mut bits);
    let scale = f16::from_bits(bits[0]).to_f32();
    let scales = group[..SCALE_ROWS].as_flattened_mut();
    scales[2 * token..][..2].copy_from_slice(&bits[0].to_le_bytes());
    // Steps of a scale that was rounded to 0 mean nothing.
    let divisor = isa.splat(if scale > 0.0 { scale } else { f32::MAX });
    let mut steps = [0; LANES];
    let nearest = isa.round(within(isa, isa.div(values, divisor), STEPS));
    isa.store_bytes(nearest, &mut steps);
    steps.map(|step| step.to_le_bytes()[0])
}

impl Stored for Int8 {
    #[inline(always)]
    fn scores<I: Isa, const N: usize>(
        isa: I,
        queries: &[[f32; N]],
        keys: &[Row<Self>],
    ) -> [I::F; N] {
        let mut scores = [isa.splat(0.0); N];
        let groups: &[Group] = keys.as_chunks().0;
        for (group, queries) in groups.iter().zip(queries.as_chunks::<LANES>().0) {
            let scales = scales(isa, group);
            let sums = products::<Self, I, N>(isa, queries, &group[SCALE_ROWS..]);
            unrolled!(I, vector < N, {
                scores[vector] = isa.fma(sums[vector], scales, scores[vector]);
            });
        }
        scores
    }

    #[inline(always)]
    fn add_values<I: Isa, const N: usize>(
        isa: I,
        sums: &mut Sums<N>,
        values: &[Row<Self>],
        chances: &Chances<N>,
        rescale: &[f32; LANES],
    ) {
        let groups: &[Group] = values.as_chunks().0;
        for (part, group) in groups.iter().enumerate() {
            let scales = scales(isa, group);
            let mut scaled = [[0.0; LANES]; N];
            unrolled!(I, vector < N, {
                let chances = isa.mul(isa.load(&chances[vector]), scales);
                isa.store(chances, &mut scaled[vector]);
            });
            let rows = (&group[SCALE_ROWS..], 1);
            add_part::<Self, I, N>(isa, (sums, part), rows, &scaled, rescale);
        }
    }

    #[inline(always)]
    fn store_key<I: Isa>(isa: I, key: &[f32], token: usize, keys: &mut [Row<Self>]) {
        let groups: &mut [Group] = keys.as_chunks_mut().0;
        for (group, key) in groups.iter_mut().zip(key.as_chunks().0) {
            let steps = quantised(isa, key, (group, token));
            for (column, step) in group[SCALE_ROWS..].iter_mut().zip(steps) {
                column[token] = step;
            }
        }
    }

    #[inline(always)]
    fn store_value<I: Isa>(isa: I, value: &[f32], token: usize, values: &mut [Row<Self>]) {
        let groups: &mut [Group] = values.as_chunks_mut().0;
        for (group, value) in groups.iter_mut().zip(value.as_chunks().0) {
            group[SCALE_ROWS + token] = quantised(isa, value, (group, token));
        }
    }
}
