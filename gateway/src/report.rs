//! Who used how much, and what is the bill?
//!
//! Sums over the ledger's database, after taking in what the journal holds: so a report is right
//! while the gateway runs, and after it was killed (then requests it left open become `cut` first;
//! those of a living gateway are not touched and not in the report). One shape of rows, three ways
//! to print them.
//!
//! Left out on purpose: rounding. Money is whole nano-dollars in CSV and JSON; only the table shows
//! dollars.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use rusqlite::{Connection, params_from_iter};
use serde_json::{Map, Value};

use crate::ledger::sqlite::{Projection, ProjectionError};
use crate::ledger::{Ledger, LedgerError};

/// What the rows are sums over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum By {
    /// One row a tenant.
    Tenant,
    /// One row an API key.
    Key,
    /// One row a model.
    Model,
    /// One row a model and name by which clients asked for it.
    Alias,
    /// One row a session (of one tenant).
    Session,
    /// One row a UTC day.
    Day,
    /// One row a request: no sum.
    Request,
}

/// How the rows are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// Columns for people.
    Table,
    /// A header line and one line a row.
    Csv,
    /// One array of objects.
    Json,
}

/// Which records are summed, and how.
#[derive(Clone, Debug)]
pub struct Query {
    /// Data directory of the gateway.
    pub data: PathBuf,
    /// Only this tenant.
    pub tenant: Option<String>,
    /// Only requests that arrived at or after this time.
    pub from: Option<String>,
    /// Only requests that arrived before this time.
    pub to: Option<String>,
    /// What rows stand for.
    pub by: By,
}

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// No gateway has ever used this directory.
    #[error("{0} holds no ledger: name the gateway's directory with --data")]
    NoLedger(PathBuf),
    /// A time that is none.
    #[error(
        "--{option} {text:?} is no time: give 2026-11-29, 2026-11-29T10:00:00Z or unix milliseconds"
    )]
    Time {
        /// Which option.
        option: &'static str,
        /// What was given.
        text: String,
    },
    /// The database cannot be brought up to date or read.
    #[error(transparent)]
    Projection(#[from] ProjectionError),
    /// Summing failed.
    #[error("ledger database: {0}")]
    Database(#[from] rusqlite::Error),
}

/// Columns that name a row, then the sums that every row has.
const SUMS: &str = "count(*) AS requests, sum(input_tokens) AS input_tokens,
 sum(cached_tokens) AS cached_tokens, sum(output_tokens) AS output_tokens,
 sum(cost_nano_usd) AS cost_nano_usd, sum(cache_savings_nano_usd) AS cache_savings_nano_usd";

const REQUEST_COLUMNS: &str =
    "request_id, tenant, key_id AS key, model, coalesce(model_asked, model) AS model_asked, session, node, status, t_ms,
 1 AS requests, input_tokens, cached_tokens, output_tokens, cost_nano_usd, cache_savings_nano_usd,
 ttft_ms, duration_ms, price_version, record_id";

impl By {
    fn columns(self) -> &'static str {
        match self {
            Self::Tenant => "tenant",
            Self::Key => "tenant, key_id AS key",
            Self::Model => "model",
            Self::Alias => "model, coalesce(model_asked, model) AS model_asked",
            Self::Session => "tenant, session",
            Self::Day => "strftime('%Y-%m-%d', t_ms / 1000, 'unixepoch') AS day",
            Self::Request => REQUEST_COLUMNS,
        }
    }

    fn statement(self, filter: &str) -> String {
        let columns = self.columns();
        match self {
            Self::Request => {
                format!("SELECT {columns} FROM usage WHERE {filter} ORDER BY t_ms, record_id")
            }
            Self::Tenant | Self::Model | Self::Day => {
                format!("SELECT {columns}, {SUMS} FROM usage WHERE {filter} GROUP BY 1 ORDER BY 1")
            }
            Self::Key | Self::Alias | Self::Session => format!(
                "SELECT {columns}, {SUMS} FROM usage WHERE {filter} GROUP BY 1, 2 ORDER BY 1, 2"
            ),
        }
    }
}

