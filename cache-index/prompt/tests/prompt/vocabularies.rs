//! Catches a text whose tokens differ from those that llama.cpp keeps as expected for the
//! vocabularies it carries (`load-tests/scripts/setup-llama vocabularies`), and a vocabulary that
//! is taken for one of another kind. Skipped where they were not fetched; where
//! `HOMING_VOCABULARIES` names their folder, as in CI, they must be there.

use std::path::{Path, PathBuf};

use prompt::gguf::Header;
use prompt::{LoadError, Tokenizer};

/// Vocabularies that must load and give the expected tokens.
const EXACT: &[&str] = &[
    "command-r",
    "gpt-2",
    "llama-bpe",
    "llama-spm",
    "mpt",
    "phi-3",
    "qwen2",
    "qwen35",
    "refact",
    "starcoder",
];

/// Vocabularies that are refused, by what the refusal names.
const REFUSED: &[(&str, &str)] = &[
    ("bert-bge", "bert"),
    ("deepseek-coder", "deepseek-coder"),
    ("deepseek-llm", "deepseek-llm"),
    ("falcon", "falcon"),
    ("gemma-4", "gemma4"),
    ("nomic-bert-moe", "t5"),
];

/// Vocabularies that load, and that llama.cpp has no expected tokens for.
const WITHOUT_EXPECTATION: &[&str] = &["aquila", "baichuan", "gpt-neox"];

fn folder() -> Option<PathBuf> {
    let demanded = std::env::var_os("HOMING_VOCABULARIES").map(PathBuf::from);
    let usual = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.tools/llama/vocabularies");
    let found = demanded.clone().unwrap_or(usual);
    if found.is_dir() {
        return Some(found);
    }
    assert!(demanded.is_none(), "{} is no folder", found.display());
    eprintln!("skipped: type `load-tests/scripts/setup-llama vocabularies` for the vocabularies");
    None
}

#[expect(
    clippy::disallowed_methods,
    reason = "a test reads files that the crate is given"
)]
fn read(folder: &Path, file: &str) -> Vec<u8> {
    let path = folder.join(file);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn header(folder: &Path, name: &str) -> Header {
    Header::parse(&read(folder, &format!("ggml-vocab-{name}.gguf"))).unwrap()
}

/// Input and expected tokens.
fn cases(folder: &Path, name: &str) -> Vec<(String, Vec<u32>)> {
    let text = |kind: &str| {
        let bytes = read(folder, &format!("ggml-vocab-{name}.gguf.{kind}"));
        String::from_utf8(bytes).unwrap()
    };
    let (inputs, outputs) = (text("inp"), text("out"));
    let inputs = inputs.split("\n__ggml_vocab_test__\n");
    let outputs = outputs.lines().map(|line| {
        let ids = line.split_whitespace();
        ids.map(|id| id.parse::<u32>().unwrap()).collect()
    });
    let cases: Vec<(String, Vec<u32>)> = inputs.map(str::to_owned).zip(outputs).collect();
    assert!(cases.len() >= 40, "{name}: {}", cases.len());
    cases
}

#[test]
fn each_vocabulary_is_exact_or_refused() {
    let Some(folder) = folder() else { return };
    let mut found = names(&folder);
    for name in EXACT {
        let tokenizer = Tokenizer::from_gguf(&header(&folder, name)).unwrap();
        for (text, expected) in cases(&folder, name) {
            let tokens = tokenizer.encode_text(&text);
            assert_eq!(tokens, expected, "{name} on {text:?}");
        }
    }
    for (name, named) in REFUSED {
        let error = Tokenizer::from_gguf(&header(&folder, name)).unwrap_err();
        let LoadError::Unsupported { value, .. } = &error else {
            panic!("{name}: {error}");
        };
        assert_eq!(value, named, "{error}");
    }
    found.retain(|name| {
        let is_refused = REFUSED.iter().any(|(refused, _)| refused == name);
        !is_refused && !EXACT.contains(&name.as_str())
    });
    assert_eq!(found, WITHOUT_EXPECTATION);
}

/// The names of all vocabularies in the folder, in order.
fn names(folder: &Path) -> Vec<String> {
    let files = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = files
        .filter_map(|file| {
            let name = file.unwrap().file_name().into_string().unwrap();
            let name = name.strip_prefix("ggml-vocab-")?.strip_suffix(".gguf")?;
            Some(name.to_owned())
        })
        .collect();
    names.sort();
    names
}
