//! Which computed blocks can be found again, and which of them goes first?
//!
//! A published block is known by its chained hash, so finding one means finding its whole prefix.
//! Two facts keep that true: a block's parent is published before it, and only leaves are evicted.
//! Among idle leaves the least recently used goes first, where a block that is wanted for longer
//! counts as used later; taking a leaf can make its parent one.
//!
//! Left out on purpose: reference counts. The pool tells this index when a block becomes idle or
//! used, and the index answers who could go.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use cache_index::block::{BLOCK_TOKENS, BlockHash};

use crate::model::BlockId;

/// What a published block holds, in words that other processes understand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Content {
    /// The chained hash of the block.
    pub hash: BlockHash,
    /// The block before it, itself published; none for the first of a chain.
    pub parent: Option<BlockId>,
    /// Its tokens.
    pub tokens: [u32; BLOCK_TOKENS],
    /// The cache salt of its namespace.
    pub salt: Option<Arc<str>>,
}

/// When a block became idle, for the order of eviction: its time on the pool's clock and for how
/// much longer it is wanted, together, in milliseconds; then the count of releases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LastUse {
    /// Milliseconds.
    pub wanted_ms: u64,
    /// Releases before this one.
    pub tick: u64,
}

/// A block that was evicted.
#[derive(Debug)]
pub struct Leaf {
    /// Where its values still are.
    pub block: BlockId,
    /// What it held.
    pub content: Content,
    /// Blocks of its chain up to it, itself included.
    pub depth: u32,
    /// Whether a request ever found it.
    pub found: bool,
    /// When it became idle.
    pub last_use: LastUse,
}

#[derive(Debug)]
struct Entry {
    content: Content,
    /// Blocks of its chain up to it, itself included.
    depth: u32,
    /// Whether a request ever found it here.
    found: bool,
    /// Published blocks whose parent is this one.
    children: u32,
    /// Set while nobody uses the block.
    idle_since: Option<LastUse>,
}

/// Published blocks by hash, and the order in which idle ones would go.
#[derive(Debug)]
pub struct PrefixIndex {
    by_hash: HashMap<BlockHash, BlockId>,
    entries: Vec<Option<Entry>>,
    idle_leaves: BTreeSet<(LastUse, BlockId)>,
    idle: usize,
}

impl PrefixIndex {
    /// An empty index over a pool of `blocks`.
    pub fn new(blocks: usize) -> Self {
        let entries = std::iter::repeat_with(|| None).take(blocks).collect();
        Self {
            by_hash: HashMap::new(),
            entries,
            idle_leaves: BTreeSet::new(),
            idle: 0,
        }
    }

    /// The block with this hash, if it is held.
    pub fn find(&self, hash: BlockHash) -> Option<BlockId> {
        self.by_hash.get(&hash).copied()
    }

    /// The content of a published block.
    pub fn content(&self, block: BlockId) -> Option<&Content> {
        self.entries
            .get(block.0 as usize)?
            .as_ref()
            .map(|entry| &entry.content)
    }

    /// Blocks that are published and used by nobody; all of them can be evicted, leaf by leaf.
    pub fn idle(&self) -> usize {
        self.idle
    }

    /// Published blocks.
    pub fn len(&self) -> usize {
        self.by_hash.len()
    }

    /// Whether nothing is published.
    pub fn is_empty(&self) -> bool {
        self.by_hash.is_empty()
    }

    /// Makes a block findable. Its hash must be new and its parent published.
    pub fn insert(&mut self, block: BlockId, content: Content) {
        let replaced = self.by_hash.insert(content.hash, block);
        assert!(replaced.is_none(), "hash {} published twice", content.hash);
        let mut depth = 1;
        if let Some(parent) = content.parent {
            let entry = self.entry_mut(parent);
            entry.children += 1;
            depth += entry.depth;
            let idle_since = entry.idle_since;
            if let Some(tick) = idle_since {
                self.idle_leaves.remove(&(tick, parent));
            }
        }
        let slot = &mut self.entries[block.0 as usize];
        assert!(slot.is_none(), "block {} published twice", block.0);
        *slot = Some(Entry {
            content,
            depth,
            found: false,
            children: 0,
            idle_since: None,
        });
    }

    /// Notes that nobody uses a published block any more.
    pub fn set_idle(&mut self, block: BlockId, last_use: LastUse) {
        let entry = self.entry_mut(block);
        assert!(entry.idle_since.is_none(), "block {} idle twice", block.0);
        entry.idle_since = Some(last_use);
        let leaf = entry.children == 0;
        if leaf {
            self.idle_leaves.insert((last_use, block));
        }
        self.idle += 1;
    }

