//! Can a KV block leave one pool and serve in another, to the last bit?
//!
//! Blocks travel as records, layer by layer: to a pool of another size, another kernel variant,
//! ranks with some of the heads and back, and to the reference ops, which keep another format in
//! another order. What does not fit is refused by name, and then nothing has changed.

use std::path::Path;

use engine::kv::layout::{
    CHECKSUM_BYTES, HEADER_BYTES, HeadRange, KvDtype, LayoutError, Record, convert_layers,
};
use engine::model::{
    BLOCK_TOKENS, BlockId, Model, ModelFile, ModelOptions, OpsKind, SeqInput, Variant,
};
use engine::parallel::RankGroup;

use super::tiny::{self, Noise, Tiny};
use super::{file_of, prompts};

const LAYERS: usize = 2;

fn load(path: &Path, ops: OpsKind, variant: Variant, kv_blocks: usize) -> Model {
    let file = ModelFile::open(path).expect("the model opens");
    let options = ModelOptions {
        ops,
        threads: 2,
        kv_blocks,
    };
    Model::load_on(variant, &file, &options, &mut |_| ()).expect("the model loads")
}

/// Blocks in an order of their own for every seed.
fn table(noise: &mut Noise, pool: usize) -> Vec<BlockId> {
    let mut ids: Vec<BlockId> = (0..pool as u32).map(BlockId).collect();
    for index in (1..ids.len()).rev() {
        ids.swap(index, noise.below(index + 1));
    }
    ids
}

fn run(model: &mut Model, tokens: &[u32], start: usize, blocks: &[BlockId]) -> Vec<f32> {
    let input = SeqInput {
        tokens,
        start,
        blocks,
        logits_last: tokens.len(),
    };
    let mut logits = Vec::new();
    model
        .forward(&[input], &mut logits)
        .expect("a correct pass");
    logits
}

/// The records of a sequence's first `tokens` positions: block after block, layer after layer.
fn export(model: &Model, tokens: usize, blocks: &[BlockId]) -> Vec<Vec<u8>> {
    let mut records = Vec::new();
    for (index, block) in blocks
        .iter()
        .take(tokens.div_ceil(BLOCK_TOKENS))
        .enumerate()
    {
        let filled = (tokens - index * BLOCK_TOKENS).min(BLOCK_TOKENS);
        for layer in 0..LAYERS {
            let mut record = Vec::new();
            model.export_block(*block, layer, filled, &mut record);
            assert_eq!(record.len(), model.block_layout().record_bytes());
            records.push(record);
        }
    }
    records
}

fn import(
    model: &mut Model,
    records: &[Vec<u8>],
    blocks: &[BlockId],
) -> Result<Vec<HeadRange>, LayoutError> {
    let places = blocks
        .iter()
        .flat_map(|block| (0..LAYERS).map(move |layer| (*block, layer)));
    places
        .zip(records)
        .map(|((block, layer), record)| model.import_block(block, layer, record))
        .collect()
}

/// Would catch a tile at the wrong place, a block that is not whole, or a pool whose size leaks
/// into the layout.
#[test]
fn imported_blocks_give_the_same_bits() {
    let file = file_of(&Tiny::new(7).to_bytes());
    let mut noise = Noise(61);
    let prompt = prompts(&mut noise, tiny::VOCAB, &[120]).remove(0);
    let mut source = load(file.path(), OpsKind::Cpu, Variant::Portable, 11);
    let own = table(&mut noise, 11);
    run(&mut source, &prompt, 0, &own);
    for variant in Variant::ALL.into_iter().filter(|v| v.is_available()) {
        for split in [1, 15, 16, 17, 64, 100] {
            let rest = run(&mut source, &prompt[split..], split, &own);
            let records = export(&source, split, &own);
            let mut target = load(file.path(), OpsKind::Cpu, variant, 29);
            let blocks = table(&mut noise, 29);
            // What an earlier tenant left in the pool.
            run(&mut target, &prompt, 0, &table(&mut noise, 29));
            let heads = import(&mut target, &records, &blocks).expect("the same model");
            assert!(heads.iter().all(|h| *h == HeadRange { first: 0, count: 2 }));
            let found = run(&mut target, &prompt[split..], split, &blocks);
            assert!(found == rest, "{} after {split}", variant.as_str());
            assert!(
                export(&target, split, &blocks) == records,
                "{} after {split}",
                variant.as_str()
            );
        }
    }
}

/// Would catch the KV of another tenant in a block that is not full.
#[test]
fn what_is_not_computed_is_not_exported() {
    let file = file_of(&Tiny::new(7).to_bytes());
    let mut noise = Noise(62);
    let prompts = prompts(&mut noise, tiny::VOCAB, &[21, 48]);
    let mut model = load(file.path(), OpsKind::Cpu, Variant::best(), 8);
    let blocks = table(&mut noise, 8);
    run(&mut model, &prompts[0], 0, &blocks);
    let fresh = export(&model, 21, &blocks);
    run(&mut model, &prompts[1], 0, &blocks);
    run(&mut model, &prompts[0], 0, &blocks);
    assert!(export(&model, 21, &blocks) == fresh);
}

