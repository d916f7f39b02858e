//! Who runs in this step, with how many tokens, and who may join?
//!
//! Counts in, counts out: no tensors, no blocks, no clock. Decodes go first, one token each, since
//! a person watches them; what is left of the step's token budget is filled with prefill chunks in
//! order of arrival. A sequence knows no phases: it has tokens and a computed part, and whatever
//! is not computed yet is due. A fresh prompt, the rest of one, a decode, and a sequence that lost
//! its blocks and comes back are all the same case.
//!
//! Nothing deadlocks: a sequence joins only if the pool can promise the blocks of its known tokens
//! and of the first [`PROMISED_TOKENS_MAX`] of its answer; beyond that, when the pool runs dry, the
//! youngest running sequence gives its blocks back and waits in front of the queue. The oldest is
//! never the victim and fits alone (`max_model_len` never exceeds the pool), so it always ends.
//! Reserving whole answers up front was refused: clients that name no `max_tokens` would each
//! reserve a whole context, and a pool for 16 conversations would run three.
//!
//! Left out until later: priorities, fairness between salts.

use cache_index::block::BLOCK_TOKENS;

/// Answer tokens for which blocks are promised before a sequence joins. Measured on nothing yet:
/// longer than most tool calls, short enough to not keep the pool idle.
pub const PROMISED_TOKENS_MAX: usize = 256;

/// Sequences in one forward pass at most. Bounds the logits (one row of the vocabulary each).
pub const RUNNING_MAX: usize = 128;

/// A running sequence, in counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Tokens known: prompt and answer so far.
    pub known: usize,
    /// Of those, how many have their KV computed.
    pub computed: usize,
}

impl Progress {
    /// Tokens that are known and not computed.
    pub fn due(self) -> usize {
        self.known - self.computed
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

/// Chooses what runs in this step, oldest sequence first. At most `budget` tokens, with two
/// exceptions, so that nobody starves: no decode is left out (they are bounded by
/// [`RUNNING_MAX`]), and one block of prefill always has room.
pub fn plan(running: &[Progress], budget: usize) -> Vec<Chunk> {
    let decodes = running
        .iter()
        .filter(|sequence| sequence.due() == 1)
        .count();
    let mut left = budget.saturating_sub(decodes).max(BLOCK_TOKENS);
    let mut chunks = Vec::with_capacity(running.len());
    for (index, sequence) in running.iter().enumerate() {
        let due = sequence.due();
        if due == 1 {
            chunks.push(Chunk {
                index,
                tokens: 1,
                samples: true,
            });
            continue;
        }
        let tokens = prefill_chunk(*sequence, left);
        if tokens > 0 {
            left -= tokens.min(left);
            chunks.push(Chunk {
                index,
                tokens,
                samples: tokens == due,
            });
        }
    }
    chunks
}

/// A chunk that does not finish its prompt ends on a block border, so that no block is published
/// later than the step that could have filled it.
fn prefill_chunk(sequence: Progress, left: usize) -> usize {
    let due = sequence.due();
    if due <= left {
        return due;
    }
    let end = (sequence.computed + left) / BLOCK_TOKENS * BLOCK_TOKENS;
    end.saturating_sub(sequence.computed)
}

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
    /// Prompt tokens that they have due; decodes do not count.
    pub due: usize,
    /// Blocks promised to them that they have not taken yet.
    pub outstanding: usize,
    /// Blocks that are free or idle.
    pub available: usize,
}

/// Whether a sequence may join now. One that would run alone always may: nothing it could wait for
/// would ever come. Others join only when this step has tokens left for them: joining looks the
/// prompt up in the cache, and of many prompts that begin alike all but the first find the
/// beginning computed if they look after it ran, not before.
pub fn may_join(needs: &Needs, batch: &Batch, budget: usize) -> bool {
    if batch.running == 0 {
        return true;
    }
    if batch.running >= RUNNING_MAX || batch.due >= budget {
        return false;
    }
    // Idle blocks that it takes over leave `available` without being allocated anew.
    let new = needs.promised() - needs.held.min(needs.promised());
    new + needs.idle + batch.outstanding <= batch.available
}

#[cfg(test)]
mod tests {
    //! Catches a starved decode, a chunk past the budget or the prompt, and a promise that the
    //! pool cannot keep.
    use super::*;

    fn progress(known: usize, computed: usize) -> Progress {
        Progress { known, computed }
    }

