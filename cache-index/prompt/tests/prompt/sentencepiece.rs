//! Catches SentencePiece tokens that differ from those of the obvious way, under vocabularies that
//! nobody trained (equal scores, tokens that reach over blanks, characters that are no token of
//! their own), and known pieces whose tokens are not those of the whole text.

use std::collections::{BTreeMap, HashMap};

use prompt::gguf::{Header, Value};
use prompt::{PromptBuilder, SegmentCache};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};

/// How odd a vocabulary is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// As trained ones are: blanks stand at the front of tokens, every score is another.
    Usual,
    /// The same, and texts have no blank put before them.
    NoPrefix,
    /// Few scores, shared by many.
    Tied,
    /// Tokens reach over blanks.
    Reaching,
}

/// A vocabulary as the obvious way sees it.
struct Twin {
    /// Of ordinary tokens.
    scores: HashMap<String, (f64, u32)>,
    prefix: &'static str,
}

const CONTROLS: [&str; 4] = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"];
const USER_DEFINED: &str = "<u>";
/// The token of byte 0; before it are the special tokens.
const BYTES: u32 = 6;
/// Single characters; é is a token only together with others.
const CHARS: &str = "▁abcdehlorw<>/s\n12日";

impl Kind {
    pub(crate) const ALL: [Self; 4] = [Self::Usual, Self::NoPrefix, Self::Tied, Self::Reaching];

    /// Tokenizer and template over a vocabulary made up by chance.
    pub(crate) fn builder(self, template: &str) -> PromptBuilder {
        let mut header = self.vocabulary(&mut StdRng::seed_from_u64(7)).0;
        let template = Value::Str(template.into());
        header
            .metadata
            .insert("tokenizer.chat_template".into(), template);
        PromptBuilder::from_gguf(&header).unwrap()
    }

    fn vocabulary(self, rng: &mut StdRng) -> (Header, Twin) {
        let mut tokens: Vec<(String, u64)> = vec![("<unk>".into(), 2)];
        tokens.extend(CONTROLS.map(|text| (text.to_owned(), 3)));
        tokens.push((USER_DEFINED.into(), 4));
        tokens.extend((0..256).map(|byte| (format!("<0x{byte:02X}>"), 6)));
        let mut pieces: Vec<String> = CHARS.chars().map(String::from).collect();
        for _ in 0..rng.random_range(20..160) {
            let mut part = || match rng.random_range(0..20) {
                0 => "é".to_owned(),
                1 => "▁".to_owned(),
                _ => pieces.choose(rng).unwrap().clone(),
            };
            let joined = part() + &part();
            let reaches = joined.trim_start_matches('▁').contains('▁');
            let taken = pieces.contains(&joined) || joined == USER_DEFINED;
            if !taken && (!reaches || self == Self::Reaching) {
                pieces.push(joined);
            }
        }
        let first = tokens.len();
        tokens.extend(pieces.into_iter().map(|piece| (piece, 1)));
        let scores: Vec<f64> = (0..tokens.len())
            .map(|id| match self {
                Self::Tied => -f64::from(rng.random_range(0..3)),
                _ => -((id * 7919 % 10007) as f64),
            })
            .collect();
        let ordinary = tokens.iter().zip(&scores).enumerate().skip(first);
        let twin = Twin {
            scores: ordinary
                .map(|(id, ((text, _), score))| (text.clone(), (*score, id as u32)))
                .collect(),
            prefix: if self == Self::NoPrefix { "" } else { " " },
        };
        (header(tokens, scores, self != Self::NoPrefix), twin)
    }
}

fn header(tokens: Vec<(String, u64)>, scores: Vec<f64>, prefix: bool) -> Header {
    let (texts, kinds): (Vec<Value>, Vec<Value>) = tokens
        .into_iter()
        .map(|(text, kind)| (Value::Str(text), Value::U64(kind)))
        .unzip();
    let scores = scores.into_iter().map(Value::F64).collect();
    let metadata = [
        ("model", Value::Str("llama".into())),
        ("tokens", Value::Array(texts)),
        ("token_type", Value::Array(kinds)),
        ("scores", Value::Array(scores)),
        ("add_space_prefix", Value::Bool(prefix)),
    ];
    Header {
        metadata: BTreeMap::from(metadata.map(|(key, v)| (format!("tokenizer.ggml.{key}"), v))),
        tensors: Vec::new(),
        data_offset: 0,
        alignment: 32,
    }
}

impl Twin {
    /// Joins the neighbours that give the token of the highest score, leftmost, until none do.
    fn encode_piece(&self, text: &str, tokens: &mut Vec<u32>) {
        let text = [self.prefix, text].concat().replace(' ', "▁");
        let mut parts: Vec<String> = text.chars().map(String::from).collect();
        loop {
            let mut best: Option<(f64, usize, String)> = None;
            for (at, pair) in parts.windows(2).enumerate() {
                let joined = pair.concat();
                if let Some((score, _)) = self.scores.get(&joined)
                    && best.as_ref().is_none_or(|(highest, _, _)| score > highest)
                {
                    best = Some((*score, at, joined));
                }
            }
            let Some((_, at, joined)) = best else { break };
            parts.splice(at..at + 2, [joined]);
        }
        for part in parts {
            match self.scores.get(&part) {
                Some((_, id)) => tokens.push(*id),
                None => tokens.extend(part.bytes().map(|byte| BYTES + u32::from(byte))),
            }
        }
    }

    /// Text in which nothing but user-defined tokens is special.
    fn encode(&self, text: &str) -> Vec<u32> {
        let mut tokens = Vec::new();
        for (at, piece) in text.split(USER_DEFINED).enumerate() {
            if at > 0 {
                tokens.push(BYTES - 1);
            }
            if !piece.is_empty() {
                self.encode_piece(piece, &mut tokens);
            }
        }
        tokens
    }
}

