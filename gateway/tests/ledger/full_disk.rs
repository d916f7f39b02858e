//! A disk without room: a limit on file sizes, which the kernel enforces as it does a full disk.

use std::path::Path;
use std::process::{Command, Stdio};

use gateway::ledger::{Ledger, LedgerError, Status};
use rustix::process::{Resource, getrlimit, setrlimit};

use super::support::{as_process, complete, opening, prices, rows};

const ROLE: &str = "HOMING_TEST_FULL_DISK";

/// The process under the limit. Does nothing as an ordinary test.
#[test]
fn limited_process() {
    let Some(data) = std::env::var_os(ROLE) else {
        return;
    };
    let data = Path::new(&data);
    let ledger = Ledger::open(data, prices()).unwrap();
    let mut open = Vec::new();
    let refused = loop {
        let record = opening(open.len() as u128);
        match ledger.begin(&record) {
            Ok(entry) => open.push((record, entry)),
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, LedgerError::Full { .. }), "{refused}");
    assert!(open.len() > 500, "only {} requests fit", open.len());
    // Every admitted request settles, however it ends.
    for (number, (record, mut entry)) in open.into_iter().enumerate() {
        entry.checkpoint(100, 96, 1);
        match number % 3 {
            0 => entry.settle(complete(&record, 99_999)).unwrap(),
            1 => {
                let node = "a-node-with-a-far-longer-name-than-it-had-at-first".to_owned();
                entry
                    .settle(gateway::ledger::UsageRecord {
                        node,
                        status: Status::Cancelled,
                        ..complete(&record, u64::MAX >> 1)
                    })
                    .unwrap();
            }
            _ => drop(entry),
        }
    }
    assert_eq!(ledger.stats().open_requests, 0);
    // Refused until there is room, then taken again, without a restart.
    let late = opening(1_000_000);
    assert!(fill(&ledger).is_some());
    let mut limit = getrlimit(Resource::Fsize);
    limit.current = limit.maximum;
    setrlimit(Resource::Fsize, limit).unwrap();
    ledger
        .begin(&late)
        .unwrap()
        .settle(complete(&late, 5))
        .unwrap();
    ledger.close();
}

/// Fills the journal until it refuses.
fn fill(ledger: &Ledger) -> Option<LedgerError> {
    (2_000_000..2_100_000).find_map(|number| {
        let record = opening(number);
        match ledger.begin(&record) {
            Ok(entry) => {
                entry.settle(complete(&record, 1)).ok()?;
                None
            }
            Err(error) => Some(error),
        }
    })
}

/// Would catch a request that is admitted on a full disk and then cannot be billed, and a gateway
/// that needs a restart once there is room again.
#[test]
fn a_full_disk_refuses_new_requests_and_loses_none() {
    let dir = tempfile::tempdir().unwrap();
    let limited = as_process("full_disk::limited_process", ROLE, dir.path());
    // The signal is ignored so that the limit is an error, as a full disk is; 4,096 × 512 bytes.
    let mut shell = Command::new("sh");
    shell.args(["-c", "trap '' XFSZ; ulimit -S -f 4096; exec \"$0\" \"$@\""]);
    shell
        .arg(limited.get_program())
        .args(limited.get_args())
        .env(ROLE, dir.path());
    let output = shell.stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{said}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let rows = rows(dir.path());
    assert_eq!(rows["req-1000000"].0, "complete");
    assert_eq!(rows["req-0"].3, 99_999);
    assert_eq!(rows["req-1"].0, "cancelled");
    assert_eq!((rows["req-2"].0.as_str(), rows["req-2"].3), ("cut", 1));
}
