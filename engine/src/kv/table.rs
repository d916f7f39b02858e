//! Which blocks does one sequence live in?
//!
//! A table is the sequence's blocks in order: first those found by hash and shared, then private
//! ones being written. Whenever a block is full and computed it is published at once, prompt and
//! answer alike, so that what was computed stays reusable even if the request is cancelled in the
//! next step. The table names what it holds; the pool owns it. It must be given back with
//! [`BlockTable::release`], since only the engine's thread can reach the pool.

use std::sync::Arc;

use cache_index::block::{BLOCK_TOKENS, BlockHash, Namespace};

use super::pool::Pool;
use super::prefix::Content;
use crate::model::BlockId;

/// Whose blocks these are: the key of the hash chain and the salt that the events name.
#[derive(Clone, Debug)]
pub struct Scope {
    /// The key under which the chain is hashed.
    pub namespace: Namespace,
    /// The salt it was derived from, if any.
    pub salt: Option<Arc<str>>,
}

/// One sequence's blocks, from position 0 on.
#[derive(Debug)]
pub struct BlockTable {
    scope: Scope,
    blocks: Vec<BlockId>,
    /// Hashes of the published leading blocks.
    hashes: Vec<BlockHash>,
    /// For how much longer they are wanted than others.
    keep_ms: u64,
}

/// No block could be allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the KV pool is full")]
pub struct PoolFull;

impl BlockTable {
    /// Takes the leading blocks of `chain` that the pool holds; `chain` is what may be credited.
    pub fn claim(pool: &mut Pool, scope: Scope, chain: &[BlockHash]) -> Self {
        let blocks = pool.acquire(chain);
        let hashes = chain[..blocks.len()].to_vec();
        Self {
            scope,
            blocks,
            hashes,
            keep_ms: 0,
        }
    }

    /// Makes the blocks count as used so much later than they were, once they are given back.
    pub fn keep(&mut self, keep_ms: u64) {
        self.keep_ms = keep_ms;
    }

    /// The blocks in order.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Tokens in published leading blocks: right after [`BlockTable::claim`], the cached tokens.
    pub fn published_tokens(&self) -> usize {
        self.hashes.len() * BLOCK_TOKENS
    }

    /// Blocks that are missing for the table to cover `tokens`.
    pub fn missing(&self, tokens: usize) -> usize {
        tokens
            .div_ceil(BLOCK_TOKENS)
            .saturating_sub(self.blocks.len())
    }

    /// Grows the table to cover `tokens`. On failure it keeps what it has.
    pub fn grow(&mut self, pool: &mut Pool, tokens: usize) -> Result<(), PoolFull> {
        for _ in 0..self.missing(tokens) {
            self.blocks.push(pool.allocate().ok_or(PoolFull)?);
        }
        Ok(())
    }

    /// Publishes every block of `computed` (the sequence's computed tokens from position 0) that
    /// is full and not published yet.
    pub fn publish(&mut self, pool: &mut Pool, computed: &[u32]) {
        let (full, _partial) = computed.as_chunks::<BLOCK_TOKENS>();
        for (index, tokens) in full.iter().enumerate().skip(self.hashes.len()) {
            let before = index.checked_sub(1);
            let parent_hash = before.map_or(BlockHash::ROOT, |i| self.hashes[i]);
            let hash = self.scope.namespace.hash(parent_hash, tokens);
            let parent = before.map(|i| self.blocks[i]);
            let salt = self.scope.salt.clone();
            let content = Content {
                hash,
                parent,
                tokens: *tokens,
                salt,
            };
            self.blocks[index] = pool.publish(self.blocks[index], content);
            self.hashes.push(hash);
        }
    }

    /// Rolls back to the first `tokens` tokens: blocks past them are given back. What follows in the
    /// last kept block is overwritten when the sequence goes on. Published blocks cannot be rolled
    /// back: others may use them, so nothing is published before it is certain.
    pub fn truncate(&mut self, pool: &mut Pool, tokens: usize) {
        assert!(
            tokens >= self.published_tokens(),
            "rolled back to {tokens} tokens of {} published",
            self.published_tokens()
        );
        let keep = tokens.div_ceil(BLOCK_TOKENS);
        if keep < self.blocks.len() {
            pool.release(&self.blocks.split_off(keep), 0);
        }
    }

    /// Hashes of the published leading blocks.
    pub fn hashes(&self) -> &[BlockHash] {
        &self.hashes
    }

    /// Gives every block back, and makes those from `first` on unfindable, as far as nobody else
    /// uses them: what a broken pass computed is not served to anybody.
    pub fn withdraw(self, pool: &mut Pool, first: usize) {
        pool.release(&self.blocks, 0);
        let published = &self.blocks[..self.hashes.len()];
        for block in published.iter().skip(first).rev() {
            pool.withdraw(*block);
        }
    }

    /// Gives every block back to the pool.
    pub fn release(self, pool: &mut Pool) {
        pool.release(&self.blocks, self.keep_ms);
    }
}
