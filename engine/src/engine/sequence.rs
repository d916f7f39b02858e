//! What does the engine know about one request that runs or waits?
//!
//! States: waiting (no block table), running (with one), ended (gone from the engine). A preempted
//! sequence is simply waiting again: its tokens are kept, its computed part starts over from what
//! the pool still holds.
//!
//! Drafts are tokens at the end that nobody has verified: they are computed with the rest, and kept
//! only as far as sampling agrees with them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use cache_index::block::{BlockHash, creditable_blocks, hash_chain};

use super::answer::{Answer, Voice};
use super::handle::Submission;
use super::incoming::Coming;
use super::job::{Held, Job, Output, Pooling, Usage, Work};
use super::queue::QueuePlace;
use crate::error::ApiError;
use crate::kv::table::BlockTable;
use crate::metrics::{Ending, Metrics};
use crate::sample::{Counts, TokenLogprobs};
use crate::scheduler::Progress;
use crate::scheduler::join::Needs;
use crate::scheduler::turns::{Contender, Share};
use crate::scheduler::victim::Standing;

/// How a waiting sequence stands with the disk and the shared store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DiskWait {
    /// It may ask for its blocks.
    Open,
    /// It has asked, and waits no longer than until then.
    Until(Instant),
    /// It computes what it does not have.
    Over,
}

/// One request inside the engine.
pub(super) struct Sequence {
    pub(super) job: Job,
    /// Its number in order of arrival.
    pub(super) arrival: u64,
    share: Share,
    /// Prompt, answer so far, and drafts.
    pub(super) tokens: Vec<u32>,
    drafted: usize,
    /// Tokens whose KV is in the table.
    pub(super) computed: usize,
    /// Set while it runs.
    pub(super) table: Option<BlockTable>,
    /// Hashes of the leading blocks that it may take from the cache, or computes.
    pub(super) chain: Vec<BlockHash>,
    /// Tokens that it had from the cache when it joined, or found there when it last looked.
    pub(super) found: usize,
    /// How it stands with the tiers below host memory.
    pub(super) disk: DiskWait,
    /// How it stands with the node that has its prompt.
    pub(super) coming: Coming,
    /// Sums of hidden states, of an embedding.
    pub(super) pooled: Vec<f32>,
    /// What penalties look at.
    pub(super) counts: Counts,
    pub(super) answer: Answer,
    /// Prompt tokens served from cache when it first joined; later rejoins change no bill.
    cached_tokens: Option<usize>,
    cancelled: Arc<AtomicBool>,
    /// Given back when it first joins.
    place: Option<QueuePlace>,
}

impl Sequence {
    pub(super) fn new(submission: Submission, arrival: u64) -> Self {
        let Submission {
            mut job,
            share,
            outputs,
            cancelled,
            arrived,
            place,
        } = submission;
        let answer = Answer::new(std::mem::take(&mut job.stops), outputs, arrived);
        let mut chain = std::mem::take(&mut job.chain);
        if job.work == Work::Embed(Pooling::Mean) {
            // Of cached tokens the hidden states are not known any more.
            chain.clear();
        }
        let coming = Coming::new(&job.remote);
        Self {
            arrival,
            share,
            tokens: job.prompt.clone(),
            drafted: 0,
            counts: Counts::new(&job.sampling, &job.prompt),
            job,
            computed: 0,
            table: None,
            chain,
            found: 0,
            disk: DiskWait::Open,
            coming,
            pooled: Vec::new(),
            answer,
            cached_tokens: None,
            cancelled,
            place: Some(place),
        }
    }

    pub(super) fn progress(&self) -> Progress {
        Progress {
            known: self.tokens.len(),
            computed: self.computed,
            answering: self.output_tokens() > 0,
        }
    }

    pub(super) fn standing(&self) -> Standing {
        Standing {
            share: self.share,
            priority: self.job.priority,
            arrival: self.arrival,
        }
    }

    /// How it contends for prefill; `left` tokens are still without a place in this step.
    pub(super) fn contender(&self, left: usize) -> Contender {
        Contender {
            share: self.share,
            priority: self.job.priority,
            arrival: self.arrival,
            left,
            answering: self.output_tokens() > 0,
        }
    }

    /// What it needs of the pool, which holds `held` of its leading blocks, `idle` of them unused.
    pub(super) fn needs(&self, held: usize, idle: usize) -> Needs {
        Needs {
            known: self.tokens.len(),
            output_left: self.output_left(),
            held,
            idle,
        }
    }

    /// Blocks that are promised to it and that it has not taken.
    pub(super) fn outstanding(&self) -> usize {
        let has = self
            .table
            .as_ref()
            .map_or(self.coming.blocks(), |table| table.blocks())
            .len();
        self.needs(0, 0).promised().saturating_sub(has)
    }

    /// Full blocks of its prompt that will stay pinned when it ends.
    pub(super) fn pins(&self) -> usize {
        let pinned = self.job.hold().is_some();
        if pinned {
            self.job.prompt.len() / cache_index::block::BLOCK_TOKENS
        } else {
            0
        }
    }

