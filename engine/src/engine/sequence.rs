//! What does the engine know about one request that runs or waits?
//!
//! States: waiting (no block table), running (with one), ended (gone from the engine). A preempted
//! sequence is simply waiting again: its tokens are kept, its computed part starts over from what
//! the pool still holds.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use tokio::sync::mpsc;

use super::handle::{QueuePlace, Submission};
use super::job::{Job, Output, Usage};
use crate::error::ApiError;
use crate::kv::table::BlockTable;
use crate::metrics::{Ending, Metrics};
use crate::output::TextStream;
use crate::sample::Counts;
use crate::scheduler::Progress;

/// One request inside the engine.
pub(super) struct Sequence {
    pub(super) job: Job,
    /// Prompt and answer so far.
    pub(super) tokens: Vec<u32>,
    /// Tokens whose KV is in the table.
    pub(super) computed: usize,
    /// Set while it runs.
    pub(super) table: Option<BlockTable>,
    /// Prompt tokens served from cache when it first joined; later rejoins change no bill.
    cached_tokens: Option<usize>,
    /// What penalties look at.
    pub(super) counts: Counts,
    text: TextStream,
    outputs: mpsc::Sender<Output>,
    cancelled: Arc<AtomicBool>,
    /// Given back when it first joins.
    place: Option<QueuePlace>,
    arrived: Instant,
    last_token: Option<Instant>,
    first_token_s: Option<f64>,
}

/// Whether a sequence goes on after a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum After {
    /// More is to come.
    GoesOn,
    /// The answer is complete.
    Ended(Ending),
}

impl Sequence {
    pub(super) fn new(submission: Submission) -> Self {
        let Submission {
            mut job,
            outputs,
            cancelled,
            arrived,
            place,
        } = submission;
        let text = TextStream::new(std::mem::take(&mut job.stops));
        Self {
            tokens: job.prompt.clone(),
            counts: Counts::new(&job.sampling, &job.prompt),
            job,
            computed: 0,
            table: None,
            cached_tokens: None,
            text,
            outputs,
            cancelled,
            place: Some(place),
            arrived,
            last_token: None,
            first_token_s: None,
        }
    }

    pub(super) fn progress(&self) -> Progress {
        Progress {
            known: self.tokens.len(),
            computed: self.computed,
        }
    }

    pub(super) fn output_tokens(&self) -> usize {
        self.tokens.len() - self.job.prompt.len()
    }

    pub(super) fn output_left(&self) -> usize {
        self.job.output_max - self.output_tokens()
    }

    /// The client dropped its ticket.
    pub(super) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire) || self.outputs.is_closed()
    }

    /// Notes that it joined the batch with a table whose first `cached` tokens are computed.
    pub(super) fn join(&mut self, table: BlockTable, metrics: &Metrics) {
        self.computed = table.published_tokens();
        self.table = Some(table);
        self.place = None;
        if self.cached_tokens.is_none() {
            let cached_tokens = self.computed;
            self.cached_tokens = Some(cached_tokens);
            metrics.prompt_tokens.inc_by(self.job.prompt.len() as u64);
            metrics.prefix_queries.inc_by(self.job.prompt.len() as u64);
            metrics.prefix_hits.inc_by(cached_tokens as u64);
            self.send(Output::Joined { cached_tokens });
        }
    }

    /// Adds the next token and tells the client.
    pub(super) fn push(&mut self, token: u32, bytes: &[u8], metrics: &Metrics) -> After {
        self.tokens.push(token);
        self.counts.push(token);
        self.clock_token(metrics);
        let output_tokens = self.output_tokens();
        let stop_token = self.job.stop_tokens.contains(&token);
        let visible = if stop_token {
            Default::default()
        } else {
            self.text.push(bytes)
        };
        let ending = if stop_token || visible.stopped {
            Some(Ending::Stop)
        } else {
            (output_tokens >= self.job.output_max).then_some(Ending::Length)
        };
        let mut text = visible.text;
        let Some(ending) = ending else {
            self.send(Output::Text {
                text,
                tokens: Vec::new(),
                output_tokens,
            });
            return After::GoesOn;
        };
        if !visible.stopped {
            text += &self.text.finish();
        }
        self.send(Output::Done {
            text,
            tokens: Vec::new(),
            ending,
            usage: self.usage(),
            held: None,
        });
        After::Ended(ending)
    }

    /// Tells the client that the node failed.
    pub(super) fn fail(&mut self, error: ApiError) {
        self.send(Output::Failed(error));
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
            first_token_s = self.first_token_s,
            total_s = self.arrived.elapsed().as_secs_f64(),
            "request ended"
        );
    }

    fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.job.prompt.len(),
            cached_tokens: self.cached_tokens.unwrap_or(0),
            output_tokens: self.output_tokens(),
        }
    }

    fn clock_token(&mut self, metrics: &Metrics) {
        metrics.generation_tokens.inc();
        let now = Instant::now();
        match self.last_token {
            None => {
                let seconds = (now - self.arrived).as_secs_f64();
                self.first_token_s = Some(seconds);
                metrics.time_to_first_token.observe(seconds);
            }
            Some(before) => metrics
                .inter_token_latency
                .observe((now - before).as_secs_f64()),
        }
        self.last_token = Some(now);
    }

    fn send(&self, output: Output) {
        // Full cannot be: the channel has room for the whole answer. Closed is a cancellation,
        // and is seen as one at the start of the next step.
        let _ = self.outputs.try_send(output);
    }
}
