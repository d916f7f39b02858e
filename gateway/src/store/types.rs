//! What do tenants and keys look like outside the database?

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// Longest tenant name; it is a label in metrics and a column in every report.
const TENANT_NAME_BYTES_MAX: usize = 64;

/// A tenant's name: 1 to 64 of `a-z A-Z 0-9 . _ -`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantId(pub(super) Arc<str>);

impl TenantId {
    /// Checks a name.
    pub fn new(name: &str) -> Result<Self, StoreError> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if name.is_empty() || name.len() > TENANT_NAME_BYTES_MAX || !name.bytes().all(allowed) {
            return Err(StoreError::TenantName(name.to_owned()));
        }
        Ok(Self(name.into()))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for TenantId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// One customer: owner of keys, sessions, cache and bill.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tenant {
    /// The name.
    pub id: TenantId,
    /// Whose cache the tenant shares; its own unless the operator declared a group.
    pub cache_scope: Arc<str>,
    /// May ask for `x-homing-debug` headers.
    pub debug: bool,
}

/// What a presented key proves.
#[derive(Clone, Debug)]
pub struct KeyIdentity {
    /// Whose key.
    pub tenant: Arc<Tenant>,
    /// The key's public short id, used in the ledger.
    pub key_id: Arc<str>,
}

/// A key that was just made. The only moment at which its secret exists outside its owner.
pub struct NewKey {
    /// The public short id.
    pub id: String,
    /// The key itself: `sk-homing-` and 43 characters.
    pub secret: String,
}

/// A key as it can be listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyInfo {
    /// The public short id.
    pub id: String,
    /// Whose key.
    pub tenant: String,
    /// Unix milliseconds of its creation.
    pub created_ms: i64,
    /// Unix milliseconds of its revocation.
    pub revoked_ms: Option<i64>,
}

/// Why the store refused.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A tenant name outside what is allowed.
    #[error("tenant name {0:?}: 1 to 64 of a-z A-Z 0-9 . _ - are allowed")]
    TenantName(String),
    /// The tenant is there already.
    #[error("tenant {0} exists already")]
    TenantExists(String),
    /// No such tenant.
    #[error("no tenant {0}: create it with `homing tenant create {0}`")]
    NoTenant(String),
    /// No such key.
    #[error("no key {0}: `homing key list` shows the ids")]
    NoKey(String),
    /// The database failed.
    #[error("the key store {path}: {source}")]
    Database {
        /// The file.
        path: PathBuf,
        /// Why.
        source: rusqlite::Error,
    },
    /// The file could not be made.
    #[error("the key store {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Whether a tenant's keys may ask for `x-homing-debug` headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Debug {
    /// They may.
    Permitted,
    /// They may not.
    Refused,
}
