//! How do blocks that another node computed get into this pool, and what if they do not?
//!
//! A waiting request whose prompt another node has is promised its blocks as if it joined, and an order
//! goes out for what is not here. What comes is copied into blocks of the pool, at most so many a step,
//! and published as if it had been computed: others find it too. Once everything is here the request
//! joins, with the first token that it was handed, if any. Blocks that come are held for the request; when
//! the pool runs dry they are let go, like tickets, before any running request loses its own.
//!
//! States of a waiting request: open (nothing asked for yet), coming, here, and over: from then on it is a
//! request like any other, and computes what is missing.

mod coming;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use cache_index::block::{BLOCK_TOKENS, creditable_blocks};

use super::answer::Voice;
use super::job::OnFailure;
use super::sequence::Sequence;
use super::{Ending, Engine};
use crate::error::{ApiError, Kind};
use crate::kv::table::BlockTable;
use crate::kv::transfer::client::{Control, Order, Wanted};
use crate::kv::transfer::part::{Layers, Part};
use crate::kv::transfer::{End, First, Payload, Reason, TransferError};
use crate::sample::Picked;
use crate::scheduler::join::may_join;
pub(super) use coming::Coming;
use coming::{Receiving, Taken};

/// Blocks copied into the pool within a step while others decode: 512 tokens. The default model copies
/// them in 3 ms.
const COPIED_MAX_DECODING: usize = 32;
/// The same while nobody does.
const COPIED_MAX: usize = 128;

/// Something that came for a request.
#[derive(Debug)]
pub struct Inbound {
    number: u64,
    what: What,
}

#[derive(Debug)]
enum What {
    Part(Part, Box<dyn Payload>),
    Alive,
    Ended(Result<End, TransferError>),
}

impl Inbound {
    /// A part of its blocks.
    pub fn part(number: u64, part: Part, payload: Box<dyn Payload>) -> Self {
        let what = What::Part(part, payload);
        Self { number, what }
    }

    /// The other node still computes.
    pub fn alive(number: u64) -> Self {
        let what = What::Alive;
        Self { number, what }
    }

    /// Nothing more will come.
    pub fn ended(number: u64, ended: Result<End, TransferError>) -> Self {
        let what = What::Ended(ended);
        Self { number, what }
    }
}

impl Engine {
    /// The queue of what came.
    pub(super) fn take_inbound(&mut self, now: Instant) {
        let decoding = self.running.iter().any(|s| s.progress().decodes());
        let blocks = if decoding {
            COPIED_MAX_DECODING
        } else {
            COPIED_MAX
        };
        let mut layers_left = blocks * self.parts.layers;
        while let Some(inbound) = self.inbound.pop_front() {
            let waits = |s: &Sequence| s.arrival == inbound.number && s.waits_for_node();
            let Some(index) = self.waiting.iter().position(waits) else {
                continue;
            };
            match inbound.what {
                What::Part(part, payload) => {
                    if let Err(error) = self.take_part(index, &part, payload.bytes(), now) {
                        self.transfer_failed(index, &error);
                    }
                    let layers = part.numbers().len() * part.layer_range().len();
                    layers_left = layers_left.saturating_sub(layers);
                }
                What::Alive => {
                    if let Coming::Blocks(receiving) = &mut self.waiting[index].coming {
                        receiving.deadline = now + receiving.timeout;
                    }
                }
                What::Ended(Ok(end)) => self.transfer_ended(index, end),
                What::Ended(Err(error)) => self.transfer_failed(index, &error),
            }
            if layers_left == 0 {
                break;
            }
        }
        let late = |s: &Sequence| s.coming.deadline().is_some_and(|deadline| deadline <= now);
        while let Some(index) = self.waiting.iter().position(late) {
            let error = self.waiting[index].coming.lateness(now);
            self.transfer_failed(index, &error);
        }
    }

    /// When the next request has waited long enough for another node.
    pub(super) fn next_stall(&self) -> Option<Instant> {
        self.waiting
            .iter()
            .filter_map(|s| s.coming.deadline())
            .min()
    }

    /// Asks for the blocks of a waiting request that may join.
    pub(super) fn begin_transfer(&mut self, index: usize) {
        let mut sequence = self.waiting.remove(index);
        sequence.coming = Coming::Over;
        if let Err(error) = self.order(&mut sequence) {
            self.count_failed(&sequence, &error);
        }
        self.waiting.insert(index, sequence);
    }

