//! How many leading keys of a chain does each node hold, with as few looks as can be?
//!
//! A node is a holder of a key only while it holds all keys before it (see [`super::chains`]), so
//! the nodes along a chain only get fewer. Where the first and the last key of a stretch have the
//! same holders, nothing happens between them, and no look is needed there; elsewhere the stretch
//! is cut in parts. The looks of one cut do not depend on each other, so the machine waits for
//! them at the same time, and what counts is how often it has to wait: two cuts find a place among
//! 128 keys.
//! Chains that begin with the same key tend to lose their nodes at the same place, where the
//! prompt stops being the one that all share. That place is remembered, and looked at first: a
//! chain of 128 keys that one node holds, behind a prefix that many hold, then takes four looks.
//! A wrong hint costs two looks, and the answer does not depend on it.
//! No key is looked at twice but those at a hint: at worst it is one look a key.

use super::shard::{Begun, Nodes, each_bit};
use super::table::Snapshot;
use crate::block::BlockHash;

/// Parts that a stretch is cut in at most.
const PARTS_MAX: usize = 16;

/// Calls `visit(node, run)` once for each node that holds leading keys, with their number.
pub(super) fn leading_runs(
    snapshot: &Snapshot,
    chain: &[BlockHash],
    visit: impl FnMut(usize, usize),
) {
    match snapshot.set_words() {
        1 => search::<1>(snapshot, chain, visit),
        2 => search::<2>(snapshot, chain, visit),
        4 => search::<4>(snapshot, chain, visit),
        8 => search::<8>(snapshot, chain, visit),
        _ => search::<16>(snapshot, chain, visit),
    }
}

fn search<const W: usize>(
    snapshot: &Snapshot,
    chain: &[BlockHash],
    visit: impl FnMut(usize, usize),
) {
    let (Some(root), Some(last)) = (chain.first(), chain.len().checked_sub(1)) else {
        return;
    };
    let mut search = Search {
        snapshot,
        chain,
        alive: [0; W],
        first_loss: None,
        visit,
    };
    let hint = snapshot.hint(root.short());
    let (first, end) = (search.begin(0), search.begin(last));
    let at_hint =
        (1 < hint && hint < last).then(|| [hint - 1, hint].map(|at| (at, search.begin(at))));
    search.alive = first.holders();
    if search.alive == [0; W] {
        return;
    }
    let mut from = (0, search.alive);
    for (at, begun) in at_hint.into_iter().flatten().chain([(last, end)]) {
        let to = (at, begun.holders());
        search.between(from, to);
        from = to;
    }
    if let Some(loss) = search.first_loss.filter(|loss| *loss != hint) {
        snapshot.set_hint(root.short(), loss);
    }
    search.lose(&[0; W], chain.len());
}

struct Search<'a, const W: usize, V> {
    snapshot: &'a Snapshot,
    chain: &'a [BlockHash],
    /// Nodes that have not been told of yet.
    alive: Nodes<W>,
    /// The first place where there are fewer of them.
    first_loss: Option<usize>,
    visit: V,
}

impl<'a, const W: usize, V: FnMut(usize, usize)> Search<'a, W, V> {
    fn begin(&self, at: usize) -> Begun<'a> {
        let key = self.chain[at].short();
        self.snapshot.shard(key).begin(key)
    }

    /// Finds where between two places of the chain nodes are lost.
    fn between(&mut self, low: (usize, Nodes<W>), high: (usize, Nodes<W>)) {
        let mut lost = self
            .alive
            .iter()
            .zip(&high.1)
            .map(|(alive, high)| alive & !high);
        if lost.all(|lost| lost == 0) {
            return;
        }
        let width = high.0 - low.0;
        if width <= 1 {
            self.lose(&high.1, high.0);
            return;
        }
        // Two cuts for up to 256 keys, and one for up to 16.
        let step = if width <= PARTS_MAX {
            1
        } else {
            width.isqrt().max(width.div_ceil(PARTS_MAX))
        };
        let mut begun = [None; PARTS_MAX];
        let inner = (low.0 + step..high.0).step_by(step);
        for (slot, at) in begun.iter_mut().zip(inner) {
            *slot = Some((at, self.begin(at)));
        }
        let mut from = low;
        for (at, begun) in begun.iter().flatten() {
            let to = (*at, begun.holders());
            self.between(from, to);
            from = to;
        }
        self.between(from, high);
    }

    /// Tells of the nodes that are no holders at this place, which is their run. While events are
    /// applied a node may come back further on; it has been told of, and that is that.
    fn lose(&mut self, holders: &Nodes<W>, run: usize) {
        self.first_loss.get_or_insert(run);
        for (word, (alive, held)) in self.alive.iter_mut().zip(holders).enumerate() {
            let gone = *alive & !held;
            *alive &= held;
            each_bit(gone, |bit| (self.visit)(word * 64 + bit, run));
        }
    }
}
