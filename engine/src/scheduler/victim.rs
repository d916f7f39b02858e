//! Who gives its blocks back?
//!
//! Two occasions. The pool is dry: then the least important sequence goes, the youngest of those,
//! but never the one that arrived first, so that one always comes to its end. Or a tenant that runs
//! nothing has no room because others run much: then the tenant that runs most gives one up. Either
//! way what was computed stays findable, and the victim resumes from what is left of it.

use std::cmp::Reverse;
use std::collections::HashMap;

use super::turns::Share;

/// A running sequence as it stands beside the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Whose it is.
    pub share: Share,
    /// Lower is more important.
    pub priority: i32,
    /// Its number in order of arrival.
    pub arrival: u64,
}

/// The victim when the pool is dry; none if only one runs.
pub fn when_dry(running: &[Standing]) -> Option<usize> {
    let first = running.iter().map(|standing| standing.arrival).min()?;
    last_of(running, |standing| standing.arrival != first)
}

/// The victim that makes room for a share that runs nothing; none if no share runs two.
pub fn for_share(running: &[Standing], share: Share) -> Option<usize> {
    let mut counts: HashMap<Share, usize> = HashMap::new();
    for standing in running {
        *counts.entry(standing.share).or_default() += 1;
    }
    if counts.contains_key(&share) {
        return None;
    }
    let (largest, count) = counts
        .into_iter()
        .max_by_key(|(share, count)| (*count, *share))?;
    if count < 2 {
        return None;
    }
    let first = running
        .iter()
        .filter(|standing| standing.share == largest)
        .map(|standing| standing.arrival)
        .min()?;
    last_of(running, |standing| {
        standing.share == largest && standing.arrival != first
    })
}

fn last_of(running: &[Standing], may: impl Fn(&Standing) -> bool) -> Option<usize> {
    (0..running.len())
        .filter(|index| may(&running[*index]))
        .min_by_key(|index| Reverse((running[*index].priority, running[*index].arrival)))
}

#[cfg(test)]
mod tests {
    //! Catches a victim that was there first, and one taken from a tenant that runs little.
    use super::*;

    fn standing(share: u64, priority: i32, arrival: u64) -> Standing {
        Standing {
            share: Share(share),
            priority,
            arrival,
        }
    }

    #[test]
    fn victims() {
        let running = [
            standing(1, 9, 0),
            standing(1, 0, 1),
            standing(1, 5, 2),
            standing(2, 5, 3),
            standing(2, 0, 4),
        ];
        let rows = [
            (&running[..0], None, None),
            (&running[..1], None, None),
            (&running[..2], Some(1), Some(1)),
            (&running[..3], Some(2), Some(2)),
            (&running[..4], Some(3), Some(2)),
            (&running[..5], Some(3), Some(2)),
            (&running[3..5], Some(1), Some(1)),
        ];
        for (running, dry, share) in rows {
            assert_eq!(when_dry(running), dry, "{running:?}");
            assert_eq!(for_share(running, Share(3)), share, "{running:?}");
        }
        assert_eq!(for_share(&running, Share(2)), None, "it runs already");
        assert_eq!(for_share(&running[2..4], Share(3)), None, "one each");
    }
}
