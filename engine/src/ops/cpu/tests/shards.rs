//! Weights cut by rank: the outputs of row shards side by side are the whole's to the last bit, and
//! the products of column shards add up to the whole's.

use std::ops::Range;

use super::*;
use crate::ops::shard::{self, ShardError, share};
use crate::parallel::Rank;

/// Outputs and inputs of the whole matrix.
const ROWS: usize = 96;
const COLS: usize = 224;
/// Rows of the input.
const INPUTS: usize = 14;

/// Makes rows of so many columns ready for an op set's products.
type MakeInput<'a, O> = &'a mut dyn FnMut(&mut O, &[f32], usize) -> <O as Ops>::Input;

/// The products of an op set with these packed parts, each with its columns of the input.
fn products<O: Ops>(
    ops: &mut O,
    input: MakeInput<'_, O>,
    parts: &[(Tensor<'_>, Range<usize>, RowOrder)],
    x: &[f32],
) -> Vec<Vec<f32>> {
    let product = |(tensor, cols, order): &(Tensor<'_>, Range<usize>, RowOrder)| {
        let some: Vec<f32> = x
            .chunks_exact(COLS)
            .flat_map(|row| &row[cols.clone()])
            .copied()
            .collect();
        let rows = input(ops, &some, cols.len());
        let matrix = ops.pack(tensor, *order);
        let mut out = vec![0.0; INPUTS * tensor.rows];
        ops.project(&rows, [(&matrix, &mut out)]);
        out
    };
    parts.iter().map(product).collect()
}

fn ranks(count: usize) -> impl Iterator<Item = Rank> {
    (0..count).filter_map(move |index| Rank::new(index, count))
}

fn orders() -> [RowOrder; 3] {
    let rotary = |pairs| RowOrder::Rotary {
        head_dim: 32,
        pairs,
    };
    [
        RowOrder::Plain,
        rotary(Pairs::Neighbours),
        rotary(Pairs::Halves),
    ]
}

/// The whole against its shards, on one op set and for one format.
fn check_shards<O: Ops>(what: &str, ops: &mut O, input: MakeInput<'_, O>, dtype: Dtype) {
    let mut noise = Noise(21);
    let bytes = noise.weight(dtype, ROWS * COLS);
    let whole = Tensor {
        dtype,
        rows: ROWS,
        cols: COLS,
        bytes: &bytes,
    };
    let x = noise.floats(INPUTS * COLS);
    for (count, order) in [2, 3].into_iter().flat_map(|n| orders().map(|o| (n, o))) {
        let expected = products(ops, input, &[(whole, 0..COLS, order)], &x).remove(0);

        // Heads of 32 rows, so that both orders can be cut.
        let heads = ranks(count).map(|rank| share(ROWS / 32, rank));
        let shards: Vec<_> = heads
            .map(|heads| shard::rows(&whole, heads.start * 32..heads.end * 32).expect("whole rows"))
            .collect();
        let parts: Vec<_> = shards
            .iter()
            .map(|shard| (shard.tensor(), 0..COLS, order))
            .collect();
        let outputs = products(ops, input, &parts, &x);
        let side_by_side: Vec<f32> = (0..INPUTS)
            .flat_map(|row| {
                let of_row = |out: &Vec<f32>| {
                    let width = out.len() / INPUTS;
                    out[row * width..][..width].to_vec()
                };
                outputs.iter().flat_map(of_row).collect::<Vec<f32>>()
            })
            .collect();
        assert_same(&format!("{what} {dtype:?}: rows"), &side_by_side, &expected);

        let cut = |groups: Range<usize>| groups.start * 32..groups.end * 32;
        let shards: Vec<_> = ranks(count)
            .map(|rank| cut(share(COLS / 32, rank)))
            .map(|cols| {
                (
                    shard::cols(&whole, cols.clone()).expect("whole groups"),
                    cols,
                )
            })
            .collect();
        let parts: Vec<_> = shards
            .iter()
            .map(|(shard, cols)| (shard.tensor(), cols.clone(), order))
            .collect();
        let sum = |outputs: Vec<Vec<f32>>| {
            outputs
                .iter()
                .fold(vec![0.0f32; expected.len()], |sum, part| {
                    sum.iter().zip(part).map(|(sum, part)| sum + part).collect()
                })
        };
        let found = sum(products(ops, input, &parts, &x));
        // 224 products of at most about 16 (a nibble) or 128 (a byte) times 1, in f32: another
        // order of the sum moves it by a few units of 2^-24 of 3,600 or 29,000.
        let tolerance = if dtype == Dtype::Q8_0 { 2e-2 } else { 2e-3 };
        assert_close(
            &format!("{what} {dtype:?}: cols"),
            &found,
            &expected,
            tolerance,
        );
        let again = sum(products(ops, input, &parts, &x));
        assert_same(&format!("{what} {dtype:?}: cols again"), &again, &found);
    }
}

/// Formats whose columns can be cut at any 32.
fn short_groups() -> impl Iterator<Item = Dtype> {
    let short = |dtype: &Dtype| values_together(*dtype).is_some_and(|count| count <= 32);
    FORMATS.into_iter().filter(short)
}

/// Would catch a K block that is cut in two.
#[test]
fn k_formats_are_cut_between_their_blocks() {
    for dtype in [Dtype::Q4K, Dtype::Q5K, Dtype::Q6K] {
        let bytes = Noise(23).weight(dtype, 3 * 512);
        let (rows, cols) = (3, 512);
        let whole = Tensor {
            dtype,
            rows,
            cols,
            bytes: &bytes,
        };
        let refused = shard::cols(&whole, 0..32).map(|_| ());
        let is_inside = matches!(refused, Err(ShardError::InsideGroup { .. }));
        assert!(is_inside, "{refused:?}");
        let mut ops = ReferenceOps::new(1);
        let half = shard::cols(&whole, 256..512).expect("between blocks");
        let half = ops.pack(&half.tensor(), RowOrder::Plain);
        let whole = ops.pack(&whole, RowOrder::Plain);
        let (mut found, mut expected) = (vec![0.0; 3 * 256], vec![0.0; 3 * 512]);
        ops.embed(&half, &[0, 1, 2], &mut found);
        ops.embed(&whole, &[0, 1, 2], &mut expected);
        for (found, expected) in found.chunks(256).zip(expected.chunks(512)) {
            assert_same("half", found, &expected[256..]);
        }
    }
}

/// Would catch a shard that takes its neighbour's rows, groups or scales.
#[test]
fn shards_add_up_to_the_whole() {
    fn check<I: Isa>(name: &str) {
        let Some(mut ops) = ops::<I>(name) else {
            return;
        };
        for precision in [Precision::Coarse, Precision::Fine] {
            let mut input = |ops: &mut CpuOps<I>, x: &[f32], cols: usize| {
                let mut quantised = Rows::new(precision);
                ops.dense = true;
                ops.floats.clear();
                ops.floats.extend(x);
                ops.quantise(cols, &mut quantised);
                quantised
            };
            for dtype in short_groups() {
                check_shards(name, &mut ops, &mut input, dtype);
            }
        }
    }
    on_each_variant!(check);
    for dtype in short_groups() {
        let mut input = |_: &mut ReferenceOps, x: &[f32], _: usize| x.to_vec();
        check_shards("reference", &mut ReferenceOps::new(1), &mut input, dtype);
    }
}

/// Would catch a scale that is cut in two, or a read past the tensor.
#[test]
fn cuts_inside_groups_and_beyond_the_weight_are_refused() {
    let bytes = Noise(22).weight(Dtype::Q4_1, 8 * 64);
    let whole = Tensor {
        dtype: Dtype::Q4_1,
        rows: 8,
        cols: 64,
        bytes: &bytes,
    };
    for cols in [0..16, 16..64, 0..63, 31..33] {
        let refused = shard::cols(&whole, cols).map(|_| ());
        assert!(
            matches!(refused, Err(ShardError::InsideGroup { .. })),
            "{refused:?}"
        );
    }
    for cols in [0..96, 64..96, 32..32] {
        let refused = shard::cols(&whole, cols).map(|_| ());
        assert!(
            matches!(refused, Err(ShardError::Range { .. })),
            "{refused:?}"
        );
    }
    for rows in [0..9, 8..9, 3..3] {
        let refused = shard::rows(&whole, rows).map(|_| ());
        assert!(
            matches!(refused, Err(ShardError::Range { .. })),
            "{refused:?}"
        );
    }
    for dtype in [Dtype::Q8_0, Dtype::Other(99)] {
        let lies = Tensor { dtype, ..whole };
        for refused in [shard::rows(&lies, 0..4), shard::cols(&lies, 0..32)] {
            let refused = refused.map(|_| ());
            assert!(
                matches!(refused, Err(ShardError::Stored { .. })),
                "{refused:?}"
            );
        }
    }
}

/// Would catch units that no rank has, or two have, and shares that are more uneven than needed.
#[test]
fn shares_are_whole_and_even() {
    for (units, count) in (0..40).flat_map(|units| (1..7).map(move |count| (units, count))) {
        let shares: Vec<_> = ranks(count).map(|rank| share(units, rank)).collect();
        let all: Vec<usize> = shares.iter().cloned().flatten().collect();
        assert_eq!(all, (0..units).collect::<Vec<_>>());
        let sizes = shares.iter().map(Range::len);
        assert!(sizes.clone().max().unwrap() - sizes.min().unwrap() <= 1);
    }
}
