//! Catches credit across salts, adapters and images, wrong rounding to a node's own blocks, limits
//! that do not hold, and lookups that miss a held chain while the table is being rebuilt. Random
//! streams are compared with the slow twin in `tests/streams`.

use std::sync::atomic::{AtomicBool, Ordering};

use super::{Applied, Index, Limits, NODES_MAX};
use crate::block::{Namespace, hash_chain};
use crate::event::{EngineHash, EventBatch, ExtraKey, ExtraKeys, GroupKind, KvEvent, Medium};
use crate::ids::NodeId;
use crate::tiers::Tiers;

const MODEL: &str = "model";

fn node(name: &str) -> NodeId {
    NodeId::new(name)
}

fn batch(event: KvEvent) -> EventBatch {
    EventBatch {
        events: vec![event],
        ..EventBatch::default()
    }
}

/// `count` blocks of `size` tokens from the start of a prompt that is 0, 1, 2, ... plus `first`.
/// Their names follow from their place.
fn stored(first: u32, size: usize, count: usize, extra_keys: ExtraKeys) -> KvEvent {
    KvEvent::Stored {
        block_hashes: (0..count).map(|at| name(first, at)).collect(),
        parent: None,
        token_ids: prompt(first, size * count),
        block_size: size,
        medium: Some(Medium::Device),
        lora_name: None,
        extra_keys,
        group_idx: None,
        group_kind: GroupKind::Unsaid,
    }
}

fn name(first: u32, at: usize) -> EngineHash {
    EngineHash::Int(u64::from(first) << 32 | at as u64)
}

fn prompt(first: u32, length: usize) -> Vec<u32> {
    (first..).take(length).collect()
}

fn removed(first: u32, at: usize) -> KvEvent {
    KvEvent::Removed {
        block_hashes: vec![name(first, at)],
        medium: None,
        group_idx: None,
    }
}

fn overlap(index: &Index, space: (Option<&str>, Option<&str>), tokens: &[u32]) -> usize {
    let found = index.overlap(&hash_chain(
        &Namespace::new(MODEL, space.0, space.1),
        tokens,
    ));
    assert!(found.len() < 2, "{found:?}");
    found.first().map_or(0, |(_, blocks)| *blocks)
}

/// One event, then the overlap of a prompt in the plain namespace.
fn check(event: &KvEvent, tokens: &[u32], expected: usize) {
    let index = Index::new(MODEL, Limits::default());
    index.apply(&node("a"), &batch(event.clone()));
    index.check_integrity();
    assert_eq!(overlap(&index, (None, None), tokens), expected, "{event:?}");
}

#[test]
fn overlap_is_counted_in_whole_blocks_of_the_node() {
    let plain = |size, count| stored(0, size, count, ExtraKeys::none());
    check(&plain(16, 4), &prompt(0, 64), 4);
    check(&plain(16, 4), &prompt(0, 63), 3);
    check(&plain(16, 4), &prompt(0, 640), 4);
    check(&plain(16, 4), &prompt(1, 64), 0);
    // Blocks of 32 tokens: a prompt of 48 shares three of ours, and can reuse one of theirs.
    check(&plain(32, 2), &prompt(0, 64), 4);
    check(&plain(32, 2), &prompt(0, 48), 2);
    // Small blocks add up; what is over stays uncredited.
    check(&plain(4, 9), &prompt(0, 64), 2);
    check(&plain(1, 31), &prompt(0, 64), 1);
    // Blocks of 24 tokens, two of which are three of ours; of a single one only 16 tokens can be
    // named, which is less than a block of theirs.
    check(&plain(24, 2), &prompt(0, 64), 3);
    check(&plain(24, 1), &prompt(0, 64), 0);
}

