//! How many leading keys of a chain does each node hold, tier by tier?
//!
//! A chain lies in a few runs (see [`super::runs`]). In each of them one comparison of last keys
//! mostly tells how far it goes; else the place where they part is searched for. A node goes on to
//! the next run with what it holds without a gap up to there.
//! Where chains that begin with the same key last went on to a second run is remembered, and the
//! memory there is touched before the first run is looked at: the machine then waits for both at the
//! same time. The answer does not depend on it.
//!
//! Runs are loaded one after another while they may change. What has been read is taken if no run
//! but the last has changed by then: all of it was true at the moment when the last one was read.
//! Else it is read again, some times at most, since a lookup waits for nobody; after that its answer
//! may join what was true at different moments.

use std::hint::black_box;

use super::heads::{matches, nearest};
use super::spans::{Span, TIERS};
use super::view::{Published, Slot, Snapshot};
use crate::block::BlockHash;

/// Times that runs are read again. Each takes a change of one of these runs within a microsecond.
const AGAIN_MAX: usize = 16;
/// Runs that are remembered without an allocation: a chain has two or three.
const RUNS_INLINE: usize = 6;

/// What a node holds of a chain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Found {
    node: u16,
    /// Leading keys, by the slowest tier that is read.
    leading: [u32; TIERS],
    /// The tiers for which it holds all keys so far, as bits; 0 once it is out.
    whole: u8,
    /// The run that it was last found in, by its place on the way.
    step: u32,
}

impl Found {
    pub(super) fn node(&self) -> usize {
        usize::from(self.node)
    }

    pub(super) fn leading(&self, tier: usize) -> usize {
        self.leading[tier] as usize
    }
}

/// Nodes that hold leading keys of a chain, in the order of their numbers.
pub(super) fn leading(
    published: &Published,
    snapshot: &Snapshot,
    chain: &[BlockHash],
    found: &mut Vec<Found>,
) {
    let hint = chain.first().map_or(0, |first| published.hint(*first));
    if let Some(second) = chain.get(hint).filter(|_| hint > 0) {
        let run = nearest(&snapshot.tables, second.short());
        let slot = run.and_then(|run| published.slot(run));
        black_box(slot.map(Slot::version));
    }
    for _ in 0..AGAIN_MAX {
        let mut way = Way::default();
        found.clear();
        walk(published, snapshot, chain, found, &mut way);
        if way.is_unchanged(published) {
            break;
        }
    }
}

fn walk(
    published: &Published,
    snapshot: &Snapshot,
    chain: &[BlockHash],
    found: &mut Vec<Found>,
    way: &mut Way,
) {
    let mut rest = chain;
    for step in 0.. {
        let Some(first) = rest.first() else { return };
        let runs = matches(&snapshot.tables, first.short());
        let slots = runs.filter_map(|run| Some((run, published.slot(run)?)));
        let read = slots.into_iter().find_map(|(run, slot)| {
            if let Some(brief) = slot.brief(rest) {
                way.note(run, brief.version);
                return Some((brief.length, take(brief.spans(), brief.length, step, found)));
            }
            let view = slot.view();
            let view = view.as_ref()?;
            let common = view.common(rest);
            (common > 0).then(|| {
                way.note(run, view.version);
                (common, take(view.spans(), common, step, found))
            })
        });
        match read {
            Some((common, true)) => {
                if step == 0 && published.hint(*first) != common {
                    published.set_hint(*first, common);
                }
                rest = &rest[common..];
            }
            _ => return,
        }
    }
}

/// Takes in what nodes hold of the next run; true where one holds all that the chain has of it.
fn take(spans: &[Span], common: usize, step: u32, found: &mut Vec<Found>) -> bool {
    // A run's places have 32 bits.
    let common = u32::try_from(common).unwrap_or(u32::MAX);
    match step {
        0 => enter(spans, common, found),
        _ => go_on(spans, common, step, found),
    }
}

