//! Which tokens did this text become last time?
//!
//! Text between special tokens is encoded independently of what surrounds it, and may further be
//! cut at safe places (`safe_cut`) without changing its tokens. So a conversation is remembered
//! piece by piece, cuts depend only on the text before them, and a turn that appends to a known
//! prefix encodes its new part and at most one piece of the old.
//!
//! A hit compares the whole text, so that no crafted hash collision can pass another text's tokens
//! off as one's own. Entries belong to a scope: whoever shares a cache between tenants gives each
//! its own (`for_scope`), or the time to encode would tell one tenant what another has sent.
//!
//! Bounded by bytes. Each shard keeps a young and an old generation; when the young one is full it
//! becomes the old one and the old one is dropped, while a hit in the old one moves the entry
//! over. That is least-recently-used within a factor of two, without lists or per-hit writes.
//!
//! Left out on purpose: persistence, and remembering whole conversations: copying known tokens
//! costs microseconds at 64 KB (docs/MEASUREMENTS.md), less than what finding the longest known
//! conversation would.

use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use foldhash::quality::RandomState;
use hashbrown::HashTable;

use crate::answers::Entry as AnswerEntry;
use crate::counts::{Counts, SegmentCounts};
use crate::tokenizer::{Piece, Place, Tokenizer};

/// Pieces are cut at the first safe place at or after this many bytes: long enough that a look-up
/// costs nothing per byte, short enough that re-encoding the last piece of a growing text does not
/// matter (2 KB is about 0.1 ms).
const PIECE_BYTES: usize = 2048;
/// Shorter text is encoded afresh: that costs what a look-up costs.
const KNOWN_BYTES_MIN: usize = 24;
/// Locks to spread callers over; a power of two well above the cores of a gateway's hot threads.
const SHARDS: usize = 16;
/// What an entry costs besides its text and tokens: the entry, its table slot, two allocations.
const ENTRY_OVERHEAD_BYTES: usize = 112;

/// A bounded, thread-safe memory of text segments and their tokens. Cloning shares it.
#[derive(Debug, Clone)]
pub struct SegmentCache {
    shared: Arc<Shared>,
    scope: Arc<str>,
}

#[derive(Debug)]
struct Shared {
    shards: [Mutex<Shard>; SHARDS],
    hasher: RandomState,
    counts: Counts,
    /// Set with the first answer; until then nothing looks for any.
    holds_answers: AtomicBool,
}

#[derive(Debug)]
struct Shard {
    young: Generation,
    old: Generation,
    generation_bytes_max: usize,
}

#[derive(Debug, Default)]
struct Generation {
    entries: HashTable<Entry>,
    bytes: usize,
}

#[derive(Debug)]
struct Entry {
    hash: u64,
    /// Which tokenizer the tokens are of; of an answer, what stands before it as well.
    tokenizer: u64,
    scope: Arc<str>,
    text: Box<str>,
    tokens: Box<[u32]>,
}

/// What an entry is found by.
#[derive(Clone, Copy)]
struct Key<'a> {
    hash: u64,
    tokenizer: u64,
    scope: &'a str,
    text: &'a str,
}

impl SegmentCache {
    /// A cache that holds at most about `bytes_max` bytes, its own bookkeeping included. With 0 it
    /// holds nothing.
    pub fn new(bytes_max: usize) -> Self {
        let shard = || {
            let generation_bytes_max = bytes_max / SHARDS / 2;
            let (young, old) = (Generation::default(), Generation::default());
            Mutex::new(Shard {
                young,
                old,
                generation_bytes_max,
            })
        };
        let shared = Shared {
            shards: std::array::from_fn(|_| shard()),
            hasher: RandomState::default(),
            counts: Counts::default(),
            holds_answers: AtomicBool::new(false),
        };
        Self {
            shared: Arc::new(shared),
            scope: Arc::from(""),
        }
    }