#[test]
fn salts_adapters_and_images_share_nothing() {
    let index = Index::new(MODEL, Limits::default());
    let tokens = prompt(0, 32);
    assert!(index.issue_salt("ours"));
    let applied = index.apply(
        &node("a"),
        &batch(stored(0, 16, 2, ExtraKeys::salt("ours"))),
    );
    assert_eq!((applied.stored, applied.uncreditable), (2, 0));
    assert_eq!(overlap(&index, (None, Some("ours")), &tokens), 2);
    assert_eq!(overlap(&index, (None, Some("theirs")), &tokens), 0);
    assert_eq!(overlap(&index, (None, None), &tokens), 0);
    assert_eq!(overlap(&index, (Some("ours"), None), &tokens), 0);
    // A salt that the gateway has not issued, two of them, and an image in the second block.
    for keys in [
        ExtraKeys::salt("theirs"),
        ExtraKeys(vec![vec![
            ExtraKey::Text("ours".into()),
            ExtraKey::Text("ours".into()),
        ]]),
        ExtraKeys(vec![vec![ExtraKey::Other]]),
    ] {
        let applied = index.apply(&node("b"), &batch(stored(0, 16, 2, keys)));
        assert_eq!((applied.stored, applied.uncreditable), (0, 2));
    }
    let image = ExtraKeys(vec![vec![], vec![ExtraKey::Other]]);
    let applied = index.apply(&node("c"), &batch(stored(0, 16, 3, image)));
    assert_eq!((applied.stored, applied.uncreditable), (1, 2));
    index.forget(&node("c"));
    // An adapter is part of the namespace; vLLM lists its name among the extra keys.
    let mut lora = stored(
        0,
        16,
        2,
        ExtraKeys(vec![vec![ExtraKey::Text("lora".into())]; 2]),
    );
    if let KvEvent::Stored { lora_name, .. } = &mut lora {
        *lora_name = Some("lora".to_owned());
    }
    assert_eq!(index.apply(&node("d"), &batch(lora)).stored, 2);
    assert_eq!(overlap(&index, (Some("lora"), None), &tokens), 2);
    assert_eq!(overlap(&index, (None, None), &tokens), 0);
    index.check_integrity();
}

#[test]
fn a_block_held_under_two_names_stays_until_both_are_gone() {
    let index = Index::new(MODEL, Limits::default());
    let id = node("a");
    let mut twice = stored(0, 16, 2, ExtraKeys::none());
    index.apply(&id, &batch(twice.clone()));
    if let KvEvent::Stored { block_hashes, .. } = &mut twice {
        *block_hashes = vec![name(9, 0), name(9, 1)];
    }
    assert_eq!(index.apply(&id, &batch(twice)).stored, 0);
    for (gone, left) in [((0, 1), 2), ((9, 1), 1), ((9, 0), 1), ((0, 0), 0)] {
        index.apply(&id, &batch(removed(gone.0, gone.1)));
        index.check_integrity();
        assert_eq!(index.held(&id), left, "after {gone:?}");
    }
}

/// Would catch a tier that is not counted, counts for a faster one, or stays when it is dropped.
#[test]
fn tiers_extend_what_the_device_holds() {
    let index = Index::new(MODEL, Limits::default());
    let id = node("a");
    let chain = hash_chain(&Namespace::new(MODEL, None, None), &prompt(0, 160));
    let tiers = |index: &Index| index.tiers(&chain).first().map(|(_, tiers)| *tiers);
    let counts = |device, host, disk, shared| {
        Some(Tiers {
            device,
            host,
            disk,
            shared,
        })
    };
    index.apply(&id, &batch(stored(0, 16, 6, ExtraKeys::none())));
    assert_eq!(tiers(&index), counts(6, 6, 6, 6));
    // Written through by name alone, as engines tell of their host tier, then evicted.
    let by_name = |places: std::ops::Range<usize>, tier: Medium| KvEvent::Stored {
        block_hashes: places.map(|at| name(0, at)).collect(),
        parent: None,
        token_ids: vec![],
        block_size: 16,
        medium: Some(tier),
        lora_name: None,
        extra_keys: ExtraKeys::none(),
        group_idx: None,
        group_kind: GroupKind::Unsaid,
    };
    let gone = |at, tier: Medium| KvEvent::Removed {
        block_hashes: vec![name(0, at)],
        medium: Some(tier),
        group_idx: None,
    };
    index.apply(&id, &batch(by_name(2..5, Medium::Host)));
    index.apply(&id, &batch(by_name(5..6, Medium::Shared)));
    assert_eq!(
        index
            .apply(&id, &batch(by_name(8..9, Medium::Disk)))
            .orphans,
        1
    );
    for at in (3..6).rev() {
        index.apply(&id, &batch(gone(at, Medium::Device)));
        index.check_integrity();
    }
    assert_eq!(tiers(&index), counts(3, 5, 5, 6));
    assert_eq!(index.overlap(&chain), vec![(id.clone(), 3)]);
    // What the host holds can be a parent; what it drops is gone there alone.
    let mut more = stored(0, 16, 7, ExtraKeys::none());
    if let KvEvent::Stored {
        block_hashes,
        parent,
        token_ids,
        ..
    } = &mut more
    {
        *block_hashes = vec![name(0, 5)];
        *parent = Some(name(0, 4));
        *token_ids = prompt(80, 16);
    }
    assert_eq!(index.apply(&id, &batch(more)).stored, 1);
    assert_eq!(tiers(&index), counts(3, 6, 6, 6));
    index.apply(&id, &batch(gone(4, Medium::Host)));
    assert_eq!(tiers(&index), counts(3, 4, 4, 4));
    let held = index.held_by_tier(&id);
    assert_eq!(
        (held.device, held.host, held.disk, held.shared),
        (4, 2, 0, 1)
    );
    index.apply(&id, &batch(KvEvent::Cleared));
    assert_eq!((tiers(&index), index.keys()), (None, 0));
    index.check_integrity();
}

