//! What goes into the pool and what attention makes of it, for each format that a pool can have: the
//! stored values against their definition, attention against the reference on just those values.

use super::*;
use crate::kv::layout::tile::Half;
use crate::kv::layout::{self, Bf16, BlockLayout, F32, HeadRange, Int8, KvFormat, convert_layers};
use crate::kv::storage::{BlockId, KvShape};
use half::{bf16, f16};

/// Calls a check for every variant this processor has and every format.
macro_rules! on_each_pool {
    ($check:ident) => {{
        fn each<I: Isa>(name: &str) {
            $check::<I, F16>(&format!("{name} f16"));
            $check::<I, Bf16>(&format!("{name} bf16"));
            $check::<I, Int8>(&format!("{name} int8"));
        }
        on_each_variant!(each);
    }};
}

fn layout_of<F: KvFormat>(shape: KvShape) -> BlockLayout {
    BlockLayout {
        dtype: F::DTYPE,
        key_order: KeyOrder::Halves,
        block_tokens: BLOCK_TOKENS,
        layers: 1,
        kv_heads: shape.heads,
        heads: HeadRange {
            first: 0,
            count: shape.heads,
        },
        head_dim: shape.head_dim,
    }
}

/// The layer's values as plain numbers, in the pool of the reference ops.
fn widened<S: Stored>(kv: &KvStorage<S>, layer: usize) -> KvStorage<F32> {
    let shape = kv.shape();
    let (theirs, own) = (layout_of::<S>(shape), layout_of::<F32>(shape));
    let mut plain = KvStorage::new(layer + 1, shape);
    let mut stored = vec![0; theirs.body_bytes()];
    let mut numbers = vec![0; own.body_bytes()];
    for block in (0..shape.blocks as u32).map(BlockId) {
        layout::read_layers(kv, &theirs, (block, layer..layer + 1), &mut stored);
        convert_layers(&theirs, &stored, &own, &mut numbers);
        let place = (block, layer..layer + 1);
        assert!(layout::take_layers(&mut plain, &own, place, &numbers));
    }
    plain
}

/// One batch through store and attend in both sets. Would catch a wrong mask, window, tile, segment
/// border, block address, head group or scale.
#[test]
fn attention_equals_the_reference() {
    fn check<I: Isa, S: Stored>(name: &str) {
        let Some(mut ops) = ops_storing::<I, S>(name) else {
            return;
        };
        for (heads, kv_heads, dim, lens) in [
            (9, 3, 64, vec![1, 40, 17]),
            (2, 2, 32, vec![530]),
            (8, 1, 96, vec![300, 5]),
            (14, 1, 32, vec![20, 260]),
        ] {
            for window in [usize::MAX, 1, 30, 270] {
                let heads = Heads {
                    heads,
                    kv_heads,
                    dim,
                    window,
                };
                let (found, expected) = attend_both(&mut ops, heads, &lens);
                let what = format!("{name} {heads:?} {lens:?}");
                // Outputs stay below 1; an int8 step of at most 1/127, half of it.
                assert_close(&what, &found, &expected, 0.005);
            }
        }
    }
    on_each_pool!(check);
}

/// Runs sequences of these lengths, in two calls each, and returns the outputs of the second.
fn attend_both<I: Isa, S: Stored>(
    ops: &mut CpuOps<I, S>,
    heads: Heads,
    lens: &[usize],
) -> (Vec<f32>, Vec<f32>) {
    let mut plain = ReferenceOps::new(2);
    let mut noise = Noise(5);
    let blocks_each = lens.iter().max().unwrap().div_ceil(BLOCK_TOKENS) + 1;
    let shape = KvShape {
        blocks: blocks_each * lens.len(),
        heads: heads.kv_heads,
        head_dim: heads.dim,
    };
    let mut kv = KvStorage::<S>::new(2, shape);
    let tables: Vec<Vec<BlockId>> = (0..lens.len())
        .map(|seq| {
            (0..blocks_each)
                .rev()
                .map(|b| BlockId((b * lens.len() + seq) as u32))
                .collect()
        })
        .collect();
    let mut results = (Vec::new(), Vec::new());
    let halves = lens.iter().map(|len| len / 2);
    for (starts, ends) in [
        (vec![0; lens.len()], halves.clone().collect::<Vec<_>>()),
        (halves.collect(), lens.to_vec()),
    ] {
        let tokens: Vec<Vec<u32>> = starts
            .iter()
            .zip(&ends)
            .map(|(s, e)| vec![0; e - s])
            .collect();
        let batch: Vec<SeqInput<'_>> = tokens
            .iter()
            .zip(&starts)
            .zip(&tables)
            .filter(|((tokens, _), _)| !tokens.is_empty())
            .map(|((tokens, start), blocks)| SeqInput {
                tokens,
                start: *start,
                blocks,
                logits_last: 0,
            })
            .collect();
        let rows: usize = tokens.iter().map(Vec::len).sum();
        let queries: Vec<f32> = noise
            .floats(rows * heads.heads * heads.dim)
            .iter()
            .map(|q| 4.0 * q)
            .collect();
        let half = |_| noise.half().to_f32();
        let keys: Vec<f32> = (0..rows * heads.kv_heads * heads.dim).map(half).collect();
        let values: Vec<f32> = keys.iter().rev().copied().collect();
        ops.store(1, &batch, (&keys, &values), &mut kv);
        let mut found = Rows::new(Precision::Coarse);
        ops.attend(1, &batch, (&queries, heads), &kv, &mut found);
        let plain_kv = widened(&kv, 1);
        plain.attend(1, &batch, (&queries, heads), &plain_kv, &mut results.1);
        results.0 = numbers(&found);
    }
    results
}

