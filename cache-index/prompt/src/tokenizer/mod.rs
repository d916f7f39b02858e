//! Which tokens is this text? Exact byte-level BPE from a GGUF file's own metadata.
//!
//! Text goes through: user-defined tokens found (few models have any), normalised where the
//! reference does (NFC, Qwen 2), split into words, each word merged. Control tokens are found only
//! in text that may contain them (`encode_with_specials`); everywhere else `<|im_end|>` is text.
//!
//! Segments between special tokens are independent of each other, and so are the pieces between
//! safe cuts of one segment; `segments` builds on that.
//!
//! Left out on purpose: SentencePiece and WordPiece vocabularies, and pre-tokenizers that have not
//! been compared with their reference; both are refused by name.

mod alphabet;
mod bpe;
mod classes;
mod specials;
mod split;
mod vocab;

use std::hash::{BuildHasher, Hash, Hasher};

use foldhash::quality::FixedState;

use crate::error::LoadError;
use crate::gguf::Header;

use bpe::{Bpe, BpeParts, Scratch, WholeWords};
use classes::Classes;
use specials::Specials;
use split::Split;
use vocab::{Kind, Vocab};

pub(crate) use specials::{Finder, Piece, Pieces};
pub(crate) use split::safe_cut;

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";

/// Tokens that end a generation, by their text, besides those that the metadata names: the ends
/// of a turn or a text in published chat models, as llama.cpp keeps them.
const ENDS: &[&str] = &[
    "<|im_end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<|return|>",
];

/// A byte-level BPE tokenizer.
pub struct Tokenizer {
    classes: Classes,
    rules: Rules,
    bpe: Bpe,
    specials: Specials,
    /// All tokens' bytes, end to end.
    bytes: Vec<u8>,
    /// Where each token's bytes begin; one more than there are tokens.
    begins: Vec<u32>,
    control: Vec<bool>,
    bos: Option<u32>,
    adds_bos: bool,
    eos: Vec<u32>,
    fingerprint: u64,
}

/// What the reference does before merging, by `tokenizer.ggml.pre`.
#[derive(Debug, Clone, Copy)]
struct Rules {
    split: Split,
    normal_form: NormalForm,
    whole_words: WholeWords,
    /// Whether a plain prompt begins with BOS where the file does not say.
    adds_bos: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NormalForm {
    AsIs,
    Nfc,
}

impl Tokenizer {
    /// Builds the tokenizer from a model file's metadata.
    pub fn from_gguf(header: &Header) -> Result<Self, LoadError> {
        let rules = Rules::from_gguf(header)?;
        let vocab = Vocab::from_gguf(header)?;
        let entries: Vec<(Vec<u8>, u32)> = vocab
            .entries
            .iter()
            .enumerate()
            .filter(|(_, entry)| entry.kind == Kind::Normal && entry.is_byte_level)
            .map(|(id, entry)| (entry.bytes.clone(), id as u32))
            .collect();
        let bpe = Bpe::new(&BpeParts {
            byte_tokens: vocab.byte_tokens(),
            merges: &vocab.merges,
            entries: &entries,
            whole_words: rules.whole_words,
        });

        let mut bytes = Vec::new();
        let mut begins = vec![0];
        for entry in &vocab.entries {
            bytes.extend_from_slice(&entry.bytes);
            // The header bounds the file's strings to its size; 4 GiB of vocabulary is refused.
            let end = u32::try_from(bytes.len())
                .map_err(|_| vocab::bad("tokenizer.ggml.tokens", "is over 4 GiB".to_owned()))?;
            begins.push(end);
        }
        let add_bos = header
            .get("tokenizer.ggml.add_bos_token")
            .and_then(|v| v.as_bool());
        Ok(Self {
            classes: Classes::new(),
            rules,
            bpe,
            specials: Specials::new(&vocab)?,
            bytes,
            begins,
            control: vocab
                .entries
                .iter()
                .map(|entry| entry.kind == Kind::Control)
                .collect(),
            bos: vocab.id(header, "tokenizer.ggml.bos_token_id")?,
            adds_bos: add_bos.unwrap_or(rules.adds_bos),
            eos: eos_ids(header, &vocab)?,
            fingerprint: fingerprint(&vocab, rules),
        })
    }

    /// The tokens of text in which special-token text stays text.
    pub fn encode_text(&self, text: &str) -> Vec<u32> {
        let mut tokens = Vec::with_capacity(text.len() / 3);
        for piece in self.pieces_of_text(text) {
            self.push_piece(piece, &mut tokens);
        }
        tokens
    }

    /// The tokens of text in which control tokens are recognised.
    pub fn encode_with_specials(&self, text: &str) -> Vec<u32> {
        let mut tokens = Vec::with_capacity(text.len() / 3);
        for piece in self.pieces_with_specials(text) {
            self.push_piece(piece, &mut tokens);
        }
        tokens
    }

