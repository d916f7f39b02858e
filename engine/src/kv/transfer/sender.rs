//! What stands between the step loop, which never waits, and the sockets, which do?
//!
//! The loop puts blocks into the window and says what is to be said; threads with a connection each take
//! both out and send them. Where the window is full the loop goes on, and is woken once there is room.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::message::Message;
use super::part::Part;
use super::wire::{Socket, Writer};
use super::{End, Medium, Reason, Window};

/// What one connection is told to send.
#[derive(Debug)]
enum Parcel {
    Part {
        part: Part,
        place: u32,
    },
    Say(Message),
    /// Say it, and close.
    Last(Message),
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Parcel>,
    closed: bool,
    sockets: Vec<Socket>,
}

/// One transfer's way out of this node.
pub struct Sender {
    window: Arc<dyn Window>,
    state: Mutex<State>,
    ready: Condvar,
    /// Whether the step loop found no room.
    starved: AtomicBool,
    wake: Box<dyn Fn() + Send + Sync>,
}

impl std::fmt::Debug for Sender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sender")
            .field("window", &self.window)
            .finish_non_exhaustive()
    }
}

impl Sender {
    /// Over this window. `wake` is called when there is room again; it must not wait.
    pub fn new(window: Arc<dyn Window>, wake: Box<dyn Fn() + Send + Sync>) -> Self {
        Self {
            window,
            state: Mutex::default(),
            ready: Condvar::new(),
            starved: AtomicBool::new(false),
            wake,
        }
    }

    /// What carries the blocks.
    pub fn medium(&self) -> Medium {
        self.window.medium()
    }

    /// Hands a part of so many bytes over, if there is room for it now; `fill` writes them.
    pub fn put(&self, part: Part, bytes: usize, fill: &mut dyn FnMut(&mut [u8])) -> bool {
        // Before looking: whoever makes room after this wakes the loop.
        self.starved.store(true, Ordering::SeqCst);
        let Some(place) = self.window.take() else {
            return false;
        };
        self.starved.store(false, Ordering::SeqCst);
        self.window.fill(place, bytes, fill);
        self.push(Parcel::Part { part, place });
        true
    }

    /// Says that the prompt is still being computed, unless something else is about to be sent.
    pub fn alive(&self) {
        if self.lock().queue.is_empty() {
            self.push(Parcel::Say(Message::Alive));
        }
    }

    /// Says that every block has been handed over.
    pub fn end(&self, end: &End) {
        self.push(Parcel::Say(Message::end(end)));
    }

    /// Says that nothing will come of it.
    pub fn refuse(&self, reason: Reason, message: &str) {
        let message = message.to_owned();
        self.push(Parcel::Last(Message::Refused { reason, message }));
    }

    /// Ends it, whatever is on its way.
    pub fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.sockets.iter().for_each(Socket::close);
        drop(state);
        self.ready.notify_all();
    }

    /// The receiver gives a place back. False if it had no such place.
    pub(super) fn give_back(&self, place: u32) -> bool {
        let given = self.window.give_back(place);
        self.room();
        given
    }

    /// Sends what there is over one connection, until the transfer is closed.
    pub(super) fn run(&self, writer: &mut Writer) -> io::Result<()> {
        let socket = writer.socket().try_clone()?;
        self.lock().sockets.push(socket);
        let sent = self.send_all(writer);
        // Blocks that this connection took may be lost: the receiver asks for them again.
        self.close();
        sent
    }

    fn send_all(&self, writer: &mut Writer) -> io::Result<()> {
        while let Some(parcel) = self.next() {
            match parcel {
                Parcel::Part { part, place } => {
                    self.window.send(place, part, writer)?;
                    self.room();
                }
                Parcel::Say(message) => message.write(writer)?,
                Parcel::Last(message) => return message.write(writer),
            }
        }
        Ok(())
    }

    fn next(&self) -> Option<Parcel> {
        let state = self.lock();
        let waiting = |state: &mut State| state.queue.is_empty() && !state.closed;
        let state = self.ready.wait_while(state, waiting);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        if state.closed {
            None
        } else {
            state.queue.pop_front()
        }
    }

    fn room(&self) {
        if self.window.has_room() && self.starved.swap(false, Ordering::SeqCst) {
            (self.wake)();
        }
    }

    fn push(&self, parcel: Parcel) {
        let mut state = self.lock();
        if !state.closed {
            state.queue.push_back(parcel);
        }
        drop(state);
        self.ready.notify_one();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics half-way under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
