//! One modelled node: a queue, one prefill, many answers, one pool.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;

use super::held::Held;
use super::pool::{Pool, Touched};
use super::tiers::{Source, Store, Tier, TierParams, Tiers};
use super::{Happened, Job, Params, Part};

/// What is nearer than this is now. A nanosecond: above the rounding of a clock that has run for
/// weeks, far below anything the model tells apart.
pub(super) const NOW_MS: f64 = 1e-6;

#[derive(Clone, Debug)]
pub(super) struct Waiting {
    pub(super) job: Job,
    /// Its prefill on an idle node, as things stood when it came.
    pub(super) prefill_ms: f64,
}

#[derive(Clone, Debug)]
pub(super) struct Prefill {
    pub(super) job: Job,
    pub(super) cached_tokens: u32,
    pub(super) pins: Vec<u32>,
    /// Blocks of the path that the pool can take, and those of them that are new.
    pub(super) usable: usize,
    pub(super) new_blocks: usize,
    pub(super) answer_blocks: usize,
    /// Until blocks from a slower tier are here.
    pub(super) transfer_ms: f64,
    pub(super) fetched_tokens: u32,
    pub(super) began_ms: f64,
    pub(super) left_tokens: f64,
    pub(super) token_ms: f64,
}

/// An answer under way.
#[derive(Clone, Debug)]
pub(super) struct Decode {
    pub(super) id: u32,
    /// The count of steps at which it is complete.
    pub(super) ends_at_step: f64,
    pub(super) output_tokens: u32,
    pub(super) context_tokens: f64,
    pub(super) prompt_blocks: usize,
    pub(super) answer_blocks: usize,
    pub(super) pins: Vec<u32>,
}

