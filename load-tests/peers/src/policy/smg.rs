//! SMG's cache-aware policy: what a worker holds by its crate's own trees, the choice by its rule.
//!
//! What was sent where is learnt in `kv-index`'s `TokenTree` (`smg-tree`), or what workers hold is known
//! from `kv` in its `ChainIndex` (`smg-events`); a block of the protocol is one page of 16 tokens that
//! spell its number. The tree is cut to its budget every two minutes, over all workers together, as
//! SMG's own eviction does. The crate has no rule to choose by; SMG's gateway has, and is a crate, too
//! (`smg` 1.13.0: a thousand packages, and a newer Rust than this repository asks for). Its rule is said
//! here again, after `policies/cache_aware.rs` and `policies/least_load.rs` there, for workers that
//! report no load:
//!
//! * `rule=gate` (SMG 1.13): of the workers with the longest match, if that is more than the share
//!   `threshold` of the prompt (with events: any), those that pass the gate; else, after a match, all
//!   that pass it; without one, all. The fewest requests under way among them. The gate stops a worker
//!   with more than `rel` times the mean of requests and more than `margin` above it: `abs`, and no more
//!   than two standard deviations of a Poisson count at that mean, which is at least 4.
//! * `rule=spread` (SMG's documentation, SGLang's router): as `simulate`'s `cache-aware`.
//!
//! Ties are drawn.

use std::collections::HashMap;

use kv_index::{
    ChainBlockMap, ChainIndex, ContentHash, SequenceHash, StoredBlock, TokenTree,
    compute_request_content_hashes,
};

use super::{Hello, Parameters, Policy, Request, number};
use crate::workload::Random;

/// Tokens in a page of the tree, which is a block of the protocol.
const PAGE_TOKENS: usize = 16;
/// SMG evicts this often, ms (`--eviction-interval`).
const EVICTION_MS: f64 = 120_000.0;
/// The gate's margin is never capped below this.
const MARGIN_MIN: f64 = 4.0;
/// 64 Mi characters (`--max-tree-size`) at four a token, in blocks of 512 tokens.
const TREE_BLOCKS: f64 = 32_768.0;

#[derive(Clone, Copy, PartialEq)]
enum Rule {
    Gate,
    Spread,
}

/// Its thresholds; the defaults are those of SMG's command line.
#[derive(Clone, Copy)]
struct Thresholds {
    rule: Rule,
    threshold: f64,
    abs: f64,
    rel: f64,
    tree_blocks: f64,
}

enum Knowledge {
    Dispatches {
        tree: TokenTree,
        evicted_ms: f64,
    },
    Events {
        index: Box<ChainIndex>,
        workers: Vec<u32>,
        maps: Vec<ChainBlockMap>,
    },
}

/// Workers with the longest match, and that match's share of the prompt.
struct Matched {
    holders: Vec<usize>,
    share: f64,
}

/// The policy.
pub struct Smg {
    thresholds: Thresholds,
    block_tokens: u32,
    knowledge: Knowledge,
    names: Vec<String>,
    loads: Vec<usize>,
    under_way: HashMap<u32, usize>,
    random: Random,
}

impl Smg {
    /// Learns from what it sends.
    pub fn from_dispatches(hello: &Hello, given: &Parameters) -> Result<Self, String> {
        let tree = TokenTree::new();
        let knowledge = Knowledge::Dispatches {
            tree,
            evicted_ms: 0.0,
        };
        Self::new(hello, given, knowledge)
    }

    /// Knows from events.
    pub fn from_events(hello: &Hello, given: &Parameters) -> Result<Self, String> {
        let index = Box::new(ChainIndex::with_max_workers(hello.nodes));
        let intern = |node| {
            index
                .intern_worker(&name(node))
                .map_err(|e| format!("kv-index: {e:?}"))
        };
        let workers = (0..hello.nodes).map(intern).collect::<Result<_, _>>()?;
        let knowledge = Knowledge::Events {
            workers,
            maps: (0..hello.nodes).map(|_| ChainBlockMap::default()).collect(),
            index,
        };
        Self::new(hello, given, knowledge)
    }

    fn new(hello: &Hello, given: &Parameters, knowledge: Knowledge) -> Result<Self, String> {
        Ok(Self {
            thresholds: thresholds(given)?,
            block_tokens: hello.block_tokens,
            knowledge,
            names: (0..hello.nodes).map(name).collect(),
            loads: vec![0; hello.nodes],
            under_way: HashMap::new(),
            random: Random::new(hello.seed),
        })
    }

