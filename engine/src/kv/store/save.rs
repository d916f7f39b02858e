//! Which blocks go further down when host memory needs their places?
//!
//! A block is of use only where a chain leads to it: what is missing before it goes first, as far as it is
//! still in host memory or in the pool.

use std::time::Instant;

use cache_index::block::BlockHash;

use super::index::{Kept, Slot, TierIndex};
use super::{Blocks, Store, slot_of};
use crate::kv::pool::Pool;
use crate::model::BlockId;

impl Store {
    /// Has a block that leaves host memory written to the disk and put into the shared store.
    pub(super) fn save(&mut self, kept: &Kept, slot: Slot, pool: &Pool, blocks: &mut dyn Blocks) {
        self.save_to_disk(kept, slot, pool, blocks);
        self.save_to_shared(kept, slot, pool, blocks);
    }

    /// And before it whatever of its chain is not there, as far as the drive can take it now: next time
    /// less is missing.
    fn save_to_disk(&mut self, kept: &Kept, slot: Slot, pool: &Pool, blocks: &mut dyn Blocks) {
        let Some(disk) = &mut self.disk else { return };
        if disk.touch(kept.stored.content.hash, kept.last_use) {
            return;
        }
        let knows = |hash| disk.knows(hash);
        let Some(missing) = missing(kept, slot, (&self.host, pool), knows, |_| false) else {
            return;
        };
        let arena = &self.arena;
        for (place, kept) in missing.iter().rev() {
            let written = disk.write(kept, |to| place.copy(arena, blocks, to));
            if !written {
                break;
            }
        }
        self.changes.extend(disk.take_changes());
    }

    /// The same for the shared store. What was put there some time ago may be gone, and is put again as
    /// long as it is here; where it is not, it is hoped to be there.
    fn save_to_shared(&mut self, kept: &Kept, slot: Slot, pool: &Pool, blocks: &mut dyn Blocks) {
        let Some(shared) = &mut self.shared else {
            return;
        };
        let now = Instant::now();
        if shared.need_not_put(kept.stored.content.hash, now) {
            return;
        }
        let there = |hash| shared.need_not_put(hash, now);
        let hoped = |hash| shared.knows(hash);
        let Some(missing) = missing(kept, slot, (&self.host, pool), there, hoped) else {
            return;
        };
        let arena = &self.arena;
        for (place, kept) in missing.iter().rev() {
            let put = shared.put(kept, |to| place.copy(arena, blocks, to));
            if !put {
                break;
            }
        }
    }
}

/// Where a block's bytes are.
#[derive(Clone, Copy, Debug)]
enum Place {
    Host(Slot),
    Device(BlockId),
}

impl Place {
    /// Copies them out; those of host memory are in slots of as many bytes as there is room for.
    fn copy(self, arena: &[u8], blocks: &mut dyn Blocks, to: &mut [u8]) {
        match self {
            Self::Host(slot) => to.copy_from_slice(slot_of(arena, to.len(), slot)),
            Self::Device(block) => blocks.keep_block(block, to),
        }
    }
}

/// A block of host memory, and before it what of its chain is not there, the last first; none if some of
/// that is nowhere here. The way up also ends where a block that is nowhere here is `hoped` to be there.
fn missing(
    kept: &Kept,
    slot: Slot,
    (host, pool): (&TierIndex, &Pool),
    there: impl Fn(BlockHash) -> bool,
    hoped: impl Fn(BlockHash) -> bool,
) -> Option<Vec<(Place, Kept)>> {
    let mut missing = vec![(Place::Host(slot), kept.clone())];
    let mut parent = kept.stored.parent_hash;
    while let Some(hash) = parent.filter(|hash| !there(*hash)) {
        let above = host.find(hash).zip(host.get(hash).cloned());
        let above = above.map(|(slot, kept)| (Place::Host(slot), kept));
        let Some((place, kept)) = above.or_else(|| in_pool(pool, hash)) else {
            if hoped(hash) {
                break;
            }
            return None;
        };
        parent = kept.stored.parent_hash;
        missing.push((place, kept));
    }
    Some(missing)
}

fn in_pool(pool: &Pool, hash: BlockHash) -> Option<(Place, Kept)> {
    let found = pool.find(hash)?;
    let kept = Kept {
        stored: found.stored,
        depth: found.depth,
        last_use: found.last_use,
    };
    Some((Place::Device(found.block), kept))
}
