//! Which tokens is this word? Byte-pair encoding: start from single bytes and join, again and
//! again, the neighbouring pair that was learned first, leftmost first among equals.
//!
//! Most words are one token, so every vocabulary entry that encodes to itself is kept in a table
//! (found at load by encoding the whole vocabulary once): no lock, no eviction, one look-up.
//! Other words are merged: short ones by repeated scans, long ones rank by rank with a queue, so
//! that megabytes without a blank stay O(n log n).

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use foldhash::fast::FixedState;
use hashbrown::HashMap;

/// Marks a byte without a token.
const NONE: u32 = u32::MAX;
/// Words up to this many bytes are merged by scanning: below it, a few cache lines beat a queue.
const SCAN_MAX: usize = 32;

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
    byte_tokens: [u32; 256],
    merges: HashMap<u64, Merge, FixedState>,
    words: HashMap<Box<[u8]>, u32, FixedState>,
}

/// Buffers that one call of the tokenizer uses for all of its words.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    symbols: Vec<Symbol>,
    queue: Queue,
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

/// Possible merges, by rank: indices of left symbols. An index is stale once its symbol's merge
/// has another rank. A heap of all of them would touch memory at random for each; here only the
/// ranks are in the heap, and the symbols of one rank are visited in order.
#[derive(Debug, Default)]
struct Queue {
    ranks: BinaryHeap<Reverse<u32>>,
    by_rank: HashMap<u32, Vec<u32>, FixedState>,
    /// Emptied lists, kept for their memory.
    spare: Vec<Vec<u32>>,
}

impl Queue {
    fn push(&mut self, rank: u32, at: u32) {
        let list = self.by_rank.entry(rank).or_insert_with(|| {
            self.ranks.push(Reverse(rank));
            self.spare.pop().unwrap_or_default()
        });
        list.push(at);
    }

    /// The lowest rank and its symbols, leftmost first.
    fn pop(&mut self) -> Option<(u32, Vec<u32>)> {
        let Reverse(rank) = self.ranks.pop()?;
        let mut list = self.by_rank.remove(&rank)?;
        // Runs in order already: the sort merges them.
        list.sort();
        Some((rank, list))
    }

    fn has_below(&self, rank: u32) -> bool {
        self.ranks
            .peek()
            .is_some_and(|Reverse(lowest)| *lowest < rank)
    }

    fn recycle(&mut self, mut list: Vec<u32>) {
        list.clear();
        self.spare.push(list);
    }
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
            self.merge_by_rank(word, scratch, out);
        }
    }

    /// The tokens of a word's bytes. A byte that the vocabulary lacks is dropped and its
    /// neighbours become adjacent, as in the reference.
    fn byte_tokens<'a>(&'a self, word: &'a [u8]) -> impl Iterator<Item = u32> + 'a {
        word.iter()
            .map(|byte| self.byte_tokens[usize::from(*byte)])
            .filter(|token| *token != NONE)
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
        for token in self.byte_tokens(word) {
            tokens[count] = token;
            count += 1;
        }
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
        out.extend_from_slice(&tokens[..count]);
    }

    fn merge_by_rank(&self, word: &[u8], scratch: &mut Scratch, out: &mut Vec<u32>) {
        let Scratch { symbols, queue } = scratch;
        symbols.clear();
        for (at, token) in self.byte_tokens(word).enumerate() {
            let at = at as u32;
            let (previous, next) = (at.wrapping_sub(1), at + 1);
            symbols.push(Symbol {
                token,
                previous,
                next,
                merge: NOTHING,
            });
        }
        let Some(last) = symbols.last_mut() else {
            return;
        };
        last.next = NONE;
        for at in 0..symbols.len() - 1 {
            self.offer(symbols, queue, at);
        }
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
        out.extend(
            symbols
                .iter()
                .map(|symbol| symbol.token)
                .filter(|token| *token != NONE),
        );
    }

    /// Merges the symbol at `at` with its next, if that merge still has this rank.
    fn merge_at(&self, symbols: &mut [Symbol], queue: &mut Queue, rank: u32, at: usize) {
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
    fn offer(&self, symbols: &mut [Symbol], queue: &mut Queue, at: usize) {
        let merge = self.merge(symbols[at].token, symbols[symbols[at].next as usize].token);
        symbols[at].merge = merge;
        if merge.rank != NONE {
            queue.push(merge.rank, at as u32);
        }
    }
}

fn pair(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

fn hasher() -> FixedState {
    FixedState::with_seed(0)
}
