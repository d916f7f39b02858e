//! The disk tier, as the step loop sees it: what is there, what is on its way, and nothing to wait
//! for.
//!
//! The loop hands a block over with its bytes, or asks for one, and looks now and then at what has
//! come of it; a thread of its own does the rest. Buffers are few and all made at the
//! start: where none is left, a block is not written, and one that is asked for is asked for again.
//! A block is told to be there once it is written, and gone as soon as its place is given away.
//!
//! Blocks stay on the disk when they are read: writing them again would cost more than their place.

mod buffer;
mod files;
mod format;
mod worker;

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use cache_index::block::BlockHash;

pub use files::{DiskError, Scope, wipe};
pub use format::Identity;

use super::index::{Kept, Slot, TierIndex};
use super::{Tier, TierChange, runs};
use crate::kv::pool::Change;
use crate::kv::prefix::LastUse;
use buffer::Buffer;
pub(crate) use files::Drive;
use files::{Files, Found};
pub(crate) use format::Entry;
use format::{Head, slot_bytes};
use worker::{Done, Outcome, Request, Worker};

/// Memory for blocks on their way to or from the disk.
pub const BUFFER_BYTES: usize = 64 << 20;
/// How many buffers there are: at most a step's worth, and at least enough to read and write.
const BUFFERS: std::ops::RangeInclusive<usize> = 8..=256;
/// After the drive said that it is full, so many blocks take places that others have, and no new ones.
const FULL_FOR: u32 = 64;

/// What came of the drive's work, since it was last asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DiskMoved {
    /// Blocks written.
    pub stored: u64,
    /// Blocks that had to make room.
    pub evicted: u64,
    /// Blocks that the drive was too busy or too full to take.
    pub dropped: u64,
    /// Blocks read.
    pub read: u64,
    /// Blocks whose bytes were not those that were written.
    pub damaged: u64,
    /// Reads and writes that failed.
    pub failed: u64,
}

/// The disk tier.
#[derive(Debug)]
pub struct Disk {
    index: TierIndex,
    writing: HashMap<BlockHash, (Slot, Kept)>,
    reading: HashSet<BlockHash>,
    /// None once it ends.
    requests: Option<SyncSender<Request>>,
    done: Receiver<Done>,
    spare: Vec<Buffer>,
    buffers: usize,
    capacity: usize,
    body_bytes: usize,
    stamp: u64,
    /// Slots that the drive has given room to.
    written: Vec<bool>,
    full_for: u32,
    changes: Vec<TierChange>,
    moved: DiskMoved,
    thread: Option<JoinHandle<()>>,
}

/// A block that came from the disk.
#[derive(Debug)]
pub struct Arrived {
    pub(super) kept: Kept,
    buffer: Buffer,
    pub(super) ms: f64,
}

impl Arrived {
    /// Which it is.
    pub fn kept(&self) -> &Kept {
        &self.kept
    }

    /// Its bytes.
    pub fn body(&self, body_bytes: usize) -> &[u8] {
        &self.buffer.bytes()[..body_bytes]
    }
}

impl Disk {
    /// Opens a folder of at most `size` bytes, with what an earlier life of this node left there.
    pub fn open(
        dir: &Path,
        size: u64,
        identity: Identity,
        body_bytes: usize,
    ) -> Result<Disk, DiskError> {
        let head = Head {
            identity,
            body_bytes,
        };
        let Found {
            files,
            slots,
            entries,
            direct,
        } = Files::open(dir, head, size)?;
        let disk = Self::start(files, slots, entries, body_bytes);
        let disk = disk.map_err(|source| DiskError::Io {
            what: "start a thread for",
            path: dir.to_owned(),
            source,
        })?;
        tracing::info!(
            dir = %dir.display(),
            slots,
            blocks = disk.index.len(),
            direct_io = direct,
            "disk tier"
        );
        Ok(disk)
    }

