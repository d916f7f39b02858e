//! Whose turn is it to prefill?
//!
//! Salts (tenants, behind the gateway) take turns of [`TURN_TOKENS`] each: deficit round robin, so
//! that a thousand queued requests of one do not delay the single one of another. Priorities order
//! a tenant's own requests and no one else's: across tenants they would let anybody claim to be the
//! most important.
//!
//! Within a salt the order is priority, then those that ran before, then those with less to do (in
//! doublings, so that a short prompt does not wait behind a long one), then arrival. Every fourth
//! turn is that of whoever arrived first, so that no priority and no stream of short prompts starves
//! anybody: ageing by turns, which needs no clock and no scale for priorities, which may be any
//! number.

use std::collections::VecDeque;

/// Tokens of one turn. A few chunks: small against a prompt that would be in the way, large enough
/// that two prompts do not merely halve each other's speed.
pub const TURN_TOKENS: usize = 256;
/// Of so many turns of a salt, one is that of whoever arrived first.
pub const OLDEST_EVERY: u32 = 4;
/// Prompts with at most so much to do are all alike.
const SHORT_TOKENS: usize = 256;

/// Whose a request is: a number for each salt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Share(pub u64);

/// A request that could use prefill tokens, waiting or running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contender {
    /// Whose it is.
    pub share: Share,
    /// Lower goes first.
    pub priority: i32,
    /// Its number in order of arrival.
    pub arrival: u64,
    /// Tokens it has to compute, as far as known.
    pub left: usize,
    /// Whether a client has seen part of its answer already.
    pub answering: bool,
}

#[derive(Debug)]
struct Turn {
    share: Share,
    /// Tokens left of the turn; below 0 if the last one was overdrawn.
    credit: i64,
    turns: u32,
}

/// The order of the salts, kept from step to step.
#[derive(Debug, Default)]
pub struct Turns {
    ring: VecDeque<Turn>,
}

impl Turns {
    /// Takes over who contends in this step: newcomers queue up at the end, and a salt with nothing
    /// to do leaves (and with it what it had saved up).
    pub fn begin(&mut self, contenders: &[Contender]) {
        self.ring
            .retain(|turn| contenders.iter().any(|c| c.share == turn.share));
        for contender in contenders {
            if !self.ring.iter().any(|turn| turn.share == contender.share) {
                self.ring.push_back(Turn {
                    share: contender.share,
                    credit: TURN_TOKENS as i64,
                    turns: 0,
                });
            }
        }
    }

    /// The contender whose turn it is, as an index; none if there are none.
    pub fn pick(&self, contenders: &[Contender]) -> Option<usize> {
        let of = |share: Share| {
            (0..contenders.len()).filter(move |index| contenders[*index].share == share)
        };
        let turn = self
            .ring
            .iter()
            .find(|turn| of(turn.share).next().is_some())?;
        let mine = of(turn.share);
        if turn.turns % OLDEST_EVERY == OLDEST_EVERY - 1 {
            return mine.min_by_key(|index| contenders[*index].arrival);
        }
        mine.min_by_key(|index| {
            let contender = &contenders[*index];
            (
                contender.priority,
                !contender.answering,
                size_class(contender.left),
                contender.arrival,
            )
        })
    }

    /// Takes tokens off a salt's turn; once it is used up, the salt goes to the end.
    pub fn charge(&mut self, share: Share, tokens: usize) {
        let Some(at) = self.ring.iter().position(|turn| turn.share == share) else {
            return;
        };
        self.ring[at].credit -= tokens as i64;
        if self.ring[at].credit > 0 {
            return;
        }
        if let Some(mut turn) = self.ring.remove(at) {
            turn.credit += TURN_TOKENS as i64;
            turn.turns = turn.turns.wrapping_add(1);
            self.ring.push_back(turn);
        }
    }
}

/// 0 for the short ones, then one more for each doubling.
fn size_class(left: usize) -> u32 {
    (left.max(1) - 1)
        .checked_div(SHORT_TOKENS)
        .and_then(usize::checked_ilog2)
        .map_or(0, |class| class + 1)
}

#[cfg(test)]
mod tests {
    //! Catches a tenant that delays another by queueing much, and anybody who starves.
    use super::*;

    struct Random(u64);

