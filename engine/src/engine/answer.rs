//! What has the client been told?
//!
//! What a step produces for one request is gathered here and sent as one [`Output`]: several tokens
//! may come at once, forced by a grammar or drafted and found right.

use std::time::Instant;

use tokio::sync::mpsc;

use super::job::{Job, Output, Produced, Usage};
use super::{Show, TokenBytes};
use crate::metrics::{Ending, Metrics};
use crate::output::TextStream;
use crate::sample::TokenLogprobs;

/// The way of one answer to its client.
pub(super) struct Answer {
    outputs: mpsc::Sender<Output>,
    text: TextStream,
    /// Visible, and not sent yet.
    news: String,
    /// Produced, and not told yet.
    produced: Vec<Produced>,
    /// Tokens that came since the last output.
    fresh: u32,
    stopped: Option<String>,
    arrived: Instant,
    last_output: Option<Instant>,
    pub(super) first_token_s: Option<f64>,
}

/// What an answer needs to know about the node.
pub(super) struct Voice<'a> {
    pub(super) token_bytes: &'a TokenBytes,
    pub(super) metrics: &'a Metrics,
}

impl Answer {
    pub(super) fn new(stops: Vec<String>, outputs: mpsc::Sender<Output>, arrived: Instant) -> Self {
        Self {
            outputs,
            text: TextStream::new(stops),
            news: String::new(),
            produced: Vec::new(),
            fresh: 0,
            stopped: None,
            arrived,
            last_output: None,
            first_token_s: None,
        }
    }

    /// Whether the client has let go.
    pub(super) fn is_closed(&self) -> bool {
        self.outputs.is_closed()
    }

    pub(super) fn seconds(&self) -> f64 {
        self.arrived.elapsed().as_secs_f64()
    }

    /// Takes the next token, the `number`th of the answer. Some if the answer ends with it.
    pub(super) fn push(
        &mut self,
        (token, number): (u32, usize),
        logprobs: Option<TokenLogprobs>,
        job: &Job,
        voice: &Voice<'_>,
    ) -> Option<Ending> {
        voice.metrics.generation_tokens.inc();
        self.fresh += 1;
        if job.token_ids || job.logprobs.is_some() {
            let (logprob, top) = logprobs.map_or((0.0, Vec::new()), |l| (l.chosen, l.top));
            self.produced.push(Produced {
                id: token,
                logprob,
                top,
            });
        }
        // Until then neither a token nor a text may end the answer.
        let may_stop = number > job.output_min;
        if may_stop && job.stop_tokens.contains(&token) {
            return Some(Ending::Stop);
        }
        let show = if job.show_markers {
            Show::Markers
        } else {
            Show::Text
        };
        let bytes = (voice.token_bytes)(token, show);
        if !may_stop {
            self.news += &self.text.push_unstoppable(&bytes);
            return (number >= job.output_max).then_some(Ending::Length);
        }
        let visible = self.text.push(&bytes);
        self.news += &visible.text;
        self.stopped = visible.stopped;
        if self.stopped.is_some() {
            return Some(Ending::Stop);
        }
        (number >= job.output_max).then_some(Ending::Length)
    }

    /// The tokens that were produced and not told yet.
    pub(super) fn untold(&self) -> &[Produced] {
        &self.produced
    }

    /// Tells what is new, if anything is.
    pub(super) fn flush(&mut self, output_tokens: usize, metrics: &Metrics) {
        if self.fresh == 0 {
            return;
        }
        self.clock(metrics);
        let text = std::mem::take(&mut self.news);
        let tokens = std::mem::take(&mut self.produced);
        self.send(Output::Text {
            text,
            tokens,
            output_tokens,
        });
    }

    /// Tells the end.
    pub(super) fn done(
        &mut self,
        ending: Ending,
        usage: Usage,
        held: Option<super::job::Held>,
        metrics: &Metrics,
    ) {
        if self.fresh > 0 {
            self.clock(metrics);
        }
        let mut text = std::mem::take(&mut self.news);
        if self.stopped.is_none() {
            text += &self.text.finish();
        }
        let tokens = std::mem::take(&mut self.produced);
        let stop = self.stopped.take();
        self.send(Output::Done {
            text,
            tokens,
            ending,
            stop,
            usage,
            held,
        });
    }

    /// Tells anything else.
    pub(super) fn send(&self, output: Output) {
        // Full cannot be: the channel has room for the whole answer. Closed is a cancellation,
        // and is seen as one at the start of the next step.
        let _ = self.outputs.try_send(output);
    }

    /// Tokens that come together share the time since the last ones.
    fn clock(&mut self, metrics: &Metrics) {
        let now = Instant::now();
        let mut rest = std::mem::take(&mut self.fresh);
        let since = match self.last_output {
            None => {
                let seconds = (now - self.arrived).as_secs_f64();
                self.first_token_s = Some(seconds);
                metrics.time_to_first_token.observe(seconds);
                rest -= 1;
                0.0
            }
            Some(before) => (now - before).as_secs_f64(),
        };
        for _ in 0..rest {
            metrics.inter_token_latency.observe(since / f64::from(rest));
        }
        self.last_output = Some(now);
    }
}
