//! The database that is filled from the journal, and the reports made from it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gateway::ledger::sqlite::Projection;
use gateway::ledger::{Ledger, Status, UsageRecord};
use gateway::report::{By, Format, Query, Report};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::Value;

use super::support::{complete, crashed_copy, opening, prices, read, rows, until};

/// Would catch records that differ from what was settled, whatever the order of events was.
#[test]
fn random_requests_come_back_as_they_were_settled() {
    let mut random = StdRng::seed_from_u64(1);
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(dir.path(), prices()).unwrap();
    let mut open = Vec::new();
    let mut expected = BTreeMap::new();
    for number in 0..3000 {
        let record = opening(number);
        open.push((record.clone(), ledger.begin(&record).unwrap(), 0));
        while open.len() > 20 || (number == 2999 && !open.is_empty()) {
            let (record, mut entry, mut relayed) =
                open.swap_remove(random.random_range(0..open.len()));
            for _ in 0..random.random_range(0..4) {
                relayed += random.random_range(0..30);
                entry.checkpoint(100, 96, relayed);
            }
            let request_id = record.request_id.clone();
            if random.random_bool(0.2) {
                drop(entry);
                let relayed_any = relayed > 0;
                let status = if relayed_any {
                    Status::Cut
                } else {
                    Status::Failed
                };
                let tokens = if relayed_any { (100, 96) } else { (0, 0) };
                // 4 uncached at 1000, 96 cached at 100, output at 2000 nano-dollars each.
                let cost = if relayed_any {
                    4_000 + 9_600 + 2_000 * relayed
                } else {
                    0
                };
                let cost = i64::try_from(cost).unwrap();
                let row = (
                    status.as_str().to_owned(),
                    tokens.0,
                    tokens.1,
                    relayed,
                    cost,
                );
                expected.insert(request_id, row);
            } else {
                let done = complete(&record, relayed);
                let row = (done.status.as_str().to_owned(), 100, 96, relayed, 12_345);
                entry.settle(done).unwrap();
                expected.insert(request_id, row);
            }
        }
    }
    ledger.close();
    assert_eq!(rows(dir.path()), expected);
}

/// Would catch a projection that counts twice, or a database whose loss costs a record.
#[test]
fn the_database_can_be_made_again_at_any_time() {
    let dir = tempfile::tempdir().unwrap();
    let mut first = None;
    // Several lives: archived segments and a live one.
    for life in 0..3 {
        let ledger = Ledger::open(dir.path(), prices()).unwrap();
        for number in 0..50 {
            let record = opening(life * 50 + number);
            ledger
                .begin(&record)
                .unwrap()
                .settle(complete(&record, 3))
                .unwrap();
        }
        ledger.close();
        first = Some(rows(dir.path()));
    }
    let first = first.unwrap();
    assert_eq!(first.len(), 150);
    assert!(
        std::fs::read_dir(dir.path().join("ledger/archive"))
            .unwrap()
            .count()
            >= 2
    );
    let mut projection = Projection::open(dir.path()).unwrap();
    for _ in 0..2 {
        assert_eq!(projection.catch_up(None).unwrap().records, 0);
    }
    // The position is lost, the rows are not: everything is read again and nothing is added.
    projection
        .connection()
        .execute("DELETE FROM progress", [])
        .unwrap();
    assert_eq!(projection.catch_up(None).unwrap().records, 0);
    assert_eq!(read(&projection), first);
    drop(projection);

    std::fs::remove_file(dir.path().join("ledger.db")).unwrap();
    assert_eq!(rows(dir.path()), first);

    std::fs::write(dir.path().join("ledger.db"), vec![0x5a; 64 * 1024]).unwrap();
    assert_eq!(rows(dir.path()), first);
}

