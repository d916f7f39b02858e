//! Which `<|im_end|>` is real? Only one that the template itself wrote.
//!
//! Before the template is compiled, each control token's text in its source is replaced by one
//! private-use character, a mark. Users' strings cannot hold marks (theirs are escaped), so after
//! rendering a mark is a control token and everything else is text, no matter what users write and
//! what the template makes of it by joining: `'<' ~ key ~ '>'` with the key `|im_end|` is text.
//! The alternative, breaking special-token text inside users' strings, misses such joins and
//! changes what templates test for (`content.startswith('<tool_response>')`).
//!
//! A few templates build their own control tokens by joining (`'<|' + role + '|>'`). They are
//! found at load, by rendering a harmless conversation; those tokens alone are then also looked
//! for in the rendered text, and broken with an escape where they stand in users' strings.

use std::borrow::Cow;

use crate::error::LoadError;
use crate::tokenizer::{Finder, Piece, Tokenizer};

/// Marks are U+F0000 up to, not including, `BOUNDARY`: the start of a private-use plane.
const MARK_FIRST: u32 = 0xf_0000;
/// Says that the next character is escaped.
const ESCAPE: char = '\u{f0fff}';
/// Where a message begins or ends, written by templates that only append (`append`).
pub(crate) const BOUNDARY: char = '\u{f0ffe}';
/// How far an escaped character is moved, out of the range that needs escaping.
const ESCAPE_SHIFT: u32 = 0x1000;
/// Behind `ESCAPE`: nothing; the pair only breaks a control token's text apart.
const NOTHING: char = '\u{f2000}';
/// First byte of the UTF-8 form of every mark and escape; rare enough to look for by itself.
const LEAD_BYTE: u8 = 0xf3;

/// The marks of one template.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    /// Token of each mark.
    tokens: Vec<u32>,
    /// Control tokens that the template builds by joining.
    joined: Option<Joined>,
}

#[derive(Debug)]
struct Joined {
    texts: Vec<String>,
    finder: Finder,
}

impl Marks {
    /// The mark of a control token, made on first use.
    pub(crate) fn mark(&mut self, token: u32) -> Result<char, LoadError> {
        let at = self
            .tokens
            .iter()
            .position(|known| *known == token)
            .unwrap_or_else(|| {
                self.tokens.push(token);
                self.tokens.len() - 1
            });
        let mark = char::from_u32(MARK_FIRST + at as u32).filter(|mark| *mark < BOUNDARY);
        mark.ok_or_else(|| LoadError::Template("it names more than 4,094 control tokens".into()))
    }

    /// A template's source with marks in place of control tokens.
    pub(crate) fn mark_source(
        &mut self,
        source: &str,
        tokenizer: &Tokenizer,
    ) -> Result<String, LoadError> {
        if source.chars().any(is_reserved) {
            let why = "it contains private-use characters U+F0000 to U+F0FFF";
            return Err(LoadError::Template(why.to_owned()));
        }
        let mut marked = String::with_capacity(source.len());
        for piece in tokenizer.control_pieces(source) {
            match piece {
                Piece::Token(token) => marked.push(self.mark(token)?),
                Piece::Text(text) => marked.push_str(text),
            }
        }
        Ok(marked)
    }

    /// Declares every control token that stands unmarked in the rendering of a harmless
    /// conversation to be one that the template builds by joining.
    pub(crate) fn learn_joined(
        &mut self,
        rendered: &str,
        tokenizer: &Tokenizer,
    ) -> Result<(), LoadError> {
        let mut found: Vec<u32> = Vec::new();
        for part in self.parts(rendered) {
            let Part::Text(text) = part else { continue };
            for piece in tokenizer.control_pieces(&text) {
                if let Piece::Token(token) = piece
                    && !found.contains(&token)
                {
                    found.push(token);
                }
            }
        }
        let named = |token: &u32| {
            let text = tokenizer
                .control_tokens()
                .iter()
                .find(|(id, _)| id == token);
            text.cloned()
        };
        let tokens: Vec<(u32, String)> = found.iter().filter_map(named).collect();
        self.joined = Finder::new(&tokens)?.map(|finder| Joined {
            texts: tokens.into_iter().map(|(_, text)| text).collect(),
            finder,
        });
        Ok(())
    }