    fn order(&mut self, sequence: &mut Sequence) -> Result<(), TransferError> {
        let busy = |message| TransferError::refused(Reason::Busy, message);
        let orders = self.parts.orders.clone();
        let orders = orders.ok_or_else(|| busy("this node fetches no blocks"))?;
        let Some(take_over) = sequence.take_over() else {
            return Ok(());
        };
        let scope = sequence.job.scope.clone();
        let mut table = BlockTable::claim(&mut self.pool, scope, &take_over.chain);
        self.fetch(&take_over.chain, &sequence.tokens, &mut table);
        let held = table.hashes().len();
        let blocks = take_over.chain.len();
        let control = Arc::new(Control::default());
        let order = Order {
            number: sequence.arrival,
            what: match take_over.id {
                Some(id) => Wanted::HandOver {
                    id,
                    prompt: take_over.prompt,
                },
                None => Wanted::Cached {
                    tokens: sequence.job.prompt[..blocks * BLOCK_TOKENS].to_vec(),
                },
            },
            engine_id: Arc::clone(&take_over.sender),
            endpoints: take_over.endpoints.clone(),
            salt: sequence.job.scope.salt.clone(),
            blocks: u32::try_from(blocks).unwrap_or(u32::MAX),
            held: u32::try_from(held).unwrap_or(u32::MAX),
            timeout: take_over.timeout,
            control: Arc::clone(&control),
        };
        if orders.try_send(order).is_err() {
            table.release(&mut self.pool);
            return Err(busy("too many transfers wait to begin"));
        }
        self.parts.metrics.transfers.asked.inc();
        sequence.coming = Coming::Blocks(Box::new(Receiving {
            table,
            here: (0..blocks)
                .map(|block| Layers::all_if(block < held))
                .collect(),
            control,
            timeout: take_over.timeout,
            deadline: Instant::now() + take_over.timeout,
            until: take_over.total.map(|total| Instant::now() + total),
        }));
        Ok(())
    }

    /// Copies a part in, and publishes the blocks that are whole.
    fn take_part(
        &mut self,
        index: usize,
        part: &Part,
        bytes: &[u8],
        now: Instant,
    ) -> Result<(), TransferError> {
        let Coming::Blocks(receiving) = &mut self.waiting[index].coming else {
            return Ok(());
        };
        let unwanted = || TransferError::Malformed("a block that was not asked for");
        let of = self.parts.layers;
        let each = part.layer_range().len() * (self.parts.device.block_bytes() / of);
        let here = receiving.here.get(part.numbers()).unwrap_or_default();
        let fits = part.layer_range().end <= of && bytes.len() == here.len() * each && each > 0;
        if here.is_empty() || !fits {
            return Err(unwanted());
        }
        let grown = receiving
            .table
            .grow(&mut self.pool, part.numbers().end * BLOCK_TOKENS);
        grown.map_err(|_| TransferError::PoolFull)?;
        // What had to make room is copied out before its place is written to.
        self.take_changes();
        let sequence = &mut self.waiting[index];
        let Coming::Blocks(receiving) = &mut sequence.coming else {
            return Ok(());
        };
        for (number, bytes) in part.numbers().zip(bytes.chunks_exact(each)) {
            // A transfer that was taken up again begins its unfinished blocks anew: what has become whole
            // meanwhile may be in use.
            if receiving.here[number].is_whole() {
                continue;
            }
            let block = receiving.table.blocks()[number];
            let device = &mut self.parts.device;
            if !device.take_layers(block, part.layer_range(), bytes) {
                return Err(TransferError::NotFinite);
            }
            let here = &mut receiving.here[number];
            *here = here.with_again(part, of).ok_or_else(unwanted)?;
        }
        receiving.deadline = now + receiving.timeout;
        let leading = receiving.leading() * BLOCK_TOKENS;
        receiving
            .table
            .publish(&mut self.pool, &sequence.tokens[..leading]);
        self.parts
            .metrics
            .transfers
            .bytes_received
            .inc_by(bytes.len() as u64);
        Ok(())
    }

    fn transfer_ended(&mut self, index: usize, end: End) {
        let sequence = &mut self.waiting[index];
        let Coming::Blocks(mut receiving) = std::mem::replace(&mut sequence.coming, Coming::Over)
        else {
            return;
        };
        let whole = receiving.leading() == receiving.here.len();
        let cached = sequence
            .take_over()
            .is_some_and(|take_over| take_over.id.is_none());
        if !whole && !cached {
            sequence.coming = Coming::Blocks(receiving);
            let error = TransferError::Malformed("the end, before all blocks have come");
            return self.transfer_failed(index, &error);
        }
        receiving
            .table
            .truncate(&mut self.pool, receiving.table.published_tokens());
        let first = end.first.filter(|first| {
            whole && (first.token as usize) < self.parts.vocab && sequence.accepts(first)
        });
        if first.is_some() {
            // All of the prompt is behind it, its last full block too.
            sequence.chain = receiving.table.hashes().to_vec();
        }
        sequence.found = receiving.table.published_tokens();
        let cached_tokens = end.cached_tokens.min(sequence.job.prompt.len());
        sequence.coming = Coming::Here(Box::new(Taken {
            table: receiving.table,
            first,
            // What lay in a cache is cached here as well.
            cached_tokens: (!cached).then_some(cached_tokens),
        }));
        self.parts.metrics.transfers.received.inc();
    }

