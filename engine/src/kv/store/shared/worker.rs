//! The one thread that talks with the shared store.
//!
//! It takes whatever has come in, and serves the most urgent of it, a batch at a time: questions before
//! blocks that somebody waits for, and those before blocks that are to be put. While the store is away
//! it answers everything with "no" at once, and tends to the store when that is due. Objects are closed
//! and checked here; the step loop only copies bodies.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::time::{Duration, Instant};

use cache_index::block::BlockHash;

use super::objects::{Away, Got, Objects, Put};
use super::value::Seal;

/// How often a store that nobody asks is tended to: its client may have died.
const TEND: Duration = Duration::from_millis(500);

/// What the store is asked for.
pub(super) enum Request {
    /// How many leading blocks of a chain it has.
    Ask(Vec<BlockHash>),
    /// A block.
    Get(Parcel),
    /// To keep a block, whose body is in the buffer.
    Put(Parcel),
}

/// A block's object on its way.
pub(super) struct Parcel {
    pub(super) hash: BlockHash,
    pub(super) buffer: Vec<u8>,
}

/// What became of it.
pub(super) enum Done {
    /// It has so many; `None` if it could not be asked.
    Asked {
        chain: Vec<BlockHash>,
        held: Option<usize>,
    },
    Got {
        parcel: Parcel,
        ms: f64,
        outcome: Fetched,
    },
    Put {
        parcel: Parcel,
        ms: f64,
        outcome: Put,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fetched {
    /// The body is in the buffer, as a holder of the token put it there.
    Whole,
    /// It is not there.
    Missing,
    /// What was there is not that block.
    Damaged,
    /// The store gave it not.
    Failed,
}

/// What the step loop may know of the store without asking the thread.
#[derive(Debug, Default)]
pub(super) struct Status {
    /// Whether the store is reached.
    pub(super) up: AtomicBool,
    /// How often it was lost.
    pub(super) losses: AtomicU32,
    /// Whether the thread should end, whatever it is at.
    pub(super) ends: Arc<AtomicBool>,
}

pub(super) struct Worker {
    pub(super) objects: Box<dyn Objects>,
    pub(super) seal: Seal,
    pub(super) status: Arc<Status>,
}

#[derive(Default)]
struct Pending {
    asks: VecDeque<Vec<BlockHash>>,
    gets: VecDeque<Parcel>,
    puts: VecDeque<Parcel>,
}

impl Pending {
    fn take(&mut self, request: Request) {
        match request {
            Request::Ask(chain) => self.asks.push_back(chain),
            Request::Get(parcel) => self.gets.push_back(parcel),
            Request::Put(parcel) => self.puts.push_back(parcel),
        }
    }

    fn is_empty(&self) -> bool {
        self.asks.is_empty() && self.gets.is_empty() && self.puts.is_empty()
    }

    /// Everything, unserved.
    fn refuse(&mut self) -> Vec<Done> {
        let asks = self
            .asks
            .drain(..)
            .map(|chain| Done::Asked { chain, held: None });
        let gets = self.gets.drain(..).map(|parcel| Done::Got {
            parcel,
            ms: 0.0,
            outcome: Fetched::Failed,
        });
        let puts = self.puts.drain(..).map(|parcel| Done::Put {
            parcel,
            ms: 0.0,
            outcome: Put::Failed(0),
        });
        asks.chain(gets).chain(puts).collect()
    }
}

impl Worker {
    /// Serves requests until nobody can send any, or the node ends. Nobody waits for room among the
    /// answers: there is a place for every buffer and every question.
    pub(super) fn run(mut self, requests: &Receiver<Request>, done: &SyncSender<Done>) {
        let mut pending = Pending::default();
        while !self.status.ends.load(Ordering::Relaxed) {
            let away = self.tend();
            let answers = if away.is_some() {
                pending.refuse()
            } else {
                self.serve(&mut pending)
            };
            for answer in answers {
                if done.send(answer).is_err() {
                    return;
                }
            }
            if pending.is_empty() {
                match requests.recv_timeout(away.unwrap_or(TEND).min(TEND)) {
                    Ok(request) => pending.take(request),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
            pending_all(&mut pending, requests);
        }
    }

    fn tend(&mut self) -> Option<Duration> {
        let away = self.objects.tend();
        if away.is_some() {
            self.lost();
        } else {
            self.status.up.store(true, Ordering::Relaxed);
        }
        away
    }

    fn lost(&self) {
        if self.status.up.swap(false, Ordering::Relaxed) {
            self.status.losses.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// What came, if the store could be asked; that it could not has been logged where it was noticed.
    fn heard<T>(&self, answer: Result<T, Away>) -> Option<T> {
        if answer.is_err() {
            self.lost();
        }
        answer.ok()
    }

    /// Serves one batch of what is most urgent.
    fn serve(&mut self, pending: &mut Pending) -> Vec<Done> {
        let most = self.objects.batch();
        if let Some(chain) = pending.asks.pop_front() {
            return vec![self.ask(chain)];
        }
        if !pending.gets.is_empty() {
            let count = most.min(pending.gets.len());
            return self.get(pending.gets.drain(..count).collect());
        }
        let count = most.min(pending.puts.len());
        if count == 0 {
            return Vec::new();
        }
        self.put(pending.puts.drain(..count).collect())
    }

    fn ask(&mut self, chain: Vec<BlockHash>) -> Done {
        let keys: Vec<_> = chain.iter().map(|hash| self.seal.key_of(*hash)).collect();
        let held = self.objects.exist(&keys);
        let held = held.map(|held| held.iter().take_while(|held| **held).count());
        let held = self.heard(held);
        Done::Asked { chain, held }
    }

    fn get(&mut self, mut parcels: Vec<Parcel>) -> Vec<Done> {
        let keys = self.keys(&parcels);
        let buffers = parcels.iter_mut().map(|parcel| &mut parcel.buffer[..]);
        let mut wanted: Vec<_> = keys.iter().map(String::as_str).zip(buffers).collect();
        let started = Instant::now();
        let outcomes = self.objects.get(&mut wanted);
        let outcomes = self.heard(outcomes).unwrap_or_default();
        let ms = share_of(started, parcels.len());
        let mut damaged = Vec::new();
        let mut done = Vec::with_capacity(parcels.len());
        for (number, parcel) in parcels.into_iter().enumerate() {
            let key = &keys[number];
            let outcome = match outcomes.get(number) {
                Some(Got::Found(bytes)) => match parcel.buffer.get(..*bytes) {
                    Some(object) if self.seal.fits(key, object) => Fetched::Whole,
                    _ => Fetched::Damaged,
                },
                Some(Got::Missing) => Fetched::Missing,
                Some(Got::Failed(_)) | None => Fetched::Failed,
            };
            if outcome == Fetched::Damaged {
                tracing::warn!(key, "an object of the shared store is no block of ours");
                damaged.push(key);
            }
            done.push(Done::Got {
                parcel,
                ms,
                outcome,
            });
        }
        for key in damaged {
            // Else it would be in the way of the block that is put there next.
            let removed = self.objects.remove(key);
            self.heard(removed);
        }
        done
    }

    fn put(&mut self, mut parcels: Vec<Parcel>) -> Vec<Done> {
        let keys = self.keys(&parcels);
        let started = Instant::now();
        for (parcel, key) in parcels.iter_mut().zip(&keys) {
            self.seal.close(key, &mut parcel.buffer);
        }
        let buffers = parcels.iter().map(|parcel| &parcel.buffer[..]);
        let objects: Vec<_> = keys.iter().map(String::as_str).zip(buffers).collect();
        let outcomes = self.objects.put(&objects);
        let outcomes = self.heard(outcomes).unwrap_or_default();
        let ms = share_of(started, parcels.len());
        let outcomes = outcomes
            .into_iter()
            .chain(std::iter::repeat(Put::Failed(0)));
        let done = parcels.into_iter().zip(outcomes);
        done.map(|(parcel, outcome)| Done::Put {
            parcel,
            ms,
            outcome,
        })
        .collect()
    }

    fn keys(&self, parcels: &[Parcel]) -> Vec<String> {
        let keys = parcels.iter().map(|parcel| self.seal.key_of(parcel.hash));
        keys.collect()
    }
}

fn pending_all(pending: &mut Pending, requests: &Receiver<Request>) {
    while let Ok(request) = requests.try_recv() {
        pending.take(request);
    }
}

fn share_of(started: Instant, blocks: usize) -> f64 {
    started.elapsed().as_secs_f64() * 1e3 / blocks.max(1) as f64
}
