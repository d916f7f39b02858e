//! How do ranks exchange what they computed?
//!
//! Every rank calls the same collectives in the same order. Sums are taken in the order of the
//! ranks, by each rank for itself, so that all get the same bits, and the same again the next
//! time.
//!
//! [`Alone`] is a group of one: nothing moves. [`Threads`] are ranks of one process that meet at a
//! barrier and read each other's memory. A rank that fails breaks the group up: the others then
//! unwind from their next meeting instead of waiting for ever.

use std::panic::resume_unwind;
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock};

/// One rank of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rank {
    index: usize,
    count: usize,
}

impl Rank {
    /// The only rank of a group of one.
    pub const ALONE: Rank = Rank { index: 0, count: 1 };

    /// Rank `index` of `count`; `None` if there is no such rank.
    pub fn new(index: usize, count: usize) -> Option<Rank> {
        (index < count).then_some(Rank { index, count })
    }

    /// Its place in the group.
    pub fn index(self) -> usize {
        self.index
    }

    /// Ranks in the group.
    pub fn count(self) -> usize {
        self.count
    }
}

/// What the ranks of a group do together. The step loop's thread calls them, never a kernel.
pub trait Collectives: Send {
    /// Which rank this is.
    fn rank(&self) -> Rank;

    /// Shows `part` to all ranks, and calls `each` with every rank's part in the order of ranks.
    fn all_gather(&mut self, part: &[f32], each: &mut dyn FnMut(Rank, &[f32]));

    /// `x` becomes what it is on rank `from`. All ranks' `x` are of one length.
    fn broadcast(&mut self, from: usize, x: &mut [f32]);

    /// `x` becomes the sum of all ranks' `x`, which are of one length.
    fn all_reduce(&mut self, x: &mut [f32]);
}

/// The collectives of a group of one.
#[derive(Debug, Clone, Copy, Default)]
pub struct Alone;

impl Collectives for Alone {
    fn rank(&self) -> Rank {
        Rank::ALONE
    }

    fn all_gather(&mut self, part: &[f32], each: &mut dyn FnMut(Rank, &[f32])) {
        each(Rank::ALONE, part);
    }

    fn broadcast(&mut self, from: usize, _x: &mut [f32]) {
        assert_eq!(from, 0, "a group of one has rank 0 alone");
    }

    fn all_reduce(&mut self, _x: &mut [f32]) {}
}

/// One of several ranks in this process, each on a thread of its own.
#[derive(Debug)]
pub struct Threads {
    rank: Rank,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    meeting: Mutex<Meeting>,
    changed: Condvar,
    /// What each rank shows to the others.
    shown: Vec<RwLock<Vec<f32>>>,
}

#[derive(Debug, Default)]
struct Meeting {
    arrived: usize,
    /// Meetings so far: who waits, waits for it to change.
    round: u64,
    broken: bool,
}

/// What a rank unwinds with when the group has lost another one.
#[derive(Debug)]
pub(super) struct GroupBroken;

impl Threads {
    /// All ranks of a group, in order.
    pub fn group(count: usize) -> Vec<Threads> {
        let shared = Arc::new(Shared {
            meeting: Mutex::default(),
            changed: Condvar::new(),
            shown: (0..count).map(|_| RwLock::default()).collect(),
        });
        let rank = |index| Threads {
            rank: Rank { index, count },
            shared: Arc::clone(&shared),
        };
        (0..count).map(rank).collect()
    }

    /// What breaks the group up from outside, when a rank has failed.
    pub(super) fn breaker(&self) -> Breaker {
        Breaker(Arc::clone(&self.shared))
    }

    /// Waits until all ranks are here.
    fn meet(&self) {
        let shared = &*self.shared;
        let mut meeting = shared
            .meeting
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let round = meeting.round;
        meeting.arrived += 1;
        if meeting.arrived == self.rank.count {
            meeting.arrived = 0;
            meeting.round += 1;
            shared.changed.notify_all();
        }
        while meeting.round == round && !meeting.broken {
            meeting = shared
                .changed
                .wait(meeting)
                .unwrap_or_else(PoisonError::into_inner);
        }
        let broken = meeting.broken;
        drop(meeting);
        if broken {
            resume_unwind(Box::new(GroupBroken));
        }
    }

    fn show(&self, values: &[f32]) {
        let mut shown = self.shared.shown[self.rank.index]
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        shown.clear();
        shown.extend_from_slice(values);
    }

    fn see(&self, rank: usize, look: impl FnOnce(&[f32])) {
        let shown = self.shared.shown[rank]
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        look(&shown);
    }
}