    /// Gives a transfer up: the request computes what is missing, or fails, as it asked.
    fn transfer_failed(&mut self, index: usize, error: &TransferError) {
        let mut sequence = self.waiting.remove(index);
        self.let_go(&mut sequence);
        self.count_failed(&sequence, error);
        let fails = sequence
            .take_over()
            .is_some_and(|t| t.on_failure == OnFailure::Fail);
        if !fails {
            return self.waiting.insert(index, sequence);
        }
        self.overtaken.gone(sequence.arrival);
        let message = "The prompt's KV could not be fetched from the other node.";
        let mut failed = ApiError::new(Kind::Overloaded, "kv_transfer_failed", message);
        failed.detail = Some(error.to_string());
        sequence.fail(failed);
        self.end(sequence, Ending::Failed);
    }

    fn count_failed(&self, sequence: &Sequence, error: &TransferError) {
        self.parts.metrics.transfers.failed.inc();
        tracing::warn!(request_id = %sequence.job.request_id, %error, "a KV transfer failed");
    }

    /// Gives back what is held for a request that has not joined.
    pub(super) fn let_go(&mut self, sequence: &mut Sequence) {
        let coming = std::mem::replace(&mut sequence.coming, Coming::Over);
        if let Some(table) = coming.table() {
            table.release(&mut self.pool);
            sequence
                .chain
                .truncate(creditable_blocks(sequence.tokens.len()));
        }
    }

    /// The pool is dry: lets the blocks of the youngest request go that has not joined. False if there is
    /// none.
    pub(super) fn break_transfer(&mut self) -> bool {
        let promised = self
            .waiting
            .iter()
            .enumerate()
            .filter(|(_, s)| s.is_promised());
        let Some((index, _)) = promised.max_by_key(|(_, s)| s.arrival) else {
            return false;
        };
        if self.waiting[index].waits_for_node() {
            self.transfer_failed(index, &TransferError::PoolFull);
        } else {
            let mut sequence = self.waiting.remove(index);
            self.let_go(&mut sequence);
            self.waiting.insert(index, sequence);
        }
        true
    }

    /// What a request that is about to join was handed. Its blocks are released: the caller has claimed
    /// them.
    pub(super) fn taken(&mut self, sequence: &mut Sequence) -> (Option<First>, Option<usize>) {
        match std::mem::replace(&mut sequence.coming, Coming::Over) {
            Coming::Here(taken) => {
                taken.table.release(&mut self.pool);
                (taken.first, taken.cached_tokens)
            }
            Coming::Open | Coming::Blocks(_) | Coming::Over => (None, None),
        }
    }

    /// Begins an answer with the token that it was handed. Some if it ends with that.
    pub(super) fn begin_with(
        &self,
        sequence: &mut Sequence,
        first: First,
    ) -> Result<Option<Ending>, ApiError> {
        let voice = Voice {
            token_bytes: &self.parts.token_bytes,
            metrics: &self.parts.metrics,
        };
        let mut logprobs = first.logprobs;
        match (&mut logprobs, sequence.job.logprobs) {
            (Some(logprobs), Some(top)) => logprobs.top.truncate(top),
            (logprobs, _) => *logprobs = None,
        }
        let token = first.token;
        sequence.push_picked(Picked { token, logprobs }, &voice)
    }

    /// Whether a request that has another node's blocks to wait for may have its own promised now.
    pub(super) fn may_begin_transfer(&self, index: usize) -> bool {
        let sequence = &self.waiting[index];
        let overlap = self.pool.overlap(&sequence.chain);
        let next = self.overtaken.next();
        let its_turn = next.is_none_or(|next| next == sequence.arrival);
        its_turn && may_join(&sequence.needs(overlap.blocks, overlap.idle), &self.batch())
    }

    /// Everything that came and was not looked at.
    pub(super) fn queue_inbound(&mut self, inbound: Inbound) {
        self.inbound.push_back(inbound);
    }
}

/// What came for this node's requests; as long as windows have places.
pub(super) type InboundQueue = VecDeque<Inbound>;
