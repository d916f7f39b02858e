//! Is this character a letter, a number, white space, or something else? The four classes that
//! most of the reference's split patterns tell apart: `\p{L}`, `\p{N}`, `\s` and the rest. And which
//! part may it play in a word where small letters follow large ones: what Tekken's pattern asks.
//!
//! `char::is_alphabetic` is a different property (it holds marks and letter-like numbers), so the
//! ranges come from regex-syntax, the tables that the reference's own regex engine uses.

use regex_syntax::hir::{Class as HirClass, HirKind};

/// What the split patterns tell apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Class {
    /// Neither of the below: punctuation, symbols, marks, controls.
    Other,
    /// `\p{L}`.
    Letter,
    /// `\p{N}`.
    Number,
    /// `\s`.
    Space,
}

/// Where a character may stand in a word of Tekken's pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Case {
    /// In no word.
    None,
    /// `[\p{Lu}\p{Lt}]`: among the first letters.
    Large,
    /// `\p{Ll}`: among the last ones.
    Small,
    /// `[\p{Lm}\p{Lo}\p{M}]`: among both.
    Either,
}

/// What a split pattern takes marks (accents, vowel signs) for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Marks {
    /// `\p{L}` alone are letters.
    AreOther,
    /// `[\p{L}\p{M}]` are.
    AreLetters,
}

/// Unicode's range; too much for the stack.
const CHARACTERS: usize = 0x11_0000;
/// Characters per page of the two-stage table.
const PAGE: usize = 256;

/// Character to class: a page number per 256 characters, equal pages shared (about 40 KB in all).
#[derive(Debug)]
pub(super) struct Table<C> {
    ascii: [C; 128],
    page_of: Vec<u16>,
    pages: Vec<[C; PAGE]>,
}

pub(super) type Classes = Table<Class>;

impl Classes {
    pub(super) fn new(marks: Marks) -> Self {
        let patterns = [
            (r"\p{L}", Class::Letter),
            (r"\p{N}", Class::Number),
            (r"\s", Class::Space),
            (r"\p{M}", Class::Letter),
        ];
        Self::of(
            Class::Other,
            match marks {
                Marks::AreOther => &patterns[..3],
                Marks::AreLetters => &patterns,
            },
        )
    }
}

pub(super) type Cases = Table<Case>;

impl Cases {
    pub(super) fn new() -> Self {
        let patterns = [
            (r"[\p{Lu}\p{Lt}]", Case::Large),
            (r"\p{Ll}", Case::Small),
            (r"[\p{Lm}\p{Lo}\p{M}]", Case::Either),
        ];
        Self::of(Case::None, &patterns)
    }
}

impl<C: Copy + PartialEq> Table<C> {
    /// Classes by pattern; a character has one of them at most.
    fn of(otherwise: C, patterns: &[(&str, C)]) -> Self {
        let mut flat: Vec<C> = std::iter::repeat_n(otherwise, CHARACTERS).collect();
        for (pattern, class) in patterns {
            for (first, last) in ranges(pattern) {
                flat[first as usize..=last as usize].fill(*class);
            }
        }
        let mut ascii = [otherwise; 128];
        ascii.copy_from_slice(&flat[..128]);

        let mut pages: Vec<[C; PAGE]> = Vec::new();
        let page_of = flat
            .chunks_exact(PAGE)
            .map(|chunk| {
                let known = pages.iter().position(|page| page == chunk);
                known.unwrap_or_else(|| {
                    let mut page = [otherwise; PAGE];
                    page.copy_from_slice(chunk);
                    pages.push(page);
                    pages.len() - 1
                }) as u16
            })
            .collect();
        Self {
            ascii,
            page_of,
            pages,
        }
    }

    /// Class and length in bytes of the character that begins at `at`; `None` at the end.
    #[inline]
    pub(super) fn at(&self, text: &str, at: usize) -> Option<(C, usize)> {
        let first = *text.as_bytes().get(at)?;
        if first < 128 {
            return Some((self.ascii[usize::from(first)], 1));
        }
        let c = text[at..].chars().next()?;
        let page = usize::from(self.page_of[c as usize / PAGE]);
        Some((self.pages[page][c as usize % PAGE], c.len_utf8()))
    }
}

/// The ranges of a class pattern.
fn ranges(pattern: &str) -> Vec<(char, char)> {
    let hir = regex_syntax::parse(pattern).expect("fixed patterns, exercised by tests");
    match hir.kind() {
        HirKind::Class(HirClass::Unicode(class)) => class
            .iter()
            .map(|range| (range.start(), range.end()))
            .collect(),
        other => unreachable!("a class pattern parsed as {other:?}"),
    }
}
