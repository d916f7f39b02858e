//! Which statements do the store's operations share?
//!
//! Each runs within the caller's transaction.

use std::sync::Arc;

use rusqlite::{Connection, OptionalExtension, params};

use super::sqlite::Bounds;
use super::store::{Conversation, Item, Kept};

/// A conversation's row.
pub(super) struct Found {
    pub(super) number: i64,
    pub(super) conversation: Conversation,
    /// The position of its next item.
    next: i64,
}

pub(super) fn insert_response(
    db: &Connection,
    tenant: &str,
    id: &str,
    kept: &Kept,
) -> rusqlite::Result<()> {
    let json = serde_json::to_string(kept)
        .map_err(|error| rusqlite::Error::ToSqlConversionFailure(error.into()))?;
    let bytes = i64::try_from(json.len()).unwrap_or(i64::MAX);
    db.prepare_cached(
        "INSERT INTO responses (tenant, id, t_ms, bytes, kept) VALUES (?1, ?2, ?3, ?4, ?5)",
    )?
    .execute(params![tenant, id, kept.t_ms, bytes, json])
    .map(drop)
}

/// The response of this id, if it is younger than `oldest`.
pub(super) fn response(
    db: &Connection,
    tenant: &str,
    id: &str,
    oldest: i64,
) -> rusqlite::Result<Option<Arc<Kept>>> {
    let json: Option<String> = db
        .prepare_cached("SELECT kept FROM responses WHERE tenant = ?1 AND id = ?2 AND t_ms > ?3")?
        .query_row(params![tenant, id, oldest], |row| row.get(0))
        .optional()?;
    let Some(json) = json else {
        return Ok(None);
    };
    let kept = serde_json::from_str(&json).map_err(|error| {
        rusqlite::Error::FromSqlConversionFailure(0, rusqlite::types::Type::Text, error.into())
    })?;
    Ok(Some(Arc::new(kept)))
}

pub(super) fn insert_conversation(
    db: &Connection,
    tenant: &str,
    new: &Conversation,
    now_ms: i64,
) -> rusqlite::Result<Found> {
    db.execute(
        "INSERT INTO conversations (tenant, id, t_ms, created_s, metadata, next)
         VALUES (?1, ?2, ?3, ?4, ?5, 1)",
        params![tenant, new.id, now_ms, new.created_s, new.metadata],
    )?;
    Ok(Found {
        number: db.last_insert_rowid(),
        conversation: new.clone(),
        next: 1,
    })
}

/// The conversation of this id, if it was used after `oldest`.
pub(super) fn conversation(
    db: &Connection,
    tenant: &str,
    id: &str,
    oldest: i64,
) -> rusqlite::Result<Option<Found>> {
    db.prepare_cached(
        "SELECT number, id, created_s, metadata, next FROM conversations
         WHERE tenant = ?1 AND id = ?2 AND t_ms > ?3",
    )?
    .query_row(params![tenant, id, oldest], |row| {
        Ok(Found {
            number: row.get(0)?,
            conversation: Conversation {
                id: row.get(1)?,
                created_s: row.get(2)?,
                metadata: row.get(3)?,
            },
            next: row.get(4)?,
        })
    })
    .optional()
}

/// Adds items at a conversation's end. An item whose id is there already is there already.
pub(super) fn append(
    db: &Connection,
    tenant: &str,
    found: &Found,
    items: &[Item],
    now_ms: i64,
) -> rusqlite::Result<()> {
    let mut insert = db.prepare_cached(
        "INSERT INTO items (conversation, position, tenant, id, bytes, json)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6) ON CONFLICT DO NOTHING",
    )?;
    let mut next = found.next;
    for Item { id, json } in items {
        let bytes = i64::try_from(json.len()).unwrap_or(i64::MAX);
        insert.execute(params![found.number, next, tenant, id, bytes, json])?;
        next += 1;
    }
    db.execute(
        "UPDATE conversations SET next = ?2, t_ms = ?3 WHERE number = ?1",
        params![found.number, next, now_ms],
    )
    .map(drop)
}

/// Removes a tenant's oldest until the rest fits its share; says which responses went.
pub(super) fn make_room(
    db: &Connection,
    tenant: &str,
    bounds: Bounds,
) -> rusqlite::Result<Vec<String>> {
    let mut evicted = Vec::new();
    while !fits(db, tenant, bounds)? {
        let response = oldest(db, "responses", tenant)?;
        let conversation = oldest(db, "conversations", tenant)?;
        let (table, number) = match (response, conversation) {
            (None, None) => break,
            (Some(response), Some(conversation)) if conversation.t_ms < response.t_ms => {
                ("conversations", conversation.number)
            }
            (Some(response), _) => {
                evicted.push(response.id);
                ("responses", response.number)
            }
            (None, Some(conversation)) => ("conversations", conversation.number),
        };
        db.execute(&format!("DELETE FROM {table} WHERE number = ?1"), [number])?;
    }
    Ok(evicted)
}

fn fits(db: &Connection, tenant: &str, bounds: Bounds) -> rusqlite::Result<bool> {
    db.prepare_cached("SELECT rows, bytes FROM shares WHERE tenant = ?1")?
        .query_row([tenant], |row| {
            let (rows, bytes): (i64, i64) = (row.get(0)?, row.get(1)?);
            Ok(rows <= bounds.rows_per_tenant && bytes <= bounds.bytes_per_tenant)
        })
        .optional()
        .map(|fits| fits.unwrap_or(true))
}

struct Oldest {
    number: i64,
    t_ms: i64,
    id: String,
}

fn oldest(db: &Connection, table: &str, tenant: &str) -> rusqlite::Result<Option<Oldest>> {
    db.prepare_cached(&format!(
        "SELECT number, t_ms, id FROM {table} WHERE tenant = ?1 ORDER BY t_ms, number LIMIT 1"
    ))?
    .query_row([tenant], |row| {
        Ok(Oldest {
            number: row.get(0)?,
            t_ms: row.get(1)?,
            id: row.get(2)?,
        })
    })
    .optional()
}
