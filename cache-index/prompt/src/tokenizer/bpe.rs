//! Which tokens is this word? Byte-pair encoding: start from single bytes or characters and join,
//! again and again, the neighbouring pair of lowest rank, leftmost first among equals.
//!
//! Most words are one token, so every vocabulary entry that encodes to itself is kept in a table
//! (found at load by encoding the whole vocabulary once): no lock, no eviction, one look-up.
//! Other words are merged: short ones by repeated scans, long ones with a queue (`queue`), so that
//! megabytes without a blank stay O(n log n).

use foldhash::fast::FixedState;
use hashbrown::HashMap;

use super::queue::{ByPlace, ByRank, Pending};

/// Marks a byte without a token.
pub(super) const NONE: u32 = u32::MAX;
/// Words up to this many bytes are merged by scanning: below it, a few cache lines beat a queue.
const SCAN_MAX: usize = 32;

/// Two tokens that may be joined, and what comes of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Rule {
    pub(super) left: u32,
    pub(super) right: u32,
    pub(super) token: u32,
    /// Lower ones come first.
    pub(super) rank: u32,
}

/// Rank and result of a merge.
#[derive(Debug, Clone, Copy)]
struct Merge {
    rank: u32,
    token: u32,
}

/// No merge; its rank is behind all others.
const NOTHING: Merge = Merge {
    rank: NONE,
    token: NONE,
};

/// Merges and whole words of a vocabulary.
///
/// The seed of the tables is fixed: their keys come from the model file, and no request adds any.
#[derive(Debug)]
pub(super) struct Bpe {
    starts: Starts,
    merges: HashMap<u64, Merge, FixedState>,
    words: HashMap<Box<[u8]>, u32, FixedState>,
}

/// What merging starts from.
#[derive(Debug)]
pub(super) enum Starts {
    /// The token of each byte; `NONE` where there is none. Such a byte is dropped and its
    /// neighbours become adjacent, as in the reference.
    Bytes([u32; 256]),
    /// Characters.
    Chars(Chars),
}

/// The tokens of single characters.
#[derive(Debug)]
pub(super) struct Chars {
    pub(super) tokens: HashMap<char, u32, FixedState>,
    /// The tokens of bytes, for characters that have none.
    pub(super) bytes: [u32; 256],
    /// Characters that are no token of their own but begin ones stand for themselves while
    /// merging, from this id on; what is left of them becomes bytes.
    pub(super) stand_in_first: u32,
    pub(super) stand_ins: Vec<char>,
}

/// Buffers that one call of the tokenizer uses for all of its words.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    symbols: Vec<Symbol>,
    by_rank: ByRank,
    by_place: ByPlace,
}

/// A token of the word being merged, linked to its neighbours by index.
#[derive(Debug, Clone, Copy)]
struct Symbol {
    token: u32,
    previous: u32,
    next: u32,
    /// What merging with the next symbol gives.
    merge: Merge,
}

/// What `Bpe` is built from, all in the model file's ids.
pub(super) struct BpeParts<'a> {
    pub(super) starts: Starts,
    pub(super) merges: &'a [Rule],
    /// Ordinary vocabulary entries as bytes.
    pub(super) entries: &'a [(Vec<u8>, u32)],
    /// Which entries may stand for a whole word.
    pub(super) whole_words: WholeWords,
}

/// When is a word that is in the vocabulary that one token?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WholeWords {
    /// When merging leads there.
    WhenMerged,
    /// Always (`ignore_merges` in the reference; Llama 3).
    Always,
}

