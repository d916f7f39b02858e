//! How does one step go, part by part?
//!
//! The parts are in the order in which they run; [`Engine::step`] is the table of contents.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use cache_index::block::{creditable_blocks, hash_chain};

use super::Engine;
use super::sequence::{After, Sequence};
use crate::error::ApiError;
use crate::kv::table::{BlockTable, PoolFull};
use crate::metrics::Ending;
use crate::model::SeqInput;
use crate::sample::At;
use crate::scheduler::{Batch, Chunk, Needs, may_join, plan};

impl Engine {
    /// Runs one step.
    pub(super) fn step(&mut self) {
        let started = Instant::now();
        self.drop_cancelled();
        self.admit();
        let chunks = self.find_blocks();
        if !chunks.is_empty() {
            let outcome = self.forward(&chunks);
            self.settle(&chunks, outcome);
            self.parts
                .metrics
                .step_seconds
                .observe(started.elapsed().as_secs_f64());
        }
        self.publish();
    }

    fn drop_cancelled(&mut self) {
        let mut gone: Vec<_> = self.running.extract_if(.., |s| s.is_cancelled()).collect();
        if self.waiting.iter().any(Sequence::is_cancelled) {
            let waiting = std::mem::take(&mut self.waiting).into_iter();
            let (left, stay): (VecDeque<_>, _) = waiting.partition(Sequence::is_cancelled);
            gone.extend(left);
            self.waiting = stay;
        }
        gone.into_iter()
            .for_each(|sequence| self.end(sequence, Ending::Cancelled));
    }

    /// Lets waiting sequences join, first come first served: a later, smaller one never overtakes.
    fn admit(&mut self) {
        while let Some(sequence) = self.waiting.front() {
            let scope = &sequence.job.scope;
            let resumed = sequence.output_tokens() > 0;
            let chain = if resumed {
                let creditable = creditable_blocks(sequence.tokens.len());
                let mut chain = hash_chain(&scope.namespace, &sequence.tokens);
                chain.truncate(creditable);
                chain
            } else {
                sequence.job.chain.clone()
            };
            let overlap = self.pool.overlap(&chain);
            let needs = Needs {
                known: sequence.tokens.len(),
                output_left: sequence.output_left(),
                held: overlap.blocks,
                idle: overlap.idle,
            };
            if !may_join(&needs, &self.batch(), self.parts.step_tokens) {
                return;
            }
            let Some(mut sequence) = self.waiting.pop_front() else {
                return;
            };
            let table = BlockTable::claim(&mut self.pool, sequence.job.scope.clone(), &chain);
            sequence.join(table, &self.parts.metrics);
            self.running.push(sequence);
        }
    }

    fn batch(&self) -> Batch {
        let missing = |sequence: &Sequence| {
            let needs = Needs {
                known: sequence.tokens.len(),
                output_left: sequence.output_left(),
                held: 0,
                idle: 0,
            };
            let has = sequence
                .table
                .as_ref()
                .map_or(0, |table| table.blocks().len());
            needs.promised().saturating_sub(has)
        };
        Batch {
            running: self.running.len(),
            due: self
                .running
                .iter()
                .map(|sequence| sequence.progress().due())
                .sum(),
            outstanding: self.running.iter().map(missing).sum(),
            available: self.pool.available(),
        }
    }

    /// Plans the step and finds a block for every token in it. When the pool runs dry, the
    /// youngest sequence gives its blocks back until the older ones have theirs.
    fn find_blocks(&mut self) -> Vec<Chunk> {
        let progress: Vec<_> = self.running.iter().map(Sequence::progress).collect();
        let mut chunks = plan(&progress, self.parts.step_tokens);
        let mut next = 0;
        while let Some(chunk) = chunks.get(next).copied() {
            let sequence = &mut self.running[chunk.index];
            let table = sequence
                .table
                .as_mut()
                .expect("a running sequence has a table");
            match table.grow(&mut self.pool, sequence.computed + chunk.tokens) {
                Ok(()) => next += 1,
                Err(PoolFull) => {
                    self.preempt();
                    chunks.retain(|chunk| chunk.index < self.running.len());
                }
            }
        }
        chunks
    }

    fn preempt(&mut self) {
        // The oldest sequence fits alone, so it never finds the pool full while it runs alone.
        assert!(
            self.running.len() > 1,
            "one sequence must fit the pool of {}",
            self.pool.capacity()
        );
        let mut victim = self.running.pop().expect("more than one runs");
        if let Some(table) = victim.table.take() {
            table.release(&mut self.pool);
        }
        victim.computed = 0;
        self.parts.metrics.preemptions.inc();
        self.waiting.push_front(victim);
    }

