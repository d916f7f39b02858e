//! Does any damage to a model upset what reads it? Real files of every family, and the same models as
//! folders, with bytes flipped, overwritten, cut, moved and doubled: whatever comes of it is a model or an
//! error, and neither a panic nor memory beyond what the file could need.
//!
//! The damage is drawn from a fixed seed, so that a failure comes back; `cache-index/prompt/tests/fuzz.rs`
//! fuzzes the readers with other bytes each time, and for as long as one likes.

#![expect(clippy::panic, reason = "a helper of a test fails the test")]

#[path = "folder/mod.rs"]
mod folder;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use engine::model::{BlockId, Model, ModelFile, ModelOptions, OpsKind, SeqInput};
use folder::{Stored, write};
use prompt::PromptBuilder;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};

const MODELS: [&str; 7] = [
    "llama",
    "llama-linear",
    "llama-llama3",
    "llama-yarn",
    "mistral",
    "qwen2",
    "qwen3",
];
/// Damages of each file of each model.
const ROUNDS: usize = 300;
/// Address space that reading all of them may add. A damaged count that is believed asks for gigabytes.
const GROWTH_BYTES_MAX: u64 = 1 << 30;

fn goldens() -> PathBuf {
    PathBuf::from(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/goldens/architectures"
    ))
}

/// The largest address space that this process has had, by the operating system's count.
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmPeak:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.expect("a peak") * 1024
}

/// Opens, loads and runs what may be a model.
fn read(path: &Path) -> bool {
    let Ok(file) = ModelFile::open(path) else {
        return false;
    };
    file.fingerprint();
    // These files have no tokenizer worth a prompt, but their metadata is read as one.
    let _ = PromptBuilder::from_gguf(file.header());
    let options = ModelOptions {
        ops: OpsKind::Reference,
        threads: 1,
        kv_blocks: 1,
    };
    let Ok(mut model) = Model::load(&file, &options, &mut |_| ()) else {
        return false;
    };
    let input = SeqInput {
        tokens: &[0, 0],
        start: 0,
        blocks: &[BlockId(0)],
        logits_last: 1,
    };
    let mut logits = Vec::new();
    model.forward(&[input], &mut logits).is_ok()
}

/// Does something to a file's bytes, mostly where its structure is.
fn damage(bytes: &mut Vec<u8>, structure: usize, random: &mut StdRng) {
    for _ in 0..random.random_range(1..4) {
        if bytes.is_empty() {
            return;
        }
        let reach = match random.random_range(0..8) {
            0 => bytes.len(),
            _ => structure.min(bytes.len()),
        };
        let at = random.random_range(0..reach);
        match random.random_range(0..9) {
            0..=2 => bytes[at] ^= 1 << random.random_range(0..8),
            3 => bytes[at] = random.random(),
            4 => {
                let wild = *[0u8, 0x7f, 0x80, 0xff].choose(random).expect("four");
                bytes[at..].iter_mut().take(8).for_each(|byte| *byte = wild);
            }
            5 => {
                let count: u64 = *[0, 1, 1 << 24, 1 << 31, 1 << 40, u64::MAX]
                    .choose(random)
                    .expect("six");
                let to = bytes[at..].iter_mut().zip(count.to_le_bytes());
                to.for_each(|(byte, new)| *byte = new);
            }
            // A digit or a bracket: what a text is made of.
            6 => bytes[at] = *b"0123456789-.eE\"{}[],:nt".choose(random).expect("some"),
            7 => {
                let piece: Vec<u8> = bytes[at..].iter().take(16).copied().collect();
                let to = random.random_range(0..reach);
                bytes.splice(to..to, piece);
            }
            _ => bytes.truncate(at),
        }
    }
}

/// Damages one file many times, and reads the model each time.
fn check(model: &Path, file: &Path, structure: usize, seed: u64) -> (usize, usize) {
    let whole = std::fs::read(file).expect("readable");
    assert!(read(model), "{} is sound", model.display());
    let (mut sound, mut random) = (0, StdRng::seed_from_u64(seed));
    for round in 0..ROUNDS {
        let mut bytes = whole.clone();
        damage(&mut bytes, structure, &mut random);
        std::fs::write(file, &bytes).expect("writable");
        match catch_unwind(AssertUnwindSafe(|| read(model))) {
            Ok(is_sound) => sound += usize::from(is_sound),
            Err(_) => panic!("{}, seed {seed}, round {round}", file.display()),
        }
    }
    std::fs::write(file, whole).expect("writable");
    (ROUNDS, sound)
}

#[test]
fn damaged_models_are_refused_or_sound() {
    let before = peak_bytes();
    let (mut all, mut sound) = (0, 0);
    for (seed, name) in (0..).zip(MODELS) {
        let here = tempfile::tempdir().expect("a folder");
        let (gguf, checkpoint) = (here.path().join("m.gguf"), here.path().join("m"));
        std::fs::copy(goldens().join(format!("{name}.gguf")), &gguf).expect("copied");
        let config = std::fs::read(goldens().join(format!("{name}.config.json")));
        let config = serde_json::from_slice(&config.expect("readable")).expect("JSON");
        std::fs::create_dir(&checkpoint).expect("a folder");
        write(&gguf, &config, Stored::AsTheyAre, 2, &checkpoint);
        let mut count = |model: &Path, file: &Path, structure| {
            let (rounds, still) = check(model, file, structure, seed);
            all += rounds;
            sound += still;
        };
        count(&gguf, &gguf, 3000);
        for file in [
            "config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "model.safetensors.index.json",
            "model-00001-of-00002.safetensors",
        ] {
            count(&checkpoint, &checkpoint.join(file), 2000);
        }
    }
    let growth = peak_bytes() - before;
    println!("{all} damaged models, {sound} of them still sound; {growth} bytes more at the peak");
    assert!(growth <= GROWTH_BYTES_MAX, "{growth} bytes");
}
