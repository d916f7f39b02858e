//! Is this the file that the hub has? SHA-256 of what lies in large-file storage; of the rest git's
//! name for a blob, a SHA-1 over its length and its bytes.

use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};

/// A file's hash, which is its name in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Hash(String);

/// Hashes a file as it comes.
pub(super) struct Hashing(Context);

impl Hash {
    /// From hexadecimal digits: 64 of SHA-256, 40 of git.
    pub(super) fn new(text: &str) -> Option<Self> {
        let is_hash = matches!(text.len(), 40 | 64) && text.bytes().all(|b| b.is_ascii_hexdigit());
        is_hash.then(|| Self(text.to_ascii_lowercase()))
    }

    /// From an ETag, with its quotes and perhaps a mark of weakness.
    pub(super) fn of_etag(etag: &str) -> Option<Self> {
        let etag = etag.strip_prefix("W/").unwrap_or(etag);
        Self::new(etag.trim_matches('"'))
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }

    /// Hashing of a file of so many bytes that should have this hash.
    pub(super) fn hashing(&self, bytes: u64) -> Hashing {
        if self.0.len() == 64 {
            return Hashing(Context::new(&SHA256));
        }
        // Git's own addresses: a collision here needs a hub that wants one, and that could as well
        // name another file.
        let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
        context.update(format!("blob {bytes}\0").as_bytes());
        Hashing(context)
    }
}

impl Hashing {
    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(super) fn finish(self) -> Hash {
        let digest = self.0.finish();
        Hash(
            digest
                .as_ref()
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect(),
        )
    }
}

#[cfg(test)]
mod tests {
    //! Catches a hash that no hub has.
    use super::*;

    #[test]
    fn known_hashes() {
        let check = |bytes: &[u8], expected: &str| {
            let expected = Hash::new(expected).unwrap();
            let mut hashing = expected.hashing(bytes.len() as u64);
            bytes.chunks(3).for_each(|part| hashing.update(part));
            assert_eq!(hashing.finish(), expected);
        };
        // `git hash-object`, `sha256sum`.
        check(b"", "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391");
        check(b"hello\n", "ce013625030ba8dba906f756967f9e9ca394464a");
        check(
            b"",
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        );
        let weak = Hash::of_etag("W/\"CE013625030ba8dba906f756967f9e9ca394464a\"").unwrap();
        assert_eq!(weak.as_str(), "ce013625030ba8dba906f756967f9e9ca394464a");
        for wrong in [
            "",
            "\"abc\"",
            "../../../../../../../etc/passwd0000000000",
            &"g".repeat(64),
        ] {
            assert_eq!(Hash::of_etag(wrong), None, "{wrong}");
        }
    }
}
