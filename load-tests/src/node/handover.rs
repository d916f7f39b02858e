//! Where do the two nodes of one request meet?
//!
//! In a table that the nodes of a process share, under the transfer's name, whichever comes first. The
//! node that computes the prompt makes an [`Offer`]; the one that answers takes it, once, as a [`Claim`].
//! An offer that is dropped (its node died, its request ended, its deadline passed) is seen by the claim.
//! KV itself is nothing here but its size, so that a process has no other way to another: nodes of
//! different processes cannot share a request.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};

use super::post::{Letter, Post};

/// Names that are remembered, so that none is used twice.
const NAMES_MAX: usize = 65_536;

/// A transfer's name.
pub(super) type TransferId = u128;

/// Between whom, and of what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct About {
    /// The engine id of the node that computes.
    pub(super) sender: String,
    /// The engine id of the node that answers.
    pub(super) receiver: String,
    /// Stands for prompt and scope.
    pub(super) prompt: u64,
}

/// A prompt that has been computed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Computed {
    /// When.
    pub(super) at: Instant,
    /// For how long, in model time.
    pub(super) took_ms: f64,
    /// Tokens that were not.
    pub(super) cached_tokens: u32,
}

/// Why nothing comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NoKv {
    #[error("nobody offered it in time")]
    Late,
    #[error("it is offered to another node, or of another prompt or scope")]
    Foreign,
    #[error("it was taken before")]
    Taken,
    #[error("the node that computed it does not hold it any more")]
    Gone,
}

/// Where the nodes of a process meet.
pub(super) struct Handovers {
    /// Where its nodes' KV is fetched, as others are told.
    pub(super) endpoint: String,
    book: Mutex<Book>,
    offered: Notify,
}

#[derive(Default)]
struct Book {
    entries: HashMap<TransferId, Entry>,
    order: VecDeque<TransferId>,
}

struct Entry {
    about: About,
    stage: watch::Receiver<Option<Computed>>,
    post: Arc<Post>,
    was_claimed: bool,
    is_awaited: Arc<AtomicBool>,
}

/// One node's half: what it computes is for another. Dropped, it is no longer to be had.
#[derive(Debug)]
pub(super) struct Offer {
    pub(super) id: TransferId,
    /// How long it is held once it is computed.
    pub(super) timeout: Duration,
    stage: watch::Sender<Option<Computed>>,
    is_awaited: Arc<AtomicBool>,
}

/// The other node's half. Dropped, the offer is held no longer than until its deadline.
pub(super) struct Claim {
    id: TransferId,
    is_awaited: Arc<AtomicBool>,
    stage: watch::Receiver<Option<Computed>>,
    post: Arc<Post>,
}

impl Handovers {
    pub(super) fn new() -> Self {
        let (process, own) = (std::process::id(), rand::random::<u32>());
        Self {
            endpoint: format!("simulated:{process}-{own:08x}"),
            book: Mutex::default(),
            offered: Notify::new(),
        }
    }

    /// Offers what a node will compute; none if the name was used before.
    pub(super) fn offer(
        &self,
        (id, timeout): (TransferId, Duration),
        about: About,
        post: &Arc<Post>,
    ) -> Option<Offer> {
        let (stage, seen) = watch::channel(None);
        let is_awaited = Arc::new(AtomicBool::new(false));
        {
            let mut book = self.book();
            if book.entries.contains_key(&id) {
                return None;
            }
            if book.order.len() == NAMES_MAX
                && let Some(oldest) = book.order.pop_front()
            {
                book.entries.remove(&oldest);
            }
            book.order.push_back(id);
            let entry = Entry {
                about,
                stage: seen,
                post: Arc::clone(post),
                was_claimed: false,
                is_awaited: Arc::clone(&is_awaited),
            };
            book.entries.insert(id, entry);
        }
        self.offered.notify_waiters();
        Some(Offer {
            id,
            timeout,
            stage,
            is_awaited,
        })
    }

    /// Takes an offer, once it is made.
    pub(super) async fn claim(
        &self,
        (id, timeout): (TransferId, Duration),
        about: &About,
    ) -> Result<Claim, NoKv> {
        let deadline = tokio::time::Instant::now() + timeout;
        loop {
            let offered = self.offered.notified();
            if let Some(claim) = self.try_claim(id, about) {
                return claim;
            }
            tokio::time::timeout_at(deadline, offered)
                .await
                .map_err(|_| NoKv::Late)?;
        }
    }

    fn try_claim(&self, id: TransferId, about: &About) -> Option<Result<Claim, NoKv>> {
        let mut book = self.book();
        let entry = book.entries.get_mut(&id)?;
        if entry.about != *about {
            return Some(Err(NoKv::Foreign));
        }
        if std::mem::replace(&mut entry.was_claimed, true) {
            return Some(Err(NoKv::Taken));
        }
        entry.is_awaited.store(true, Ordering::Relaxed);
        Some(Ok(Claim {
            id,
            is_awaited: Arc::clone(&entry.is_awaited),
            stage: entry.stage.clone(),
            post: Arc::clone(&entry.post),
        }))
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Offer {
    /// The prompt is computed; the offer is to be kept until it is taken.
    pub(super) fn computed(&self, computed: Computed) {
        self.stage.send_replace(Some(computed));
    }

    /// Whether a node waits for it: then it is held for as long as that takes.
    pub(super) fn is_awaited(&self) -> bool {
        self.is_awaited.load(Ordering::Relaxed)
    }
}

impl Claim {
    /// Waits for the prompt to be computed.
    pub(super) async fn computed(&mut self) -> Result<Computed, NoKv> {
        let seen = self.stage.wait_for(Option::is_some).await;
        seen.ok().and_then(|stage| *stage).ok_or(NoKv::Gone)
    }

    /// Returns once the offer is gone.
    pub(super) fn gone(&self) -> impl Future<Output = ()> + use<> {
        let mut stage = self.stage.clone();
        async move { while stage.changed().await.is_ok() {} }
    }

    /// Everything has come: the other node need not hold it any longer.
    pub(super) fn taken(self) {
        self.post.send(Letter::Taken(self.id));
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.is_awaited.store(false, Ordering::Relaxed);
        self.post.send(Letter::LeftAlone);
    }
}