/// Would catch a record that is lost because the database was locked while it was settled.
#[test]
fn a_locked_database_only_delays() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(dir.path(), prices()).unwrap();
    let database = dir.path().join("ledger.db");
    until("the database is made", || {
        rusqlite::Connection::open(&database)
            .is_ok_and(|connection| connection.prepare("SELECT 1 FROM progress").is_ok())
    });
    let lock = rusqlite::Connection::open(&database).unwrap();
    lock.busy_timeout(Duration::from_secs(10)).unwrap();
    lock.execute_batch("BEGIN IMMEDIATE").unwrap();
    for number in 0..20 {
        let record = opening(number);
        ledger
            .begin(&record)
            .unwrap()
            .settle(complete(&record, 3))
            .unwrap();
    }
    lock.execute_batch("ROLLBACK").unwrap();
    until("the rows are there", || {
        let count = lock.query_row("SELECT count(*) FROM usage", [], |row| row.get::<_, i64>(0));
        count.unwrap() == 20
    });
}

fn report(data: &std::path::Path, by: By) -> Vec<Value> {
    let query = Query {
        data: data.to_owned(),
        tenant: None,
        from: None,
        to: None,
        by,
    };
    let text = Report::make(&query).unwrap().print(Format::Json);
    serde_json::from_str::<Vec<Value>>(&text).unwrap()
}

/// Would catch a report that bills the open requests of a living gateway, or that misses what was
/// settled a moment ago.
#[test]
fn a_report_beside_a_running_gateway_takes_what_is_settled_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(dir.path(), prices()).unwrap();
    let (first, second) = (opening(1), opening(2));
    let mut running = ledger.begin(&first).unwrap();
    running.checkpoint(100, 96, 3);
    ledger
        .begin(&second)
        .unwrap()
        .settle(complete(&second, 4))
        .unwrap();
    let requests = report(dir.path(), By::Request);
    assert_eq!(requests.len(), 1);
    assert_eq!(requests[0]["request_id"], "req-2");
    running.settle(complete(&first, 9)).unwrap();
    assert_eq!(report(dir.path(), By::Tenant)[0]["output_tokens"], 13);

    // After a crash, the report itself settles what was left open.
    let third = opening(3);
    let mut lost = ledger.begin(&third).unwrap();
    lost.at_node("node-9");
    lost.checkpoint(100, 96, 5);
    let copy = crashed_copy(dir.path());
    let requests = report(copy.path(), By::Request);
    let cut = requests
        .iter()
        .find(|row| row["request_id"] == "req-3")
        .unwrap();
    assert_eq!(
        (&cut["status"], &cut["output_tokens"]),
        (&"cut".into(), &5.into())
    );
    assert_eq!(cut["node"], "node-9");
    drop(lost);
}

/// Would catch a renamed field, a row in the wrong group, or a filter that does not filter.
#[test]
fn report_rows_have_the_promised_fields_and_sums() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(dir.path(), prices()).unwrap();
    for number in 0..6 {
        let record = UsageRecord {
            tenant: if number < 4 { "a" } else { "b" }.to_owned(),
            model_asked: if number < 2 { "claude-x" } else { "m" }.to_owned(),
            t_ms: 1_795_910_400_000 + i64::try_from(number).unwrap() * 43_200_000,
            ..opening(number)
        };
        ledger
            .begin(&record)
            .unwrap()
            .settle(complete(&record, 10))
            .unwrap();
    }
    ledger.close();
    let sums = [
        "requests",
        "input_tokens",
        "cached_tokens",
        "output_tokens",
        "cost_nano_usd",
        "cache_savings_nano_usd",
    ];
    for (by, names, groups) in [
        (By::Tenant, &["tenant"][..], 2),
        (By::Key, &["tenant", "key"], 2),
        (By::Model, &["model"], 1),
        (By::Alias, &["model", "model_asked"], 2),
        (By::Session, &["tenant", "session"], 5),
        (By::Day, &["day"], 3),
        (
            By::Request,
            &["request_id", "model_asked", "node", "status", "t_ms"],
            6,
        ),
    ] {
        let rows = report(dir.path(), by);
        assert_eq!(rows.len(), groups, "{by:?}");
        for field in names.iter().chain(&sums) {
            assert!(rows[0].get(field).is_some(), "{by:?} has no {field}");
        }
        let total: i64 = rows
            .iter()
            .map(|row| row["cost_nano_usd"].as_i64().unwrap())
            .sum();
        assert_eq!(total, 6 * 12_345, "{by:?}");
    }
    let filtered = |tenant: Option<&str>, from: Option<&str>, to: Option<&str>| {
        let query = Query {
            data: dir.path().to_owned(),
            tenant: tenant.map(str::to_owned),
            from: from.map(str::to_owned),
            to: to.map(str::to_owned),
            by: By::Request,
        };
        let csv = Report::make(&query).unwrap().print(Format::Csv);
        csv.lines().count() - 1
    };
    assert_eq!(filtered(Some("a"), None, None), 4);
    assert_eq!(filtered(Some("nobody"), None, None), 0);
    assert_eq!(filtered(None, Some("2026-11-30"), None), 4);
    assert_eq!(
        filtered(None, Some("2026-11-30"), Some("2026-11-30T12:00:00Z")),
        1
    );
}

