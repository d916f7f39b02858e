//! Catches memory without a bound, a panic, or credit that honest nodes lose, whatever a node's events
//! claim: names in a circle, lengths that contradict each other, a flood, everything at once, two
//! engines that speak as one, a million prompts of which none comes twice.

use std::sync::Arc;

use cache_index::approximate::{self, Approximate};
use cache_index::block::{BlockHash, Namespace, hash_chain};
use cache_index::event::{EngineHash, EventBatch, ExtraKeys, GroupKind, KvEvent, Medium};
use cache_index::expected::{self, Expected};
use cache_index::ids::NodeId;
use cache_index::index::{Index, Limits};

use crate::differential::MODEL;
use crate::engine::Random;

fn limits() -> Limits {
    Limits {
        node_blocks_max: 10_000,
        total_blocks_max: 15_000,
        salts_max: 4,
    }
}

fn stored(names: &[u64], parent: Option<u64>, token_ids: Vec<u32>, block_size: usize) -> KvEvent {
    KvEvent::Stored {
        block_hashes: names.iter().map(|name| EngineHash::Int(*name)).collect(),
        parent: parent.map(EngineHash::Int),
        token_ids,
        block_size,
        medium: None,
        lora_name: None,
        extra_keys: ExtraKeys::none(),
        group_idx: None,
        group_kind: GroupKind::Unsaid,
    }
}

fn batch(event: KvEvent) -> EventBatch {
    EventBatch {
        events: vec![event],
        ..EventBatch::default()
    }
}

/// An index in which one honest node holds a prompt of ten blocks, and that prompt's chain.
fn with_an_honest_node() -> (Index, Vec<BlockHash>) {
    let index = Index::new(MODEL, limits());
    let tokens: Vec<u32> = (0..160).collect();
    let names: Vec<u64> = (500..510).collect();
    index.apply(
        &NodeId::new("honest"),
        &batch(stored(&names, None, tokens.clone(), 16)),
    );
    let chain = hash_chain(&Namespace::new(MODEL, None, None), &tokens);
    (index, chain)
}

fn check(index: &Index, chain: &[BlockHash]) {
    index.check_integrity();
    let found = index.overlap(chain);
    assert!(found.contains(&(NodeId::new("honest"), 10)), "{found:?}");
    let Limits {
        node_blocks_max,
        total_blocks_max,
        ..
    } = limits();
    assert!(index.held(&NodeId::new("hostile")) <= node_blocks_max);
    assert!(index.keys() <= 2 * total_blocks_max + 65_536);
}

/// Lengths, sizes, parents and names at random, of which hardly any make sense.
fn nonsense(random: &mut Random) -> KvEvent {
    let names: Vec<u64> = (0..random.below(6))
        .map(|_| random.below(12) as u64)
        .collect();
    let size = *random.pick(&[0, 1, 5, 16, 16, 32, 65_536]);
    let length = match random.below(3) {
        0 => random.below(100),
        _ => (names.len() * size).min(100_000),
    };
    match random.below(8) {
        0 => KvEvent::Removed {
            block_hashes: names.into_iter().map(EngineHash::Int).collect(),
            medium: random
                .pick(&[None, Some(Medium::Disk), Some(Medium::Host)])
                .clone(),
            group_idx: Some(random.below(2) as u32),
        },
        1 if random.one_in(20) => KvEvent::Cleared,
        _ => {
            let parent = (!random.one_in(3)).then(|| random.below(12) as u64);
            let tokens = (0..length).map(|_| random.below(2) as u32).collect();
            let mut event = stored(&names, parent, tokens, size);
            if let KvEvent::Stored { medium, .. } = &mut event {
                *medium = random
                    .pick(&[None, Some(Medium::Host), Some(Medium::Other("X".into()))])
                    .clone();
            }
            event
        }
    }
}

#[test]
fn nonsense_is_counted_and_honest_credit_stays() {
    let (index, chain) = with_an_honest_node();
    let hostile = NodeId::new("hostile");
    let random = &mut Random(1);
    let (mut malformed, mut orphans) = (0, 0);
    for step in 0..20_000 {
        let applied = index.apply(&hostile, &batch(nonsense(random)));
        malformed += applied.malformed;
        orphans += applied.orphans;
        if step % 50 == 0 {
            check(&index, &chain);
        }
    }
    assert!(malformed > 100 && orphans > 100, "{malformed} {orphans}");
    index.forget(&hostile);
    check(&index, &chain);
    assert_eq!(index.keys(), 10);
}

