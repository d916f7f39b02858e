//! Who runs in this step, and where do their tokens go?
//!
//! Decodes first, then prefill in the order of `scheduler::turns`, until the step's budget is used
//! up. A waiting sequence joins at the moment when its first tokens are placed, so that it looks the
//! prompt up in the cache as late as possible; one whose next block is being computed by another
//! waits for that block and lends the other its turn.
//!
//! A block is found for every token placed. When the pool runs dry, a running sequence gives its
//! blocks back and loses its place in the step.

use std::collections::HashSet;

use super::answer::Voice;
use super::incoming::Coming;
use super::sequence::Sequence;
use super::{Engine, tiers};
use crate::error::{ApiError, Kind};
use crate::kv::table::{BlockTable, PoolFull};
use crate::metrics::Ending;
use crate::scheduler::join::{Batch, may_join};
use crate::scheduler::pace::{Budget, StepWork};
use crate::scheduler::queue::Queue;
use crate::scheduler::turns::{Contender, Share};
use crate::scheduler::{Chunk, RUNNING_MAX, prefill_chunk, victim};

/// What a step computes.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) chunks: Vec<Chunk>,
    pub(super) work: StepWork,
    /// What prefill weighed beside the answers.
    pub(super) weight: f64,
}

/// A contender's place in the engine.
#[derive(Clone, Copy, Debug)]
enum Who {
    Running(usize),
    Waiting(usize),
}

/// Who cannot join in this step.
#[derive(Debug, Default)]
struct Stuck {
    /// Nobody of these salts: the one whose turn it was does not fit.
    shares: HashSet<Share>,
    /// These wait for blocks that are being computed.
    sequences: HashSet<u64>,
    /// The pool ran dry: whoever joined now would take what others lack.
    everybody: bool,
}

/// What came of a sequence's wish to join.
enum Joined {
    /// It runs, at this index.
    At(usize),
    /// It waits for what the sequence at this index computes.
    BlockOf(usize),
    /// It waits for the disk, or for another node.
    Reading,
    /// It does not fit.
    No,
    /// It is gone: refused, or complete without a forward pass.
    Ended,
}

impl Engine {
    /// Plans a step.
    pub(super) fn schedule(&mut self) -> Plan {
        let mut plan = Plan::default();
        self.fetched = 0;
        self.place_decodes(&mut plan);
        let decode_tokens = plan.chunks.iter().map(|chunk| chunk.tokens).sum();
        let mut stuck = Stuck {
            everybody: self.preempted,
            ..Stuck::default()
        };
        let all: Vec<_> = self.contenders(&plan, &Stuck::default());
        let contenders: Vec<_> = all.iter().map(|(_, contender)| *contender).collect();
        plan.weight = self.weight(&plan, &all);
        let mut budget = self.pace.budget(decode_tokens, plan.weight);
        self.turns.begin(&contenders);
        while !budget.is_spent() {
            let (who, contenders): (Vec<_>, Vec<_>) =
                self.contenders(&plan, &stuck).into_iter().unzip();
            let Some(pick) = self.pick(&contenders) else {
                break;
            };
            if !self.give_turn(who[pick], &mut plan, &mut budget, &mut stuck) {
                break;
            }
        }
        plan.work = self.work(&plan.chunks);
        plan
    }

    /// What prefill weighs beside this step's answers. Whose prompt cannot join anyway, because the
    /// pool ran dry or enough run, does not count.
    fn weight(&self, plan: &Plan, contenders: &[(Who, Contender)]) -> f64 {
        let room = !self.preempted && self.running.len() < RUNNING_MAX;
        let waits = |(who, contender): &&(Who, Contender)| {
            (room || matches!(who, Who::Running(_))) && !contender.answering
        };
        let mut prompts = contenders.iter().filter(waits).peekable();
        // Most steps are decodes alone, and those allocate nothing.
        if prompts.peek().is_none() {
            return 1.0;
        }
        let mut queue = Queue::default();
        prompts.for_each(|(_, contender)| queue.add_prompt(contender.share));
        for chunk in &plan.chunks {
            queue.add_answer(self.running[chunk.index].standing().share);
        }
        queue.weight()
    }

