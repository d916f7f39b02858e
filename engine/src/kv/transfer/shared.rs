//! Parts of blocks through memory that two nodes of one host map.
//!
//! The receiver makes the memory, a file without a name that can neither shrink nor grow, and passes it
//! over the Unix socket. Its places belong to the sender at first; a frame says which part lies in which
//! place, and one back says that a place is free again. So a block is copied twice: out of the one pool,
//! into the other.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::part::{NOTE_BYTES, Part};
use super::wire::{Head, PLACED, Reader, Writer};
use super::{Inlet, Medium, Payload, TransferError, Window, window_places};
use crate::kv::layout::BlockLayout;
use crate::sys::shared::{SharedMemory, receive_file, send_file};

/// Bytes of a frame's note: which part, and where.
const PLACED_BYTES: usize = NOTE_BYTES + 4;

/// The receiver's end.
#[derive(Debug)]
pub struct Region {
    memory: Arc<SharedMemory>,
    layout: BlockLayout,
    places: u32,
    /// Places that are free again; there is room for all.
    freed: SyncSender<u32>,
    /// Which places hold a part that has not been given back.
    held: Arc<Mutex<Vec<bool>>>,
}

impl Region {
    /// Memory for blocks of this layout. Places that are free again are told to `freed`, which must have
    /// room for [`window_places`] of them.
    pub fn new(layout: BlockLayout, freed: SyncSender<u32>) -> io::Result<Self> {
        let places = window_places(layout.body_bytes());
        Ok(Self {
            memory: Arc::new(SharedMemory::create(places * layout.body_bytes())?),
            layout,
            places: places as u32,
            freed,
            held: Arc::new(Mutex::new(vec![false; places])),
        })
    }

    /// How many places there are.
    pub fn places(&self) -> u32 {
        self.places
    }

    /// Gives the memory to the node at the other end.
    pub fn pass(&self, over: &UnixStream) -> io::Result<()> {
        send_file(over, self.memory.file())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing under these locks can panic half-way.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A part in shared memory.
#[derive(Debug)]
struct Placed {
    memory: Arc<SharedMemory>,
    at: usize,
    bytes: usize,
    place: u32,
    freed: SyncSender<u32>,
    held: Arc<Mutex<Vec<bool>>>,
}

impl Payload for Placed {
    fn bytes(&self) -> &[u8] {
        self.memory.read(self.at, self.bytes)
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        lock(&self.held)[self.place as usize] = false;
        // There is room for all places; whoever listened may be gone.
        let _ = self.freed.try_send(self.place);
    }
}

impl Inlet for Region {
    fn receive(
        &self,
        head: Head,
        from: &mut Reader,
        _wanted: &dyn Fn() -> bool,
    ) -> Result<(Part, Box<dyn Payload>), TransferError> {
        if head.kind != PLACED {
            return Err(TransferError::Malformed("a part that came another way"));
        }
        let (mut note, mut placed) = ([0; NOTE_BYTES], [0; PLACED_BYTES]);
        from.body_into(head, &mut placed, &mut [])?;
        let (which, place) = placed.split_at(NOTE_BYTES);
        note.copy_from_slice(which);
        let part = Part::from_note(note);
        let bytes = part.bytes(&self.layout)?;
        let place = place
            .iter()
            .rev()
            .fold(0, |place, byte| place << 8 | u32::from(*byte));
        let mut held = lock(&self.held);
        match held.get_mut(place as usize) {
            Some(held) if !*held => *held = true,
            _ => return Err(TransferError::Malformed("a place that is not the sender's")),
        }
        let placed = Placed {
            memory: Arc::clone(&self.memory),
            at: place as usize * self.layout.body_bytes(),
            bytes,
            place,
            freed: self.freed.clone(),
            held: Arc::clone(&self.held),
        };
        Ok((part, Box::new(placed)))
    }
}

/// The sender's end.
#[derive(Debug)]
pub struct Places {
    memory: SharedMemory,
    body_bytes: usize,
    /// Which are free, and which the receiver has.
    state: Mutex<(Vec<u32>, Vec<bool>)>,
}

impl Places {
    /// Takes the memory that comes over the socket: so many places for blocks of this size.
    pub fn receive(over: &UnixStream, places: u32, body_bytes: usize) -> io::Result<Self> {
        let file: OwnedFd = receive_file(over)?;
        let count = places as usize;
        if !(1..=window_places(body_bytes)).contains(&count) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Ok(Self {
            memory: SharedMemory::open(file, count * body_bytes)?,
            body_bytes,
            state: Mutex::new(((0..places).rev().collect(), vec![false; count])),
        })
    }
}

impl Window for Places {
    fn medium(&self) -> Medium {
        Medium::Shared
    }

    fn take(&self) -> Option<u32> {
        lock(&self.state).0.pop()
    }

    fn fill(&self, place: u32, bytes: usize, fill: &mut dyn FnMut(&mut [u8])) {
        let at = place as usize * self.body_bytes;
        self.memory.write(at, bytes, fill);
    }

    fn send(&self, place: u32, part: Part, to: &mut Writer) -> io::Result<()> {
        lock(&self.state).1[place as usize] = true;
        let mut placed = [0; PLACED_BYTES];
        placed[..NOTE_BYTES].copy_from_slice(&part.to_note());
        placed[NOTE_BYTES..].copy_from_slice(&place.to_le_bytes());
        to.write(PLACED, &placed, &mut [])
    }

    fn has_room(&self) -> bool {
        let (free, sent) = &*lock(&self.state);
        4 * free.len() >= sent.len()
    }

    fn give_back(&self, place: u32) -> bool {
        let mut state = lock(&self.state);
        let (free, sent) = &mut *state;
        match sent.get_mut(place as usize) {
            Some(sent) if *sent => {
                *sent = false;
                free.push(place);
                true
            }
            _ => false,
        }
    }
}