/// What a format makes of one head of one token, by its definition: value by value.
fn stored_plainly(dtype: layout::KvDtype, values: &[f32]) -> Vec<f32> {
    let cut = |value: f32, most: f32| {
        if value.is_nan() {
            -most
        } else {
            value.clamp(-most, most)
        }
    };
    let half = |value: f32| f16::from_f32(cut(value, 65_504.0)).to_f32();
    let brain = |value: f32| bf16::from_f32(cut(value, bf16::MAX.to_f32())).to_f32();
    match dtype {
        layout::KvDtype::F32 => values.to_vec(),
        layout::KvDtype::F16 => values.iter().copied().map(half).collect(),
        layout::KvDtype::Bf16 => values.iter().copied().map(brain).collect(),
        layout::KvDtype::Int8 => {
            let group = |group: &[f32]| -> Vec<f32> {
                let group: Vec<f32> = group.iter().map(|value| cut(*value, 65_504.0)).collect();
                let largest = group.iter().fold(0.0f32, |a, b| a.max(b.abs()));
                let scale = f16::from_f32(largest / 127.0).to_f32();
                let step = |value: &f32| (value / scale).round_ties_even().clamp(-127.0, 127.0);
                let number = |value| {
                    if scale > 0.0 {
                        step(value) * scale
                    } else {
                        0.0
                    }
                };
                group.iter().map(number).collect()
            };
            values.chunks(16).flat_map(group).collect()
        }
    }
}

/// Values of every size, infinite ones and ones that are no numbers, at every place of a block. Would catch a
/// value at another's place, a scale that is not its token's, a rounding that differs between
/// variants, and a value that is not finite in the pool.
#[test]
fn what_is_stored_is_what_the_format_says() {
    fn check<I: Isa, S: Stored>(name: &str) {
        let Some(mut ops) = ops_storing::<I, S>(name) else {
            return;
        };
        let mut noise = Noise(9);
        let shape = KvShape {
            blocks: 3,
            heads: 2,
            head_dim: 96,
        };
        let row = shape.heads * shape.head_dim;
        let mut kv = KvStorage::<S>::new(1, shape);
        let blocks = [2, 0, 1].map(BlockId);
        let sizes = [1.0, 1e-7, 0.0, 300.0, 3e4, 1e30, 3.4e38];
        let mut draw = |count: usize| -> Vec<f32> {
            let size = |index: usize| sizes[index / 32 % sizes.len()];
            let mut values: Vec<f32> = (0..count).map(|i| size(i) * noise.float()).collect();
            let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0];
            values
                .iter_mut()
                .skip(5)
                .step_by(211)
                .zip(odd.iter().cycle())
                .for_each(|(v, o)| *v = *o);
            values
        };
        let tokens = [0; 40];
        let (keys, values) = (draw(40 * row), draw(40 * row));
        // In two calls that meet within a block.
        for (start, end) in [(0, 21), (21, 40)] {
            let input = SeqInput {
                tokens: &tokens[start..end],
                start,
                blocks: &blocks,
                logits_last: 0,
            };
            let rows = start * row..end * row;
            ops.store(0, &[input], (&keys[rows.clone()], &values[rows]), &mut kv);
        }
        let own = layout_of::<S>(shape);
        for position in 0..40 {
            let mut body = vec![0; own.body_bytes()];
            let block = blocks[position / BLOCK_TOKENS];
            layout::read_body(&kv, &own, block, &mut body);
            assert!(S::DTYPE.are_finite(&body), "{name}");
            for (half, rows) in [(Half::Keys, &keys), (Half::Values, &values)] {
                for head in 0..shape.heads {
                    let from = position * row + head * shape.head_dim;
                    let expected = stored_plainly(S::DTYPE, &rows[from..from + shape.head_dim]);
                    let tile = &body[head * body.len() / 2..][..body.len() / 2];
                    let token = position % BLOCK_TOKENS;
                    let found: Vec<f32> = (0..shape.head_dim)
                        .map(|dim| own.number(tile, (half, dim, token)) + 0.0)
                        .collect();
                    let expected: Vec<f32> = expected.iter().map(|value| value + 0.0).collect();
                    assert_same(&format!("{name} {half:?} {position}"), &found, &expected);
                }
            }
        }
    }
    on_each_pool!(check);
}

/// All variants against the portable one, bit for bit.
#[test]
fn variants_give_the_same_bits_from_each_pool() {
    fn check<I: Isa, S: Stored>(name: &str) {
        let Some(mut ops) = ops_storing::<I, S>(name) else {
            return;
        };
        let mut portable = CpuOps::<Portable, S>::new(1).unwrap();
        let heads = Heads {
            heads: 6,
            kv_heads: 2,
            dim: 96,
            window: usize::MAX,
        };
        for lens in [vec![300, 7], vec![3, 33, 12]] {
            let (found, _) = attend_both(&mut ops, heads, &lens);
            let (expected, _) = attend_both(&mut portable, heads, &lens);
            assert_same(name, &found, &expected);
        }
    }
    on_each_pool!(check);
}
