//! Which places of a run does each holder hold?
//!
//! Sorted, disjoint stretches, those of a holder next to each other. Most holders have one, from
//! the beginning of the run on; each block that is evicted from the middle adds one.

/// A node and one of its tiers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct Holder(u16);

/// Tiers of a node.
pub(super) const TIERS: usize = 4;

impl Holder {
    /// The holder of this node's number and tier.
    pub(super) fn new(node: usize, tier: usize) -> Self {
        Self(u16::try_from(node * TIERS + tier).expect("both have small bounds"))
    }

    /// As 16 bits, and back from the low bits of a word.
    pub(super) fn word(self) -> u16 {
        self.0
    }

    #[expect(clippy::cast_possible_truncation, reason = "the low bits")]
    pub(super) fn from_word(word: u64) -> Self {
        Self(word as u16)
    }

    /// The node's number.
    pub(super) fn node(self) -> u16 {
        self.0 / TIERS as u16
    }

    pub(super) fn tier(self) -> usize {
        usize::from(self.0) % TIERS
    }
}

/// A holder holds the places `from..to` of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Span {
    pub(super) holder: Holder,
    pub(super) from: u32,
    pub(super) to: u32,
}

impl Span {
    /// All of a run of this length.
    pub(super) fn all(holder: Holder, length: usize) -> Self {
        Self {
            holder,
            from: 0,
            to: u32::try_from(length).unwrap_or(u32::MAX),
        }
    }
}

/// All spans of a run.
#[derive(Clone, Default)]
pub(super) struct Spans(Vec<Span>);

impl Spans {
    pub(super) fn as_slice(&self) -> &[Span] {
        &self.0
    }

    /// The first place behind all that is held.
    pub(super) fn end(&self) -> u32 {
        self.0.iter().map(|span| span.to).max().unwrap_or(0)
    }

    pub(super) fn holds(&self, holder: Holder, at: u32) -> bool {
        let found = self.behind(holder, at);
        self.0
            .get(found)
            .is_some_and(|span| span.holder == holder && span.from <= at)
    }

    /// Whether any place in `from..to` is held.
    pub(super) fn holds_any(&self, holder: Holder, from: u32, to: usize) -> bool {
        let next = self.0.get(self.behind(holder, from));
        next.is_some_and(|span| span.holder == holder && (span.from as usize) < to)
    }

    /// Adds places that the holder does not hold.
    pub(super) fn add(&mut self, holder: Holder, from: u32, to: u32) {
        let at = self.behind(holder, from);
        let joins_next =
            matches!(self.0.get(at), Some(next) if next.holder == holder && next.from == to);
        let before = at.checked_sub(1).map(|before| self.0[before]);
        let joins_before = before.is_some_and(|span| span.holder == holder && span.to == from);
        match (joins_before, joins_next) {
            (true, true) => {
                self.0[at - 1].to = self.0[at].to;
                self.0.remove(at);
            }
            (true, false) => self.0[at - 1].to = to,
            (false, true) => self.0[at].from = from,
            (false, false) => {
                // A holder's first span is mostly the only one: no room for more than needed.
                if self.0.is_empty() {
                    self.0.reserve_exact(1);
                }
                self.0.insert(at, Span { holder, from, to });
            }
        }
    }

    /// Removes a place; false where the holder does not hold it.
    pub(super) fn remove(&mut self, holder: Holder, place: u32) -> bool {
        let at = self.behind(holder, place);
        let Some(span) = self.0.get_mut(at) else {
            return false;
        };
        let Span { from, to, .. } = *span;
        if span.holder != holder || from > place {
            return false;
        }
        match (from == place, place + 1 == to) {
            (true, true) => drop(self.0.remove(at)),
            (true, false) => span.from += 1,
            (false, true) => span.to -= 1,
            (false, false) => {
                span.to = place;
                let from = place + 1;
                self.0.insert(at + 1, Span { holder, from, to });
            }
        }
        true
    }

    /// Removes all places of a holder; returns how many there were.
    pub(super) fn remove_all(&mut self, holder: Holder) -> usize {
        let from = self.0.partition_point(|span| span.holder < holder);
        let to = self.0.partition_point(|span| span.holder <= holder);
        let gone = self.0.drain(from..to);
        gone.map(|span| (span.to - span.from) as usize).sum()
    }

    /// Index of the first span that ends behind a place of a holder.
    fn behind(&self, holder: Holder, place: u32) -> usize {
        self.0
            .partition_point(|span| (span.holder, span.to) <= (holder, place))
    }

    /// Panics where spans overlap or touch. For tests.
    pub(super) fn check_integrity(&self) {
        assert!(
            self.0.iter().all(|span| span.from < span.to),
            "an empty span"
        );
        for pair in self.0.windows(2) {
            let [a, b] = [pair[0], pair[1]];
            assert!((a.holder, a.to) < (b.holder, b.from), "{a:?} before {b:?}");
        }
    }
}
