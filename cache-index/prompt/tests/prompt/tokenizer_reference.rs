//! Catches: any text whose tokens differ from the reference tokenizer's, built here from the same
//! GGUF metadata with the pre-tokenizers that the published `tokenizer.json` files name.

use std::str::FromStr;

use prompt::Tokenizer;
use prompt::gguf::{Header, Value};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use serde_json::json;
use tokenizers::Normalizer;

const LLAMA_BPE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Ours and the reference, for one value of `tokenizer.ggml.pre`.
struct Pair {
    pre: &'static str,
    ours: Tokenizer,
    reference: tokenizers::Tokenizer,
}

impl Pair {
    /// The default model's vocabulary under another pre-tokenizer: real merges, other words.
    fn new(pre: &'static str) -> Self {
        let mut header = crate::common::header().clone();
        header
            .metadata
            .insert("tokenizer.ggml.pre".into(), Value::Str(pre.into()));
        let ours = Tokenizer::from_gguf(&header).unwrap();
        Self {
            pre,
            ours,
            reference: reference(pre, &header),
        }
    }

    fn check(&self, text: &str) {
        if self.pre == "qwen2" && self.normalises_differently(text) {
            return;
        }
        let expected = self.reference.encode_fast(text, false).unwrap();
        let found = self.ours.encode_text(text);
        assert_eq!(found, expected.get_ids(), "{} on {text:?}", self.pre);
    }
}

impl Pair {
    /// The reference's normal forms are Unicode 13's; marks assigned since then are not sorted.
    fn normalises_differently(&self, text: &str) -> bool {
        let mut normal = tokenizers::NormalizedString::from(text);
        self.reference
            .get_normalizer()
            .unwrap()
            .normalize(&mut normal)
            .unwrap();
        let ours: String = unicode_normalization::UnicodeNormalization::nfc(text).collect();
        ours != normal.get()
    }
}

fn strings(header: &Header, key: &str) -> Vec<String> {
    let values = header.get(key).unwrap().as_array().unwrap();
    values
        .iter()
        .map(|value| value.as_str().unwrap().to_owned())
        .collect()
}

fn reference(pre: &str, header: &Header) -> tokenizers::Tokenizer {
    let byte_level = |use_regex: bool| {
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
               "use_regex": use_regex})
    };
    let split = |pattern: &str| {
        json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
               "invert": false})
    };
    let steps = match pre {
        "smollm" => vec![
            json!({"type": "Digits", "individual_digits": true}),
            byte_level(true),
        ],
        "gpt-2" => vec![byte_level(true)],
        "llama-bpe" => vec![split(LLAMA_BPE), byte_level(false)],
        "smaug-bpe" => vec![split(LLAMA_BPE), byte_level(false)],
        "qwen2" => vec![split(QWEN2), byte_level(false)],
        "qwen35" => vec![split(QWEN35), byte_level(false)],
        "tekken" => vec![split(TEKKEN), byte_level(false)],
        other => panic!("no reference for {other}"),
    };
    let vocab: serde_json::Map<_, _> = strings(header, "tokenizer.ggml.tokens")
        .into_iter()
        .enumerate()
        .map(|(id, token)| (token, id.into()))
        .collect();
    let file = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": if pre == "qwen2" { json!({"type": "NFC"}) } else { json!(null) },
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": null,
        "decoder": byte_level(true),
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": matches!(pre, "llama-bpe" | "tekken"), "vocab": vocab,
            "merges": strings(header, "tokenizer.ggml.merges"),
        },
    });
    tokenizers::Tokenizer::from_str(&file.to_string()).unwrap()
}

fn pairs() -> Vec<Pair> {
    let ours = [
        "smollm",
        "gpt-2",
        "llama-bpe",
        "smaug-bpe",
        "qwen2",
        "qwen35",
        "tekken",
    ];
    ours.into_iter().map(Pair::new).collect()
}

/// Pieces that split patterns treat differently, to be strung together at random.
const ATOMS: &[&str] = &[
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\r\n",
    "\r",
    "\t",
    "\u{b}",
    "\u{c}",
    "\u{85}",
    "\u{a0}",
    "\u{2003}",
    "\u{3000}",
    "\u{2028}",
    "\u{200b}",
    "\u{feff}",
    "a",
    "the",
    "Hello",
    "WORLD",
    "aB",
    "XMLHttp",
    "Ǆ",
    "\u{301}A",
    "ʰB",
    "ُ",
    "\n/",
    "/\n",
    "straße",
    "naïve",
    "e\u{301}",
    "\u{301}",
    "\u{1100}\u{1161}",
    "한국어",
    "日本語",
    "中文字符",
    "हिन्दी",
    "العربية",
    "עברית",
    "ไทย",
    "0",
    "7",
    "42",
    "1234567",
    "3.14",
    "²",
    "½",
    "Ⅷ",
    "٣",
    "५",
    "〇",
    "'s",
    "'S",
    "'t",
    "'re",
    "'RE",
    "'ve",
    "'m",
    "'ll",
    "'lL",
    "'d",
    "'\u{17f}",
    "'",
    "''",
    "'x",
    "\"",
    "\\",
    ".",
    "...",
    ",",
    "!",
    "?!",
    "(",
    ")",
    "{",
    "}",
    "[]",
    "=>",
    "==",
    "/*",
    "//",
    "#",
    "_",
    "snake_case",
    "camelCase",
    "<|im_end|>",
    "<|endoftext|>",
    "<repo_name>",
    "<",
    ">",
    "👋",
    "👩‍👩‍👧‍👦",
    "🇩🇪",
    "❤️",
    "🏽",
    "∀x∈ℝ",
    "→",
    "€",
    "\u{0}",
    "\u{1}",
    "\u{1b}[31m",
    "\u{7f}",
    "\u{fffd}",
    "\u{e000}",
    "\u{f0000}",
    "\u{f0fff}",
    "\u{10ffff}",
    "ſ",
    "ǅ",
    "ª",
    "ʰ",
    "ー",
    "々",
    "\u{345}",
    "Ⓐ",
];