    fn forward(&mut self, chunks: &[Chunk]) -> Result<(), ApiError> {
        let Self {
            parts,
            running,
            logits,
            ..
        } = self;
        let inputs: Vec<_> = chunks.iter().map(|chunk| input(running, chunk)).collect();
        let rows = chunks.iter().filter(|chunk| chunk.samples).count();
        let tokens: usize = chunks.iter().map(|chunk| chunk.tokens).sum();
        match catch_unwind(AssertUnwindSafe(|| (parts.forward)(&inputs, logits))) {
            Err(panic) => Err(ApiError::internal(format!(
                "forward panicked: {}",
                said(&*panic)
            ))),
            Ok(Err(error)) => Err(ApiError::internal(format!("forward failed: {error}"))),
            Ok(Ok(())) if logits.len() != rows * parts.vocab => {
                let found = logits.len();
                Err(ApiError::internal(format!(
                    "forward gave {found} logits for {rows} rows"
                )))
            }
            Ok(Ok(())) => {
                parts.metrics.computed_tokens.inc_by(tokens as u64);
                Ok(())
            }
        }
    }

    fn settle(&mut self, chunks: &[Chunk], outcome: Result<(), ApiError>) {
        let logits = std::mem::take(&mut self.logits);
        let mut rows = logits.chunks_exact(self.parts.vocab);
        let mut ended = Vec::new();
        for chunk in chunks {
            let after = match &outcome {
                Ok(()) => self.settle_chunk(chunk, &mut rows),
                Err(error) => Err(error.clone()),
            };
            match after {
                Ok(After::GoesOn) => {}
                Ok(After::Ended(ending)) => ended.push((chunk.index, ending)),
                Err(error) => {
                    let sequence = &mut self.running[chunk.index];
                    tracing::error!(
                        request_id = %sequence.job.request_id,
                        detail = error.detail.as_deref().unwrap_or_default(),
                        "a step failed"
                    );
                    sequence.fail(error);
                    ended.push((chunk.index, Ending::Failed));
                }
            }
        }
        self.logits = logits;
        for (index, ending) in ended.into_iter().rev() {
            let sequence = self.running.remove(index);
            self.end(sequence, ending);
        }
    }

    /// Takes over what a chunk computed: publishes its full blocks, samples, tells the client.
    fn settle_chunk<'a>(
        &mut self,
        chunk: &Chunk,
        rows: &mut impl Iterator<Item = &'a [f32]>,
    ) -> Result<After, ApiError> {
        let sequence = &mut self.running[chunk.index];
        let upto = sequence.computed + chunk.tokens;
        let mut sampled = None;
        if chunk.samples {
            // Sampled before anything is published: what a broken pass computed is not kept.
            let row = rows
                .next()
                .expect("rows were counted after the forward pass");
            let position = sequence.tokens.len() as u64;
            let at = At::plain(position, &sequence.counts);
            let picked = self.sampler.pick(row, &sequence.job.sampling, &at);
            let picked = picked.map_err(|error| ApiError::internal(error.to_string()))?;
            sampled = Some(picked.token);
        }
        sequence.computed = upto;
        let table = sequence
            .table
            .as_mut()
            .expect("a running sequence has a table");
        table.publish(&mut self.pool, &sequence.tokens[..upto]);
        Ok(match sampled {
            Some(token) => {
                let bytes = (self.parts.token_bytes)(token);
                sequence.push(token, &bytes, &self.parts.metrics)
            }
            None => After::GoesOn,
        })
    }

    fn end(&mut self, mut sequence: Sequence, ending: Ending) {
        if let Some(table) = sequence.table.take() {
            table.release(&mut self.pool);
        }
        self.parts.metrics.finished(ending);
        sequence.log(ending);
    }

    fn publish(&mut self) {
        let changes = self.pool.take_changes();
        if let Some(log) = &self.parts.events {
            log.append(&changes);
        }
        let metrics = &self.parts.metrics;
        metrics.running.set(self.running.len() as i64);
        metrics.waiting.set(self.waiting.len() as i64);
        metrics.kv_blocks_held.set(self.pool.held() as i64);
        metrics
            .kv_blocks_published
            .set(self.pool.published() as i64);
        metrics
            .kv_usage
            .set(self.pool.held() as f64 / self.pool.capacity().max(1) as f64);
    }
}

fn input<'a>(running: &'a [Sequence], chunk: &Chunk) -> SeqInput<'a> {
    let sequence = &running[chunk.index];
    let table = sequence
        .table
        .as_ref()
        .expect("a running sequence has a table");
    SeqInput {
        tokens: &sequence.tokens[sequence.computed..sequence.computed + chunk.tokens],
        start: sequence.computed,
        blocks: table.blocks(),
        logits_last: usize::from(chunk.samples),
    }
}

/// What a panic said.
fn said(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}
