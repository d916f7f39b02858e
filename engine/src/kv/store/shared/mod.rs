//! The shared tier, as the step loop sees it: blocks in a store that other nodes use too.
//!
//! As with the disk the loop hands a block over with its bytes, or asks for one, looks now and then at
//! what has come of it, and waits for nothing; a thread of its own (`worker`) does the rest. Other than of
//! the disk, nobody here knows what the store holds: others put and evict there. So a chain is *asked*
//! for first, and the answer believed for a few seconds.
//!
//! What was put or came from there is *told*, as far as the list of it goes; what turns out to be gone,
//! damaged or forged is taken back, and so is everything when the store is lost. Blocks stay there when
//! they are read.
//!
//! Left out on purpose: trust. A store has no idea who may read or write it; see `value` for what keeps
//! others' bytes out, and `docs/kv-tiers.md` for what does not.

pub mod mooncake;
pub mod objects;
mod recent;
mod value;
mod worker;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cache_index::block::BlockHash;

pub use value::Seal;

use super::index::{Kept, TierIndex};
use super::{Tier, TierChange};
use crate::kv::pool::Change;
use objects::{Objects, Put};
use recent::Recent;
use worker::{Done, Fetched, Parcel, Request, Status, Worker};

/// Memory for blocks on their way to or from the store.
pub const BUFFER_BYTES: usize = 64 << 20;
/// How many buffers there are: at most a step's worth, and at least enough to read and write.
const BUFFERS: std::ops::RangeInclusive<usize> = 8..=256;
/// Questions on their way.
const ASKS_MAX: usize = 64;
/// A question without an answer for so long says that the store is behind: nobody else waits for it.
/// Ten batches of the default model's blocks take less over a gigabit link.
const BEHIND: Duration = Duration::from_millis(500);
/// Blocks that are told at most: a million tokens; what was used least goes from the list first. The list
/// takes 200 bytes for each.
const TOLD_MAX: usize = 1 << 16;
/// A shorter rest of a chain is not asked for: computing it is one small step.
const ASK_BLOCKS_MIN: usize = 2;
/// Of a longer rest the beginning is asked for first: the answer takes some milliseconds.
const ASK_BLOCKS_MAX: usize = 1024;

/// What came of it, since it was last asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SharedMoved {
    /// Blocks put.
    pub stored: u64,
    /// Blocks that the store had no room for.
    pub no_room: u64,
    /// Blocks that were not put because the store was away or too busy.
    pub dropped: u64,
    /// Blocks that came.
    pub read: u64,
    /// Blocks that were there when the store was asked, and not when they were fetched.
    pub missed: u64,
    /// Objects that were not the blocks that they should have been.
    pub damaged: u64,
    /// Blocks that the store failed to give or to take.
    pub failed: u64,
    /// Milliseconds that putting took.
    pub put_ms: f64,
    /// Milliseconds that fetching took.
    pub get_ms: f64,
}

/// The shared tier.
#[derive(Debug)]
pub struct SharedTier {
    seal: Seal,
    told: TierIndex,
    putting: HashMap<BlockHash, Kept>,
    getting: HashMap<BlockHash, Kept>,
    /// Questions without an answer, by their first block.
    asking: HashMap<BlockHash, Instant>,
    recent: Recent,
    /// None once it ends.
    requests: Option<SyncSender<Request>>,
    done: Receiver<Done>,
    spare: Vec<Vec<u8>>,
    buffers: usize,
    status: Arc<Status>,
    losses: u32,
    changes: Vec<TierChange>,
    moved: SharedMoved,
    thread: Option<JoinHandle<()>>,
}

/// A block that came from the store.
pub(super) struct Arrived {
    pub(super) kept: Kept,
    buffer: Vec<u8>,
    body: Range<usize>,
    pub(super) ms: f64,
}

impl Arrived {
    pub(super) fn body(&self) -> &[u8] {
        &self.buffer[self.body.clone()]
    }
}

impl SharedTier {
    /// Starts the thread. `connect` makes what reaches the store, for objects of so many bytes; it gets a
    /// flag that cuts every wait short.
    pub fn start(
        seal: Seal,
        connect: impl FnOnce(usize, Arc<AtomicBool>) -> std::io::Result<Box<dyn Objects>>,
    ) -> std::io::Result<Self> {
        let object_bytes = seal.object_bytes();
        let buffers = (BUFFER_BYTES / object_bytes).clamp(*BUFFERS.start(), *BUFFERS.end());
        let (requests, inbox) = sync_channel(buffers + ASKS_MAX);
        let (outbox, done) = sync_channel(buffers + ASKS_MAX);
        let status = Arc::new(Status::default());
        let worker = Worker {
            objects: connect(object_bytes, Arc::clone(&status.ends))?,
            seal: seal.clone(),
            status: Arc::clone(&status),
        };
        let thread = std::thread::Builder::new()
            .name("kv-shared".into())
            .spawn(move || worker.run(&inbox, &outbox))?;
        Ok(Self {
            seal,
            told: TierIndex::new(TOLD_MAX),
            putting: HashMap::new(),
            getting: HashMap::new(),
            asking: HashMap::new(),
            recent: Recent::default(),
            requests: Some(requests),
            done,
            spare: (0..buffers).map(|_| vec![0; object_bytes]).collect(),
            buffers,
            status,
            losses: 0,
            changes: Vec::new(),
            moved: SharedMoved::default(),
            thread: Some(thread),
        })
    }

