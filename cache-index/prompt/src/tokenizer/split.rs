//! Where are the words? The reference splits text with a regular expression before it merges
//! bytes; these are the same patterns as hand-written scanners, because a backtracking regex with
//! look-ahead costs more than all of the rest (10 to 30 MB/s against several hundred here).
//!
//! Every scanner is a function from a position to the end of the word that begins there; words
//! cover the text without gaps. `safe_cut` names positions at which any text may be cut in two
//! without changing the words: known text is remembered in such pieces.

pub(super) use super::classes::Marks;
use super::classes::{Case, Cases, Class, Classes};

/// A reference pre-tokenizer, by what it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Split {
    /// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
    Gpt2,
    /// Each `\p{N}` on its own first, then the GPT-2 pattern on what lies between.
    SmolLm,
    /// `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,n}| ?[^\s\p{L}\p{N}]+[\r\n]*`
    /// `|\s*[\r\n]+|\s+(?!\S)|\s+`, with the most numbers in a row.
    Cl100k {
        /// 3 for Llama 3, 1 for Qwen 2.
        numbers_max: usize,
        /// Letters for Qwen 3.5: `[\p{L}\p{M}]+` in a word, `[^\s\p{L}\p{M}\p{N}]+` outside.
        marks: Marks,
    },
    /// `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+`
    /// `|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*`
    /// `|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`, for Mistral since Nemo.
    Tekken,
}

/// A pre-tokenizer with its tables of characters.
#[derive(Debug)]
pub(super) struct Splitter {
    split: Split,
    classes: Classes,
    /// Of `Split::Tekken` alone.
    cases: Option<Cases>,
}

impl Splitter {
    pub(super) fn new(split: Split) -> Self {
        let marks = match split {
            Split::Cl100k { marks, .. } => marks,
            Split::Gpt2 | Split::SmolLm | Split::Tekken => Marks::AreOther,
        };
        Self {
            split,
            classes: Classes::new(marks),
            cases: (split == Split::Tekken).then(Cases::new),
        }
    }

    /// The end of the word that begins at `begin`, which must lie before the end of `text`.
    #[inline]
    pub(super) fn word_end(&self, text: &str, begin: usize) -> usize {
        let Self { classes, cases, .. } = self;
        let scan = Scan { classes, text };
        match (self.split, cases) {
            (Split::Gpt2, _) => scan.gpt2(begin),
            (Split::SmolLm, _) => scan.smollm(begin),
            (Split::Cl100k { numbers_max, .. }, _) => scan.cl100k(begin, numbers_max),
            (Split::Tekken, Some(cases)) => scan.tekken(begin, cases),
            (Split::Tekken, None) => unreachable!("made with its cases by `new`"),
        }
    }
}

/// The first position at or after `from` at which `text` may be cut without changing its words:
/// between a character that is no white space and a blank. A word has white space only at its
/// front (or, in the cl100k and Tekken patterns, line ends at its back, which a blank ends), so such
/// a position always begins a word, whatever surrounds it, and no pattern looks behind.
pub(crate) fn safe_cut(text: &str, from: usize) -> Option<usize> {
    let bytes = text.as_bytes();
    let from = from.max(1);
    let mut at = from;
    while let Some(found) = memchr::memchr(b' ', bytes.get(at..)?) {
        at += found;
        let before = text[..at].chars().next_back();
        if before.is_some_and(|c| !c.is_whitespace()) {
            return Some(at);
        }
        at += 1;
    }
    None
}

struct Scan<'a> {
    classes: &'a Classes,
    text: &'a str,
}