    fn work(&self, chunks: &[Chunk]) -> StepWork {
        let mut step = StepWork::default();
        for chunk in chunks {
            let progress = self.running[chunk.index].progress();
            if progress.decodes() {
                step.decode_tokens += chunk.tokens;
            } else {
                step.add_prefill(chunk.tokens, progress.computed);
            }
        }
        step
    }

    /// Places every decode, whatever the budget: they are bounded by `RUNNING_MAX`.
    fn place_decodes(&mut self, plan: &mut Plan) {
        self.draft();
        let mut index = 0;
        while index < self.running.len() {
            let progress = self.running[index].progress();
            if !progress.decodes() {
                index += 1;
                continue;
            }
            match self.grow(index, progress.known) {
                Ok(()) => {
                    plan.chunks.push(Chunk {
                        index,
                        tokens: progress.due(),
                        samples: true,
                    });
                    index += 1;
                }
                Err(PoolFull) => {
                    let gone = self.make_room(&mut plan.chunks);
                    index -= usize::from(gone < index);
                }
            }
        }
    }

    /// Lets the drafter guess what decodes will say, if there is one.
    fn draft(&mut self) {
        let Some(drafter) = &mut self.parts.drafter else {
            return;
        };
        for sequence in &mut self.running {
            let progress = sequence.progress();
            if progress.decodes() && progress.due() == 1 && sequence.rows() == 1 {
                let mut drafts = drafter(&sequence.tokens);
                drafts.truncate(crate::scheduler::DECODE_TOKENS_MAX - 1);
                sequence.add_drafts(&drafts);
            }
        }
    }

    /// Everybody who could use prefill tokens.
    fn contenders(&self, plan: &Plan, stuck: &Stuck) -> Vec<(Who, Contender)> {
        let running = self.running.iter().enumerate().filter_map(|(index, s)| {
            let placed = plan.chunks.iter().find(|chunk| chunk.index == index);
            let left = s.progress().due() - placed.map_or(0, |chunk| chunk.tokens);
            (left > 0).then(|| (Who::Running(index), s.contender(left)))
        });
        let waiting = self.waiting.iter().enumerate().filter_map(|(index, s)| {
            let left = s.tokens.len() - s.found.min(s.tokens.len() - 1);
            let contender = s.contender(left);
            let out = stuck.everybody
                || stuck.shares.contains(&contender.share)
                || stuck.sequences.contains(&s.arrival)
                || s.waits_for_node();
            (!out).then_some((Who::Waiting(index), contender))
        });
        running.chain(waiting).collect()
    }

    /// Whose turn it is: that of the sequence that has been overtaken long enough, else as the
    /// turns have it.
    fn pick(&self, contenders: &[Contender]) -> Option<usize> {
        let next = self.overtaken.next();
        let first = next.and_then(|next| contenders.iter().position(|c| c.arrival == next));
        first.or_else(|| self.turns.pick(contenders))
    }

    /// Gives one contender its turn; false if nobody should get another in this step.
    fn give_turn(
        &mut self,
        who: Who,
        plan: &mut Plan,
        budget: &mut Budget,
        stuck: &mut Stuck,
    ) -> bool {
        let index = match who {
            Who::Running(index) => index,
            Who::Waiting(index) => {
                let (arrival, share) = {
                    let standing = self.waiting[index].standing();
                    (standing.arrival, standing.share)
                };
                match self.try_join(index, plan, stuck) {
                    Joined::At(index) => index,
                    Joined::BlockOf(index) => {
                        let chunk = plan.chunks.iter().find(|chunk| chunk.index == index);
                        let placed = chunk.map_or(0, |chunk| chunk.tokens);
                        if placed > 0 {
                            // What it waits for is being computed in this very step.
                            stuck.sequences.insert(arrival);
                            return true;
                        }
                        index
                    }
                    Joined::Reading => {
                        stuck.sequences.insert(arrival);
                        return true;
                    }
                    Joined::No => {
                        stuck.shares.insert(share);
                        return true;
                    }
                    Joined::Ended => return true,
                }
            }
        };
        self.place_prefill(index, plan, budget, stuck)
    }

