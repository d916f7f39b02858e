//! What was read before, by the client's own bytes.
//!
//! An agent's request is its last one with some messages more. So what a message, or the tools,
//! came to (parsed, checked, in its one spelling) is remembered under its text, and the next turn
//! reads what is new. The whole text is compared, not a hash of it. Entries belong to a scope,
//! which tenants do not share: the time to read a request must not tell what another has sent.
//!
//! Only what is sound is remembered. What is not, or what depends on where it stands, is left to
//! the full way of reading, which refuses by name; so the two ways have the same answers, and the
//! full one is the slow twin of this one.
//!
//! Bounded by bytes, in shards of two generations each, like the prompt crate's segments: a full
//! young generation becomes the old one, and a hit in the old one moves its entry over.

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher, Hasher};
use std::sync::{Arc, Mutex, PoisonError};

use foldhash::quality::RandomState;
use serde_json::Value;

use crate::elements::values;
use crate::normalise::Options;
use crate::shared::Shared;

/// Locks to spread callers over.
const SHARDS: usize = 16;
/// What a reading takes besides its text: as values and as text again, some three times as much.
const BYTES_PER_TEXT_BYTE: usize = 4;
/// Tables, counts and allocations of an entry.
const ENTRY_OVERHEAD_BYTES: usize = 512;

/// A bounded, thread-safe memory of what texts were read as.
#[derive(Debug)]
pub struct Known {
    shards: [Mutex<Shard>; SHARDS],
    hasher: RandomState,
    generation_bytes_max: usize,
}

/// What a text is read as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// The first message of a chat request.
    First,
    /// A later message of a chat request.
    Message,
    /// The tools of a chat request.
    Tools,
    /// `system` of a Messages request.
    System,
    /// A message of a Messages request.
    Item,
    /// The tools of a Messages request.
    ItemTools,
    /// `instructions` of a Responses request.
    Instructions,
    /// An item of a Responses request's input.
    Input,
    /// Items that follow each other and are the model's.
    Run,
    /// The tools of a Responses request.
    InputTools,
}

/// A message or tools of a chat request.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    /// In its one spelling.
    pub(crate) value: Shared,
    /// Whether that is another than the client's.
    pub(crate) is_changed: bool,
}

/// What came of reading a text: of each kind another type.
type Reading = dyn Any + Send + Sync;

/// How one tenant's requests are read.
#[derive(Debug, Clone, Copy)]
pub struct Reader<'k> {
    known: &'k Known,
    scope: &'k str,
    pub(crate) options: Options,
}

#[derive(Debug, Default)]
struct Shard {
    young: Generation,
    old: Generation,
}

#[derive(Debug, Default)]
struct Generation {
    /// One a hash: a second text with the same takes the first one's place.
    entries: HashMap<u64, Arc<Entry>, RandomState>,
    bytes: usize,
}

struct Entry {
    kind: Kind,
    options: Options,
    scope: Box<str>,
    text: Box<str>,
    reading: Arc<Reading>,
}

impl Known {
    /// A memory of at most about so many bytes. With 0 it holds nothing.
    pub fn new(bytes_max: usize) -> Self {
        Self {
            shards: std::array::from_fn(|_| Mutex::default()),
            hasher: RandomState::default(),
            generation_bytes_max: bytes_max / SHARDS / 2,
        }
    }

    /// The way to read requests of a scope, with these spellings.
    pub fn reader<'k>(&'k self, scope: &'k str, options: Options) -> Reader<'k> {
        Reader {
            known: self,
            scope,
            options,
        }
    }

    /// Bytes held now; at most about the bound given to `new`.
    pub fn held_bytes(&self) -> usize {
        let held = |shard: &Mutex<Shard>| {
            let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            shard.young.bytes + shard.old.bytes
        };
        self.shards.iter().map(held).sum()
    }

