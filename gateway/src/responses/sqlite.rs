//! How are responses kept in the data directory?
//!
//! `data/responses.db`: rows of JSON, read by id and removed by age. Triggers keep each tenant's
//! count and bytes beside them, so that a tenant's share is known without summing. A damaged
//! database is set aside and begun anew: what is lost is the past of conversations, no money.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rusqlite::{Connection, ErrorCode, OptionalExtension, Row, params};

use super::recent::Recent;
use super::rows::{self, append, conversation, make_room};
use super::store::{
    Conversation, Finished, Item, Kept, Order, Placed, ResponseStore, Span, StoreError, Stored,
};
use super::worker::Worker;
use crate::store::TenantId;

/// How long to wait for another process that looks into the database.
const BUSY_WAIT: Duration = Duration::from_secs(5);
/// Rows removed at once for their age, so that nobody waits long behind it.
const EXPIRED_AT_ONCE: i64 = 500;

const SCHEMA: &str = "
CREATE TABLE IF NOT EXISTS shares (
  tenant TEXT PRIMARY KEY, rows INTEGER NOT NULL, bytes INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS responses (
  number INTEGER PRIMARY KEY, tenant TEXT NOT NULL, id TEXT NOT NULL, t_ms INTEGER NOT NULL,
  bytes INTEGER NOT NULL, kept TEXT NOT NULL, UNIQUE (tenant, id)
);
CREATE INDEX IF NOT EXISTS responses_by_age ON responses (tenant, t_ms);
CREATE INDEX IF NOT EXISTS responses_by_time ON responses (t_ms);
CREATE TABLE IF NOT EXISTS conversations (
  number INTEGER PRIMARY KEY, tenant TEXT NOT NULL, id TEXT NOT NULL, t_ms INTEGER NOT NULL,
  created_s INTEGER NOT NULL, metadata TEXT NOT NULL, next INTEGER NOT NULL, UNIQUE (tenant, id)
);
CREATE INDEX IF NOT EXISTS conversations_by_age ON conversations (tenant, t_ms);
CREATE INDEX IF NOT EXISTS conversations_by_time ON conversations (t_ms);
CREATE TABLE IF NOT EXISTS items (
  conversation INTEGER NOT NULL, position INTEGER NOT NULL, tenant TEXT NOT NULL, id TEXT NOT NULL,
  bytes INTEGER NOT NULL, json TEXT NOT NULL, PRIMARY KEY (conversation, position)
);
CREATE UNIQUE INDEX IF NOT EXISTS items_by_id ON items (conversation, id);
CREATE TRIGGER IF NOT EXISTS responses_in AFTER INSERT ON responses BEGIN
  INSERT INTO shares VALUES (new.tenant, 1, new.bytes) ON CONFLICT (tenant)
  DO UPDATE SET rows = rows + 1, bytes = bytes + excluded.bytes; END;
CREATE TRIGGER IF NOT EXISTS responses_out AFTER DELETE ON responses BEGIN
  UPDATE shares SET rows = rows - 1, bytes = bytes - old.bytes WHERE tenant = old.tenant; END;
CREATE TRIGGER IF NOT EXISTS items_in AFTER INSERT ON items BEGIN
  INSERT INTO shares VALUES (new.tenant, 1, new.bytes) ON CONFLICT (tenant)
  DO UPDATE SET rows = rows + 1, bytes = bytes + excluded.bytes; END;
CREATE TRIGGER IF NOT EXISTS items_out AFTER DELETE ON items BEGIN
  UPDATE shares SET rows = rows - 1, bytes = bytes - old.bytes WHERE tenant = old.tenant; END;
CREATE TRIGGER IF NOT EXISTS conversations_in AFTER INSERT ON conversations BEGIN
  INSERT INTO shares VALUES (new.tenant, 1, length(new.metadata)) ON CONFLICT (tenant)
  DO UPDATE SET rows = rows + 1, bytes = bytes + excluded.bytes; END;
CREATE TRIGGER IF NOT EXISTS conversations_out AFTER DELETE ON conversations BEGIN
  DELETE FROM items WHERE conversation = old.number;
  UPDATE shares SET rows = rows - 1, bytes = bytes - length(old.metadata)
  WHERE tenant = old.tenant; END;
CREATE TRIGGER IF NOT EXISTS conversations_of AFTER UPDATE OF metadata ON conversations BEGIN
  UPDATE shares SET bytes = bytes + length(new.metadata) - length(old.metadata)
  WHERE tenant = new.tenant; END;";

/// What a store keeps at most.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    /// Milliseconds for which a response is kept, and a conversation after its last use.
    pub(crate) ttl_ms: i64,
    /// Responses, conversations and items of one tenant.
    pub(crate) rows_per_tenant: i64,
    /// Bytes of their JSON.
    pub(crate) bytes_per_tenant: i64,
}