#[test]
fn equals_the_reference_on_a_nasty_corpus() {
    let corpus = [
        "",
        " ",
        "Hello, world!",
        "In 2024, 1234567 people paid $3.14159 or 10% on 12/31/99 at 23:59:59.",
        "I'm sure they'll say it's what we'd've done; DON'T, CAN'T, I'M, 'tis o'clock''s",
        "trailing spaces   ",
        "   leading",
        "a  b   c    d\t\te \t f\n\n\n  g\r\n\r\n h\r i",
        "tabs\t1\t22\t 333  4444",
        "x = [1, 2,  3]\n\tif x[0]==1 :\n        return {'a':None}\n",
        "日本語のテキストと中文混排，以及 한국어 텍스트입니다。１２３ 〇一二",
        "👩‍👩‍👧‍👦 family 👋🏽 wave 🇩🇪🇫🇷 flags ❤️‍🔥 z\u{0335}a\u{0310}l\u{0301}g\u{0300}o",
        "\u{0}\u{1}\u{2}\u{7f}\u{80}\u{9f}\u{ad}\u{fffe}\u{10ffff}",
        "<|im_start|>system\nYou are root<|im_end|>\n<|endoftext|><repo_name>",
        include_str!("../../src/tokenizer/split.rs"),
        include_str!("tokenizer_reference.rs"),
        include_str!("../../src/gguf/tests.rs"),
    ];
    for pair in pairs() {
        corpus.iter().for_each(|text| pair.check(text));
        ATOMS.iter().for_each(|text| pair.check(text));
        for run in ["a", "ab", " ", "\n", "0", "=", "日", "é", "👋", "A b", "'s"] {
            for count in [15, 16, 17, 31, 32, 33, 64, 1000] {
                pair.check(&run.repeat(count));
            }
        }
    }
}

#[test]
fn equals_the_reference_on_random_text() {
    let mut rng = StdRng::seed_from_u64(20_261_129);
    for pair in pairs() {
        for _ in 0..4_000 {
            let atoms = rng.random_range(1..24);
            let text: String = (0..atoms)
                .map(|_| *ATOMS.choose(&mut rng).unwrap())
                .collect();
            pair.check(&text);
        }
        for _ in 0..1_000 {
            let chars = rng.random_range(1..40);
            // Any scalar value, half of them from the first planes where scripts mix.
            let limit = if rng.random_bool(0.5) {
                0x3000
            } else {
                0x11_0000
            };
            let text: String = (0..chars)
                .filter_map(|_| char::from_u32(rng.random_range(0..limit)))
                .collect();
            pair.check(&text);
        }
    }
}

#[test]
fn equals_the_reference_on_every_character() {
    // The classes of all characters, each in a context that shows its class: all with the default
    // model's pre-tokenizer, every eighth with the others, which share the table of classes; one
    // in 97 of the planes in which nothing is assigned.
    for pair in pairs() {
        let step = if pair.pre == "smollm" { 1 } else { 8 };
        let assigned = (0..0x3_2000).chain(0xe_0000..0xe_1000).step_by(step);
        let unassigned = (0x3_2000..0x11_0000).step_by(97 * step);
        let mut text = String::new();
        for c in assigned.chain(unassigned).filter_map(char::from_u32) {
            // Numbers that Unicode 17 has added: tables of different age disagree on them.
            if matches!(c, '\u{11de0}'..='\u{11de9}' | '\u{16ff4}'..='\u{16ff6}') {
                continue;
            }
            text.extend(['a', c, c, ' ', c, '!', c, 'A', c, 'B', '1', ' ', ' ', c]);
            // The reference's time grows with the square of a text's words.
            if text.len() > 1_500 {
                pair.check(&text);
                text.clear();
            }
        }
        pair.check(&text);
    }
}

#[test]
fn decoding_gives_the_text_back() {
    // Bytes that the vocabulary lacks are dropped by the reference too; this corpus has none.
    let pair = Pair::new("smollm");
    for text in [include_str!("../../src/lib.rs"), "日本語 👩‍👩‍👧‍👦 é\n\t 12 ", ""]
    {
        let tokens = pair.ours.encode_text(text);
        let bytes: Vec<u8> = tokens
            .iter()
            .flat_map(|token| pair.ours.token_bytes(*token))
            .copied()
            .collect();
        assert_eq!(String::from_utf8(bytes).unwrap(), text);
    }
}
