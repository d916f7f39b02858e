//! Catches an expectation that is missed, outlives its request, or is longer than the chain that
//! was sent; and lists that grow past their limits.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Expected, Limits, Ticket};
use crate::block::{BlockHash, Namespace, hash_chain};
use crate::ids::NodeId;

/// SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 8) as usize % below
    }
}

/// A chain of up to 11 blocks; few different ones, so that they share beginnings.
pub(crate) fn chain(random: &mut Random) -> Arc<[BlockHash]> {
    let blocks = random.below(12);
    let mut tokens = Vec::new();
    for _ in 0..blocks {
        let token = u32::from(random.below(4) == 0);
        tokens.extend([token; 16]);
    }
    hash_chain(&Namespace::new("m", None, None), &tokens).into()
}

fn slow_common(a: &[BlockHash], b: &[BlockHash]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[test]
fn expectations_answer_like_a_list() {
    let random = &mut Random(5);
    let mut expected = Expected::new(Limits::default());
    let mut out: Vec<(NodeId, Ticket)> = Vec::new();
    let ids: Vec<NodeId> = (0..6).map(|i| NodeId::new(&format!("node-{i}"))).collect();
    let mut longest_list = 0;
    for step in 0..4000 {
        let is_growing = step / 500 % 2 == 0;
        let node = &ids[random.below(ids.len())];
        match random.below(100) {
            0 => {
                // The tickets of a forgotten node are given back later, to no effect.
                expected.forget(node);
                let (gone, kept) = out.into_iter().partition(|(id, _)| id == node);
                out = kept;
                let gone: Vec<(NodeId, Ticket)> = gone;
                gone.into_iter()
                    .for_each(|(_, ticket)| expected.end(ticket));
            }
            roll if (roll % 3 > 0) == is_growing => {
                let chain = chain(random);
                let ticket = expected.add(node, &chain);
                assert_eq!(ticket.is_some(), !chain.is_empty());
                out.extend(ticket.map(|ticket| (node.clone(), ticket)));
            }
            _ if !out.is_empty() => {
                let (_, ticket) = out.swap_remove(random.below(out.len()));
                expected.end(ticket);
            }
            _ => {}
        }
        longest_list = longest_list.max(out.len());
        let asked = chain(random);
        let mut twin = BTreeMap::new();
        for (node, ticket) in &out {
            let blocks = slow_common(ticket.chain(), &asked);
            let longest = twin.entry(node.clone()).or_insert(0);
            *longest = blocks.max(*longest);
        }
        twin.retain(|_, blocks| *blocks > 0);
        let found: BTreeMap<NodeId, usize> = expected.overlap(&asked).into_iter().collect();
        assert_eq!(found, twin, "step {step}");
        assert_eq!(expected.tickets(), out.len());
    }
    assert!(longest_list > 50, "{longest_list}");
}

#[test]
fn what_is_held_and_what_is_expected_count_once() {
    let mut expected = Expected::new(Limits::default());
    let chain: Arc<[BlockHash]> = hash_chain(&Namespace::new("m", None, None), &[7; 64]).into();
    let [a, b, c] = ["a", "b", "c"].map(NodeId::new);
    let first = expected.add(&a, &chain[..3].into()).unwrap();
    let second = expected.add(&b, &chain).unwrap();
    let held = vec![(a.clone(), 1), (b.clone(), 4), (c.clone(), 2)];
    let mut all = expected.held_or_expected(&chain, held.clone());
    all.sort();
    assert_eq!(all, [(a, 3), (b, 4), (c, 2)]);
    expected.end(first);
    expected.end(second);
    assert_eq!(expected.held_or_expected(&chain, held.clone()), held);
}

#[test]
fn limits_hold_and_ends_make_room_again() {
    let limits = Limits {
        tickets_max: 2,
        blocks_max: 5,
    };
    let mut expected = Expected::new(limits);
    let chain: Arc<[BlockHash]> = hash_chain(&Namespace::new("m", None, None), &[7; 48]).into();
    let node = NodeId::new("a");
    let first = expected.add(&node, &chain).unwrap();
    assert!(expected.add(&node, &chain).is_none(), "six blocks");
    let short: Arc<[BlockHash]> = chain[..1].into();
    let second = expected.add(&node, &short).unwrap();
    assert!(expected.add(&node, &short).is_none(), "three tickets");
    expected.end(first);
    expected.end(second);
    assert!(expected.add(&node, &chain).is_some());
}
