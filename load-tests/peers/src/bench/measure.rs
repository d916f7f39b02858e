//! What does one index cost?
//!
//! One round builds the index from nothing and asks it. Events and questions are made outside the
//! timed parts; what applying takes is CPU time (other programs do not count); memory is what the index has allocated once its events are gone.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cache_index::block::{Namespace, hash_chain};
use cpu_time::ProcessTime;

use super::peers::Peer;
use crate::ALLOCATED;
use crate::workload::{CHAIN_BLOCKS, Workload};

/// Lookups in a round, each timed by itself.
const LOOKUPS: usize = 200_000;
/// Chains that are asked for; enough that no cache holds what their lookups touch.
const QUERIES: usize = 4_000;
/// Chains in a batch of events.
const BATCH: usize = 500;
/// Chains that the writer stores and removes without pause while lookups are timed.
const CHURN: usize = 256;

/// One round, in nanoseconds and bytes.
#[derive(Clone, Copy, Default)]
pub struct Figures {
    pub insert_ns: f64,
    pub bytes: f64,
    pub idle: Percentiles,
    pub half: Percentiles,
    pub miss: Percentiles,
    pub loaded: Percentiles,
    /// Blocks that the writer changed in a second while lookups ran.
    pub changes: f64,
}

/// Of the time of a lookup, in nanoseconds.
#[derive(Clone, Copy, Default)]
pub struct Percentiles {
    pub p50: f64,
    pub p99: f64,
}

/// One round of one index.
pub fn round<P: Peer>(workload: &Workload) -> Figures {
    let before = ALLOCATED.allocated();
    let peer = P::new();
    let mut applying = Duration::ZERO;
    for first in (0..workload.chains).step_by(BATCH) {
        let chains = first..(first + BATCH).min(workload.chains);
        let events = chains.map(|chain| peer.stored(workload, chain)).collect();
        let begin = ProcessTime::now();
        peer.apply(events);
        applying += begin.elapsed();
    }
    let blocks = (workload.chains * CHAIN_BLOCKS) as f64;
    let bytes = (ALLOCATED.allocated() - before) as f64 / blocks;

    let chains = workload.order(QUERIES);
    let query = |chain: usize| peer.query(workload, chain);
    let whole: Vec<Vec<P::Block>> = chains.iter().map(|chain| query(*chain)).collect();
    for (chain, query) in chains.iter().zip(&whole) {
        let found = peer.lookup(query);
        assert_eq!(found, workload.answer(*chain), "{}: chain {chain}", P::NAME);
    }
    let idle = lookups(&peer, &whole);
    // Behind the last group, so that nothing of them is held.
    let past = workload.chains + workload.group + CHURN;
    let unknown: Vec<Vec<P::Block>> = chains.iter().map(|chain| query(past + chain)).collect();
    let halves = whole.iter().zip(&unknown);
    let half: Vec<Vec<P::Block>> = halves
        .map(|(known, unknown)| [&known[..CHAIN_BLOCKS / 2], &unknown[CHAIN_BLOCKS / 2..]].concat())
        .collect();
    let half = lookups(&peer, &half);
    let miss = lookups(&peer, &unknown);
    let (loaded, changes) = under_load(&peer, workload, &whole);
    Figures {
        insert_ns: applying.as_nanos() as f64 / blocks,
        bytes,
        idle,
        half,
        miss,
        loaded,
        changes,
    }
}

/// Times lookups one by one. A question is copied right before, since in a gateway it comes right
/// out of hashing.
fn lookups<P: Peer>(peer: &P, queries: &[Vec<P::Block>]) -> Percentiles {
    let mut times: Vec<u32> = Vec::with_capacity(LOOKUPS);
    let mut asked: Vec<P::Block> = Vec::with_capacity(CHAIN_BLOCKS);
    for query in queries.iter().cycle().take(LOOKUPS) {
        asked.clear();
        asked.extend_from_slice(query);
        let begin = Instant::now();
        black_box(peer.lookup(black_box(&asked)));
        times.push(u32::try_from(begin.elapsed().as_nanos()).unwrap_or(u32::MAX));
    }
    times.sort_unstable();
    let at = |share: f64| f64::from(times[(times.len() as f64 * share) as usize]);
    Percentiles {
        p50: at(0.5),
        p99: at(0.99),
    }
}

/// Times lookups beside a writer that stores and removes chains without pause.
fn under_load<P: Peer>(
    peer: &P,
    workload: &Workload,
    queries: &[Vec<P::Block>],
) -> (Percentiles, f64) {
    let done = AtomicBool::new(false);
    let chains = || workload.chains..workload.chains + CHURN;
    let stored: Vec<P::Event> = chains().map(|chain| peer.stored(workload, chain)).collect();
    let removed: Vec<P::Event> = chains()
        .map(|chain| peer.removed(workload, chain))
        .collect();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut changed = 0_usize;
            let begin = Instant::now();
            while !done.load(Ordering::Relaxed) {
                for events in [&stored, &removed] {
                    peer.apply(events.clone());
                    changed += CHURN * CHAIN_BLOCKS;
                }
            }
            changed as f64 / begin.elapsed().as_secs_f64()
        });
        let times = lookups(peer, queries);
        done.store(true, Ordering::Relaxed);
        (times, writer.join().expect("the writer ends"))
    })
}

/// Nanoseconds that hashing a block takes, which only ours does while it applies.
pub fn hashing_ns(workload: &Workload) -> f64 {
    let namespace = Namespace::new("model", None, None);
    let mut hashing = Duration::ZERO;
    for first in (0..workload.chains).step_by(BATCH) {
        let chains = first..(first + BATCH).min(workload.chains);
        let tokens: Vec<Vec<u32>> = chains.map(|chain| workload.tokens(chain)).collect();
        let begin = ProcessTime::now();
        for tokens in &tokens {
            black_box(hash_chain(&namespace, tokens));
        }
        hashing += begin.elapsed();
    }
    hashing.as_nanos() as f64 / (workload.chains * CHAIN_BLOCKS) as f64
}
