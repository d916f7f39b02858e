//! How does the disk tier look on the disk?
//!
//! Two files. `blocks` has slots of equal size, each with the body of one block, padded to whole
//! pages. `index` opens with a page that says whose blocks these are; then comes one entry a slot:
//! what the block is, and the checksum of its body. All numbers are little-endian.
//!
//! Nothing is ever flushed: every order in which writes may reach the disk is found out. An entry
//! with a wrong checksum of its own is an empty slot; a body that is not its entry's is damage.

use std::sync::Arc;

use cache_index::block::{BLOCK_TOKENS, BlockHash};

use crate::kv::layout::BlockLayout;
use crate::kv::pool::Stored;
use crate::kv::prefix::Content;

/// What reads and writes past the page cache are aligned to.
pub(super) const PAGE: usize = 4096;
/// Bytes of an entry.
pub(super) const ENTRY_BYTES: usize = 512;
/// Bytes of a salt that an entry has room for: blocks of longer ones are not written. Those of a
/// gateway have 64.
const SALT_MAX: usize = 256;
/// The version of both files.
const VERSION: u32 = 2;
const FILE_MAGIC: &[u8; 8] = b"HKVDISK\n";
const ENTRY_MAGIC: &[u8; 4] = b"HKVE";
const SUM_BYTES: usize = 16;
const TOKENS_AT: usize = 56;
const SALT_AT: usize = TOKENS_AT + 4 * BLOCK_TOKENS;
const BODY_AT: usize = SALT_AT + 2 + SALT_MAX;
const SUM_AT: usize = ENTRY_BYTES - SUM_BYTES;

/// Names a model's blocks as this build lays them out: other blocks are of no use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity([u8; 32]);

impl Identity {
    /// Of the blocks of a model, known by its fingerprint, in a pool of this layout.
    pub fn new(layout: &BlockLayout, model: [u8; 32]) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("homing 2026-11 disk tier");
        hasher.update(&model);
        // Every field of a layout decides whether its bytes can be read.
        hasher.update(format!("{layout:?} {}", crate::kv::layout::VERSION).as_bytes());
        Self(*hasher.finalize().as_bytes())
    }
}

/// The checksum of a body: XXH3 of 128 bits. It finds damage; who may write to these files is up to their
/// permissions. A cryptographic hash took more than a third of a block's whole way.
pub(super) type BodySum = [u8; 16];

pub(super) fn body_sum(body: &[u8]) -> BodySum {
    xxhash_rust::xxh3::xxh3_128(body).to_le_bytes()
}

/// Bytes of a slot for bodies of this size.
pub(super) fn slot_bytes(body_bytes: usize) -> usize {
    body_bytes.next_multiple_of(PAGE)
}

/// The first page of the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) identity: Identity,
    pub(super) body_bytes: usize,
}

impl Head {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut page = vec![0; PAGE];
        page[..8].copy_from_slice(FILE_MAGIC);
        page[8..12].copy_from_slice(&VERSION.to_le_bytes());
        page[16..24].copy_from_slice(&(self.body_bytes as u64).to_le_bytes());
        page[24..56].copy_from_slice(&self.identity.0);
        let sum = checksum(&page[..56]);
        page[56..72].copy_from_slice(&sum);
        page
    }

    /// `None` if this is no head, or one of another version.
    pub(super) fn decode(page: &[u8]) -> Option<Head> {
        let known = page.get(..8)? == FILE_MAGIC && page.get(8..12)? == VERSION.to_le_bytes();
        let whole = page.get(56..72)? == checksum(&page[..56]);
        let body_bytes = u64::from_le_bytes(*page.get(16..24)?.first_chunk()?);
        (known && whole).then_some(Head {
            identity: Identity(*page.get(24..56)?.first_chunk()?),
            body_bytes: usize::try_from(body_bytes).ok()?,
        })
    }
}

/// What lies in a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(super) stored: Stored,
    pub(super) depth: u32,
    /// Grows with every entry written: the order in which blocks came.
    pub(super) stamp: u64,
    pub(super) sum: BodySum,
}

impl Entry {
    /// Whether there is room for what this block needs said.
    pub(super) fn fits(stored: &Stored) -> bool {
        let salt = stored.content.salt.as_deref().unwrap_or_default();
        salt.len() <= SALT_MAX
    }

    pub(super) fn encode(&self) -> [u8; ENTRY_BYTES] {
        let Stored {
            content,
            parent_hash,
        } = &self.stored;
        let mut entry = [0; ENTRY_BYTES];
        entry[..4].copy_from_slice(ENTRY_MAGIC);
        entry[4..8].copy_from_slice(&self.depth.to_le_bytes());
        entry[8..24].copy_from_slice(&content.hash.0);
        entry[24..40].copy_from_slice(&parent_hash.unwrap_or(BlockHash::ROOT).0);
        entry[40..48].copy_from_slice(&self.stamp.to_le_bytes());
        entry[48] = u8::from(parent_hash.is_some());
        entry[49] = u8::from(content.salt.is_some());
        let tokens = entry[TOKENS_AT..SALT_AT].chunks_exact_mut(4);
        for (to, token) in tokens.zip(&content.tokens) {
            to.copy_from_slice(&token.to_le_bytes());
        }
        let salt = content.salt.as_deref().unwrap_or_default().as_bytes();
        let salt = &salt[..salt.len().min(SALT_MAX)];
        entry[SALT_AT..SALT_AT + 2].copy_from_slice(&(salt.len() as u16).to_le_bytes());
        entry[SALT_AT + 2..][..salt.len()].copy_from_slice(salt);
        entry[BODY_AT..BODY_AT + 16].copy_from_slice(&self.sum);
        let sum = checksum(&entry[..SUM_AT]);
        entry[SUM_AT..].copy_from_slice(&sum);
        entry
    }

    /// `None` if the slot is empty, or its entry not whole.
    pub(super) fn decode(entry: &[u8]) -> Option<Entry> {
        let entry: &[u8; ENTRY_BYTES] = entry.first_chunk()?;
        if entry[..4] != *ENTRY_MAGIC || entry[SUM_AT..] != checksum(&entry[..SUM_AT]) {
            return None;
        }
        let hash_at = |at: usize| entry[at..].first_chunk().copied().map(BlockHash);
        let mut tokens = [0; BLOCK_TOKENS];
        for (token, from) in tokens
            .iter_mut()
            .zip(entry[TOKENS_AT..SALT_AT].chunks_exact(4))
        {
            *token = u32::from_le_bytes(*from.first_chunk()?);
        }
        let salt_len = usize::from(u16::from_le_bytes(*entry[SALT_AT..].first_chunk()?));
        let salt = entry[SALT_AT + 2..BODY_AT].get(..salt_len)?;
        let salt = str::from_utf8(salt).ok()?;
        let content = Content {
            hash: hash_at(8)?,
            parent: None,
            tokens,
            salt: (entry[49] == 1).then(|| Arc::from(salt)),
        };
        let parent_hash = hash_at(24).filter(|_| entry[48] == 1);
        Some(Entry {
            stored: Stored {
                content,
                parent_hash,
            },
            depth: u32::from_le_bytes(*entry[4..].first_chunk()?),
            stamp: u64::from_le_bytes(*entry[40..].first_chunk()?),
            sum: *entry[BODY_AT..].first_chunk()?,
        })
    }
}

fn checksum(bytes: &[u8]) -> [u8; SUM_BYTES] {
    let mut sum = [0; SUM_BYTES];
    sum.copy_from_slice(&blake3::hash(bytes).as_bytes()[..SUM_BYTES]);
    sum
}
