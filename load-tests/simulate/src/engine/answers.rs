//! How does an answer begin, end, or break off?

use std::sync::Arc;

use super::node::{ComingToken, Decode, NOW_MS, Node};
use super::tiers::Tier;
use super::{Happened, Job};

impl Node {
    /// A prompt is there: its answer begins.
    pub(super) fn begin_answer(
        &mut self,
        job: &Job,
        (answer_blocks, pins): (usize, Vec<u32>),
        (cached_tokens, fetched_tokens): (u32, u32),
    ) {
        // An answer's context grows from the prompt's to the prompt's and its own: the middle.
        let output = f64::from(job.output_tokens);
        let context_tokens = f64::from(job.prompt_tokens) + output / 2.0;
        self.context_tokens += context_tokens;
        self.running.push(Decode {
            id: job.id,
            ends_at_step: self.steps + output,
            output_tokens: job.output_tokens,
            context_tokens,
            prompt_blocks: job.blocks.len(),
            answer_blocks,
            pins,
        });
        self.coming.push(ComingToken {
            at_ms: self.now_ms + self.step_ms(),
            id: job.id,
            cached_tokens,
            fetched_tokens,
        });
    }

    /// Begins the answers whose KV has come, in order, as far as there is room.
    pub(super) fn join_arrived(&mut self) {
        while self.running.len() < self.params.batch_max
            && let Some(job) = self.arrived.front()
        {
            let usable = job.blocks.len().min(self.pool.capacity() - 2);
            let from = self.pool.overlap(&job.blocks[..usable]);
            let answer_blocks = self.params.answer_blocks(job.output_tokens);
            let wanted = usable - from + answer_blocks;
            let mut pins = self.pool.pin(&job.blocks[..from]);
            if self.pool.available() < wanted as i64 && !self.running.is_empty() {
                self.pool.unpin(&pins);
                return;
            }
            let Some(job) = self.arrived.pop_front() else {
                return;
            };
            let mut removed = Vec::new();
            self.pool.make_room(wanted, &mut removed);
            self.pool.reserve(answer_blocks);
            self.pool
                .insert_pinned(&job.blocks[from..usable], &mut pins);
            self.tell_removed(Tier::Device, removed);
            if usable > from {
                self.happened.push(Happened::Stored {
                    at_ms: self.now_ms,
                    tier: Tier::Device,
                    path: Arc::clone(&job.blocks),
                    from,
                    to: usable,
                });
            }
            self.begin_answer(&job, (answer_blocks, pins), (0, 0));
        }
    }

    pub(super) fn end_answers(&mut self) {
        while let Some(first) = self.running.peek() {
            if (first.ends_at_step - self.steps) * self.step_ms() > NOW_MS {
                break;
            }
            let Some(done) = self.running.pop() else {
                break;
            };
            // Its first token may be due a rounding error later.
            if let Some(coming) = self.coming.iter_mut().find(|c| c.id == done.id) {
                coming.at_ms = coming.at_ms.min(self.now_ms);
                self.tell_first_tokens(self.now_ms);
            }
            self.let_go(&done);
            self.happened.push(Happened::Finished {
                at_ms: self.now_ms,
                id: done.id,
                output_tokens: done.output_tokens,
            });
        }
    }

    fn let_go(&mut self, done: &Decode) {
        self.context_tokens = (self.context_tokens - done.context_tokens).max(0.0);
        self.pool.unpin(&done.pins);
        self.pool.unreserve(done.answer_blocks);
    }

    pub(super) fn cancel_waiting(&mut self, id: u32) -> bool {
        let before = self.arrived.len();
        self.arrived.retain(|job| job.id != id);
        if self.arrived.len() < before {
            return true;
        }
        let Some(place) = self.waiting.iter().position(|w| w.job.id == id) else {
            return false;
        };
        if let Some(gone) = self.waiting.remove(place) {
            self.waiting_ms = (self.waiting_ms - gone.prefill_ms).max(0.0);
        }
        true
    }

    pub(super) fn cancel_prefill(&mut self, id: u32) -> bool {
        let Some(gone) = self.prefill.take_if(|p| p.job.id == id) else {
            return false;
        };
        self.pool.unreserve(gone.new_blocks + gone.answer_blocks);
        self.pool.unpin(&gone.pins);
        true
    }

    pub(super) fn cancel_answer(&mut self, id: u32) -> bool {
        let Some(gone) = self.running.iter().find(|d| d.id == id).cloned() else {
            return false;
        };
        self.running.retain(|d| d.id != id);
        self.let_go(&gone);
        true
    }
}
