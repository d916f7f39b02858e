//! Catches any answer of the index that the slow twin does not give: random streams of several
//! nodes with salts, adapters, block sizes, restarts, lost and repeated events, contradictions,
//! and limits, compared after every step.

use cache_index::block::{BlockHash, Namespace, hash_chain};
use cache_index::event::{EngineHash, EventBatch, ExtraKey, GroupKind, KvEvent, Medium};
use cache_index::ids::NodeId;
use cache_index::index::{Applied, Index, Limits};
use cache_index::reference::Reference;

use crate::engine::{Engine, Random, SPACES, removed};

pub(crate) const MODEL: &str = "model";
pub(crate) const SALTS: [&str; 2] = ["salt-a", "salt-b"];

/// A chain that a request might have: what some node held, cut or extended, in any namespace.
pub(crate) fn chain(engines: &[Engine], random: &mut Random) -> Vec<BlockHash> {
    let engine = random.pick(engines);
    let mut tokens = vec![0; random.below(64)];
    let mut space = random.below(SPACES.len());
    if !engine.held.is_empty() {
        let held = random.pick(&engine.held);
        tokens.clone_from(&held.prefix);
        tokens.truncate(random.below(tokens.len() * 2).max(1));
        tokens.extend((0..random.below(40) as u32).map(|i| i % 5));
        if !random.one_in(8) {
            space = held.space;
        }
    }
    let (adapter, salt) = SPACES[space];
    hash_chain(&Namespace::new(MODEL, adapter, salt), &tokens)
}

/// Breaks an event in one of the ways that a hostile or broken stream might.
fn spoil(event: &mut KvEvent, engines: &[Engine], random: &mut Random) {
    match event {
        KvEvent::Stored {
            block_hashes,
            block_size,
            parent,
            token_ids,
            medium,
            extra_keys,
            group_idx,
            group_kind,
            ..
        } => match random.below(10) {
            0 => drop(token_ids.pop()),
            1 => *medium = Some(Medium::Host),
            2 => *group_kind = GroupKind::Other,
            3 => *group_idx = Some(1),
            4 => *parent = Some(EngineHash::Int(random.next())),
            5 => *parent = block_hashes.last().cloned(),
            6 => extra_keys
                .0
                .iter_mut()
                .for_each(|keys| keys.push(ExtraKey::Other)),
            7 => block_hashes.iter_mut().for_each(|hash| {
                if let Some(other) = random.pick(engines).held.first() {
                    *hash = other.name.clone();
                }
            }),
            // The same names and tokens in blocks twice as large.
            8 if block_hashes.len().is_multiple_of(2) => {
                let second = block_hashes.chunks(2).map(|pair| pair[1].clone());
                *block_hashes = second.collect();
                *block_size *= 2;
            }
            _ => *parent = None,
        },
        KvEvent::Removed {
            block_hashes,
            medium,
            group_idx,
        } => match random.below(3) {
            0 => *medium = Some(Medium::Disk),
            1 => *group_idx = Some(1),
            _ => block_hashes.push(EngineHash::Int(random.next())),
        },
        KvEvent::Cleared => {}
    }
}

/// The events of one step of an engine.
fn step(engines: &mut [Engine], at: usize, random: &mut Random) -> EventBatch {
    let mut events = Vec::new();
    for _ in 0..=random.below(3) {
        let engine = &mut engines[at];
        // Around 30 blocks, so that the twin stays fast enough.
        let full = engine.held.len() > 30;
        let mut event = match random.below(if full { 3 } else { 6 }) {
            0..=2 => match engine.evict(random) {
                Some(event) => event,
                None => removed(vec![EngineHash::Int(random.next())]),
            },
            _ => engine.store(4, random),
        };
        if random.one_in(60) {
            event = engine.clear();
        }
        if random.one_in(10) {
            spoil(&mut event, engines, random);
        }
        events.push(event);
    }
    EventBatch {
        events,
        ..EventBatch::default()
    }
}

