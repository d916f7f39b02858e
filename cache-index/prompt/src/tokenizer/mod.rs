//! Which tokens is this text? Exact byte-level and SentencePiece BPE from a GGUF file's own
//! metadata.
//!
//! Text goes through: user-defined tokens found (few models have any), normalised where the
//! reference does (NFC, Qwen), split into words (`words`), each word merged (`bpe`). Control tokens
//! are found only in text that may contain them (`encode_with_specials`); everywhere else
//! `<|im_end|>` is text.
//!
//! Segments between special tokens are independent of each other, and so are the pieces between
//! safe cuts of one segment but for the blank that SentencePiece puts before the first (`Place`);
//! `segments` builds on that.
//!
//! Left out on purpose: WordPiece and unigram vocabularies, and pre-tokenizers that have not been
//! compared with their reference; both are refused by name (`rules`).

mod alphabet;
mod bpe;
mod classes;
mod queue;
mod rules;
mod sentencepiece;
mod specials;
mod split;
mod vocab;
mod words;

use std::hash::{BuildHasher, Hash, Hasher};

use foldhash::quality::FixedState;

use crate::error::LoadError;
use crate::gguf::Header;

use bpe::{Bpe, BpeParts, NONE, Rule, Starts, WholeWords};
use rules::{Rules, Scheme};
use sentencepiece::Cuts;
use specials::Specials;
use split::Splitter;
use vocab::{Kind, Spelling, Vocab};
use words::Words;

pub(crate) use specials::{Finder, Piece, Pieces};
pub(crate) use words::Place;

/// A BPE tokenizer.
pub struct Tokenizer {
    rules: Rules,
    words: Words,
    bpe: Bpe,
    specials: Specials,
    /// All tokens' bytes, end to end.
    bytes: Vec<u8>,
    /// Where each token's bytes begin; one more than there are tokens.
    begins: Vec<u32>,
    kinds: Vec<Kind>,
    bos: Option<u32>,
    adds_bos: bool,
    eos: Vec<u32>,
    fingerprint: u64,
}