    fn shard(&self, hash: u64) -> std::sync::MutexGuard<'_, Shard> {
        // The tables use a hash's low bits and its top seven.
        let shard = (hash >> 40) as usize % SHARDS;
        self.shards[shard]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reader<'_> {
    /// The spellings that are made one.
    pub fn options(&self) -> Options {
        self.options
    }

    /// What a text was read as before.
    pub(crate) fn recall<T: Any + Send + Sync>(&self, kind: Kind, text: &str) -> Option<Arc<T>> {
        let hash = self.hash(kind, text);
        let entry = self
            .known
            .shard(hash)
            .find(hash, self.known.generation_bytes_max)?;
        // Outside of the lock: others wait for it, and the text may be long.
        let is_same = *entry.text == *text
            && entry.kind == kind
            && entry.options == self.options
            && *entry.scope == *self.scope;
        is_same.then(|| Arc::clone(&entry.reading).downcast().ok())?
    }

    /// Remembers what a text was read as.
    pub(crate) fn remember<T: Any + Send + Sync>(&self, kind: Kind, text: &str, reading: Arc<T>) {
        let entry = Entry {
            kind,
            options: self.options,
            scope: self.scope.into(),
            text: text.into(),
            reading,
        };
        let hash = self.hash(kind, text);
        let bytes_max = self.known.generation_bytes_max;
        self.known.shard(hash).put(hash, Arc::new(entry), bytes_max);
    }

    /// What each element of an array was read as: those that are not remembered are read now, and
    /// remembered. None where one cannot be.
    pub(crate) fn each<T: Any + Send + Sync>(
        &self,
        kind: Kind,
        (array, elements): (&str, &[&str]),
        read: impl Fn(Value) -> Option<T>,
    ) -> Option<Vec<Arc<T>>> {
        let mut items: Vec<Option<Arc<T>>> = elements
            .iter()
            .map(|element| self.recall(kind, element))
            .collect();
        let mut at = 0;
        while at < items.len() {
            let run = items[at..].iter().take_while(|item| item.is_none()).count();
            if run == 0 {
                at += 1;
                continue;
            }
            let run = &elements[at..at + run];
            for (value, element) in values(array, run)?.into_iter().zip(run) {
                let item = Arc::new(read(value)?);
                self.remember(kind, element, Arc::clone(&item));
                items[at] = Some(item);
                at += 1;
            }
        }
        items.into_iter().collect()
    }

    fn hash(&self, kind: Kind, text: &str) -> u64 {
        let mut hasher = self.known.hasher.build_hasher();
        hasher.write_u8(kind as u8);
        hasher.write(self.scope.as_bytes());
        // All of it: long texts of agents differ in a number somewhere, and would take each
        // other's place (tried: turns cost more, not less).
        hasher.write(text.as_bytes());
        hasher.finish()
    }
}

impl Shard {
    fn find(&mut self, hash: u64, bytes_max: usize) -> Option<Arc<Entry>> {
        if let Some(entry) = self.young.entries.get(&hash) {
            return Some(Arc::clone(entry));
        }
        let entry = self.old.take(hash)?;
        self.put(hash, Arc::clone(&entry), bytes_max);
        Some(entry)
    }

    fn put(&mut self, hash: u64, entry: Arc<Entry>, bytes_max: usize) {
        let bytes = entry.bytes();
        if bytes > bytes_max {
            return;
        }
        if self.young.bytes + bytes > bytes_max {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.take(hash);
        self.young.bytes += bytes;
        self.young.entries.insert(hash, entry);
    }
}

impl Generation {
    fn take(&mut self, hash: u64) -> Option<Arc<Entry>> {
        let entry = self.entries.remove(&hash)?;
        self.bytes -= entry.bytes();
        Some(entry)
    }
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut entry = f.debug_struct("Entry");
        entry.field("kind", &self.kind).field("text", &self.text);
        entry.finish_non_exhaustive()
    }
}

impl Entry {
    fn bytes(&self) -> usize {
        self.text.len() * BYTES_PER_TEXT_BYTE + self.scope.len() + ENTRY_OVERHEAD_BYTES
    }
}
