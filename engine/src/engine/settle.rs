//! What became of a step's chunks?
//!
//! For each: take over what was computed → sample → append what follows → publish full blocks → tell
//! the client. Sampling comes before publishing: what a broken pass computed is not kept, and what a
//! draft got wrong is rolled back before anybody could find it.

use super::Engine;
use super::answer::Voice;
use super::follow::broken;
use super::job::{Output, Pooling, Remote, Work};
use super::sequence::Sequence;
use crate::error::ApiError;
use crate::kv::transfer::{End as HandedOver, First};
use crate::metrics::Ending;
use crate::model::PassOutput;
use crate::sample::{At, Sampler, TokenLogprobs};
use crate::scheduler::Chunk;

/// What a forward pass gave, handed out chunk by chunk in batch order.
struct Rows<'a> {
    logits: std::slice::ChunksExact<'a, f32>,
    hidden: std::slice::ChunksExact<'a, f32>,
}

/// How a sequence ends.
enum End {
    /// In order.
    With(Ending),
    /// A vector was all that it was for.
    Embedded(Vec<f32>),
    /// By an error; what it computed itself may be wrong.
    Broken(ApiError),
    /// By an error of the whole pass, which wrote nothing that was taken over.
    Failed(ApiError),
}

impl Engine {
    pub(super) fn settle(&mut self, chunks: &[Chunk], outcome: Result<(), ApiError>) {
        let output = std::mem::take(&mut self.output);
        let tokens = chunks.iter().map(|chunk| chunk.tokens).sum();
        let mut rows = Rows::new(&output, self.parts.vocab, tokens);
        let mut ended = Vec::new();
        for chunk in chunks {
            let end = match &outcome {
                Ok(()) => self
                    .settle_chunk(chunk, &mut rows)
                    .unwrap_or_else(|error| Some(End::Broken(error))),
                Err(error) => Some(End::Failed(error.clone())),
            };
            match end {
                None => self.running[chunk.index].flush(&self.parts.metrics),
                Some(end) => ended.push((chunk.index, end)),
            }
        }
        self.output = output;
        ended.sort_by_key(|(index, _)| *index);
        for (index, end) in ended.into_iter().rev() {
            let sequence = self.running.remove(index);
            self.finish(sequence, end);
        }
    }

    fn settle_chunk(
        &mut self,
        chunk: &Chunk,
        rows: &mut Rows<'_>,
    ) -> Result<Option<End>, ApiError> {
        let sequence = &mut self.running[chunk.index];
        let voice = Voice {
            token_bytes: &self.parts.token_bytes,
            metrics: &self.parts.metrics,
        };
        let upto = sequence.computed + chunk.tokens;
        // Taken whether needed or not, so that rows and chunks stay in step.
        let hidden: Vec<_> = rows.hidden.by_ref().take(chunk.tokens).collect();
        let mut end = None;
        match sequence.job.work {
            Work::Generate if chunk.samples => {
                let wanted = sequence.rows();
                let logits: Vec<_> = rows.logits.by_ref().take(wanted).collect();
                let (computed, ending) = sample(&mut self.sampler, sequence, &logits, &voice)?;
                sequence.computed = computed;
                end = ending.map(End::With);
            }
            Work::Generate => sequence.computed = upto,
            Work::PrefillOnly { .. } => {
                sequence.computed = upto;
                end = chunk.samples.then_some(End::With(Ending::Length));
            }
            Work::Embed(pooling) => {
                pool_hidden(sequence, pooling, &hidden);
                sequence.computed = upto;
                if chunk.samples {
                    end = Some(End::Embedded(unit(&sequence.pooled)?));
                }
            }
        }
        let table = sequence
            .table
            .as_mut()
            .expect("a running sequence has a table");
        table.truncate(&mut self.pool, sequence.computed);
        table.publish(&mut self.pool, &sequence.tokens[..sequence.computed]);
        Ok(end)
    }

    fn finish(&mut self, mut sequence: Sequence, end: End) {
        match end {
            End::With(ending) => {
                let held = self.pin(&mut sequence);
                if let (Remote::HandOver(hand_over), Some(held)) = (&sequence.job.remote, held) {
                    self.outgoing
                        .held(hand_over.id, held.ticket, sequence.hands_over());
                }
                sequence.done(ending, held, &self.parts.metrics);
                self.end(sequence, ending);
            }
            End::Embedded(vector) => {
                sequence
                    .answer
                    .send(Output::Embedding(vector, sequence.usage()));
                self.end(sequence, Ending::Stop);
            }
            End::Broken(error) => {
                if let Some(table) = sequence.table.take() {
                    table.withdraw(&mut self.pool, sequence.found / super::BLOCK_TOKENS);
                }
                self.fail(sequence, error);
            }
            End::Failed(error) => self.fail(sequence, error),
        }
    }