    /// A user's string, made harmless.
    pub(crate) fn escape<'a>(&self, text: &'a str) -> Cow<'a, str> {
        let mut safe = Cow::Borrowed(text);
        if memchr::memchr(LEAD_BYTE, text.as_bytes()).is_some() && text.chars().any(is_reserved) {
            let mut escaped = String::with_capacity(text.len() + 16);
            for c in text.chars() {
                match char::from_u32(c as u32 + ESCAPE_SHIFT).filter(|_| is_reserved(c)) {
                    Some(moved) => escaped.extend([ESCAPE, moved]),
                    None => escaped.push(c),
                }
            }
            safe = Cow::Owned(escaped);
        }
        for token in self.joined.iter().flat_map(|joined| &joined.texts) {
            if safe.contains(token.as_str()) {
                safe = Cow::Owned(broken(&safe, token));
            }
        }
        safe
    }

    /// The last control token of a rendered text, if it is one that stands there as a mark.
    pub(crate) fn last_token(&self, rendered: &str) -> Option<u32> {
        let mut last = None;
        for piece in self.walk(rendered) {
            if let Piece::Token(token) = piece {
                last = Some(token);
            }
        }
        last
    }

    /// A rendered text taken apart at its marks; what is between them goes through `text_parts`.
    pub(crate) fn walk<'a>(&'a self, rendered: &'a str) -> AtMarks<'a> {
        AtMarks {
            tokens: &self.tokens,
            rest: rendered,
        }
    }

    /// Text between marks taken apart, escapes undone.
    pub(crate) fn text_parts<'a>(&'a self, text: &'a str) -> impl Iterator<Item = Part<'a>> {
        let finder = self.joined.as_ref().map(|joined| &joined.finder);
        Finder::pieces(finder, text).map(|piece| match piece {
            Piece::Token(token) => Part::Token(token),
            Piece::Text(text) => Part::Text(unescape(text)),
        })
    }

    /// A rendered text taken apart into control tokens and text, escapes undone.
    pub(crate) fn parts<'a>(&'a self, rendered: &'a str) -> impl Iterator<Item = Part<'a>> {
        self.walk(rendered).flat_map(move |piece| {
            let (token, text) = match piece {
                Piece::Token(token) => (Some(Part::Token(token)), ""),
                Piece::Text(text) => (None, text),
            };
            token.into_iter().chain(self.text_parts(text))
        })
    }
}

/// A part of a rendered text.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Part<'a> {
    /// A control token.
    Token(u32),
    /// Text in which nothing is special; never empty.
    Text(Cow<'a, str>),
}

/// A rendered text taken apart at its marks.
pub(crate) struct AtMarks<'a> {
    tokens: &'a [u32],
    rest: &'a str,
}

impl<'a> AtMarks<'a> {
    /// What comes before the next mark of one of these tokens; none if there is none.
    pub(crate) fn until(&self, ends: &[u32]) -> Option<&'a str> {
        let mut candidates = memchr::memchr_iter(LEAD_BYTE, self.rest.as_bytes());
        let end = candidates.find(|at| {
            let mark = self.rest[*at..].chars().next();
            let token = mark.and_then(|mark| self.token(mark));
            token.is_some_and(|token| ends.contains(&token))
        })?;
        Some(&self.rest[..end])
    }

    /// How many bytes are left.
    pub(crate) fn left(&self) -> usize {
        self.rest.len()
    }

    /// Passes over so many bytes.
    pub(crate) fn pass(&mut self, bytes: usize) {
        self.rest = &self.rest[bytes..];
    }

    /// The token of a mark.
    fn token(&self, c: char) -> Option<u32> {
        let at = (c as u32).checked_sub(MARK_FIRST)?;
        self.tokens.get(at as usize).copied()
    }
}

impl<'a> Iterator for AtMarks<'a> {
    type Item = Piece<'a>;

    fn next(&mut self) -> Option<Piece<'a>> {
        let first = self.rest.chars().next()?;
        if let Some(token) = self.token(first) {
            self.rest = &self.rest[first.len_utf8()..];
            return Some(Piece::Token(token));
        }
        let mut candidates = memchr::memchr_iter(LEAD_BYTE, self.rest.as_bytes());
        let end = candidates.find(|at| {
            // 0xf3 is never a continuation byte, so a character begins here.
            self.rest[*at..]
                .chars()
                .next()
                .is_some_and(|c| self.token(c).is_some())
        });
        let (text, rest) = self.rest.split_at(end.unwrap_or(self.rest.len()));
        self.rest = rest;
        Some(Piece::Text(text))
    }
}

fn is_reserved(c: char) -> bool {
    (MARK_FIRST..=ESCAPE as u32).contains(&(c as u32))
}

/// The text with a harmless pair behind the first character of each occurrence of `token`.
fn broken(text: &str, token: &str) -> String {
    let mut out = String::with_capacity(text.len() + 16);
    for (at, c) in text.char_indices() {
        out.push(c);
        if text[at..].starts_with(token) {
            out.extend([ESCAPE, NOTHING]);
        }
    }
    out
}

fn unescape(text: &str) -> Cow<'_, str> {
    if memchr::memchr(LEAD_BYTE, text.as_bytes()).is_none() || !text.contains(ESCAPE) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if c != ESCAPE {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some(NOTHING) | None => {}
            Some(moved) => {
                let original = (moved as u32)
                    .checked_sub(ESCAPE_SHIFT)
                    .and_then(char::from_u32);
                // A template that took the pair apart leaves a stray escape; the rest is text.
                out.push(original.filter(|c| is_reserved(*c)).unwrap_or(moved));
            }
        }
    }
    Cow::Owned(out)
}
