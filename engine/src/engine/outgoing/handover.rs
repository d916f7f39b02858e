//! One handover: what it is, and how far its blocks are on their way.
//!
//! What a pass computes goes out while it does: layer after layer of the blocks that it completes, as far
//! as the window has room. What is left of them, and blocks that were there before, go out whole, within
//! passes and between them.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::refused;
use super::runs::Runs;
use crate::engine::job::TicketId;
use crate::kv::table::BlockTable;
use crate::kv::transfer::part::{Layers, Part};
use crate::kv::transfer::sender::Sender;
use crate::kv::transfer::{End, Reason, TransferError};
use crate::metrics::TransferMetrics;
use crate::model::BlockId;

/// How often a receiver hears that its prompt is still being computed.
const ALIVE_EVERY: Duration = Duration::from_millis(500);
/// Layers wait for others until they are so many bytes, but for the last: a frame, and waking who sends
/// it, cost about as much as copying that.
const STREAMED_BYTES_MIN: usize = 64 << 10;

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
    /// Blocks to send of which nothing has been sent.
    missing: Runs,
    streams: Vec<Stream>,
    /// The last pass whose blocks are among them.
    pass: u64,
    pub(super) ended: bool,
    last_said: Instant,
}

/// Blocks whose layers go out as they are computed; in no more layers than a place has room for, all
/// blocks together.
#[derive(Debug)]
struct Stream {
    /// The pass that completes them. If its request then loses its blocks, they go on once they are
    /// computed again, to the same bits.
    pass: u64,
    blocks: Range<u32>,
    /// Layers that have been sent.
    layers: usize,
}

/// Copies layers of a block out.
pub(in crate::engine) type Read<'a> = dyn FnMut(BlockId, Range<usize>, &mut [u8]) + 'a;

/// Where blocks are copied from.
pub(in crate::engine) struct Source<'a> {
    /// Layers of the model.
    pub(in crate::engine) layers: usize,
    /// Bytes of one layer of a block.
    pub(in crate::engine) layer_bytes: usize,
    /// Copies layers of a block out.
    pub(in crate::engine) read: &'a mut Read<'a>,
    /// Whole blocks that may still be copied.
    pub(in crate::engine) left: &'a mut usize,
    /// Whether a pass is under way.
    pub(in crate::engine) within_pass: bool,
    /// Where the bytes are counted.
    pub(in crate::engine) metrics: &'a TransferMetrics,
}

impl Source<'_> {
    /// Hands a part of these blocks over, if there is room.
    fn put(&mut self, sender: &Sender, part: Part, table: &[BlockId]) -> bool {
        let each = part.layer_range().len() * self.layer_bytes;
        let blocks = &table[part.numbers()];
        let bytes = blocks.len() * each;
        let put = sender.put(part, bytes, &mut |to| {
            // Nothing of devices whose blocks cannot be copied.
            for (block, to) in blocks.iter().zip(to.chunks_exact_mut(each.max(1))) {
                (self.read)(*block, part.layer_range(), to);
            }
        });
        if put {
            let counter = self.metrics.bytes_sent(sender.medium());
            counter.inc_by(bytes as u64);
            if self.within_pass {
                self.metrics.bytes_streamed.inc_by(bytes as u64);
            }
        }
        put
    }
}

impl Link {
    /// Sends layers of the blocks that go out so: all of those that the table has whole, and so many of
    /// those that this pass is at.
    fn stream(
        &mut self,
        table: &BlockTable,
        (pass, computed): (u64, usize),
        source: &mut Source<'_>,
    ) {
        let published = table.hashes().len();
        let (sender, all) = (&self.sender, source.layers);
        let mut has_room = true;
        for stream in &mut self.streams {
            let count = stream.blocks.len();
            let is_whole = stream.blocks.end as usize <= published;
            let computed = match stream.pass == pass {
                _ if is_whole => all,
                true => computed,
                false => 0,
            };
            while has_room && stream.layers < computed {
                let layers = (computed - stream.layers).min(all / count);
                if computed < all && count * layers * source.layer_bytes < STREAMED_BYTES_MIN {
                    break;
                }
                let part = Part {
                    first: stream.blocks.start,
                    blocks: count as u16,
                    layer: stream.layers as u16,
                    layers: layers as u16,
                };
                has_room = source.put(sender, part, table.blocks());
                if has_room {
                    stream.layers += layers;
                    self.last_said = Instant::now();
                }
            }
        }
        self.streams.retain(|stream| stream.layers < all);
    }

    /// Whether everything has been sent.
    fn has_all(&self) -> bool {
        self.missing.first().is_none() && self.streams.is_empty()
    }
}

impl Out {
    pub(super) fn link(
        &mut self,
        sender: Arc<Sender>,
        missing: &[(u32, u32)],
    ) -> Result<(), TransferError> {
        let wrong = || refused(Reason::Malformed, "blocks that the prompt does not have");
        let link = Link {
            sender,
            missing: Runs::new(missing, self.blocks).ok_or_else(wrong)?,
            streams: Vec::new(),
            pass: 0,
            ended: false,
            last_said: Instant::now(),
        };
        if let Some(before) = self.link.replace(link) {
            before.sender.close();
        }
        Ok(())
    }

    /// This pass completes the blocks up to this one: they go out as they are computed.
    pub(super) fn begin_streams(
        &mut self,
        pass: u64,
        table: &BlockTable,
        upto: usize,
        layers: usize,
    ) {
        let Some(link) = &mut self.link else {
            return;
        };
        if link.pass == pass || layers > Layers::MAX {
            return;
        }
        link.pass = pass;
        let upto = u32::try_from(upto).unwrap_or(u32::MAX).min(self.blocks);
        let published = u32::try_from(table.hashes().len()).unwrap_or(u32::MAX);
        for run in link.missing.take(published..upto) {
            let starts = run.clone().step_by(layers);
            link.streams.extend(starts.map(|start| Stream {
                pass,
                blocks: start..run.end.min(start + layers as u32),
                layers: 0,
            }));
        }
    }

    /// Copies what it can of this pass, which has computed so many layers, and of earlier ones.
    pub(super) fn stream(&mut self, table: &BlockTable, at: (u64, usize), source: &mut Source<'_>) {
        if let Some(link) = &mut self.link {
            link.stream(table, at, source);
        }
    }

    /// Copies whole blocks, as far as it can; true if there are more that could be copied at once.
    pub(super) fn pump(&mut self, table: Option<&BlockTable>, source: &mut Source<'_>) -> bool {
        let Some(link) = &mut self.link else {
            return false;
        };
        if let Some(table) = table {
            let published = table.hashes().len();
            while let Some(next) = link
                .missing
                .first()
                .filter(|next| (*next as usize) < published)
            {
                if *source.left == 0 {
                    return true;
                }
                let part = Part::block(next, source.layers);
                if !source.put(&link.sender, part, table.blocks()) {
                    break;
                }
                link.missing.pop_first();
                *source.left -= 1;
                link.last_said = Instant::now();
            }
        }
        match &self.stage {
            Stage::Held(_, end) if link.has_all() && !link.ended => {
                link.sender.end(end);
                link.ended = true;
            }
            _ if !link.ended && link.last_said.elapsed() >= ALIVE_EVERY => {
                link.sender.alive();
                link.last_said = Instant::now();
            }
            Stage::Held(..) | Stage::Computing(_) => {}
        }
        false
    }
}