    /// The same memory and bound, with entries that no other scope can see.
    pub fn for_scope(&self, scope: &str) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
            scope: Arc::from(scope),
        }
    }

    /// What was encoded and what was reused, over all scopes.
    pub fn counts(&self) -> SegmentCounts {
        self.shared.counts.read()
    }

    /// Bytes held now, over all scopes; at most the bound given to `new`.
    pub fn held_bytes(&self) -> usize {
        let held = |shard: &Mutex<Shard>| {
            let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            shard.young.bytes + shard.old.bytes
        };
        self.shared.shards.iter().map(held).sum()
    }

    /// Appends the tokens of text that holds no control tokens.
    pub(crate) fn push_text(&self, tokenizer: &Tokenizer, text: &str, tokens: &mut Vec<u32>) {
        for piece in tokenizer.pieces_of_text(text) {
            match piece {
                Piece::Token(token) => tokens.push(token),
                Piece::Text(text) => self.push_plain(tokenizer, text, tokens),
            }
        }
    }

    /// Appends the tokens of text that holds no special tokens at all, and stands at the beginning
    /// or behind one.
    pub(crate) fn push_plain(&self, tokenizer: &Tokenizer, text: &str, tokens: &mut Vec<u32>) {
        let mut counts = SegmentCounts::default();
        let mut rest = text;
        let mut next = Place::Begin;
        while !rest.is_empty() {
            let cut = if rest.len() > PIECE_BYTES {
                tokenizer.safe_cut(rest, PIECE_BYTES)
            } else {
                None
            };
            let (piece, behind) = rest.split_at(cut.unwrap_or(rest.len()));
            rest = behind;
            let place = std::mem::replace(&mut next, Place::Inside);
            let begin = tokens.len();
            if piece.len() < KNOWN_BYTES_MIN {
                tokenizer.push_plain(piece, place, tokens);
                counts.encoded(piece, &tokens[begin..]);
                continue;
            }
            let key = self.key(tokenizer.fingerprint_at(place), piece);
            if self.shard(key.hash).push_known(&key, tokens) {
                counts.reused(piece, &tokens[begin..]);
                continue;
            }
            tokenizer.push_plain(piece, place, tokens);
            counts.encoded(piece, &tokens[begin..]);
            self.shard(key.hash)
                .insert(&key, &self.scope, &tokens[begin..]);
        }
        self.shared.counts.add(&counts);
    }

    /// Whether an answer was ever remembered, in any scope.
    pub(crate) fn holds_answers(&self) -> bool {
        self.shared.holds_answers.load(Ordering::Relaxed)
    }

    /// A running fingerprint of a prompt's tokens.
    pub(crate) fn prefix(&self) -> Prefix {
        Prefix {
            hasher: self.shared.hasher.build_hasher(),
            tokens: 0,
        }
    }

    /// Appends the tokens of an answer that was remembered behind this prefix; false if it was not.
    pub(crate) fn push_answer(
        &self,
        tokenizer: &Tokenizer,
        prefix: u64,
        text: &str,
        tokens: &mut Vec<u32>,
    ) -> bool {
        let key = self.key(self.behind(tokenizer, prefix), text);
        let begin = tokens.len();
        let is_known = self.shard(key.hash).push_known(&key, tokens);
        if is_known {
            let mut counts = SegmentCounts::default();
            counts.reused(text, &tokens[begin..]);
            self.shared.counts.add(&counts);
        }
        is_known
    }

    /// Remembers an answer. A later one of the same text behind the same prefix takes its place.
    pub(crate) fn put_answer(&self, tokenizer: &Tokenizer, answer: AnswerEntry) {
        let AnswerEntry {
            prefix,
            text,
            tokens,
        } = answer;
        let key = self.key(self.behind(tokenizer, prefix), &text);
        let mut shard = self.shard(key.hash);
        shard.remove(&key);
        shard.insert(&key, &self.scope, &tokens);
        drop(shard);
        self.shared.holds_answers.store(true, Ordering::Relaxed);
    }

    /// What answers of this tokenizer behind this prefix are kept under.
    fn behind(&self, tokenizer: &Tokenizer, prefix: u64) -> u64 {
        let mut hasher = self.shared.hasher.build_hasher();
        hasher.write_u64(tokenizer.fingerprint());
        hasher.write_u64(prefix);
        hasher.finish()
    }

    fn key<'a>(&'a self, tokenizer: u64, text: &'a str) -> Key<'a> {
        let mut hasher = self.shared.hasher.build_hasher();
        hasher.write_u64(tokenizer);
        hasher.write(self.scope.as_bytes());
        hasher.write(text.as_bytes());
        Key {
            hash: hasher.finish(),
            tokenizer,
            scope: &self.scope,
            text,
        }
    }

    fn shard(&self, hash: u64) -> std::sync::MutexGuard<'_, Shard> {
        // The tables use a hash's low bits and its top seven; the shard uses others.
        let shard = (hash >> 40) as usize % SHARDS;
        self.shared.shards[shard]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// A fingerprint over the tokens of a growing prompt; each token is read once.
