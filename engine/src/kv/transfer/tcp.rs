//! Parts of blocks within frames: between hosts.
//!
//! The sender's places are buffers that are free again once they are written to the socket; the socket's
//! own flow control holds the sender back. Several connections take parts from the same window.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::part::{NOTE_BYTES, Part};
use super::wire::{Head, PART, Reader, Writer};
use super::{Inlet, Medium, Payload, TransferError, Window, window_places};
use crate::kv::layout::BlockLayout;

/// How often a receiver without room looks whether it is still wanted.
const LOOK: Duration = Duration::from_millis(100);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing under these locks can panic half-way.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The sender's buffers.
#[derive(Debug)]
pub struct Buffers {
    free: Mutex<Vec<u32>>,
    places: Vec<Mutex<Vec<u8>>>,
}

impl Buffers {
    /// For blocks of this size.
    pub fn new(body_bytes: usize) -> Self {
        let count = window_places(body_bytes);
        Self {
            free: Mutex::new((0..count as u32).rev().collect()),
            // Memory only for those that are used.
            places: (0..count).map(|_| Mutex::default()).collect(),
        }
    }
}

impl Window for Buffers {
    fn medium(&self) -> Medium {
        Medium::Tcp
    }

    fn take(&self) -> Option<u32> {
        lock(&self.free).pop()
    }

    fn fill(&self, place: u32, bytes: usize, fill: &mut dyn FnMut(&mut [u8])) {
        let mut buffer = lock(&self.places[place as usize]);
        buffer.resize(bytes, 0);
        fill(&mut buffer);
    }

    fn send(&self, place: u32, part: Part, to: &mut Writer) -> io::Result<()> {
        let mut buffer = lock(&self.places[place as usize]);
        let sent = to.write(PART, &part.to_note(), &mut buffer);
        drop(buffer);
        lock(&self.free).push(place);
        sent
    }

    fn has_room(&self) -> bool {
        4 * lock(&self.free).len() >= self.places.len()
    }

    fn give_back(&self, _place: u32) -> bool {
        // They are free once they are sent; nobody may say otherwise.
        false
    }
}

/// The receiver's buffers.
#[derive(Debug)]
pub struct Spare {
    shelf: Arc<Shelf>,
    layout: BlockLayout,
}

#[derive(Debug)]
struct Shelf {
    spare: Mutex<(usize, Vec<Vec<u8>>)>,
    returned: Condvar,
}

impl Spare {
    /// For blocks of this layout.
    pub fn new(layout: BlockLayout) -> Self {
        let shelf = Shelf {
            spare: Mutex::new((window_places(layout.body_bytes()), Vec::new())),
            returned: Condvar::new(),
        };
        Self {
            shelf: Arc::new(shelf),
            layout,
        }
    }

    fn take(&self, wanted: &dyn Fn() -> bool) -> Result<Buffer, TransferError> {
        let mut spare = lock(&self.shelf.spare);
        while spare.0 == 0 {
            if !wanted() {
                return Err(TransferError::Cancelled);
            }
            let waited = self.shelf.returned.wait_timeout(spare, LOOK);
            spare = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        spare.0 -= 1;
        let bytes = spare.1.pop();
        Ok(Buffer {
            bytes: bytes.unwrap_or_else(|| vec![0; self.layout.body_bytes()]),
            used: 0,
            shelf: Arc::clone(&self.shelf),
        })
    }
}

/// A part in a buffer of its own, which has room for a block.
#[derive(Debug)]
struct Buffer {
    bytes: Vec<u8>,
    used: usize,
    shelf: Arc<Shelf>,
}

impl Payload for Buffer {
    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.used]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut spare = lock(&self.shelf.spare);
        spare.0 += 1;
        spare.1.push(std::mem::take(&mut self.bytes));
        drop(spare);
        self.shelf.returned.notify_one();
    }
}

impl Inlet for Spare {
    fn receive(
        &self,
        head: Head,
        from: &mut Reader,
        wanted: &dyn Fn() -> bool,
    ) -> Result<(Part, Box<dyn Payload>), TransferError> {
        if head.kind != PART {
            return Err(TransferError::Malformed("a part that came another way"));
        }
        let mut buffer = self.take(wanted)?;
        let most = NOTE_BYTES + buffer.bytes.len();
        let bytes = head.bytes.min(most).saturating_sub(NOTE_BYTES);
        buffer.used = bytes;
        let mut note = [0; NOTE_BYTES];
        // Refuses what is longer or shorter than that.
        from.body_into(head, &mut note, &mut buffer.bytes[..bytes])?;
        let part = Part::from_note(note);
        if part.bytes(&self.layout)? != bytes {
            return Err(TransferError::Malformed("a part of another size"));
        }
        Ok((part, Box::new(buffer)))
    }
}
