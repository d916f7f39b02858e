//! Catches a decision that is lost, found under another's id, kept past the bound, or that makes a
//! turn wait.

use std::collections::BTreeMap;

use super::files::LogError;
use super::record::{Candidate, Refused};
use super::*;

fn decided(id: &str) -> Decided {
    Decided {
        v: 1,
        request_id: id.to_owned(),
        record_id: format!("record-{id}"),
        t_ms: 1,
        tenant: "t".to_owned(),
        session: "0".repeat(32),
        session_id: "\"s\"\n".to_owned(),
        model: "m".to_owned(),
        prompt_tokens: 1024,
        exact: true,
        output_tokens_expected: 256,
        output_tokens: 3,
        cached_tokens: 512,
        ttft_ms: None,
        duration_ms: 9,
        outcome: "complete".to_owned(),
        blocks: vec!["0".repeat(16); 2],
        attempts: vec![Attempt {
            node: "a".to_owned(),
            reason: "session".to_owned(),
            expected_cached_tokens: 512,
            candidates: vec![Candidate {
                node: "a".to_owned(),
                cached_tokens: 512,
                cost_ms: 12.5,
                terms: BTreeMap::from([("queue_ms".to_owned(), 12.5)]),
            }],
            legs: None,
            refused: vec![Refused {
                node: "b".to_owned(),
                reason: "down".to_owned(),
                why: "down: gone".to_owned(),
            }],
        }],
    }
}

fn pending(id: &str) -> Pending {
    Pending {
        decided: decided(id),
        routed: None,
    }
}

fn counter() -> IntCounter {
    IntCounter::new("left_out", "left out").unwrap()
}

#[test]
fn what_was_noted_is_found_again_under_its_own_ids() {
    let data = tempfile::tempdir().unwrap();
    for life in 0..2 {
        let left_out = counter();
        let decisions = Decisions::open(data.path(), 1 << 20, left_out.clone()).unwrap();
        for at in 0..100 {
            decisions.note(pending(&format!("{life}-{at}")));
        }
        decisions.close();
        let recent: Vec<String> = decisions
            .recent(2)
            .iter()
            .map(|one| one.request_id.clone())
            .collect();
        assert_eq!(recent, [format!("{life}-99"), format!("{life}-98")]);
        let found = decisions.find("record-0-7");
        assert_eq!(found.len(), usize::from(life == 0));
        assert_eq!(left_out.get(), 0);
    }
    for id in ["0-7", "1-99"] {
        assert_eq!(find_in(data.path(), id).unwrap(), [decided(id)]);
        let record = format!("record-{id}");
        assert_eq!(find_in(data.path(), &record).unwrap(), [decided(id)]);
    }
    // The node's name stands in every line, and is no request's id.
    assert_eq!(find_in(data.path(), "a").unwrap(), []);
    let nowhere = data.path().join("no");
    assert!(matches!(find_in(&nowhere, "a"), Err(LogError::Missing(_))));
}

#[test]
fn the_oldest_go_and_a_torn_line_is_passed_over() {
    let data = tempfile::tempdir().unwrap();
    let line = serde_json::to_vec(&decided("0000")).unwrap().len() as u64 + 1;
    // Two lines a file, eight files.
    let decisions = Decisions::open(data.path(), 8 * 2 * line, counter()).unwrap();
    for at in 0..40 {
        decisions.note(pending(&format!("{at:04}")));
    }
    decisions.close();
    let held: Vec<usize> = (0..40)
        .filter(|at| {
            !find_in(data.path(), &format!("{at:04}"))
                .unwrap()
                .is_empty()
        })
        .collect();
    assert_eq!(held, (24..40).collect::<Vec<_>>());
    let mut files: Vec<_> = std::fs::read_dir(data.path().join("decisions"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    let last = files.last().unwrap();
    let whole = std::fs::read(last).unwrap();
    std::fs::write(last, &whole[..whole.len() - 9]).unwrap();
    assert_eq!(find_in(data.path(), "0039").unwrap(), []);
    assert_eq!(find_in(data.path(), "0038").unwrap().len(), 1);
}

#[test]
fn without_a_log_there_is_the_memory() {
    let data = tempfile::tempdir().unwrap();
    let decisions = Decisions::open(data.path(), 0, counter()).unwrap();
    for at in 0..RECENT_MAX + 5 {
        decisions.note(pending(&at.to_string()));
    }
    decisions.close();
    assert_eq!(decisions.recent(usize::MAX).len(), RECENT_MAX);
    assert_eq!(decisions.find("4").len(), 0);
    assert_eq!(decisions.find("5").len(), 1);
    assert!(!data.path().join("decisions").exists());
}