/// Would catch memory that grows with what a node builds on and no longer holds: a node that keeps
/// the last block of each long chain, and evicts all before it.
#[test]
fn keys_that_nobody_holds_are_bounded() {
    let limits = Limits {
        node_blocks_max: 1000,
        total_blocks_max: 1000,
        salts_max: 1,
    };
    let index = Index::new(MODEL, limits);
    let id = node("a");
    let mut over_limit = 0;
    for first in 1..200 {
        let applied = index.apply(
            &id,
            &batch(stored(first * 100_000, 16, 900, ExtraKeys::none())),
        );
        over_limit += applied.over_limit;
        let gone = (0..899).map(|at| name(first * 100_000, at)).collect();
        index.apply(
            &id,
            &batch(KvEvent::Removed {
                block_hashes: gone,
                medium: None,
                group_idx: None,
            }),
        );
        assert!(index.keys() <= 2 * 1000 + super::KEYS_SPARE);
    }
    assert!(over_limit > 0 && index.held(&id) < 200);
    index.check_integrity();
    index.forget(&id);
    assert_eq!(index.keys(), 0);
}

#[test]
fn a_repeated_store_adds_no_credit_and_an_orphan_gets_none() {
    let index = Index::new(MODEL, Limits::default());
    let id = node("a");
    let event = stored(0, 16, 3, ExtraKeys::none());
    index.apply(&id, &batch(event.clone()));
    let again = index.apply(&id, &batch(event.clone()));
    assert_eq!(
        again,
        Applied {
            repeated: 3,
            ..Applied::default()
        }
    );
    let mut orphan = event;
    if let KvEvent::Stored { parent, .. } = &mut orphan {
        *parent = Some(EngineHash::Int(77));
    }
    assert_eq!(index.apply(&id, &batch(orphan)).orphans, 3);
    assert_eq!(index.apply(&id, &batch(removed(5, 5))).unknown_removals, 1);
    assert_eq!(index.apply(&id, &batch(KvEvent::Cleared)).removed, 3);
    assert_eq!((index.held(&id), index.distinct_blocks()), (0, 0));
}

#[test]
fn limits_hold_and_removals_make_room_again() {
    let limits = Limits {
        node_blocks_max: 4,
        total_blocks_max: 6,
        salts_max: 1,
    };
    let index = Index::new(MODEL, limits);
    let store = |id: &str, first| {
        let event = stored(first, 16, 5, ExtraKeys::none());
        let applied = index.apply(&node(id), &batch(event));
        index.check_integrity();
        (applied.stored, applied.over_limit)
    };
    assert_eq!(store("a", 0), (4, 1));
    assert_eq!(store("b", 0), (2, 3));
    assert_eq!(store("c", 0), (0, 5));
    // What is held stays; a removal makes room for one more.
    index.apply(&node("a"), &batch(removed(0, 3)));
    assert_eq!(store("c", 7), (1, 4));
    assert!(index.issue_salt("one") && index.issue_salt("one") && !index.issue_salt("two"));
}

