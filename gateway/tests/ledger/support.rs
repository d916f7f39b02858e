//! What the ledger's tests share.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gateway::ledger::sqlite::Projection;
use gateway::ledger::{Status, UsageRecord, unix_ms};
use policies::price::{PriceBook, Rates};

/// A dollar a million in, a tenth of it cached, two dollars out: nano-dollars are easy to see.
pub(crate) const RATES: Rates = Rates {
    input: 1_000_000_000,
    cached_input: 100_000_000,
    output: 2_000_000_000,
};

pub(crate) fn prices() -> PriceBook {
    PriceBook {
        version: "test-1".to_owned(),
        models: [("m".to_owned(), RATES)].into(),
    }
}

pub(crate) fn opening(number: u128) -> UsageRecord {
    UsageRecord {
        record_id: number,
        request_id: format!("req-{number}"),
        tenant: "demo".to_owned(),
        key_id: "key_1".to_owned(),
        model: "m".to_owned(),
        model_asked: "m".to_owned(),
        node: "node-0".to_owned(),
        session: format!("session-{}", number % 3),
        t_ms: unix_ms(),
        input_tokens: 0,
        cached_tokens: 0,
        output_tokens: 0,
        status: Status::Failed,
        cost_nano_usd: 0,
        cache_savings_nano_usd: 0,
        price_version: "test-1".to_owned(),
        ttft_ms: 0,
        duration_ms: 0,
    }
}

pub(crate) fn complete(opening: &UsageRecord, output: u64) -> UsageRecord {
    UsageRecord {
        input_tokens: 100,
        cached_tokens: 96,
        output_tokens: output,
        status: Status::Complete,
        cost_nano_usd: 12_345,
        cache_savings_nano_usd: 86_400,
        ttft_ms: 5,
        duration_ms: 50,
        ..opening.clone()
    }
}

/// Request id → status, input, cached and output tokens, cost.
pub(crate) type Rows = BTreeMap<String, (String, u64, u64, u64, i64)>;

/// What the database of a data directory holds once the journal is taken in.
pub(crate) fn rows(data: &Path) -> Rows {
    let mut projection = Projection::open(data).unwrap();
    projection.catch_up(None).unwrap();
    read(&projection)
}

pub(crate) fn read(projection: &Projection) -> Rows {
    let mut statement = projection
        .connection()
        .prepare(
            "SELECT request_id, status, input_tokens, cached_tokens, output_tokens, cost_nano_usd
             FROM usage",
        )
        .unwrap();
    let mut rows = Rows::new();
    let found = statement
        .query_map([], |row| {
            let number = |at| row.get::<_, i64>(at).map(i64::unsigned_abs);
            let values = (row.get(1)?, number(2)?, number(3)?, number(4)?, row.get(5)?);
            Ok((row.get::<_, String>(0)?, values))
        })
        .unwrap();
    for row in found {
        let (request_id, values) = row.unwrap();
        assert!(
            rows.insert(request_id, values).is_none(),
            "a request is there twice"
        );
    }
    rows
}

/// A copy of a data directory as a crash at this moment would leave it.
pub(crate) fn crashed_copy(data: &Path) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    copy_dir(data, copy.path());
    copy
}

fn copy_dir(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy_dir(&path, &target);
        } else {
            std::fs::copy(&path, &target).unwrap();
        }
    }
}

/// The journal segments that are not archived.
pub(crate) fn segments(data: &Path) -> Vec<PathBuf> {
    let mut segments: Vec<_> = std::fs::read_dir(data.join("ledger"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_file())
        .collect();
    segments.sort();
    segments
}

/// Waits until `condition` holds.
pub(crate) fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < deadline, "never happened: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Runs one test of this binary as a process of its own, with `role` set in its environment.
pub(crate) fn as_process(test: &str, role: &str, value: &Path) -> std::process::Command {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(role, value);
    command
}