    /// The fewest requests under way; ties are drawn.
    fn least_loaded(&mut self, among: &[usize]) -> Option<usize> {
        let least = among.iter().map(|node| self.loads[*node]).min()?;
        let mut equal = among.iter().filter(|node| self.loads[**node] == least);
        let count = equal.clone().count();
        let drawn = self.random.next()? as usize % count;
        equal.nth(drawn).copied()
    }

    fn pick(&mut self, offered: &[usize], matched: &Matched) -> Option<usize> {
        match self.thresholds.rule {
            Rule::Gate => self.pick_by_gate(offered, matched),
            Rule::Spread => self.pick_by_spread(offered, matched),
        }
    }

    fn pick_by_gate(&mut self, offered: &[usize], matched: &Matched) -> Option<usize> {
        let Thresholds {
            threshold,
            abs,
            rel,
            ..
        } = self.thresholds;
        let least_share = match self.knowledge {
            Knowledge::Dispatches { .. } => threshold,
            Knowledge::Events { .. } => 0.0,
        };
        if matched.share <= least_share || matched.holders.is_empty() {
            return self.least_loaded(offered);
        }
        let load = |node: &usize| self.loads[*node] as f64;
        let mean = offered.iter().map(load).sum::<f64>() / offered.len() as f64;
        let margin = abs.min((2.0 * mean.sqrt()).ceil().max(MARGIN_MIN));
        let passes = |node: &&usize| load(node) <= mean * rel || load(node) <= mean + margin;
        let safe =
            |nodes: &[usize]| -> Vec<usize> { nodes.iter().filter(passes).copied().collect() };
        let (holders, others) = (safe(&matched.holders), safe(offered));
        match (holders.is_empty(), others.is_empty()) {
            (false, _) => self.least_loaded(&holders),
            (true, false) => self.least_loaded(&others),
            (true, true) => self.least_loaded(offered),
        }
    }

    fn pick_by_spread(&mut self, offered: &[usize], matched: &Matched) -> Option<usize> {
        let Thresholds {
            threshold,
            abs,
            rel,
            ..
        } = self.thresholds;
        let loads = offered.iter().map(|node| self.loads[*node] as f64);
        let most = loads.clone().fold(0.0, f64::max);
        let least = loads.fold(f64::INFINITY, f64::min);
        let is_uneven = most - least > abs && most > rel * least;
        if is_uneven || matched.share <= threshold || matched.holders.is_empty() {
            return self.least_loaded(offered);
        }
        self.least_loaded(&matched.holders)
    }

    fn matched_by_events(&self, request: &Request, offered: &[usize]) -> Matched {
        let Knowledge::Events { index, workers, .. } = &self.knowledge else {
            return Matched {
                holders: Vec::new(),
                share: 0.0,
            };
        };
        let spelled: Vec<u32> = request
            .blocks
            .iter()
            .flat_map(|block| page(*block))
            .collect();
        let hashes = compute_request_content_hashes(&spelled, PAGE_TOKENS);
        let scores = index.find_matches(&hashes, false).scores;
        let score = |node: &usize| scores.get(&workers[*node]).copied().unwrap_or(0);
        let best = offered.iter().map(score).max().unwrap_or(0);
        let holders = offered
            .iter()
            .copied()
            .filter(|node| best > 0 && score(node) == best);
        let matched = f64::from(best) * f64::from(self.block_tokens);
        Matched {
            holders: holders.collect(),
            share: matched / f64::from(request.input_tokens.max(1)),
        }
    }

    /// One descent of the tree: match, choose, insert for the chosen.
    fn choose_by_tree(&mut self, request: &Request, offered: &[usize]) -> Option<usize> {
        let Knowledge::Dispatches { tree, evicted_ms } = &mut self.knowledge else {
            return None;
        };
        if request.t_ms - *evicted_ms >= EVICTION_MS {
            *evicted_ms = request.t_ms;
            tree.evict_tenant_by_size(self.thresholds.tree_blocks as usize * PAGE_TOKENS);
        }
        // A prompt's last tokens make no page and count all the same.
        let rest = u64::from(request.input_tokens)
            .saturating_sub(request.blocks.len() as u64 * u64::from(self.block_tokens));
        let rest = rest * PAGE_TOKENS as u64 / u64::from(self.block_tokens);
        let rest = (rest as usize).min(PAGE_TOKENS - 1);
        let mut spelled: Vec<u32> = request
            .blocks
            .iter()
            .flat_map(|block| page(*block))
            .collect();
        spelled.extend(std::iter::repeat_n(u32::MAX, rest));
        let tree = std::mem::take(tree);
        let names = self.names.clone();
        let mut chosen = None;
        tree.match_and_insert_with(&spelled, |found| {
            let holds = |node: &usize| {
                let holders = &found.matched_tenants;
                holders.iter().any(|holder| **holder == *names[*node])
            };
            let matched = Matched {
                holders: offered.iter().copied().filter(holds).collect(),
                share: found.matched_token_count as f64 / found.input_token_count.max(1) as f64,
            };
            chosen = self.pick(offered, &matched);
            chosen.map(|node| names[node].as_str())
        });
        if let Knowledge::Dispatches { tree: place, .. } = &mut self.knowledge {
            *place = tree;
        }
        chosen
    }
}