const ATOMS: &[&str] = &[
    " ", " ", "  ", "   ", "a", "b", "hello", "world", "e", "l", "<u>", "<s>", "</s>", "<0x0A>",
    "▁", "a▁", "▁ ", "é", "日", "本", "👋", "\n", "\n ", "\t", "\u{3000}", "12", "\u{2082}",
];

fn text(rng: &mut StdRng, atoms_max: usize) -> String {
    let count = rng.random_range(0..atoms_max);
    (0..count).map(|_| *ATOMS.choose(rng).unwrap()).collect()
}

#[test]
fn merging_equals_its_slow_twin() {
    let mut rng = StdRng::seed_from_u64(11);
    for kind in Kind::ALL {
        for _ in 0..60 {
            let (header, twin) = kind.vocabulary(&mut rng);
            let tokenizer = prompt::Tokenizer::from_gguf(&header).unwrap();
            assert_eq!(tokenizer.bos(), Some(1));
            assert_eq!(tokenizer.eos_ids(), [2, 4]);
            for round in 0..60 {
                let text = text(&mut rng, if round % 10 == 0 { 120 } else { 16 });
                let tokens = tokenizer.encode_text(&text);
                assert_eq!(tokens, twin.encode(&text), "{kind:?} on {text:?}");
                if !text.contains(['▁', '<']) && !text.is_empty() {
                    let expected = [twin.prefix, &text].concat();
                    let decoded = String::from_utf8(tokenizer.decode(&tokens)).unwrap();
                    assert_eq!(decoded, expected);
                }
            }
        }
    }
}

#[test]
fn a_known_text_has_the_tokens_of_the_whole() {
    let mut rng = StdRng::seed_from_u64(12);
    for kind in Kind::ALL {
        let builder = kind.builder("{{ messages }}");
        let tokenizer = builder.tokenizer();
        let known = SegmentCache::new(16 << 20);
        for _ in 0..20 {
            let mut whole = String::new();
            for _ in 0..6 {
                whole.push_str(&text(&mut rng, 900));
                if rng.random_bool(0.3) {
                    whole.push_str("<|im_end|>");
                }
                let expected = [vec![1], tokenizer.encode_with_specials(&whole)].concat();
                assert_eq!(builder.completion(&whole, &known), expected, "{kind:?}");
            }
            // One piece at the beginning, and where no blank is put before it.
            let piece = format!(" {}", text(&mut rng, 60).replace(['<', '>'], "a"));
            for whole in [piece.clone(), "b".repeat(2100) + &piece] {
                let expected = [vec![1], tokenizer.encode_with_specials(&whole)].concat();
                assert_eq!(builder.completion(&whole, &known), expected, "{kind:?}");
            }
        }
        let counts = known.counts();
        assert!(
            counts.reused_bytes > counts.encoded_bytes / 2,
            "{kind:?}: {counts:?}"
        );
    }
}

#[test]
fn a_long_text_is_cut_where_nothing_reaches_over() {
    let mut rng = StdRng::seed_from_u64(13);
    for kind in Kind::ALL {
        for _ in 0..40 {
            let builder = PromptBuilder::from_gguf(&kind.vocabulary(&mut rng).0).unwrap();
            for _ in 0..30 {
                // Pieces end at the first such place behind 2,048 bytes.
                let whole = "b".repeat(2_050) + &text(&mut rng, 12);
                let expected = [vec![1], builder.tokenizer().encode_with_specials(&whole)].concat();
                let tokens = builder.completion(&whole, &SegmentCache::new(1 << 20));
                assert_eq!(tokens, expected, "{kind:?} on {whole:?}");
            }
        }
    }
}

#[test]
fn time_grows_with_length() {
    // A quadratic merge would take minutes.
    for kind in Kind::ALL {
        let builder = kind.builder("{{ messages }}");
        for unit in ["a", "ab", " ", "hello world ", "日本", "é▁"] {
            let text = unit.repeat(1_000_000 / unit.len());
            assert!(!builder.tokenizer().encode_text(&text).is_empty());
        }
    }
}

#[test]
fn unusable_vocabularies_are_refused_by_their_key() {
    let sound = Kind::Usual.vocabulary(&mut StdRng::seed_from_u64(1)).0;
    let check = |key: &str, change: &dyn Fn(&mut Vec<Value>), expected: &str| {
        let mut header = sound.clone();
        let key = format!("tokenizer.ggml.{key}");
        if let Some(Value::Array(values)) = header.metadata.get_mut(&key) {
            change(values);
        }
        let error = prompt::Tokenizer::from_gguf(&header).unwrap_err();
        let error = error.to_string();
        assert!(error.contains(&key) && error.contains(expected), "{error}");
    };
    check("scores", &|scores| scores.truncate(9), "9 scores for");
    check(
        "scores",
        &|scores| scores[3] = Value::F64(f64::NAN),
        "entry 3",
    );
    check(
        "scores",
        &|scores| scores[3] = Value::Bool(true),
        "not a number",
    );
    check(
        "tokens",
        &|tokens| tokens[6] = Value::Str("<0xXY>".into()),
        "not <0x00>",
    );
    check(
        "tokens",
        &|tokens| tokens[6] = Value::Str("<0x01>".into()),
        "no token <0x00>",
    );
    let mut header = sound.clone();
    header.metadata.remove("tokenizer.ggml.scores");
    let error = prompt::Tokenizer::from_gguf(&header).unwrap_err();
    assert!(error.to_string().contains("scores`: is missing"), "{error}");
}