/// The rows of a report.
#[derive(Debug, PartialEq)]
pub struct Report {
    columns: Vec<String>,
    rows: Vec<Vec<Value>>,
}

impl Report {
    /// Brings the database up to date and sums.
    pub fn make(query: &Query) -> Result<Self, ReportError> {
        settle_what_is_left(&query.data)?;
        let mut projection = Projection::open(&query.data)?;
        if let Err(error) = projection.catch_up(None) {
            if !error.is_damage() {
                return Err(error.into());
            }
            projection = Projection::make_again(&query.data)?;
            projection.catch_up(None)?;
        }
        Self::read(projection.connection(), query)
    }

    fn read(connection: &Connection, query: &Query) -> Result<Self, ReportError> {
        let mut filter = "1".to_owned();
        let mut arguments: Vec<rusqlite::types::Value> = Vec::new();
        let mut add = |condition: &str, argument: rusqlite::types::Value| {
            arguments.push(argument);
            // Writing to a String cannot fail.
            let _ = write!(filter, " AND {condition} ?{}", arguments.len());
        };
        if let Some(tenant) = &query.tenant {
            add("tenant =", tenant.clone().into());
        }
        if let Some(from) = &query.from {
            add("t_ms >=", unix_ms(connection, "from", from)?.into());
        }
        if let Some(to) = &query.to {
            add("t_ms <", unix_ms(connection, "to", to)?.into());
        }
        let mut statement = connection.prepare(&query.by.statement(&filter))?;
        let columns: Vec<String> = statement.column_names().map(str::to_owned).collect();
        let mut rows = Vec::new();
        let mut found = statement.query(params_from_iter(arguments))?;
        while let Some(row) = found.next()? {
            let cells = (0..columns.len()).map(|at| cell(row, at));
            rows.push(cells.collect::<Result<_, _>>()?);
        }
        Ok(Self { columns, rows })
    }

    /// The report as text, with a newline at its end.
    pub fn print(&self, format: Format) -> String {
        match format {
            Format::Table => self.table(),
            Format::Csv => self.csv(),
            Format::Json => self.json(),
        }
    }

    fn json(&self) -> String {
        let object = |row: &Vec<Value>| -> Value {
            let fields = self.columns.iter().cloned().zip(row.iter().cloned());
            Value::Object(fields.collect::<Map<_, _>>())
        };
        let rows: Vec<Value> = self.rows.iter().map(object).collect();
        format!("{:#}\n", Value::Array(rows))
    }

    fn csv(&self) -> String {
        let line = |cells: Vec<String>| cells.join(",") + "\n";
        let mut text = line(self.columns.iter().map(|name| csv_cell(name)).collect());
        for row in &self.rows {
            text += &line(row.iter().map(|value| csv_cell(&plain(value))).collect());
        }
        text
    }

    fn table(&self) -> String {
        let name = |column: &String| column.replace("_nano_usd", "_usd");
        let mut lines = vec![self.columns.iter().map(name).collect::<Vec<_>>()];
        lines.extend(self.rows.iter().map(|row| {
            let shown = |(column, value): (&String, &Value)| match value.as_i64() {
                Some(nano) if column.ends_with("_nano_usd") => dollars(nano),
                _ => plain(value),
            };
            self.columns.iter().zip(row).map(shown).collect()
        }));
        let width = |at: usize| lines.iter().map(|line| line[at].chars().count()).max();
        let widths: Vec<usize> = (0..self.columns.len())
            .map(|at| width(at).unwrap_or(0))
            .collect();
        let numeric: Vec<bool> = (0..self.columns.len())
            .map(|at| self.rows.first().is_some_and(|row| row[at].is_number()))
            .collect();
        let mut text = String::new();
        for line in &lines {
            let cells = line
                .iter()
                .zip(&widths)
                .zip(&numeric)
                .map(|((cell, width), numeric)| {
                    if *numeric {
                        format!("{cell:>width$}")
                    } else {
                        format!("{cell:<width$}")
                    }
                });
            text += cells.collect::<Vec<_>>().join("  ").trim_end();
            text.push('\n');
        }
        if self.rows.is_empty() {
            text += "(no requests)\n";
        }
        text
    }
}

