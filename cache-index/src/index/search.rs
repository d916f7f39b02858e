//! How many leading keys of a chain does each node hold, with as few looks as can be?
//!
//! A node is a holder of a key only while it holds all keys before it (see
//! [`super::chains`]), so the nodes along a chain only get fewer. Where the first and the last key
//! of a stretch have the same holders, nothing happens between them, and no look is needed there;
//! elsewhere the stretch is cut in [`FAN`] parts. A chain of 128 keys that one node holds, behind a
//! prefix that many hold, takes 16 looks. Those of one cut do not depend on each other, so the
//! machine waits for them at the same time.
//! No key is looked at twice: the worst case, where every key has other holders, is one look a key.

use super::shard::{Nodes, each_bit};
use super::table::Snapshot;
use crate::block::BlockHash;

/// Parts that a stretch is cut in. Measured over chains of 128 keys: 4 and 16 are both slower.
const FAN: usize = 8;

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
    let Some(last) = chain.len().checked_sub(1) else {
        return;
    };
    let mut search = Search {
        snapshot,
        chain,
        alive: [0; W],
        visit,
    };
    let first = search.holders(0);
    if first == [0; W] {
        return;
    }
    search.alive = first;
    if last > 0 {
        let end = search.holders(last);
        search.between((0, first), (last, end));
    }
    search.lose(&[0; W], chain.len());
}

struct Search<'a, const W: usize, V> {
    snapshot: &'a Snapshot,
    chain: &'a [BlockHash],
    /// Nodes that have not been told of yet.
    alive: Nodes<W>,
    visit: V,
}

impl<const W: usize, V: FnMut(usize, usize)> Search<'_, W, V> {
    fn holders(&self, at: usize) -> Nodes<W> {
        let key = self.chain[at].short();
        self.snapshot.shard(key).holders(key)
    }

    /// Finds where between two places of the chain nodes are lost.
    fn between(&mut self, low: (usize, Nodes<W>), high: (usize, Nodes<W>)) {
        if self
            .alive
            .iter()
            .zip(&high.1)
            .all(|(alive, high)| alive & !high == 0)
        {
            return;
        }
        if high.0 - low.0 == 1 {
            self.lose(&high.1, high.0);
            return;
        }
        let step = (high.0 - low.0).div_ceil(FAN);
        let mut middle = [[0; W]; FAN];
        let mut count = 0;
        while low.0 + (count + 1) * step < high.0 {
            middle[count] = self.holders(low.0 + (count + 1) * step);
            count += 1;
        }
        let mut from = low;
        for nodes in &middle[..count] {
            let to = (from.0 + step, *nodes);
            self.between(from, to);
            from = to;
        }
        self.between(from, high);
    }

    /// Tells of the nodes that are no holders at this place, which is their run. While events are
    /// applied a node may come back further on; it has been told of, and that is that.
    fn lose(&mut self, holders: &Nodes<W>, run: usize) {
        for (word, (alive, held)) in self.alive.iter_mut().zip(holders).enumerate() {
            let gone = *alive & !held;
            *alive &= held;
            each_bit(gone, |bit| (self.visit)(word * 64 + bit, run));
        }
    }
}
