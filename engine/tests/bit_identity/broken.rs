//! Does a model with broken weights (NaN, infinities, huge scales) stay a model that can be
//! refused? Norm weights are looked through when it is loaded; matrices are not. Whatever the logits are, no kernel may panic, hang or leave the model unusable: the
//! step loop sees the logits and ends the requests.

use engine::model::{
    Model, ModelError, ModelFile, ModelOptions, OpsKind, Pass, PassOutput, SeqInput, Variant,
};
use half::f16;

use super::tiny::{Noise, Tiny};
use super::{blocks, file_of};

/// Overwrites some values of a tensor with what must not be there.
fn spoil(tiny: &mut Tiny, noise: &mut Noise, name: &str, value: f32) {
    let tensor = tiny.tensors.iter_mut().find(|tensor| tensor.name == name);
    let tensor = tensor.expect("a tensor of the small model");
    let half = f16::from_f32(value).to_le_bytes();
    // By ggml's numbers: F32, F16, Q4_0, Q4_1, Q8_0; a block starts with its scale.
    let unit = [4, 2, 18, 20, 0, 0, 0, 0, 34][tensor.format as usize];
    let units = tensor.bytes.len() / unit;
    for _ in 0..3 {
        let at = noise.below(units) * unit;
        if tensor.format == 0 {
            tensor.bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        } else {
            tensor.bytes[at..at + 2].copy_from_slice(&half);
        }
    }
}

/// Would catch an index from a NaN, an endless loop, an arithmetic overflow.
#[test]
fn broken_weights_give_broken_logits_and_nothing_worse() {
    let mut noise = Noise(51);
    let names: Vec<String> = Tiny::new(7)
        .tensors
        .iter()
        .map(|t| t.name.clone())
        .collect();
    for (index, name) in names.iter().enumerate() {
        let value = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 65_504.0][index % 4];
        let mut tiny = Tiny::new(7);
        spoil(&mut tiny, &mut noise, name, value);
        let file = file_of(&tiny.to_bytes());
        let file = ModelFile::open(file.path()).expect("the model opens");
        let kinds = Variant::ALL
            .into_iter()
            .filter(|variant| variant.is_available())
            .map(|variant| (OpsKind::Cpu, variant))
            .chain([(OpsKind::Reference, Variant::best())]);
        for (ops, variant) in kinds {
            let options = ModelOptions {
                ops,
                threads: 2,
                kv_blocks: super::BLOCKS * super::SEQUENCES,
            };
            let loaded = Model::load_on(variant, &file, &options, &mut |_| ());
            if name.contains("norm") && !value.is_finite() {
                assert!(
                    matches!(loaded, Err(ModelError::NotFinite { .. })),
                    "{name}"
                );
                continue;
            }
            let mut model = loaded.expect("the model loads");
            let tokens: Vec<u32> = (0..20).collect();
            for (start, count) in [(0, 18), (18, 1), (19, 1)] {
                let table = blocks(0);
                let batch = [SeqInput {
                    tokens: &tokens[start..start + count],
                    start,
                    blocks: &table,
                    logits_last: 1,
                }];
                let pass = Pass {
                    batch: &batch,
                    capture: &[3],
                };
                let mut output = PassOutput::default();
                model.run(&pass, &mut output).expect("the pass is correct");
                assert_eq!(output.logits.len(), model.shape().vocab, "{name} {value}");
            }
        }
    }
}