impl Scan<'_> {
    #[inline]
    fn class(&self, at: usize) -> Option<(Class, usize)> {
        self.classes.at(self.text, at)
    }

    /// The end of the run of `class` that begins at `at`.
    #[inline]
    fn run(&self, class: Class, mut at: usize) -> usize {
        while let Some((found, length)) = self.class(at) {
            if found != class {
                break;
            }
            at += length;
        }
        at
    }

    fn gpt2(&self, begin: usize) -> usize {
        let Some((class, length)) = self.class(begin) else {
            return begin;
        };
        let next = begin + length;
        match class {
            Class::Space => match self.class(next) {
                Some((after, _)) if after != Class::Space && self.is_blank(begin) => {
                    self.run(after, next)
                }
                _ => self.spaces(begin, |_| false),
            },
            Class::Other => self
                .contraction(begin)
                .unwrap_or_else(|| self.run(class, next)),
            Class::Letter | Class::Number => self.run(class, next),
        }
    }

    fn smollm(&self, begin: usize) -> usize {
        let Some((class, length)) = self.class(begin) else {
            return begin;
        };
        let next = begin + length;
        match class {
            Class::Number => next,
            Class::Space => match self.class(next) {
                Some((after @ (Class::Letter | Class::Other), _)) if self.is_blank(begin) => {
                    self.run(after, next)
                }
                // A number ends the piece, so that all white space before it is one word.
                _ => self.spaces(begin, |after| after == Class::Number),
            },
            Class::Other => self
                .contraction(begin)
                .unwrap_or_else(|| self.run(class, next)),
            Class::Letter => self.run(class, next),
        }
    }

    fn cl100k(&self, begin: usize, numbers_max: usize) -> usize {
        let Some((class, length)) = self.class(begin) else {
            return begin;
        };
        let next = begin + length;
        if let Some(end) = self.contraction_any_case(begin) {
            return end;
        }
        let after = self.class(next).map(|(after, _)| after);
        match class {
            Class::Letter => self.run(Class::Letter, next),
            Class::Number => self.numbers(next, numbers_max - 1),
            Class::Other if after == Some(Class::Letter) => self.run(Class::Letter, next),
            Class::Other => self.line_ends(self.run(Class::Other, next)),
            Class::Space if after == Some(Class::Letter) && !self.is_line_end(begin) => {
                self.run(Class::Letter, next)
            }
            Class::Space if after == Some(Class::Other) && self.is_blank(begin) => {
                self.line_ends(self.run(Class::Other, next))
            }
            Class::Space => self.spaces_to_line_end(begin),
        }
    }

    fn tekken(&self, begin: usize, cases: &Cases) -> usize {
        let Some((class, length)) = self.class(begin) else {
            return begin;
        };
        let next = begin + length;
        if class != Class::Number
            && !self.is_line_end(begin)
            && let Some(end) = self.cased_word(begin, class, cases)
        {
            return end;
        }
        let line_ends = |at| self.run_of(at, |byte| matches!(byte, b'\r' | b'\n' | b'/'));
        match class {
            Class::Letter | Class::Number => next,
            Class::Other => line_ends(self.run(Class::Other, next)),
            Class::Space => match self.class(next) {
                Some((Class::Other, _)) if self.is_blank(begin) => {
                    line_ends(self.run(Class::Other, next))
                }
                _ => self.spaces_to_line_end(begin),
            },
        }
    }

    /// Large letters, then small ones, with one character of another class before them. As the
    /// pattern's alternatives are tried: with small letters at the end before without, and with
    /// that character before without.
    fn cased_word(&self, begin: usize, class: Class, cases: &Cases) -> Option<usize> {
        let case = |at| cases.at(self.text, at);
        let (first, length) = case(begin)?;
        let letters = if class == Class::Letter {
            begin
        } else {
            begin + length
        };
        // The first letters, and where the last of those ends that may stand among the small too.
        let (mut at, mut small_end) = (letters, None);
        while let Some((found @ (Case::Large | Case::Either), length)) = case(at) {
            at += length;
            if found == Case::Either {
                small_end = Some(at);
            }
        }
        if let Some((Case::Small, _)) = case(at) {
            while let Some((Case::Small | Case::Either, length)) = case(at) {
                at += length;
            }
            return Some(at);
        }
        if small_end.is_some() {
            return small_end;
        }
        if first == Case::Either && letters > begin {
            // A mark: without a character before it, it is a small letter by itself.
            return Some(letters);
        }
        (at > letters).then_some(at)
    }

    /// `\s*[\r\n]+|\s+(?!\S)|\s+`
    fn spaces_to_line_end(&self, begin: usize) -> usize {
        let end = self.run(Class::Space, begin);
        match self.text[begin..end].rfind(['\r', '\n']) {
            Some(last) => begin + last + 1,
            None => self.spaces(begin, |_| false),
        }
    }

    /// `\s+(?!\S)|\s+`: a run of white space leaves its last character to the word behind it,
    /// unless it is one character long, or nothing follows (`ends_piece` counts as nothing).
    fn spaces(&self, begin: usize, ends_piece: impl Fn(Class) -> bool) -> usize {
        let end = self.run(Class::Space, begin);
        if self.class(end).is_none_or(|(after, _)| ends_piece(after)) {
            return end;
        }
        let last = self.text[begin..end]
            .chars()
            .next_back()
            .map_or(0, char::len_utf8);
        if end - last > begin { end - last } else { end }
    }

    fn numbers(&self, mut at: usize, more: usize) -> usize {
        for _ in 0..more {
            match self.class(at) {
                Some((Class::Number, length)) => at += length,
                _ => break,
            }
        }
        at
    }

    fn line_ends(&self, at: usize) -> usize {
        self.run_of(at, |byte| matches!(byte, b'\r' | b'\n'))
    }

    fn run_of(&self, mut at: usize, is_one: impl Fn(u8) -> bool) -> usize {
        while self
            .text
            .as_bytes()
            .get(at)
            .is_some_and(|byte| is_one(*byte))
        {
            at += 1;
        }
        at
    }

    fn is_line_end(&self, at: usize) -> bool {
        matches!(self.text.as_bytes().get(at), Some(b'\r' | b'\n'))
    }

    fn is_blank(&self, at: usize) -> bool {
        self.text.as_bytes().get(at) == Some(&b' ')
    }

    /// `'s|'t|'re|'ve|'m|'ll|'d`
    fn contraction(&self, begin: usize) -> Option<usize> {
        match self.text.as_bytes().get(begin..)? {
            [b'\'', b's' | b't' | b'm' | b'd', ..] => Some(begin + 2),
            [b'\'', b'r' | b'v', b'e', ..] | [b'\'', b'l', b'l', ..] => Some(begin + 3),
            _ => None,
        }
    }

    /// The same without regard to case, where the long s (U+017F) is an s too.
    fn contraction_any_case(&self, begin: usize) -> Option<usize> {
        match self.text.as_bytes().get(begin..)? {
            [
                b'\'',
                b's' | b't' | b'm' | b'd' | b'S' | b'T' | b'M' | b'D',
                ..,
            ] => Some(begin + 2),
            [b'\'', b'r' | b'v' | b'R' | b'V', b'e' | b'E', ..]
            | [b'\'', b'l' | b'L', b'l' | b'L', ..]
            | [b'\'', 0xc5, 0xbf, ..] => Some(begin + 3),
            _ => None,
        }
    }
}
