//! How does one node tell another something that changes it?
//!
//! By a letter, which the other opens when it looks next: no node holds another's lock.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::handover::TransferId;

/// Something that a node is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Letter {
    /// What it holds for this transfer has all come where it was wanted.
    Taken(TransferId),
    /// Nobody waits any more for something that it holds: there may be a deadline to keep.
    LeftAlone,
    /// The store has let go of a block that it has told of.
    Unstored(u32),
}

/// What a node was told and has not seen.
#[derive(Debug, Default)]
pub(super) struct Post {
    letters: Mutex<Vec<Letter>>,
    /// There is something.
    pub(super) came: Notify,
}

impl Post {
    pub(super) fn send(&self, letter: Letter) {
        self.letters().push(letter);
        self.came.notify_one();
    }

    pub(super) fn open(&self) -> Vec<Letter> {
        std::mem::take(&mut *self.letters())
    }

    fn letters(&self) -> MutexGuard<'_, Vec<Letter>> {
        self.letters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