impl PartialEq for Decode {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for Decode {}
impl PartialOrd for Decode {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Decode {
    /// The one that ends first is the greatest, as a heap wants it.
    fn cmp(&self, other: &Self) -> Ordering {
        other
            .ends_at_step
            .total_cmp(&self.ends_at_step)
            .then(other.id.cmp(&self.id))
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct ComingToken {
    pub(super) at_ms: f64,
    pub(super) id: u32,
    pub(super) cached_tokens: u32,
    pub(super) fetched_tokens: u32,
}

/// One modelled node.
#[derive(Clone, Debug)]
pub struct Node {
    pub(super) params: Params,
    pub(super) region: usize,
    pub(super) pool: Pool,
    pub(super) tiers: Tiers,
    pub(super) now_ms: f64,
    pub(super) waiting: VecDeque<Waiting>,
    pub(super) waiting_ms: f64,
    /// Requests whose KV has come, and for which there is no room yet.
    pub(super) arrived: VecDeque<Job>,
    pub(super) prefill: Option<Prefill>,
    pub(super) held: Held,
    pub(super) running: BinaryHeap<Decode>,
    pub(super) context_tokens: f64,
    /// Steps since the start, fractions included.
    pub(super) steps: f64,
    pub(super) coming: Vec<ComingToken>,
    pub(super) happened: Vec<Happened>,
    pub(super) prefill_busy_ms: f64,
}

impl Node {
    /// An idle node with an empty pool of `capacity` blocks. The clock starts at 0.
    ///
    /// # Panics
    /// If the pool cannot hold one block beside the two that every request reserves.
    pub fn new(params: Params, capacity: usize) -> Self {
        assert!(capacity > 2, "a pool of {capacity} blocks holds no prompt");
        Self {
            params,
            region: 0,
            pool: Pool::new(capacity),
            tiers: Tiers::default(),
            now_ms: 0.0,
            waiting: VecDeque::new(),
            waiting_ms: 0.0,
            arrived: VecDeque::new(),
            prefill: None,
            held: Held::default(),
            running: BinaryHeap::new(),
            context_tokens: 0.0,
            steps: 0.0,
            coming: Vec::new(),
            happened: Vec::new(),
            prefill_busy_ms: 0.0,
        }
    }

    /// The same node in another region than 0.
    #[must_use]
    pub fn in_region(mut self, region: usize) -> Self {
        self.region = region;
        self
    }

    /// The same node with memory below its pool.
    #[must_use]
    pub fn with_host(mut self, params: TierParams) -> Self {
        self.tiers.set_host(params);
        self
    }

    /// The same node, writing to and reading from this store.
    #[must_use]
    pub fn with_store(mut self, store: Store) -> Self {
        self.tiers.set_store(store);
        self
    }

    /// The same node, on which a prompt that was computed for another node stays pinned until
    /// [`Node::let_go_held`].
    #[must_use]
    pub fn holding_prompts(mut self) -> Self {
        self.held.holds_prompts = true;
        self
    }

    /// Takes a request into the queue. What follows from that at once (blocks that had to go) comes
    /// with the next [`Node::advance`].
    pub fn enqueue(&mut self, now_ms: f64, job: Job) {
        self.settle(now_ms);
        if job.part == Part::Answer {
            self.arrived.push_back(job);
            self.join_arrived();
            return;
        }
        let prefill_ms = self.source(&job, &job.blocks).total_ms;
        self.waiting_ms += prefill_ms;
        self.waiting.push_back(Waiting { job, prefill_ms });
        self.start_next();
    }

    /// When something will happen next, or at once if it has. `None`: idle.
    pub fn next_ms(&self) -> Option<f64> {
        if !self.happened.is_empty() {
            return Some(self.now_ms);
        }
        let work = [self.prefill_due_ms(), self.decode_due_ms()];
        let coming = self.coming.iter().map(|c| c.at_ms);
        work.into_iter()
            .flatten()
            .chain(coming)
            .min_by(f64::total_cmp)
    }

    /// Moves the clock and tells what happened up to then, each with its own time.
    pub fn advance(&mut self, now_ms: f64) -> Vec<Happened> {
        loop {
            let work = [self.prefill_due_ms(), self.decode_due_ms()];
            let work = work.into_iter().flatten().fold(f64::INFINITY, f64::min);
            self.tell_first_tokens(now_ms.min(work));
            if work > now_ms {
                break;
            }
            self.settle(work);
            self.end_prefill();
            self.end_answers();
            self.make_use_of_room();
        }
        self.settle(now_ms);
        std::mem::take(&mut self.happened)
    }

    /// Moves the clock and lets work shrink, and nothing happen: for a look at the node between
    /// events. The time must not lie past [`Node::next_ms`].
    pub fn settle(&mut self, now_ms: f64) {
        let passed = now_ms - self.now_ms;
        self.now_ms = self.now_ms.max(now_ms);
        if passed <= 0.0 {
            return;
        }
        let step_ms = self.step_ms();
        self.steps += passed / step_ms;
        if let Some(prefill) = &mut self.prefill {
            if prefill.transfer_ms > NOW_MS {
                prefill.transfer_ms -= passed;
            } else {
                prefill.left_tokens -= passed * self.params.chunk_tokens / step_ms;
                self.prefill_busy_ms += passed;
            }
        }
    }

    /// Gives a request up, wherever it is. True if it was here.
    pub fn cancel(&mut self, now_ms: f64, id: u32) -> bool {
        self.settle(now_ms);
        self.coming.retain(|c| c.id != id);
        let found = self.cancel_waiting(id) || self.cancel_prefill(id) || self.cancel_answer(id);
        self.make_use_of_room();
        found
    }

    /// Lets those who wait begin, as far as they can.
    pub(super) fn make_use_of_room(&mut self) {
        self.join_arrived();
        self.start_next();
    }

    /// Keeps a whole path as cache (an answer's blocks behind its prompt's, say), as far as there is
    /// room beside what requests hold, and writes it to the slower tiers. What follows comes with the
    /// next [`Node::advance`].
    pub fn keep(&mut self, now_ms: f64, path: &Arc<[u32]>) {
        self.settle(now_ms);
        let from = self.overlap(path);
        let mut pins = self.pool.pin(&path[..from]);
        let room = usize::try_from(self.pool.available()).unwrap_or(0);
        let to = path.len().min(from + room);
        let mut removed = Vec::new();
        self.pool.make_room(to - from, &mut removed);
        self.pool.insert_pinned(&path[from..to], &mut pins);
        self.pool.unpin(&pins);
        self.tell_removed(Tier::Device, removed);
        if to > from {
            self.happened.push(Happened::Stored {
                at_ms: self.now_ms,
                tier: Tier::Device,
                path: Arc::clone(path),
                from,
                to,
            });
        }
        self.write_down(path);
    }

    /// Empties pool and host memory; blocks that running requests hold stay.
    pub fn wipe(&mut self, now_ms: f64) {
        self.settle(now_ms);
        let mut blocks = Vec::new();
        self.pool.evict_all(&mut blocks);
        self.tell_removed(Tier::Device, blocks);
        let blocks = self.tiers.wipe();
        self.tell_removed(Tier::Host, blocks);
    }

    /// Where a prompt's leading blocks would come from.
    pub(super) fn source(&self, job: &Job, usable: &[u32]) -> Source {
        let in_pool = self.pool.overlap(usable);
        self.tiers.quickest(&self.params, job, usable, in_pool)
    }

    /// A step without a chunk of a prompt.
    pub(super) fn decode_step_ms(&self) -> f64 {
        self.params.step_ms
            + self.params.step_ms_per_answer * self.running.len() as f64
            + self.params.step_ms_per_context_token * self.context_tokens
    }

    pub(super) fn step_ms(&self) -> f64 {
        let chunk_ms = match &self.prefill {
            Some(p) if p.transfer_ms <= NOW_MS => self.params.chunk_tokens * p.token_ms,
            _ => 0.0,
        };
        self.decode_step_ms() + chunk_ms
    }

    fn prefill_left_at_this_pace_ms(&self) -> Option<f64> {
        self.prefill.as_ref().map(|p| {
            if p.transfer_ms > NOW_MS {
                p.transfer_ms
            } else {
                p.left_tokens.max(0.0) * self.step_ms() / self.params.chunk_tokens
            }
        })
    }

    fn prefill_due_ms(&self) -> Option<f64> {
        Some(self.now_ms + self.prefill_left_at_this_pace_ms()?)
    }

    fn decode_due_ms(&self) -> Option<f64> {
        let steps = self.running.peek()?.ends_at_step - self.steps;
        Some(self.now_ms + (steps * self.step_ms()).max(0.0))
    }

    pub(super) fn tell_first_tokens(&mut self, until_ms: f64) {
        while let Some(next) = (0..self.coming.len())
            .min_by(|a, b| self.coming[*a].at_ms.total_cmp(&self.coming[*b].at_ms))
            .filter(|i| self.coming[*i].at_ms <= until_ms)
        {
            let ComingToken {
                at_ms,
                id,
                cached_tokens,
                fetched_tokens,
            } = self.coming.swap_remove(next);
            self.happened.push(Happened::FirstToken {
                at_ms,
                id,
                cached_tokens,
                fetched_tokens,
            });
        }
    }

    pub(super) fn tell_removed(&mut self, tier: Tier, blocks: Vec<u32>) {
        if !blocks.is_empty() {
            self.happened.push(Happened::Removed {
                at_ms: self.now_ms,
                tier,
                blocks,
            });
        }
    }

    /// Writes what was computed to the slower tiers.
    fn write_down(&mut self, path: &Arc<[u32]>) {
        let changes: Vec<(Tier, Touched)> = self.tiers.write(path).collect();
        for (tier, Touched { from, to, removed }) in changes {
            self.tell_removed(tier, removed);
            if to > from {
                self.happened.push(Happened::Stored {
                    at_ms: self.now_ms,
                    tier,
                    path: Arc::clone(path),
                    from,
                    to,
                });
            }
        }
    }

    /// Starts the prompt at the head of the queue if the batch and the pool have room for it.
    fn start_next(&mut self) {
        if self.prefill.is_some() || self.running.len() >= self.params.batch_max {
            return;
        }
        let Some(head) = self.waiting.front() else {
            return;
        };
        let job = &head.job;
        let usable = job.blocks.len().min(self.pool.capacity() - 2);
        let hit = self.pool.overlap(&job.blocks[..usable]);
        let source = self.source(job, &job.blocks[..usable]);
        let answer_blocks = match job.part {
            Part::Prompt => 0,
            Part::Whole | Part::Answer => self.params.answer_blocks(job.output_tokens),
        };
        let new_blocks = usable - hit;
        let pins = self.pool.pin(&job.blocks[..hit]);
        // With nothing under way that will ever give blocks back, it starts regardless.
        let is_short = self.pool.available() < (new_blocks + answer_blocks) as i64;
        if is_short && !(self.running.is_empty() && self.held.is_empty()) {
            self.pool.unpin(&pins);
            return;
        }
        let mut removed = Vec::new();
        self.pool
            .make_room(new_blocks + answer_blocks, &mut removed);
        self.pool.reserve(new_blocks + answer_blocks);
        self.tell_removed(Tier::Device, removed);
        let Some(Waiting { job, prefill_ms }) = self.waiting.pop_front() else {
            return;
        };
        self.waiting_ms = (self.waiting_ms - prefill_ms).max(0.0);
        let in_pool_tokens = self.params.cached_tokens(hit, job.prompt_tokens);
        let cached_tokens = self.params.cached_tokens(source.blocks, job.prompt_tokens);
        let (prompt, cached) = (f64::from(job.prompt_tokens), f64::from(cached_tokens));
        self.prefill = Some(Prefill {
            cached_tokens,
            pins,
            usable,
            new_blocks,
            answer_blocks,
            transfer_ms: source.transfer_ms,
            fetched_tokens: cached_tokens - in_pool_tokens,
            began_ms: self.now_ms,
            left_tokens: prompt - cached,
            token_ms: self.params.token_ms((prompt + cached) / 2.0),
            job,
        });
    }

    /// If the prompt under way is computed: its blocks get their names, its answer begins.
    fn end_prefill(&mut self) {
        if self
            .prefill_left_at_this_pace_ms()
            .is_none_or(|left| left > NOW_MS)
        {
            return;
        }
        let Some(mut done) = self.prefill.take() else {
            return;
        };
        let from = done.usable - done.new_blocks;
        self.pool.unreserve(done.new_blocks);
        self.pool
            .insert_pinned(&done.job.blocks[from..done.usable], &mut done.pins);
        if done.new_blocks > 0 {
            self.happened.push(Happened::Stored {
                at_ms: self.now_ms,
                tier: Tier::Device,
                path: done.job.blocks.clone(),
                from,
                to: done.usable,
            });
        }
        self.write_down(&done.job.blocks);
        if done.job.part == Part::Prompt {
            self.end_prompt(done.job.id, done.pins);
            self.happened.push(Happened::Computed {
                at_ms: self.now_ms,
                id: done.job.id,
                cached_tokens: done.cached_tokens,
                fetched_tokens: done.fetched_tokens,
                took_ms: self.now_ms - done.began_ms,
            });
            return;
        }
        self.begin_answer(
            &done.job,
            (done.answer_blocks, done.pins),
            (done.cached_tokens, done.fetched_tokens),
        );
    }
}
