//! Which tenants and API keys are there, and whose key is this?
//!
//! Tenants and keys live in SQLite (`data/homing.db`); a key is stored only as its SHA-256, which
//! suffices for 32 random bytes. Requests never touch the database: [`Store::identify`] reads a
//! snapshot, replaced within [`REFRESH_EVERY`] of a change by any process (`PRAGMA data_version`).
//!
//! Left out on purpose: caches of single keys, expiry, roles. A revoked key stays as a row, so that
//! old usage records still have a name behind them.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use rusqlite::{Connection, ErrorCode, OptionalExtension, params};
use sha2::{Digest, Sha256};

use crate::tasks::{Phase, Tasks};

mod seen;
mod types;

pub use seen::REQUEST_IDS_MAX;
use seen::SeenRequests;
pub use types::{Debug, KeyIdentity, KeyInfo, NewKey, StoreError, Tenant, TenantId};

/// How often the snapshot is compared with the database. The promise is one second.
pub const REFRESH_EVERY: Duration = Duration::from_millis(250);

/// What an API key starts with, so that secret scanners and people recognise one.
const KEY_PREFIX: &str = "sk-homing-";

const SCHEMA: &str = "
CREATE TABLE IF NOT EXISTS tenants (
  name TEXT PRIMARY KEY, cache_scope TEXT NOT NULL, debug INTEGER NOT NULL,
  created_ms INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS keys (
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL REFERENCES tenants (name), hash BLOB NOT NULL UNIQUE,
  created_ms INTEGER NOT NULL, revoked_ms INTEGER
) WITHOUT ROWID;";

type Hash = [u8; 32];

/// Tenants and keys of one data directory.
pub struct Store {
    path: PathBuf,
    connection: Mutex<Connection>,
    keys: ArcSwap<HashMap<Hash, KeyIdentity>>,
    seen: Mutex<SeenRequests>,
}

impl Store {
    /// Opens the store under `data`, and makes it if it is missing.
    pub fn open(data: &Path) -> Result<Arc<Store>, StoreError> {
        let path = data.join("homing.db");
        let io = |source| StoreError::Io {
            path: path.clone(),
            source,
        };
        crate::secrets::private_dir(data).map_err(io)?;
        private_file(&path).map_err(io)?;
        let connect = || {
            let connection = Connection::open(&path)?;
            connection.busy_timeout(Duration::from_secs(5))?;
            connection.pragma_update(None, "journal_mode", "WAL")?;
            connection.pragma_update(None, "foreign_keys", true)?;
            connection.execute_batch(SCHEMA)?;
            let keys = load(&connection)?;
            Ok((connection, keys))
        };
        let (connection, keys) = connect().map_err(|source| StoreError::Database {
            path: path.clone(),
            source,
        })?;
        Ok(Arc::new(Self {
            connection: Mutex::new(connection),
            keys: ArcSwap::from_pointee(keys),
            seen: Mutex::new(SeenRequests::default()),
            path,
        }))
    }

    /// Keeps the snapshot fresh until the process stops.
    pub fn watch(self: &Arc<Self>, tasks: &Tasks) {
        let store = Arc::clone(self);
        let drain = tasks.drain();
        tasks.spawn("key-refresh", async move {
            // None: to be loaded again, and whoever should know of a failure has been told.
            let mut version = Some(0);
            loop {
                // A comparison is one small read of shared memory: no need for a blocking thread.
                match store.refresh(version) {
                    Ok(now) => version = Some(now),
                    Err(error) if version.is_some() => {
                        version = None;
                        tracing::error!(%error, "API keys may be out of date");
                    }
                    Err(_) => {}
                }
                let stopping = drain.reached(Phase::Stopping);
                if tokio::time::timeout(REFRESH_EVERY, stopping).await.is_ok() {
                    return;
                }
            }
        });
    }

    /// Whose key is this? In memory; at most one second behind other processes.
    pub fn identify(&self, presented: &str) -> Option<KeyIdentity> {
        if !presented.starts_with(KEY_PREFIX) {
            return None;
        }
        // Looking a digest up reveals nothing by its timing that helps to guess the key.
        self.keys.load().get(&hash(presented)).cloned()
    }

    /// Has this tenant used this request id already? Counts it as used from now on. Remembers the
    /// last [`REQUEST_IDS_MAX`] ids of all tenants.
    pub fn request_id_seen(&self, tenant: &TenantId, request_id: &str) -> bool {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.insert(tenant.as_str(), request_id)
    }

    /// Counts request ids of earlier processes as used: pairs of tenant and id.
    pub fn mark_seen(&self, requests: impl IntoIterator<Item = (String, String)>) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        for (tenant, request_id) in requests {
            seen.insert(&tenant, &request_id);
        }
    }

    /// Makes a tenant whose cache is its own.
    pub fn create_tenant(&self, name: &TenantId, debug: Debug) -> Result<(), StoreError> {
        let made = self.connection().execute(
            "INSERT INTO tenants (name, cache_scope, debug, created_ms) VALUES (?1, ?1, ?2, ?3)",
            params![
                name.as_str(),
                debug == Debug::Permitted,
                crate::ledger::unix_ms()
            ],
        );
        match made {
            Err(error) if is_constraint(&error) => Err(StoreError::TenantExists(name.to_string())),
            other => other.map(|_| ()).map_err(|source| self.failed(source)),
        }
    }

    /// All tenants by name.
    pub fn tenants(&self) -> Result<Vec<Tenant>, StoreError> {
        let list = |connection: &Connection| -> rusqlite::Result<Vec<_>> {
            connection
                .prepare("SELECT name, cache_scope, debug FROM tenants ORDER BY name")?
                .query_map([], |row| tenant(row, 0))?
                .collect()
        };
        list(&self.connection()).map_err(|source| self.failed(source))
    }

    /// Makes a key of a tenant.
    pub fn create_key(&self, tenant: &TenantId) -> Result<NewKey, StoreError> {
        let secret = format!(
            "{KEY_PREFIX}{}",
            URL_SAFE_NO_PAD.encode(rand::random::<[u8; 32]>())
        );
        // 48 random bits: an id, not a secret; the database refuses the one repetition in 2^24 keys.
        let id = format!("key_{:012x}", rand::random::<u64>() >> 16);
        let made = self.connection().execute(
            "INSERT INTO keys (id, tenant, hash, created_ms) VALUES (?1, ?2, ?3, ?4)",
            params![id, tenant.as_str(), hash(&secret), crate::ledger::unix_ms()],
        );
        match made {
            Err(error) if is_constraint(&error) => {
                return Err(StoreError::NoTenant(tenant.to_string()));
            }
            other => other.map_err(|source| self.failed(source))?,
        };
        self.reload()?;
        Ok(NewKey { id, secret })
    }

    /// All keys, oldest first.
    pub fn keys(&self) -> Result<Vec<KeyInfo>, StoreError> {
        let list = |connection: &Connection| -> rusqlite::Result<Vec<_>> {
            connection
                .prepare(
                    "SELECT id, tenant, created_ms, revoked_ms FROM keys ORDER BY created_ms, id",
                )?
                .query_map([], |row| {
                    Ok(KeyInfo {
                        id: row.get(0)?,
                        tenant: row.get(1)?,
                        created_ms: row.get(2)?,
                        revoked_ms: row.get(3)?,
                    })
                })?
                .collect()
        };
        list(&self.connection()).map_err(|source| self.failed(source))
    }

    /// Revokes a key by its id; revoking it again changes nothing.
    pub fn revoke_key(&self, id: &str) -> Result<(), StoreError> {
        let changed = self
            .connection()
            .execute(
                "UPDATE keys SET revoked_ms = coalesce(revoked_ms, ?2) WHERE id = ?1",
                params![id, crate::ledger::unix_ms()],
            )
            .map_err(|source| self.failed(source))?;
        if changed == 0 {
            return Err(StoreError::NoKey(id.to_owned()));
        }
        self.reload()
    }

    /// Whether a tenant is there.
    pub fn has_tenant(&self, name: &TenantId) -> Result<bool, StoreError> {
        self.connection()
            .query_row(
                "SELECT 1 FROM tenants WHERE name = ?1",
                [name.as_str()],
                |_| Ok(()),
            )
            .optional()
            .map(|found| found.is_some())
            .map_err(|source| self.failed(source))
    }

    /// Loads the keys again if another connection changed the database since `version`.
    fn refresh(&self, version: Option<i64>) -> Result<i64, StoreError> {
        let now = self
            .connection()
            .query_row("PRAGMA data_version", [], |row| row.get(0))
            .map_err(|source| self.failed(source))?;
        if version != Some(now) {
            self.reload()?;
        }
        Ok(now)
    }

    fn reload(&self) -> Result<(), StoreError> {
        let connection = self.connection();
        let keys = load(&connection).map_err(|source| self.failed(source))?;
        // Stored under the lock, so that an older snapshot never replaces a newer one.
        self.keys.store(Arc::new(keys));
        Ok(())
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        self.connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, source: rusqlite::Error) -> StoreError {
        StoreError::Database {
            path: self.path.clone(),
            source,
        }
    }
}

