//! What does a SentencePiece vocabulary merge? Any two neighbours whose text together is a token,
//! the token of the highest score first: so the pairs, which byte-level files list, are found here
//! by cutting every token in two.
//!
//! Tokens spell a blank as `▁`. Texts here keep their blanks, and tokens have them put in; a `▁`
//! that stands in a text is the same character.
//!
//! Control tokens and byte tokens are not reached by merging, as in SentencePiece itself: text that
//! spells `</s>` or `<0x0A>` stays text.

use hashbrown::HashMap;

use super::bpe::{Chars, Rule, hasher};
use super::vocab::{Entry, Kind, Vocab, array, bad};
use crate::error::LoadError;
use crate::gguf::Header;

const SCORES: &str = "tokenizer.ggml.scores";
/// How tokens spell a blank.
pub(super) const BLANK: char = '\u{2581}';
/// The first byte of that in UTF-8.
const BLANK_LEAD: u8 = 0xe2;

/// Where text may be taken apart into words without changing what is merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cuts {
    /// Before blanks that follow another character: no token has a blank there.
    BeforeBlanks,
    /// Nowhere: some token reaches over such a place.
    Nowhere,
}

impl Cuts {
    /// Looks through all tokens that merging can reach.
    pub(super) fn of(vocab: &Vocab) -> Self {
        let reaches_over = |text: &str| text.trim_start_matches(' ').contains(' ');
        if mergeable(vocab).any(|(_, text)| reaches_over(text)) {
            Self::Nowhere
        } else {
            Self::BeforeBlanks
        }
    }

    /// The end of the word that begins at `begin`: blanks, then anything up to the next blank.
    #[inline]
    pub(super) fn word_end(self, text: &str, begin: usize) -> usize {
        if self == Self::Nowhere {
            return text.len();
        }
        let rest = &text[begin..];
        let mut at = text.len() - rest.trim_start_matches([' ', BLANK]).len();
        while let Some(found) = memchr::memchr2(b' ', BLANK_LEAD, &text.as_bytes()[at..]) {
            at += found;
            if text[at..].starts_with([' ', BLANK]) {
                return at;
            }
            // Another character with that first byte; all of them are as long as the blank.
            at += BLANK.len_utf8();
        }
        text.len()
    }

    /// The first position at or after `from` at which text may be cut in two.
    pub(super) fn safe_cut(self, text: &str, from: usize) -> Option<usize> {
        if self == Self::Nowhere {
            return None;
        }
        let before = |at: usize| text[..at].chars().next_back();
        memchr::memchr_iter(b' ', text.as_bytes().get(from..)?)
            .map(|found| from + found)
            .find(|at| before(*at).is_some_and(|c| c != BLANK && !c.is_whitespace()))
    }
}

/// The tokens of single characters, and the pairs that become tokens.
pub(super) fn merges(header: &Header, vocab: &Vocab) -> Result<(Chars, Vec<Rule>), LoadError> {
    let ranks = ranks(header, vocab)?;
    let chars = chars(vocab)?;
    let ids: HashMap<&str, u32> = mergeable(vocab).map(|(id, text)| (text, id)).collect();
    let token = |text: &str| {
        let mut characters = text.chars();
        match (characters.next(), characters.next()) {
            (Some(c), None) => chars.tokens.get(&c).copied(),
            _ => ids.get(text).copied(),
        }
    };
    let mut rules = Vec::new();
    // Of two tokens of one spelling the later one is meant.
    for (id, text) in mergeable(vocab).filter(|(id, text)| ids.get(text) == Some(id)) {
        for (at, _) in text.char_indices().skip(1) {
            let (left, right) = text.split_at(at);
            if let (Some(left), Some(right)) = (token(left), token(right)) {
                rules.push(Rule {
                    left,
                    right,
                    token: id,
                    rank: ranks[id as usize],
                });
            }
        }
    }
    Ok((chars, rules))
}

/// The tokens that merging can reach, blanks in place. A token with a blank of its own would not
/// be found by the reference either.
pub(super) fn mergeable(vocab: &Vocab) -> impl Iterator<Item = (u32, &str)> {
    let entries = vocab.entries.iter().enumerate();
    entries.filter_map(|(id, entry)| {
        let text = std::str::from_utf8(&entry.bytes).ok()?;
        (entry.is_mergeable && !text.is_empty()).then_some((id as u32, text))
    })
}

fn chars(vocab: &Vocab) -> Result<Chars, LoadError> {
    let mut bytes = [0; 256];
    for (byte, token) in vocab.byte_tokens().into_iter().enumerate() {
        bytes[byte] = token.ok_or_else(|| {
            let why =
                format!("has no token <0x{byte:02X}> of type 6 (byte); convert the model again");
            bad("tokenizer.ggml.tokens", why)
        })?;
    }
    let mut chars = Chars {
        tokens: HashMap::with_hasher(hasher()),
        bytes,
        stand_in_first: vocab.entries.len() as u32,
        stand_ins: Vec::new(),
    };
    for (id, text) in mergeable(vocab) {
        let mut characters = text.chars();
        if let (Some(c), None) = (characters.next(), characters.next()) {
            chars.tokens.insert(c, id);
        }
    }
    // A blank always: where nothing begins with it, it is spelled in the bytes of its own sign.
    for c in mergeable(vocab)
        .flat_map(|(_, text)| text.chars())
        .chain([' '])
    {
        chars.tokens.entry(c).or_insert_with(|| {
            chars.stand_ins.push(if c == ' ' { BLANK } else { c });
            chars.stand_in_first + chars.stand_ins.len() as u32 - 1
        });
    }
    let blank = chars.tokens[&' '];
    chars.tokens.insert(BLANK, blank);
    Ok(chars)
}

/// Each token's rank: how many higher scores there are.
fn ranks(header: &Header, vocab: &Vocab) -> Result<Vec<u32>, LoadError> {
    let values = array(header, SCORES)?;
    if values.len() != vocab.entries.len() {
        let why = format!("{} scores for {} tokens", values.len(), vocab.entries.len());
        return Err(bad(SCORES, why));
    }
    let mut scores = Vec::with_capacity(values.len());
    for (id, value) in values.iter().enumerate() {
        match value.as_f64() {
            // Adding 0 makes one zero of both.
            Some(score) if !score.is_nan() => scores.push(score + 0.0),
            _ => {
                return Err(bad(
                    SCORES,
                    format!("entry {id} is {value:?}, not a number"),
                ));
            }
        }
    }
    let mut sorted = scores.clone();
    sorted.sort_unstable_by(|a, b| b.total_cmp(a));
    sorted.dedup();
    let rank = |score: &f64| sorted.partition_point(|higher| higher > score) as u32;
    Ok(scores.iter().map(rank).collect())
}

/// A token of the file; none where it says that it is a byte, and is not.
pub(super) fn entry(kind: Kind, text: &str) -> Option<Entry> {
    let bytes = match kind {
        Kind::Normal => text.replace(BLANK, " ").into_bytes(),
        Kind::Control => Vec::new(),
        Kind::UserDefined => text.as_bytes().to_vec(),
        Kind::Byte => {
            let hex = text.strip_prefix("<0x")?.strip_suffix('>')?;
            vec![u8::from_str_radix(hex, 16).ok()?]
        }
    };
    Some(Entry {
        kind,
        text: text.to_owned(),
        bytes,
        is_mergeable: kind == Kind::Normal && !text.contains(' '),
    })
}
