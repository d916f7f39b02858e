//! Who runs in this step, with how many tokens, and who may join?
//!
//! Counts in, counts out: no tensors, no blocks, no clock. Decodes go first, since a person watches
//! them; [`pace`] says how much prefill fits beside them without making them wait, [`queue`] when more
//! of it may, [`turns`] who gets it, [`join`] whether the pool can promise a newcomer its blocks,
//! [`victim`] who gives blocks back when the promises were too bold.
//!
//! A sequence knows no phases: it has tokens and a computed part, and whatever is not computed yet
//! is due. A fresh prompt, the rest of one, a decode, a run of tokens that a grammar forced, and a
//! sequence that lost its blocks and comes back are all the same case. A few due tokens after the
//! first one of the answer count as a decode.
//!
//! Nothing deadlocks: a sequence joins only if the pool can promise the blocks of its known tokens
//! and of the first [`join::PROMISED_TOKENS_MAX`] of its answer; beyond that, when the pool runs
//! dry, another sequence gives its blocks back and waits again. The one that arrived first is never
//! the victim and fits alone (`max_model_len` never exceeds the pool), so it always ends. Reserving
//! whole answers up front was refused: clients that name no `max_tokens` would each reserve a whole
//! context, and a pool for 16 conversations would run three.
//!
//! Nobody starves: salts take turns, and within a salt every fourth turn is that of whoever has
//! waited longest, whatever the others' priorities.

pub mod join;
pub mod pace;
pub mod queue;
pub mod turns;
pub mod victim;

use cache_index::block::BLOCK_TOKENS;

/// Due tokens up to which a sequence that has begun to answer counts as a decode. Forced runs of
/// JSON keys and drafts are shorter; more than a block is better cut into chunks like a prompt.
pub const DECODE_TOKENS_MAX: usize = 16;

/// Sequences in one forward pass at most. Bounds the logits (one row of the vocabulary each).
pub const RUNNING_MAX: usize = 128;

/// A running sequence, in counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Tokens known: prompt, answer so far, and drafts.
    pub known: usize,
    /// Of those, how many have their KV computed.
    pub computed: usize,
    /// Whether its answer has begun.
    pub answering: bool,
}

impl Progress {
    /// Tokens that are known and not computed.
    pub fn due(self) -> usize {
        self.known - self.computed
    }

    /// Whether it goes first, with all that it has due.
    pub fn decodes(self) -> bool {
        self.answering && self.due() <= DECODE_TOKENS_MAX
    }
}

/// What one sequence computes in this step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Index into the running sequences.
    pub index: usize,
    /// Tokens to compute, from the first one not computed.
    pub tokens: usize,
    /// Whether the chunk reaches the last known token, so that its logits give the next one.
    pub samples: bool,
}

/// How many tokens a prompt gets out of `left`. With room to spare a chunk that does not finish its
/// prompt ends on a block border, so that no block is published later than the step that could have
/// filled it; a chunk below two blocks is beside decodes and takes what it can get.
pub fn prefill_chunk(sequence: Progress, left: usize) -> usize {
    let due = sequence.due();
    if due <= left {
        return due;
    }
    if left < 2 * BLOCK_TOKENS {
        return left;
    }
    let end = (sequence.computed + left) / BLOCK_TOKENS * BLOCK_TOKENS;
    end.saturating_sub(sequence.computed)
}

#[cfg(test)]
mod tests {
    //! Catches a chunk past its room or its prompt, and one that makes no progress.
    use super::*;

    #[test]
    fn chunks() {
        let progress = |known, computed, answering| Progress {
            known,
            computed,
            answering,
        };
        let rows = [
            ("a short prompt at once", progress(5, 0, false), 64, 5),
            ("a long prompt in chunks", progress(100, 0, false), 64, 64),
            ("its rest", progress(100, 64, false), 64, 36),
            ("ends on a border", progress(100, 10, false), 50, 38),
            (
                "beside decodes, what there is",
                progress(100, 10, false),
                9,
                9,
            ),
            ("no room", progress(100, 10, false), 0, 0),
        ];
        for (name, sequence, left, expected) in rows {
            assert_eq!(prefill_chunk(sequence, left), expected, "{name}");
        }
        assert!(progress(17, 1, true).decodes());
        assert!(!progress(18, 1, true).decodes(), "a long run is cut");
        assert!(
            !progress(5, 4, false).decodes(),
            "a prompt's end is prefill"
        );
    }

    #[test]
    fn a_chunk_makes_progress_within_its_room() {
        for computed in 0..70 {
            for due in 1..70 {
                for left in 0..70 {
                    let sequence = Progress {
                        known: computed + due,
                        computed,
                        answering: false,
                    };
                    let tokens = prefill_chunk(sequence, left);
                    assert!(tokens <= left.min(due));
                    assert!(tokens > 0 || left == 0, "{computed} {due} {left}");
                }
            }
        }
    }
}
