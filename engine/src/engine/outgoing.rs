//! Which prefilled prompts does this node hand over, and how far is each?
//!
//! A handover is known from the moment its request is queued here. The node that decodes may ask for it
//! before or after that: who comes too early waits, within bounds. It must name the prompt, the scope and
//! the transfer, and be the node that the request named; then each layer of a block is copied
//! into its window as soon as a pass has computed it, as far as there is room, and the rest once there is
//! room again.
//! The first token follows when the request ends, whose blocks stay pinned under a ticket until the
//! receiver has everything or the ticket's deadline passes.
//!
//! States: computing, held (pinned, the end known), over (remembered for a while, so that a transfer
//! cannot be used twice). A connection that breaks is none of them: its receiver may come again with the
//! key that only it has.

mod cached;
mod handover;
mod runs;

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Instant;

use cache_index::block::{BLOCK_TOKENS, BlockHash};

use super::job::{HandOver, Job, Remote, TicketId};
use super::pins::{HOLD_MAX, Pins};
use super::sequence::Sequence;
use super::{Device, Engine};
use crate::kv::table::{BlockTable, Scope};
use crate::kv::transfer::sender::Sender;
use crate::kv::transfer::{End, Reason, TransferError, TransferId};
use crate::metrics::Metrics;
use crate::scheduler::Chunk;
use cached::Waiting;
pub(super) use handover::Source;
use handover::{Out, Stage};

/// Receivers that may wait for their prefill.
const PARKED_MAX: usize = 256;
/// Transfers that are remembered once they are over, for as long as a ticket could have lived.
const PAST_MAX: usize = 65_536;
/// Whole blocks copied into windows within a pass, and once more after it: 512 tokens. The default model
/// copies them in 3 ms.
pub(super) const COPIED_MAX: usize = 32;
/// What a receiver asks for.
#[derive(Debug)]
pub enum Asked {
    /// A prompt that is prefilled for it.
    HandOver {
        /// Its name.
        id: TransferId,
        /// From an earlier connection.
        key: Option<[u8; 16]>,
        /// Of all tokens, see [`prompt_digest`](crate::kv::transfer::auth::prompt_digest).
        prompt: [u8; 16],
        /// Full blocks of the prompt.
        blocks: u32,
        /// Whose cache.
        salt: Option<Arc<str>>,
    },
    /// What is cached of a prompt.
    Cached {
        /// Whose cache.
        scope: Scope,
        /// The hashes of the prompt's full blocks.
        chain: Vec<BlockHash>,
        /// Its tokens.
        tokens: Vec<u32>,
    },
}

/// A receiver that has been greeted.
#[derive(Debug)]
pub struct AttachRequest {
    /// What it asks for.
    pub asked: Asked,
    /// Runs of blocks that it lacks: from, up to and without.
    pub missing: Vec<(u32, u32)>,
    /// Its engine id.
    pub receiver: String,
    /// How long it waits for the prefill.
    pub until: Instant,
    /// The way to it.
    pub sender: Arc<Sender>,
}

/// What a receiver is granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accepted {
    /// The transfer.
    pub id: TransferId,
    /// Opens further connections.
    pub key: [u8; 16],
    /// Blocks that there will be.
    pub blocks: u32,
}

pub(super) type Answer = SyncSender<Result<Accepted, TransferError>>;

/// A receiver and the way to answer it.
pub(super) type Arrival = (AttachRequest, Answer);

/// All handovers of this node.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    open: HashMap<TransferId, Out>,
    parked: Vec<Arrival>,
    cached: Waiting,
    /// Passes so far.
    pass: u64,
    past: VecDeque<(TransferId, Instant)>,
    past_ids: HashSet<TransferId>,
    /// There is more to copy, and room for it.
    pub(super) is_behind: bool,
}

fn refused(reason: Reason, message: impl Into<String>) -> TransferError {
    TransferError::refused(reason, message)
}

impl Outgoing {
    /// Takes note of a request that will be handed over. False if its name was used before.
    pub(super) fn open(&mut self, job: &Job, hand_over: &HandOver, arrival: u64) -> bool {
        if self.past_ids.contains(&hand_over.id) || self.open.contains_key(&hand_over.id) {
            return false;
        }
        let out = Out {
            salt: job.scope.salt.clone(),
            prompt: hand_over.prompt,
            blocks: u32::try_from(job.prompt.len() / BLOCK_TOKENS).unwrap_or(u32::MAX),
            receiver: Arc::clone(&hand_over.receiver),
            stage: Stage::Computing(arrival),
            cached: false,
            key: None,
            link: None,
        };
        self.open.insert(hand_over.id, out);
        let mine = |request: &AttachRequest| matches!(request.asked, Asked::HandOver { id, .. } if id == hand_over.id);
        let waiting: Vec<_> = self
            .parked
            .extract_if(.., |(request, _)| mine(request))
            .collect();
        for (request, answer) in waiting {
            self.attach(request, answer);
        }
        true
    }

