//! Blocks within frames: between hosts.
//!
//! The sender's places are buffers that are free again once they are written to the socket; the socket's
//! own flow control holds the sender back. Several connections take blocks from the same window.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::wire::{BLOCK, Head, Reader, Writer};
use super::{Inlet, Medium, Payload, TransferError, Window, window_places};

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
    body_bytes: usize,
}

impl Buffers {
    /// For blocks of this size.
    pub fn new(body_bytes: usize) -> Self {
        let count = window_places(body_bytes);
        Self {
            free: Mutex::new((0..count as u32).rev().collect()),
            // Memory only for those that are used.
            places: (0..count).map(|_| Mutex::default()).collect(),
            body_bytes,
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

    fn fill(&self, place: u32, fill: &mut dyn FnMut(&mut [u8])) {
        let mut buffer = lock(&self.places[place as usize]);
        buffer.resize(self.body_bytes, 0);
        fill(&mut buffer);
    }

    fn send(&self, place: u32, block: u32, to: &mut Writer) -> io::Result<()> {
        let mut buffer = lock(&self.places[place as usize]);
        let sent = to.write(BLOCK, &block.to_le_bytes(), &mut buffer);
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
    body_bytes: usize,
}

#[derive(Debug)]
struct Shelf {
    spare: Mutex<(usize, Vec<Vec<u8>>)>,
    returned: Condvar,
}

impl Spare {
    /// For blocks of this size.
    pub fn new(body_bytes: usize) -> Self {
        let shelf = Shelf {
            spare: Mutex::new((window_places(body_bytes), Vec::new())),
            returned: Condvar::new(),
        };
        Self {
            shelf: Arc::new(shelf),
            body_bytes,
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
        let bytes = spare.1.pop().unwrap_or_else(|| vec![0; self.body_bytes]);
        Ok(Buffer {
            bytes,
            shelf: Arc::clone(&self.shelf),
        })
    }
}

/// A block in a buffer of its own.
#[derive(Debug)]
struct Buffer {
    bytes: Vec<u8>,
    shelf: Arc<Shelf>,
}

impl Payload for Buffer {
    fn bytes(&self) -> &[u8] {
        &self.bytes
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
    ) -> Result<(u32, Box<dyn Payload>), TransferError> {
        if head.kind != BLOCK {
            return Err(TransferError::Malformed("a block that came another way"));
        }
        let mut buffer = self.take(wanted)?;
        let mut block = [0; 4];
        from.body_into(head, &mut block, &mut buffer.bytes)?;
        Ok((u32::from_le_bytes(block), Box::new(buffer)))
    }
}