/// Makes an empty file that only its owner may read, unless there is a file already. SQLite gives
/// the files beside a database the mode of the database.
pub(crate) fn private_file(path: &Path) -> io::Result<()> {
    let file: io::Result<File> = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path);
    file.map(|_| ())
}

fn hash(key: &str) -> Hash {
    Sha256::digest(key.as_bytes()).into()
}

fn tenant(row: &rusqlite::Row<'_>, first: usize) -> rusqlite::Result<Tenant> {
    Ok(Tenant {
        id: TenantId(row.get::<_, String>(first)?.into()),
        cache_scope: row.get::<_, String>(first + 1)?.into(),
        debug: row.get(first + 2)?,
    })
}

fn load(connection: &Connection) -> rusqlite::Result<HashMap<Hash, KeyIdentity>> {
    let mut tenants: HashMap<TenantId, Arc<Tenant>> = HashMap::new();
    let mut statement = connection.prepare(
        "SELECT hash, id, name, cache_scope, debug FROM keys JOIN tenants ON tenant = name
         WHERE revoked_ms IS NULL",
    )?;
    let mut keys = HashMap::new();
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let found = tenant(row, 2)?;
        let tenant = tenants
            .entry(found.id.clone())
            .or_insert_with(|| Arc::new(found));
        let key_id: String = row.get(1)?;
        let identity = KeyIdentity {
            tenant: Arc::clone(tenant),
            key_id: key_id.into(),
        };
        keys.insert(row.get(0)?, identity);
    }
    Ok(keys)
}

fn is_constraint(error: &rusqlite::Error) -> bool {
    error.sqlite_error_code() == Some(ErrorCode::ConstraintViolation)
}

#[cfg(test)]
mod tests;