/// Would catch a database from before there were aliases that is refused, loses rows or bills twice.
#[test]
fn an_older_database_gets_its_new_column() {
    let dir = tempfile::tempdir().unwrap();
    let old = rusqlite::Connection::open(dir.path().join("ledger.db")).unwrap();
    old.execute_batch(
        "CREATE TABLE usage (
           record_id TEXT PRIMARY KEY, request_id TEXT NOT NULL, tenant TEXT NOT NULL,
           key_id TEXT NOT NULL, model TEXT NOT NULL, node TEXT NOT NULL, session TEXT NOT NULL,
           t_ms INTEGER NOT NULL, input_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
           output_tokens INTEGER NOT NULL, status TEXT NOT NULL, cost_nano_usd INTEGER NOT NULL,
           cache_savings_nano_usd INTEGER NOT NULL, price_version TEXT NOT NULL,
           ttft_ms INTEGER NOT NULL, duration_ms INTEGER NOT NULL
         ) WITHOUT ROWID;
         INSERT INTO usage VALUES ('00000000-0000-0000-0000-000000000001', 'req-1', 'demo', 'key_1',
           'm', 'node-0', 's', 1, 100, 96, 10, 'complete', 12345, 86400, 'test-1', 5, 50);",
    )
    .unwrap();
    drop(old);
    let ledger = Ledger::open(dir.path(), prices()).unwrap();
    // The first is there already: its line in the journal changes nothing.
    for (number, asked) in [(1, "m"), (2, "claude-x")] {
        let record = UsageRecord {
            model_asked: asked.to_owned(),
            ..opening(number)
        };
        let entry = ledger.begin(&record).unwrap();
        entry.settle(complete(&record, 10)).unwrap();
    }
    ledger.close();
    let asked: Vec<_> = report(dir.path(), By::Request)
        .iter()
        .map(|row| (row["request_id"].clone(), row["model_asked"].clone()))
        .collect();
    let expected =
        [("req-1", "m"), ("req-2", "claude-x")].map(|(id, name)| (id.into(), name.into()));
    assert_eq!(asked, expected);
    let rows = report(dir.path(), By::Model);
    assert_eq!((rows.len(), &rows[0]["requests"]), (1, &2.into()));
}

/// Would catch a ledger that makes requests wait for the disk or for each other: prints the cost of
/// a request's three calls, and bounds it far above any machine's noise.
#[test]
fn a_request_costs_tens_of_microseconds() {
    const REQUESTS: u32 = 5000;
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(dir.path(), prices()).unwrap();
    let since = Instant::now();
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let ledger: &Arc<Ledger> = &ledger;
            scope.spawn(move || {
                for number in 0..REQUESTS / 2 {
                    let record = opening(u128::from(thread * REQUESTS + number));
                    let mut entry = ledger.begin(&record).unwrap();
                    entry.checkpoint(100, 96, 1);
                    entry.settle(complete(&record, 10)).unwrap();
                }
            });
        }
    });
    let each = since.elapsed() / REQUESTS;
    println!("ledger: {each:?} a request (open, checkpoint, settle), 2 threads");
    assert!(each < Duration::from_millis(5), "{each:?}");
}