/// Responses and conversations in SQLite.
pub(crate) struct Sqlite {
    worker: Worker,
    recent: Arc<Recent>,
    bounds: Bounds,
}

impl Sqlite {
    /// Opens `data/responses.db`, and makes it (again) if it is missing or damaged.
    pub(crate) fn open(data: &Path, bounds: Bounds) -> Stored<Self> {
        let path = data.join("responses.db");
        let failed =
            |error: &dyn std::fmt::Display| StoreError(format!("{}: {error}", path.display()));
        crate::secrets::private_dir(data).map_err(|error| failed(&error))?;
        crate::store::private_file(&path).map_err(|error| failed(&error))?;
        let owned = match connect(&path) {
            Err(error) if is_damage(&error) => {
                set_aside(&path).map_err(|error| failed(&error))?;
                crate::store::private_file(&path).map_err(|error| failed(&error))?;
                connect(&path)
            }
            other => other,
        };
        let owned = owned.map_err(|error| failed(&error))?;
        let copier = connect(&path).map_err(|error| failed(&error))?;
        Ok(Self {
            worker: Worker::start(owned, copier).map_err(|error| failed(&error))?,
            recent: Arc::new(Recent::new()),
            bounds,
        })
    }

    /// Ends its threads once everything asked for is done.
    pub(crate) fn close(&self) {
        self.worker.close();
    }

    /// Runs work after which nothing has to be remembered.
    async fn ask<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Stored<T> {
        self.worker.run(work, |_| ()).await
    }

    /// What is older than this is gone.
    fn alive_after(&self, now_ms: i64) -> i64 {
        now_ms.saturating_sub(self.bounds.ttl_ms)
    }
}

#[async_trait]
impl ResponseStore for Sqlite {
    async fn finish(&self, tenant: &TenantId, left: Finished, now_ms: i64) -> Stored<()> {
        let (tenant, bounds, recent) = (tenant.clone(), self.bounds, Arc::clone(&self.recent));
        let oldest = self.alive_after(now_ms);
        let (name, written) = (tenant.clone(), left.response.clone());
        let work = move |db: &Connection| {
            if let Some((id, kept)) = &left.response {
                rows::insert_response(db, tenant.as_str(), id, kept)?;
            }
            if let Some((id, items)) = &left.append
                && let Some(found) = conversation(db, tenant.as_str(), id, oldest)?
            {
                append(db, tenant.as_str(), &found, items, now_ms)?;
            }
            make_room(db, tenant.as_str(), bounds)
        };
        let remember = move |evicted: &Vec<String>| {
            if let Some((id, kept)) = written {
                recent.insert(name.as_str(), &id, kept);
            }
            for id in evicted {
                recent.remove(name.as_str(), id);
            }
        };
        self.worker.run(work, remember).await.map(drop)
    }

    async fn response(
        &self,
        tenant: &TenantId,
        id: &str,
        now_ms: i64,
    ) -> Stored<Option<Arc<Kept>>> {
        let oldest = self.alive_after(now_ms);
        if let Some(kept) = self.recent.get(tenant.as_str(), id) {
            return Ok(Some(kept).filter(|kept| kept.t_ms > oldest));
        }
        let (tenant, id, recent) = (tenant.clone(), id.to_owned(), Arc::clone(&self.recent));
        let (name, key) = (tenant.clone(), id.clone());
        let work = move |db: &Connection| rows::response(db, tenant.as_str(), &id, oldest);
        let remember = move |found: &Option<Arc<Kept>>| {
            if let Some(kept) = found {
                recent.insert(name.as_str(), &key, Arc::clone(kept));
            }
        };
        self.worker.run(work, remember).await
    }