impl Bpe {
    pub(super) fn new(parts: BpeParts<'_>) -> Self {
        let mut merges = HashMap::with_capacity_and_hasher(parts.merges.len(), hasher());
        for rule in parts.merges {
            let &Rule { rank, token, .. } = rule;
            merges.insert(pair(rule.left, rule.right), Merge { rank, token });
        }
        let mut bpe = Self {
            starts: parts.starts,
            merges,
            words: HashMap::with_hasher(hasher()),
        };
        let mut words = HashMap::with_capacity_and_hasher(parts.entries.len(), hasher());
        let (mut scratch, mut tokens) = (Scratch::default(), Vec::new());
        for (bytes, token) in parts.entries {
            tokens.clear();
            if parts.whole_words == WholeWords::WhenMerged {
                bpe.encode_word(bytes, &mut scratch, &mut tokens);
            }
            if tokens == [*token] || parts.whole_words == WholeWords::Always {
                words.insert(bytes.clone().into_boxed_slice(), *token);
            }
        }
        bpe.words = words;
        bpe
    }

    /// The token of a word that is one token.
    pub(super) fn word(&self, word: &[u8]) -> Option<u32> {
        self.words.get(word).copied()
    }

    /// Appends a word's tokens to `out`.
    #[inline]
    pub(super) fn encode_word(&self, word: &[u8], scratch: &mut Scratch, out: &mut Vec<u32>) {
        if let Some(token) = self.words.get(word) {
            out.push(*token);
        } else if word.len() <= SCAN_MAX {
            self.merge_by_scanning(word, out);
        } else {
            let Scratch { symbols, .. } = scratch;
            match self.starts {
                Starts::Bytes(_) => self.merge_by_rank(word, symbols, &mut scratch.by_rank, out),
                Starts::Chars(_) => self.merge_by_place(word, symbols, &mut scratch.by_place, out),
            }
        }
    }

    /// What merging two tokens gives; of rank `NONE` if nothing.
    #[inline]
    fn merge(&self, left: u32, right: u32) -> Merge {
        self.merges
            .get(&pair(left, right))
            .copied()
            .unwrap_or(NOTHING)
    }

    fn merge_by_scanning(&self, word: &[u8], out: &mut Vec<u32>) {
        let mut tokens = [0u32; SCAN_MAX];
        let mut merges = [NOTHING; SCAN_MAX];
        let mut count = 0;
        // A character has at least as many bytes as tokens.
        self.starts.each(word, |token| {
            tokens[count] = token;
            count += 1;
        });
        for at in 1..count {
            merges[at - 1] = self.merge(tokens[at - 1], tokens[at]);
        }
        while count > 1 {
            let mut best = 0;
            for at in 1..count - 1 {
                if merges[at].rank < merges[best].rank {
                    best = at;
                }
            }
            let merge = merges[best];
            if merge.rank == NONE {
                break;
            }
            tokens[best] = merge.token;
            tokens.copy_within(best + 2..count, best + 1);
            merges.copy_within(best + 1..count - 1, best);
            count -= 1;
            if best > 0 {
                merges[best - 1] = self.merge(tokens[best - 1], merge.token);
            }
            if best + 1 < count {
                merges[best] = self.merge(merge.token, tokens[best + 1]);
            }
        }
        self.starts.push_all(tokens[..count].iter().copied(), out);
    }

    /// Each pair has a rank of its own.
    fn merge_by_rank(
        &self,
        word: &[u8],
        symbols: &mut Vec<Symbol>,
        queue: &mut ByRank,
        out: &mut Vec<u32>,
    ) {
        self.link(word, symbols, queue);
        while let Some((rank, list)) = queue.pop() {
            for (done, at) in list.iter().enumerate() {
                self.merge_at(symbols, queue, rank, *at as usize);
                // Learned merges lead to later ones only; a made-up list may lead back.
                if queue.has_below(rank) {
                    list[done + 1..].iter().for_each(|at| queue.push(rank, *at));
                    break;
                }
            }
            queue.recycle(list);
        }
        self.push_symbols(symbols, out);
    }

    /// Several pairs may share a rank: what a merge leads to can come before all others of it.
    fn merge_by_place(
        &self,
        word: &[u8],
        symbols: &mut Vec<Symbol>,
        queue: &mut ByPlace,
        out: &mut Vec<u32>,
    ) {
        self.link(word, symbols, queue);
        while let Some((rank, at)) = queue.pop() {
            self.merge_at(symbols, queue, rank, at as usize);
        }
        self.push_symbols(symbols, out);
    }