/// A full disk keeps the records of an ended gateway from being settled; the rest is still right.
fn settle_what_is_left(data: &Path) -> Result<(), ReportError> {
    if !crate::ledger::dir(data).is_dir() && !data.join("homing.db").is_file() {
        return Err(ReportError::NoLedger(data.to_owned()));
    }
    match Ledger::recover_if_idle(data) {
        Ok(_) => Ok(()),
        Err(error @ (LedgerError::Full { .. } | LedgerError::Io { .. })) => {
            tracing::warn!(%error, "requests that an ended gateway left open are not in this report");
            Ok(())
        }
        Err(LedgerError::InUse { .. }) => Ok(()),
    }
}

/// SQLite reads ISO dates; plain digits are unix milliseconds.
fn unix_ms(connection: &Connection, option: &'static str, text: &str) -> Result<i64, ReportError> {
    let refused = || ReportError::Time {
        option,
        text: text.to_owned(),
    };
    if text.bytes().all(|byte| byte.is_ascii_digit()) {
        return text.parse().map_err(|_| refused());
    }
    let seconds: Option<f64> = connection
        .query_row("SELECT unixepoch(?1, 'subsec')", [text], |row| row.get(0))
        .map_err(|_| refused())?;
    // "now" and Julian days are times to SQLite and surprises here.
    let seconds = seconds.filter(|_| text.contains('-')).ok_or_else(refused)?;
    #[expect(
        clippy::cast_possible_truncation,
        reason = "years up to 9999 fit by far"
    )]
    Ok((seconds * 1000.0).round() as i64)
}

fn cell(row: &rusqlite::Row<'_>, at: usize) -> rusqlite::Result<Value> {
    use rusqlite::types::ValueRef;
    Ok(match row.get_ref(at)? {
        ValueRef::Integer(number) => number.into(),
        ValueRef::Real(number) => number.into(),
        ValueRef::Text(text) => String::from_utf8_lossy(text).into(),
        ValueRef::Null | ValueRef::Blob(_) => Value::Null,
    })
}

fn plain(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}

fn csv_cell(text: &str) -> String {
    if text.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.to_owned()
    }
}

/// Nano-dollars as dollars, all nine digits.
fn dollars(nano: i64) -> String {
    let sign = if nano < 0 { "-" } else { "" };
    let nano = nano.unsigned_abs();
    format!("{sign}{}.{:09}", nano / 1_000_000_000, nano % 1_000_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Would catch money that a float or a sign has changed on its way to the reader.
    #[test]
    fn dollars_keep_every_digit() {
        for (nano, expected) in [
            (0, "0.000000000"),
            (1, "0.000000001"),
            (19_800_000, "0.019800000"),
            (-1_500_000_000, "-1.500000000"),
            (i64::MIN, "-9223372036.854775808"),
        ] {
            assert_eq!(dollars(nano), expected);
        }
    }

    /// Would catch a time that is silently taken for another one.
    #[test]
    fn times_are_read_or_refused() {
        let connection = Connection::open_in_memory().unwrap();
        for (text, expected) in [
            ("2026-11-29", Some(1_795_910_400_000)),
            ("2026-11-29T10:00:00Z", Some(1_795_946_400_000)),
            ("2026-11-29 10:00:00.250", Some(1_795_946_400_250)),
            ("2026-11-29T10:00:00+02:00", Some(1_795_939_200_000)),
            ("1795910400000", Some(1_795_910_400_000)),
            ("yesterday", None),
            ("now", None),
            ("2460000.5", None),
            ("2026-13-45", None),
        ] {
            assert_eq!(unix_ms(&connection, "from", text).ok(), expected, "{text}");
        }
    }

    /// Would catch a cell that breaks out of its column.
    #[test]
    fn csv_cells_are_quoted() {
        for (text, expected) in [("a", "a"), ("a,b", "\"a,b\""), ("a\"b", "\"a\"\"b\"")] {
            assert_eq!(csv_cell(text), expected);
        }
    }
}
