//! Which tenants and API keys are there? (skeleton)
use std::path::Path;
use std::sync::Arc;

/// A tenant's name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantId(pub Arc<str>);

impl TenantId {
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

/// The store failed.
#[derive(Debug, thiserror::Error)]
#[error("store")]
pub struct StoreError;

/// Tenants and keys.
pub struct Store;

impl Store {
    /// Opens the store under `data`, and makes it if it is missing.
    pub fn open(_data: &Path) -> Result<Arc<Store>, StoreError> {
        unimplemented!()
    }
    /// Whose key is this? In memory; at most one second behind other processes.
    pub fn identify(&self, _presented: &str) -> Option<KeyIdentity> {
        unimplemented!()
    }
    /// Has this tenant used this request id before (since start: in memory, bounded)? Marks it as used.
    pub fn request_id_seen(&self, _tenant: &TenantId, _request_id: &str) -> bool {
        unimplemented!()
    }
}