    /// Starts the thread over a drive with these blocks on it.
    pub(crate) fn start(
        drive: impl Drive + 'static,
        slots: usize,
        mut entries: Vec<(Slot, Entry)>,
        body_bytes: usize,
    ) -> std::io::Result<Disk> {
        let capacity = slots;
        let mut worker = Worker {
            drive,
            body_bytes,
            slots: vec![None; slots],
        };
        // Of two slots with the same block the later counts.
        entries.sort_by_key(|(_, entry)| std::cmp::Reverse(entry.stamp));
        let stamp = entries.first().map_or(0, |(_, entry)| entry.stamp);
        let mut held = HashMap::new();
        let mut written = vec![false; slots];
        for (slot, entry) in entries {
            written[slot.0 as usize] = true;
            let hash = entry.stored.content.hash;
            worker.slots[slot.0 as usize] = Some((hash, entry.sum));
            let last_use = LastUse {
                wanted_ms: 0,
                tick: entry.stamp,
            };
            held.entry(hash).or_insert((
                slot,
                Kept {
                    stored: entry.stored,
                    depth: entry.depth,
                    last_use,
                },
            ));
        }
        let (index, changes) = index_of(slots, held);
        let buffers = (BUFFER_BYTES / body_bytes.max(1)).clamp(*BUFFERS.start(), *BUFFERS.end());
        let (requests, inbox) = sync_channel(buffers);
        let (outbox, done) = sync_channel(buffers);
        let thread = std::thread::Builder::new()
            .name("kv-disk".into())
            .spawn(move || worker.run(&inbox, &outbox))?;
        let spare = (0..buffers).map(|_| Buffer::new(slot_bytes(body_bytes)));
        Ok(Disk {
            index,
            writing: HashMap::new(),
            reading: HashSet::new(),
            requests: Some(requests),
            done,
            spare: spare.collect(),
            buffers,
            capacity,
            body_bytes,
            stamp,
            written,
            full_for: 0,
            changes,
            moved: DiskMoved::default(),
            thread: Some(thread),
        })
    }

    /// Blocks that it has room for.
    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    pub(super) fn index(&self) -> &TierIndex {
        &self.index
    }

    /// Whether a block is there or on its way there; counts as a use.
    pub(super) fn touch(&mut self, hash: BlockHash, last_use: LastUse) -> bool {
        self.index.touch(hash, last_use) || self.writing.contains_key(&hash)
    }

    /// Whether a block is there or on its way there.
    pub(super) fn knows(&self, hash: BlockHash) -> bool {
        self.index.find(hash).is_some() || self.writing.contains_key(&hash)
    }

    /// Whether a block is on its way from there.
    pub(super) fn is_reading(&self, hash: BlockHash) -> bool {
        self.reading.contains(&hash)
    }

    /// Whether anything is on its way.
    pub fn is_busy(&self) -> bool {
        self.spare.len() < self.buffers
    }

    /// Has a block written, if the drive can take it now; `fill` gives its bytes. False if not.
    pub fn write(&mut self, kept: &Kept, fill: impl FnOnce(&mut [u8])) -> bool {
        // Half of the buffers are for reading: somebody waits for those.
        let busy = self.spare.len() <= self.buffers / 2;
        if busy || !Entry::fits(&kept.stored) {
            self.moved.dropped += 1;
            return false;
        }
        // Before room is made: what the block hangs on must not have to go for it.
        if let Some(parent) = kept.stored.parent_hash {
            self.index.adopt(parent);
        }
        let sent = self.send(kept, fill);
        self.moved.dropped += u64::from(!sent);
        if let Some(parent) = kept.stored.parent_hash.filter(|_| !sent) {
            self.index.disown(parent);
        }
        sent
    }

    fn send(&mut self, kept: &Kept, fill: impl FnOnce(&mut [u8])) -> bool {
        let Some(slot) = self.free_slot() else {
            return false;
        };
        let Some((requests, mut buffer)) = self.requests.as_ref().zip(self.spare.pop()) else {
            self.index.free(slot);
            return false;
        };
        fill(&mut buffer.bytes_mut()[..self.body_bytes]);
        self.stamp += 1;
        let entry = Box::new(Entry {
            stored: kept.stored.clone(),
            depth: kept.depth,
            stamp: self.stamp,
            sum: [0; 16],
        });
        let request = Request::Write {
            slot,
            entry,
            buffer,
        };
        // A place for every buffer: it fails only once the thread has ended.
        let sent = requests.try_send(request).is_ok();
        if sent {
            let hash = kept.stored.content.hash;
            self.writing.insert(hash, (slot, kept.clone()));
        }
        sent
    }

    fn free_slot(&mut self) -> Option<Slot> {
        let grows = self.full_for == 0;
        self.full_for = self.full_for.saturating_sub(1);
        let written = &self.written;
        let has_room = |slot: Slot| grows || written[slot.0 as usize];
        if let Some(slot) = self.index.reserve_if(has_room) {
            return Some(slot);
        }
        let (slot, gone) = self.index.evict()?;
        self.moved.evicted += 1;
        self.changed(Change::Removed(gone.stored.content.hash));
        Some(slot)
    }

    /// Asks for leading blocks of a chain, as many as there are buffers. False if none of them is
    /// on its way.
    pub fn read(&mut self, chain: &[BlockHash]) -> bool {
        let mut coming = false;
        for hash in chain {
            if self.reading.contains(hash) {
                coming = true;
                continue;
            }
            let (Some(slot), Some(requests)) = (self.index.find(*hash), &self.requests) else {
                break;
            };
            let Some(buffer) = self.spare.pop() else {
                break;
            };
            let hash = *hash;
            let sent = requests.try_send(Request::Read { slot, hash, buffer });
            if sent.is_err() {
                break;
            }
            self.reading.insert(hash);
            coming = true;
        }
        coming
    }

