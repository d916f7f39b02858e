//! What do lookups read?
//!
//! Keys lie in runs: each key follows the one before it, and what else follows a key in the middle
//! begins a run of its own. A run is published whole, as a [`View`], and exchanged for another
//! when it changes: readers keep what they have loaded for as long as they look at it, and wait for
//! nobody. Keys behind a view's end may be written while it is read; those before it are final.
//! What most lookups need of a run (its length, its last key, and who holds it, where a few hold all
//! of it) also lies in its slot, one line of the cache, under a version that is odd while the writer
//! is at it; a reader that meets an odd version, or a version that has changed, takes the view.

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, OnceLock};

use arc_swap::{ArcSwap, ArcSwapOption, Guard};

use super::heads::{TABLES, Words};
use super::spans::{Holder, Span};
use crate::block::BlockHash;
use crate::ids::NodeId;

/// Runs in the first chunk of slots; each further chunk is twice as large.
const SLOTS_FIRST: usize = 1024;
const CHUNKS: usize = 23;
/// Numbers of runs end here: as many blocks fit in no memory.
pub(super) const RUNS_MAX: usize = (SLOTS_FIRST << CHUNKS) - SLOTS_FIRST;
/// Holders that a slot has room for, and those in one of its words.
const HOLDERS: usize = 12;
const WORD_HOLDERS: usize = 4;
/// Bits of a holder in such a word.
const HOLDER_BITS: usize = 16;

/// A node as lookups see it.
pub(super) struct Shown {
    /// None where the number is free.
    pub(super) id: Option<NodeId>,
    /// Tokens in its blocks, by its last event.
    pub(super) block_tokens: AtomicUsize,
}

impl Clone for Shown {
    fn clone(&self) -> Self {
        Self {
            id: self.id.clone(),
            block_tokens: AtomicUsize::new(self.block_tokens.load(Ordering::Relaxed)),
        }
    }
}

/// What changes seldom.
#[derive(Clone)]
pub(super) struct Snapshot {
    pub(super) tables: [Words; TABLES],
    /// The node of each number.
    pub(super) nodes: Arc<[Shown]>,
}

/// All that lookups read.
pub(super) struct Published {
    pub(super) snapshot: ArcSwap<Snapshot>,
    chunks: [OnceLock<Box<[Slot]>>; CHUNKS],
    /// Where chains that begin with a key last went on to a second run; written by lookups. Keys
    /// share hints.
    hints: Box<[AtomicU32]>,
}

/// First keys that are told apart by hints: 16 KiB, for more prompts than are hot at a time.
const HINTS: usize = 4096;

impl Published {
    pub(super) fn new(snapshot: Snapshot) -> Self {
        Self {
            snapshot: ArcSwap::from_pointee(snapshot),
            chunks: [const { OnceLock::new() }; CHUNKS],
            hints: (0..HINTS).map(|_| AtomicU32::new(0)).collect(),
        }
    }

    /// Where chains that begin with this key tend to go on to a second run; 0 where nothing is known.
    pub(super) fn hint(&self, first: BlockHash) -> usize {
        self.hints[hint_of(first)].load(Ordering::Relaxed) as usize
    }

    pub(super) fn set_hint(&self, first: BlockHash, place: usize) {
        let place = u32::try_from(place).unwrap_or(0);
        self.hints[hint_of(first)].store(place, Ordering::Relaxed);
    }

    /// A run's place, if one was ever made there.
    pub(super) fn slot(&self, run: u32) -> Option<&Slot> {
        let (chunk, at) = place(run);
        self.chunks[chunk].get()?.get(at)
    }

    /// Exchanges what readers see of a run.
    pub(super) fn show(&self, run: u32, view: Option<View>) {
        let (chunk, at) = place(run);
        let empty = || (0..SLOTS_FIRST << chunk).map(|_| Slot::default()).collect();
        self.chunks[chunk].get_or_init(empty)[at].show(view);
    }
}

/// What is shown of a run: one line of the cache.
#[derive(Default)]
#[repr(align(64))]
pub(super) struct Slot {
    version: AtomicU64,
    view: ArcSwapOption<View>,
    last: [AtomicU64; 2],
    length: AtomicU32,
    /// Holders, all of which hold all keys; more than fit where that cannot be said.
    held: AtomicU32,
    holders: [AtomicU64; HOLDERS / WORD_HOLDERS],
}

/// A run of which a chain has all keys, as far as its slot tells.
pub(super) struct Brief {
    pub(super) version: u64,
    pub(super) length: usize,
    spans: [Span; HOLDERS],
    held: usize,
}

impl Brief {
    pub(super) fn spans(&self) -> &[Span] {
        &self.spans[..self.held]
    }
}

impl Slot {
    pub(super) fn view(&self) -> Guard<Option<Arc<View>>> {
        self.view.load()
    }