    pub(super) fn fail(&mut self, sequence: Sequence, error: ApiError) {
        tracing::error!(
            request_id = %sequence.job.request_id,
            detail = error.detail.as_deref().unwrap_or_default(),
            "a request failed"
        );
        sequence.fail(error);
        self.end(sequence, Ending::Failed);
    }

    fn pin(&mut self, sequence: &mut Sequence) -> Option<super::job::Held> {
        let hold = sequence.job.hold()?;
        let table = sequence.table.take()?;
        let now = std::time::Instant::now();
        Some(self.pins.pin(table, hold, &mut self.pool, now))
    }
}

impl Sequence {
    /// What the node that decodes goes on from.
    fn hands_over(&self) -> HandedOver {
        let token = self.tokens.get(self.job.prompt.len());
        let told = self
            .answer
            .untold()
            .first()
            .filter(|_| self.job.logprobs.is_some());
        let logprobs = told.map(|told| TokenLogprobs {
            chosen: told.logprob,
            top: told.top.clone(),
        });
        HandedOver {
            first: token.map(|token| First {
                token: *token,
                logprobs,
            }),
            cached_tokens: self.usage().cached_tokens,
        }
    }
}

impl<'a> Rows<'a> {
    /// `tokens` of them were in the batch.
    fn new(output: &'a PassOutput, vocab: usize, tokens: usize) -> Self {
        let hidden = output.hidden.first().map_or(&[][..], Vec::as_slice);
        let width = hidden.len().checked_div(tokens).unwrap_or(0).max(1);
        Self {
            logits: output.logits.chunks_exact(vocab),
            hidden: hidden.chunks_exact(width),
        }
    }
}

/// Samples from rows of logits, the first of them after the last verified token and one more after
/// each draft, for as long as drafts and sampling agree. Returns how many tokens are computed and
/// right, and whether the answer ended.
fn sample(
    sampler: &mut Sampler,
    sequence: &mut Sequence,
    rows: &[&[f32]],
    voice: &Voice<'_>,
) -> Result<(usize, Option<Ending>), ApiError> {
    let drafts = sequence.take_drafts();
    let known = sequence.tokens.len();
    loop {
        let new = &sequence.tokens[known..];
        let agreed = new.iter().zip(&drafts).take_while(|(a, b)| a == b).count();
        if agreed < new.len() || agreed >= rows.len() {
            return Ok((known + agreed, None));
        }
        let picked = pick(sampler, sequence, rows[agreed])?;
        if let Some(ending) = sequence.push_picked(picked, voice)? {
            return Ok((known + agreed, Some(ending)));
        }
    }
}

fn pick(
    sampler: &mut Sampler,
    sequence: &mut Sequence,
    row: &[f32],
) -> Result<crate::sample::Picked, ApiError> {
    let position = sequence.tokens.len() as u64;
    let short = sequence.output_tokens() < sequence.job.output_min;
    let job = &mut sequence.job;
    let mask = match &mut job.constraint {
        None => None,
        Some(constraint) => match constraint.mask() {
            Ok(mask) => Some(mask.words()),
            Err(error) => return Err(broken(error)),
        },
    };
    let at = At {
        position,
        counts: &sequence.counts,
        mask,
        banned: if short { &job.stop_tokens } else { &[] },
        logprobs: job.logprobs,
    };
    let picked = sampler.pick(row, &job.sampling, &at);
    picked.map_err(|error| ApiError::internal(error.to_string()))
}

/// Takes the hidden states of a chunk's tokens, in order.
fn pool_hidden(sequence: &mut Sequence, pooling: Pooling, rows: &[&[f32]]) {
    for row in rows {
        match pooling {
            Pooling::Last => {
                sequence.pooled.clear();
                sequence.pooled.extend_from_slice(row);
            }
            Pooling::Mean => {
                sequence.pooled.resize(row.len(), 0.0);
                for (sum, value) in sequence.pooled.iter_mut().zip(*row) {
                    *sum += value;
                }
            }
        }
    }
}

/// The vector at length 1; a mean's divisor falls out of that.
fn unit(vector: &[f32]) -> Result<Vec<f32>, ApiError> {
    let squares: f64 = vector.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
    if !squares.is_finite() || squares == 0.0 {
        return Err(ApiError::internal("hidden states that are not numbers"));
    }
    let scale = 1.0 / squares.sqrt();
    Ok(vector
        .iter()
        .map(|v| (f64::from(*v) * scale) as f32)
        .collect())
}
