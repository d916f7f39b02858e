//! Which blocks are still to be sent?

use std::collections::VecDeque;
use std::ops::Range;

/// Numbers in order, as runs.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Runs(VecDeque<Range<u32>>);

impl Runs {
    /// None unless the runs are in order, without any that is empty or ends after `end`.
    pub(super) fn new(runs: &[(u32, u32)], end: u32) -> Option<Runs> {
        let mut last = 0;
        for (from, until) in runs {
            if *from < last || from >= until || *until > end {
                return None;
            }
            last = *until;
        }
        Some(Runs(
            runs.iter().map(|(from, until)| *from..*until).collect(),
        ))
    }

    /// The first number.
    pub(super) fn first(&self) -> Option<u32> {
        self.0.front().map(|run| run.start)
    }

    /// Takes the first number out.
    pub(super) fn pop_first(&mut self) {
        if let Some(run) = self.0.front_mut() {
            run.start += 1;
            if run.start == run.end {
                self.0.pop_front();
            }
        }
    }

    /// Takes out what lies within a range, as runs.
    pub(super) fn take(&mut self, range: Range<u32>) -> Vec<Range<u32>> {
        let mut taken = Vec::new();
        for run in std::mem::take(&mut self.0) {
            let within = run.start.max(range.start)..run.end.min(range.end);
            if within.is_empty() {
                self.0.push_back(run);
                continue;
            }
            let rest = [run.start..within.start, within.end..run.end];
            self.0
                .extend(rest.into_iter().filter(|rest| !rest.is_empty()));
            taken.push(within);
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Would catch a block that is lost or taken twice, against sets of numbers.
    #[test]
    fn runs_are_what_sets_are() {
        let mut state = 7_u32;
        let mut random = |below: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) % below
        };
        for _ in 0..2_000 {
            let mut set: std::collections::BTreeSet<u32> =
                (0..20).filter(|_| random(2) == 0).collect();
            let single: Vec<_> = set.iter().map(|n| (*n, *n + 1)).collect();
            let mut runs = Runs::new(&single, 20).expect("in order");
            for _ in 0..random(6) {
                if random(2) == 0 {
                    assert_eq!(runs.first(), set.pop_first());
                    runs.pop_first();
                } else {
                    let start = random(20);
                    let range = start..start + random(8);
                    let taken: Vec<_> = runs.take(range.clone()).into_iter().flatten().collect();
                    let expected: Vec<_> =
                        set.iter().copied().filter(|n| range.contains(n)).collect();
                    assert_eq!(taken, expected);
                    set.retain(|n| !range.contains(n));
                }
            }
            let left: Vec<_> = runs.0.iter().cloned().flatten().collect();
            assert_eq!(left, set.into_iter().collect::<Vec<_>>());
        }
        for wrong in [&[(1, 1)][..], &[(2, 1)], &[(3, 5), (4, 6)], &[(0, 21)]] {
            assert_eq!(Runs::new(wrong, 20), None, "{wrong:?}");
        }
    }
}
