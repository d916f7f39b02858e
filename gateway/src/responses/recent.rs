//! Which responses need no look into the database?
//!
//! Those just written or read: the next turn of an agent comes seconds after the last one and
//! continues it. Bounded in bytes over all tenants; filled and emptied by the thread that owns the
//! database, in its order, so that nothing removed there stays here.

use std::sync::{Arc, Mutex, PoisonError};

use lru::LruCache;

use super::store::Kept;

/// Bytes kept. A long agent conversation is about 1 MiB.
const BYTES_MAX: usize = 64 << 20;
/// What an entry costs beside its text.
const ENTRY_BYTES: usize = 256;

type Key = (Box<str>, Box<str>);

/// Responses by tenant and id.
pub(super) struct Recent(Mutex<Table>);

struct Table {
    entries: LruCache<Key, Arc<Kept>>,
    bytes: usize,
}

fn key(tenant: &str, id: &str) -> Key {
    (tenant.into(), id.into())
}

fn bytes(kept: &Kept) -> usize {
    kept.bytes() + ENTRY_BYTES
}

impl Recent {
    pub(super) fn new() -> Self {
        Self(Mutex::new(Table {
            entries: LruCache::unbounded(),
            bytes: 0,
        }))
    }

    pub(super) fn get(&self, tenant: &str, id: &str) -> Option<Arc<Kept>> {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        table.entries.get(&key(tenant, id)).cloned()
    }

    pub(super) fn insert(&self, tenant: &str, id: &str, kept: Arc<Kept>) {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        table.bytes += bytes(&kept);
        if let Some((_, old)) = table.entries.push(key(tenant, id), kept) {
            table.bytes -= bytes(&old);
        }
        while table.bytes > BYTES_MAX
            && let Some((_, old)) = table.entries.pop_lru()
        {
            table.bytes -= bytes(&old);
        }
    }

    pub(super) fn remove(&self, tenant: &str, id: &str) {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(old) = table.entries.pop(&key(tenant, id)) {
            table.bytes -= bytes(&old);
        }
    }
}
