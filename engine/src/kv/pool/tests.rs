//! Random sequences of claims, growth, publishing and releases against a slow twin that keeps
//! plain lists. Catches a lost or doubly used block, a wrong eviction order, an orphaned child.

use std::sync::Arc;

use cache_index::block::{BlockHash, Namespace, hash_chain};

use super::super::table::{BlockTable, Scope};
use super::{Change, Pool};

/// The pool in its most obvious form: held blocks are a list of (hash, parent, users, last use).
#[derive(Default)]
struct Twin {
    held: Vec<TwinBlock>,
    private: usize,
    now_ms: u64,
    tick: u64,
}

struct TwinBlock {
    hash: BlockHash,
    parent: BlockHash,
    users: usize,
    /// Until when it counts as used, then the count of releases.
    last_use: (u64, u64),
}

impl Twin {
    fn find(&self, hash: BlockHash) -> Option<usize> {
        self.held.iter().position(|block| block.hash == hash)
    }

    fn overlap(&self, chain: &[BlockHash]) -> usize {
        chain
            .iter()
            .take_while(|hash| self.find(**hash).is_some())
            .count()
    }

    /// The hash that must be evicted next: the least recently used unused block without children.
    fn victims(&self) -> Vec<BlockHash> {
        let leaf = |block: &&TwinBlock| {
            block.users == 0 && !self.held.iter().any(|child| child.parent == block.hash)
        };
        let oldest = self
            .held
            .iter()
            .filter(leaf)
            .map(|block| block.last_use)
            .min();
        let of_oldest = self
            .held
            .iter()
            .filter(leaf)
            .filter(|b| Some(b.last_use) == oldest);
        of_oldest.map(|block| block.hash).collect()
    }

    /// Forgets those of these blocks, from the last, that nobody uses and nothing follows.
    fn withdraw(&mut self, hashes: &[BlockHash]) -> Vec<Change> {
        let mut gone = Vec::new();
        for hash in hashes.iter().rev() {
            let at = self.find(*hash).expect("it was held until now");
            let parent = self.held.iter().any(|child| child.parent == *hash);
            if self.held[at].users == 0 && !parent {
                self.held.remove(at);
                gone.push(Change::Removed(*hash));
            }
        }
        gone
    }

    fn apply(&mut self, change: &Change) {
        match change {
            Change::Stored(stored) => {
                let parent = stored.parent_hash.unwrap_or(BlockHash::ROOT);
                assert!(
                    parent == BlockHash::ROOT || self.find(parent).is_some(),
                    "orphan stored"
                );
                let hash = stored.content.hash;
                assert!(self.find(hash).is_none(), "stored twice");
                self.held.push(TwinBlock {
                    hash,
                    parent,
                    users: 1,
                    last_use: (0, 0),
                });
                self.private -= 1;
            }
            Change::Removed(hash) => {
                assert!(self.victims().contains(hash), "evicted {hash} out of order");
                self.held.retain(|block| block.hash != *hash);
            }
        }
    }
}

struct Live {
    tokens: Vec<u32>,
    computed: usize,
    table: BlockTable,
}

/// A tiny generator: tests must not depend on a crate's stream of random numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963);
        (self.0 >> 33) as usize % bound
    }
}

fn scope(salt: &str) -> Scope {
    Scope {
        namespace: Namespace::new("m", None, Some(salt)),
        salt: Some(Arc::from(salt)),
    }
}

fn check(seed: u64, blocks: u32, steps: usize) {
    let mut random = Random(seed);
    let mut pool = Pool::new(blocks);
    let mut twin = Twin::default();
    let mut live: Vec<(Live, Scope)> = Vec::new();
    for _ in 0..steps {
        match random.below(4) {
            0 => claim(&mut random, &mut pool, &mut twin, &mut live),
            1 | 2 if !live.is_empty() => {
                let which = random.below(live.len());
                advance(&mut random, &mut pool, &mut twin, &mut live[which].0);
            }
            3 if !live.is_empty() => {
                let which = random.below(live.len());
                let (gone, scope) = live.swap_remove(which);
                let keep_ms = [0, 0, 3, 20][random.below(4)];
                twin.tick += 1;
                twin.now_ms += random.below(8) as u64;
                pool.tell_time(twin.now_ms);
                let withdraws = random.below(4) == 0;
                let last_use = (twin.now_ms + if withdraws { 0 } else { keep_ms }, twin.tick);
                for hash in &hash_chain(&scope.namespace, &gone.tokens[..gone.computed]) {
                    let at = twin
                        .find(*hash)
                        .expect("a published block stays while used");
                    twin.held[at].users -= 1;
                    twin.held[at].last_use = last_use;
                }
                twin.private -= gone.table.blocks().len() - gone.computed / 16;
                if withdraws {
                    let chain = hash_chain(&scope.namespace, &gone.tokens[..gone.computed]);
                    let first = random.below(chain.len() + 1);
                    gone.table.withdraw(&mut pool, first);
                    let expected = twin.withdraw(&chain[first..]);
                    assert_eq!(pool.take_changes(), expected, "withdrawn, seed {seed}");
                } else {
                    let mut table = gone.table;
                    table.keep(keep_ms);
                    table.release(&mut pool);
                }
            }
            _ => {}
        }
        pool.check_integrity();
        let used = twin.held.iter().filter(|block| block.users > 0).count();
        assert_eq!(pool.held(), used + twin.private, "held blocks, seed {seed}");
        assert_eq!(
            pool.published(),
            twin.held.len(),
            "published blocks, seed {seed}"
        );
        let snapshot: usize = pool.snapshot().iter().map(Vec::len).sum();
        assert_eq!(snapshot, twin.held.len(), "snapshot, seed {seed}");
    }
    for (gone, _) in live {
        gone.table.release(&mut pool);
    }
    pool.check_integrity();
    assert_eq!(pool.held(), 0, "everything was given back, seed {seed}");
}