    /// Fills `symbols` with the word's first tokens, and `queue` with what may be merged.
    fn link(&self, word: &[u8], symbols: &mut Vec<Symbol>, queue: &mut impl Pending) {
        symbols.clear();
        self.starts.each(word, |token| {
            let at = symbols.len() as u32;
            symbols.push(Symbol {
                token,
                previous: at.wrapping_sub(1),
                next: at + 1,
                merge: NOTHING,
            });
        });
        if let Some(last) = symbols.last_mut() {
            last.next = NONE;
        }
        for at in 1..symbols.len() {
            self.offer(symbols, queue, at - 1);
        }
    }

    fn push_symbols(&self, symbols: &[Symbol], out: &mut Vec<u32>) {
        let tokens = symbols.iter().map(|symbol| symbol.token);
        self.starts
            .push_all(tokens.filter(|token| *token != NONE), out);
    }

    /// Merges the symbol at `at` with its next, if that merge still has this rank.
    fn merge_at(&self, symbols: &mut [Symbol], queue: &mut impl Pending, rank: u32, at: usize) {
        let left = symbols[at];
        if left.merge.rank != rank {
            return;
        }
        let right = symbols[left.next as usize];
        // The right symbol is dead: no token, and nothing queued for its index holds.
        symbols[left.next as usize].token = NONE;
        symbols[left.next as usize].merge = NOTHING;
        symbols[at].token = left.merge.token;
        symbols[at].next = right.next;
        symbols[at].merge = NOTHING;
        if right.next != NONE {
            symbols[right.next as usize].previous = at as u32;
            self.offer(symbols, queue, at);
        }
        if left.previous != NONE {
            self.offer(symbols, queue, left.previous as usize);
        }
    }

    /// Queues the merge of the symbol at `at` with its next, if there is one.
    fn offer(&self, symbols: &mut [Symbol], queue: &mut impl Pending, at: usize) {
        let merge = self.merge(symbols[at].token, symbols[symbols[at].next as usize].token);
        symbols[at].merge = merge;
        if merge.rank != NONE {
            queue.push(merge.rank, at as u32);
        }
    }
}

impl Starts {
    /// Calls `visit` with the tokens that merging starts from.
    #[inline]
    fn each(&self, word: &[u8], mut visit: impl FnMut(u32)) {
        match self {
            Self::Bytes(tokens) => word
                .iter()
                .map(|byte| tokens[usize::from(*byte)])
                .filter(|token| *token != NONE)
                .for_each(visit),
            Self::Chars(chars) => {
                let text = std::str::from_utf8(word).expect("words are cut between characters");
                for c in text.chars() {
                    match chars.tokens.get(&c) {
                        Some(token) => visit(*token),
                        None => chars.bytes_of(c, &mut visit),
                    }
                }
            }
        }
    }

    /// Appends what merging ends with.
    #[inline]
    fn push_all(&self, tokens: impl Iterator<Item = u32>, out: &mut Vec<u32>) {
        let Self::Chars(chars) = self else {
            out.extend(tokens);
            return;
        };
        for token in tokens {
            match token.checked_sub(chars.stand_in_first) {
                None => out.push(token),
                Some(at) => {
                    chars.bytes_of(chars.stand_ins[at as usize], |token| out.push(token));
                }
            }
        }
    }
}

impl Chars {
    fn bytes_of(&self, c: char, visit: impl FnMut(u32)) {
        let mut buffer = [0; 4];
        let bytes = c.encode_utf8(&mut buffer).bytes();
        bytes
            .map(|byte| self.bytes[usize::from(byte)])
            .for_each(visit);
    }
}

fn pair(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

pub(super) fn hasher() -> FixedState {
    FixedState::with_seed(0)
}
