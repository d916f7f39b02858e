//! Which tokens is this word? Byte-pair encoding: start from single bytes and join, again and
//! again, the neighbouring pair that was learned first, leftmost first among equals.
//!
//! Most words are one token, so every vocabulary entry that encodes to itself is kept in a table
//! (found at load by encoding the whole vocabulary once): no lock, no eviction, one look-up.
//! Other words are merged: short ones by repeated scans, long ones with a heap, so that a megabyte
//! without a blank stays O(n log n).

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use foldhash::fast::FixedState;
use hashbrown::HashMap;

/// Marks a byte without a token.
const NONE: u32 = u32::MAX;
/// Words up to this many bytes are merged by scanning: below it, two cache lines of ranks beat a
/// heap.
const SCAN_MAX: usize = 32;

/// Rank and result of a merge.
#[derive(Debug, Clone, Copy)]
struct Merge {
    rank: u32,
    token: u32,
}

/// Merges and whole words of a vocabulary.
///
/// The seed of the tables is fixed: their keys come from the model file, and no request adds any.
#[derive(Debug)]
pub(super) struct Bpe {
    byte_tokens: [u32; 256],
    merges: HashMap<u64, Merge, FixedState>,
    words: HashMap<Box<[u8]>, u32, FixedState>,
}

/// Buffers that one call of the tokenizer uses for all of its words.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    symbols: Vec<Symbol>,
    heap: BinaryHeap<Reverse<Candidate>>,
}

/// A token of the word being merged, linked to its neighbours by index.
#[derive(Debug, Clone, Copy)]
struct Symbol {
    token: u32,
    previous: u32,
    next: u32,
}

/// A possible merge of the symbol at `at` with its next; stale once either has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    rank: u32,
    at: u32,
    left: u32,
    right: u32,
    token: u32,
}

/// What `Bpe` is built from, all in the model file's ids.
pub(super) struct BpeParts<'a> {
    /// Token of each single byte, where there is one.
    pub(super) byte_tokens: [Option<u32>; 256],
    /// Left, right, result; in order of rank.
    pub(super) merges: &'a [(u32, u32, u32)],
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
    pub(super) fn new(parts: &BpeParts<'_>) -> Self {
        let mut merges = HashMap::with_capacity_and_hasher(parts.merges.len(), hasher());
        for (rank, &(left, right, token)) in parts.merges.iter().enumerate() {
            merges.insert(
                pair(left, right),
                Merge {
                    rank: rank as u32,
                    token,
                },
            );
        }
        let byte_tokens = parts.byte_tokens.map(|token| token.unwrap_or(NONE));
        let mut bpe = Self {
            byte_tokens,
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

    /// Appends a word's tokens to `out`.
    #[inline]
    pub(super) fn encode_word(&self, word: &[u8], scratch: &mut Scratch, out: &mut Vec<u32>) {
        if let Some(token) = self.words.get(word) {
            out.push(*token);
        } else if word.len() <= SCAN_MAX {
            self.merge_by_scanning(word, out);
        } else {
            self.merge_by_heap(word, scratch, out);
        }
    }

    /// The tokens of a word's bytes. A byte that the vocabulary lacks is dropped and its
    /// neighbours become adjacent, as in the reference.
    fn byte_tokens<'a>(&'a self, word: &'a [u8]) -> impl Iterator<Item = u32> + 'a {
        word.iter()
            .map(|byte| self.byte_tokens[usize::from(*byte)])
            .filter(|token| *token != NONE)
    }

    fn merge(&self, left: u32, right: u32) -> Option<Merge> {
        self.merges.get(&pair(left, right)).copied()
    }

    fn merge_by_scanning(&self, word: &[u8], out: &mut Vec<u32>) {
        let mut tokens = [0u32; SCAN_MAX];
        let mut merges = [Merge {
            rank: NONE,
            token: NONE,
        }; SCAN_MAX];
        let nothing = Merge {
            rank: NONE,
            token: NONE,
        };
        let mut count = 0;
        for token in self.byte_tokens(word) {
            tokens[count] = token;
            count += 1;
        }
        for at in 1..count {
            merges[at - 1] = self.merge(tokens[at - 1], tokens[at]).unwrap_or(nothing);
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
                merges[best - 1] = self.merge(tokens[best - 1], merge.token).unwrap_or(nothing);
            }
            if best + 1 < count {
                merges[best] = self.merge(merge.token, tokens[best + 1]).unwrap_or(nothing);
            }
        }
        out.extend_from_slice(&tokens[..count]);
    }

    fn merge_by_heap(&self, word: &[u8], scratch: &mut Scratch, out: &mut Vec<u32>) {
        let Scratch { symbols, heap } = scratch;
        symbols.clear();
        heap.clear();
        for (at, token) in self.byte_tokens(word).enumerate() {
            let at = at as u32;
            symbols.push(Symbol {
                token,
                previous: at.wrapping_sub(1),
                next: at + 1,
            });
        }
        let Some(last) = symbols.last_mut() else {
            return;
        };
        last.next = NONE;
        for at in 1..symbols.len() {
            self.offer(symbols, heap, at as u32 - 1);
        }
        while let Some(Reverse(candidate)) = heap.pop() {
            let left = symbols[candidate.at as usize];
            if left.token != candidate.left || left.next == NONE {
                continue;
            }
            let right = symbols[left.next as usize];
            if right.token != candidate.right {
                continue;
            }
            // The right symbol is dead: no candidate at its index may match again.
            symbols[left.next as usize].token = NONE;
            symbols[candidate.at as usize].token = candidate.token;
            symbols[candidate.at as usize].next = right.next;
            if right.next != NONE {
                symbols[right.next as usize].previous = candidate.at;
                self.offer(symbols, heap, candidate.at);
            }
            if left.previous != NONE {
                self.offer(symbols, heap, left.previous);
            }
        }
        out.extend(
            symbols
                .iter()
                .map(|symbol| symbol.token)
                .filter(|token| *token != NONE),
        );
    }

    /// Puts the merge of the symbol at `at` with its next into the heap, if there is one.
    fn offer(&self, symbols: &[Symbol], heap: &mut BinaryHeap<Reverse<Candidate>>, at: u32) {
        let left = symbols[at as usize];
        let right = symbols[left.next as usize];
        if let Some(Merge { rank, token }) = self.merge(left.token, right.token) {
            heap.push(Reverse(Candidate {
                rank,
                at,
                left: left.token,
                right: right.token,
                token,
            }));
        }
    }
}

fn pair(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

fn hasher() -> FixedState {
    FixedState::with_seed(0)
}
