//! Who holds which block of the KV pool, and who loses one when it is full?
//!
//! A block is free, private to one sequence (being written), or published (full, computed, found
//! by hash, shared by reference count). An idle published block is the cache: it costs nothing to
//! keep and is the first to go, leaf by leaf, least recently used first. A prefix that a client
//! wants for longer counts as used later than it was, by a bounded time: it outlives others that
//! are about as old, and nobody can fill a pool for good. Sequences hold whole chains from the
//! root, so a used block never has an idle parent.
//!
//! Every change of what can be found again is noted and handed out once per step, which is what
//! the KV events are made of.

use cache_index::block::BlockHash;

use super::prefix::{Content, LastUse, Leaf, PrefixIndex};
use crate::model::BlockId;

/// A change of what the pool can serve from cache, in the order in which it happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A block became findable.
    Stored(Stored),
    /// A block was evicted.
    Removed(BlockHash),
}

/// A block that became findable, in terms of hashes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// The block's content.
    pub content: Content,
    /// The hash of the block before it.
    pub parent_hash: Option<BlockHash>,
}

/// A block that had to make room. Its values are in the pool until its place is written to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Evicted {
    /// Where its values are.
    pub block: BlockId,
    /// What it held.
    pub stored: Stored,
    /// Blocks of its chain up to it, itself included.
    pub depth: u32,
    /// Whether a request ever found it.
    pub found: bool,
    /// When it was last used, and for how much longer it is wanted.
    pub last_use: LastUse,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Private,
    Published { users: u32 },
}

/// The blocks of a node and who uses them.
#[derive(Debug)]
pub struct Pool {
    states: Vec<State>,
    free: Vec<BlockId>,
    prefix: PrefixIndex,
    /// The time, as last told.
    now_ms: u64,
    /// Counts releases, for those at the same time.
    tick: u64,
    changes: Vec<Change>,
    evicted: Vec<Evicted>,
}

impl Pool {
    /// A pool of `blocks` free blocks.
    pub fn new(blocks: u32) -> Self {
        Self {
            states: vec![State::Free; blocks as usize],
            free: (0..blocks).rev().map(BlockId).collect(),
            prefix: PrefixIndex::new(blocks as usize),
            now_ms: 0,
            tick: 0,
            changes: Vec::new(),
            evicted: Vec::new(),
        }
    }

    /// Blocks in the pool.
    pub fn capacity(&self) -> usize {
        self.states.len()
    }

    /// Blocks that could be allocated now: free ones and idle published ones.
    pub fn available(&self) -> usize {
        self.free.len() + self.prefix.idle()
    }

    /// A published block, with all that there is to say about it.
    pub fn find(&self, hash: BlockHash) -> Option<Evicted> {
        let block = self.prefix.find(hash)?;
        let mut content = self.prefix.content(block)?.clone();
        let parent_hash = content
            .parent
            .take()
            .map(|parent| self.published_hash(parent));
        Some(Evicted {
            block,
            stored: Stored {
                content,
                parent_hash,
            },
            depth: self.prefix.depth(block),
            found: true,
            last_use: self.now(),
        })
    }

    /// As if used just now.
    pub fn now(&self) -> LastUse {
        LastUse {
            wanted_ms: self.now_ms,
            tick: self.tick,
        }
    }

    /// Blocks that sequences hold.
    pub fn held(&self) -> usize {
        self.capacity() - self.available()
    }

    /// Blocks that can be found by hash, used or idle.
    pub fn published(&self) -> usize {
        self.prefix.len()
    }

    /// How many leading blocks of a chain are held, and how many of those are idle (and would
    /// therefore be taken from [`Pool::available`]).
    pub fn overlap(&self, chain: &[BlockHash]) -> Overlap {
        let mut overlap = Overlap { blocks: 0, idle: 0 };
        for block in chain.iter().map_while(|hash| self.prefix.find(*hash)) {
            overlap.blocks += 1;
            overlap.idle += usize::from(self.state(block) == State::Published { users: 0 });
        }
        overlap
    }

    /// Takes the leading held blocks of a chain into use.
    pub fn acquire(&mut self, chain: &[BlockHash]) -> Vec<BlockId> {
        let found: Vec<_> = chain
            .iter()
            .map_while(|hash| self.prefix.find(*hash))
            .collect();
        for block in &found {
            self.add_user(*block);
            self.prefix.set_found(*block);
        }
        found
    }

    /// A block to write into, evicting the least recently used idle leaf if none is free.
    pub fn allocate(&mut self) -> Option<BlockId> {
        let block = match self.free.pop() {
            Some(block) => block,
            None => {
                let leaf = self.prefix.evict()?;
                let block = leaf.block;
                self.evicted(leaf);
                block
            }
        };
        self.states[block.0 as usize] = State::Private;
        Some(block)
    }

    fn evicted(&mut self, leaf: Leaf) {
        let Leaf {
            block,
            mut content,
            depth,
            found,
            last_use,
        } = leaf;
        self.changes.push(Change::Removed(content.hash));
        // Blocks of the pool mean nothing where it goes.
        let parent = content.parent.take();
        let parent_hash = parent.map(|parent| self.published_hash(parent));
        let stored = Stored {
            content,
            parent_hash,
        };
        self.evicted.push(Evicted {
            block,
            stored,
            depth,
            found,
            last_use,
        });
    }

