//! Which nodes hold the keys of one shard, for readers that never wait?
//!
//! An open-addressed table of words, one word a key: 48 bits of the key and 16 that say who holds
//! it. A single holder, which is what most blocks have, is named right there; several are a set of
//! bits further on in the same allocation. One word is read and written in one go, so a reader sees
//! each key as it was at some instant, and a vacated word may be taken by another key at once.
//! A set belongs to one key for the life of its shard and is never given to another: a reader that
//! has found its number may read it at leisure. What was vacated comes back when the shard is
//! built anew, which the writer does beside the old one ([`Shard::rebuilt`]).
//!
//! With the 10 bits that chose the shard, 58 bits of a key count: among ten million blocks, one
//! search in 3 * 10^10 meets a stranger's.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Nodes that can be told apart.
pub(super) const NODES_MAX: usize = 1024;

/// Bits of a word that name holders: 0 for nobody, then the nodes, then the sets.
const HOLDER_BITS: u32 = 16;
const HOLDER_MASK: u64 = (1 << HOLDER_BITS) - 1;
const FIRST_SET: usize = 1 + NODES_MAX;
/// Sets that a shard can number. The 64 million keys in two hands that this makes room for are
/// past any limit that fits in memory.
const SETS_MAX: usize = (1 << HOLDER_BITS) - FIRST_SET;

/// A word that was never taken: every search ends here.
const EMPTY: u64 = 0;
/// A word whose key has no holder any more: a search goes on behind it.
const VACATED: u64 = 1 << HOLDER_BITS;

/// A set of nodes.
pub(super) type Nodes<const W: usize> = [u64; W];

/// What a write did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Write {
    /// Nothing: the node held the key already, or never did.
    Unchanged,
    /// The key has a holder more or less, and others beside it.
    Shared,
    /// The key has its first holder.
    First,
    /// The key has lost its last holder.
    Last,
    /// There is no room; nothing was written.
    NoRoom,
}

/// What a shard's words are used for, kept by the writer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Usage {
    /// Words taken, vacated ones included.
    pub(super) taken: usize,
    /// Keys with a holder.
    pub(super) live: usize,
    /// Sets given out.
    pub(super) sets: usize,
}

/// A shard. Its clones share the words.
#[derive(Clone)]
pub(super) struct Shard {
    /// The words of keys, then the sets of `set_words` words each.
    words: Arc<[AtomicU64]>,
    slots: usize,
    set_words: usize,
}

impl Shard {
    /// A shard without room, whose sets have this many words.
    pub(super) fn empty(set_words: usize) -> Self {
        let words = Arc::from([]);
        Self {
            words,
            slots: 0,
            set_words,
        }
    }

