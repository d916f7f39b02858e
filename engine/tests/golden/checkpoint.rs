//! The models of `architectures` as folders that transformers would write: the same logits, to the last
//! bit. Catches rows of queries and keys in the wrong order, a key of config.json that is read as another,
//! a tensor taken from the wrong place, and shards that are put together wrongly.
//!
//! With HOMING_CHECKPOINTS the folders are those that `goldens/architectures.py` lets transformers write.

use std::path::{Path, PathBuf};

use engine::model::{Model, ModelFile, ModelOptions, OpsKind};

use crate::architectures::{MODELS, Weighed, path, run};
use crate::folder::{Stored, write};

fn model(file: &Path, ops: OpsKind) -> Model {
    let file = ModelFile::open(file).expect("the folder opens");
    let options = ModelOptions {
        ops,
        threads: 2,
        kv_blocks: 16,
    };
    Model::load(&file, &options, &mut |_| ()).expect("the model loads")
}

fn bits(file: &Path, ops: OpsKind) -> Vec<u32> {
    let tokens: Vec<u32> = (0..150).map(|at| at * 7 % 96).collect();
    let logits = run(&mut model(file, ops), &tokens, &[tokens.len()]);
    logits.iter().map(|logit| logit.to_bits()).collect()
}

fn config(name: &str) -> serde_json::Value {
    let text = std::fs::read_to_string(path(&format!("{name}.config.json")));
    serde_json::from_str(&text.expect("a configuration")).expect("JSON")
}

#[test]
fn a_folder_answers_as_the_gguf_file_of_the_same_weights() {
    for name in MODELS {
        let gguf = path(&format!("{name}.gguf"));
        for (stored, files) in [(Stored::AsTheyAre, 1), (Stored::F32, 3)] {
            let folder = tempfile::tempdir().expect("a folder");
            write(&gguf, &config(name), stored, files, folder.path());
            for ops in [OpsKind::Reference, OpsKind::Cpu] {
                let same = bits(folder.path(), ops) == bits(&gguf, ops);
                // F32 matrices have kernels of their own.
                assert!(
                    same || stored == Stored::F32 && ops == OpsKind::Cpu,
                    "{name} {ops:?}"
                );
            }
        }
        let other = tempfile::tempdir().expect("a folder");
        write(&gguf, &config(name), Stored::BF16, 2, other.path());
        assert!(bits(other.path(), OpsKind::Reference) != bits(&gguf, OpsKind::Reference));
    }
}

#[test]
fn older_spellings_of_scaling_answer_alike() {
    for name in ["llama-linear", "llama-llama3", "llama-yarn"] {
        let gguf = path(&format!("{name}.gguf"));
        for kind in ["type", "rope_type"] {
            let mut config = config(name);
            let config_map = config.as_object_mut().expect("an object");
            let mut scaling = config_map.remove("rope_parameters").expect("scaling");
            let scaling_map = scaling.as_object_mut().expect("an object");
            let base = scaling_map.remove("rope_theta").expect("a base");
            let rope_type = scaling_map.remove("rope_type").expect("a kind");
            scaling_map.insert(kind.to_owned(), rope_type);
            config_map.insert("rope_theta".to_owned(), base);
            config_map.insert("rope_scaling".to_owned(), scaling);
            let folder = tempfile::tempdir().expect("a folder");
            write(&gguf, &config, Stored::AsTheyAre, 1, folder.path());
            let ops = OpsKind::Reference;
            assert!(
                bits(folder.path(), ops) == bits(&gguf, ops),
                "{name} {kind}"
            );
        }
    }
}

#[test]
fn what_transformers_writes_answers_as_transformers_does() {
    let Some(folders) = std::env::var_os("HOMING_CHECKPOINTS").map(PathBuf::from) else {
        return;
    };
    for name in MODELS {
        let weighed = Weighed::of(name, |ops| model(&folders.join(name), ops));
        println!("{name}: {weighed:?}");
        weighed.check(name);
    }
}
