//! Would a node lose time, blocks or requests?

use std::collections::HashSet;

use super::pool::Pool;
use super::*;
use crate::random::Random;

fn job(id: u32, blocks: &[u32], prompt_tokens: u32, output_tokens: u32) -> Job {
    Job {
        id,
        blocks: Arc::from(blocks),
        prompt_tokens,
        output_tokens,
        part: Part::Whole,
    }
}

/// Everything that a node does until it is idle.
fn run_out(node: &mut Node) -> Vec<Happened> {
    let mut all = Vec::new();
    while let Some(due_ms) = node.next_ms() {
        all.extend(node.advance(due_ms));
    }
    all
}

fn first_token(happened: &[Happened], wanted: u32) -> Option<(f64, u32)> {
    happened.iter().find_map(|h| match h {
        Happened::FirstToken {
            at_ms,
            id,
            cached_tokens,
            ..
        } if *id == wanted => Some((*at_ms, *cached_tokens)),
        _ => None,
    })
}

fn finished_ms(happened: &[Happened], wanted: u32) -> Option<f64> {
    happened.iter().find_map(|h| match h {
        Happened::Finished { at_ms, id, .. } if *id == wanted => Some(*at_ms),
        _ => None,
    })
}

fn close(value: f64, expected: f64) {
    assert!(
        (value - expected).abs() < 1e-6 * expected.abs().max(1.0),
        "{value}, not {expected}"
    );
}

/// Would the times of one request alone differ from what one works out by hand?
#[test]
fn one_request_takes_its_prefill_and_its_steps() {
    let params = Params::default();
    let mut node = Node::new(params, 1000);
    node.enqueue(1000.0, job(1, &[1, 2, 3, 4], 2048, 100));
    let happened = run_out(&mut node);
    // One chunk of 2048 tokens at an average context of 1024, and the step it is part of.
    let prefill_ms = 12.0 + 2048.0 * 0.05 * (1.0 + 1024.0 / 100_000.0);
    let step_ms = 12.0 + 0.08 + 1.5e-5 * (2048.0 + 50.0);
    close(
        first_token(&happened, 1).expect("begins").0,
        1000.0 + prefill_ms + step_ms,
    );
    close(
        finished_ms(&happened, 1).expect("ends"),
        1000.0 + prefill_ms + 100.0 * step_ms,
    );
    close(node.prefill_busy_ms(), prefill_ms);
}

/// Would a repeated prompt be computed again, or a cached one cost nothing at all?
#[test]
fn a_held_prefix_is_not_computed_again() {
    let mut node = Node::new(Params::default(), 1000);
    node.enqueue(0.0, job(1, &[1, 2, 3, 4], 2048, 1));
    let first = run_out(&mut node);
    assert_eq!(first_token(&first, 1).expect("begins").1, 0);
    let now_ms = finished_ms(&first, 1).expect("ends");
    node.enqueue(now_ms, job(2, &[1, 2, 3, 4], 2048, 1));
    node.enqueue(now_ms, job(3, &[1, 2, 9], 1600, 1));
    let second = run_out(&mut node);
    // The last token is always computed.
    assert_eq!(first_token(&second, 2).expect("begins").1, 2047);
    assert_eq!(first_token(&second, 3).expect("begins").1, 1024);
    assert!(first_token(&second, 2).expect("begins").0 - now_ms < 25.0);
}

/// Would a caller who comes late, as one on a real clock does, see another history?
#[test]
fn being_late_changes_nothing_but_when_it_is_told() {
    let play = |interval_ms: Option<f64>| {
        let mut node = Node::new(Params::default(), 60);
        let mut random = Random::new(5);
        for id in 0..40 {
            let from = random.below(6) as u32 * 100;
            let blocks: Vec<u32> = (from..from + 1 + random.below(20) as u32).collect();
            let tokens = blocks.len() as u32 * 512 + 7;
            node.enqueue(0.0, job(id, &blocks, tokens, 1 + random.below(300) as u32));
        }
        let mut all = Vec::new();
        let mut now_ms = 0.0;
        while let Some(due_ms) = node.next_ms() {
            now_ms = interval_ms.map_or(due_ms, |interval| now_ms + interval);
            all.extend(node.advance(now_ms));
        }
        all.iter().map(told).collect::<Vec<_>>()
    };
    let exact = play(None);
    assert_eq!(
        exact
            .iter()
            .filter(|(what, ..)| *what == "finished")
            .count(),
        40
    );
    for interval_ms in [0.7, 50.0, 1e6] {
        let late = play(Some(interval_ms));
        assert_eq!(late.len(), exact.len());
        for (a, b) in exact.iter().zip(&late) {
            assert_eq!((a.0, a.1), (b.0, b.1), "every {interval_ms} ms");
            assert!(
                (a.2 - b.2).abs() < 1e-3,
                "every {interval_ms} ms: {a:?}, {b:?}"
            );
        }
    }
}

