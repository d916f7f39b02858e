//! How does one step go, part by part?
//!
//! The parts are in the order in which they run; [`Engine::step`] is the table of contents.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use super::Engine;
use super::job::{Remote, Work};
use super::outgoing::COPIED_MAX;
use super::sequence::Sequence;
use super::within::Within;
use crate::error::ApiError;
use crate::metrics::Ending;
use crate::model::{Pass, ReadLayers, SeqInput};
use crate::scheduler::Chunk;

impl Engine {
    /// Runs one step.
    pub(super) fn step(&mut self) {
        let started = Instant::now();
        self.preempted = false;
        let up = started.saturating_duration_since(self.started);
        self.pool
            .tell_time(u64::try_from(up.as_millis()).unwrap_or(u64::MAX));
        self.drop_gone(started);
        self.expire_pins(started);
        self.poll_disk();
        self.take_receivers();
        self.take_inbound(started);
        let plan = self.schedule();
        if !plan.chunks.is_empty() {
            self.note_changes();
            let outcome = self.forward(&plan.chunks);
            let whole = outcome.is_ok();
            self.settle(&plan.chunks, outcome);
            let seconds = started.elapsed().as_secs_f64();
            self.parts.metrics.step_seconds.observe(seconds);
            if whole {
                self.pace.observe(&plan.work, seconds * 1e3);
                self.observe_tiers(&plan.work, seconds * 1e3);
            }
        }
        self.pump_outgoing();
        self.publish();
        #[cfg(test)]
        self.check_integrity();
    }

    /// Ends what nobody waits for any more, and what is past its deadline.
    fn drop_gone(&mut self, now: Instant) {
        let is_gone = |s: &Sequence| s.is_cancelled() || s.is_late(now);
        let mut gone: Vec<_> = self.running.extract_if(.., |s| is_gone(s)).collect();
        for sequence in self.waiting.extract_if(.., |s| is_gone(s)) {
            self.overtaken.gone(sequence.arrival);
            gone.push(sequence);
        }
        for sequence in gone {
            if sequence.is_cancelled() {
                self.end(sequence, Ending::Cancelled);
            } else {
                sequence.fail(ApiError::timed_out());
                self.end(sequence, Ending::TimedOut);
            }
        }
    }

    /// Gives back what tickets held for too long.
    pub(super) fn expire_pins(&mut self, now: Instant) {
        let expired = self.pins.expire(&mut self.pool, now);
        self.parts.metrics.tickets.expired.inc_by(expired as u64);
        self.outgoing.expire(&self.pins, now);
    }

    fn forward(&mut self, chunks: &[Chunk]) -> Result<(), ApiError> {
        let Self {
            parts,
            running,
            output,
            outgoing,
            pins,
            pool,
            store,
            receivers,
            ..
        } = self;
        let batch: Vec<_> = chunks.iter().map(|chunk| input(running, chunk)).collect();
        let rows: usize = batch.iter().map(|input| input.logits_last).sum();
        let tokens: usize = chunks.iter().map(|chunk| chunk.tokens).sum();
        let embeds = |chunk: &Chunk| matches!(running[chunk.index].job.work, Work::Embed(_));
        let normed = [parts.layers + 1];
        let capture = if chunks.iter().any(embeds) {
            &normed[..]
        } else {
            &[]
        };
        let pass = Pass {
            batch: &batch,
            capture,
        };
        let (device, metrics) = (&mut parts.device, &parts.metrics);
        outgoing.begin_pass();
        let mut within = Within {
            outgoing,
            pins,
            pool,
            store: store.as_ref(),
            receivers,
            running,
            chunks,
            metrics,
            layers: (parts.layers, device.block_bytes() / parts.layers),
            left: COPIED_MAX,
        };
        let mut watch = |computed: usize, read: &ReadLayers<'_>| within.layer(computed, read);
        let run = || device.run(&pass, output, &mut watch);
        match catch_unwind(AssertUnwindSafe(run)) {
            Err(panic) => Err(ApiError::internal(format!(
                "forward panicked: {}",
                said(&*panic)
            ))),
            Ok(Err(error)) => Err(ApiError::internal(format!("forward failed: {error}"))),
            Ok(Ok(())) if output.logits.len() != rows * parts.vocab => {
                let found = output.logits.len();
                Err(ApiError::internal(format!(
                    "forward gave {found} logits for {rows} rows"
                )))
            }
            Ok(Ok(())) => {
                metrics.computed_tokens.inc_by(tokens as u64);
                Ok(())
            }
        }
    }

    /// Takes leave of a sequence that is on no list any more.
    pub(super) fn end(&mut self, mut sequence: Sequence, ending: Ending) {
        if let Some(table) = sequence.table.take() {
            table.release(&mut self.pool);
        }
        self.let_go(&mut sequence);
        if let Remote::HandOver(hand_over) = &sequence.job.remote {
            self.outgoing.request_ended(hand_over.id, sequence.arrival);
        }
        self.parts.metrics.finished(ending);
        sequence.log(ending);
    }

    /// Tells others what changed.
    pub(super) fn publish(&mut self) {
        self.note_changes();
        let changes = std::mem::take(&mut self.changes);
        if let Some(log) = &self.parts.events {
            log.append(&changes);
        }
        self.count_tiers();
        let metrics = &self.parts.metrics;
        metrics.running.set(self.running.len() as i64);
        metrics.waiting.set(self.waiting.len() as i64);
        metrics.kv_blocks_held.set(self.pool.held() as i64);
        metrics.tickets.blocks.set(self.pins.blocks() as i64);
        metrics.tickets.open.set(self.pins.len() as i64);
        metrics.transfers.open.set(self.outgoing.len() as i64);
        metrics
            .kv_blocks_published
            .set(self.pool.published() as i64);
        metrics
            .kv_usage
            .set(self.pool.held() as f64 / self.pool.capacity().max(1) as f64);
    }

    /// Panics if sequences, tickets and pool contradict each other. For tests, after every step.
    #[cfg(test)]
    pub(super) fn check_integrity(&self) {
        self.pool.check_integrity();
        if let Some(store) = &self.store {
            store.check_integrity();
        }
        let tables = self.running.iter().filter_map(|s| s.table.as_ref());
        let mut held: Vec<_> = tables.flat_map(|table| table.blocks().to_vec()).collect();
        held.extend(self.pins.all_blocks());
        held.extend(self.waiting.iter().flat_map(|s| s.coming.blocks()));
        held.sort();
        held.dedup();
        assert_eq!(held.len(), self.pool.held(), "blocks held by nobody");
        assert!(self.waiting.iter().all(|s| s.table.is_none()));
        assert!(self.running.iter().all(|s| s.table.is_some()));
        for sequence in &self.running {
            assert!(sequence.computed < sequence.tokens.len(), "nothing is due");
        }
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
        logits_last: if chunk.samples { sequence.rows() } else { 0 },
    }
}

/// What a panic said.
fn said(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}