    /// A token's bytes; empty for control tokens and for ids outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        match self.begins.get(id as usize..) {
            Some([begin, end, ..]) => &self.bytes[*begin as usize..*end as usize],
            _ => &[],
        }
    }

    /// The bytes of several tokens, one behind the other; control tokens add nothing.
    pub fn decode(&self, ids: &[u32]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        for id in ids {
            bytes.extend_from_slice(self.token_bytes(*id));
        }
        bytes
    }

    /// A token's text, that of a control token included. Empty for ids outside the vocabulary and
    /// for tokens that are only a part of a character: their bytes are in `token_bytes`.
    pub fn token_text(&self, id: u32) -> &str {
        let control = &self.specials.control_tokens;
        match control.binary_search_by_key(&id, |(id, _)| *id) {
            Ok(at) => &control[at].1,
            Err(_) => std::str::from_utf8(self.token_bytes(id)).unwrap_or_default(),
        }
    }

    /// The one token that is this text: a control or user-defined token of that spelling, else an
    /// ordinary one that the tokenizer makes of it.
    pub fn id_of(&self, text: &str) -> Option<u32> {
        let mut special = self.pieces_with_specials(text);
        match (special.next(), special.next()) {
            (Some(Piece::Token(id)), None) => Some(id),
            (Some(Piece::Text(text)), None) => self.bpe.word(text.as_bytes()),
            _ => None,
        }
    }

    /// Is this a control token (never shown as text)?
    pub fn is_control(&self, id: u32) -> bool {
        self.control.get(id as usize).copied().unwrap_or(false)
    }

    /// The tokens that end a generation: end of text and end of turn.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos
    }

    /// The token that begins a sequence, if the model has one.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Number of tokens in the vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.control.len()
    }

    /// What a plain prompt begins with.
    pub(crate) fn prompt_prefix(&self) -> Option<u32> {
        self.bos.filter(|_| self.adds_bos)
    }

    /// The control tokens with their text.
    pub(crate) fn control_tokens(&self) -> &[(u32, String)] {
        &self.specials.control_tokens
    }

    /// Tells this tokenizer from others, whose tokens for a text may differ.
    pub(crate) fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// Text taken apart at control tokens only.
    pub(crate) fn control_pieces<'a>(&'a self, text: &'a str) -> Pieces<'a> {
        Finder::pieces(self.specials.control.as_ref(), text)
    }

    /// Text taken apart at user-defined tokens only.
    pub(crate) fn pieces_of_text<'a>(&'a self, text: &'a str) -> Pieces<'a> {
        Finder::pieces(self.specials.user_defined.as_ref(), text)
    }

    /// Text taken apart at control and user-defined tokens.
    pub(crate) fn pieces_with_specials<'a>(&'a self, text: &'a str) -> Pieces<'a> {
        Finder::pieces(self.specials.all.as_ref(), text)
    }

    /// Appends the tokens of text without special tokens.
    pub(crate) fn push_plain(&self, text: &str, tokens: &mut Vec<u32>) {
        let normal;
        let text = match self.rules.normal_form {
            NormalForm::Nfc if !unicode_normalization::is_nfc(text) => {
                normal = unicode_normalization::UnicodeNormalization::nfc(text).collect::<String>();
                normal.as_str()
            }
            _ => text,
        };
        let mut scratch = Scratch::default();
        let mut begin = 0;
        while begin < text.len() {
            let end = self.rules.split.word_end(&self.classes, text, begin);
            self.bpe
                .encode_word(&text.as_bytes()[begin..end], &mut scratch, tokens);
            begin = end;
        }
    }

    fn push_piece(&self, piece: Piece<'_>, tokens: &mut Vec<u32>) {
        match piece {
            Piece::Token(token) => tokens.push(token),
            Piece::Text(text) => self.push_plain(text, tokens),
        }
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The tables are megabytes long.
        f.debug_struct("Tokenizer")
            .field("rules", &self.rules)
            .field("vocab_size", &self.vocab_size())
            .finish_non_exhaustive()
    }
}

impl Rules {
    fn from_gguf(header: &Header) -> Result<Self, LoadError> {
        let text = |key| header.get(key).and_then(|value| value.as_str());
        let model = text(MODEL).unwrap_or("missing");
        if model != "gpt2" {
            return Err(LoadError::Unsupported {
                key: MODEL,
                value: model.to_owned(),
                supported: "gpt2 (byte-level BPE)",
            });
        }
        let plain = Self {
            split: Split::Gpt2,
            normal_form: NormalForm::AsIs,
            whole_words: WholeWords::WhenMerged,
            adds_bos: false,
        };
        match text(PRE).unwrap_or("default") {
            "default" | "gpt-2" => Ok(plain),
            "smollm" => Ok(Self {
                split: Split::SmolLm,
                ..plain
            }),
            "llama-bpe" | "llama-v3" | "llama3" => Ok(Self {
                split: Split::Cl100k { numbers_max: 3 },
                whole_words: WholeWords::Always,
                adds_bos: true,
                ..plain
            }),
            "qwen2" => Ok(Self {
                split: Split::Cl100k { numbers_max: 1 },
                normal_form: NormalForm::Nfc,
                ..plain
            }),
            other => Err(LoadError::Unsupported {
                key: PRE,
                value: other.to_owned(),
                supported: "smollm, gpt-2, default, llama-bpe, qwen2",
            }),
        }
    }
}

fn eos_ids(header: &Header, vocab: &Vocab) -> Result<Vec<u32>, LoadError> {
    let mut ids = Vec::new();
    for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
        ids.extend(vocab.id(header, &format!("tokenizer.ggml.{key}"))?);
    }
    ids.extend(vocab.ids(header, "tokenizer.ggml.eos_token_ids")?);
    for (id, entry) in vocab.entries.iter().enumerate() {
        if entry.kind == Kind::Control && ENDS.contains(&entry.text.as_str()) {
            ids.push(id as u32);
        }
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

/// A hash over all that decides a text's tokens.
fn fingerprint(vocab: &Vocab, rules: Rules) -> u64 {
    let mut hasher = FixedState::with_seed(0).build_hasher();
    format!("{rules:?}").hash(&mut hasher);
    for entry in &vocab.entries {
        (entry.kind as u8, &entry.text).hash(&mut hasher);
    }
    vocab.merges.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests;