/// A whole pool's blocks go to two ranks, each of which has one of the heads, and from those back
/// to a whole pool. Would catch a head that lands at another head's place.
#[test]
fn heads_are_split_and_merged() {
    let file = file_of(&Tiny::new(7).to_bytes());
    let mut noise = Noise(63);
    let prompt = prompts(&mut noise, tiny::VOCAB, &[90]).remove(0);
    let (mut source, own) = (
        load(file.path(), OpsKind::Cpu, Variant::best(), 11),
        table(&mut noise, 11),
    );
    run(&mut source, &prompt, 0, &own);
    let rest = run(&mut source, &prompt[70..], 70, &own);
    let records = export(&source, 70, &own);

    let opened = ModelFile::open(file.path()).expect("the model opens");
    let options = ModelOptions {
        ops: OpsKind::Cpu,
        threads: 1,
        kv_blocks: 7,
    };
    let mut ranks = RankGroup::in_process(2, &opened, &options).expect("two ranks");
    let mut target = load(file.path(), OpsKind::Cpu, Variant::best(), 13);
    let blocks = table(&mut noise, 13);
    let mut parts = Vec::new();
    for (index, rank) in ranks.ranks().enumerate() {
        let part = HeadRange {
            first: index,
            count: 1,
        };
        assert_eq!(rank.block_layout().heads, part);
        let theirs = table(&mut noise, 7);
        let taken = import(rank, &records, &theirs).expect("some of the heads");
        assert!(taken.iter().all(|heads| *heads == part));
        parts.push(export(rank, 70, &theirs));
        let merged = import(&mut target, &parts[index], &blocks).expect("some of the heads");
        assert!(merged.iter().all(|heads| *heads == part));
    }
    assert!(run(&mut target, &prompt[70..], 70, &blocks) == rest);
    // A rank has no use for the other's heads.
    let first = ranks.ranks().next().expect("there are two");
    let refused = first.import_block(BlockId(0), 0, &parts[1][0]);
    assert!(
        matches!(refused, Err(LayoutError::Heads { .. })),
        "{refused:?}"
    );
}

fn body(model: &Model, block: BlockId) -> Vec<u8> {
    let mut body = vec![0; model.block_layout().body_bytes()];
    model.read_block(block, &mut body);
    body
}

/// A whole body becomes just what its records do: for the reference ops, and for a rank with one head.
#[test]
fn bodies_are_converted_as_records_are() {
    let file = file_of(&Tiny::new(7).to_bytes());
    let mut noise = Noise(65);
    let prompt = prompts(&mut noise, tiny::VOCAB, &[48]).remove(0);
    let mut source = load(file.path(), OpsKind::Cpu, Variant::best(), 5);
    let own = table(&mut noise, 5);
    run(&mut source, &prompt, 0, &own);
    let records = export(&source, 48, &own);
    let theirs = source.block_layout();
    let check = |target: &mut Model| {
        let layout = target.block_layout();
        assert_eq!(theirs.fits_whole(&layout), Ok(()));
        let blocks = [2, 0, 1].map(BlockId);
        import(target, &records, &blocks).expect("the same model");
        for (from, to) in own.iter().zip(blocks) {
            let mut converted = vec![1; layout.body_bytes()];
            convert_layers(&theirs, &body(&source, *from), &layout, &mut converted);
            assert!(converted == body(target, to), "{layout:?}");
        }
        layout
    };
    let wide = check(&mut load(
        file.path(),
        OpsKind::Reference,
        Variant::best(),
        4,
    ));
    let refused = wide.fits_whole(&theirs);
    assert!(
        matches!(refused, Err(LayoutError::Narrower { .. })),
        "{refused:?}"
    );
    let opened = ModelFile::open(file.path()).expect("the model opens");
    let options = ModelOptions {
        ops: OpsKind::Cpu,
        threads: 1,
        kv_blocks: 4,
    };
    let mut ranks = RankGroup::in_process(2, &opened, &options).expect("two ranks");
    for rank in ranks.ranks() {
        let part = check(rank);
        let refused = part.fits_whole(&theirs);
        assert!(
            matches!(refused, Err(LayoutError::Heads { .. })),
            "{refused:?}"
        );
    }
}