fn thresholds(given: &Parameters) -> Result<Thresholds, String> {
    let mut thresholds = Thresholds {
        rule: Rule::Gate,
        threshold: 0.3,
        abs: 64.0,
        rel: 1.5,
        tree_blocks: TREE_BLOCKS,
    };
    for (key, value) in given {
        match (key.as_str(), value.as_str()) {
            ("rule", "gate") => thresholds.rule = Rule::Gate,
            ("rule", "spread") => thresholds.rule = Rule::Spread,
            ("rule", _) => return Err(format!("rule={value}: gate or spread")),
            ("threshold", _) => thresholds.threshold = number(key, value)?,
            ("abs", _) => thresholds.abs = number(key, value)?,
            ("rel", _) => thresholds.rel = number(key, value)?,
            ("tree", _) => thresholds.tree_blocks = number(key, value)?,
            _ => {
                let known = "rule, threshold, abs, rel, tree (blocks in all)";
                return Err(format!("no parameter {key:?}; there are: {known}"));
            }
        }
    }
    Ok(thresholds)
}

fn name(node: usize) -> String {
    format!("node-{node}")
}

/// The tokens that spell a block.
fn page(block: u32) -> [u32; PAGE_TOKENS] {
    [block; PAGE_TOKENS]
}

fn content(block: u32) -> Option<ContentHash> {
    compute_request_content_hashes(&page(block), PAGE_TOKENS).pop()
}

impl Policy for Smg {
    fn stored(&mut self, node: usize, parent: Option<u32>, blocks: &[u32]) -> Result<(), String> {
        let Knowledge::Events {
            index,
            workers,
            maps,
        } = &mut self.knowledge
        else {
            return Ok(());
        };
        let stored = |block: &u32| {
            let content_hash = content(*block)?;
            let seq_hash = SequenceHash(u64::from(*block));
            Some(StoredBlock {
                seq_hash,
                content_hash,
            })
        };
        let stored: Vec<StoredBlock> = blocks.iter().filter_map(stored).collect();
        let parent = parent.map(|block| SequenceHash(u64::from(block)));
        index
            .apply_stored(workers[node], &stored, parent, &mut maps[node])
            .map_err(|error| format!("kv-index: {error:?}"))
    }

    fn removed(&mut self, node: usize, blocks: &[u32]) -> Result<(), String> {
        if let Knowledge::Events {
            index,
            workers,
            maps,
        } = &mut self.knowledge
        {
            let removed: Vec<SequenceHash> = blocks
                .iter()
                .map(|block| SequenceHash(u64::from(*block)))
                .collect();
            index.apply_removed(workers[node], &removed, &mut maps[node]);
        }
        Ok(())
    }

    fn choose(&mut self, request: &Request) -> Result<usize, String> {
        let offered: Vec<usize> = request.nodes.iter().map(|node| node.id).collect();
        let chosen = match self.knowledge {
            Knowledge::Dispatches { .. } => self.choose_by_tree(request, &offered),
            Knowledge::Events { .. } => {
                let matched = self.matched_by_events(request, &offered);
                self.pick(&offered, &matched)
            }
        };
        let node = chosen.ok_or("no node to choose")?;
        self.loads[node] += 1;
        self.under_way.insert(request.id, node);
        Ok(node)
    }

    fn first_token(&mut self, _id: u32) -> Result<(), String> {
        Ok(())
    }

    fn finished(&mut self, id: u32) -> Result<(), String> {
        if let Some(node) = self.under_way.remove(&id) {
            self.loads[node] -= 1;
        }
        Ok(())
    }
}
