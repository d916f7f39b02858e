//! Catches any answer of the index that the slow twin does not give: random streams of several
//! nodes with salts, adapters, block sizes, restarts, lost and repeated events, contradictions,
//! and limits, compared after every step.

use cache_index::block::{BlockHash, Namespace, hash_chain};
use cache_index::event::{EngineHash, EventBatch, ExtraKey, ExtraKeys, GroupKind, KvEvent, Medium};
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

/// Blocks that an engine has written to slower tiers.
type Offloaded = Vec<(EngineHash, Medium)>;

/// What an engine with slower tiers tells beside an event: that it writes blocks through, with their
/// tokens or by name alone; that it moves a block before it evicts it; that a tier drops some.
fn beside(event: &KvEvent, offloaded: &mut Offloaded, random: &mut Random) -> Option<KvEvent> {
    let tier = random
        .pick(&[Medium::Host, Medium::Disk, Medium::Shared])
        .clone();
    let mut told = match event {
        KvEvent::Removed { .. } if random.one_in(3) && !offloaded.is_empty() => {
            let (name, medium) = offloaded.swap_remove(random.below(offloaded.len()));
            let mut gone = removed(vec![name]);
            if let KvEvent::Removed { medium: from, .. } = &mut gone {
                *from = Some(medium);
            }
            return Some(gone);
        }
        KvEvent::Removed { block_hashes, .. } if random.one_in(2) => KvEvent::Stored {
            block_hashes: block_hashes.clone(),
            parent: None,
            token_ids: Vec::new(),
            block_size: 16,
            medium: None,
            lora_name: None,
            extra_keys: ExtraKeys::none(),
            group_idx: None,
            group_kind: GroupKind::Unsaid,
        },
        KvEvent::Stored { .. } if random.one_in(2) => event.clone(),
        _ => return None,
    };
    if let KvEvent::Stored {
        medium,
        token_ids,
        block_hashes,
        ..
    } = &mut told
    {
        *medium = Some(tier.clone());
        if random.one_in(3) {
            token_ids.clear();
        }
        offloaded.extend(block_hashes.iter().map(|name| (name.clone(), tier.clone())));
    }
    Some(told)
}

/// The events of one step of an engine.
fn step(
    engines: &mut [Engine],
    at: usize,
    offloaded: &mut Option<Offloaded>,
    random: &mut Random,
) -> EventBatch {
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
        let beside = offloaded
            .as_mut()
            .and_then(|offloaded| beside(&event, offloaded, random));
        if random.one_in(10) {
            spoil(&mut event, engines, random);
        }
        // A block must lie somewhere to be told of by name: before it goes, and after it has come.
        let is_removal = matches!(event, KvEvent::Removed { .. });
        match is_removal {
            true => events.extend(beside.into_iter().chain([event])),
            false => events.extend([event].into_iter().chain(beside)),
        }
    }
    EventBatch {
        events,
        ..EventBatch::default()
    }
}

/// Adds up what a run met, so that no case can fall out of the test unnoticed.
fn run(seed: u64, steps: usize, limits: Limits, met: &mut Applied, offloaded_met: &mut usize) {
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
    // The last one has slower tiers, and the second, whose blocks are small.
    let mut offloaded = [None, Some(Vec::new()), None, Some(Vec::new())];
    let mut last: Vec<EventBatch> = vec![EventBatch::default(); ids.len()];
    for at in 0..steps {
        let node = random.below(ids.len());
        let batch = step(&mut engines, node, &mut offloaded[node], random);
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
            let mut tiers = index.tiers(&chain);
            tiers.sort();
            assert_eq!(tiers, twin.tiers(&chain), "seed {seed} step {at}");
            let mut device = index.overlap(&chain);
            device.sort();
            let expected = tiers.iter().map(|(id, tiers)| (id.clone(), tiers.device));
            let expected: Vec<_> = expected.filter(|(_, blocks)| *blocks > 0).collect();
            assert_eq!(device, expected, "seed {seed} step {at}");
            *offloaded_met += tiers.iter().filter(|(_, t)| t.device < t.shared).count();
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
    let mut tiers = 0;
    for seed in 0..24 {
        run(seed, 500, Limits::default(), met, &mut tiers);
    }
    assert_met(met, false);
    assert!(tiers > 1000, "slower tiers met too rarely: {tiers}");
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
        run(seed, 400, limits, met, &mut 0);
    }
    assert_met(met, true);
}