    #[test]
    fn plans() {
        let chunk = |index, tokens, samples| Chunk {
            index,
            tokens,
            samples,
        };
        let rows: [(&str, &[Progress], usize, &[Chunk]); 9] = [
            ("nothing runs", &[], 64, &[]),
            (
                "a short prompt at once",
                &[progress(5, 0)],
                64,
                &[chunk(0, 5, true)],
            ),
            (
                "a long prompt in chunks",
                &[progress(100, 0)],
                64,
                &[chunk(0, 64, false)],
            ),
            ("its rest", &[progress(100, 64)], 64, &[chunk(0, 36, true)]),
            (
                "decodes before an older prompt",
                &[progress(100, 0), progress(9, 8)],
                33,
                &[chunk(0, 32, false), chunk(1, 1, true)],
            ),
            (
                "decodes run past the budget",
                &[progress(9, 8), progress(9, 8), progress(90, 0)],
                1,
                &[chunk(0, 1, true), chunk(1, 1, true), chunk(2, 16, false)],
            ),
            (
                "two prompts share a step",
                &[progress(20, 0), progress(50, 0)],
                64,
                &[chunk(0, 20, true), chunk(1, 32, false)],
            ),
            (
                "chunks end on a border",
                &[progress(100, 10)],
                20,
                &[chunk(0, 6, false)],
            ),
            (
                "a budget below a block is a block",
                &[progress(50, 16)],
                3,
                &[chunk(0, 16, false)],
            ),
        ];
        for (name, running, budget, expected) in rows {
            assert_eq!(plan(running, budget), expected, "{name}");
        }
    }

    #[test]
    fn random_plans_keep_the_rules() {
        let mut state = 7_u64;
        let mut below = |bound: usize| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(99);
            (state >> 33) as usize % bound
        };
        for _ in 0..2000 {
            let budget = 1 + below(300);
            let running: Vec<_> = (0..below(12))
                .map(|_| {
                    let computed = below(500);
                    progress(computed + 1 + below(2) * below(400), computed)
                })
                .collect();
            let chunks = plan(&running, budget);
            let decodes = running
                .iter()
                .filter(|sequence| sequence.due() == 1)
                .count();
            let total: usize = chunks.iter().map(|chunk| chunk.tokens).sum();
            assert!(
                total <= budget.max(decodes + 16),
                "{total} tokens of {budget}"
            );
            assert!(
                chunks.is_empty() == running.is_empty(),
                "work is done if there is any"
            );
            assert!(
                chunks.is_sorted_by_key(|chunk| chunk.index),
                "order of arrival"
            );
            for (index, sequence) in running.iter().enumerate() {
                let mine: Vec<_> = chunks.iter().filter(|chunk| chunk.index == index).collect();
                assert!(
                    mine.len() <= 1 && (sequence.due() > 1 || mine.len() == 1),
                    "decodes run"
                );
                for chunk in mine {
                    assert!(chunk.tokens > 0 && chunk.tokens <= sequence.due());
                    assert_eq!(chunk.samples, chunk.tokens == sequence.due());
                }
            }
        }
    }

    #[test]
    fn joining() {
        let needs = |known, output_left, held, idle| Needs {
            known,
            output_left,
            held,
            idle,
        };
        let batch = |running, due, outstanding, available| Batch {
            running,
            due,
            outstanding,
            available,
        };
        let rows = [
            (
                "alone, whatever it needs",
                needs(1600, 100, 0, 0),
                batch(0, 0, 0, 1),
                true,
            ),
            ("fits", needs(16, 16, 0, 0), batch(1, 1, 0, 2), true),
            (
                "one block short",
                needs(16, 17, 0, 0),
                batch(1, 1, 0, 2),
                false,
            ),
            (
                "promises of others count",
                needs(16, 16, 0, 0),
                batch(1, 1, 2, 3),
                false,
            ),
            (
                "shared blocks in use cost nothing",
                needs(64, 16, 4, 0),
                batch(1, 1, 0, 1),
                true,
            ),
            (
                "idle shared blocks leave the pool",
                needs(64, 16, 4, 4),
                batch(1, 1, 0, 4),
                false,
            ),
            (
                "an answer is promised in part",
                needs(16, 9999, 0, 0),
                batch(1, 1, 0, 17),
                true,
            ),
            (
                "the batch is full",
                needs(1, 1, 0, 0),
                batch(RUNNING_MAX, 1, 0, 999),
                false,
            ),
            (
                "the step is full",
                needs(1, 1, 0, 0),
                batch(1, 64, 0, 999),
                false,
            ),
        ];
        for (name, needs, batch, expected) in rows {
            assert_eq!(may_join(&needs, &batch, 64), expected, "{name}");
        }
    }
}