    /// Tokens of the answer; drafts are none.
    pub(super) fn output_tokens(&self) -> usize {
        self.tokens.len() - self.drafted - self.job.prompt.len()
    }

    pub(super) fn output_left(&self) -> usize {
        match self.job.work {
            Work::Generate => self.job.output_max.saturating_sub(self.output_tokens()),
            Work::Embed(_) | Work::PrefillOnly { .. } => 0,
        }
    }

    /// Rows of logits that it needs from a chunk that reaches its end.
    pub(super) fn rows(&self) -> usize {
        match self.job.work {
            Work::Generate => self.drafted + 1,
            Work::Embed(_) | Work::PrefillOnly { .. } => 0,
        }
    }

    /// Appends drafts, as far as the answer has room for them and one more.
    pub(super) fn add_drafts(&mut self, drafts: &[u32]) {
        let most = self.output_left().saturating_sub(1);
        let drafts = &drafts[..drafts.len().min(most)];
        self.tokens.extend_from_slice(drafts);
        self.drafted += drafts.len();
    }

    /// Takes the drafts off its end.
    pub(super) fn take_drafts(&mut self) -> Vec<u32> {
        let verified = self.tokens.len() - std::mem::take(&mut self.drafted);
        self.tokens.split_off(verified)
    }

    /// The client dropped its ticket.
    pub(super) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire) || self.answer.is_closed()
    }

    pub(super) fn waits_for_disk(&self) -> bool {
        matches!(self.disk, DiskWait::Until(_))
    }

    pub(super) fn is_late(&self, now: Instant) -> bool {
        self.job.deadline.is_some_and(|deadline| deadline <= now)
    }

    /// Whether it still has its place in the queue, which it gives back when it joins.
    pub(super) fn has_place(&self) -> bool {
        self.place.is_some()
    }

    /// Notes that it joined the batch with a table whose leading tokens are computed. True the
    /// first time. `cached` is what another node had of the prompt, if that one computed it.
    pub(super) fn join(
        &mut self,
        table: BlockTable,
        cached: Option<usize>,
        metrics: &Metrics,
    ) -> bool {
        self.computed = table.published_tokens();
        self.disk = DiskWait::Open;
        self.found = self.computed;
        self.table = Some(table);
        self.place = None;
        self.pooled.clear();
        let first = self.cached_tokens.is_none();
        if first {
            let cached_tokens = cached.unwrap_or(self.computed);
            self.cached_tokens = Some(cached_tokens);
            metrics.prompt_tokens.inc_by(self.job.prompt.len() as u64);
            metrics.prefix_queries.inc_by(self.job.prompt.len() as u64);
            metrics.prefix_hits.inc_by(cached_tokens as u64);
            self.answer.send(Output::Joined { cached_tokens });
        }
        first
    }

    /// Goes back to waiting; the caller gives the table back.
    pub(super) fn leave(&mut self) -> Option<BlockTable> {
        self.take_drafts();
        if self.output_tokens() > 0 && self.job.work == Work::Generate {
            self.chain = hash_chain(&self.job.scope.namespace, &self.tokens);
            self.chain.truncate(creditable_blocks(self.tokens.len()));
        }
        self.computed = 0;
        self.disk = DiskWait::Open;
        self.table.take()
    }

    /// Appends a token, and nothing that follows from it. Some if the answer ends with it.
    pub(super) fn push(
        &mut self,
        token: u32,
        logprobs: Option<TokenLogprobs>,
        voice: &Voice<'_>,
    ) -> Option<Ending> {
        self.tokens.push(token);
        self.counts.push(token);
        let number = self.output_tokens();
        self.answer
            .push((token, number), logprobs, &self.job, voice)
    }

    /// Tells the client what is new.
    pub(super) fn flush(&mut self, metrics: &Metrics) {
        let output_tokens = self.output_tokens();
        self.answer.flush(output_tokens, metrics);
    }

    /// Tells the client the end.
    pub(super) fn done(&mut self, ending: Ending, held: Option<Held>, metrics: &Metrics) {
        let usage = self.usage();
        self.answer.done(ending, usage, held, metrics);
    }

    /// Tells the client that it went wrong.
    pub(super) fn fail(&self, error: ApiError) {
        self.answer.send(Output::Failed(error));
    }

    /// The line in the log, once it has ended.
    pub(super) fn log(&self, ending: Ending) {
        let usage = self.usage();
        tracing::info!(
            request_id = %self.job.request_id,
            ending = ending.as_str(),
            prompt_tokens = usage.prompt_tokens,
            cached_tokens = usage.cached_tokens,
            output_tokens = usage.output_tokens,
            first_token_s = self.answer.first_token_s,
            total_s = self.answer.seconds(),
            "request ended"
        );
    }

    pub(super) fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.job.prompt.len(),
            cached_tokens: self.cached_tokens.unwrap_or(0),
            output_tokens: self.output_tokens(),
        }
    }
}
