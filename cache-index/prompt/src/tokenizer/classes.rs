//! Is this character a letter, a number, white space, or something else? The four classes that
//! the reference's split patterns tell apart: `\p{L}`, `\p{N}`, `\s` and the rest.
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

/// Characters per page of the two-stage table.
const PAGE: usize = 256;

/// Character to class: a page number per 256 characters, equal pages shared (about 40 KB in all).
#[derive(Debug)]
pub(super) struct Classes {
    ascii: [Class; 128],
    page_of: Vec<u16>,
    pages: Vec<[Class; PAGE]>,
}

impl Classes {
    pub(super) fn new() -> Self {
        let mut flat = vec![Class::Other; 0x11_0000];
        for (pattern, class) in [
            (r"\p{L}", Class::Letter),
            (r"\p{N}", Class::Number),
            (r"\s", Class::Space),
        ] {
            for (first, last) in ranges(pattern) {
                flat[first as usize..=last as usize].fill(class);
            }
        }
        let mut ascii = [Class::Other; 128];
        ascii.copy_from_slice(&flat[..128]);

        let mut pages: Vec<[Class; PAGE]> = Vec::new();
        let page_of = flat
            .chunks_exact(PAGE)
            .map(|chunk| {
                let known = pages.iter().position(|page| page == chunk);
                known.unwrap_or_else(|| {
                    let mut page = [Class::Other; PAGE];
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
    pub(super) fn at(&self, text: &str, at: usize) -> Option<(Class, usize)> {
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
    let hir = regex_syntax::parse(pattern).expect("three fixed patterns, exercised by every test");
    match hir.kind() {
        HirKind::Class(HirClass::Unicode(class)) => class
            .iter()
            .map(|range| (range.start(), range.end()))
            .collect(),
        other => unreachable!("a class pattern parsed as {other:?}"),
    }
}
