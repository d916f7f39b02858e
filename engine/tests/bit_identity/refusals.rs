//! Is a file that cannot be served refused with a word on why, and a wrong batch likewise?

use engine::model::{
    BlockId, ForwardError, Model, ModelError, ModelFile, ModelOptions, OpsKind, SeqInput,
};

use super::tiny::{CONTEXT, Tiny, VOCAB, Value};
use super::{file_of, load};

/// What loading these bytes says.
fn refusal(bytes: &[u8]) -> ModelError {
    let file = file_of(bytes);
    let options = ModelOptions {
        ops: OpsKind::Cpu,
        threads: 1,
        kv_blocks: 4,
    };
    ModelFile::open(file.path())
        .and_then(|file| Model::load(&file, &options, &mut |_| ()))
        .expect_err("this file cannot be served")
}

/// Applies one damage to the small model, and looks for `word` in the refusal.
fn check(word: &str, damage: impl FnOnce(&mut Tiny)) {
    let mut tiny = Tiny::new(7);
    damage(&mut tiny);
    let message = refusal(&tiny.to_bytes()).to_string();
    assert!(message.contains(word), "{word:?} is not in {message:?}");
}

fn set(tiny: &mut Tiny, key: &str, value: Value) {
    tiny.metadata
        .iter_mut()
        .find(|(k, _)| *k == key)
        .expect("a key of the small model")
        .1 = value;
}

/// Would catch an index out of bounds, a division by zero or a wrong excuse.
#[test]
fn ill_formed_models_are_refused_by_name() {
    check("mamba", |tiny| {
        set(tiny, "general.architecture", Value::Text("mamba"))
    });
    check("general.architecture", |tiny| {
        set(tiny, "general.architecture", Value::U32(1))
    });
    check("llama.block_count", |tiny| {
        tiny.metadata.retain(|(key, _)| *key != "llama.block_count")
    });
    check("llama.attention.head_count", |tiny| {
        set(tiny, "llama.attention.head_count", Value::U32(0));
    });
    check("head_count_kv", |tiny| {
        set(tiny, "llama.attention.head_count_kv", Value::U32(4))
    });
    check("head size", |tiny| {
        set(tiny, "llama.attention.key_length", Value::U32(24))
    });
    check("blk.2.attn_q", |tiny| {
        set(tiny, "llama.block_count", Value::U32(3))
    });
    check("embedding_length", |tiny| {
        set(tiny, "llama.embedding_length", Value::U32(u32::MAX))
    });
    check("freq_base", |tiny| {
        set(tiny, "llama.rope.freq_base", Value::F32(f32::NAN))
    });
    check("token_embd.weight", |tiny| {
        tiny.tensors.remove(0);
    });
    check("blk.1.ffn_down.weight", |tiny| {
        tiny.tensors
            .retain(|tensor| tensor.name != "blk.1.ffn_down.weight");
    });
    check("blk.0.attn_k.weight has the shape [64, 96]", |tiny| {
        let key = tiny
            .tensors
            .iter_mut()
            .find(|tensor| tensor.name == "blk.0.attn_k.weight");
        key.expect("the small model has keys").dims.reverse();
    });
    check("this engine reads F32, F16", |tiny| {
        // I8, of the right size.
        let values = 96 * 64;
        let key = tiny
            .tensors
            .iter_mut()
            .find(|tensor| tensor.name == "blk.0.attn_k.weight");
        let key = key.expect("the small model has keys");
        (key.format, key.bytes) = (24, vec![0; values]);
    });
    check("blk.0.attn_q.bias", |tiny| {
        let mut bias = tiny.tensors[0].clone();
        bias.name = "blk.0.attn_q.bias".into();
        tiny.tensors.push(bias);
    });
    check("none, linear or yarn", |tiny| {
        let scaling = ("llama.rope.scaling.type", Value::Text("longrope"));
        tiny.metadata.push(scaling);
    });
    check("qwen2.embedding_length", |tiny| {
        set(tiny, "general.architecture", Value::Text("qwen2"))
    });
}

/// Would catch a read past the mapping. Cuts through header, table and tensor data.
#[test]
fn truncated_and_foreign_files_are_refused() {
    let whole = Tiny::new(7).to_bytes();
    for len in [
        0,
        3,
        4,
        23,
        24,
        100,
        1_000,
        whole.len() / 2,
        whole.len() - 64,
    ] {
        assert!(
            matches!(refusal(&whole[..len]), ModelError::Header { .. }),
            "{len} bytes"
        );
    }
    assert!(matches!(
        refusal(b"PK\x03\x04 not a model at all"),
        ModelError::Header { .. }
    ));
    let missing = ModelFile::open("no such file.gguf".as_ref()).expect_err("there is no such file");
    assert!(missing.to_string().contains("no such file.gguf"));
    assert!(matches!(
        ModelFile::open(tempfile::tempdir().expect("a folder").path()),
        Err(ModelError::Checkpoint { .. })
    ));
}

fn input<'a>(tokens: &'a [u32], start: usize, blocks: &'a [BlockId]) -> SeqInput<'a> {
    SeqInput {
        tokens,
        start,
        blocks,
        logits_last: 0,
    }
}

/// Would catch a batch that reads or writes outside its sequence, instead of being refused.
#[test]
fn wrong_batches_are_refused_and_leave_the_model_usable() {
    let file = file_of(&Tiny::new(7).to_bytes());
    let mut model = load(file.path(), engine::model::Variant::Portable, 1);
    let blocks: Vec<BlockId> = (0..80).map(BlockId).collect();
    let mut refusal = |batch: &[SeqInput<'_>]| {
        model
            .forward(batch, &mut Vec::new())
            .expect_err("this batch is wrong")
    };
    let long = vec![0; CONTEXT + 1];
    assert_eq!(
        refusal(&[input(&[], 0, &blocks)]),
        ForwardError::Empty { sequence: 0 }
    );
    let token = VOCAB as u32;
    assert!(matches!(
        refusal(&[input(&[1], 0, &blocks), input(&[token], 0, &blocks[8..])]),
        ForwardError::Token { sequence: 1, .. }
    ));
    assert!(matches!(
        refusal(&[input(&long, 0, &blocks)]),
        ForwardError::Context { .. }
    ));
    assert!(matches!(
        refusal(&[input(&[1], usize::MAX, &blocks)]),
        ForwardError::Context { .. }
    ));
    assert!(matches!(
        refusal(&[input(&[1], 16, &blocks[..1])]),
        ForwardError::BlocksShort {
            have: 1,
            end: 17,
            ..
        }
    ));
    assert!(matches!(
        refusal(&[input(&[1], 0, &[BlockId(200)])]),
        ForwardError::Block { block: 200, .. }
    ));
    assert!(matches!(
        refusal(&[input(&[1], 0, &blocks), input(&[1], 5, &blocks)]),
        ForwardError::BlockTwice {
            sequence: 1,
            block: 0
        }
    ));
    let asks_for_more = SeqInput {
        logits_last: 2,
        ..input(&[1], 0, &blocks)
    };
    assert!(matches!(
        refusal(&[asks_for_more]),
        ForwardError::Logits { .. }
    ));
    let mut logits = Vec::new();
    let last = SeqInput {
        logits_last: 1,
        ..input(&[1, 2], 0, &blocks)
    };
    model
        .forward(&[last], &mut logits)
        .expect("the model still runs");
    assert_eq!(logits.len(), VOCAB);
}