#[test]
fn as_many_nodes_as_there_are_bits() {
    let limits = Limits::default();
    let index = Index::new(MODEL, limits);
    let event = batch(stored(0, 16, 2, ExtraKeys::none()));
    let ids: Vec<NodeId> = (0..NODES_MAX + 3)
        .map(|i| node(&format!("node-{i}")))
        .collect();
    for (at, id) in ids.iter().enumerate() {
        let applied = index.apply(id, &event);
        let expected = if at < NODES_MAX { (2, 0) } else { (0, 2) };
        assert_eq!((applied.stored, applied.over_limit), expected, "node {at}");
    }
    index.check_integrity();
    let chain = hash_chain(&Namespace::new(MODEL, None, None), &prompt(0, 64));
    assert_eq!(index.overlap(&chain).len(), NODES_MAX);
    index.apply(&ids[70], &batch(removed(0, 1)));
    let found = index.overlap(&chain);
    let blocks = |id: &NodeId| found.iter().find(|(found, _)| found == id).map(|(_, b)| *b);
    assert_eq!((blocks(&ids[70]), blocks(&ids[71])), (Some(1), Some(2)));
    // A forgotten node's bit goes to the next one, and takes no credit with it.
    index.forget(&ids[70]);
    assert_eq!(
        index
            .apply(&ids[NODES_MAX], &batch(removed(0, 0)))
            .unknown_removals,
        1
    );
    assert_eq!(index.overlap(&chain).len(), NODES_MAX - 1);
    index.check_integrity();
}

#[test]
fn lookups_see_a_held_chain_whole_while_the_table_grows_and_shrinks() {
    let index = Index::new(MODEL, Limits::default());
    index.apply(
        &node("steady"),
        &batch(stored(0, 16, 64, ExtraKeys::none())),
    );
    let chain = hash_chain(&Namespace::new(MODEL, None, None), &prompt(0, 64 * 16));
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut lookups = 0_u64;
            while !done.load(Ordering::Relaxed) || lookups == 0 {
                assert_eq!(index.overlap(&chain), vec![(node("steady"), 64)]);
                lookups += 1;
            }
        });
        for round in 0..3 {
            for first in 1..60 {
                let event = stored(1000 * first + round, 16, 512, ExtraKeys::none());
                index.apply(&node("busy"), &batch(event));
            }
            index.check_integrity();
            index.forget(&node("busy"));
        }
        done.store(true, Ordering::Relaxed);
        reader.join().unwrap();
    });
    index.check_integrity();
    assert_eq!(index.distinct_blocks(), 64);
}

/// Catches a block that loses its credit with the first of its copies: vLLM computes the last block
/// of an aligned prompt again each time it comes, keeps both, and tells of each one's end.
#[test]
fn a_block_is_held_until_its_last_copy_goes() {
    for size in [16, 32, 8] {
        let index = Index::new(MODEL, Limits::default());
        let id = node("a");
        let apply = |event: KvEvent| {
            let applied = index.apply(&id, &batch(event));
            index.check_integrity();
            (applied, overlap(&index, (None, None), &prompt(0, 3 * size)))
        };
        let all = stored(0, size, 3, ExtraKeys::none());
        let (_, held) = apply(all.clone());
        assert_eq!(apply(all).1, held);
        // The second block's copies go one by one, and with the last of them its credit.
        let (applied, left) = apply(removed(0, 1));
        assert_eq!((applied, left), (Applied::default(), held), "{size}");
        let (applied, left) = apply(removed(0, 1));
        assert!(applied.removed > 0 && left < held, "{size}: {applied:?}");
        assert_eq!(apply(removed(0, 1)).0.unknown_removals, 1, "{size}");
        apply(KvEvent::Cleared);
        // Copies are forgotten with the rest: one removal is enough again.
        apply(stored(0, size, 3, ExtraKeys::none()));
        assert_eq!(apply(removed(0, 0)).1, 0, "{size}");
    }
}
