//! Does everything in the runs add up? For tests.

use std::collections::{HashMap, HashSet};

use super::{Holder, Loc, Runs};
use crate::index::spans::Span;

impl Runs {
    /// Panics where it does not, or where lookups are shown something else. `pins` are those beside
    /// the runs' own. Returns what each holder holds.
    pub(in crate::index) fn check_integrity(&self, pins: &[Loc]) -> HashMap<Holder, HashSet<Loc>> {
        let mut held: HashMap<Holder, HashSet<Loc>> = HashMap::new();
        let mut pinned: HashMap<Loc, u32> = HashMap::new();
        let mut keys = HashSet::new();
        let mut live = 0;
        for (run, own) in (0..).zip(&self.runs) {
            assert!(!own.is_dirty, "a change that is not shown");
            let slot = self.published.slot(run).expect("it was shown once");
            let view = slot.view();
            if own.length == 0 {
                assert!(view.is_none(), "a run that is gone is shown");
                continue;
            }
            live += 1;
            let view = view.as_ref().expect("a run is shown");
            assert_eq!(view.spans(), own.spans.as_slice(), "spans of run {run}");
            assert_eq!(view.length(), own.length, "length of run {run}");
            own.spans.check_integrity();
            let own_keys: Vec<_> = (0..own.length).map(|at| own.keys.get(at)).collect();
            assert_eq!(view.common(&own_keys), own.length, "keys of run {run}");
            assert_eq!(view.version, slot.version(), "version of run {run}");
            if let Some(brief) = slot.brief(&own_keys) {
                assert_eq!(brief.spans(), own.spans.as_slice(), "slot of run {run}");
                assert_eq!(brief.length, own.length, "slot of run {run}");
            } else {
                let is_whole = |span: &Span| *span == Span::all(span.holder, own.length);
                let spans = own.spans.as_slice();
                let is_brief = spans.len() <= 12 && spans.iter().all(is_whole);
                assert!(!is_brief, "slot of run {run}");
            }
            for key in &own_keys {
                assert!(keys.insert(key.short()), "{key} at two places");
            }
            let is_own = |found: &u32| *found == run;
            assert!(
                self.heads
                    .find(own_keys[0].short())
                    .any(|found| is_own(&found))
            );
            for span in own.spans.as_slice() {
                assert!(span.to as usize <= own.length, "held behind the end");
                let locs = (span.from..span.to).map(|at| Loc { run, at });
                held.entry(span.holder).or_default().extend(locs);
            }
            if let Some(before) = own.before {
                *pinned.entry(before).or_default() += 1;
            }
        }
        for pin in pins {
            *pinned.entry(*pin).or_default() += 1;
        }
        let mut branches = 0;
        for (run, own) in (0..).zip(&self.runs) {
            for (at, count) in &own.branches {
                let at = Loc { run, at: *at };
                assert_eq!(pinned.get(&at), Some(count), "branches at {at:?}");
                branches += 1;
            }
        }
        assert_eq!(branches, pinned.len(), "pins");
        assert_eq!(keys.len(), self.keys, "keys in all");
        assert_eq!(live, self.heads.count(), "runs that can be found");
        assert_eq!(live + self.free.len(), self.runs.len(), "runs");
        held
    }
}