    /// Makes a full, computed private block findable. When an equal block is already held, the
    /// caller's is given back and that one returned in its place: equal hashes mean equal
    /// prefixes, and the forward pass gives equal prefixes equal bits.
    pub fn publish(&mut self, block: BlockId, content: Content) -> BlockId {
        assert_eq!(
            self.state(block),
            State::Private,
            "only a private block is published"
        );
        if let Some(held) = self.prefix.find(content.hash) {
            self.add_user(held);
            self.free_private(block);
            return held;
        }
        let parent_hash = content.parent.map(|parent| self.published_hash(parent));
        self.prefix.insert(block, content.clone());
        self.states[block.0 as usize] = State::Published { users: 1 };
        self.changes.push(Change::Stored(Stored {
            content,
            parent_hash,
        }));
        block
    }

    /// Tells the time, which only grows. A pool that is never told keeps to the order of releases.
    pub fn tell_time(&mut self, now_ms: u64) {
        self.now_ms = self.now_ms.max(now_ms);
    }

    /// Gives blocks back: private ones become free, published ones idle once nobody uses them.
    /// These count as used `keep_ms` later than now.
    pub fn release(&mut self, blocks: &[BlockId], keep_ms: u64) {
        self.tick += 1;
        let last_use = LastUse {
            wanted_ms: self.now_ms.saturating_add(keep_ms),
            tick: self.tick,
        };
        for block in blocks {
            match self.state(*block) {
                State::Private => self.free_private(*block),
                State::Published { users: 1 } => {
                    self.states[block.0 as usize] = State::Published { users: 0 };
                    self.prefix.set_idle(*block, last_use);
                }
                State::Published { users } => {
                    let users = users.checked_sub(1).expect("a released block has a user");
                    self.states[block.0 as usize] = State::Published { users };
                }
                State::Free => unreachable!("block {} released while free", block.0),
            }
        }
    }

    /// Evicts a block if it is an idle leaf; otherwise it stays.
    pub fn withdraw(&mut self, block: BlockId) {
        if let Some(hash) = self.prefix.withdraw(block) {
            self.changes.push(Change::Removed(hash));
            self.free_private(block);
        }
    }

    /// What changed since the last call.
    pub fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    /// What was evicted since the last call, in order; each is also among the changes.
    pub fn take_evicted(&mut self) -> Vec<Evicted> {
        std::mem::take(&mut self.evicted)
    }

    /// Everything that can be found, a parent before its children, as runs of one chain each.
    pub fn snapshot(&self) -> Vec<Vec<Stored>> {
        let stored = |block: &BlockId| {
            let content = self
                .prefix
                .content(*block)
                .expect("runs name published blocks")
                .clone();
            let parent_hash = content.parent.map(|parent| self.published_hash(parent));
            Stored {
                content,
                parent_hash,
            }
        };
        self.prefix
            .runs()
            .iter()
            .map(|run| run.iter().map(stored).collect())
            .collect()
    }

    /// Panics if the pool contradicts itself. For tests, after every step.
    pub fn check_integrity(&self) {
        self.prefix.check_integrity();
        let mut free = self.free.clone();
        free.sort();
        free.dedup();
        assert_eq!(free.len(), self.free.len(), "a block is free twice");
        for (id, state) in (0_u32..).zip(&self.states) {
            let block = BlockId(id);
            let content = self.prefix.content(block);
            assert_eq!(
                free.binary_search(&block).is_ok(),
                *state == State::Free,
                "{block:?}"
            );
            let published = matches!(state, State::Published { .. });
            assert_eq!(content.is_some(), published, "{block:?} is {state:?}");
            if let (
                State::Published { users: 1.. },
                Some(Content {
                    parent: Some(parent),
                    ..
                }),
            ) = (state, content)
            {
                let above = self.state(*parent);
                assert!(
                    matches!(above, State::Published { users: 1.. }),
                    "{parent:?} is {above:?}"
                );
            }
        }
        let idle = self
            .states
            .iter()
            .filter(|s| **s == State::Published { users: 0 })
            .count();
        assert_eq!(idle, self.prefix.idle(), "idle blocks");
    }

    fn add_user(&mut self, block: BlockId) {
        let State::Published { users } = self.state(block) else {
            unreachable!("block {} is found by hash but not published", block.0)
        };
        if users == 0 {
            self.prefix.set_used(block);
        }
        self.states[block.0 as usize] = State::Published { users: users + 1 };
    }

    fn free_private(&mut self, block: BlockId) {
        self.states[block.0 as usize] = State::Free;
        self.free.push(block);
    }

    fn state(&self, block: BlockId) -> State {
        self.states[block.0 as usize]
    }

    fn published_hash(&self, block: BlockId) -> BlockHash {
        self.prefix
            .content(block)
            .expect("a parent is published")
            .hash
    }
}

/// How much of a chain the pool holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overlap {
    /// Leading blocks held.
    pub blocks: usize,
    /// Of those, how many nobody uses now.
    pub idle: usize,
}

#[cfg(test)]
mod tests;