    /// Connects a receiver to its handover, or lets it wait for one.
    pub(super) fn attach(&mut self, request: AttachRequest, answer: Answer) {
        let Asked::HandOver { id, .. } = request.asked else {
            return;
        };
        let receiver = request.receiver.clone();
        let same = |parked: &AttachRequest| {
            let is_same = matches!(parked.asked, Asked::HandOver { id: other, .. } if other == id);
            is_same && parked.receiver == receiver
        };
        if self.open.contains_key(&id) {
            // Whoever asked may be gone.
            let _ = answer.try_send(self.connect(id, request));
        } else if self.past_ids.contains(&id) {
            let message = "this transfer is over; it can be used once";
            let _ = answer.try_send(Err(refused(Reason::Used, message)));
        } else if let Some((before, told)) = self.parked.iter_mut().find(|(parked, _)| same(parked))
        {
            // Its connection broke, and it has come again.
            let before = (
                std::mem::replace(before, request),
                std::mem::replace(told, answer),
            );
            let message = "the same node has come again for this transfer";
            let _ = before.1.try_send(Err(refused(Reason::GivenUp, message)));
        } else if self.parked.len() >= PARKED_MAX {
            let message = "too many nodes wait for prefills here";
            let _ = answer.try_send(Err(refused(Reason::Busy, message)));
        } else {
            self.parked.push((request, answer));
        }
    }

    fn connect(
        &mut self,
        id: TransferId,
        request: AttachRequest,
    ) -> Result<Accepted, TransferError> {
        let unknown = || refused(Reason::Unknown, "no such transfer");
        let out = self.open.get_mut(&id).ok_or_else(unknown)?;
        let AttachRequest {
            asked,
            missing,
            receiver,
            sender,
            ..
        } = request;
        let Asked::HandOver {
            key,
            prompt,
            blocks,
            salt,
            ..
        } = asked
        else {
            return Err(unknown());
        };
        if *receiver != *out.receiver {
            let message = format!("this transfer is for {}, not for {receiver}", out.receiver);
            return Err(refused(Reason::WrongNode, message));
        }
        if salt != out.salt {
            return Err(refused(
                Reason::Scope,
                "this transfer belongs to another cache scope",
            ));
        }
        if prompt != out.prompt || blocks != out.blocks {
            let message =
                "the two nodes were given different prompts, or count their tokens differently";
            return Err(refused(Reason::Prompt, message));
        }
        if out.key.is_some() && key != out.key {
            return Err(refused(Reason::Used, "this transfer has been taken"));
        }
        // First: a request that makes no sense must not use the transfer up.
        out.link(sender, &missing)?;
        let key = *out.key.get_or_insert_with(rand::random);
        Ok(Accepted { id, key, blocks })
    }

    /// Lets receivers wait no longer for a prefill that was refused.
    pub(super) fn abandon(&mut self, abandoned: TransferId) {
        let mine = |request: &AttachRequest| matches!(request.asked, Asked::HandOver { id, .. } if id == abandoned);
        for (_, answer) in self.parked.extract_if(.., |(request, _)| mine(request)) {
            let message = "the request to prefill was refused";
            let _ = answer.try_send(Err(refused(Reason::GivenUp, message)));
        }
    }

    /// The request ended well, and its blocks are pinned.
    pub(super) fn held(&mut self, id: TransferId, ticket: TicketId, end: End) {
        if let Some(out) = self.open.get_mut(&id) {
            out.stage = Stage::Held(ticket, end);
        }
    }

    /// The request with this number of arrival is gone. If its blocks are not pinned, nothing comes of the
    /// handover.
    pub(super) fn request_ended(&mut self, id: TransferId, arrival: u64) {
        let out = self.open.get(&id);
        if out.is_some_and(|out| matches!(out.stage, Stage::Computing(mine) if mine == arrival)) {
            self.close(id, Some("the prefill did not end well"));
        }
    }

    /// The receiver has everything: its ticket, to be released.
    pub(super) fn received(&mut self, id: TransferId) -> Option<TicketId> {
        let ticket = match self.open.get(&id)? {
            Out {
                stage: Stage::Held(ticket, _),
                link: Some(link),
                ..
            } if link.ended => *ticket,
            _ => return None,
        };
        self.close(id, None);
        Some(ticket)
    }

    /// A connection is gone; its receiver may come again. Not for what was cached: that is asked for anew,
    /// and this ticket is to be released.
    pub(super) fn lost(&mut self, id: TransferId, sender: &Arc<Sender>) -> Option<TicketId> {
        let out = self.open.get_mut(&id)?;
        let link = out.link.as_ref();
        if !link.is_some_and(|link| Arc::ptr_eq(&link.sender, sender)) {
            return None;
        }
        out.link = None;
        match out.stage {
            Stage::Held(ticket, _) if out.cached => {
                self.close(id, None);
                Some(ticket)
            }
            Stage::Held(..) | Stage::Computing(_) => None,
        }
    }