fn told(happened: &Happened) -> (&'static str, u32, f64) {
    match happened {
        Happened::FirstToken { at_ms, id, .. } => ("first token", *id, *at_ms),
        Happened::Computed { at_ms, id, .. } => ("computed", *id, *at_ms),
        Happened::Finished { at_ms, id, .. } => ("finished", *id, *at_ms),
        Happened::Stored { at_ms, path, .. } => ("stored", path[0], *at_ms),
        Happened::Removed { at_ms, blocks, .. } => ("removed", blocks.len() as u32, *at_ms),
    }
}

/// Would an index that follows a node's events believe in blocks that are not there, or miss some?
/// Would the pool ever hold more than it can?
#[test]
fn events_mirror_the_pool_under_random_load() {
    const CAPACITY: usize = 64;
    let mut random = Random::new(9);
    let mut node = Node::new(Params::default(), CAPACITY);
    let mut mirror: HashSet<u32> = HashSet::new();
    let mut now_ms = 0.0;
    let path = |random: &mut Random| -> Vec<u32> {
        let chain = random.below(12) as u32 * 1000;
        (chain..chain + 1 + random.below(30) as u32).collect()
    };
    for id in 0..2000 {
        let blocks = path(&mut random);
        match random.below(12) {
            0 => {
                node.cancel(now_ms, id - random.below(8).min(id as usize) as u32);
            }
            1 => node.keep(now_ms, &Arc::from(blocks.as_slice())),
            2 if id % 50 == 0 => node.wipe(now_ms),
            _ => {
                let tokens = blocks.len() as u32 * 512 + random.below(511) as u32;
                node.enqueue(
                    now_ms,
                    job(id, &blocks, tokens, 1 + random.below(900) as u32),
                );
            }
        }
        now_ms += random.unit() * 400.0;
        for happened in node.advance(now_ms) {
            match happened {
                Happened::Stored { path, from, to, .. } => mirror.extend(&path[from..to]),
                Happened::Removed { blocks, .. } => {
                    for block in blocks {
                        assert!(mirror.remove(&block), "block {block} removed, never stored");
                    }
                }
                _ => {}
            }
        }
        assert!(mirror.len() <= CAPACITY);
        for chain in 0..12 {
            let path: Vec<u32> = (chain * 1000..chain * 1000 + 31).collect();
            let held = path.iter().take_while(|b| mirror.contains(b)).count();
            assert_eq!(node.overlap(&path), held, "after {id} requests");
            let in_all = path.iter().filter(|b| mirror.contains(b)).count();
            assert_eq!(held, in_all, "what is held of a path is a prefix of it");
        }
    }
    assert!(
        mirror.len() > CAPACITY / 2,
        "the load never filled the pool"
    );
}

/// Would a request given up keep a place in the queue, the batch or the pool?
#[test]
fn a_cancelled_request_gives_everything_back() {
    let mut node = Node::new(Params::default(), 100);
    for id in 0..6 {
        // The first half is common, so that the one in prefill pins blocks too.
        let own = id * 1000;
        let blocks: Vec<u32> = (1..=10).chain(own + 100..own + 110).collect();
        node.enqueue(0.0, job(id, &blocks, 10_300, 4000));
    }
    node.advance(1500.0);
    assert!(node.running() > 0 && node.waiting() > 0, "some of each");
    assert_eq!(node.in_flight(), 6, "one is in prefill");
    for id in 0..6 {
        assert!(node.cancel(1500.0, id), "request {id} is here");
    }
    assert!(!node.cancel(1500.0, 3));
    assert_eq!(node.in_flight(), 0);
    assert_eq!(node.pool_available(), 100);
    assert!(
        run_out(&mut node)
            .iter()
            .all(|h| finished_ms(std::slice::from_ref(h), 0).is_none())
    );
}

/// Would a prompt larger than the pool wait for ever?
#[test]
fn a_prompt_larger_than_the_pool_still_runs() {
    let mut node = Node::new(Params::default(), 10);
    let blocks: Vec<u32> = (0..40).collect();
    node.enqueue(0.0, job(1, &blocks, 20_500, 3000));
    let happened = run_out(&mut node);
    assert!(finished_ms(&happened, 1).is_some());
    assert_eq!(node.in_flight(), 0);
}