/// Breaks a group up.
#[derive(Debug)]
pub(super) struct Breaker(Arc<Shared>);

impl Breaker {
    /// From now on every meeting unwinds.
    pub(super) fn break_up(&self) {
        let mut meeting = self
            .0
            .meeting
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        meeting.broken = true;
        drop(meeting);
        self.0.changed.notify_all();
    }
}

impl Collectives for Threads {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn all_gather(&mut self, part: &[f32], each: &mut dyn FnMut(Rank, &[f32])) {
        self.show(part);
        self.meet();
        let count = self.rank.count;
        for index in 0..count {
            self.see(index, |part| each(Rank { index, count }, part));
        }
        // Nobody shows anything new before all have seen this.
        self.meet();
    }

    fn broadcast(&mut self, from: usize, x: &mut [f32]) {
        assert!(from < self.rank.count, "rank {from} of {}", self.rank.count);
        if from == self.rank.index {
            self.show(x);
        }
        self.meet();
        self.see(from, |shown| x.copy_from_slice(shown));
        self.meet();
    }

    fn all_reduce(&mut self, x: &mut [f32]) {
        self.show(x);
        x.fill(0.0);
        self.meet();
        for index in 0..self.rank.count {
            self.see(index, |part| {
                assert_eq!(part.len(), x.len(), "rank {index} adds another length");
                for (sum, value) in x.iter_mut().zip(part) {
                    *sum += value;
                }
            });
        }
        self.meet();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `work` on every rank, and returns what each of them gives.
    fn on_ranks<T: Send>(count: usize, work: impl Fn(Threads) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let ranks: Vec<_> = Threads::group(count)
                .into_iter()
                .map(|rank| scope.spawn(|| work(rank)))
                .collect();
            ranks
                .into_iter()
                .map(|rank| rank.join().expect("no rank fails"))
                .collect()
        })
    }

    fn number(rank: usize, round: usize, index: usize) -> f32 {
        ((rank * 7919 + round * 104_729 + index * 1_299_709) % 1_000) as f32 / 7.0 - 50.0
    }

    /// Would catch a rank that reads before all have written, or writes before all have read; a
    /// sum in another order on another rank.
    #[test]
    fn many_rounds_on_several_ranks_equal_the_plain_sums() {
        for count in [1, 2, 3, 5] {
            on_ranks(count, |mut rank| {
                let own = rank.rank().index();
                for round in 0..300 {
                    let len = 1 + round % 9;
                    let values = |rank| (0..len).map(move |index| number(rank, round, index));
                    let mut x: Vec<f32> = values(own).collect();
                    rank.all_reduce(&mut x);
                    let sum = |index| (0..count).fold(0.0, |sum, r| sum + number(r, round, index));
                    assert_eq!(x, (0..len).map(sum).collect::<Vec<f32>>());

                    // Parts may differ in length.
                    let mut seen = Vec::new();
                    let part: Vec<f32> = values(own).take(own % (len + 1)).collect();
                    rank.all_gather(&part, &mut |rank, part| {
                        seen.push((rank.index(), part.to_vec()));
                    });
                    let all = (0..count).map(|r| (r, values(r).take(r % (len + 1)).collect()));
                    assert_eq!(seen, all.collect::<Vec<_>>());

                    let from = round % count;
                    let mut x: Vec<f32> = values(own).collect();
                    rank.broadcast(from, &mut x);
                    assert_eq!(x, values(from).collect::<Vec<_>>());
                }
            });
        }
    }

    /// Would catch a group of one that changes what it is given.
    #[test]
    fn alone_nothing_changes() {
        let mut x = [1.5, -2.0];
        let mut alone = Alone;
        alone.all_reduce(&mut x);
        alone.broadcast(0, &mut x);
        let mut calls = 0;
        alone.all_gather(&x, &mut |rank, part| {
            calls += 1;
            assert_eq!((rank, part), (Rank::ALONE, &[1.5, -2.0][..]));
        });
        assert_eq!(calls, 1);
        assert_eq!(Rank::new(2, 2), None);
    }

    /// Would catch ranks that wait for ever for one that has failed.
    #[test]
    fn a_lost_rank_unwinds_the_others() {
        let mut ranks = Threads::group(2);
        let breaker = ranks[0].breaker();
        let mut waiting = ranks.swap_remove(1);
        let result = std::thread::scope(|scope| {
            let waiting = scope.spawn(move || waiting.all_reduce(&mut [1.0]));
            breaker.break_up();
            waiting.join()
        });
        assert!(result.is_err_and(|cause| cause.is::<GroupBroken>()));
    }
}