    /// Places as many tokens of a prompt as the budget has room for.
    fn place_prefill(
        &mut self,
        index: usize,
        plan: &mut Plan,
        budget: &mut Budget,
        stuck: &mut Stuck,
    ) -> bool {
        let at = plan.chunks.iter().position(|chunk| chunk.index == index);
        let placed = at.map_or(0, |at| plan.chunks[at].tokens);
        let mut progress = self.running[index].progress();
        progress.computed += placed;
        let tokens = prefill_chunk(progress, budget.tokens(progress.computed));
        if tokens == 0 {
            return false;
        }
        if let Err(PoolFull) = self.grow(index, progress.computed + tokens) {
            self.make_room(&mut plan.chunks);
            stuck.everybody = true;
            return true;
        }
        budget.spend(tokens, progress.computed);
        self.turns
            .charge(self.running[index].standing().share, tokens);
        let samples = tokens == progress.due();
        match at {
            Some(at) => {
                plan.chunks[at].tokens += tokens;
                plan.chunks[at].samples = samples;
            }
            None => plan.chunks.push(Chunk {
                index,
                tokens,
                samples,
            }),
        }
        true
    }

    /// Lets a waiting sequence join, if it may.
    fn try_join(&mut self, index: usize, plan: &mut Plan, stuck: &mut Stuck) -> Joined {
        if matches!(self.waiting[index].coming, Coming::Open) {
            if !self.may_begin_transfer(index) {
                self.overtaken.refused(self.waiting[index].arrival);
                return Joined::No;
            }
            self.begin_transfer(index);
            return Joined::Reading;
        }
        if self.waiting[index].is_promised() {
            return self.join(index);
        }
        let sequence = &mut self.waiting[index];
        let overlap = self.pool.overlap(&sequence.chain);
        let below = self
            .store
            .as_ref()
            .map_or(0, |store| store.overlap(&sequence.chain[overlap.blocks..]));
        let found = overlap.blocks + below;
        sequence.found = found * super::BLOCK_TOKENS;
        let next = sequence.chain.get(found).copied();
        let computing = next.and_then(|hash| {
            let computes = |s: &Sequence| s.chain.get(found) == Some(&hash);
            self.running.iter().position(computes)
        });
        if let Some(index) = computing {
            return Joined::BlockOf(index);
        }
        if self.reads(index, found) {
            return Joined::Reading;
        }
        if let Some(refusal) = self.may_not_pin(index) {
            let sequence = self.waiting.remove(index);
            self.overtaken.gone(sequence.arrival);
            sequence.fail(refusal);
            self.end(sequence, Ending::Failed);
            return Joined::Ended;
        }
        let arrival = self.waiting[index].arrival;
        if self.overtaken.next().is_some_and(|next| next != arrival) {
            return Joined::No;
        }
        let needs = self.waiting[index].needs(overlap.blocks, overlap.idle);
        while !may_join(&needs, &self.batch()) {
            let standings: Vec<_> = self.running.iter().map(Sequence::standing).collect();
            let share = self.waiting[index].standing().share;
            let Some(victim) = victim::for_share(&standings, share) else {
                self.overtaken.refused(arrival);
                return Joined::No;
            };
            // Waits behind `index`, which stays where it is.
            self.preempt(victim, &mut plan.chunks);
            stuck.shares.insert(standings[victim].share);
        }
        let joined = self.join(index);
        // Copies take time that those who decode wait for: one long chain a step.
        stuck.everybody |= self.fetched > tiers::FETCHED_MAX;
        joined
    }

