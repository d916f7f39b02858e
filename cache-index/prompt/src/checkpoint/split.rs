//! Which of GGUF's tokenizers is this? `tokenizer.json` spells out what happens to text before merging;
//! GGUF has a name for it. Spelled-out rules that have no name here are refused: with others, a model sees
//! tokens that it was not trained on.

use serde_json::Value as Json;

use super::json::shown;
use super::vocabulary::{Parts, TokenizerFile};
use super::{CheckpointError, TOKENIZER};

/// What `tokenizer.ggml.model` and its neighbours say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rules {
    /// Byte-level BPE with this pre-tokenizer.
    ByteLevel(&'static str),
    /// SentencePiece's BPE: `▁` for blanks, bytes for characters that are not in the vocabulary.
    Pieces {
        /// Whether a blank is put before text.
        prefix: bool,
    },
}

/// Split patterns by the name that GGUF files have for them.
const PATTERNS: &[(&str, &str)] = &[
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        LLAMA3,
    ),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        QWEN2,
    ),
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        TEKKEN,
    ),
];

const LLAMA3: &str = "llama-bpe";
const QWEN2: &str = "qwen2";
const TEKKEN: &str = "tekken";
const SMOLLM: &str = "smollm";
const GPT2: &str = "gpt-2";

impl Rules {
    pub(super) fn of(file: &TokenizerFile, parts: &Parts) -> Result<Self, CheckpointError> {
        if file.model.byte_fallback {
            return pieces(parts);
        }
        let pre = byte_level(&parts.pre_tokenizer)?;
        let normal_form = normal_form(&parts.normalizer)?;
        if (pre == QWEN2) != (normal_form == NormalForm::Nfc) {
            let allowed = match pre {
                QWEN2 => "NFC with this pre_tokenizer",
                _ => "null with this pre_tokenizer",
            };
            return Err(wrong("normalizer", &parts.normalizer, allowed));
        }
        if pre != TEKKEN && (pre == LLAMA3) != file.model.ignore_merges {
            let found = Json::Bool(file.model.ignore_merges);
            let allowed = "true with Llama 3's pre_tokenizer and false with others";
            return Err(wrong("model.ignore_merges", &found, allowed));
        }
        Ok(Self::ByteLevel(pre))
    }
}

/// Whether what the tokenizer puts around a text begins with a special token, and which.
pub(super) fn first_special(post_processor: &Json) -> Option<&str> {
    let steps = match kind(post_processor) {
        "Sequence" => post_processor["processors"].as_array()?.as_slice(),
        _ => std::slice::from_ref(post_processor),
    };
    let template = steps
        .iter()
        .find(|step| kind(step) == "TemplateProcessing")?;
    template["single"].get(0)?["SpecialToken"]["id"].as_str()
}

#[derive(PartialEq, Eq)]
enum NormalForm {
    AsIs,
    Nfc,
}

fn normal_form(normalizer: &Json) -> Result<NormalForm, CheckpointError> {
    match steps(normalizer, "normalizers") {
        [] => Ok(NormalForm::AsIs),
        [one] if kind(one) == "NFC" => Ok(NormalForm::Nfc),
        _ => Err(wrong("normalizer", normalizer, "null or NFC")),
    }
}

fn byte_level(pre_tokenizer: &Json) -> Result<&'static str, CheckpointError> {
    let refused = |allowed: &str| Err(wrong("pre_tokenizer", pre_tokenizer, allowed));
    let steps = steps(pre_tokenizer, "pretokenizers");
    let Some((last, before)) = steps.split_last() else {
        return refused("one that ends with ByteLevel");
    };
    // Absent means true, as the reference reads it.
    let is_set = |key: &str| last[key].as_bool() != Some(false);
    if kind(last) != "ByteLevel" || is_set("add_prefix_space") {
        return refused("one that ends with ByteLevel without a prefix space");
    }
    match (before, is_set("use_regex")) {
        ([], true) => Ok(GPT2),
        ([digits], true) if kind(digits) == "Digits" && digits["individual_digits"] == true => {
            Ok(SMOLLM)
        }
        ([split], false) if kind(split) == "Split" => {
            let is_isolated = split["behavior"] == "Isolated" && split["invert"] != true;
            let pattern = split["pattern"]["Regex"].as_str();
            let known = PATTERNS.iter().find(|(known, _)| pattern == Some(known));
            match known {
                Some((_, name)) if is_isolated => Ok(name),
                _ => refused("one of the patterns of llama-bpe (Llama 3), qwen2 or tekken"),
            }
        }
        _ => refused("that of GPT-2, SmolLM, Llama 3, Qwen 2 or Mistral's Tekken"),
    }
}

/// `▁` for blanks: once by a normalizer, in newer files by a pre-tokenizer.
fn pieces(parts: &Parts) -> Result<Rules, CheckpointError> {
    let Parts {
        normalizer,
        pre_tokenizer,
        ..
    } = parts;
    let is_blank = |step: &Json| {
        kind(step) == "Replace" && step["pattern"]["String"] == " " && step["content"] == "▁"
    };
    let is_prefix = |step: &Json| kind(step) == "Prepend" && step["prepend"] == "▁";
    let prefix = match (
        steps(normalizer, "normalizers"),
        steps(pre_tokenizer, "pretokenizers"),
    ) {
        ([first, second], []) if is_prefix(first) && is_blank(second) => Some(true),
        ([one], []) if is_blank(one) => Some(false),
        ([], [one])
            if kind(one) == "Metaspace" && one["replacement"] == "▁" && one["split"] != true =>
        {
            // "first" differs from "always" behind special tokens; GGUF has one flag for both.
            Some(one["prepend_scheme"] != "never")
        }
        _ => None,
    };
    let prefix = prefix.ok_or_else(|| {
        let found = format!("{} with {}", shown(normalizer), shown(pre_tokenizer));
        let allowed = "Prepend and Replace, or Metaspace, with byte_fallback";
        CheckpointError::value(TOKENIZER, "normalizer with pre_tokenizer", found, allowed)
    })?;
    Ok(Rules::Pieces { prefix })
}

/// The steps of a sequence, or the one step that there is.
fn steps<'a>(part: &'a Json, key: &str) -> &'a [Json] {
    match (part, kind(part)) {
        (Json::Null, _) => &[],
        (_, "Sequence") => part[key].as_array().map_or(&[], Vec::as_slice),
        _ => std::slice::from_ref(part),
    }
}

fn kind(part: &Json) -> &str {
    part["type"].as_str().unwrap_or_default()
}

fn wrong(key: &str, found: &Json, allowed: &str) -> CheckpointError {
    CheckpointError::value(TOKENIZER, key, shown(found), allowed)
}