#[test]
fn parents_in_a_circle_end_nowhere() {
    let (index, chain) = with_an_honest_node();
    let hostile = NodeId::new("hostile");
    // A after B and B after A, a block after itself, and one that names its own parent again.
    for (name, parent) in [(1, Some(2)), (2, Some(1)), (3, Some(3))] {
        let applied = index.apply(&hostile, &batch(stored(&[name], parent, vec![7; 16], 16)));
        assert_eq!((applied.orphans, applied.stored), (1, 0));
    }
    let applied = index.apply(
        &hostile,
        &batch(stored(&[1, 2, 1, 2], None, vec![7; 64], 16)),
    );
    // The third block takes the first one's name, whose block is gone then; and so on.
    assert_eq!(applied.stored, 4);
    let again = index.apply(&hostile, &batch(stored(&[2], Some(1), vec![9; 16], 16)));
    assert_eq!(again.stored, 1);
    check(&index, &chain);
}

#[test]
fn a_node_that_claims_everything_gets_its_share_and_no_more() {
    let (index, chain) = with_an_honest_node();
    let random = &mut Random(2);
    let mut over_limit = 0;
    for round in 0..60_u64 {
        let tokens: Vec<u32> = (0..16 * 1000).map(|_| random.next() as u32).collect();
        let names: Vec<u64> = (0..1000).map(|at| round << 20 | at).collect();
        // From several nodes: the first ones fill the index, and what is held stays.
        let node = NodeId::new(["hostile", "hostile too", "a third"][round as usize % 3]);
        over_limit += index
            .apply(&node, &batch(stored(&names, None, tokens, 16)))
            .over_limit;
        check(&index, &chain);
    }
    assert_eq!(over_limit, 60_000 - (15_000 - 10));
    // Room comes back with the node's end.
    index.forget(&NodeId::new("hostile"));
    let more = stored(&[600], None, vec![3; 16], 16);
    assert_eq!(index.apply(&NodeId::new("honest"), &batch(more)).stored, 1);
}

#[test]
fn two_engines_that_speak_as_one_leave_each_others_names_whole() {
    let (index, chain) = with_an_honest_node();
    let hostile = NodeId::new("hostile");
    // The same names for different blocks, by turns: the last word counts.
    for round in 0..100_u32 {
        let tokens: Vec<u32> = (0..160).map(|at| at + round % 2 * 1000).collect();
        let names: Vec<u64> = (0..10).collect();
        index.apply(&hostile, &batch(stored(&names, None, tokens.clone(), 16)));
        let own = hash_chain(&Namespace::new(MODEL, None, None), &tokens);
        assert!(index.overlap(&own).contains(&(hostile.clone(), 10)));
        let other: Vec<u32> = (0..160).map(|at| at + (round + 1) % 2 * 1000).collect();
        let other = hash_chain(&Namespace::new(MODEL, None, None), &other);
        assert!(!index.overlap(&other).iter().any(|(id, _)| *id == hostile));
    }
    assert_eq!(index.held(&hostile), 10);
    check(&index, &chain);
}

#[test]
fn a_million_prompts_of_which_none_comes_twice() {
    const PROMPTS: usize = 1_000_000;
    let (index, chain) = with_an_honest_node();
    let hostile = NodeId::new("hostile");
    let mut guess = Approximate::new(approximate::Limits::default());
    let mut expected = Expected::new(expected::Limits::default());
    let mut over_limit = 0;
    let mut tickets = Vec::new();
    for at in 0..PROMPTS {
        let token = at as u32 + 1000;
        let event = stored(&[1 << 40 | at as u64], None, vec![token; 16], 16);
        over_limit += index.apply(&hostile, &batch(event)).over_limit;
        let prompt: Arc<[BlockHash]> =
            hash_chain(&Namespace::new(MODEL, None, None), &[token; 16]).into();
        let sent = guess.sent(&hostile, &prompt);
        guess.served(&hostile, &prompt, sent, Some(0));
        // In flight all at once.
        tickets.extend(expected.add(&hostile, &prompt));
    }
    assert_eq!(over_limit, PROMPTS - 10_000);
    let room = approximate::Limits::default().node_blocks_default;
    assert_eq!(guess.held(&hostile), room);
    guess.check_integrity();
    assert_eq!(expected.tickets(), expected::Limits::default().tickets_max);
    tickets.into_iter().for_each(|ticket| expected.end(ticket));
    assert_eq!(expected.tickets(), 0);
    check(&index, &chain);
}
