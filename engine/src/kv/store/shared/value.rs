//! What does the shared store keep for a block, and how is it known to be what it should be?
//!
//! A store that many nodes reach may hold anything under any key. So an object is the body of a block
//! between a short header and a BLAKE3 MAC over key, header and body, by a key that only holders of the
//! node token can derive: what was damaged, forged or put under another key does not fit. The key names
//! the model's weights, the layout of its blocks and the block's hash, which covers all tokens before it
//! and the tenant's scope. An object says nothing about tokens or tenants: whoever asks knows them.
//!
//! ```text
//! 0  magic "HKVO"    4  version u32    8  body bytes u64    16  body    …  MAC, 32 bytes
//! ```

use std::ops::Range;

use cache_index::block::BlockHash;

use crate::kv::layout::{self, BlockLayout, KvDtype};
use crate::kv::store::form::Form;

/// Bytes before the body.
const HEADER_BYTES: usize = 16;
/// Bytes after it.
const MAC_BYTES: usize = 32;
const MAGIC: &[u8; 4] = b"HKVO";
/// The version of the object's form.
const VERSION: u32 = 1;
/// Bytes of the key's prefix, before it is written in hex: among all models of a fleet none meets
/// another by chance.
const PREFIX_BYTES: usize = 16;

/// Makes objects of blocks, and knows its own again.
#[derive(Clone)]
pub struct Seal {
    key: [u8; 32],
    prefix: String,
    dtype: KvDtype,
    form: Form,
    body_bytes: usize,
}

impl std::fmt::Debug for Seal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Without the key.
        f.debug_struct("Seal")
            .field("prefix", &self.prefix)
            .finish_non_exhaustive()
    }
}

impl Seal {
    /// For bodies of `body_bytes` in this form, of a model, known by its fingerprint, in a pool of this
    /// layout. `key` is what holders of the node token share.
    pub fn new(
        key: [u8; 32],
        layout: &BlockLayout,
        (form, body_bytes): (Form, usize),
        model: [u8; 32],
    ) -> Self {
        let mut hasher = blake3::Hasher::new_keyed(&key);
        hasher.update(b"prefix");
        hasher.update(&model);
        // Every field of a layout decides whether its bytes can be read.
        hasher.update(format!("{layout:?} {} {VERSION}", layout::VERSION).as_bytes());
        let prefix = &hasher.finalize().to_hex()[..2 * PREFIX_BYTES];
        Self {
            key,
            prefix: format!("homing-{prefix}-"),
            dtype: layout.dtype,
            form,
            body_bytes,
        }
    }

    /// The key of a block's object: printable, without slashes.
    pub fn key_of(&self, hash: BlockHash) -> String {
        format!("{}{hash}", self.prefix)
    }

    /// Bytes of a block's body.
    pub fn body_bytes(&self) -> usize {
        self.body_bytes
    }

    /// Bytes of an object.
    pub fn object_bytes(&self) -> usize {
        HEADER_BYTES + self.body_bytes + MAC_BYTES
    }

    /// Which part of an object is the body.
    pub fn body_range(&self) -> Range<usize> {
        HEADER_BYTES..HEADER_BYTES + self.body_bytes
    }

    /// The part of an object that is the body, to be written.
    pub fn body_mut<'a>(&self, object: &'a mut [u8]) -> &'a mut [u8] {
        &mut object[self.body_range()]
    }

    /// Writes header and MAC around a body.
    pub fn close(&self, key: &str, object: &mut [u8]) {
        object[..4].copy_from_slice(MAGIC);
        object[4..8].copy_from_slice(&VERSION.to_le_bytes());
        object[8..16].copy_from_slice(&(self.body_bytes as u64).to_le_bytes());
        let end = HEADER_BYTES + self.body_bytes;
        let mac = self.mac(key, &object[..end]);
        object[end..end + MAC_BYTES].copy_from_slice(mac.as_bytes());
    }

    /// Whether an object was closed under this key by a holder of the token, and every value in it is
    /// finite: attention could not mask another.
    pub fn fits(&self, key: &str, object: &[u8]) -> bool {
        let end = HEADER_BYTES + self.body_bytes;
        let Some(mac) = object.get(end..).and_then(|mac| mac.first_chunk()) else {
            return false;
        };
        // `blake3::Hash` compares in constant time.
        let whole = object.len() == self.object_bytes()
            && self.mac(key, &object[..end]) == blake3::Hash::from_bytes(*mac);
        whole
            && object[..4] == *MAGIC
            && self.form.is_finite(self.dtype, &object[self.body_range()])
    }

    fn mac(&self, key: &str, covered: &[u8]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(b"object");
        hasher.update(&(key.len() as u32).to_le_bytes());
        hasher.update(key.as_bytes());
        hasher.update(covered);
        hasher.finalize()
    }
}