    async fn remove_response(&self, tenant: &TenantId, id: &str, now_ms: i64) -> Stored<bool> {
        let oldest = self.alive_after(now_ms);
        let (tenant, id, recent) = (tenant.clone(), id.to_owned(), Arc::clone(&self.recent));
        let (name, key) = (tenant.clone(), id.clone());
        let work = move |db: &Connection| {
            const DELETE: &str =
                "DELETE FROM responses WHERE tenant = ?1 AND id = ?2 AND t_ms > ?3";
            let removed = db.execute(DELETE, params![tenant.as_str(), id, oldest])?;
            Ok(removed > 0)
        };
        self.worker
            .run(work, move |_| recent.remove(name.as_str(), &key))
            .await
    }

    async fn create(
        &self,
        tenant: &TenantId,
        new: Conversation,
        items: Vec<Item>,
        now_ms: i64,
    ) -> Stored<()> {
        let (tenant, bounds, recent) = (tenant.clone(), self.bounds, Arc::clone(&self.recent));
        let name = tenant.clone();
        let work = move |db: &Connection| {
            let found = rows::insert_conversation(db, tenant.as_str(), &new, now_ms)?;
            append(db, tenant.as_str(), &found, &items, now_ms)?;
            make_room(db, tenant.as_str(), bounds)
        };
        let forget = move |evicted: &Vec<String>| {
            for id in evicted {
                recent.remove(name.as_str(), id);
            }
        };
        self.worker.run(work, forget).await.map(drop)
    }

    async fn conversation(
        &self,
        tenant: &TenantId,
        id: &str,
        now_ms: i64,
    ) -> Stored<Option<Conversation>> {
        let (tenant, id, oldest) = (tenant.clone(), id.to_owned(), self.alive_after(now_ms));
        self.ask(move |db| {
            let found = conversation(db, tenant.as_str(), &id, oldest)?;
            Ok(found.map(|found| found.conversation))
        })
        .await
    }

    async fn set_metadata(
        &self,
        tenant: &TenantId,
        id: &str,
        metadata: String,
        now_ms: i64,
    ) -> Stored<Option<Conversation>> {
        let (tenant, id, oldest) = (tenant.clone(), id.to_owned(), self.alive_after(now_ms));
        self.ask(move |db| {
            let Some(found) = conversation(db, tenant.as_str(), &id, oldest)? else {
                return Ok(None);
            };
            db.execute(
                "UPDATE conversations SET metadata = ?2, t_ms = ?3 WHERE number = ?1",
                params![found.number, metadata, now_ms],
            )?;
            Ok(Some(Conversation {
                metadata,
                ..found.conversation
            }))
        })
        .await
    }

    async fn remove_conversation(&self, tenant: &TenantId, id: &str, now_ms: i64) -> Stored<bool> {
        let (tenant, id, oldest) = (tenant.clone(), id.to_owned(), self.alive_after(now_ms));
        self.ask(move |db| {
            let removed = db.execute(
                "DELETE FROM conversations WHERE tenant = ?1 AND id = ?2 AND t_ms > ?3",
                params![tenant.as_str(), id, oldest],
            )?;
            Ok(removed > 0)
        })
        .await
    }

    async fn append(
        &self,
        tenant: &TenantId,
        id: &str,
        items: Vec<Item>,
        now_ms: i64,
    ) -> Stored<Option<()>> {
        let (tenant, bounds, recent) = (tenant.clone(), self.bounds, Arc::clone(&self.recent));
        let (id, name, oldest) = (id.to_owned(), tenant.clone(), self.alive_after(now_ms));
        let work = move |db: &Connection| {
            let Some(found) = conversation(db, tenant.as_str(), &id, oldest)? else {
                return Ok(None);
            };
            append(db, tenant.as_str(), &found, &items, now_ms)?;
            make_room(db, tenant.as_str(), bounds).map(Some)
        };
        let forget = move |evicted: &Option<Vec<String>>| {
            for id in evicted.iter().flatten() {
                recent.remove(name.as_str(), id);
            }
        };
        let done = self.worker.run(work, forget).await?;
        Ok(done.map(drop))
    }