    fn close(&mut self, id: TransferId, why: Option<&str>) {
        let Some(out) = self.open.remove(&id) else {
            return;
        };
        if let (Some(link), Some(why)) = (out.link, why) {
            link.sender.refuse(Reason::GivenUp, why);
        }
        self.past.push_back((id, Instant::now()));
        self.past_ids.insert(id);
        if self.past.len() > PAST_MAX {
            self.forget_oldest();
        }
    }

    /// Ends what is past its time.
    pub(super) fn expire(&mut self, pins: &Pins, now: Instant) {
        for (_, answer) in self
            .parked
            .extract_if(.., |(request, _)| request.until <= now)
        {
            let message = "no prefill named this transfer in time";
            let _ = answer.try_send(Err(refused(Reason::Unknown, message)));
        }
        self.cached.expire(now);
        let gone = |out: &Out| matches!(out.stage, Stage::Held(ticket, _) if !pins.has(ticket));
        let over: Vec<_> = self
            .open
            .iter()
            .filter(|(_, out)| gone(out))
            .map(|(id, _)| *id)
            .collect();
        for id in over {
            self.close(
                id,
                Some("the blocks were let go: their deadline passed, or others needed room"),
            );
        }
        while self
            .past
            .front()
            .is_some_and(|(_, at)| now.duration_since(*at) > 2 * HOLD_MAX)
        {
            self.forget_oldest();
        }
    }

    fn forget_oldest(&mut self) {
        if let Some((id, _)) = self.past.pop_front() {
            self.past_ids.remove(&id);
        }
    }

    /// When the next receiver has waited long enough.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let waiting = self.parked.iter().chain(self.cached.crowded());
        waiting.map(|(request, _)| request.until).min()
    }

    /// Handovers that are open.
    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    /// Copies what has been computed into the windows, as far as they have room.
    pub(super) fn pump(
        &mut self,
        running: &[Sequence],
        pins: &Pins,
        device: &mut dyn Device,
        (layers, metrics): (usize, &Metrics),
    ) {
        self.is_behind = false;
        let mut source = Source {
            layers,
            layer_bytes: device.block_bytes() / layers,
            read: &mut |block, layers, to| device.read_layers(block, layers, to),
            left: &mut { COPIED_MAX },
            within_pass: false,
            metrics: &metrics.transfers,
        };
        for out in self.open.values_mut() {
            let table = table_of(out, running, pins);
            if let Some(table) = table {
                out.stream(table, (self.pass, 0), &mut source);
            }
            self.is_behind |= out.pump(table, &mut source);
        }
    }

    /// A pass begins.
    pub(super) fn begin_pass(&mut self) {
        self.pass += 1;
    }

    /// The same as [`Outgoing::pump`] within a pass, which has computed so many layers of its chunks.
    pub(super) fn pump_within(
        &mut self,
        (running, chunks): (&[Sequence], &[Chunk]),
        pins: &Pins,
        computed: usize,
        source: &mut Source<'_>,
    ) {
        for out in self.open.values_mut() {
            let table = table_of(out, running, pins);
            let chunk = match out.stage {
                Stage::Computing(arrival) => chunks
                    .iter()
                    .find(|chunk| running[chunk.index].arrival == arrival),
                Stage::Held(..) => None,
            };
            if let (Some(chunk), Some(table)) = (chunk, table) {
                let tokens = running[chunk.index].computed + chunk.tokens;
                let blocks = tokens / BLOCK_TOKENS;
                out.begin_streams(self.pass, table, blocks, source.layers);
            }
            if let Some(table) = table {
                out.stream(table, (self.pass, computed), source);
            }
            out.pump(table, source);
        }
    }
}

/// The blocks of a prompt that is computed or held.
fn table_of<'a>(out: &Out, running: &'a [Sequence], pins: &'a Pins) -> Option<&'a BlockTable> {
    match out.stage {
        Stage::Computing(arrival) => {
            let computing = running.iter().find(|s| s.arrival == arrival);
            computing.and_then(|s| s.table.as_ref())
        }
        Stage::Held(ticket, _) => pins.table(ticket),
    }
}

impl Engine {
    /// Opens the handover that a request wants; false if its name was used before.
    pub(super) fn opens_hand_over(&mut self, sequence: &Sequence) -> bool {
        match &sequence.job.remote {
            Remote::HandOver(hand_over) => {
                self.outgoing
                    .open(&sequence.job, hand_over, sequence.arrival)
            }
            Remote::None | Remote::TakeOver(_) => true,
        }
    }

    pub(super) fn receiver_has_all(&mut self, id: TransferId) {
        if let Some(ticket) = self.outgoing.received(id) {
            self.pins.release(ticket, &mut self.pool);
            self.parts.metrics.transfers.sent.inc();
        }
    }

    pub(super) fn receiver_lost(&mut self, id: TransferId, sender: &Arc<Sender>) {
        if let Some(ticket) = self.outgoing.lost(id, sender) {
            self.pins.release(ticket, &mut self.pool);
        }
    }

    pub(super) fn pump_outgoing(&mut self) {
        self.outgoing.pump(
            &self.running,
            &self.pins,
            &mut *self.parts.device,
            (self.parts.layers, &self.parts.metrics),
        );
    }
}
