//! Who has told of a block that lies in the store which the nodes of a process share?
//!
//! Engines tell of what they have written there themselves, and the index credits it to them alone. So
//! that nobody is credited with what the store has let go of, whoever told of a block is told of its end,
//! whichever node made it go.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use simulate::engine::tiers::{Store, TierParams};

use super::numbers::Numbers;
use super::post::{Letter, Post};

/// The store with who told of what.
#[derive(Clone, Debug)]
pub(super) struct Shelf {
    pub(super) store: Store,
    numbers: Arc<Numbers>,
    tellers: Arc<Mutex<HashMap<u32, Weak<Post>>>>,
}

impl Shelf {
    /// An empty one.
    pub(super) fn new(params: TierParams, numbers: &Arc<Numbers>) -> Self {
        Self {
            store: Store::new(params),
            numbers: Arc::clone(numbers),
            tellers: Arc::default(),
        }
    }

    /// A node has written a block, and tells of it.
    pub(super) fn stored(&self, number: u32, teller: &Arc<Post>) {
        self.numbers.take_again(number);
        self.tellers().insert(number, Arc::downgrade(teller));
    }

    /// The store has let go of a block to make room for this node's.
    pub(super) fn removed(&self, number: u32) {
        let teller = self.tellers().remove(&number);
        // One that was restarted has nothing to take back.
        if let Some(teller) = teller.and_then(|teller| teller.upgrade()) {
            teller.send(Letter::Unstored(number));
        }
        self.numbers.give_back(number);
    }

    fn tellers(&self) -> MutexGuard<'_, HashMap<u32, Weak<Post>>> {
        self.tellers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