/// Would the tokens written so far run ahead of the steps, or not reach the end?
#[test]
fn answered_tokens_grow_with_the_steps() {
    let mut node = Node::new(Params::default(), 100);
    node.enqueue(0.0, job(1, &[1], 600, 50));
    let (mut last, mut now_ms) = (0, 0.0);
    while node.next_ms().is_some() {
        now_ms += 5.0;
        node.advance(now_ms);
        if let Some(tokens) = node.answered_tokens(1) {
            assert!(tokens >= last && tokens <= 50, "{tokens} after {last}");
            last = tokens;
        }
    }
    assert!(last >= 49, "only {last} tokens were seen");
}

/// The slow twin: blocks in a list, the most recently used last.
#[derive(Default)]
struct SlowPool {
    blocks: Vec<(u32, u32)>,
    reserved: usize,
}

impl SlowPool {
    fn make_room(&mut self, capacity: usize, wanted: usize) -> Vec<u32> {
        let mut removed = Vec::new();
        while self.blocks.len() + self.reserved + wanted > capacity {
            let Some(place) = self.blocks.iter().position(|(_, pins)| *pins == 0) else {
                break;
            };
            removed.push(self.blocks.remove(place).0);
        }
        removed
    }

    fn pins(&mut self, block: u32, change: i64) {
        match self.blocks.iter().position(|(b, _)| *b == block) {
            Some(place) => {
                let (block, pins) = self.blocks.remove(place);
                self.blocks.push((block, (i64::from(pins) + change) as u32));
            }
            None => self.blocks.push((block, 1)),
        }
    }
}

/// Would the pool's links break under any order of uses?
#[test]
fn the_pool_evicts_what_its_slow_twin_evicts() {
    const CAPACITY: usize = 40;
    let mut random = Random::new(3);
    let (mut fast, mut slow) = (Pool::new(CAPACITY), SlowPool::default());
    let mut held: Vec<(Vec<u32>, Vec<u32>)> = Vec::new();
    for _ in 0..5000 {
        if !held.is_empty() && random.below(2) == 0 {
            let (path, pins) = held.swap_remove(random.below(held.len()));
            fast.unpin(&pins);
            path.iter().rev().for_each(|b| slow.pins(*b, -1));
            continue;
        }
        let chain = random.below(9) as u32 * 100;
        let path: Vec<u32> = (chain..chain + 1 + random.below(12) as u32).collect();
        let hit = fast.overlap(&path);
        let slow_hit = path
            .iter()
            .take_while(|b| slow.blocks.iter().any(|(s, _)| s == *b));
        assert_eq!(hit, slow_hit.count());
        let mut pins = fast.pin(&path[..hit]);
        path[..hit].iter().for_each(|b| slow.pins(*b, 1));
        if fast.available() < (path.len() - hit) as i64 {
            fast.unpin(&pins);
            path[..hit].iter().rev().for_each(|b| slow.pins(*b, -1));
            continue;
        }
        let mut removed = Vec::new();
        fast.make_room(path.len() - hit, &mut removed);
        assert_eq!(removed, slow.make_room(CAPACITY, path.len() - hit));
        fast.insert_pinned(&path[hit..], &mut pins);
        path[hit..].iter().for_each(|b| slow.pins(*b, 1));
        held.push((path, pins));
        let in_use = slow.blocks.iter().filter(|(_, pins)| *pins > 0).count();
        assert_eq!(fast.in_use(), in_use);
    }
}

/// Four blocks whose KV takes a millisecond each to fetch, and ten times that to compute.
fn tiered(blocks: usize) -> (Params, tiers::TierParams) {
    let params = Params::default();
    let bytes = f64::from(params.block_tokens) * params.kv_bytes_per_token;
    let tier = tiers::TierParams {
        blocks,
        gb_per_s: bytes / 1e6,
    };
    close(tier.block_ms(&params), 1.0);
    (params, tier)
}

fn fetched_tokens(happened: &[Happened], wanted: u32) -> u32 {
    let of = |h: &Happened| match h {
        Happened::FirstToken {
            id, fetched_tokens, ..
        } if *id == wanted => Some(*fetched_tokens),
        _ => None,
    };
    happened.iter().find_map(of).expect("begins")
}