    /// Whether the store is reached.
    pub fn is_up(&self) -> bool {
        self.requests.is_some() && self.status.up.load(Ordering::Relaxed)
    }

    /// Blocks that are told to be there.
    pub fn told_blocks(&self) -> usize {
        self.told.len()
    }

    /// What is told to be there.
    pub(super) fn told(&self) -> &TierIndex {
        &self.told
    }

    /// Whether anything is on its way.
    pub(super) fn is_busy(&self) -> bool {
        !(self.putting.is_empty() && self.getting.is_empty() && self.asking.is_empty())
    }

    /// Whether a block is on its way from there.
    pub(super) fn is_getting(&self, hash: BlockHash) -> bool {
        self.getting.contains_key(&hash)
    }

    /// Whether the store has lately said that it has this block.
    pub(super) fn holds(&self, hash: BlockHash, now: Instant) -> bool {
        self.recent.held(hash, now) == Some(true)
    }

    /// Whether it need not be put now: it is there, or on its way.
    pub(super) fn need_not_put(&self, hash: BlockHash, now: Instant) -> bool {
        self.putting.contains_key(&hash) || self.recent.need_not_put(hash, now)
    }

    /// Whether it was there when it was last heard of.
    pub(super) fn knows(&self, hash: BlockHash) -> bool {
        self.told.find(hash).is_some() || self.putting.contains_key(&hash)
    }

    /// Whether a question about a chain that begins with this block has no answer yet.
    pub(super) fn is_asking(&self, first: BlockHash) -> bool {
        self.asking.contains_key(&first)
    }

    /// Whether an answer is on its way that says how much of this chain the store has; asks for it, if
    /// that was not lately said and the store can be asked.
    pub(super) fn ask(&mut self, chain: &[BlockHash], now: Instant) -> bool {
        let Some(first) = chain.first().copied() else {
            return false;
        };
        let late = |since: &Instant| now.saturating_duration_since(*since) >= BEHIND;
        if self.asking.values().any(late) {
            return false;
        }
        if self.asking.contains_key(&first) {
            return true;
        }
        let known = self.recent.held(first, now).is_some();
        let full = self.asking.len() >= ASKS_MAX;
        if known || full || chain.len() < ASK_BLOCKS_MIN || !self.is_up() {
            return false;
        }
        let chain = &chain[..chain.len().min(ASK_BLOCKS_MAX)];
        let sent = self.send(Request::Ask(chain.to_vec())).is_ok();
        if sent {
            self.asking.insert(first, now);
        }
        sent
    }

    /// Asks for a block. False if it is not on its way.
    pub(super) fn get(&mut self, kept: Kept) -> bool {
        let hash = kept.stored.content.hash;
        if self.getting.contains_key(&hash) {
            return true;
        }
        let Some(buffer) = self.spare.pop().filter(|_| self.requests.is_some()) else {
            return false;
        };
        let sent = self.send(Request::Get(Parcel { hash, buffer }));
        if sent.is_ok() {
            self.getting.insert(hash, kept);
        }
        sent.is_ok()
    }

    /// Has a block put, if the store can take it now; `fill` gives its bytes. False if not.
    pub(super) fn put(&mut self, kept: &Kept, fill: impl FnOnce(&mut [u8])) -> bool {
        // Half of the buffers are for reading: somebody waits for those.
        let busy = self.spare.len() <= self.buffers / 2;
        let buffer = if busy || !self.is_up() {
            None
        } else {
            self.spare.pop()
        };
        let Some(mut buffer) = buffer else {
            self.moved.dropped += 1;
            return false;
        };
        fill(self.seal.body_mut(&mut buffer));
        let hash = kept.stored.content.hash;
        let sent = self.send(Request::Put(Parcel { hash, buffer }));
        if sent.is_ok() {
            self.putting.insert(hash, kept.clone());
        }
        sent.is_ok()
    }

    /// A place for every buffer and question: it fails only once the thread has ended.
    fn send(&mut self, request: Request) -> Result<(), ()> {
        let requests = self.requests.as_ref().ok_or(())?;
        requests.try_send(request).map_err(drop)
    }

