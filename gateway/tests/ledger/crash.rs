//! A process that is killed with SIGKILL at any moment.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::Stdio;

use gateway::ledger::{Ledger, LedgerError};

use super::support::{Rows, as_process, complete, opening, prices, rows};

const ROLE: &str = "HOMING_TEST_JOURNAL_WRITER";
const WRITERS: u128 = 4;

/// The process to be killed: writers that say on stdout what was acknowledged to them. Does nothing
/// as an ordinary test.
#[test]
fn writer_process() {
    let Some(data) = std::env::var_os(ROLE) else {
        return;
    };
    let ledger = Ledger::open(Path::new(&data), prices()).unwrap();
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let ledger = &ledger;
            scope.spawn(move || {
                for turn in 0.. {
                    let number = turn * WRITERS + writer;
                    let open = opening(number);
                    let mut entry = ledger.begin(&open).unwrap();
                    say(&format!("opened {number} 0"));
                    let output = u64::try_from(number % 40).unwrap();
                    for token in 1..=output {
                        entry.checkpoint(100, 96, token);
                        say(&format!("relayed {number} {token}"));
                    }
                    entry.settle(complete(&open, output)).unwrap();
                    say(&format!("settled {number} {output}"));
                }
            });
        }
    });
}

fn say(line: &str) {
    // One write: lines of several threads must not mix, and the harness's capture is off.
    std::io::stdout()
        .lock()
        .write_all(format!("{line}\n").as_bytes())
        .unwrap();
}

/// What a killed process had been told, by request.
#[derive(Default)]
struct Told {
    opened: std::collections::BTreeMap<u128, (u64, bool)>,
}

impl Told {
    fn take(&mut self, line: &str) {
        let mut words = line.split(' ');
        let (Some(what), Some(number), Some(tokens)) = (words.next(), words.next(), words.next())
        else {
            return;
        };
        let (Ok(number), Ok(tokens)) = (number.parse(), tokens.parse()) else {
            return;
        };
        let entry = self.opened.entry(number).or_default();
        match what {
            "opened" => {}
            "relayed" => entry.0 = tokens,
            "settled" => *entry = (tokens, true),
            _ => {}
        }
    }

    fn compare(&self, rows: &Rows) {
        for (number, (tokens, settled)) in &self.opened {
            let (status, input, _, output, _) = &rows[&format!("req-{number}")];
            match (status.as_str(), settled) {
                ("complete", true) => assert_eq!((*input, output), (100, tokens), "{number}"),
                // Settled, and killed before it could say so.
                ("complete", false) => assert!(output >= tokens, "{number}"),
                ("cut", false) => {
                    // The first token and then at least every sixteenth is on record.
                    assert!(*output <= tokens + 1, "{number}: {output} > {tokens}");
                    assert!(output + 16 > *tokens, "{number}: {output} of {tokens}");
                    assert!((*output == 0) == (*input == 0), "{number}");
                }
                (status, settled) => panic!("{number}: {status}, settled {settled}"),
            }
        }
        // One request of each writer may have been opened without being told.
        assert!(rows.len() <= self.opened.len() + usize::try_from(WRITERS).unwrap());
    }
}

/// Would catch a record that was acknowledged and is lost, an open request that is lost, one that is
/// there twice, a lock that outlives its holder, and a second gateway on the same data.
#[test]
fn sigkill_loses_nothing_that_was_acknowledged() {
    for lines in [1, 50, 2000] {
        let dir = tempfile::tempdir().unwrap();
        let mut child = as_process("crash::writer_process", ROLE, dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut reader = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut told = Told::default();
        let mut count = 0;
        while count < lines {
            let line = reader.next().unwrap().unwrap();
            told.take(&line);
            count += usize::from(line.starts_with("settled"));
        }
        match Ledger::open(dir.path(), prices()) {
            Err(error @ LedgerError::InUse { .. }) => {
                assert!(
                    error.to_string().contains(&child.id().to_string()),
                    "{error}"
                );
            }
            other => panic!("a second gateway: {:?}", other.map(|_| ())),
        }
        child.kill().unwrap();
        child.wait().unwrap();
        for line in reader {
            told.take(&line.unwrap());
        }
        // Killed while the test read: a line may be torn, which `take` leaves out.
        let ledger = Ledger::open(dir.path(), prices()).unwrap();
        assert_eq!(ledger.stats().open_requests, 0);
        drop(ledger);
        let first = rows(dir.path());
        told.compare(&first);
        // A further start finds nothing to cut.
        drop(Ledger::open(dir.path(), prices()).unwrap());
        assert_eq!(rows(dir.path()), first);
    }
}