/// Adds up what a run met, so that no case can fall out of the test unnoticed.
fn run(seed: u64, steps: usize, limits: Limits, met: &mut Applied) {
    let random = &mut Random(seed);
    let index = Index::new(MODEL, limits);
    let mut twin = Reference::new(MODEL, limits);
    for salt in SALTS {
        assert_eq!(index.issue_salt(salt), twin.issue_salt(salt));
    }
    let ids: Vec<NodeId> = (0..4).map(|i| NodeId::new(&format!("node-{i}"))).collect();
    let sizes = [
        16,
        *random.pick(&[1, 4, 8]),
        *random.pick(&[32, 48]),
        *random.pick(&[16, 24, 5]),
    ];
    let mut engines: Vec<Engine> = sizes
        .iter()
        .map(|size| Engine::new(*size, random))
        .collect();
    let mut last: Vec<EventBatch> = vec![EventBatch::default(); ids.len()];
    for at in 0..steps {
        let node = random.below(ids.len());
        let batch = step(&mut engines, node, random);
        match random.below(40) {
            // Lost on the way.
            0 => continue,
            // Restarted: the engine is empty, and its tracker says so.
            1 => {
                engines[node] = Engine::new(sizes[node], random);
                index.forget(&ids[node]);
                twin.forget(&ids[node]);
            }
            // Delivered twice.
            2 => {
                let repeated = &last[node];
                apply_both(&index, &mut twin, &ids[node], repeated, at);
            }
            _ => {}
        }
        let applied = apply_both(&index, &mut twin, &ids[node], &batch, at);
        add(met, &applied);
        last[node] = batch;
        for _ in 0..3 {
            let chain = chain(&engines, random);
            let mut fast = index.overlap(&chain);
            fast.sort();
            assert_eq!(fast, twin.overlap(&chain), "seed {seed} step {at}");
        }
    }
}

fn add(sum: &mut Applied, more: &Applied) {
    let Applied {
        stored,
        removed,
        repeated,
        orphans,
        uncreditable,
        over_limit,
        unknown_removals,
        ignored,
        malformed,
    } = more;
    sum.stored += stored;
    sum.removed += removed;
    sum.repeated += repeated;
    sum.orphans += orphans;
    sum.uncreditable += uncreditable;
    sum.over_limit += over_limit;
    sum.unknown_removals += unknown_removals;
    sum.ignored += ignored;
    sum.malformed += malformed;
}

fn assert_met(met: &Applied, is_limited: bool) {
    let Applied {
        stored,
        removed,
        repeated,
        orphans,
        uncreditable,
        over_limit,
        unknown_removals,
        ignored,
        malformed,
    } = *met;
    let counts = [
        stored,
        removed,
        repeated,
        orphans,
        uncreditable,
        unknown_removals,
        ignored,
        malformed,
    ];
    assert!(
        counts.iter().all(|count| *count >= 10),
        "cases met too rarely: {met:?}"
    );
    assert_eq!(over_limit > 10, is_limited, "{met:?}");
}

fn apply_both(
    index: &Index,
    twin: &mut Reference,
    id: &NodeId,
    batch: &EventBatch,
    at: usize,
) -> Applied {
    let before = index.held(id);
    let applied = index.apply(id, batch);
    let expected = twin.apply(id, batch);
    assert_eq!(
        Applied {
            stored: 0,
            removed: 0,
            ..applied
        },
        expected,
        "step {at}: {batch:?}"
    );
    assert_eq!(
        index.held(id),
        before + applied.stored - applied.removed,
        "step {at}"
    );
    assert_eq!(index.held(id), twin.held(id), "step {at}: {batch:?}");
    index.check_integrity();
    applied
}

#[test]
fn the_index_answers_like_its_slow_twin() {
    let met = &mut Applied::default();
    for seed in 0..24 {
        run(seed, 500, Limits::default(), met);
    }
    assert_met(met, false);
}

#[test]
fn the_index_answers_like_its_slow_twin_at_its_limits() {
    let met = &mut Applied::default();
    for seed in 100..112 {
        let limits = Limits {
            node_blocks_max: 12,
            total_blocks_max: 30,
            salts_max: 2,
        };
        run(seed, 400, limits, met);
    }
    assert_met(met, true);
}
