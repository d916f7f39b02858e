//! Random moves against a slow twin that keeps a plain list. Catches a wrong order of eviction, a
//! slot used twice, a block whose bytes are another's, and a tier that forgets or grows.

use std::collections::HashMap;
use std::sync::Arc;

use cache_index::block::BlockHash;

use super::{Blocks, Change, Evicted, Store, Tier};
use crate::kv::pool::{Pool, Stored};
use crate::kv::prefix::{Content, LastUse};
use crate::model::BlockId;

const BYTES: usize = 24;

/// A pool's memory: the bytes of a block are made of its hash.
#[derive(Default)]
struct Memory(HashMap<BlockId, Vec<u8>>);

fn bytes_of(hash: BlockHash) -> Vec<u8> {
    hash.0.iter().copied().cycle().take(BYTES).collect()
}

impl Blocks for Memory {
    fn block_bytes(&self) -> usize {
        BYTES
    }

    fn read_block(&mut self, block: BlockId, to: &mut [u8]) {
        to.copy_from_slice(&self.0[&block]);
    }

    fn write_block(&mut self, block: BlockId, from: &[u8]) {
        self.0.insert(block, from.to_vec());
    }
}

fn hash(number: u32) -> BlockHash {
    let mut hash = [0; 16];
    hash[..4].copy_from_slice(&number.to_le_bytes());
    hash[4] = 1;
    BlockHash(hash)
}

/// Block `number` hangs on block `number / 2`, as in a heap; 1 is a root.
fn evicted(number: u32, wanted_ms: u64, tick: u64) -> Evicted {
    let content = Content {
        hash: hash(number),
        parent: None,
        tokens: [number; 16],
        salt: Some(Arc::from("s")),
    };
    Evicted {
        block: BlockId(number),
        stored: Stored {
            content,
            parent_hash: (number > 1).then(|| hash(number / 2)),
        },
        depth: number.ilog2() + 1,
        found: true,
        last_use: LastUse { wanted_ms, tick },
    }
}

fn spill(store: &mut Store, memory: &mut Memory, gone: Evicted) {
    let hash = gone.stored.content.hash;
    memory.0.insert(gone.block, bytes_of(hash));
    let pool = Pool::new(0);
    store.note(vec![Change::Removed(hash)], vec![gone], &pool, memory);
    store.make_room(&pool, memory);
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963);
        (self.0 >> 33) % bound
    }
}

/// Number → (wanted, tick), and what goes when there are too many.
#[derive(Default)]
struct Twin(HashMap<u32, (u64, u64)>);

impl Twin {
    fn evict(&mut self, most: usize) -> Vec<u32> {
        let mut gone = Vec::new();
        while self.0.len() > most {
            let leaf =
                |n: &u32| !self.0.contains_key(&(2 * n)) && !self.0.contains_key(&(2 * n + 1));
            let leaves = self.0.keys().copied().filter(leaf);
            let first = leaves.min_by_key(|n| (self.0[n], std::cmp::Reverse(n.ilog2())));
            let first = first.expect("there is a leaf");
            self.0.remove(&first);
            gone.push(first);
        }
        gone
    }
}

fn check(seed: u64, room: usize) {
    let mut random = Random(seed);
    let (mut store, mut memory, mut twin) = (
        Store::new(room, BYTES, None),
        Memory::default(),
        Twin::default(),
    );
    for tick in 0..600 {
        let number = 1 + random.below(60) as u32;
        let wanted = tick / 3 + random.below(20);
        let mut expected = Vec::new();
        if random.below(3) > 0 {
            let on_device = (Tier::Device, Change::Removed(hash(number)));
            let known = twin.0.get(&number).copied();
            let use_now = (wanted, tick);
            twin.0
                .insert(number, known.map_or(use_now, |before| before.max(use_now)));
            let gone = evicted(number, wanted, tick);
            if known.is_none() {
                expected.push((Tier::Host, Change::Stored(gone.stored.clone())));
            }
            expected.push(on_device);
            spill(&mut store, &mut memory, gone);
        } else {
            let here = twin.0.remove(&number).is_some();
            assert_eq!(store.overlap(&[hash(number)]), usize::from(here));
            assert_eq!(store.copy_back(hash(number), BlockId(0), &mut memory), here);
            if here {
                assert_eq!(
                    memory.0[&BlockId(0)],
                    bytes_of(hash(number)),
                    "another's bytes"
                );
                expected.push((Tier::Host, Change::Removed(hash(number))));
            }
            store.taken(hash(number));
        }
        let gone = twin.evict(room).into_iter();
        expected.extend(gone.map(|n| (Tier::Host, Change::Removed(hash(n)))));
        let changes = store.take_changes().into_iter();
        let changes: Vec<_> = changes.map(|c| (c.tier, c.change)).collect();
        assert_eq!(changes, expected, "seed {seed}, move {tick}");
        assert_eq!(store.host_blocks(), twin.0.len());
        store.check_integrity();
    }
}

#[test]
fn random_moves_equal_the_slow_twin() {
    for seed in 0..40 {
        check(seed, 1 + seed as usize % 25);
    }
}

#[test]
fn a_snapshot_leads_from_parents_to_children() {
    let (mut store, mut memory) = (Store::new(20, BYTES, None), Memory::default());
    // 1 is in the pool; 2 and 4 hang on it here, 5 beside 4; 7 hangs on 3, which is nowhere.
    for number in [4, 5, 2, 7] {
        spill(&mut store, &mut memory, evicted(number, 0, 0));
    }
    let above = vec![vec![evicted(1, 0, 0).stored]];
    let runs = store.snapshot(above);
    assert_eq!(runs[0].0, Tier::Device);
    let below: Vec<_> = runs[1..].iter().flat_map(|(_, run)| run).collect();
    let hashes: Vec<_> = below.iter().map(|stored| stored.content.hash).collect();
    assert_eq!(hashes.len(), 3);
    assert_eq!(hashes[0], hash(2));
    assert!(hashes.contains(&hash(4)) && hashes.contains(&hash(5)));
}

#[test]
fn what_is_not_worth_keeping_is_not_kept() {
    let (mut store, mut memory) = (Store::new(4, BYTES, None), Memory::default());
    let once = |number| Evicted {
        found: false,
        ..evicted(number, 0, 0)
    };
    spill(&mut store, &mut memory, once(4));
    assert_eq!((store.host_blocks(), store.take_moved().refused), (0, 1));
    // Deep enough; then its parents are kept too, however short a chain they are.
    for number in [8, 4, 2, 1] {
        spill(&mut store, &mut memory, once(number));
    }
    let moved = store.take_moved();
    assert_eq!((moved.stored, moved.refused, moved.evicted), (4, 0, 0));
    assert_eq!(
        store.overlap(&[hash(1), hash(2), hash(4), hash(8), hash(16)]),
        4
    );
}