/// Nodes that hold some of the first run; true where one holds all that the chain has of it.
fn enter(spans: &[Span], common: u32, found: &mut Vec<Found>) -> bool {
    let mut is_any_whole = false;
    for (node, spans) in by_node(spans) {
        let leading = reach(spans, common);
        let whole = whole(leading, common);
        if leading[TIERS - 1] > 0 {
            is_any_whole |= whole != 0;
            found.push(Found {
                node,
                leading,
                whole,
                step: 0,
            });
        }
    }
    is_any_whole
}

/// The same for a further run: only nodes that have held everything so far.
fn go_on(spans: &[Span], common: u32, step: u32, found: &mut [Found]) -> bool {
    let mut is_any_whole = false;
    for (node, spans) in by_node(spans) {
        let Ok(at) = found.binary_search_by_key(&node, |found| found.node) else {
            continue;
        };
        let known = &mut found[at];
        if known.whole == 0 || known.step + 1 != step {
            continue;
        }
        let reach = reach(spans, common);
        for (tier, leading) in known.leading.iter_mut().enumerate() {
            if known.whole >> tier & 1 == 1 {
                *leading += reach[tier];
            }
        }
        known.whole &= whole(reach, common);
        known.step = step;
        is_any_whole |= known.whole != 0;
    }
    is_any_whole
}

fn whole(reach: [u32; TIERS], common: u32) -> u8 {
    let bit = |tier: usize| u8::from(reach[tier] == common) << tier;
    (0..TIERS).map(bit).sum()
}

/// Leading places of `common` that one node's spans cover, by the slowest tier that is read.
fn reach(spans: &[Span], common: u32) -> [u32; TIERS] {
    let [first, ..] = spans else {
        return [0; TIERS];
    };
    let is_on_device_alone = spans.last().is_none_or(|last| last.holder.tier() == 0);
    if is_on_device_alone {
        let to = if first.from == 0 { first.to } else { 0 };
        return [to.min(common); TIERS];
    }
    std::array::from_fn(|tier| reach_of(spans, tier).min(common))
}

/// Places that are covered from the first on by tiers up to this one.
fn reach_of(spans: &[Span], slowest: usize) -> u32 {
    // Where each tier's spans go on; none of them is looked at twice.
    let mut rest: [&[Span]; TIERS] = std::array::from_fn(|tier| {
        let from = spans.partition_point(|span| span.holder.tier() < tier);
        let to = spans.partition_point(|span| span.holder.tier() <= tier);
        &spans[from..to]
    });
    let mut covered = 0;
    loop {
        let mut further = covered;
        for tier in &mut rest[..=slowest] {
            while let [first, more @ ..] = *tier
                && first.from <= further
            {
                further = further.max(first.to);
                *tier = more;
            }
        }
        if further == covered {
            return covered;
        }
        covered = further;
    }
}

/// Spans of each node.
fn by_node(spans: &[Span]) -> impl Iterator<Item = (u16, &[Span])> {
    let node = |span: &Span| span.holder.node();
    spans
        .chunk_by(move |a, b| node(a) == node(b))
        .map(move |own| (node(&own[0]), own))
}

/// The runs that were read, in this order.
#[derive(Default)]
struct Way {
    first: [(u32, u64); RUNS_INLINE],
    more: Vec<(u32, u64)>,
    count: usize,
}

impl Way {
    fn note(&mut self, run: u32, version: u64) {
        match self.first.get_mut(self.count) {
            Some(slot) => *slot = (run, version),
            None => self.more.push((run, version)),
        }
        self.count += 1;
    }

    /// Whether all but the last are as they were read.
    fn is_unchanged(&self, published: &Published) -> bool {
        let runs = self.first.iter().chain(&self.more);
        let mut earlier = runs.take(self.count.saturating_sub(1));
        earlier.all(|(run, version)| {
            published
                .slot(*run)
                .is_some_and(|slot| slot.version() == *version)
        })
    }
}