    /// The version of the view that is shown; odd while it changes.
    pub(super) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// The run, if the slot alone tells that the chain has all its keys, and who holds them.
    pub(super) fn brief(&self, chain: &[BlockHash]) -> Option<Brief> {
        let version = self.version.load(Ordering::Acquire);
        let length = self.length.load(Ordering::Relaxed) as usize;
        let held = self.held.load(Ordering::Relaxed) as usize;
        let last = chain.get(length.wrapping_sub(1))?;
        let own = [&self.last[0], &self.last[1]].map(|word| word.load(Ordering::Relaxed));
        if words(*last) != own || held > HOLDERS {
            return None;
        }
        let mut spans = [Span::all(Holder::new(0, 0), length); HOLDERS];
        for (spans, word) in spans[..held].chunks_mut(WORD_HOLDERS).zip(&self.holders) {
            let mut word = word.load(Ordering::Relaxed);
            for span in spans {
                span.holder = Holder::from_word(word);
                word >>= HOLDER_BITS;
            }
        }
        // What was read above is read before the version is read again.
        fence(Ordering::Acquire);
        let is_unchanged = self.version.load(Ordering::Relaxed) == version;
        (version.is_multiple_of(2) && is_unchanged).then_some(Brief {
            version,
            length,
            spans,
            held,
        })
    }

    /// One writer at a time.
    fn show(&self, view: Option<View>) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version + 1, Ordering::Relaxed);
        // The odd version is seen before anything that changes under it.
        fence(Ordering::Release);
        let view = view.map(|view| View {
            version: version + 2,
            ..view
        });
        let (length, last, spans) = match &view {
            Some(view) => (view.length, view.last, view.spans()),
            None => (0, BlockHash::ROOT, &[][..]),
        };
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        self.length.store(count(length), Ordering::Relaxed);
        for (slot, word) in self.last.iter().zip(words(last)) {
            slot.store(word, Ordering::Relaxed);
        }
        let is_whole = |span: &Span| *span == Span::all(span.holder, length);
        let is_brief = spans.len() <= HOLDERS && spans.iter().all(is_whole);
        let held = if is_brief { spans.len() } else { HOLDERS + 1 };
        self.held.store(count(held), Ordering::Relaxed);
        for (slot, spans) in self.holders.iter().zip(spans.chunks(WORD_HOLDERS)) {
            let word = spans.iter().rev().fold(0, |word, span| {
                word << HOLDER_BITS | u64::from(span.holder.word())
            });
            slot.store(word, Ordering::Relaxed);
        }
        self.view.store(view.map(Arc::new));
        self.version.store(version + 2, Ordering::Release);
    }
}

fn hint_of(first: BlockHash) -> usize {
    usize::try_from(first.short() % HINTS as u64).expect("below the number of hints")
}

fn words(hash: BlockHash) -> [u64; 2] {
    let (words, _) = hash.0.as_chunks::<8>();
    [words[0], words[1]].map(u64::from_le_bytes)
}

fn place(run: u32) -> (usize, usize) {
    let at = run as usize + SLOTS_FIRST;
    let chunk = (at.ilog2() - SLOTS_FIRST.ilog2()) as usize;
    (chunk, at - (SLOTS_FIRST << chunk))
}

/// Room for the keys of a run. Words, since a reader may look at the first of them while the writer
/// adds more behind.
pub(super) struct Keys(Box<[AtomicU64]>);

impl Keys {
    pub(super) fn with_room(keys: usize) -> Self {
        Self((0..keys * 2).map(|_| AtomicU64::new(0)).collect())
    }

    pub(super) fn room(&self) -> usize {
        self.0.len() / 2
    }

    pub(super) fn get(&self, at: usize) -> BlockHash {
        let mut hash = [0; 16];
        let (low, high) = hash.split_at_mut(8);
        low.copy_from_slice(&self.0[at * 2].load(Ordering::Relaxed).to_le_bytes());
        high.copy_from_slice(&self.0[at * 2 + 1].load(Ordering::Relaxed).to_le_bytes());
        BlockHash(hash)
    }

    pub(super) fn set(&self, at: usize, hash: BlockHash) {
        for (slot, word) in self.0[at * 2..].iter().zip(words(hash)) {
            slot.store(word, Ordering::Relaxed);
        }
    }

    /// How many keys from `from` on, out of `to`, are those of a chain. Where two chains agree they
    /// agree on everything before, so the place where they part can be searched for.
    pub(super) fn common(&self, from: usize, to: usize, chain: &[BlockHash]) -> usize {
        let length = (to - from).min(chain.len());
        if length == 0 || self.get(from) != chain[0] {
            return 0;
        }
        if self.get(from + length - 1) == chain[length - 1] {
            return length;
        }
        let (mut same, mut differs) = (1, length - 1);
        while same < differs {
            let middle = usize::midpoint(same, differs);
            if self.get(from + middle) == chain[middle] {
                same = middle + 1;
            } else {
                differs = middle;
            }
        }
        same
    }
}

/// A run as readers see it.
pub(super) struct View {
    /// Its slot's. A slot never has the same twice.
    pub(super) version: u64,
    keys: Arc<Keys>,
    length: usize,
    /// The last key again: a chain that has it there has all keys, and most chains do.
    last: BlockHash,
    spans: Box<[Span]>,
}

impl View {
    /// `length` is above 0.
    pub(super) fn new(keys: &Arc<Keys>, length: usize, spans: &[Span]) -> Self {
        Self {
            version: 0,
            keys: Arc::clone(keys),
            length,
            last: keys.get(length - 1),
            spans: spans.into(),
        }
    }

    /// Sorted by holder and place.
    pub(super) fn spans(&self) -> &[Span] {
        &self.spans
    }

    pub(super) fn length(&self) -> usize {
        self.length
    }

    /// How many leading keys are those of a chain.
    pub(super) fn common(&self, chain: &[BlockHash]) -> usize {
        if chain.get(self.length - 1) == Some(&self.last) {
            return self.length;
        }
        self.keys.common(0, self.length, chain)
    }
}
