//! Catches a model that keeps what a node of its size would have pushed out, or pushes out what was
//! just used; that does not believe a report; and that grows past its limits.

use std::collections::HashMap;

use super::{Approximate, Limits, SLACK_BLOCKS};
use crate::block::{BlockHash, Namespace, hash_chain};
use crate::ids::NodeId;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 8) as usize % below
    }
}

fn chain(tokens: &[u32]) -> Vec<BlockHash> {
    let tokens: Vec<u32> = tokens.iter().flat_map(|token| [*token; 16]).collect();
    hash_chain(&Namespace::new("m", None, None), &tokens)
}

fn some_chain(random: &mut Random) -> Vec<BlockHash> {
    let blocks = random.below(30);
    let token = |_| u32::from(random.below(6) == 0);
    chain(&(0..blocks).map(token).collect::<Vec<_>>())
}

/// Every block with its parent and when it was last used.
#[derive(Default)]
struct Twin {
    blocks: HashMap<BlockHash, (Option<BlockHash>, u64)>,
    size: usize,
    pool: usize,
}

impl Twin {
    fn overlap(&self, chain: &[BlockHash]) -> usize {
        let known = |block: &&BlockHash| self.blocks.contains_key(*block);
        chain.iter().take_while(known).count()
    }

    fn evict_one(&mut self) {
        let is_end = |block: &BlockHash| !self.blocks.values().any(|(p, _)| *p == Some(*block));
        let ends = self.blocks.iter().filter(|(block, _)| is_end(block));
        let oldest = ends.min_by_key(|(_, (_, used))| *used).map(|(b, _)| *b);
        self.blocks.remove(&oldest.expect("not empty"));
    }

    fn served(
        &mut self,
        chain: &[BlockHash],
        predicted: usize,
        sent: u64,
        now: u64,
        report: Option<usize>,
    ) {
        match report {
            Some(reported) if reported + SLACK_BLOCKS >= predicted => {
                let more = reported.saturating_sub(predicted) + self.size / 64;
                self.size = (self.size + more).min(self.pool);
            }
            Some(reported) if self.overlap(chain) > reported => {
                let (_, missing) = self.blocks[&chain[reported]];
                if missing <= sent {
                    self.blocks.retain(|_, (_, used)| *used > missing);
                    self.size = self.blocks.len().max(self.size / 2).max(1);
                }
            }
            _ => {}
        }
        let known = self.overlap(chain);
        for block in &chain[..known] {
            self.blocks.get_mut(block).expect("known").1 = now;
        }
        let wanted = self.blocks.len() + chain.len() - known;
        let others = self.blocks.len() - known;
        for _ in 0..wanted.saturating_sub(self.size).min(others) {
            self.evict_one();
        }
        let mut parent = known.checked_sub(1).map(|at| chain[at]);
        for block in &chain[known..] {
            if self.blocks.len() >= self.size {
                break;
            }
            self.blocks.insert(*block, (parent, now));
            parent = Some(*block);
        }
    }
}

#[test]
fn a_node_is_modelled_like_a_list_of_blocks() {
    for seed in 0..6 {
        let random = &mut Random(seed);
        let limits = Limits {
            node_blocks_default: 120,
            ..Limits::default()
        };
        let mut model = Approximate::new(limits);
        let node = NodeId::new("a");
        let mut twin = Twin {
            size: 120,
            pool: 120,
            ..Twin::default()
        };
        let mut corrections = 0;
        let mut in_flight = Vec::new();
        for step in 0..1500 {
            let asked = some_chain(random);
            let sent = model.sent(&node, &asked);
            in_flight.push((asked, sent));
            if random.below(3) == 0 {
                continue;
            }
            let (chain, sent) = in_flight.swap_remove(random.below(in_flight.len()));
            let reported = match random.below(40) {
                0 => Some(0),
                1 => None,
                2 => Some(chain.len()),
                3..10 => Some(sent.predicted_blocks.saturating_sub(10)),
                _ => Some(sent.predicted_blocks),
            };
            corrections += usize::from(reported.is_some_and(|r| r + 8 < sent.predicted_blocks));
            let now = model.nodes.get(&node).map_or(0, |node| node.now) + 1;
            model.served(&node, &chain, sent, reported);
            twin.served(&chain, sent.predicted_blocks, sent.at, now, reported);
            model.check_integrity();
            assert_eq!(model.held(&node), twin.blocks.len(), "{seed}, step {step}");
            let asked = some_chain(random);
            let found = model.overlap(&asked).first().map_or(0, |(_, run)| *run);
            assert_eq!(found, twin.overlap(&asked), "{seed}, step {step}");
        }
        assert!(corrections > 20, "{corrections}");
    }
}

#[test]
fn a_report_takes_credit_down_and_brings_it_back() {
    let mut model = Approximate::new(Limits::default());
    let node = NodeId::new("a");
    let [old, long, late] =
        [2000, 0, 1000].map(|first| chain(&(first..first + 50).collect::<Vec<_>>()));
    for sent_first in [&old, &long, &late] {
        let sent = model.sent(&node, sent_first);
        assert_eq!(sent.predicted_blocks, 0);
        model.served(&node, sent_first, sent, Some(0));
    }
    let whole = |model: &Approximate, chain| model.overlap(chain) == [(node.clone(), 50)];
    assert!(whole(&model, &old) && whole(&model, &long) && whole(&model, &late));
    // A report within a node block of the prediction says nothing.
    let sent = model.sent(&node, &long[..49]);
    model.served(&node, &long[..49], sent, Some(49 - SLACK_BLOCKS));
    assert!(whole(&model, &old) && whole(&model, &late));
    // The last block was used when the rest of its chain was first sent: all before that is gone.
    let sent = model.sent(&node, &late);
    model.served(&node, &late, sent, Some(10));
    assert!(whole(&model, &late), "it has it now");
    assert_eq!(model.overlap(&old), [], "used before what was missing");
    assert_eq!(model.overlap(&long), [(node.clone(), 49)], "used after it");
    // Another scope's hashes are other hashes.
    let foreign = hash_chain(&Namespace::new("m", None, Some("other")), &[1; 64]);
    assert_eq!(model.overlap(&foreign), []);
    model.forget(&node);
    assert_eq!((model.overlap(&long), model.held(&node)), (vec![], 0));
}

#[test]
fn limits_hold_whatever_is_sent() {
    let limits = Limits {
        node_blocks_default: 30,
        node_blocks_max: 50,
        total_blocks_max: 70,
        nodes_max: 2,
    };
    let mut model = Approximate::new(limits);
    let ids = ["a", "b", "c"].map(NodeId::new);
    model.set_pool(&ids[0], 1_000_000);
    // A million distinct prompts would end the same way: what is old goes.
    for round in 0..200 {
        let long = chain(&(round..round + 80).collect::<Vec<_>>());
        for id in &ids {
            let sent = model.sent(id, &long);
            model.served(id, &long, sent, Some(0));
            model.check_integrity();
        }
    }
    let held = ids.map(|id| model.held(&id));
    assert!(
        held[0] >= 40 && held[0] <= 50 && held[1] >= 20 && held[2] == 0,
        "{held:?}"
    );
    // A pool that turns out smaller.
    let node = NodeId::new("a");
    model.set_pool(&node, 5);
    assert_eq!(model.held(&node), 5);
    model.check_integrity();
}
