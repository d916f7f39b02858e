//! How is a piece of text taken apart before its words are merged? By a pattern, after normalising
//! it, or (SentencePiece) before blanks, after putting one in front.

use super::bpe::{Bpe, Scratch};
use super::rules::{NormalForm, SpacePrefix};
use super::sentencepiece::Cuts;
use super::split::{Splitter, safe_cut};

/// Where in a text a piece stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// At its beginning, or right behind a special token.
    Begin,
    /// Behind other text.
    Inside,
}

/// How to find words.
#[derive(Debug)]
pub(super) enum Words {
    Split {
        splitter: Box<Splitter>,
        normal_form: NormalForm,
    },
    Blanks {
        cuts: Cuts,
        prefix: SpacePrefix,
    },
}

impl Words {
    /// Appends the tokens of text without special tokens.
    pub(super) fn encode(&self, bpe: &Bpe, text: &str, place: Place, tokens: &mut Vec<u32>) {
        let mut scratch = Scratch::default();
        match self {
            Self::Split {
                splitter,
                normal_form,
            } => {
                let normal;
                let text = match normal_form {
                    NormalForm::Nfc if !unicode_normalization::is_nfc(text) => {
                        let characters = unicode_normalization::UnicodeNormalization::nfc(text);
                        normal = characters.collect::<String>();
                        normal.as_str()
                    }
                    NormalForm::Nfc | NormalForm::AsIs => text,
                };
                for word in words(text, 0, |begin| splitter.word_end(text, begin)) {
                    bpe.encode_word(word, &mut scratch, tokens);
                }
            }
            Self::Blanks { cuts, prefix } => {
                let mut begin = 0;
                if *prefix == SpacePrefix::Blank && place == Place::Begin && !text.is_empty() {
                    begin = cuts.word_end(text, 0);
                    let word = [" ", &text[..begin]].concat();
                    bpe.encode_word(word.as_bytes(), &mut scratch, tokens);
                }
                for word in words(text, begin, |begin| cuts.word_end(text, begin)) {
                    bpe.encode_word(word, &mut scratch, tokens);
                }
            }
        }
    }

    /// The first position at or after `from` at which `text` may be cut in two without changing
    /// its tokens, the second part being `Inside`.
    pub(super) fn safe_cut(&self, text: &str, from: usize) -> Option<usize> {
        match self {
            Self::Split { .. } => safe_cut(text, from),
            Self::Blanks { cuts, .. } => cuts.safe_cut(text, from),
        }
    }

    /// Whether a text's tokens depend on where it stands.
    pub(super) fn begins_differently(&self) -> bool {
        match self {
            Self::Split { .. } => false,
            Self::Blanks { prefix, .. } => *prefix == SpacePrefix::Blank,
        }
    }
}

/// The words from `begin` on, given where one ends that begins at a place.
#[inline]
fn words(
    text: &str,
    mut begin: usize,
    end: impl Fn(usize) -> usize,
) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        (begin < text.len()).then(|| {
            let word = begin..end(begin);
            begin = word.end;
            &text.as_bytes()[word]
        })
    })
}
