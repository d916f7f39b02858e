//! Where are the special tokens in this text? Leftmost, and longest among those, as the reference
//! finds its added tokens.

use aho_corasick::{AhoCorasick, MatchKind};

use super::vocab::{Kind, Vocab, bad};
use crate::error::LoadError;

/// A part of a text: a token found in it, or what lies between.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Piece<'a> {
    /// A special token.
    Token(u32),
    /// Text without any; never empty.
    Text(&'a str),
}

/// The special tokens of a vocabulary, and how to find them.
#[derive(Debug)]
pub(super) struct Specials {
    /// Control tokens with their text.
    pub(super) control_tokens: Vec<(u32, String)>,
    /// Finds control tokens only.
    pub(super) control: Option<Finder>,
    /// Finds user-defined tokens only.
    pub(super) user_defined: Option<Finder>,
    /// Finds both.
    pub(super) all: Option<Finder>,
}

/// Finds some tokens by their text.
#[derive(Debug)]
pub(crate) struct Finder {
    automaton: AhoCorasick,
    tokens: Vec<u32>,
}

impl Specials {
    pub(super) fn new(vocab: &Vocab) -> Result<Self, LoadError> {
        let of_kind = |kind: Kind| {
            let entries = vocab.entries.iter().enumerate();
            entries
                .filter(|(_, entry)| entry.kind == kind && !entry.text.is_empty())
                .map(|(id, entry)| (id as u32, entry.text.clone()))
                .collect::<Vec<_>>()
        };
        let control_tokens = of_kind(Kind::Control);
        let user_defined = of_kind(Kind::UserDefined);
        let all = [control_tokens.as_slice(), user_defined.as_slice()].concat();
        Ok(Self {
            control: Finder::new(&control_tokens)?,
            user_defined: Finder::new(&user_defined)?,
            all: Finder::new(&all)?,
            control_tokens,
        })
    }
}

impl Finder {
    /// A finder of these tokens; `None` where there are none.
    pub(crate) fn new(tokens: &[(u32, String)]) -> Result<Option<Self>, LoadError> {
        if tokens.is_empty() {
            return Ok(None);
        }
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(tokens.iter().map(|(_, text)| text))
            .map_err(|e| bad("tokenizer.ggml.tokens", format!("special tokens: {e}")))?;
        Ok(Some(Self {
            automaton,
            tokens: tokens.iter().map(|(id, _)| *id).collect(),
        }))
    }

    /// Text taken apart at the finder's tokens; without a finder, the text as it is.
    pub(crate) fn pieces<'a>(finder: Option<&'a Self>, text: &'a str) -> Pieces<'a> {
        Pieces {
            finder,
            text,
            at: 0,
            found: None,
        }
    }
}

/// The pieces of a text, in order.
#[derive(Debug)]
pub(crate) struct Pieces<'a> {
    finder: Option<&'a Finder>,
    text: &'a str,
    at: usize,
    /// A token found behind the text just given out, and where it ends.
    found: Option<(u32, usize)>,
}

impl<'a> Iterator for Pieces<'a> {
    type Item = Piece<'a>;

    fn next(&mut self) -> Option<Piece<'a>> {
        if let Some((token, end)) = self.found.take() {
            self.at = end;
            return Some(Piece::Token(token));
        }
        if self.at == self.text.len() {
            return None;
        }
        let begin = self.at;
        let found = self.finder.and_then(|finder| {
            let input = aho_corasick::Input::new(self.text).range(begin..);
            let found = finder.automaton.find(input)?;
            Some((
                finder.tokens[found.pattern().as_usize()],
                found.start(),
                found.end(),
            ))
        });
        match found {
            Some((token, start, end)) if start == begin => {
                self.at = end;
                Some(Piece::Token(token))
            }
            Some((token, start, end)) => {
                self.found = Some((token, end));
                Some(Piece::Text(&self.text[begin..start]))
            }
            None => {
                self.at = self.text.len();
                Some(Piece::Text(&self.text[begin..]))
            }
        }
    }
}