    /// Takes note of what the drive has done; hands out what it read.
    pub fn poll(&mut self) -> Vec<Arrived> {
        let mut arrived = Vec::new();
        while let Ok(done) = self.done.try_recv() {
            arrived.extend(self.settle(done));
        }
        arrived
    }

    fn settle(&mut self, done: Done) -> Option<Arrived> {
        let Done {
            hash,
            buffer,
            ms,
            outcome,
        } = done;
        match outcome {
            Outcome::Written | Outcome::NotWritten { .. } => {
                self.spare.push(buffer);
                let (slot, kept) = self.writing.remove(&hash)?;
                self.settle_write(slot, kept, outcome);
                None
            }
            Outcome::Read => {
                self.reading.remove(&hash);
                let kept = self.index.get(hash).cloned();
                let Some(kept) = kept else {
                    // Its place was given away meanwhile.
                    self.spare.push(buffer);
                    return None;
                };
                self.moved.read += 1;
                Some(Arrived { kept, buffer, ms })
            }
            Outcome::Damaged | Outcome::NotRead => {
                self.spare.push(buffer);
                self.reading.remove(&hash);
                self.moved.damaged += u64::from(outcome == Outcome::Damaged);
                self.moved.failed += u64::from(outcome == Outcome::NotRead);
                let (slot, _) = self.index.remove(hash)?;
                self.index.free(slot);
                self.changed(Change::Removed(hash));
                None
            }
        }
    }

    fn settle_write(&mut self, slot: Slot, kept: Kept, outcome: Outcome) {
        let parent = kept.stored.parent_hash;
        if let Some(parent) = parent {
            self.index.disown(parent);
        }
        // What it hangs on may have failed to be written, or been found damaged.
        let leads_here = parent.is_none_or(|parent| self.index.find(parent).is_some());
        self.written[slot.0 as usize] |= outcome == Outcome::Written;
        if outcome != Outcome::Written || !leads_here {
            self.moved.failed += 1;
            if outcome == (Outcome::NotWritten { full: true }) {
                if self.full_for == 0 {
                    tracing::warn!(
                        "the disk of the KV tier has less room than --kv-disk-size: what it has makes room"
                    );
                }
                self.full_for = FULL_FOR;
            }
            if self.written[slot.0 as usize] {
                self.index.free(slot);
            } else {
                self.index.free_last(slot);
            }
            return;
        }
        self.moved.stored += 1;
        self.changed(Change::Stored(kept.stored.clone()));
        self.index.place(slot, kept);
    }

    /// Gives a buffer back.
    pub fn give_back(&mut self, arrived: Arrived) {
        self.spare.push(arrived.buffer);
    }

    fn changed(&mut self, change: Change) {
        let tier = Tier::Disk;
        self.changes.push(TierChange { tier, change });
    }

    pub(super) fn take_changes(&mut self) -> Vec<TierChange> {
        std::mem::take(&mut self.changes)
    }

    /// What the drive did since the last call.
    pub fn take_moved(&mut self) -> DiskMoved {
        std::mem::take(&mut self.moved)
    }
}

/// What is accepted for writing is written before the node ends.
impl Drop for Disk {
    fn drop(&mut self) {
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            // The answers have room for all buffers, so the thread does not wait for a reader. A
            // panic of it has been reported where it happened.
            let _ = thread.join();
        }
    }
}

/// The blocks that a chain leads to, and the news of them. Others are of no use before somebody
/// computes what they hang on; their slots are given away first.
fn index_of(
    slots: usize,
    mut held: HashMap<BlockHash, (Slot, Kept)>,
) -> (TierIndex, Vec<TierChange>) {
    let all = held.iter().map(|(hash, (_, kept))| (*hash, &kept.stored));
    let runs = runs::of(
        &HashSet::new(),
        all.map(|(hash, stored)| (hash, stored, Tier::Disk)),
    );
    let reached: HashSet<_> = runs
        .iter()
        .flat_map(|(_, run)| run.iter().map(|stored| stored.content.hash))
        .collect();
    held.retain(|hash, _| reached.contains(hash));
    let index = TierIndex::with(slots, held.into_values());
    let changes = runs.into_iter().flat_map(|(tier, run)| {
        run.into_iter().map(move |stored| TierChange {
            tier,
            change: Change::Stored(stored),
        })
    });
    (index, changes.collect())
}

#[cfg(test)]
mod tests;