    impl Random {
        fn below(&mut self, bound: usize) -> usize {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963);
            (self.0 >> 33) as usize % bound
        }
    }

    fn contender(share: u64, priority: i32, arrival: u64, left: usize) -> Contender {
        Contender {
            share: Share(share),
            priority,
            arrival,
            left,
            answering: false,
        }
    }

    /// Serves `contenders` in chunks until the one that arrived as `wanted` is done; returns the
    /// tokens that this took. `arrive` may add others before each chunk.
    fn tokens_until_done(
        contenders: &mut Vec<Contender>,
        wanted: u64,
        chunk: usize,
        mut arrive: impl FnMut(&mut Vec<Contender>),
    ) -> usize {
        let mut turns = Turns::default();
        let mut total = 0;
        while contenders.iter().any(|c| c.arrival == wanted) {
            arrive(contenders);
            turns.begin(contenders);
            let index = turns.pick(contenders).expect("somebody contends");
            let tokens = chunk.min(contenders[index].left);
            turns.charge(contenders[index].share, tokens);
            contenders[index].left -= tokens;
            total += tokens;
            contenders.retain(|c| c.left > 0);
        }
        total
    }

    #[test]
    fn size_classes_double() {
        let rows = [
            (0, 0),
            (1, 0),
            (256, 0),
            (257, 1),
            (512, 1),
            (513, 2),
            (4096, 4),
        ];
        for (left, class) in rows {
            assert_eq!(size_class(left), class, "{left}");
        }
    }

    #[test]
    fn a_thousand_of_one_tenant_do_not_delay_the_one_of_another() {
        for chunk in [8, 64, 256] {
            let mut contenders: Vec<_> = (0..1000)
                .map(|arrival| contender(1, -99, arrival, 4000))
                .collect();
            contenders.push(contender(2, 0, 1000, 1000));
            let total = tokens_until_done(&mut contenders, 1000, chunk, |_| {});
            assert!(
                total <= 2 * 1000 + 2 * TURN_TOKENS,
                "{total} tokens by {chunk}"
            );
        }
    }

    #[test]
    fn a_short_prompt_passes_a_long_one_and_the_long_one_goes_on() {
        let mut contenders = vec![contender(1, 0, 0, 100_000), contender(1, 0, 1, 100)];
        let total = tokens_until_done(&mut contenders, 1, 64, |_| {});
        assert_eq!(total, 100);
        // A new short prompt whenever there is none: the long one still gets every fourth turn.
        let mut contenders = vec![contender(1, 0, 0, 10_000)];
        let mut arrivals = 0;
        let total = tokens_until_done(&mut contenders, 0, 64, |contenders| {
            if contenders.len() == 1 {
                arrivals += 1;
                contenders.push(contender(1, 0, arrivals, 200));
            }
        });
        assert!(total <= 4 * 10_000 + 4 * TURN_TOKENS, "{total} tokens");
    }

    #[test]
    fn nobody_starves_under_adversarial_priorities() {
        for seed in 0..20 {
            let mut random = Random(seed);
            let mut next = 1;
            let mut contenders = vec![contender(1, i32::MAX, 0, 3000)];
            let total = tokens_until_done(&mut contenders, 0, 32, |contenders| {
                while contenders.len() < 10 {
                    let share = 1 + random.below(2) as u64;
                    let priority = -(random.below(1 << 30) as i32);
                    contenders.push(contender(share, priority, next, 1 + random.below(500)));
                    next += 1;
                }
            });
            // A quarter of half of the tokens.
            assert!(total <= 8 * 3000 + 16 * TURN_TOKENS, "seed {seed}: {total}");
        }
    }

    #[test]
    fn shares_are_equal_over_random_work() {
        for seed in 0..20 {
            let mut random = Random(seed);
            let mut turns = Turns::default();
            let mut served = [0_usize; 3];
            let mut next = 0;
            for _ in 0..3000 {
                // Share 0 asks with many small ones, 1 with few large ones, 2 with a mix.
                let contenders: Vec<_> = (0..12)
                    .map(|which| {
                        next += 1;
                        let left = [10, 5000, 1 + random.below(900)][which % 3];
                        contender((which % 3) as u64, random.below(9) as i32, next, left)
                    })
                    .collect();
                turns.begin(&contenders);
                let index = turns.pick(&contenders).expect("somebody contends");
                let tokens = contenders[index].left.min(1 + random.below(128));
                turns.charge(contenders[index].share, tokens);
                served[index % 3] += tokens;
            }
            let (least, most) = (served.iter().min(), served.iter().max());
            let (least, most) = (*least.expect("three"), *most.expect("three"));
            assert!(most - least <= 3 * TURN_TOKENS, "seed {seed}: {served:?}");
        }
    }
}
