//! Each family against Hugging Face transformers, on small random models with peaked attention
//! (`goldens/architectures.py`). Catches a feature that is left out or wrong, and a cut of the work that
//! changes an answer.

use std::collections::BTreeMap;
use std::path::PathBuf;

use base64::Engine as _;
use engine::model::{BlockId, Model, ModelFile, ModelOptions, OpsKind, SeqInput};
use serde::Deserialize;

/// The largest difference of a logit from transformers, in standard deviations of its row.
const DELTA_MAX: f32 = 1e-3;
/// The same of the serving ops: keys and values in f16 are all that is rounded here.
const SERVING_DELTA_MAX: f32 = 0.03;

#[derive(Debug, Deserialize)]
struct Golden {
    tokens: Vec<u32>,
    every: usize,
    logits: String,
    off: BTreeMap<String, f32>,
}

pub(crate) const MODELS: [&str; 7] = [
    "llama",
    "llama-linear",
    "llama-llama3",
    "llama-yarn",
    "mistral",
    "qwen2",
    "qwen3",
];

pub(crate) fn path(name: &str) -> PathBuf {
    PathBuf::from(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/goldens/architectures"
    ))
    .join(name)
}

fn load(name: &str, ops: OpsKind) -> Model {
    let file = ModelFile::open(&path(&format!("{name}.gguf"))).expect("the model opens");
    let options = ModelOptions {
        ops,
        threads: 2,
        kv_blocks: 16,
    };
    Model::load(&file, &options, &mut |_| ()).expect("the model loads")
}

/// The logits of all tokens, computed in calls that end at these places.
pub(crate) fn run(model: &mut Model, tokens: &[u32], ends: &[usize]) -> Vec<f32> {
    let blocks: Vec<BlockId> = [5, 3, 11, 0, 9, 2, 14, 7, 1, 13].map(BlockId).to_vec();
    let (mut all, mut start) = (Vec::new(), 0);
    for end in ends {
        let input = SeqInput {
            tokens: &tokens[start..*end],
            start,
            blocks: &blocks,
            logits_last: end - start,
        };
        let mut logits = Vec::new();
        model.forward(&[input], &mut logits).expect("it fits");
        all.extend(logits);
        start = *end;
    }
    all
}

/// The largest difference, in standard deviations of the expected row.
fn delta(found: &[f32], expected: &[f32]) -> f32 {
    let count = expected.len() as f32;
    let mean = expected.iter().sum::<f32>() / count;
    let variance = expected.iter().map(|e| (e - mean).powi(2)).sum::<f32>() / count;
    let pairs = found.iter().zip(expected);
    let largest = pairs.map(|(f, e)| (f - e).abs()).fold(0.0, f32::max);
    largest / variance.sqrt()
}

/// How far a model is from transformers.
#[derive(Debug)]
pub(crate) struct Weighed {
    golden: Golden,
    reference: f32,
    served: f32,
    /// The serving ops' logits of all tokens.
    whole: Vec<f32>,
}

impl Weighed {
    /// Runs the golden's tokens on what `load` makes.
    pub(crate) fn of(name: &str, load: impl Fn(OpsKind) -> Model) -> Weighed {
        let text = std::fs::read_to_string(path(&format!("{name}.json"))).expect("a golden");
        let golden: Golden = serde_json::from_str(&text).expect("a golden");
        let bytes = base64::engine::general_purpose::STANDARD.decode(&golden.logits);
        let bytes = bytes.expect("base64");
        let (floats, _) = bytes.as_chunks::<4>();
        let expected: Vec<f32> = floats.iter().map(|f| f32::from_le_bytes(*f)).collect();
        let count = golden.tokens.len();
        let vocab = expected.len() / (count / golden.every);
        let all = |ops| run(&mut load(ops), &golden.tokens, &[count]);
        let (slow, whole) = (all(OpsKind::Reference), all(OpsKind::Cpu));
        let (mut reference, mut served) = (0.0_f32, 0.0_f32);
        for (at, expected) in expected.chunks_exact(vocab).enumerate() {
            let row = ((at + 1) * golden.every - 1) * vocab;
            reference = reference.max(delta(&slow[row..row + vocab], expected));
            served = served.max(delta(&whole[row..row + vocab], expected));
        }
        Weighed {
            golden,
            reference,
            served,
            whole,
        }
    }

    pub(crate) fn check(&self, name: &str) {
        let (reference, served) = (self.reference, self.served);
        let off = &self.golden.off;
        println!("{name}: {reference:.2e} of a deviation, serving ops {served:.2e}; off: {off:?}");
        assert!(reference <= DELTA_MAX, "{name}: {reference}");
        assert!(served <= SERVING_DELTA_MAX, "{name}: {served}");
        for (feature, moved) in off {
            assert!(
                *moved >= 100.0 * DELTA_MAX,
                "{name} without {feature}: {moved}"
            );
        }
    }
}

#[test]
fn each_family_answers_as_transformers_does() {
    for name in MODELS {
        let weighed = Weighed::of(name, |ops| load(name, ops));
        weighed.check(name);
        let tokens = &weighed.golden.tokens;
        let ends: Vec<_> = [1, 17, 40, 63, 64, 65, 130]
            .into_iter()
            .chain([tokens.len()])
            .collect();
        let cut = run(&mut load(name, OpsKind::Cpu), tokens, &ends);
        let bits = |logits: &[f32]| logits.iter().map(|l| l.to_bits()).collect::<Vec<_>>();
        assert!(
            bits(&cut) == bits(&weighed.whole),
            "{name}: the cut changes an answer"
        );
    }
}