    /// A prompt that is to be pinned does not even start if too much is pinned already.
    fn may_not_pin(&self, index: usize) -> Option<ApiError> {
        let blocks = self.waiting[index].pins();
        let expected = self.running.iter().map(Sequence::pins).sum();
        if blocks == 0 || self.pins.may_pin(blocks, expected, &self.pool) {
            return None;
        }
        let message = format!(
            "Too many prefilled prompts wait to be fetched from this node to pin {blocks} blocks \
             more. Prefill on another node, or try again shortly."
        );
        let error = ApiError::new(Kind::Overloaded, "kv_tickets_full", message);
        Some(error.with_retry_after(1))
    }

    fn join(&mut self, index: usize) -> Joined {
        let mut sequence = self.waiting.remove(index);
        self.overtaken.joined(sequence.arrival);
        if sequence.has_place() {
            self.shared.joined();
        }
        let scope = sequence.job.scope.clone();
        let mut table = BlockTable::claim(&mut self.pool, scope, &sequence.chain);
        table.keep(u64::try_from(sequence.job.keep.as_millis()).unwrap_or(u64::MAX));
        self.fetch(&sequence.chain, &sequence.tokens, &mut table);
        let (handed, cached) = self.taken(&mut sequence);
        let first = sequence.join(table, cached, &self.parts.metrics);
        let is_handed = handed.is_some();
        let begun = match handed {
            Some(handed) => self.begin_with(&mut sequence, handed),
            None if first => {
                let voice = Voice {
                    token_bytes: &self.parts.token_bytes,
                    metrics: &self.parts.metrics,
                };
                sequence.follow(&voice)
            }
            None => Ok(None),
        };
        match begun {
            Ok(None) => {}
            Ok(Some(ending)) => {
                sequence.done(ending, None, &self.parts.metrics);
                self.end(sequence, ending);
                return Joined::Ended;
            }
            Err(error) => {
                self.fail(sequence, error);
                return Joined::Ended;
            }
        }
        if is_handed {
            sequence.flush(&self.parts.metrics);
        }
        self.running.push(sequence);
        Joined::At(self.running.len() - 1)
    }

    /// Those that wait for another node's blocks were promised their own too.
    pub(super) fn batch(&self) -> Batch {
        let promised = || self.waiting.iter().filter(|s| s.is_promised());
        let all = || self.running.iter().chain(promised());
        Batch {
            running: all().count(),
            outstanding: all().map(Sequence::outstanding).sum(),
            available: self.pool.available(),
        }
    }

    fn grow(&mut self, index: usize, tokens: usize) -> Result<(), PoolFull> {
        let table = self.running[index].table.as_mut();
        let table = table.expect("a running sequence has a table");
        table.grow(&mut self.pool, tokens)
    }

    /// The pool is dry: takes blocks from whoever needs them least. Returns the index of the
    /// sequence that is gone, past the end if it was a ticket, or one that had not joined.
    fn make_room(&mut self, chunks: &mut Vec<Chunk>) -> usize {
        if self.break_transfer() {
            return usize::MAX;
        }
        let standings: Vec<_> = self.running.iter().map(Sequence::standing).collect();
        if let Some(victim) = victim::when_dry(&standings) {
            self.preempt(victim, chunks);
            return victim;
        }
        let broken = self.pins.break_soonest(&mut self.pool);
        assert!(
            broken,
            "one sequence must fit the pool of {}",
            self.pool.capacity()
        );
        self.parts.metrics.tickets.broken.inc();
        usize::MAX
    }

    pub(super) fn preempt(&mut self, victim: usize, chunks: &mut Vec<Chunk>) {
        let mut sequence = self.running.remove(victim);
        if let Some(table) = sequence.leave() {
            table.release(&mut self.pool);
        }
        chunks.retain(|chunk| chunk.index != victim);
        for chunk in chunks {
            chunk.index -= usize::from(chunk.index > victim);
        }
        self.parts.metrics.preemptions.inc();
        self.preempted = true;
        self.waiting.push(sequence);
    }
}