/// Would what the pool has lost be computed again though it lies in host memory, or come for nothing?
#[test]
fn what_was_evicted_is_fetched_from_the_host() {
    let (params, tier) = tiered(100);
    let mut node = Node::new(params, 6).with_host(tier);
    node.enqueue(0.0, job(1, &[1, 2, 3, 4], 2049, 1));
    run_out(&mut node);
    node.enqueue(10_000.0, job(2, &[5, 6, 7, 8], 2049, 1));
    run_out(&mut node);
    assert_eq!(node.overlap(&[1, 2, 3, 4]), 1, "three make room");
    node.enqueue(20_000.0, job(3, &[1, 2, 3, 4], 2049, 1));
    let happened = run_out(&mut node);
    assert_eq!(fetched_tokens(&happened, 3), 3 * 512);
    let (at_ms, cached_tokens) = first_token(&happened, 3).expect("begins");
    assert_eq!(cached_tokens, 2048);
    // Three fetches of a millisecond, a token to compute, and two steps of some 12 ms.
    let step_ms = 12.0 + 0.08 + 1.5e-5 * 2049.5;
    let chunk_ms = 0.05 * (1.0 + 2048.5 / 100_000.0) + 12.0 / 2048.0;
    close(at_ms, 20_000.0 + 3.0 + chunk_ms + step_ms);
}

/// Would a node not find what another one has computed, or fetch it over a link slower than itself?
#[test]
fn nodes_share_a_store_where_that_is_quicker() {
    for (slower, expected) in [(1.0, 2048), (1000.0, 0)] {
        let (params, mut tier) = tiered(100);
        tier.gb_per_s /= slower;
        let store = tiers::Store::new(tier);
        let [mut one, mut other] =
            [(); 2].map(|()| Node::new(params, 1000).with_store(store.clone()));
        one.enqueue(0.0, job(1, &[1, 2, 3, 4], 2049, 1));
        let told = run_out(&mut one);
        let tiers: Vec<Tier> = told
            .iter()
            .filter_map(|h| match h {
                Happened::Stored { tier, .. } => Some(*tier),
                _ => None,
            })
            .collect();
        assert_eq!(tiers, [Tier::Device, Tier::Shared]);
        other.enqueue(10_000.0, job(2, &[1, 2, 3, 4], 2049, 1));
        assert_eq!(fetched_tokens(&run_out(&mut other), 2), expected);
        other.enqueue(20_000.0, job(3, &[1, 2, 3, 4], 2049, 1));
        assert_eq!(
            fetched_tokens(&run_out(&mut other), 3),
            0,
            "it is in the pool"
        );
    }
}

/// Would an answer whose KV has come begin without room for it, never begin, or keep its room?
#[test]
fn an_answer_from_another_nodes_prompt_waits_for_room() {
    let shared = |id: u32, part| Job {
        part,
        ..job(
            id,
            &[id * 10, id * 10 + 1, id * 10 + 2, id * 10 + 3],
            2048,
            100,
        )
    };
    let params = Params::default();
    let mut node = Node::new(params, 9);
    node.enqueue(0.0, shared(1, Part::Answer));
    node.enqueue(0.0, shared(2, Part::Answer));
    assert_eq!(
        (node.running(), node.waiting(), node.in_flight()),
        (1, 1, 2)
    );
    let happened = run_out(&mut node);
    // Nothing is computed: a step for each token, and the second one after the first.
    let step_ms = 12.0 + 0.08 + 1.5e-5 * (2048.0 + 50.0);
    close(first_token(&happened, 1).expect("begins").0, step_ms);
    close(finished_ms(&happened, 1).expect("ends"), 100.0 * step_ms);
    close(
        first_token(&happened, 2).expect("begins").0,
        101.0 * step_ms,
    );
    close(node.prefill_busy_ms(), 0.0);
    assert_eq!(node.overlap(&[20, 21, 22, 23]), 4, "it stays as cache");
    assert_eq!(node.pool_available(), 9);
    // Whoever leaves gives it up, wherever it is.
    node.enqueue(50_000.0, shared(3, Part::Answer));
    node.enqueue(50_000.0, shared(4, Part::Answer));
    node.enqueue(50_000.0, shared(5, Part::Prompt));
    for id in [4, 3, 5] {
        assert!(node.cancel(50_001.0, id), "request {id} is here");
    }
    assert_eq!((node.in_flight(), node.pool_available()), (0, 9));
    assert!(
        run_out(&mut node)
            .iter()
            .all(|h| finished_ms(std::slice::from_ref(h), 3).is_none())
    );
}