    async fn items(
        &self,
        tenant: &TenantId,
        id: &str,
        span: Span,
        now_ms: i64,
    ) -> Stored<Option<Vec<Placed>>> {
        let (tenant, id, oldest) = (tenant.clone(), id.to_owned(), self.alive_after(now_ms));
        self.ask(move |db| {
            let Some(found) = conversation(db, tenant.as_str(), &id, oldest)? else {
                return Ok(None);
            };
            let order = match span.order {
                Order::Ascending => "ASC",
                Order::Descending => "DESC",
            };
            let select = format!(
                "SELECT position, id, json FROM items WHERE conversation = ?1 AND position > ?2
                 AND position < ?3 ORDER BY position {order} LIMIT ?4"
            );
            let most = i64::try_from(span.most).unwrap_or(i64::MAX);
            db.prepare_cached(&select)?
                .query_map(params![found.number, span.after, span.before, most], placed)?
                .collect::<Result<Vec<_>, _>>()
                .map(Some)
        })
        .await
    }

    async fn item(
        &self,
        tenant: &TenantId,
        id: &str,
        item: &str,
        now_ms: i64,
    ) -> Stored<Option<Placed>> {
        let (tenant, id, oldest) = (tenant.clone(), id.to_owned(), self.alive_after(now_ms));
        let item = item.to_owned();
        self.ask(move |db| {
            let Some(found) = conversation(db, tenant.as_str(), &id, oldest)? else {
                return Ok(None);
            };
            db.prepare_cached(
                "SELECT position, id, json FROM items WHERE conversation = ?1 AND id = ?2",
            )?
            .query_row(params![found.number, item], placed)
            .optional()
        })
        .await
    }

    async fn remove_item(
        &self,
        tenant: &TenantId,
        id: &str,
        item: &str,
        now_ms: i64,
    ) -> Stored<bool> {
        let (tenant, id, oldest) = (tenant.clone(), id.to_owned(), self.alive_after(now_ms));
        let item = item.to_owned();
        self.ask(move |db| {
            let Some(found) = conversation(db, tenant.as_str(), &id, oldest)? else {
                return Ok(false);
            };
            let removed = db.execute(
                "DELETE FROM items WHERE conversation = ?1 AND id = ?2",
                params![found.number, item],
            )?;
            Ok(removed > 0)
        })
        .await
    }

    async fn expire(&self, now_ms: i64) -> Stored<()> {
        let oldest = self.alive_after(now_ms);
        for table in ["responses", "conversations"] {
            let delete = format!(
                "DELETE FROM {table} WHERE number IN
                 (SELECT number FROM {table} WHERE t_ms <= ?1 ORDER BY t_ms LIMIT ?2)"
            );
            loop {
                let delete = delete.clone();
                let removed = self
                    .ask(move |db| db.execute(&delete, params![oldest, EXPIRED_AT_ONCE]))
                    .await?;
                if removed == 0 {
                    break;
                }
            }
        }
        Ok(())
    }
}

fn placed(row: &Row<'_>) -> rusqlite::Result<Placed> {
    Ok(Placed {
        position: row.get(0)?,
        item: Item {
            id: row.get(1)?,
            json: row.get(2)?,
        },
    })
}

fn connect(path: &Path) -> rusqlite::Result<Connection> {
    let connection = Connection::open(path)?;
    connection.busy_timeout(BUSY_WAIT)?;
    connection.pragma_update(None, "journal_mode", "WAL")?;
    // A power loss may take the last responses; it does not damage the database.
    connection.pragma_update(None, "synchronous", "NORMAL")?;
    // Copying the log is another thread's work.
    connection.pragma_update(None, "wal_autocheckpoint", 0)?;
    connection.execute_batch(SCHEMA)?;
    Ok(connection)
}

fn is_damage(error: &rusqlite::Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase)
    )
}

fn set_aside(path: &Path) -> io::Result<()> {
    let aside = path.with_extension(format!("db.damaged-{}", crate::ledger::unix_ms()));
    tracing::error!(aside = %aside.display(), "the database of responses is damaged: begun anew");
    std::fs::rename(path, &aside)?;
    for suffix in ["db-wal", "db-shm"] {
        match std::fs::remove_file(path.with_extension(suffix)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}
