//! One handover: what it is, and how far its blocks are on their way.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::Device;
use super::refused;
use crate::engine::job::TicketId;
use crate::kv::table::BlockTable;
use crate::kv::transfer::sender::Sender;
use crate::kv::transfer::{End, Reason, TransferError};
use crate::metrics::Metrics;

/// Blocks copied into windows within a step: 512 tokens. The default model copies them in 3 ms.
const COPIED_MAX: usize = 32;
/// How often a receiver hears that its prompt is still being computed.
const ALIVE_EVERY: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(super) struct Out {
    pub(super) salt: Option<Arc<str>>,
    pub(super) prompt: [u8; 16],
    pub(super) blocks: u32,
    pub(super) receiver: Arc<str>,
    pub(super) stage: Stage,
    /// It was in the cache, and not prefilled for its receiver.
    pub(super) cached: bool,
    /// Set by the first receiver that comes.
    pub(super) key: Option<[u8; 16]>,
    pub(super) link: Option<Link>,
}

#[derive(Debug)]
pub(super) enum Stage {
    /// The request with this number of arrival runs or waits.
    Computing(u64),
    /// It has ended; its blocks are pinned.
    Held(TicketId, End),
}

/// A receiver that is connected.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) sender: Arc<Sender>,
    /// Blocks to send, in order.
    missing: VecDeque<(u32, u32)>,
    pub(super) ended: bool,
    last_said: Instant,
}

impl Link {
    fn next(&self) -> Option<u32> {
        self.missing.front().map(|(from, _)| *from)
    }

    fn sent(&mut self) {
        if let Some((from, until)) = self.missing.front_mut() {
            *from += 1;
            if from == until {
                self.missing.pop_front();
            }
        }
    }
}

impl Out {
    pub(super) fn link(
        &mut self,
        sender: Arc<Sender>,
        missing: Vec<(u32, u32)>,
    ) -> Result<(), TransferError> {
        let mut last = 0;
        for (from, until) in &missing {
            if *from < last || from >= until || *until > self.blocks {
                return Err(refused(
                    Reason::Malformed,
                    "blocks that the prompt does not have",
                ));
            }
            last = *until;
        }
        let link = Link {
            sender,
            missing: missing.into(),
            ended: false,
            last_said: Instant::now(),
        };
        if let Some(before) = self.link.replace(link) {
            before.sender.close();
        }
        Ok(())
    }

    /// Copies what it can; true if there is more that could be copied at once.
    pub(super) fn pump(
        &mut self,
        table: Option<&BlockTable>,
        device: &mut dyn Device,
        copied: &mut usize,
        metrics: &Metrics,
    ) -> bool {
        let Some(link) = &mut self.link else {
            return false;
        };
        let published = table.map_or(0, |table| table.hashes().len());
        let blocks = table.map_or(&[][..], BlockTable::blocks);
        let bytes = device.block_bytes() as u64;
        while let Some(next) = link.next().filter(|next| (*next as usize) < published) {
            if *copied >= COPIED_MAX {
                return true;
            }
            let block = blocks[next as usize];
            if !link
                .sender
                .put(next, &mut |to| device.read_block(block, to))
            {
                break;
            }
            link.sent();
            *copied += 1;
            link.last_said = Instant::now();
            metrics
                .transfers
                .bytes_sent(link.sender.medium())
                .inc_by(bytes);
        }
        if let (Stage::Held(_, end), None, false) = (&self.stage, link.next(), link.ended) {
            link.sender.end(end);
            link.ended = true;
        } else if !link.ended && link.last_said.elapsed() >= ALIVE_EVERY {
            link.sender.alive();
            link.last_said = Instant::now();
        }
        false
    }
}