    /// Notes that somebody uses an idle block again.
    pub fn set_used(&mut self, block: BlockId) {
        let entry = self.entry_mut(block);
        if let Some(tick) = entry.idle_since.take() {
            self.idle_leaves.remove(&(tick, block));
            self.idle -= 1;
        }
    }

    /// How many blocks a published block's chain has up to it; 0 if it is none.
    pub fn depth(&self, block: BlockId) -> u32 {
        let entry = self.entries.get(block.0 as usize).and_then(Option::as_ref);
        entry.map_or(0, |entry| entry.depth)
    }

    /// Notes that a request found a published block.
    pub fn set_found(&mut self, block: BlockId) {
        self.entry_mut(block).found = true;
    }

    /// Forgets the least recently used idle leaf and returns it.
    pub fn evict(&mut self) -> Option<Leaf> {
        let (last_use, block) = self.idle_leaves.pop_first()?;
        let entry = self.forget(block);
        Some(Leaf {
            block,
            content: entry.content,
            depth: entry.depth,
            found: entry.found,
            last_use,
        })
    }

    /// Forgets this block, if it is an idle leaf.
    pub fn withdraw(&mut self, block: BlockId) -> Option<BlockHash> {
        let idle_since = self.entries.get(block.0 as usize)?.as_ref()?.idle_since?;
        let leaf = self.idle_leaves.remove(&(idle_since, block));
        leaf.then(|| self.forget(block).content.hash)
    }

    /// Forgets an idle leaf that is off the list of leaves already.
    fn forget(&mut self, block: BlockId) -> Entry {
        let entry = self.entries[block.0 as usize].take();
        let entry = entry.expect("an idle leaf is published");
        self.idle -= 1;
        self.by_hash.remove(&entry.content.hash);
        if let Some(parent) = entry.content.parent {
            let above = self.entry_mut(parent);
            above.children -= 1;
            let leaf = above.children == 0;
            if let (true, Some(tick)) = (leaf, above.idle_since) {
                self.idle_leaves.insert((tick, parent));
            }
        }
        entry
    }

    /// Every held chain as runs of consecutive blocks, a parent before its children.
    pub fn runs(&self) -> Vec<Vec<BlockId>> {
        let mut children: HashMap<Option<BlockId>, Vec<BlockId>> = HashMap::new();
        for (block, entry) in self.published() {
            children
                .entry(entry.content.parent)
                .or_default()
                .push(block);
        }
        let mut runs = Vec::new();
        let mut starts = children.remove(&None).unwrap_or_default();
        starts.sort();
        while let Some(start) = starts.pop() {
            let mut run = vec![start];
            let mut last = start;
            while let Some(below) = children.remove(&Some(last)) {
                let [only] = below[..] else {
                    starts.extend(below);
                    break;
                };
                run.push(only);
                last = only;
            }
            runs.push(run);
        }
        runs
    }

    /// Panics if the structure contradicts itself. For tests, after every step.
    pub fn check_integrity(&self) {
        let mut children = vec![0_u32; self.entries.len()];
        let mut idle = 0;
        for (block, entry) in self.published() {
            assert_eq!(
                self.by_hash.get(&entry.content.hash),
                Some(&block),
                "hash of {block:?}"
            );
            if let Some(parent) = entry.content.parent {
                assert!(
                    self.content(parent).is_some(),
                    "{block:?} outlived its parent"
                );
                children[parent.0 as usize] += 1;
            }
            idle += usize::from(entry.idle_since.is_some());
        }
        for (block, entry) in self.published() {
            let expected = children[block.0 as usize];
            assert_eq!(entry.children, expected, "children of {block:?}");
            let leaf = entry
                .idle_since
                .is_some_and(|t| self.idle_leaves.contains(&(t, block)));
            assert_eq!(
                leaf,
                entry.idle_since.is_some() && expected == 0,
                "leaf {block:?}"
            );
        }
        assert_eq!(idle, self.idle, "idle blocks");
        assert_eq!(
            self.published().count(),
            self.by_hash.len(),
            "published blocks"
        );
    }

    fn published(&self) -> impl Iterator<Item = (BlockId, &Entry)> {
        let numbered = (0_u32..).zip(&self.entries);
        numbered.filter_map(|(id, entry)| Some((BlockId(id), entry.as_ref()?)))
    }

    fn entry_mut(&mut self, block: BlockId) -> &mut Entry {
        let slot = self
            .entries
            .get_mut(block.0 as usize)
            .and_then(Option::as_mut);
        slot.expect("the pool names only published blocks")
    }
}
