//! How does a node fetch the blocks that it lacks?
//!
//! The step loop writes an order; a thread of its own carries it out. It tries the endpoints, a socket on
//! this host first, makes sure that the node there is the one that was named, says what it lacks, and
//! hands every block to the step loop as it comes. When a connection fails it connects again, a few times,
//! and asks for what is still missing. Whatever becomes of it, the step loop is told once, at the end.

mod attempt;

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::auth::Identity;
use super::wire::Socket;
use super::{End, Endpoint, Reason, TRANSFERS_MAX, TransferError, TransferId};
use crate::engine::{Handle, Inbound};
use attempt::Transfer;

/// How often a transfer whose connection failed is taken up again.
const ATTEMPTS_MAX: u32 = 3;
/// Before the next attempt; twice as long before the one after it.
const ATTEMPT_PAUSE: Duration = Duration::from_millis(50);
/// Connections of one transfer over TCP: one that waits for the network does not keep the checksums of
/// the other waiting. More were no faster on loopback.
pub const STREAMS: usize = 2;

/// What is to be fetched.
#[derive(Debug)]
pub struct Order {
    /// By which the step loop knows it.
    pub number: u64,
    /// What it is.
    pub what: Wanted,
    /// The node that has it.
    pub engine_id: Arc<str>,
    /// Where that node is.
    pub endpoints: Vec<Endpoint>,
    /// Whose cache.
    pub salt: Option<Arc<str>>,
    /// Full blocks of the prompt.
    pub blocks: u32,
    /// Leading blocks that are here already.
    pub held: u32,
    /// How long nothing may come.
    pub timeout: Duration,
    /// Ends it early.
    pub control: Arc<Control>,
}

/// One kind of order or the other.
#[derive(Debug)]
pub enum Wanted {
    /// The blocks of a prompt that is prefilled for this node, and the first token.
    HandOver {
        /// Its name.
        id: TransferId,
        /// Of the prompt.
        prompt: [u8; 16],
    },
    /// What is cached of a prompt.
    Cached {
        /// The prompt's tokens in full blocks.
        tokens: Vec<u32>,
    },
}

/// Lets the step loop end an order.
#[derive(Debug, Default)]
pub struct Control {
    cancelled: AtomicBool,
    sockets: Mutex<Vec<Socket>>,
    changed: Condvar,
}

impl Control {
    /// Ends it: its connections close. Never waits for the network.
    pub fn cancel(&self) {
        let sockets = lock(&self.sockets);
        self.cancelled.store(true, Ordering::SeqCst);
        sockets.iter().for_each(Socket::close);
        drop(sockets);
        self.changed.notify_all();
    }

    fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::SeqCst)
    }

    /// Has a connection closed when the order is cancelled.
    fn watch(&self, socket: &Socket) -> Result<(), TransferError> {
        let mut sockets = lock(&self.sockets);
        if self.is_cancelled() {
            return Err(TransferError::Cancelled);
        }
        sockets.push(socket.try_clone()?);
        Ok(())
    }

    fn close_all(&self) {
        lock(&self.sockets)
            .drain(..)
            .for_each(|socket| socket.close());
    }

    /// Waits for so long, or until the order is cancelled.
    fn pause(&self, most: Duration) {
        let sockets = lock(&self.sockets);
        let waited = self
            .changed
            .wait_timeout_while(sockets, most, |_| !self.is_cancelled());
        drop(waited);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing under these locks can panic half-way.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts the thread that takes orders. It ends when nobody can give any.
pub fn start(orders: Receiver<Order>, identity: Identity, engine: Handle) -> io::Result<()> {
    let identity = Arc::new(identity);
    let running = Arc::new(AtomicUsize::new(0));
    let run = move || {
        while let Ok(order) = orders.recv() {
            let number = order.number;
            if running.load(Ordering::Acquire) >= TRANSFERS_MAX {
                let busy = TransferError::refused(Reason::Busy, "too many transfers at once");
                engine.kv_inbound(Inbound::ended(number, Err(busy)));
                continue;
            }
            running.fetch_add(1, Ordering::AcqRel);
            let (identity, engine) = (Arc::clone(&identity), engine.clone());
            let (running, at_fault) = (Arc::clone(&running), engine.clone());
            let carry_out = move || {
                let ended = carry_out(&order, &identity, &engine);
                engine.kv_inbound(Inbound::ended(order.number, ended));
                running.fetch_sub(1, Ordering::AcqRel);
            };
            let spawned = std::thread::Builder::new()
                .name("kv-fetch".into())
                .spawn(carry_out);
            if let Err(error) = spawned {
                at_fault.kv_inbound(Inbound::ended(number, Err(error.into())));
            }
        }
    };
    std::thread::Builder::new()
        .name("kv-orders".into())
        .spawn(run)
        .map(drop)
}

fn carry_out(order: &Order, identity: &Identity, engine: &Handle) -> Result<End, TransferError> {
    let mut transfer = Transfer::new(order, identity, engine);
    let mut attempt = 1;
    loop {
        let ended = transfer.attempt();
        order.control.close_all();
        match ended {
            _ if order.control.is_cancelled() => return Err(TransferError::Cancelled),
            Err(error) if error.is_passing() && attempt < ATTEMPTS_MAX => {
                tracing::info!(%error, attempt, "a KV transfer is taken up again");
                order.control.pause(ATTEMPT_PAUSE * attempt);
                attempt += 1;
            }
            ended => return ended,
        }
    }
}