    /// Begins a search. Searches that are begun together wait for memory together.
    pub(super) fn begin(&self, key: u64) -> Begun<'_> {
        let at = home(tag(key), self.slots);
        let word = self
            .words
            .get(at)
            .map_or(EMPTY, |word| word.load(Ordering::Acquire));
        Begun {
            shard: self,
            key,
            at,
            word,
        }
    }

    /// Some of the memory where a key is looked for first.
    pub(super) fn peek(&self, key: u64) -> u64 {
        self.begin(key).word
    }

    /// The nodes that hold a key. `W` is the shard's own `set_words`.
    fn holders<const W: usize>(&self, begun: &Begun<'_>) -> Nodes<W> {
        let mut nodes = [0; W];
        let Ok((_, word)) = self.find_from(begun.key, begun.at, begun.word) else {
            return nodes;
        };
        match holder(word) {
            Holder::Node(node) => {
                // A node that this set has no bit for cannot be there: the writer widens first.
                if let Some(bits) = nodes.get_mut(node / 64) {
                    *bits = 1 << (node % 64);
                }
            }
            Holder::Set(set) => {
                let bits = self.set(set);
                for (node, bits) in nodes.iter_mut().zip(bits) {
                    *node = bits.load(Ordering::Acquire);
                }
            }
        }
        nodes
    }

    /// Makes a node a holder of a key.
    pub(super) fn add(&self, key: u64, node: usize, usage: &mut Usage) -> Write {
        match self.find(key) {
            Ok((at, word)) => match holder(word) {
                Holder::Node(other) if other == node => Write::Unchanged,
                Holder::Node(other) => self.share(at, key, [other, node], usage),
                Holder::Set(set) => {
                    let (bits, bit) = (&self.set(set)[node / 64], 1 << (node % 64));
                    let before = bits.fetch_or(bit, Ordering::AcqRel);
                    match before & bit {
                        0 => Write::Shared,
                        _ => Write::Unchanged,
                    }
                }
            },
            Err(None) => Write::NoRoom,
            Err(Some(at)) => {
                let fresh = self.words[at].load(Ordering::Relaxed) == EMPTY;
                if fresh && usage.taken >= taken_max(self.slots) {
                    return Write::NoRoom;
                }
                usage.taken += usize::from(fresh);
                usage.live += 1;
                self.words[at].store(tag(key) | (1 + node as u64), Ordering::Release);
                Write::First
            }
        }
    }

    /// Gives a key that one node holds a set of two.
    fn share(&self, at: usize, key: u64, nodes: [usize; 2], usage: &mut Usage) -> Write {
        let begin = self.slots + usage.sets * self.set_words;
        if begin >= self.words.len() || usage.sets >= SETS_MAX {
            return Write::NoRoom;
        }
        let set = &self.words[begin..begin + self.set_words];
        for node in nodes {
            set[node / 64].fetch_or(1 << (node % 64), Ordering::Relaxed);
        }
        let name = (FIRST_SET + usage.sets) as u64;
        usage.sets += 1;
        // The bits first: a reader that sees the set's number sees them.
        self.words[at].store(tag(key) | name, Ordering::Release);
        Write::Shared
    }

    /// Makes a node no holder of a key.
    pub(super) fn remove(&self, key: u64, node: usize, usage: &mut Usage) -> Write {
        let Ok((at, word)) = self.find(key) else {
            return Write::Unchanged;
        };
        match holder(word) {
            Holder::Node(other) if other != node => return Write::Unchanged,
            Holder::Node(_) => {}
            Holder::Set(set) => {
                let set = self.set(set);
                let bit = 1 << (node % 64);
                let before = set[node / 64].fetch_and(!bit, Ordering::AcqRel);
                if before & bit == 0 {
                    return Write::Unchanged;
                }
                if set.iter().any(|bits| bits.load(Ordering::Relaxed) != 0) {
                    return Write::Shared;
                }
            }
        }
        self.words[at].store(VACATED, Ordering::Release);
        usage.live -= 1;
        Write::Last
    }

    /// Whether so few keys are left that half of the words would do.
    pub(super) fn is_oversized(&self, usage: Usage) -> bool {
        self.slots > SLOTS_MIN && usage.live < self.slots / 5
    }

    /// A new shard with the same content, room for more, and sets of this many words.
    pub(super) fn rebuilt(&self, usage: Usage, set_words: usize) -> (Self, Usage) {
        let own = &self.words[..self.slots];
        let mut sets = 0;
        if usage.sets > 0 {
            let words = own.iter().map(|word| word.load(Ordering::Relaxed));
            sets = words
                .filter(|word| matches!(self.kept(*word), Some(Holder::Set(_))))
                .count();
        }
        let slots = (usage.live * 2 + 1).next_multiple_of(SLOTS_MIN);
        let room = (sets + sets / 2 + 1).min(SETS_MAX);
        let mut words = vec![EMPTY; slots + room * set_words];
        let mut fresh = Usage {
            taken: usage.live,
            live: usage.live,
            sets: 0,
        };
        for word in own {
            let word = word.load(Ordering::Relaxed);
            let name = match self.kept(word) {
                None => continue,
                Some(Holder::Node(node)) => 1 + node,
                Some(Holder::Set(set)) => {
                    let begin = slots + fresh.sets * set_words;
                    for (copy, bits) in words[begin..].iter_mut().zip(self.set(set)) {
                        *copy = bits.load(Ordering::Relaxed);
                    }
                    fresh.sets += 1;
                    FIRST_SET + fresh.sets - 1
                }
            };
            let tag = word & !HOLDER_MASK;
            let mut at = home(tag, slots);
            while words[at] != EMPTY {
                at = next(at, slots);
            }
            words[at] = tag | name as u64;
        }
        (Self::with_room(words, slots, set_words), fresh)
    }

    /// Who holds the key of a word, if anybody; a set of one is no set any more.
    fn kept(&self, word: u64) -> Option<Holder> {
        if word & HOLDER_MASK == 0 {
            return None;
        }
        Some(match holder(word) {
            Holder::Set(set) => self.only_member(set).map_or(Holder::Set(set), Holder::Node),
            single @ Holder::Node(_) => single,
        })
    }

    fn with_room(words: Vec<u64>, slots: usize, set_words: usize) -> Self {
        let words = words.into_iter().map(AtomicU64::new).collect();
        Self {
            words,
            slots,
            set_words,
        }
    }

    /// Calls `visit` for every key and holder, for integrity checks.
    pub(super) fn for_each(&self, mut visit: impl FnMut(Tag, usize)) {
        for word in &self.words[..self.slots] {
            let word = word.load(Ordering::Relaxed);
            if word & HOLDER_MASK == 0 {
                continue;
            }
            match holder(word) {
                Holder::Node(node) => visit(Tag(word & !HOLDER_MASK), node),
                Holder::Set(set) => {
                    for (at, bits) in self.set(set).iter().enumerate() {
                        each_bit(bits.load(Ordering::Relaxed), |bit| {
                            visit(Tag(word & !HOLDER_MASK), at * 64 + bit);
                        });
                    }
                }
            }
        }
    }

    /// Whether both are clones of one shard.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.words, &other.words)
    }

    /// A key's place and word, or the place where it would go, if there is one.
    fn find(&self, key: u64) -> Result<(usize, u64), Option<usize>> {
        let begun = self.begin(key);
        self.find_from(key, begun.at, begun.word)
    }

    /// The search, from the word at the key's home on.
    fn find_from(
        &self,
        key: u64,
        mut at: usize,
        mut word: u64,
    ) -> Result<(usize, u64), Option<usize>> {
        let slots = &self.words[..self.slots];
        if slots.is_empty() {
            return Err(None);
        }
        let wanted = tag(key);
        let mut vacant = None;
        loop {
            if word & !HOLDER_MASK == wanted && word & HOLDER_MASK != 0 {
                return Ok((at, word));
            }
            if word == EMPTY {
                return Err(Some(vacant.unwrap_or(at)));
            }
            if word == VACATED && vacant.is_none() {
                vacant = Some(at);
            }
            at = next(at, slots.len());
            word = slots[at].load(Ordering::Acquire);
        }
    }

    fn set(&self, set: usize) -> &[AtomicU64] {
        let begin = self.slots + set * self.set_words;
        &self.words[begin..begin + self.set_words]
    }

    fn only_member(&self, set: usize) -> Option<usize> {
        let (mut count, mut last) = (0, 0);
        for (at, bits) in self.set(set).iter().enumerate() {
            each_bit(bits.load(Ordering::Relaxed), |bit| {
                count += 1;
                last = at * 64 + bit;
            });
        }
        (count == 1).then_some(last)
    }
}