/// Would catch keys whose dimensions are mixed up between op sets, and values that are rounded.
#[test]
fn formats_and_orders_are_converted_where_no_bit_is_lost() {
    let file = file_of(&Tiny::new(7).to_bytes());
    let mut noise = Noise(64);
    let prompt = prompts(&mut noise, tiny::VOCAB, &[80]).remove(0);
    let own = table(&mut noise, 11);
    let mut cpu = load(file.path(), OpsKind::Cpu, Variant::best(), 11);
    let mut plain = load(file.path(), OpsKind::Reference, Variant::best(), 11);
    run(&mut cpu, &prompt, 0, &own);
    let expected = run(&mut plain, &prompt, 0, &own)[60 * tiny::VOCAB..].to_vec();
    let narrow = export(&cpu, 60, &own);
    let wide = export(&plain, 60, &own);

    let mut target = load(file.path(), OpsKind::Reference, Variant::best(), 9);
    let blocks = table(&mut noise, 9);
    import(&mut target, &narrow, &blocks).expect("f16 fits f32");
    let found = run(&mut target, &prompt[60..], 60, &blocks);
    let worst = found
        .iter()
        .zip(&expected)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max);
    let largest = expected.iter().copied().map(f32::abs).fold(0.0, f32::max);
    println!("largest difference {worst} of logits up to {largest}");
    // The serving ops' int8 activations went into these keys and values.
    assert!(worst < 0.05 * largest, "{worst} of {largest}");

    import(&mut target, &wide, &blocks).expect("the same op set");
    assert!(run(&mut target, &prompt[60..], 60, &blocks) == expected);
    assert_eq!(
        cpu.import_block(BlockId(0), 0, &wide[0]),
        Err(LayoutError::Narrower {
            theirs: KvDtype::F32,
            ours: KvDtype::F16
        })
    );
}

/// A record with some bytes overwritten and a checksum that is right again.
fn forged(record: &[u8], at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut forged = record.to_vec();
    forged[at..at + bytes.len()].copy_from_slice(bytes);
    let end = forged.len() - CHECKSUM_BYTES;
    let hash = blake3::hash(&forged[..end]);
    forged[end..].copy_from_slice(&hash.as_bytes()[..CHECKSUM_BYTES]);
    forged
}

/// Would catch a refusal that panics, allocates by what the bytes say, or changes the pool first.
#[test]
fn hostile_and_foreign_records_are_refused_and_change_nothing() {
    let file = file_of(&Tiny::new(7).to_bytes());
    let mut noise = Noise(65);
    let prompt = prompts(&mut noise, tiny::VOCAB, &[16]).remove(0);
    let mut model = load(file.path(), OpsKind::Cpu, Variant::best(), 3);
    let block = BlockId(1);
    run(&mut model, &prompt, 0, &[block]);
    let mut record = Vec::new();
    model.export_block(block, 1, 16, &mut record);
    assert_eq!(
        Record::parse(&record).map(|r| (r.layer, r.tokens)),
        Ok((1, 16))
    );
    let mut check = |what: &str, bytes: &[u8], word: &str| {
        let refused = model.import_block(block, 1, bytes);
        let message = refused.expect_err(what).to_string();
        assert!(
            message.contains(word),
            "{what}: {word:?} is not in {message:?}"
        );
        let mut again = Vec::new();
        model.export_block(block, 1, 16, &mut again);
        assert!(again == record, "{what}: the pool has changed");
    };
    for len in [0, 1, 4, 39, 40, 41, record.len() - 1] {
        check("cut short", &record[..len], "bytes");
    }
    let longer = [&record[..], &[0]].concat();
    check("too long", &longer, "expected");
    check("magic", &forged(&record, 0, b"GGUF"), "not a KV record");
    check("version", &forged(&record, 4, &[2, 0]), "version 2");
    check("dtype", &forged(&record, 6, &[7]), "dtype 7");
    check("order", &forged(&record, 7, &[2]), "key order 2");
    check("tokens", &forged(&record, 10, &[0, 0]), "tokens 0");
    check("tokens", &forged(&record, 10, &[17, 0]), "tokens 17");
    check(
        "layer",
        &forged(&record, 16, &[0; 4]),
        "layer 0, expected layer 1",
    );
    check("layer", &forged(&record, 16, &[2, 0, 0, 0]), "layer 2");
    check("layers", &forged(&record, 12, &[3, 0, 0, 0]), "layers is 3");
    check(
        "kv_heads",
        &forged(&record, 20, &[9, 0, 0, 0]),
        "kv_heads is 9",
    );
    for at in [8, 12, 20, 24, 28, 32, 36] {
        check(
            "absurd",
            &forged(&record, at, &[255; 4]),
            "a KV record with",
        );
    }
    let infinite = half::f16::INFINITY.to_le_bytes();
    for _ in 0..20 {
        let place = HEADER_BYTES + 2 * noise.below((record.len() - HEADER_BYTES - 16) / 2);
        check("infinite", &forged(&record, place, &infinite), "not finite");
        let mut flipped = record.clone();
        flipped[HEADER_BYTES + noise.below(record.len() - HEADER_BYTES)] ^= 1 << noise.below(8);
        check("flipped", &flipped, "checksum");
    }
}
