//! What does an engine say about its KV cache?
//!
//! vLLM's three events as values, whatever their shape on the wire ([`crate::wire`]). Engine
//! hashes are opaque: they name parents and removals within one node and mean nothing elsewhere.
//! Left out: fields that no decision uses (LoRA number, sliding window, locality, ownership).

use std::fmt;

/// An engine's own name for a block.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum EngineHash {
    /// vLLM and SGLang by default; a signed integer is kept as its 64 bits.
    Int(u64),
    /// Our engine (16 bytes), or vLLM told to send digests (32).
    Bytes(Box<[u8]>),
}

impl fmt::Debug for EngineHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(value) => write!(f, "{value}"),
            Self::Bytes(bytes) => bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}")),
        }
    }
}

/// Where the block lies.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Medium {
    /// The memory that attention reads ("GPU", also on a CPU build). An event without a medium
    /// means this one.
    Device,
    /// Host memory ("CPU", "CPU_PINNED").
    Host,
    /// A local drive ("STORAGE", "DISK").
    Disk,
    /// A store shared between nodes ("EXTERNAL").
    Shared,
    /// A name that we do not know.
    Other(Box<str>),
}

/// What kind of attention the block's group serves.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum GroupKind {
    /// The event does not say; then only group 0 is believed.
    #[default]
    Unsaid,
    /// Full attention: a held block stands for its whole prefix.
    Full,
    /// Anything else (sliding window, state space): a held block says nothing about its prefix.
    Other,
}

/// One of the things, beside tokens, that entered a block's hash.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ExtraKey {
    /// A cache salt or an adapter's name: vLLM publishes both untagged.
    Text(Box<str>),
    /// Something that we cannot name (an image's hash): the block cannot be credited.
    Other,
}

/// The extra keys of each block of an event, in order; blocks past the end have none.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ExtraKeys(pub Vec<Vec<ExtraKey>>);

impl ExtraKeys {
    /// No block has any.
    pub fn none() -> Self {
        Self::default()
    }

    /// The first block carries a cache salt.
    pub fn salt(salt: &str) -> Self {
        Self(vec![vec![ExtraKey::Text(salt.into())]])
    }

    /// The keys of the block at `position` in the event.
    pub fn of(&self, position: usize) -> &[ExtraKey] {
        self.0.get(position).map_or(&[], Vec::as_slice)
    }
}

/// One change of a node's cache.
#[derive(Clone, PartialEq, Debug)]
pub enum KvEvent {
    /// Consecutive blocks of one chain are held now.
    Stored {
        /// The blocks, first to last.
        block_hashes: Vec<EngineHash>,
        /// The block before the first one; none at the start of a prompt.
        parent: Option<EngineHash>,
        /// All their tokens: `block_size` for each block.
        token_ids: Vec<u32>,
        /// Tokens in a block of this node.
        block_size: usize,
        /// Where they lie.
        medium: Option<Medium>,
        /// The adapter that computed them.
        lora_name: Option<String>,
        /// What else entered their hashes.
        extra_keys: ExtraKeys,
        /// Their KV cache group.
        group_idx: Option<u32>,
        /// What that group serves.
        group_kind: GroupKind,
    },
    /// Blocks are held no longer.
    Removed {
        /// The blocks.
        block_hashes: Vec<EngineHash>,
        /// Where they lay.
        medium: Option<Medium>,
        /// Their KV cache group.
        group_idx: Option<u32>,
    },
    /// The node holds nothing any more.
    Cleared,
}

/// What one step of an engine changed.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct EventBatch {
    /// The engine's clock, in seconds.
    pub timestamp: f64,
    /// The changes, in order.
    pub events: Vec<KvEvent>,
    /// Data-parallel replica rank.
    pub dp_rank: Option<u32>,
    /// Which life of the engine this is (our engine only).
    pub boot_id: Option<String>,
}

impl EventBatch {
    /// A batch that stands for all history before it: everything goes, then `stored` (parents
    /// before children) is all there is. The timestamp is that of the last batch it includes: a
    /// later one would make the batches that follow look older than they are.
    pub fn snapshot(timestamp: f64, boot_id: &str, stored: Vec<KvEvent>) -> Self {
        let mut events = stored;
        events.insert(0, KvEvent::Cleared);
        Self {
            timestamp,
            events,
            dp_rank: None,
            boot_id: Some(boot_id.to_owned()),
        }
    }

    /// Whether history before this batch does not matter. Any batch that opens by clearing the
    /// cache has that property, vLLM's too.
    pub fn is_snapshot(&self) -> bool {
        matches!(self.events.first(), Some(KvEvent::Cleared))
    }
}
