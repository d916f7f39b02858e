//! What of a chain lies below host memory, and how is it asked for?

use std::sync::Arc;
use std::time::Instant;

use cache_index::block::{BLOCK_TOKENS, BlockHash};

use super::Store;
use super::disk::Disk;
use super::index::Kept;
use super::shared::SharedTier;
use crate::kv::pool::Stored;
use crate::kv::prefix::{Content, LastUse};

/// A chain, as the request that waits for it knows it.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// Hashes of its blocks.
    pub chain: &'a [BlockHash],
    /// Its tokens, at least those of these blocks.
    pub tokens: &'a [u32],
    /// The salt of its scope.
    pub salt: Option<&'a Arc<str>>,
}

impl Wanted<'_> {
    fn kept(&self, index: usize, last_use: LastUse) -> Option<Kept> {
        let tokens = self.tokens.get(index * BLOCK_TOKENS..)?.first_chunk()?;
        let content = Content {
            hash: *self.chain.get(index)?,
            parent: None,
            tokens: *tokens,
            salt: self.salt.cloned(),
        };
        let parent_hash = index.checked_sub(1).map(|above| self.chain[above]);
        Some(Kept {
            stored: Stored {
                content,
                parent_hash,
            },
            depth: index as u32 + 1,
            last_use,
        })
    }
}

impl Store {
    /// How many of a chain's leading blocks are on the disk, in the shared store as far as that is known,
    /// or in host memory between those; at most what host memory has room for twice over.
    pub fn below(&self, chain: &[BlockHash]) -> usize {
        let now = Instant::now();
        let held = |hash: &&BlockHash| {
            self.host.find(**hash).is_some()
                || self.is_on_disk(**hash)
                || self.is_shared(**hash, now)
        };
        let most = self.arena.len() / self.block_bytes.max(1) / 2;
        chain.iter().take(most).take_while(held).count()
    }

    fn is_on_disk(&self, hash: BlockHash) -> bool {
        let disk = self.disk.as_ref();
        disk.is_some_and(|disk| disk.index().find(hash).is_some())
    }

    fn is_shared(&self, hash: BlockHash, now: Instant) -> bool {
        let shared = self.shared.as_ref();
        shared.is_some_and(|shared| shared.holds(hash, now))
    }

    /// Whether to fetch a chain that begins with this block, which is not in host memory, rather than to
    /// compute it; what seemed dearer is forgiven a little.
    pub fn pays(&mut self, first: BlockHash) -> bool {
        if self.is_on_disk(first) {
            if !self.rates.read_pays() {
                self.rates.forgive_reading();
                return false;
            }
        } else if !self.rates.bring_pays() {
            self.rates.forgive_bringing();
            return false;
        }
        true
    }

    /// Whether the shared store is being asked how much it has of a chain, the rest of one that this node
    /// does not have; asks it unless that is known, or computing is cheaper.
    pub fn ask(&mut self, rest: &[BlockHash]) -> bool {
        let now = Instant::now();
        let pays = self.rates.bring_pays();
        let shared = self.shared.as_mut().filter(|_| pays);
        shared.is_some_and(|shared| shared.ask(rest, now))
    }

    /// Whether the shared store is being asked about the rest of this chain.
    pub fn is_asking(&self, rest: &[BlockHash]) -> bool {
        let shared = self.shared.as_ref().zip(rest.first());
        shared.is_some_and(|(shared, first)| shared.is_asking(*first))
    }

    /// Asks disk and shared store for those blocks of a range of a chain that are not in host memory.
    /// False if none of them is on its way.
    pub fn read(
        &mut self,
        wanted: &Wanted<'_>,
        range: std::ops::Range<usize>,
        now: LastUse,
    ) -> bool {
        let mut coming = false;
        for index in range {
            let hash = wanted.chain[index];
            if self.host.find(hash).is_some() {
                continue;
            }
            let from_disk = self.is_on_disk(hash) || self.is_on_its_way(hash);
            let sent = match (&mut self.disk, &mut self.shared) {
                (Some(disk), _) if from_disk => disk.read(&[hash]),
                (_, Some(shared)) => {
                    let kept = wanted.kept(index, now);
                    kept.is_some_and(|kept| shared.get(kept))
                }
                _ => false,
            };
            if !sent {
                break;
            }
            coming = true;
        }
        coming
    }

    fn is_on_its_way(&self, hash: BlockHash) -> bool {
        let disk = self.disk.as_ref();
        disk.is_some_and(|disk| disk.is_reading(hash))
    }

    /// Whether a block is on its way from the disk or the shared store.
    pub fn is_reading(&self, hash: BlockHash) -> bool {
        let shared = self.shared.as_ref();
        self.is_on_its_way(hash) || shared.is_some_and(|shared| shared.is_getting(hash))
    }

    /// Whether drive or shared store work on anything.
    pub fn is_busy(&self) -> bool {
        self.disk.as_ref().is_some_and(Disk::is_busy)
            || self.shared.as_ref().is_some_and(SharedTier::is_busy)
    }
}
