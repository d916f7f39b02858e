//! Can the pool promise this sequence its blocks?

use cache_index::block::BLOCK_TOKENS;

use super::RUNNING_MAX;

/// Answer tokens for which blocks are promised before a sequence joins. Measured on nothing yet:
/// longer than most tool calls, short enough to not keep the pool idle.
pub const PROMISED_TOKENS_MAX: usize = 256;

/// How many others may join while one that came before them is too large to fit. Past it nobody
/// joins until that one has: a large request is not starved by a stream of small ones.
pub const OVERTAKEN_MAX: usize = 16;

/// What a waiting sequence would need, in blocks and tokens.
#[derive(Clone, Copy, Debug)]
pub struct Needs {
    /// Tokens known: prompt, and the answer so far if it ran before.
    pub known: usize,
    /// Tokens it may still produce.
    pub output_left: usize,
    /// Leading blocks that the pool already holds and that may be credited.
    pub held: usize,
    /// Of those, how many are idle.
    pub idle: usize,
}

impl Needs {
    /// Blocks promised to the sequence in total.
    pub fn promised(&self) -> usize {
        (self.known + self.output_left.min(PROMISED_TOKENS_MAX)).div_ceil(BLOCK_TOKENS)
    }
}

/// What runs already, in counts.
#[derive(Clone, Copy, Debug)]
pub struct Batch {
    /// Running sequences.
    pub running: usize,
    /// Blocks promised to them that they have not taken yet.
    pub outstanding: usize,
    /// Blocks that are free or idle.
    pub available: usize,
}

/// Whether a sequence may join now. One that would run alone always may: nothing it could wait for
/// would ever come.
pub fn may_join(needs: &Needs, batch: &Batch) -> bool {
    if batch.running == 0 {
        return true;
    }
    if batch.running >= RUNNING_MAX {
        return false;
    }
    // Idle blocks that it takes over leave `available` without being allocated anew.
    let new = needs.promised() - needs.held.min(needs.promised());
    new + needs.idle + batch.outstanding <= batch.available
}

/// Keeps a sequence that does not fit from being overtaken for ever.
#[derive(Debug, Default)]
pub struct Overtaken {
    first: Option<(u64, usize)>,
}

impl Overtaken {
    /// The sequence that nobody may overtake any more.
    pub fn next(&self) -> Option<u64> {
        let (arrival, times) = self.first?;
        (times >= OVERTAKEN_MAX).then_some(arrival)
    }

    /// A sequence did not fit.
    pub fn refused(&mut self, arrival: u64) {
        if self.first.is_none() {
            self.first = Some((arrival, 0));
        }
    }

    /// A sequence joined.
    pub fn joined(&mut self, arrival: u64) {
        match &mut self.first {
            Some((first, _)) if *first == arrival => self.first = None,
            Some((_, times)) => *times += 1,
            None => {}
        }
    }

    /// A sequence is gone without having joined.
    pub fn gone(&mut self, arrival: u64) {
        if self.first.is_some_and(|(first, _)| first == arrival) {
            self.first = None;
        }
    }
}

#[cfg(test)]
mod tests {
    //! Catches a promise that the pool cannot keep, and one who is overtaken for ever.
    use super::*;

    #[test]
    fn joining() {
        let needs = |known, output_left, held, idle| Needs {
            known,
            output_left,
            held,
            idle,
        };
        let batch = |running, outstanding, available| Batch {
            running,
            outstanding,
            available,
        };
        let rows = [
            (
                "alone, whatever it needs",
                needs(1600, 100, 0, 0),
                batch(0, 0, 1),
                true,
            ),
            ("fits", needs(16, 16, 0, 0), batch(1, 0, 2), true),
            (
                "one block short",
                needs(16, 17, 0, 0),
                batch(1, 0, 2),
                false,
            ),
            (
                "promises of others count",
                needs(16, 16, 0, 0),
                batch(1, 2, 3),
                false,
            ),
            (
                "shared blocks in use cost nothing",
                needs(64, 16, 4, 0),
                batch(1, 0, 1),
                true,
            ),
            (
                "idle shared blocks leave the pool",
                needs(64, 16, 4, 4),
                batch(1, 0, 4),
                false,
            ),
            (
                "an answer is promised in part",
                needs(16, 9999, 0, 0),
                batch(1, 0, 17),
                true,
            ),
            (
                "the batch is full",
                needs(1, 1, 0, 0),
                batch(RUNNING_MAX, 0, 999),
                false,
            ),
        ];
        for (name, needs, batch, expected) in rows {
            assert_eq!(may_join(&needs, &batch), expected, "{name}");
        }
    }

    #[test]
    fn nobody_is_overtaken_for_ever() {
        let mut overtaken = Overtaken::default();
        overtaken.joined(1);
        overtaken.refused(7);
        overtaken.refused(8);
        for arrival in 0..OVERTAKEN_MAX as u64 {
            assert_eq!(overtaken.next(), None);
            overtaken.joined(100 + arrival);
        }
        assert_eq!(overtaken.next(), Some(7));
        overtaken.gone(8);
        assert_eq!(overtaken.next(), Some(7));
        overtaken.joined(7);
        assert_eq!(overtaken.next(), None);
    }
}
