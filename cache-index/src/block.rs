//! What is a block of a prompt called?
//!
//! A block is 16 consecutive tokens. Its hash is chained over its parents and keyed by a namespace
//! (model, adapter, cache salt), so equal hashes mean equal whole prefixes, and a tenant can
//! neither name nor guess another tenant's blocks. This is the only implementation: the gateway's
//! routing key, the engine's pool key and the index's key are one and the same.
//! A fast non-cryptographic hash is refused on purpose: a crafted collision would read another
//! tenant's cache.

use std::fmt;

/// Tokens in a block. The same for gateway, engine and index.
pub const BLOCK_TOKENS: usize = 16;

/// Context string of the namespace key derivation (BLAKE3 `derive_key`).
const NAMESPACE_CONTEXT: &str = "homing 2026-11 block namespace";

/// The chained 128-bit hash of a block and all blocks before it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct BlockHash(pub [u8; 16]);

impl BlockHash {
    /// The parent of the first block of every chain.
    pub const ROOT: Self = Self([0; 16]);

    /// The first 64 bits, enough for an index that is not a security border.
    pub fn short(self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }
}

impl fmt::Display for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockHash({self})")
    }
}

/// The key under which a chain is hashed: who may share these blocks.
#[derive(Clone)]
pub struct Namespace {
    key: [u8; 32],
}

impl Namespace {
    /// Derives the key from the model id that the node serves (never a client's alias), the
    /// adapter's name and the cache salt on the wire. An absent part counts as empty.
    pub fn new(model: &str, adapter: Option<&str>, cache_salt: Option<&str>) -> Self {
        let mut material = Vec::with_capacity(model.len() + 96);
        for part in [model, adapter.unwrap_or(""), cache_salt.unwrap_or("")] {
            let length = u32::try_from(part.len()).unwrap_or(u32::MAX);
            material.extend_from_slice(&length.to_le_bytes());
            material.extend_from_slice(part.as_bytes());
        }
        Self {
            key: blake3::derive_key(NAMESPACE_CONTEXT, &material),
        }
    }

    /// The hash of one full block after `parent`.
    pub fn hash(&self, parent: BlockHash, tokens: &[u32; BLOCK_TOKENS]) -> BlockHash {
        // Parent and tokens in one buffer: one keyed call over 80 bytes is two compressions.
        let mut input = [0_u8; 16 + BLOCK_TOKENS * 4];
        let (head, tail) = input.split_at_mut(16);
        head.copy_from_slice(&parent.0);
        for (slot, token) in tail.chunks_exact_mut(4).zip(tokens) {
            slot.copy_from_slice(&token.to_le_bytes());
        }
        let full = blake3::keyed_hash(&self.key, &input);
        let mut hash = [0; 16];
        hash.copy_from_slice(&full.as_bytes()[..16]);
        BlockHash(hash)
    }
}

impl fmt::Debug for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Namespace(key hidden)")
    }
}

/// The hashes of all full blocks of `tokens`, from the start of a prompt.
pub fn hash_chain(namespace: &Namespace, tokens: &[u32]) -> Vec<BlockHash> {
    extend_chain(namespace, BlockHash::ROOT, tokens)
}

/// The hashes of the full blocks of `tokens` that follow `parent`; a partial tail has none.
pub fn extend_chain(namespace: &Namespace, parent: BlockHash, tokens: &[u32]) -> Vec<BlockHash> {
    let (blocks, _tail) = tokens.as_chunks::<BLOCK_TOKENS>();
    let mut previous = parent;
    let next = |block| {
        previous = namespace.hash(previous, block);
        previous
    };
    blocks.iter().map(next).collect()
}

/// How many leading blocks of a prompt can be served from cache at most: the last token is always
/// computed, because its logits are needed.
pub fn creditable_blocks(prompt_tokens: usize) -> usize {
    prompt_tokens.saturating_sub(1) / BLOCK_TOKENS
}

#[cfg(test)]
mod tests {
    //! Catches a changed hash definition: it would silently split gateway, engine and index.
    use super::*;

    fn slow(model: &str, salt: &str, tokens: &[u32]) -> Vec<String> {
        let mut material = Vec::new();
        for part in [model, "", salt] {
            material.extend((part.len() as u32).to_le_bytes());
            material.extend(part.bytes());
        }
        let key = blake3::derive_key("homing 2026-11 block namespace", &material);
        let mut parent = vec![0_u8; 16];
        let mut out = Vec::new();
        for start in (0..tokens.len() / 16 * 16).step_by(16) {
            let mut hasher = blake3::Hasher::new_keyed(&key);
            hasher.update(&parent);
            for token in &tokens[start..start + 16] {
                hasher.update(&token.to_le_bytes());
            }
            parent = hasher.finalize().as_bytes()[..16].to_vec();
            out.push(parent.iter().map(|byte| format!("{byte:02x}")).collect());
        }
        out
    }

    #[test]
    fn chain_equals_the_slow_definition() {
        let tokens: Vec<u32> = (0..100).map(|i| i * 7919 % 49152).collect();
        for length in 0..tokens.len() {
            let namespace = Namespace::new("m", None, Some("salt"));
            let fast: Vec<String> = hash_chain(&namespace, &tokens[..length])
                .iter()
                .map(ToString::to_string)
                .collect();
            assert_eq!(fast, slow("m", "salt", &tokens[..length]));
        }
    }

    #[test]
    fn namespaces_share_nothing() {
        let tokens = [1_u32; 16];
        let mut hashes: Vec<_> = [
            Namespace::new("m", None, None),
            Namespace::new("m", None, Some("a")),
            Namespace::new("m", Some("a"), None),
            Namespace::new("ma", None, None),
        ]
        .iter()
        .map(|namespace| hash_chain(namespace, &tokens)[0])
        .collect();
        hashes.sort();
        hashes.dedup();
        assert_eq!(hashes.len(), 4);
    }

    #[test]
    fn the_last_token_is_never_creditable() {
        for (prompt, blocks) in [(0, 0), (1, 0), (16, 0), (17, 1), (32, 1), (33, 2)] {
            assert_eq!(
                creditable_blocks(prompt),
                blocks,
                "prompt of {prompt} tokens"
            );
        }
    }
}
