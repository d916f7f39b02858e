//! Catches: a damaged copy of a real model file that panics the reader or is believed.

use prompt::gguf::{Dtype, Header};
use prompt::{PromptBuilder, Tokenizer};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

#[test]
fn reads_the_default_model() {
    let header = crate::common::header();
    assert_eq!(
        header.get("general.architecture").unwrap().as_str(),
        Some("llama")
    );
    assert_eq!(
        header.get("llama.embedding_length").unwrap().as_u64(),
        Some(576)
    );
    assert_eq!(
        header.get("llama.rope.freq_base").unwrap().as_f64(),
        Some(100_000.0)
    );
    assert_eq!(
        (header.tensors.len(), header.data_offset % header.alignment),
        (272, 0)
    );
    let embedding = &header.tensors[0];
    assert_eq!(
        (embedding.name.as_str(), embedding.dtype),
        ("token_embd.weight", Dtype::Q8_0)
    );
    assert_eq!(embedding.dims, [576, 49152]);
    assert_eq!(embedding.bytes, 576 / 32 * 34 * 49152);
    let tokenizer = crate::common::builder().tokenizer();
    assert_eq!(tokenizer.vocab_size(), 49152);
    assert_eq!(
        (tokenizer.bos(), tokenizer.eos_ids()),
        (Some(1), &[0, 2][..])
    );
    assert!(
        tokenizer.is_control(1) && !tokenizer.is_control(17) && !tokenizer.is_control(u32::MAX)
    );
    assert_eq!(
        (tokenizer.token_bytes(1), tokenizer.token_bytes(17)),
        (&b""[..], &b"!"[..])
    );
    assert_eq!(tokenizer.token_bytes(u32::MAX), b"");
}

#[test]
fn damage_is_an_error_or_another_sound_header() {
    let whole = crate::common::model_bytes();
    let header_bytes = crate::common::header().data_offset as usize;
    let mut rng = StdRng::seed_from_u64(1);
    for _ in 0..60 {
        let length = rng.random_range(0..header_bytes);
        assert!(
            Header::parse(&whole[..length]).is_err(),
            "believed {length} bytes"
        );
    }
    let error = Header::parse(&whole[..whole.len() - 4096])
        .unwrap_err()
        .to_string();
    assert!(error.contains("truncated"), "{error}");

    // The start of the file holds what has structure; the arrays behind it are alike.
    let mut damaged = whole;
    for _ in 0..150 {
        let reach = if rng.random_bool(0.7) {
            3000
        } else {
            header_bytes
        };
        let (at, bit) = (rng.random_range(0..reach), 1 << rng.random_range(0..8));
        damaged[at] ^= bit;
        if let Ok(header) = Header::parse(&damaged) {
            let _ = Tokenizer::from_gguf(&header);
        }
        damaged[at] ^= bit;
    }
}

#[test]
fn unusable_metadata_is_refused_by_its_key() {
    use prompt::gguf::Value::{Array, Str, U64};
    let check = |key: &str, value: Option<prompt::gguf::Value>, expected: &str| {
        let mut header = crate::common::header().clone();
        match value {
            Some(value) => header.metadata.insert(key.to_owned(), value),
            None => header.metadata.remove(key),
        };
        let error = PromptBuilder::from_gguf(&header).unwrap_err().to_string();
        assert!(
            error.contains(key) && error.contains(expected),
            "{key}: {error}"
        );
    };
    let strings = |strings: &[&str]| Array(strings.iter().map(|s| Str((*s).to_owned())).collect());
    check(
        "tokenizer.ggml.model",
        Some(Str("bert".into())),
        "\"bert\", which is not supported",
    );
    check("tokenizer.ggml.model", None, "missing");
    check(
        "tokenizer.ggml.pre",
        Some(Str("dbrx".into())),
        "\"dbrx\", which is not supported",
    );
    check("tokenizer.ggml.tokens", None, "is missing");
    check("tokenizer.ggml.tokens", Some(U64(1)), "not an array");
    check(
        "tokenizer.ggml.token_type",
        Some(strings(&["a"])),
        "49152 tokens but 1 types",
    );
    check(
        "tokenizer.ggml.merges",
        Some(strings(&["ab"])),
        "not two tokens",
    );
    check("tokenizer.ggml.merges", Some(strings(&["Ġ ŧŧŧ"])), "not in");
    check(
        "tokenizer.ggml.eos_token_id",
        Some(U64(49152)),
        "not one of 49152",
    );
    check(
        "tokenizer.chat_template",
        Some(Str("{% if %}".into())),
        "does not compile",
    );
    check("tokenizer.chat_template", Some(U64(1)), "not a string");
}