#[cfg(test)]
mod tests {
    //! Catches an object that fits where it should not: changed, cut, under another key, of another
    //! token, model or layout, or with a value that attention cannot take.
    use super::*;
    use crate::kv::layout::{HeadRange, KeyOrder};

    fn layout(dtype: KvDtype) -> BlockLayout {
        BlockLayout {
            dtype,
            key_order: KeyOrder::Halves,
            block_tokens: 16,
            layers: 1,
            kv_heads: 1,
            heads: HeadRange { first: 0, count: 1 },
            head_dim: 2,
        }
    }

    fn seal(token: u8, model: u8, dtype: KvDtype) -> Seal {
        let layout = layout(dtype);
        let kept = (Form::Exact, layout.body_bytes());
        Seal::new([token; 32], &layout, kept, [model; 32])
    }

    fn object(seal: &Seal, key: &str, fill: u8) -> Vec<u8> {
        let mut object = vec![0; seal.object_bytes()];
        seal.body_mut(&mut object).fill(fill);
        seal.close(key, &mut object);
        object
    }

    #[test]
    fn what_fits() {
        let ours = seal(1, 1, KvDtype::F16);
        let key = ours.key_of(BlockHash([7; 16]));
        let good = object(&ours, &key, 3);
        assert!(ours.fits(&key, &good));
        assert_eq!(good[ours.body_range()], vec![3; ours.body_bytes()]);
        for at in 0..good.len() {
            let mut damaged = good.clone();
            damaged[at] ^= 1;
            assert!(!ours.fits(&key, &damaged), "a bit of byte {at}");
        }
        assert!(!ours.fits(&key, &good[..good.len() - 1]), "cut");
        assert!(!ours.fits(&key, &[]), "empty");
        let other = ours.key_of(BlockHash([8; 16]));
        assert!(!ours.fits(&other, &good), "swapped");
        let forged = object(&seal(2, 1, KvDtype::F16), &key, 3);
        assert!(!ours.fits(&key, &forged), "by another token");
    }

    #[test]
    fn values_that_are_not_finite_do_not_fit() {
        for (dtype, fill, fits) in [
            (KvDtype::F16, 0x7b, true),
            (KvDtype::F16, 0x7c, false),
            (KvDtype::F16, 0xff, false),
            (KvDtype::F32, 0x7e, true),
            (KvDtype::F32, 0x7f, true),
            (KvDtype::F32, 0xff, false),
        ] {
            let seal = seal(1, 1, dtype);
            // 0x7f7f7f7f is finite, 0x7fffffff is not.
            let object = object(&seal, "k", fill);
            assert_eq!(seal.fits("k", &object), fits, "{dtype:?} of {fill:#x}");
        }
    }

    #[test]
    fn a_key_names_token_model_and_layout() {
        let hash = BlockHash([7; 16]);
        let all = [
            seal(1, 1, KvDtype::F16),
            seal(2, 1, KvDtype::F16),
            seal(1, 2, KvDtype::F16),
            seal(1, 1, KvDtype::F32),
        ];
        let keys: std::collections::HashSet<_> = all.iter().map(|seal| seal.key_of(hash)).collect();
        assert_eq!(keys.len(), all.len());
        assert!(keys.iter().all(|key| key.len() == 7 + 32 + 1 + 32));
    }
}
