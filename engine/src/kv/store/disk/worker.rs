//! The one thread that touches the drive.
//!
//! It takes requests in order, so that a slot that is read and then given to another block is read
//! before it is written over. It checks every body that it reads against the checksum of the slot's
//! entry, and that the slot holds the block that was asked for; the step loop only copies.

use std::io;
use std::sync::mpsc::{Receiver, SyncSender};
use std::time::Instant;

use cache_index::block::BlockHash;

use super::buffer::Buffer;
use super::files::Drive;
use super::format::{BodySum, ENTRY_BYTES, Entry, body_sum};
use crate::kv::store::index::Slot;

/// What the drive is asked for.
pub(super) enum Request {
    /// Put a block into a slot. The entry's checksum is filled in here.
    Write {
        slot: Slot,
        entry: Box<Entry>,
        buffer: Buffer,
    },
    /// Bring a block.
    Read {
        slot: Slot,
        hash: BlockHash,
        buffer: Buffer,
    },
}

/// What became of it.
pub(super) struct Done {
    pub(super) hash: BlockHash,
    pub(super) buffer: Buffer,
    pub(super) ms: f64,
    pub(super) outcome: Outcome,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Written,
    /// The drive took it not; whether it said that it is full.
    NotWritten {
        full: bool,
    },
    Read,
    /// The bytes are not those that were written.
    Damaged,
    /// The drive gave it not.
    NotRead,
}

pub(super) struct Worker<D> {
    pub(super) drive: D,
    pub(super) body_bytes: usize,
    /// What lies in each slot.
    pub(super) slots: Vec<Option<(BlockHash, BodySum)>>,
}

impl<D: Drive> Worker<D> {
    /// Serves requests until nobody can send any. Nobody waits for room among the answers: there is
    /// a buffer in each request, and no more buffers than places.
    pub(super) fn run(mut self, requests: &Receiver<Request>, done: &SyncSender<Done>) {
        while let Ok(request) = requests.recv() {
            if done.send(self.serve(request)).is_err() {
                return;
            }
        }
    }

    fn serve(&mut self, request: Request) -> Done {
        let started = Instant::now();
        let (hash, buffer, outcome) = match request {
            Request::Write {
                slot,
                mut entry,
                buffer,
            } => {
                entry.sum = body_sum(&buffer.bytes()[..self.body_bytes]);
                let outcome = match self.write(slot, &entry, &buffer) {
                    Ok(()) => Outcome::Written,
                    Err(error) => {
                        tracing::debug!(%error, "a KV block was not written to the disk");
                        let kinds = [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded];
                        Outcome::NotWritten {
                            full: kinds.contains(&error.kind()),
                        }
                    }
                };
                (entry.stored.content.hash, buffer, outcome)
            }
            Request::Read {
                slot,
                hash,
                mut buffer,
            } => {
                let outcome = self.read(slot, hash, &mut buffer);
                (hash, buffer, outcome)
            }
        };
        let ms = started.elapsed().as_secs_f64() * 1e3;
        Done {
            hash,
            buffer,
            ms,
            outcome,
        }
    }

    fn write(&mut self, slot: Slot, entry: &Entry, buffer: &Buffer) -> io::Result<()> {
        let place = &mut self.slots[slot.0 as usize];
        if place.take().is_some() {
            // Else a crash in between would leave the old entry beside the new body.
            self.drive.write_entry(slot, &[0; ENTRY_BYTES])?;
        }
        self.drive.write(slot, buffer.bytes())?;
        self.drive.write_entry(slot, &entry.encode())?;
        *place = Some((entry.stored.content.hash, entry.sum));
        Ok(())
    }

    fn read(&mut self, slot: Slot, hash: BlockHash, buffer: &mut Buffer) -> Outcome {
        let place = &mut self.slots[slot.0 as usize];
        let Some((_, sum)) = place.filter(|(held, _)| *held == hash) else {
            return Outcome::NotRead;
        };
        if let Err(error) = self.drive.read(slot, buffer.bytes_mut()) {
            tracing::warn!(%error, "a KV block could not be read from the disk");
            return Outcome::NotRead;
        }
        if body_sum(&buffer.bytes()[..self.body_bytes]) == sum {
            return Outcome::Read;
        }
        tracing::warn!(%hash, "a KV block on the disk is damaged; it will be computed again");
        *place = None;
        // What cannot be erased is found damaged again.
        let _ = self.drive.write_entry(slot, &[0; ENTRY_BYTES]);
        Outcome::Damaged
    }
}
