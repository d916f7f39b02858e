//! How do records become rows that can be summed?
//!
//! `data/ledger.db` is filled from the journal and from nothing else. A batch of records and the
//! position behind them go in with one transaction, and a row that is there already stays as it
//! is, so any part of the journal may be read twice, by the gateway and by `homing report`. A
//! database that is damaged is set aside and made again from the journal and its archive.
//!
//! Left out on purpose: summing while inserting. Sums are made when somebody asks.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, ErrorCode, TransactionBehavior, params};

use super::entry::{Entry, id_text};
use super::record::UsageRecord;
use super::segment;

/// How long to wait for another writer. Longer than any batch takes.
const BUSY_WAIT: Duration = Duration::from_secs(5);

const SCHEMA: &str = "
CREATE TABLE IF NOT EXISTS usage (
  record_id TEXT PRIMARY KEY, request_id TEXT NOT NULL, tenant TEXT NOT NULL, key_id TEXT NOT NULL,
  model TEXT NOT NULL, node TEXT NOT NULL, session TEXT NOT NULL, t_ms INTEGER NOT NULL,
  input_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL,
  status TEXT NOT NULL, cost_nano_usd INTEGER NOT NULL, cache_savings_nano_usd INTEGER NOT NULL,
  price_version TEXT NOT NULL, ttft_ms INTEGER NOT NULL, duration_ms INTEGER NOT NULL,
  model_asked TEXT
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS usage_by_time ON usage (t_ms);
CREATE TABLE IF NOT EXISTS progress (
  only INTEGER PRIMARY KEY CHECK (only = 0), segment INTEGER NOT NULL, position INTEGER NOT NULL
);";

// A column that databases from before there were aliases lack; null is the model's own id.
const ADD_MODEL_ASKED: &str = "ALTER TABLE usage ADD COLUMN model_asked TEXT";

const INSERT: &str = "
INSERT INTO usage VALUES
  (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18)
ON CONFLICT DO NOTHING";

// Two processes may project at once; the position only ever moves forward.
const ADVANCE: &str = "
INSERT INTO progress VALUES (0, ?1, ?2) ON CONFLICT (only) DO UPDATE
SET segment = excluded.segment, position = excluded.position
WHERE (excluded.segment, excluded.position) > (segment, position)";

/// Why the projection is behind the journal.
#[derive(Debug, thiserror::Error)]
pub enum ProjectionError {
    /// The database refused.
    #[error("ledger database: {0}")]
    Database(#[from] rusqlite::Error),
    /// A journal segment could not be read.
    #[error("journal: {0}")]
    Journal(#[from] io::Error),
}

impl ProjectionError {
    /// Whether the database file itself is at fault, so that only a new one helps.
    pub fn is_damage(&self) -> bool {
        matches!(
            self,
            Self::Database(rusqlite::Error::SqliteFailure(error, _))
                if matches!(error.code, ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase)
        )
    }
}

/// What one pass over the journal did.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Rows that were not there before.
    pub records: usize,
    /// Journal lines that are not what was written.
    pub damaged: usize,
    /// Segment up to which everything is in the database.
    pub segment: u64,
    /// Offset in it.
    pub position: u64,
}

/// The database that reports are made from.
pub struct Projection {
    connection: Connection,
    ledger_dir: PathBuf,
}

impl Projection {
    /// Opens `data/ledger.db`, and makes it (again) if it is missing or damaged.
    pub fn open(data: &Path) -> Result<Self, ProjectionError> {
        let path = data.join("ledger.db");
        match connect(&path) {
            Err(error) if error.is_damage() => Self::make_again(data),
            other => Ok(Self {
                connection: other?,
                ledger_dir: super::dir(data),
            }),
        }
    }

    /// Sets the database aside and begins an empty one.
    pub fn make_again(data: &Path) -> Result<Self, ProjectionError> {
        let path = data.join("ledger.db");
        set_aside(&path)?;
        Ok(Self {
            connection: connect(&path)?,
            ledger_dir: super::dir(data),
        })
    }

    /// The connection, for reports.
    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Takes in what the journal holds beyond the position reached. `live` is the segment being
    /// written and its length, where the caller is the one that writes it.
    pub fn catch_up(&mut self, live: Option<(u64, u64)>) -> Result<Progress, ProjectionError> {
        let (segment, position) = self.position()?;
        let mut progress = Progress {
            segment,
            position,
            ..Progress::default()
        };
        if live == Some((segment, position)) {
            return Ok(progress);
        }
        for (number, path) in all_segments(&self.ledger_dir)? {
            // One that the writer began after `live` was taken waits for the next pass: its
            // predecessor is read only up to there.
            if number < progress.segment || live.is_some_and(|(current, _)| number > current) {
                continue;
            }
            let from = if number == progress.segment {
                progress.position
            } else {
                0
            };
            let to = live.and_then(|(current, used)| (current == number).then_some(used));
            let stretch = segment::read(&path, from, to)?;
            progress.damaged += stretch.damaged;
            (progress.segment, progress.position) = (number, stretch.end);
            progress.records += self.insert(&stretch.entries, number, stretch.end)?;
        }
        Ok(progress)
    }

    /// The tenants and request ids of the last `limit` records.
    pub fn recent_requests(&self, limit: usize) -> Result<Vec<(String, String)>, ProjectionError> {
        let mut statement = self
            .connection
            .prepare("SELECT tenant, request_id FROM usage ORDER BY t_ms DESC LIMIT ?1")?;
        let rows = statement.query_map([i64::try_from(limit).unwrap_or(i64::MAX)], |row| {
            Ok((row.get(0)?, row.get(1)?))
        })?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    fn position(&self) -> Result<(u64, u64), ProjectionError> {
        let found =
            self.connection
                .query_row("SELECT segment, position FROM progress", [], |row| {
                    Ok((row.get::<_, i64>(0)?, row.get::<_, i64>(1)?))
                });
        match found {
            Ok((segment, position)) => Ok((segment.unsigned_abs(), position.unsigned_abs())),
            Err(rusqlite::Error::QueryReturnedNoRows) => Ok((0, 0)),
            Err(error) => Err(error.into()),
        }
    }

    fn insert(
        &mut self,
        entries: &[Entry],
        segment: u64,
        position: u64,
    ) -> Result<usize, ProjectionError> {
        let transaction = self
            .connection
            .transaction_with_behavior(TransactionBehavior::Immediate)?;
        let mut inserted = 0;
        {
            let mut insert = transaction.prepare_cached(INSERT)?;
            for entry in entries {
                if let Entry::Settle(record) = entry {
                    inserted += insert_one(&mut insert, record)?;
                }
            }
        }
        transaction.execute(ADVANCE, params![whole(segment), whole(position)])?;
        transaction.commit()?;
        Ok(inserted)
    }
}

fn insert_one(
    insert: &mut rusqlite::Statement<'_>,
    record: &UsageRecord,
) -> rusqlite::Result<usize> {
    let UsageRecord {
        record_id,
        request_id,
        tenant,
        key_id,
        model,
        model_asked,
        node,
        session,
        t_ms,
        input_tokens,
        cached_tokens,
        output_tokens,
        status,
        cost_nano_usd,
        cache_savings_nano_usd,
        price_version,
        ttft_ms,
        duration_ms,
    } = record;
    insert.execute(params![
        id_text(*record_id),
        request_id,
        tenant,
        key_id,
        model,
        node,
        session,
        t_ms,
        whole(*input_tokens),
        whole(*cached_tokens),
        whole(*output_tokens),
        status.as_str(),
        cost_nano_usd,
        cache_savings_nano_usd,
        price_version,
        ttft_ms,
        duration_ms,
        (model_asked != model).then_some(model_asked),
    ])
}

/// SQLite has no unsigned numbers; no count here comes near the bound.
fn whole(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

fn connect(path: &Path) -> Result<Connection, ProjectionError> {
    crate::store::private_file(path)?;
    let mut connection = Connection::open(path)?;
    connection.busy_timeout(BUSY_WAIT)?;
    connection.pragma_update(None, "journal_mode", "WAL")?;
    // The journal is the durable copy: after a power loss the position falls back with the rows.
    connection.pragma_update(None, "synchronous", "NORMAL")?;
    connection.execute_batch(SCHEMA)?;
    add_columns(&mut connection)?;
    Ok(connection)
}

/// Adds what a database of an earlier version lacks. Two processes may find it missing at once, so
/// the second one looks again once it may write.
fn add_columns(connection: &mut Connection) -> rusqlite::Result<()> {
    let has_model_asked =
        |connection: &Connection| connection.column_exists(None, "usage", "model_asked");
    if has_model_asked(connection)? {
        return Ok(());
    }
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    if !has_model_asked(&transaction)? {
        transaction.execute_batch(ADD_MODEL_ASKED)?;
    }
    transaction.commit()
}

fn set_aside(path: &Path) -> io::Result<()> {
    let aside = path.with_extension(format!("db.damaged-{}", super::unix_ms()));
    tracing::error!(aside = %aside.display(), "ledger database is damaged: made again from the journal");
    std::fs::rename(path, &aside)?;
    for suffix in ["db-wal", "db-shm"] {
        match std::fs::remove_file(path.with_extension(suffix)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Archived and live segments, oldest first.
fn all_segments(ledger_dir: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    // In this order, one that is archived meanwhile is in both lists, never in neither; sorted by
    // path, its place in the archive comes first and is kept.
    let mut segments = segment::list(ledger_dir)?;
    segments.extend(segment::list(&ledger_dir.join(super::ARCHIVE))?);
    segments.sort();
    segments.dedup_by_key(|(number, _)| *number);
    Ok(segments)
}

/// The segment up to which an earlier process has projected; 0 where there is no telling.
pub(crate) fn projected_segment(data: &Path) -> u64 {
    if !data.join("ledger.db").exists() {
        return 0;
    }
    Projection::open(data)
        .and_then(|projection| projection.position())
        .map_or(0, |(segment, _)| segment)
}