fn claim(random: &mut Random, pool: &mut Pool, twin: &mut Twin, live: &mut Vec<(Live, Scope)>) {
    // Few distinct tokens, so that prefixes meet often and branch anywhere.
    let tokens: Vec<u32> = (0..random.below(6) * 16 + random.below(17))
        .map(|i| (i / 16 * random.below(2)) as u32)
        .collect();
    let scope = scope(["a", "b"][random.below(2)]);
    let chain = hash_chain(&scope.namespace, &tokens);
    let expected = twin.overlap(&chain);
    assert_eq!(pool.overlap(&chain).blocks, expected, "overlap");
    let table = BlockTable::claim(pool, scope.clone(), &chain);
    assert_eq!(table.published_tokens(), expected * 16, "claimed tokens");
    for hash in &chain[..expected] {
        let at = twin.find(*hash).expect("overlap counts held blocks");
        twin.held[at].users += 1;
    }
    let computed = table.published_tokens();
    live.push((
        Live {
            tokens,
            computed,
            table,
        },
        scope,
    ));
}

fn advance(random: &mut Random, pool: &mut Pool, twin: &mut Twin, sequence: &mut Live) {
    let upto = (sequence.computed + random.below(40)).max(sequence.computed);
    while sequence.tokens.len() < upto {
        sequence.tokens.push(random.below(2) as u32);
    }
    let before = sequence.table.blocks().len();
    let grown = sequence.table.grow(pool, upto);
    let evicted = pool.take_changes();
    evicted.iter().for_each(|change| twin.apply(change));
    twin.private += sequence.table.blocks().len() - before;
    if grown.is_err() {
        assert_eq!(
            pool.available(),
            0,
            "allocation fails only when nothing is left"
        );
        return;
    }
    if random.below(3) == 0 {
        // Tokens past `upto` turned out wrong: what they took is given back.
        let free = pool.available();
        let before = sequence.table.blocks().len();
        let _ = sequence.table.grow(pool, upto + random.below(60));
        pool.take_changes().iter().for_each(|c| twin.apply(c));
        sequence.table.truncate(pool, upto);
        let least = upto
            .div_ceil(16)
            .max(sequence.table.published_tokens() / 16);
        assert_eq!(sequence.table.blocks().len(), least);
        assert_eq!(pool.available(), free + before - least, "rolled back");
        twin.private -= before - least;
    }
    let first = sequence.table.published_tokens() / 16;
    sequence.computed = upto;
    sequence.table.publish(pool, &sequence.tokens[..upto]);
    let stored = pool.take_changes();
    let published = upto / 16 - first;
    for change in &stored {
        twin.apply(change);
    }
    // A block that was already held is shared: the duplicate is freed, the held one gains a user.
    let shared = published - stored.len();
    twin.private -= shared;
    if shared > 0 {
        let mut recount = 0;
        let new: Vec<_> = stored
            .iter()
            .map(|change| match change {
                Change::Stored(stored) => stored.content.hash,
                Change::Removed(_) => BlockHash::ROOT,
            })
            .collect();
        for block in &sequence.table.blocks()[first..upto / 16] {
            let hash = pool.prefix.content(*block).expect("published").hash;
            if !new.contains(&hash) {
                let at = twin.find(hash).expect("shared block is held");
                twin.held[at].users += 1;
                recount += 1;
            }
        }
        assert_eq!(recount, shared, "shared blocks");
    }
}

#[test]
fn random_operations_equal_the_slow_twin() {
    for seed in 0..60 {
        check(seed, 4 + (seed as u32 % 5) * 9, 400);
    }
}

#[test]
fn a_leaf_goes_before_its_parent_and_the_oldest_chain_first() {
    let mut pool = Pool::new(4);
    for token in [1, 2] {
        let mut table = BlockTable::claim(&mut pool, scope("a"), &[]);
        table.grow(&mut pool, 32).expect("two blocks are free");
        table.publish(&mut pool, &[token; 32]);
        table.release(&mut pool);
    }
    pool.take_changes();
    let chain = hash_chain(&scope("a").namespace, &[1; 32]);
    let other = hash_chain(&scope("a").namespace, &[2; 32]);
    for expected in [chain[1], chain[0], other[1], other[0]] {
        pool.allocate().expect("idle blocks can be evicted");
        assert_eq!(pool.take_changes(), [Change::Removed(expected)]);
        pool.check_integrity();
    }
    assert_eq!(pool.allocate(), None, "a full pool says so");
}

#[test]
fn what_is_wanted_for_longer_outlives_others_of_its_age_and_no_more() {
    let mut pool = Pool::new(3);
    let mut chains = Vec::new();
    for (token, at_ms, keep_ms) in [(1, 0, 100), (2, 50, 0), (3, 150, 0)] {
        let mut table = BlockTable::claim(&mut pool, scope("a"), &[]);
        table.grow(&mut pool, 16).expect("a block is free");
        table.publish(&mut pool, &[token; 16]);
        table.keep(keep_ms);
        pool.tell_time(at_ms);
        table.release(&mut pool);
        chains.push(hash_chain(&scope("a").namespace, &[token; 16])[0]);
    }
    pool.take_changes();
    for expected in [chains[1], chains[0], chains[2]] {
        pool.allocate().expect("idle blocks can be evicted");
        assert_eq!(pool.take_changes(), [Change::Removed(expected)]);
    }
}
