//! What did the last process leave behind?
//!
//! Requests that were opened and never settled belong to a process that died. Each becomes a
//! record with status `cut`, holding what its last checkpoint says was relayed and rated by the
//! prices in force when it was opened. A request without a checkpoint had relayed nothing and
//! costs nothing. A torn tail (the line a power loss broke) is cut off the file.
//!
//! Only the holder of the data directory's lock may do this: the open requests of a living
//! gateway are not lost ones.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io;
use std::path::Path;

use policies::price::{DEFAULT_MODEL, PriceBook, Rates, Usage};

use super::entry::{Checkpoint, Entry};
use super::record::{Status, UsageRecord};
use super::segment;

/// What was found in the segments of an ended process.
pub(crate) struct Found {
    /// Records for the requests it left open.
    pub(crate) cut: Vec<UsageRecord>,
    /// The highest segment number.
    pub(crate) last_segment: u64,
    /// Lines that are not what was written.
    pub(crate) damaged: usize,
    /// Bytes of torn tails that were cut off.
    pub(crate) torn_bytes: u64,
}

/// Reads every segment in `dir` and cuts torn tails and unused room off.
pub(crate) fn recover(dir: &Path) -> io::Result<Found> {
    let mut open: HashMap<u128, (Box<UsageRecord>, Rates, Option<Checkpoint>)> = HashMap::new();
    let mut found = Found {
        cut: Vec::new(),
        last_segment: 0,
        damaged: 0,
        torn_bytes: 0,
    };
    for (number, path) in segment::list(dir)? {
        let stretch = segment::read(&path, 0, None)?;
        for entry in stretch.entries {
            match entry {
                Entry::Open(record, rates) => {
                    open.insert(record.record_id, (record, rates, None));
                }
                Entry::Checkpoint(checkpoint, node) => {
                    if let Some((record, _, last)) = open.get_mut(&checkpoint.record_id) {
                        *last = Some(checkpoint);
                        record.node = node;
                    }
                }
                Entry::Settle(record) => {
                    open.remove(&record.record_id);
                }
            }
        }
        found.damaged += stretch.damaged;
        found.torn_bytes += stretch.torn_bytes;
        found.last_segment = number;
        OpenOptions::new()
            .write(true)
            .open(&path)?
            .set_len(stretch.end)?;
    }
    found.cut = open
        .into_values()
        .map(|(record, rates, last)| unfinished(&record, &rates, last, Status::Cut))
        .collect();
    found.cut.sort_by_key(|record| record.record_id);
    Ok(found)
}

/// The record of a request that nobody settled.
pub(crate) fn unfinished(
    opening: &UsageRecord,
    rates: &Rates,
    last: Option<Checkpoint>,
    status: Status,
) -> UsageRecord {
    let usage = last.map_or(Usage::default(), |last| Usage {
        input: last.input,
        cached: last.cached,
        output: last.output,
    });
    let book = PriceBook {
        version: opening.price_version.clone(),
        models: [(DEFAULT_MODEL.to_owned(), *rates)].into(),
    };
    let rated = book.rate(&opening.model, &usage);
    UsageRecord {
        input_tokens: usage.input,
        cached_tokens: usage.cached,
        output_tokens: usage.output,
        status,
        cost_nano_usd: rated.cost_nano_usd,
        cache_savings_nano_usd: rated.cache_savings_nano_usd,
        duration_ms: last.map_or(0, |last| last.elapsed_ms),
        ..opening.clone()
    }
}
