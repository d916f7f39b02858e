//! Bytes that are not what was written.

use std::fs::{self, OpenOptions};

use gateway::ledger::{Ledger, Status};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

use super::support::{complete, crashed_copy, opening, prices, rows, segments};

const RECORDS: u128 = 40;

/// A data directory with records that were never projected, as after a crash.
fn crashed() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(dir.path(), prices()).unwrap();
    for number in 0..RECORDS {
        let open = opening(number);
        ledger
            .begin(&open)
            .unwrap()
            .settle(complete(&open, 7))
            .unwrap();
    }
    let copy = crashed_copy(dir.path());
    for suffix in ["", "-wal", "-shm"] {
        let _ = fs::remove_file(copy.path().join(format!("ledger.db{suffix}")));
    }
    copy
}

/// Would catch a torn tail that takes whole records with it, or stops the gateway from starting.
#[test]
fn a_torn_tail_costs_only_what_it_tore() {
    let mut random = StdRng::seed_from_u64(2);
    let crashed = crashed();
    let path = segments(crashed.path()).pop().unwrap();
    let name = path.file_name().unwrap();
    let bytes = fs::read(&path).unwrap();
    let data_end = bytes.iter().rposition(|byte| *byte != 0).unwrap() + 1;
    for _ in 0..40 {
        let cut = random.random_range(0..=data_end);
        let copy = crashed_copy(crashed.path());
        let target = copy.path().join("ledger").join(name);
        OpenOptions::new()
            .write(true)
            .open(&target)
            .unwrap()
            .set_len(cut as u64)
            .unwrap();
        let whole = bytes[..cut]
            .split_inclusive(|byte| *byte == b'\n')
            .filter(|line| line.ends_with(b"\n"))
            .filter(|line| line[9] == b's')
            .count();
        Ledger::open(copy.path(), prices()).unwrap().close();
        let found = rows(copy.path());
        let complete = found.values().filter(|row| row.0 == "complete").count();
        assert_eq!(complete, whole, "cut at {cut}");
        // At most one request was open there: its settlement is what was torn.
        let others = found
            .values()
            .filter(|row| row.0 == Status::Cut.as_str())
            .count();
        assert!(
            others + complete == found.len() && others <= 1,
            "cut at {cut}"
        );
    }
}

/// Would catch a flipped bit that changes a bill, or hides more than the lines it touches.
#[test]
fn a_flipped_bit_never_changes_a_record() {
    let mut random = StdRng::seed_from_u64(3);
    let crashed = crashed();
    let path = segments(crashed.path()).pop().unwrap();
    let name = path.file_name().unwrap();
    let bytes = fs::read(&path).unwrap();
    let data_end = bytes.iter().rposition(|byte| *byte != 0).unwrap() + 1;
    for _ in 0..60 {
        let bit = random.random_range(0..data_end * 8);
        let copy = crashed_copy(crashed.path());
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        fs::write(copy.path().join("ledger").join(name), &damaged).unwrap();
        Ledger::open(copy.path(), prices()).unwrap().close();
        let found = rows(copy.path());
        let intact = found.values().filter(|row| row.0 == "complete").count();
        // A newline that is gone joins two lines; one of them may be an opening.
        assert!(
            intact + 1 >= usize::try_from(RECORDS).unwrap(),
            "bit {bit}: {intact}"
        );
        for row in found.values().filter(|row| row.0 == "complete") {
            assert_eq!(
                (row.1, row.2, row.3, row.4),
                (100, 96, 7, 12_345),
                "bit {bit}"
            );
        }
        for row in found.values().filter(|row| row.0 != "complete") {
            assert_eq!((row.0.as_str(), row.4), ("cut", 0), "bit {bit}");
        }
    }
}