    /// Takes note of what the store has done; hands out what came. `leads_here` says whether a block can
    /// be found at this node.
    pub(super) fn poll(&mut self, leads_here: &dyn Fn(BlockHash) -> bool) -> Vec<Arrived> {
        let now = Instant::now();
        let mut arrived = Vec::new();
        loop {
            let done = match self.done.try_recv() {
                Ok(done) => done,
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    self.ended();
                    break;
                }
            };
            match done {
                Done::Asked { chain, held } => self.settle_ask(&chain, held, now),
                Done::Got {
                    parcel,
                    ms,
                    outcome,
                } => arrived.extend(self.settle_get(parcel, ms, outcome)),
                Done::Put {
                    parcel,
                    ms,
                    outcome,
                } => self.settle_put(parcel, ms, outcome, leads_here),
            }
        }
        for block in &arrived {
            self.tell(block.kept.clone(), leads_here);
        }
        // After the answers that came of the loss: they say nothing of the store.
        let losses = self.status.losses.load(Ordering::Relaxed);
        if losses != self.losses {
            self.losses = losses;
            self.lost();
        }
        arrived
    }

    /// The thread is gone, which only a bug can bring about: as if there were no store.
    fn ended(&mut self) {
        self.requests = None;
        self.putting.clear();
        self.getting.clear();
        self.asking.clear();
        self.lost();
    }

    /// Nobody knows any more what is there, and nothing can be had.
    fn lost(&mut self) {
        let told = std::mem::replace(&mut self.told, TierIndex::new(TOLD_MAX));
        for stored in told.all() {
            self.changed(Change::Removed(stored.content.hash));
        }
        self.recent.forget();
    }

    fn settle_ask(&mut self, chain: &[BlockHash], held: Option<usize>, now: Instant) {
        if let Some(first) = chain.first() {
            self.asking.remove(first);
        }
        let Some(held) = held else { return };
        for hash in &chain[..held.min(chain.len())] {
            self.recent.note(*hash, true, now);
        }
        // What comes after it is of no use without it.
        if let Some(missing) = chain.get(held) {
            self.missing(*missing);
        }
    }

    fn settle_get(&mut self, parcel: Parcel, ms: f64, outcome: Fetched) -> Option<Arrived> {
        let Parcel { hash, buffer } = parcel;
        let kept = self.getting.remove(&hash);
        let count = match outcome {
            Fetched::Whole => &mut self.moved.read,
            Fetched::Missing => &mut self.moved.missed,
            Fetched::Damaged => &mut self.moved.damaged,
            Fetched::Failed => &mut self.moved.failed,
        };
        *count += 1;
        match (outcome, kept) {
            (Fetched::Whole, Some(kept)) => {
                self.moved.get_ms += ms;
                let body = self.seal.body_range();
                return Some(Arrived {
                    kept,
                    buffer,
                    body,
                    ms,
                });
            }
            (Fetched::Whole, None) => {}
            (Fetched::Missing | Fetched::Damaged | Fetched::Failed, _) => self.missing(hash),
        }
        self.spare.push(buffer);
        None
    }

    fn settle_put(
        &mut self,
        parcel: Parcel,
        ms: f64,
        outcome: Put,
        leads_here: &dyn Fn(BlockHash) -> bool,
    ) {
        let Parcel { hash, buffer } = parcel;
        self.spare.push(buffer);
        let kept = self.putting.remove(&hash);
        match outcome {
            Put::Stored => {
                self.moved.stored += 1;
                self.moved.put_ms += ms;
                self.recent.note(hash, true, Instant::now());
                if let Some(kept) = kept {
                    self.tell(kept, leads_here);
                }
            }
            Put::NoRoom => self.moved.no_room += 1,
            Put::Failed(_) => self.moved.failed += 1,
        }
    }

    /// Tells that a block is there, if a chain leads to it and it was not told.
    fn tell(&mut self, kept: Kept, leads_here: &dyn Fn(BlockHash) -> bool) {
        let Kept {
            stored, last_use, ..
        } = &kept;
        let parent = stored.parent_hash;
        let reached = parent.is_none_or(|hash| self.told.find(hash).is_some() || leads_here(hash));
        if self.told.touch(stored.content.hash, *last_use) || !reached {
            return;
        }
        if self.told.is_full()
            && let Some((slot, gone)) = self.told.evict()
        {
            self.told.free(slot);
            self.changed(Change::Removed(gone.stored.content.hash));
        }
        let stored = stored.clone();
        if self.told.insert(kept).is_some() {
            self.changed(Change::Stored(stored));
        }
    }

    /// Notes that a block is not there, and takes back what was told of it.
    fn missing(&mut self, hash: BlockHash) {
        self.recent.note(hash, false, Instant::now());
        if let Some((slot, _)) = self.told.remove(hash) {
            self.told.free(slot);
            self.changed(Change::Removed(hash));
        }
    }

    /// Gives a buffer back.
    pub(super) fn give_back(&mut self, arrived: Arrived) {
        self.spare.push(arrived.buffer);
    }

    fn changed(&mut self, change: Change) {
        let tier = Tier::Shared;
        self.changes.push(TierChange { tier, change });
    }

    pub(super) fn take_changes(&mut self) -> Vec<TierChange> {
        std::mem::take(&mut self.changes)
    }

    /// What the store did since the last call.
    pub fn take_moved(&mut self) -> SharedMoved {
        std::mem::take(&mut self.moved)
    }
}

/// Nothing is waited for: what was not put is lost.
impl Drop for SharedTier {
    fn drop(&mut self) {
        self.status.ends.store(true, Ordering::Relaxed);
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            // Its waits are cut short. A panic of it has been reported where it happened.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