#[derive(Clone)]
pub(crate) struct Prefix {
    hasher: <RandomState as BuildHasher>::Hasher,
    tokens: usize,
}

impl std::fmt::Debug for Prefix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Prefix")
            .field("tokens", &self.tokens)
            .finish_non_exhaustive()
    }
}

impl Prefix {
    /// The fingerprint of `tokens`, which begin with those of the last call.
    pub(crate) fn of(&mut self, tokens: &[u32]) -> u64 {
        for token in &tokens[self.tokens..] {
            self.hasher.write_u32(*token);
        }
        self.tokens = tokens.len();
        self.hasher.clone().finish()
    }
}

impl Shard {
    /// Appends a known text's tokens; false if it is not known.
    fn push_known(&mut self, key: &Key<'_>, tokens: &mut Vec<u32>) -> bool {
        if let Some(entry) = self.young.entries.find(key.hash, |entry| key.is(entry)) {
            tokens.extend_from_slice(&entry.tokens);
            return true;
        }
        let Some(entry) = self.old.take(key) else {
            return false;
        };
        tokens.extend_from_slice(&entry.tokens);
        self.put(entry);
        true
    }

    fn insert(&mut self, key: &Key<'_>, scope: &Arc<str>, tokens: &[u32]) {
        let known = self
            .young
            .entries
            .find(key.hash, |entry| key.is(entry))
            .is_some();
        if known {
            // Another thread encoded the same text meanwhile.
            return;
        }
        self.put(Entry {
            hash: key.hash,
            tokenizer: key.tokenizer,
            scope: Arc::clone(scope),
            text: Box::from(key.text),
            tokens: Box::from(tokens),
        });
    }

    fn remove(&mut self, key: &Key<'_>) {
        self.young.take(key);
        self.old.take(key);
    }

    fn put(&mut self, entry: Entry) {
        let bytes = entry.bytes();
        if bytes > self.generation_bytes_max {
            return;
        }
        if self.young.bytes + bytes > self.generation_bytes_max {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.bytes += bytes;
        self.young
            .entries
            .insert_unique(entry.hash, entry, |entry| entry.hash);
    }
}

impl Generation {
    fn take(&mut self, key: &Key<'_>) -> Option<Entry> {
        let found = self
            .entries
            .find_entry(key.hash, |entry| key.is(entry))
            .ok()?;
        let (entry, _) = found.remove();
        self.bytes -= entry.bytes();
        Some(entry)
    }
}

impl Entry {
    fn bytes(&self) -> usize {
        self.text.len() + size_of_val::<[u32]>(&self.tokens) + ENTRY_OVERHEAD_BYTES
    }
}

impl Key<'_> {
    fn is(&self, entry: &Entry) -> bool {
        self.hash == entry.hash
            && self.tokenizer == entry.tokenizer
            && *self.text == *entry.text
            && *self.scope == *entry.scope
    }
}
