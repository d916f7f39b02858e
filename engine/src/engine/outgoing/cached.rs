//! What is cached here, for another node that asks.
//!
//! What is on the disk is read first, as long as that takes no longer than computing it would; then pool
//! and host memory give what they have, pinned until the receiver has it. While others' blocks are pinned
//! up to the bound, a receiver waits for them to be let go.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::Engine;
use super::handover::{Out, Stage};
use super::{Accepted, Answer, Arrival, Asked, AttachRequest, Outgoing, refused};
use crate::engine::pins::Pins;
use crate::engine::sequence::{DiskWait, Sequence};
use crate::kv::pool::Pool;
use crate::kv::store::Wanted;
use crate::kv::table::BlockTable;
use crate::kv::transfer::{End, Reason, TransferError, TransferId};

/// Receivers whose blocks may be on their way from the disk; others get what is in memory.
const SEEKING_MAX: usize = 64;
/// Receivers that may wait for others' blocks to be let go.
const CROWDED_MAX: usize = 256;
/// How long what was fetched from the cache stays pinned.
const CACHED_HOLD: Duration = Duration::from_secs(30);

/// Receivers that have come for what is cached and have not got it.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    /// Their blocks are being read from the disk.
    seeking: Vec<(AttachRequest, Answer, DiskWait)>,
    /// There is no room to pin more.
    crowded: VecDeque<Arrival>,
}

impl Waiting {
    pub(super) fn crowded(&self) -> impl Iterator<Item = &Arrival> {
        self.crowded.iter()
    }

    /// Refuses those that have waited for too long.
    pub(super) fn expire(&mut self, now: Instant) {
        self.crowded.retain(|(request, answer)| {
            let waits = now < request.until;
            if !waits {
                // Whoever asked may be gone.
                let _ = answer.try_send(Err(busy()));
            }
            waits
        });
    }
}

fn busy() -> TransferError {
    refused(Reason::Busy, "too many blocks wait to be fetched here")
}

impl Outgoing {
    /// Whether anybody waits for the disk.
    pub(in crate::engine) fn seeks(&self) -> bool {
        !self.cached.seeking.is_empty()
    }

    /// Whether others wait for room to pin.
    pub(in crate::engine) fn is_crowded(&self) -> bool {
        !self.cached.crowded.is_empty()
    }

    /// Has a receiver wait for the step's end.
    pub(in crate::engine) fn look_later(&mut self, (request, answer): Arrival) {
        self.cached.seeking.push((request, answer, DiskWait::Open));
    }

    fn crowd(&mut self, arrival: Arrival, now: Instant) {
        if self.cached.crowded.len() < CROWDED_MAX && now < arrival.0.until {
            return self.cached.crowded.push_back(arrival);
        }
        // Whoever asked may be gone.
        let _ = arrival.1.try_send(Err(busy()));
    }

    fn open_cached(
        &mut self,
        stage: Stage,
        blocks: u32,
        request: AttachRequest,
    ) -> Result<Accepted, TransferError> {
        let id = TransferId(rand::random());
        let key = rand::random();
        let mut out = Out {
            salt: None,
            prompt: [0; 16],
            blocks,
            receiver: Arc::from(&*request.receiver),
            stage,
            cached: true,
            key: Some(key),
            link: None,
        };
        let missing = request
            .missing
            .iter()
            .map(|(from, until)| (*from, (*until).min(blocks)));
        let missing: Vec<_> = missing.filter(|(from, until)| from < until).collect();
        out.link(request.sender, &missing)?;
        self.open.insert(id, out);
        Ok(Accepted { id, key, blocks })
    }

    /// Pins these blocks for a receiver, and tells it.
    pub(in crate::engine) fn grant(
        &mut self,
        table: BlockTable,
        (request, answer): Arrival,
        (pins, pool): (&mut Pins, &mut Pool),
    ) {
        let blocks = u32::try_from(table.hashes().len()).unwrap_or(u32::MAX);
        let held = pins.pin(table, CACHED_HOLD, pool, Instant::now());
        let stage = Stage::Held(held.ticket, End::default());
        let sender = Arc::clone(&request.sender);
        let accepted = self.open_cached(stage, blocks, request);
        let mut released = accepted.is_err().then_some(held.ticket);
        let id = accepted.as_ref().ok().map(|accepted| accepted.id);
        // Whoever asked may be gone.
        if let (Err(_), Some(id)) = (answer.try_send(accepted), id) {
            released = self.lost(id, &sender);
        }
        if let Some(ticket) = released {
            pins.release(ticket, pool);
        }
    }
}

impl Engine {
    /// Takes in receivers that have come, and looks once more for those that wait.
    pub(in crate::engine) fn take_receivers(&mut self) {
        for (request, answer, wait) in std::mem::take(&mut self.outgoing.cached.seeking) {
            self.seek(request, answer, wait);
        }
        // The first of them first: the others may want less, and would keep it waiting.
        while let Some(arrival) = self.outgoing.cached.crowded.pop_front() {
            if let Some(arrival) = self.hold_cached(arrival) {
                self.outgoing.cached.crowded.push_front(arrival);
                break;
            }
        }
        while let Ok((request, answer)) = self.receivers.try_recv() {
            match request.asked {
                Asked::HandOver { .. } => self.outgoing.attach(request, answer),
                Asked::Cached { .. } => self.seek(request, answer, DiskWait::Open),
            }
        }
    }

    /// Has what is on the disk read for a receiver, as long as that takes no longer than computing it
    /// would, and then gives it everything that is in memory.
    fn seek(&mut self, request: AttachRequest, answer: Answer, wait: DiskWait) {
        let seeking = &self.outgoing.cached.seeking;
        let in_time = Instant::now() < request.until && seeking.len() < SEEKING_MAX;
        if let Asked::Cached {
            chain,
            tokens,
            scope,
        } = &request.asked
            && in_time
        {
            let wanted = Wanted {
                chain,
                tokens,
                salt: scope.salt.as_ref(),
            };
            let wait = self.reads_for(&wanted, wait);
            if wait != DiskWait::Over {
                let seeking = &mut self.outgoing.cached.seeking;
                return seeking.push((request, answer, wait));
            }
        }
        let mut left = Some((request, answer));
        if !self.outgoing.is_crowded() {
            left = left.and_then(|arrival| self.hold_cached(arrival));
        }
        if let Some(arrival) = left {
            self.outgoing.crowd(arrival, Instant::now());
        }
    }

    /// Pins what pool and host memory hold of a prompt, no more than may ever be pinned. Gives the receiver
    /// back if there is no room for that now.
    fn hold_cached(&mut self, arrival: Arrival) -> Option<Arrival> {
        let Asked::Cached {
            scope,
            chain,
            tokens,
        } = &arrival.0.asked
        else {
            return None;
        };
        let chain = &chain[..chain.len().min(Pins::most(&self.pool))];
        let held = self.pool.overlap(chain).blocks;
        let store = self.store.as_ref();
        let below = store.map_or(0, |store| store.overlap(&chain[held..]));
        let expected = self.running.iter().map(Sequence::pins).sum();
        if !self.pins.may_pin(held + below, expected, &self.pool) {
            return Some(arrival);
        }
        let mut table = BlockTable::claim(&mut self.pool, scope.clone(), chain);
        self.fetch(chain, tokens, &mut table);
        let keep = (&mut self.pins, &mut self.pool);
        self.outgoing.grant(table, arrival, keep);
        None
    }
}