impl Tokenizer {
    /// Builds the tokenizer from a model file's metadata.
    pub fn from_gguf(header: &Header) -> Result<Self, LoadError> {
        let rules = Rules::from_gguf(header)?;
        let Parts {
            vocab,
            words,
            starts,
            merges,
            whole_words,
        } = Parts::from_gguf(header, rules.scheme)?;
        let entries: Vec<(Vec<u8>, u32)> = vocab
            .entries
            .iter()
            .enumerate()
            .filter(|(_, entry)| entry.is_mergeable)
            .map(|(id, entry)| (entry.bytes.clone(), id as u32))
            .collect();
        let bpe = Bpe::new(BpeParts {
            starts,
            merges: &merges,
            entries: &entries,
            whole_words,
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
            rules,
            words,
            bpe,
            specials: Specials::new(&vocab)?,
            bytes,
            begins,
            kinds: vocab.entries.iter().map(|entry| entry.kind).collect(),
            bos: bos_id(header, &vocab, rules)?,
            adds_bos: add_bos.unwrap_or(rules.adds_bos),
            eos: eos_ids(header, &vocab)?,
            fingerprint: fingerprint(&vocab, &merges, rules),
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

    /// The tokens of text that continues other text: `encode_text` without the blank that
    /// SentencePiece puts before a text.
    pub fn encode_more(&self, text: &str) -> Vec<u32> {
        let mut tokens = Vec::with_capacity(text.len() / 3);
        let mut place = Place::Inside;
        for piece in self.pieces_of_text(text) {
            match piece {
                Piece::Token(token) => tokens.push(token),
                Piece::Text(text) => self.push_plain(text, place, &mut tokens),
            }
            place = Place::Begin;
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

    /// The text that was encoded as these tokens from its beginning, or from behind a control token:
    /// `decode` without the blanks that SentencePiece put in.
    pub(crate) fn decode_text(&self, ids: &[u32]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        let mut place = Place::Begin;
        for id in ids {
            let added = self.token_bytes(*id);
            let is_special = matches!(
                self.kinds.get(*id as usize),
                Some(Kind::Control | Kind::UserDefined)
            );
            let put_in = place == Place::Begin && !is_special && self.words.begins_differently();
            bytes.extend_from_slice(match added {
                [b' ', rest @ ..] if put_in => rest,
                _ => added,
            });
            place = if is_special {
                Place::Begin
            } else {
                Place::Inside
            };
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
        self.kinds.get(id as usize) == Some(&Kind::Control)
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
        self.kinds.len()
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

    /// The same, and one place from another where tokens depend on it.
    pub(crate) fn fingerprint_at(&self, place: Place) -> u64 {
        match place {
            Place::Begin if self.words.begins_differently() => !self.fingerprint,
            Place::Begin | Place::Inside => self.fingerprint,
        }
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
    pub(crate) fn push_plain(&self, text: &str, place: Place, tokens: &mut Vec<u32>) {
        self.words.encode(&self.bpe, text, place, tokens);
    }

    /// The first position at or after `from` at which `text` may be cut in two without changing
    /// its tokens; the second part is then `Inside`.
    pub(crate) fn safe_cut(&self, text: &str, from: usize) -> Option<usize> {
        self.words.safe_cut(text, from)
    }

    fn push_piece(&self, piece: Piece<'_>, tokens: &mut Vec<u32>) {
        match piece {
            Piece::Token(token) => tokens.push(token),
            Piece::Text(text) => self.push_plain(text, Place::Begin, tokens),
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

/// What the two schemes build a tokenizer from.
struct Parts {
    vocab: Vocab,
    words: Words,
    starts: Starts,
    merges: Vec<Rule>,
    whole_words: WholeWords,
}

impl Parts {
    fn from_gguf(header: &Header, scheme: Scheme) -> Result<Self, LoadError> {
        match scheme {
            Scheme::ByteLevel {
                split,
                normal_form,
                whole_words,
            } => {
                let vocab = Vocab::from_gguf(header, Spelling::ByteLevel)?;
                let bytes = vocab.byte_tokens().map(|token| token.unwrap_or(NONE));
                Ok(Self {
                    words: Words::Split {
                        splitter: Box::new(Splitter::new(split)),
                        normal_form,
                    },
                    starts: Starts::Bytes(bytes),
                    merges: vocab.listed_merges(header)?,
                    whole_words,
                    vocab,
                })
            }
            Scheme::SentencePiece { prefix } => {
                let vocab = Vocab::from_gguf(header, Spelling::SentencePiece)?;
                let (chars, merges) = sentencepiece::merges(header, &vocab)?;
                let cuts = Cuts::of(&vocab);
                Ok(Self {
                    words: Words::Blanks { cuts, prefix },
                    starts: Starts::Chars(chars),
                    merges,
                    whole_words: WholeWords::WhenMerged,
                    vocab,
                })
            }
        }
    }
}

fn bos_id(header: &Header, vocab: &Vocab, rules: Rules) -> Result<Option<u32>, LoadError> {
    let named = vocab.id(header, "tokenizer.ggml.bos_token_id")?;
    let Scheme::SentencePiece { .. } = rules.scheme else {
        return Ok(named);
    };
    // Older files do not name it.
    let is_usual = |entry: &vocab::Entry| entry.kind == Kind::Control && entry.text == "<s>";
    let usual = vocab.entries.iter().position(is_usual);
    Ok(named.or(usual.map(|id| id as u32)))
}

fn eos_ids(header: &Header, vocab: &Vocab) -> Result<Vec<u32>, LoadError> {
    let mut ids = Vec::new();
    for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
        ids.extend(vocab.id(header, &format!("tokenizer.ggml.{key}"))?);
    }
    ids.extend(vocab.ends());
    ids.extend(vocab.ids(header, "tokenizer.ggml.eos_token_ids")?);
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

/// A hash over all that decides a text's tokens.
fn fingerprint(vocab: &Vocab, merges: &[Rule], rules: Rules) -> u64 {
    let mut hasher = FixedState::with_seed(0).build_hasher();
    format!("{rules:?}").hash(&mut hasher);
    for entry in &vocab.entries {
        (entry.kind as u8, &entry.text).hash(&mut hasher);
    }
    merges.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests;