/// A search that has read the word at the key's home.
#[derive(Clone, Copy)]
pub(super) struct Begun<'a> {
    shard: &'a Shard,
    key: u64,
    at: usize,
    word: u64,
}

impl Begun<'_> {
    /// The nodes that hold the key.
    pub(super) fn holders<const W: usize>(&self) -> Nodes<W> {
        self.shard.holders(self)
    }
}

/// What a shard keeps of a key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct Tag(u64);

impl Tag {
    pub(super) fn of(key: u64) -> Self {
        Self(tag(key))
    }
}

/// Who holds a key.
#[derive(Clone, Copy)]
enum Holder {
    Node(usize),
    Set(usize),
}

/// Of a word that has a holder.
fn holder(word: u64) -> Holder {
    let name = usize::try_from(word & HOLDER_MASK).expect("16 bits fit");
    if name < FIRST_SET {
        Holder::Node(name.saturating_sub(1))
    } else {
        Holder::Set(name - FIRST_SET)
    }
}

const SLOTS_MIN: usize = 8;

/// Words that may be taken: three of four. After [`Shard::rebuilt`] half of them are: a shard that
/// grows by half is built anew, and a key costs 11 to 16 bytes.
fn taken_max(slots: usize) -> usize {
    slots / 4 * 3
}

/// The low 48 bits of a key; the top ones have chosen the shard.
fn tag(key: u64) -> u64 {
    key << HOLDER_BITS
}

/// Where the search for a key begins. Keys are the first 64 bits of a keyed hash, so they are
/// spread evenly as they are. The order of homes is that of tags: a rebuild then reads and writes
/// from front to back.
fn home(tag: u64, slots: usize) -> usize {
    let product = (tag >> 32) * slots as u64;
    usize::try_from(product >> 32).expect("below the number of slots")
}

fn next(at: usize, slots: usize) -> usize {
    if at + 1 == slots { 0 } else { at + 1 }
}

/// Calls `visit` for each bit that is set.
pub(super) fn each_bit(bits: u64, mut visit: impl FnMut(usize)) {
    let mut rest = bits;
    while rest != 0 {
        visit(rest.trailing_zeros() as usize);
        rest &= rest - 1;
    }
}
