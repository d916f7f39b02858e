//! Catches a number used twice or skipped, a log that grows without bound, a snapshot that a
//! consumer could not apply, and events whose hashes another process could not recompute.

use std::sync::Arc;

use cache_index::block::{BlockHash, Namespace};
use cache_index::event::{EngineHash, EventBatch, ExtraKeys, KvEvent};
use cache_index::wire::decode_batch;

use super::EventLog;
use crate::kv::pool::{Pool, Stored};
use crate::kv::store::{Tier, TierChange};
use crate::kv::table::{BlockTable, Scope};

fn scope(salt: Option<&str>) -> Scope {
    Scope {
        namespace: Namespace::new("m", None, salt),
        salt: salt.map(Arc::from),
    }
}

fn compute(pool: &mut Pool, scope: Scope, tokens: &[u32]) {
    let chain = cache_index::block::hash_chain(&scope.namespace, tokens);
    let mut table = BlockTable::claim(pool, scope, &chain);
    table
        .grow(pool, tokens.len())
        .expect("the pool is large enough");
    table.publish(pool, tokens);
    table.release(pool);
}

fn changes(pool: &mut Pool) -> Vec<TierChange> {
    let changes = pool.take_changes().into_iter();
    changes.map(TierChange::on_device).collect()
}

fn held(pool: &Pool) -> Vec<(Tier, Vec<Stored>)> {
    let runs = pool.snapshot().into_iter();
    runs.map(|run| (Tier::Device, run)).collect()
}

fn decode(payload: &[u8]) -> EventBatch {
    decode_batch(payload).expect("our own batches decode")
}

fn hash(bytes: &BlockHash) -> EngineHash {
    EngineHash::Bytes(Box::from(bytes.0))
}

#[test]
fn a_chain_is_one_event_and_its_branch_another() {
    let mut pool = Pool::new(8);
    let log = EventLog::new("boot".into(), 10);
    let long: Vec<u32> = (0..48).collect();
    let branch: Vec<u32> = (0..16).chain(100..116).collect();
    compute(&mut pool, scope(Some("s")), &long);
    compute(&mut pool, scope(Some("s")), &branch);
    log.append(&changes(&mut pool));
    let batches = log.from(0, 9);
    assert_eq!(
        batches.iter().map(|batch| batch.seq).collect::<Vec<_>>(),
        [0]
    );
    let batch = decode(&batches[0].payload);
    assert_eq!(batch.boot_id.as_deref(), Some("boot"));
    let namespace = Namespace::new("m", None, Some("s"));
    let chain = cache_index::block::hash_chain(&namespace, &long);
    let other = cache_index::block::hash_chain(&namespace, &branch);
    let [
        KvEvent::Stored {
            block_hashes: a,
            parent: None,
            token_ids,
            extra_keys,
            ..
        },
        KvEvent::Stored {
            block_hashes: b,
            parent: Some(parent),
            extra_keys: none,
            ..
        },
    ] = &batch.events[..]
    else {
        panic!("two stored events: {batch:?}")
    };
    assert_eq!(*a, chain.iter().map(hash).collect::<Vec<_>>());
    assert_eq!(*token_ids, long);
    assert_eq!(*extra_keys, ExtraKeys::salt("s"));
    assert_eq!((b, parent), (&vec![hash(&other[1])], &hash(&chain[0])));
    assert!(
        none.of(0).is_empty(),
        "only the first block of a chain carries the salt"
    );
}

#[test]
fn removals_come_before_what_took_their_place() {
    let mut pool = Pool::new(2);
    let log = EventLog::new("boot".into(), 10);
    compute(&mut pool, scope(None), &[1; 32]);
    log.append(&changes(&mut pool));
    compute(&mut pool, scope(None), &[2; 32]);
    log.append(&changes(&mut pool));
    let events = decode(&log.from(1, 1)[0].payload).events;
    let [
        KvEvent::Removed { block_hashes, .. },
        KvEvent::Stored { .. },
    ] = &events[..]
    else {
        panic!("removed, then stored: {events:?}")
    };
    assert_eq!(block_hashes.len(), 2, "one event for both");
}

#[test]
fn the_log_is_bounded_and_says_what_it_lacks() {
    let mut pool = Pool::new(64);
    let log = EventLog::new("boot".into(), 3);
    assert_eq!(log.snapshot(&held(&pool)), None, "nothing ever happened");
    assert!(log.reaches(0), "nothing is missing yet");
    log.append(&[]);
    for start in 0..5 {
        compute(&mut pool, scope(None), &[start; 16]);
        log.append(&changes(&mut pool));
    }
    let seqs = |from, count| {
        log.from(from, count)
            .iter()
            .map(|b| b.seq)
            .collect::<Vec<_>>()
    };
    assert_eq!(seqs(0, 9), [2, 3, 4]);
    assert_eq!(seqs(3, 1), [3]);
    assert_eq!(seqs(5, 9), [0; 0]);
    let reaches: Vec<bool> = (0..7).map(|seq| log.reaches(seq)).collect();
    assert_eq!(reaches, [false, false, true, true, true, true, true]);
}

#[test]
fn a_snapshot_is_everything_parents_first() {
    let mut pool = Pool::new(16);
    let log = EventLog::new("boot".into(), 3);
    for branch in 0..3 {
        let tokens: Vec<u32> = (0..32).chain([branch; 32]).collect();
        compute(&mut pool, scope(Some("s")), &tokens);
        log.append(&changes(&mut pool));
    }
    let snapshot = log.snapshot(&held(&pool)).expect("something happened");
    assert_eq!(snapshot.seq, 2, "the last batch it includes");
    let batch = decode(&snapshot.payload);
    assert!(batch.is_snapshot());
    let mut known = Vec::new();
    for event in &batch.events[1..] {
        let KvEvent::Stored {
            block_hashes,
            parent,
            token_ids,
            ..
        } = event
        else {
            panic!("a snapshot only stores: {event:?}")
        };
        assert_eq!(token_ids.len(), block_hashes.len() * 16);
        assert!(
            parent.as_ref().is_none_or(|parent| known.contains(parent)),
            "orphan"
        );
        known.extend(block_hashes.iter().cloned());
    }
    assert_eq!(known.len(), 2 + 3 * 2, "every held block once");
}
